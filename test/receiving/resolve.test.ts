// Whose an envelope recipient is: the precedence of the routes, on a real database.
import type { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { findPostmaster, localKeyOf, resolveRecipient } from '../../src/receiving/resolve.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

interface NewRoute {
  readonly type: 'exact' | 'alias' | 'catch_all';
  readonly local: string | null;
  readonly target: string;
}

const test = suite<{ bench: Bench; domain: string; domainId: string }>('resolve');

test.before(async (context) => {
  context.bench = await openQueue();
});
test.before.each(async (context) => {
  context.domainId = newId();
  context.domain = `d${context.domainId.slice(-12)}.test`;
  await addDomain(context.bench, context.domainId, context.domain);
});
test.after(({ bench }) => bench.stop());

async function addDomain(
  { store, tenantId }: Bench,
  id: string,
  name: string,
  isVerified = true,
): Promise<void> {
  await store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, receiving, receiving_verified)
     values ($1, $2, $3, 'verified', true, $4)`,
    [tenantId, id, name, isVerified],
  );
}

async function addRoute(bench: Bench, domainId: string, route: NewRoute): Promise<string> {
  const id = newId();
  await bench.store.pool.query(
    `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
       target_local_part, created_at, updated_at)
     values ($1, $2, $3, $4, $5, $6, $7, now(), now())`,
    [
      bench.tenantId,
      id,
      domainId,
      route.type,
      route.local,
      route.local === null ? '' : localKeyOf(route.local),
      route.target,
    ],
  );
  return id;
}

/** `kind status local_part target_address`, which is all that these routes differ in. */
async function decided({ store }: Bench, address: string): Promise<string> {
  const resolution = await resolveRecipient(store.pool, address);
  if (resolution.kind === 'not_ours') return 'not_ours';
  const { decision } = resolution.receiver;
  return `${resolution.kind} ${decision.status} ${decision.local_part} ${decision.target_address}`;
}

test('exact goes before alias, subaddress, catch-all', async ({ bench, domain, domainId }) => {
  const add = (type: NewRoute['type'], local: string | null, target: string): Promise<string> =>
    addRoute(bench, domainId, { type, local, target });
  await add('catch_all', null, 'rest');
  await add('alias', 'Sales', 'sales-team');
  await add('exact', 'sales', 'sales');
  await add('alias', 'info', 'desk');
  await add('exact', 'Ada', 'Ada');
  await add('alias', 'ada+news', 'reader');
  await add('exact', 'ada+bank', 'vault');
  await add('alias', 'ada+bank', 'not-this');
  const all = async (locals: readonly string[]): Promise<Record<string, string>> =>
    Object.fromEntries(
      await Promise.all(
        locals.map(async (local) => [local, await decided(bench, `${local}@${domain}`)] as const),
      ),
    );
  assert.equal(
    await all(['SALES', 'sales+x', 'Info', 'info+a+b', 'ada', 'aDa+News', 'ada+bank', 'ada+shop']),
    {
      SALES: `taken exact sales sales@${domain}`,
      'sales+x': `taken exact sales sales@${domain}`,
      Info: `taken alias info desk@${domain}`,
      'info+a+b': `taken alias info desk@${domain}`,
      ada: `taken exact Ada Ada@${domain}`,
      'aDa+News': `taken alias ada+news reader@${domain}`,
      'ada+bank': `taken exact ada+bank vault@${domain}`,
      'ada+shop': `taken exact Ada Ada@${domain}`,
    },
  );
  assert.equal(await all(['nobody', '+x', 'ad+a', 'ada.news', '"a+b"', '"Ada"']), {
    nobody: `taken catch_all null rest@${domain}`,
    '+x': `taken catch_all null rest@${domain}`,
    'ad+a': `taken catch_all null rest@${domain}`,
    'ada.news': `taken catch_all null rest@${domain}`,
    '"a+b"': `taken catch_all null rest@${domain}`,
    '"Ada"': `taken exact Ada Ada@${domain}`,
  });
});

test('what no route is for is unrouteable, except the postmaster', async (context) => {
  const { bench, domain, domainId } = context;
  const routeId = await addRoute(bench, domainId, { type: 'exact', local: 'a', target: 'a' });
  assert.is(await decided(bench, `b@${domain}`), 'unrouteable unrouteable null null');
  assert.is(await decided(bench, `PostMaster@${domain}`), 'taken unrouteable null null');
  assert.is(await decided(bench, `postmaster+x@${domain}`), 'unrouteable unrouteable null null');
  const found = await resolveRecipient(bench.store.pool, `A+1@${domain.toUpperCase()}`);
  assert.equal(found, {
    kind: 'taken',
    receiver: {
      tenantId: bench.tenantId,
      domainId,
      recipient: `A+1@${domain.toUpperCase()}`,
      decision: {
        recipient: `A+1@${domain.toUpperCase()}`,
        status: 'exact',
        route_id: routeId,
        route_type: 'exact',
        local_part: 'a',
        domain_id: domainId,
        target_address: `a@${domain}`,
        forwarding_rule_id: null,
      },
      inboundDmarc: 'reject',
    },
  });
});

test('the rule of the route is named whatever its status', async ({ bench, domain, domainId }) => {
  const routeId = await addRoute(bench, domainId, { type: 'exact', local: 'a', target: 'a' });
  const ruleId = newId();
  await bench.store.pool.query(
    `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
       destinations, status, created_at, updated_at)
     values ($1, $2, $3, $4, $5, $6, '["x@outside.test"]', 'disabled', now(), now())`,
    [bench.tenantId, ruleId, domainId, domain, routeId, `a@${domain}`],
  );
  const found = await resolveRecipient(bench.store.pool, `a@${domain}`);
  assert.is(found.kind === 'taken' && found.receiver.decision.forwarding_rule_id, ruleId);
});

test('a domain without routes takes every local part', async ({ bench, domain }) => {
  for (const local of ['a', 'b+c', '..odd..', '"two words"', 'jürgen']) {
    assert.is(await decided(bench, `${local}@${domain}`), 'taken unrouteable null null');
  }
});

test('what is no verified receiving domain is not ours', async ({ bench, domain }) => {
  const [off, unverified] = [`off.${domain}`, `new.${domain}`];
  await addDomain(bench, newId(), unverified, false);
  const offId = newId();
  await addDomain(bench, offId, off);
  await addRoute(bench, offId, { type: 'catch_all', local: null, target: 'a' });
  await bench.store.pool.query('update sending_domain set receiving = false where id = $1', [
    offId,
  ]);
  for (const address of [
    `a@${off}`,
    `a@${unverified}`,
    `a@sub.${domain}`,
    `@${domain}`,
    ` @${domain}`,
    `a\0b@${domain}`,
    domain,
    'a',
    '',
    `a@${domain}.`,
  ]) {
    assert.is(await decided(bench, address), 'not_ours', JSON.stringify(address));
  }
});

test('a domain that is being verified is awaited, unless somebody has it already', async (context) => {
  const { bench, domain } = context;
  const [name, id] = [`soon.${domain}`, newId()];
  await addDomain(bench, id, name, false);
  const resolve = () => resolveRecipient(bench.store.pool, `a@${name}`);
  assert.equal(await resolve(), { kind: 'not_ours', isAwaited: false });
  await bench.store.pool.query('update sending_domain set next_check_at = now() where id = $1', [
    id,
  ]);
  assert.equal(await resolve(), { kind: 'not_ours', isAwaited: true });
  const holder = newId();
  await bench.store.pool.query(`insert into tenant (id, name) values ($1, 'holder')`, [holder]);
  await addDomain({ ...bench, tenantId: holder }, newId(), name);
  const found = await resolve();
  assert.is(found.kind === 'taken' && found.receiver.tenantId, holder);
});

test('letters beyond ASCII are compared in one form', async ({ bench, domain, domainId }) => {
  await addRoute(bench, domainId, { type: 'exact', local: 'J\u00fcrgen', target: 'j' });
  const taken = `taken exact J\u00fcrgen j@${domain}`;
  assert.is(await decided(bench, `j\u00dcrgen@${domain}`), taken);
  assert.is(await decided(bench, `ju\u0308rgen+x@${domain}`), taken);
  assert.is(await decided(bench, `jurgen@${domain}`), 'unrouteable unrouteable null null');
});

test('one question is asked, and it reads an index', async ({ bench, domain, domainId }) => {
  await bench.store.pool.query(
    `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
       target_local_part, created_at, updated_at)
     select $1, gen_random_uuid(), $2, 'exact', 'u' || n, 'u' || n, 'u' || n, now(), now()
     from generate_series(1, 10000) n`,
    [bench.tenantId, domainId],
  );
  const client = await bench.store.pool.connect();
  try {
    let questions = 0;
    const counting = {
      query: ((...asked: Parameters<typeof client.query>) => {
        questions += 1;
        return client.query(...asked);
      }) as Pool['query'],
    };
    const rowsRead = async (): Promise<number> => {
      await client.query('select pg_stat_force_next_flush()');
      const { rows } = await client.query<{ seq_tup_read: string }>(
        `select seq_tup_read from pg_stat_user_tables where relname = 'receiving_route'`,
      );
      return Number(rows[0]!.seq_tup_read);
    };
    const before = await rowsRead();
    for (let n = 1; n <= 20; n += 1) {
      const found = await resolveRecipient(counting, `U${n * 500}+x@${domain}`);
      assert.is(found.kind === 'taken' && found.receiver.decision.local_part, `u${n * 500}`);
    }
    assert.is(questions, 20);
    assert.is((await rowsRead()) - before, 0, 'no look at the whole table, also by a kept plan');
    await client.query('select count(target_local_part) from receiving_route');
    assert.ok((await rowsRead()) - before >= 10_000, 'such a look would have been seen');
  } finally {
    client.release();
  }
});

test('the postmaster of the host is that of its domain', async ({ bench, domain }) => {
  const read = async (hostname: string, homeDomain: string | null): Promise<string | null> =>
    (await findPostmaster(bench.store.pool, { hostname, homeDomain }))?.recipient ?? null;
  assert.is(await read(`mx.mail.${domain}`, null), `postmaster@${domain}`);
  assert.is(await read('mx.elsewhere.test', null), null);
  assert.is(await read('mx.elsewhere.test', domain), `postmaster@${domain}`);
});

test.run();
