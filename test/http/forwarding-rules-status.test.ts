// Which forwarding rules may be active, and what makes them invalid: asked over the API.
import { Client, type ClientBase } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { RULES_PATH, rulesOf, type Page, type Rules } from '../support/forwarding-rules.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { onDatabase } from '../support/second-tenant.ts';
import { assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;

const PATH = RULES_PATH;
const HOSTNAME = 'mx.host.test';
const noDomain = { status: 404, code: 'not_found', says: /^Domain not found$/ };

const test = suite<{ domain: string; domainId: string; routeId: string }>('forwarding rule status');
let app: App;
let rules: Rules;
let count = 0;
test.before(async () => {
  app = await startApp({ MAILSTEAD_HOSTNAME: HOSTNAME });
  rules = rulesOf(app);
});
test.before.each(async (context) => {
  context.domain = `d${(count += 1)}.test`;
  context.domainId = await receivingDomain(app, context.domain);
  context.routeId = await rules.addRoute(context.domainId);
});
test.after(() => app.stop());

test('an active rule never leads back, a disabled one may be saved', async (context) => {
  const { domain, domainId, routeId } = context;
  const loop = (...paths: readonly string[]) => ({ status: 422, code: 'forwarding_loop', paths });
  const back = [`TEAM@${domain}`, `In@${domain.toUpperCase()}`, `other+x@${domain}`];
  for (const [number, destination] of back.entries()) {
    const body = { route_id: routeId, destinations: ['a@outside.test', destination] };
    assertRefused(await app.call('POST', PATH, { body }), {
      ...loop('destinations.1'),
      says: [/route's own target/, /that the route matches/, /where the mail is received/][number]!,
    });
  }
  const { body: none } = await app.call<Page>('GET', `${PATH}?domain_id=${domainId}`);
  assert.equal(none.data, [], 'nothing was made');
  const { id } = await rules.create({ route_id: routeId, destinations: back, status: 'disabled' });
  const patch = (body: Fields) => app.call('PATCH', `${PATH}/${String(id)}`, { body });
  const all = loop('destinations.0', 'destinations.1', 'destinations.2');
  assertRefused(await patch({ status: 'active' }), all);
  assert.is((await rules.read(id))['status'], 'disabled');
  // A name that only ends like the domain, and one below it, are others.
  const fine = [`a@x${domain}`, `a@sub.${domain}`];
  await rules.change(id, { status: 'active', destinations: fine });
  assertRefused(await patch({ destinations: [back[2]] }), loop('destinations.0'));
  assert.equal((await rules.read(id))['destinations'], fine);
  await rules.change(id, { status: 'disabled', destinations: back });
  assertRefused(await patch({ status: 'active' }), all);
});

test('another receiving domain of the tenant is a destination like any other', async (context) => {
  await receivingDomain(app, `next${count}.test`);
  await rules.create({ route_id: context.routeId, destinations: [`in@next${count}.test`] });
});

test('where bounces come home nobody reads mail', async ({ domain, routeId }) => {
  const homes = [`x@send.${domain}`, `x@${HOSTNAME}`, `SRS0=ab=cd=e=f@${HOSTNAME}`];
  for (const status of ['active', 'disabled']) {
    const body = { route_id: routeId, destinations: homes, status };
    assertRefused(await app.call('POST', PATH, { body }), {
      status: 422,
      code: 'validation_error',
      paths: ['destinations.0', 'destinations.1', 'destinations.2'],
    });
  }
  await receivingDomain(app, HOSTNAME);
  const path = `b+0${'a'.repeat(45)}@${HOSTNAME}`;
  const body = {
    route_id: routeId,
    destinations: [`x@${HOSTNAME}`, path, `srs1=x==y@${HOSTNAME}`],
  };
  assertRefused(await app.call('POST', PATH, { body }), {
    status: 422,
    code: 'validation_error',
    paths: ['destinations.1', 'destinations.2'],
  });
});

test('a rule shows where its route leads now', async ({ domain, routeId }) => {
  const { id } = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const body = { local_part: 'elsewhere', target_local_part: 'desk' };
  assert.is((await app.call('PATCH', `/receiving/routes/${routeId}`, { body })).status, 200);
  const { route_target_address: target, status } = await rules.read(id);
  assert.equal([target, status], [`desk@${domain}`, 'active']);
});

test('without its route a rule is invalid, and says so', async ({ domain, domainId, routeId }) => {
  const destinations = ['a@outside.test'];
  const { id } = await rules.create({ route_id: routeId, destinations });
  const second = await rules.addRoute(domainId, 'second');
  const disabled = await rules.create({ route_id: second, destinations, status: 'disabled' });
  for (const route of [routeId, second]) await app.call('DELETE', `/receiving/routes/${route}`);
  for (const one of [id, disabled['id']]) {
    assert.equal(await rules.standing(one), ['invalid', 'The route was deleted.']);
    assert.equal((await rules.read(one))['destinations'], destinations);
  }
  const patch = (body: Fields) => app.call('PATCH', `${PATH}/${String(id)}`, { body });
  assertRefused(await patch({ status: 'active' }), {
    status: 422,
    code: 'validation_error',
    paths: ['status'],
    says: /its route was deleted/,
  });
  const edited = await rules.change(id, { destinations: [`in@${domain}`] });
  assert.equal(edited['status'], 'invalid', 'other fields may change');
  assert.is((await rules.change(id, { status: 'disabled' }))['invalid_reason'], null);
  const { body } = await app.call<Page>('GET', `${PATH}?domain_id=${domainId}`);
  assert.equal(
    body.data.map(({ status }) => status),
    ['invalid', 'disabled'],
  );
});

test('an invalid rule whose route and domain are deleted says so', async () => {
  const domainId = await receivingDomain(app, 'twice.test');
  const ids: string[] = [];
  const routes = [await rules.addRoute(domainId, 'one'), await rules.addRoute(domainId, 'two')];
  for (const route_id of routes) {
    ids.push(String((await rules.create({ route_id, destinations: ['a@outside.test'] }))['id']));
  }
  const body = { capabilities: { receiving: 'disabled' } };
  assert.is((await app.call('PATCH', `/domains/${domainId}`, { body })).status, 200);
  for (const id of ids) assert.match(String((await rules.standing(id))[1]), /switched off/);
  assert.is((await app.call('DELETE', `/receiving/routes/${routes[0]!}`)).status, 200);
  assert.equal(await rules.standing(ids[0]), ['invalid', 'The route was deleted.']);
  assert.match(String((await rules.standing(ids[1]))[1]), /switched off/);
  assert.is((await app.call('DELETE', `/domains/${domainId}`)).status, 200);
  assert.equal(await rules.standing(ids[1]), ['invalid', 'The domain twice.test was deleted.']);
});

test('without its domain a rule is invalid, and is in the list of all', async (context) => {
  const { domain, domainId, routeId } = context;
  const { id } = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  assert.is((await app.call('DELETE', `/domains/${domainId}`)).status, 200);
  assert.equal(await rules.standing(id), ['invalid', `The domain ${domain} was deleted.`]);
  const { body } = await app.call<Page>('GET', PATH);
  assert.equal(
    body.data.filter((rule) => rule['id'] === id).map((rule) => rule['domain']),
    [domain],
  );
  assertRefused(await app.call('GET', `${PATH}?domain_id=${domainId}`), noDomain);
  const patched = await app.call('PATCH', `${PATH}/${String(id)}`, { body: { status: 'active' } });
  assertRefused(patched, {
    status: 422,
    code: 'validation_error',
    paths: ['status'],
    says: /its domain was deleted/,
  });
  assert.is((await app.call('DELETE', `${PATH}/${String(id)}`)).status, 200);
});

test('where nothing is received any more, rules are invalid until somebody wants them', async (context) => {
  const { domain, domainId, routeId } = context;
  const { id } = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const receiving = async (word: string): Promise<void> => {
    const body = { capabilities: { receiving: word } };
    assert.is((await app.call('PATCH', `/domains/${domainId}`, { body })).status, 200);
    await app.call('POST', `/domains/${domainId}/verify`);
  };
  const activate = () => app.call('PATCH', `${PATH}/${String(id)}`, { body: { status: 'active' } });
  await receiving('disabled');
  assert.equal(await rules.standing(id), ['invalid', `Receiving was switched off for ${domain}.`]);
  assertRefused(await activate(), { status: 422, code: 'receiving_disabled', paths: ['status'] });
  const other = await addRouteByHand(domainId);
  const refused = await app.call('POST', PATH, {
    body: { route_id: other, destinations: ['a@outside.test'] },
  });
  assertRefused(refused, { status: 422, code: 'receiving_disabled', paths: ['status'] });
  await rules.create({ route_id: other, destinations: ['a@outside.test'], status: 'disabled' });
  await receiving('enabled');
  assert.is((await rules.read(id))['status'], 'invalid', 'nothing is forwarded again unasked');
  assert.is((await activate()).status, 200);
  assert.equal(await rules.standing(id), ['active', null]);

  await rules.change(id, { status: 'disabled' });
  await onDatabase(app, (pool) =>
    pool.query('update sending_domain set receiving_verified = false where id = $1', [domainId]),
  );
  assertRefused(await activate(), { status: 422, code: 'domain_not_verified', paths: ['status'] });
  await app.call('POST', `/domains/${domainId}/verify`);
  assert.is((await activate()).status, 200);
});

/** The API makes none where nothing is received. */
function addRouteByHand(domainId: string): Promise<string> {
  const id = newId();
  return onDatabase(app, async (pool) => {
    await pool.query(
      `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
         target_local_part, created_at, updated_at)
       select tenant_id, $2, id, 'exact', 'h', 'h', 'h', now(), now()
       from sending_domain where id = $1`,
      [domainId, id],
    );
    return id;
  });
}

test('a rule that loops made invalid counts from nothing when it is active again', async (context) => {
  const { id } = await rules.create({
    route_id: context.routeId,
    destinations: ['a@outside.test'],
  });
  const loops = (): Promise<unknown[]> =>
    onDatabase(app, async (pool) => {
      const { rows } = await pool.query<Fields>(
        'select loops, loops_since from forwarding_rule where id = $1',
        [id],
      );
      return Object.values(rows[0]!);
    });
  await onDatabase(app, (pool) =>
    pool.query(
      `update forwarding_rule set status = 'invalid', invalid_reason = 'Round and round.', loops = 5,
         loops_since = now() where id = $1`,
      [id],
    ),
  );
  assert.equal(await rules.standing(id), ['invalid', 'Round and round.']);
  await rules.change(id, { destinations: ['b@outside.test'] });
  assert.is((await loops())[0], 5);
  await rules.change(id, { status: 'active' });
  assert.equal(await loops(), [0, null]);
});

/** Begins a transaction; `meanwhile` is asked when it holds its locks, and answered after its commit. */
async function during<T>(
  hold: (client: ClientBase) => Promise<unknown>,
  meanwhile: () => Promise<T>,
  last: (client: ClientBase) => Promise<unknown> = () => Promise.resolve(),
): Promise<T> {
  const client = new Client({ connectionString: app.databaseUrl });
  await client.connect();
  try {
    const { rows } = await client.query<{ pid: number }>('select pg_backend_pid() as pid');
    await client.query('begin');
    await hold(client);
    const answer = meanwhile();
    await onDatabase(app, (pool) =>
      until(
        () =>
          pool.query('select 1 from pg_stat_activity where $1 = any (pg_blocking_pids(pid))', [
            rows[0]!.pid,
          ]),
        ({ rowCount }) => rowCount === 1,
      ),
    );
    await last(client);
    await client.query('commit');
    return await answer;
  } finally {
    await client.end();
  }
}

test('a rule does not become active while its domain or its route goes', async (context) => {
  const { domainId, routeId } = context;
  const destinations = ['a@outside.test'];
  const { id } = await rules.create({ route_id: routeId, destinations, status: 'disabled' });
  const bare = await rules.addRoute(domainId, 'bare');
  const activate = () => app.call('PATCH', `${PATH}/${String(id)}`, { body: { status: 'active' } });
  const make = () => app.call('POST', PATH, { body: { route_id: bare, destinations } });
  const off = (client: ClientBase) =>
    client.query('update sending_domain set receiving_verified = false where id = $1', [domainId]);
  const unverified = { status: 422, code: 'domain_not_verified', paths: ['status'] };
  assertRefused(await during(off, activate), unverified);
  await app.call('POST', `/domains/${domainId}/verify`);
  assertRefused(await during(off, make), unverified);
  await app.call('POST', `/domains/${domainId}/verify`);
  const gone = (route: string) => (client: ClientBase) =>
    client.query('delete from receiving_route where id = $1', [route]);
  assert.is((await during(gone(routeId), activate)).status, 422);
  assert.is((await during(gone(bare), make)).status, 404);
});

test('a route and its domain may change at the same time', async ({ domainId, routeId }) => {
  const { id } = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const { status } = await during(
    (client) => client.query('select 1 from receiving_route where id = $1 for update', [routeId]),
    () => app.call('DELETE', `/domains/${domainId}`),
    (client) => client.query('update forwarding_rule set loops = 0 where id = $1', [id]),
  );
  assert.is(status, 200);
  assert.is((await rules.read(id))['status'], 'invalid');
});

test('whatever happens at the same time, no rule stays active that nothing carries', async (context) => {
  const { domainId, routeId } = context;
  const made: Fields[] = [];
  for (const local of ['x', 'y', 'z']) {
    const route = await rules.addRoute(domainId, local);
    made.push(await rules.create({ route_id: route, destinations: ['a@outside.test'] }));
  }
  const kept = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const call = (method: string, path: string, body?: Fields) =>
    app.call(method, path, body === undefined ? {} : { body });
  const receiving = (word: string) =>
    call('PATCH', `/domains/${domainId}`, { capabilities: { receiving: word } });
  const storm = (end: () => readonly Promise<Answer>[]) =>
    Promise.all([
      ...[...made, kept].flatMap(({ id, route_id: route }) => [
        call('PATCH', `${PATH}/${String(id)}`, { status: 'active' }),
        call('PATCH', `/receiving/routes/${String(route)}`, { target_local_part: 'desk' }),
        call('PATCH', `${PATH}/${String(id)}`, { status: 'active' }),
      ]),
      ...end(),
    ]);
  const answers = [
    ...(await storm(() => [receiving('disabled')])),
    ...(await storm(() => [receiving('enabled'), call('POST', `/domains/${domainId}/verify`)])),
    ...(await storm(() =>
      made.map(({ route_id: route }) => call('DELETE', `/receiving/routes/${String(route)}`)),
    )),
    ...(await storm(() => [call('DELETE', `/domains/${domainId}`)])),
  ];
  const faults = answers.filter(({ status }) => ![200, 404, 422].includes(status));
  assert.equal(faults, []);
  for (const { id } of [...made, kept]) assert.is((await rules.read(id))['status'], 'invalid');
});

test.run();
