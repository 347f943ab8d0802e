// Forwarding rules over the API: made, read, changed, deleted, and the latest attempt of each.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { DESTINATIONS_MAX, RULES_PER_TENANT_MAX } from '../../src/receiving/rules.ts';
import { newId } from '../../src/store/id.ts';
import { startApp, type App } from '../support/app.ts';
import {
  assertPages,
  RULES_PATH,
  rulesOf,
  type Page,
  type Rules,
} from '../support/forwarding-rules.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;

const PATH = RULES_PATH;
const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const UNKNOWN_ID = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const notFound = { status: 404, code: 'not_found', says: /^Forwarding rule not found$/ };
const noRoute = { status: 404, code: 'not_found', says: /^Receiving route not found$/ };
const noDomain = { status: 404, code: 'not_found', says: /^Domain not found$/ };

const test = suite<{ domain: string; domainId: string; routeId: string }>('forwarding rules');
let app: App;
let rules: Rules;
let stranger: string;
let domainOfAll: string;
let count = 0;
test.before(async () => {
  app = await startApp();
  rules = rulesOf(app);
  domainOfAll = await receivingDomain(app, 'routed.test');
  ({ key: stranger } = await secondTenant(app));
});
test.before.each(async (context) => {
  context.domain = 'routed.test';
  context.domainId = domainOfAll;
  context.routeId = await rules.addRoute(domainOfAll, `in${(count += 1)}`);
});
test.after(() => app.stop());

test('a rule is made, active or disabled, and read back whole at both mounts', async (context) => {
  const { domain, domainId, routeId } = context;
  const first = { route_id: routeId.toUpperCase(), destinations: ['a@outside.test'] };
  const second = {
    route_id: await rules.addRoute(domainId, `second${count}`),
    destinations: ['a@outside.test'],
    status: 'disabled',
  };
  for (const [given, status] of [
    [first, 'active'],
    [second, 'disabled'],
  ] as const) {
    const rule = await rules.create(given);
    const { id, created_at, updated_at, ...rest } = rule;
    assert.match(String(id), UUID_V7);
    assertInstant(created_at);
    assert.is(updated_at, created_at);
    assert.equal(rest, {
      object: 'forwarding_rule',
      domain_id: domainId,
      domain,
      route_id: given.route_id.toLowerCase(),
      route_target_address: `Team@${domain}`,
      destinations: ['a@outside.test'],
      status,
      invalid_reason: null,
      last_attempt: null,
    });
    for (const path of [`${PATH}/${String(id)}`, `/api${PATH}/${String(id).toUpperCase()}`]) {
      const answer = await app.call('GET', path);
      assert.is(answer.status, 200);
      assertHeaders(answer);
      assert.equal(answer.body, rule);
    }
  }
});

test('destinations are normalized and deduplicated, 1 to 25', async ({ routeId }) => {
  const given = [' Ada@Outside.TEST ', 'ada@outside.test', '"b"@bücher.test', 'c+x@outside.test'];
  const { id, destinations } = await rules.create({ route_id: routeId, destinations: given });
  assert.equal(destinations, ['ada@outside.test', 'b@xn--bcher-kva.test', 'c+x@outside.test']);
  const many = Array.from({ length: DESTINATIONS_MAX }, (_, n) => `u${n}@outside.test`);
  assert.equal((await rules.change(id, { destinations: many }))['destinations'], many);
  const wrong: readonly (readonly [unknown, string, readonly string[]])[] = [
    [[], 'validation_error', ['destinations']],
    [[...many, 'more@outside.test'], 'validation_error', ['destinations']],
    ['a@outside.test', 'validation_error', ['destinations']],
    [null, 'validation_error', ['destinations']],
    [[5], 'validation_error', ['destinations.0']],
    [['a@outside.test', 'b', 'c@'], 'validation_error', ['destinations.1', 'destinations.2']],
    [['Ada <a@outside.test>'], 'validation_error', ['destinations.0']],
    [['a@outside.test\r\nBcc: b@outside.test'], 'validation_error', ['destinations.0']],
    [['a@[192.0.2.1]'], 'validation_error', ['destinations.0']],
    [['a\0@outside.test'], 'validation_error', ['destinations.0']],
  ];
  for (const [list, code, paths] of wrong) {
    const body = { destinations: list };
    assertRefused(await app.call('PATCH', `${PATH}/${String(id)}`, { body }), {
      status: 422,
      code,
      paths,
    });
    const posted = await app.call('POST', PATH, { body: { ...body, route_id: routeId } });
    assertRefused(posted, { status: 422, code, paths });
  }
  assert.equal((await rules.read(id))['destinations'], many);
});

test('a wrong field is refused by name', async ({ routeId }) => {
  const ok = { route_id: routeId, destinations: ['a@outside.test'] };
  const cases: readonly (readonly [Fields, string, readonly string[]])[] = [
    [{ route_id: undefined }, 'missing_required_field', ['route_id']],
    [{ destinations: undefined }, 'missing_required_field', ['destinations']],
    [{ route_id: 'x' }, 'validation_error', ['route_id']],
    [{ status: 'invalid' }, 'validation_error', ['status']],
    [{ status: 'on' }, 'validation_error', ['status']],
    [{ route_id: 'x', destinations: ['y'] }, 'validation_error', ['route_id', 'destinations.0']],
  ];
  for (const [about, code, paths] of cases) {
    const answer = await app.call('POST', PATH, { body: { ...ok, ...about } });
    assertRefused(answer, { status: 422, code, paths });
  }
  assertRefused(await app.call('POST', PATH, { body: { ...ok, route_id: UNKNOWN_ID } }), noRoute);
  assertRefused(await app.call('POST', PATH, { body: ok, key: stranger }), noRoute);
  const { id } = await rules.create(ok);
  for (const [body, path] of [
    [{ status: 'invalid' }, 'status'],
    [{ route_id: routeId }, 'route_id'],
  ] as const) {
    const answer = await app.call('PATCH', `${PATH}/${String(id)}`, { body });
    assertRefused(answer, { status: 422, code: 'validation_error', paths: [path] });
  }
});

test('a route has one rule', async ({ routeId }) => {
  const body = { route_id: routeId, destinations: ['a@outside.test'] };
  const answers = await Promise.all(
    Array.from({ length: 6 }, () => app.call('POST', PATH, { body })),
  );
  assert.equal(
    answers.map(({ status }) => status).toSorted((a, b) => a - b),
    [201, 409, 409, 409, 409, 409],
  );
  assertRefused(await app.call('POST', PATH, { body: { ...body, status: 'disabled' } }), {
    status: 409,
    code: 'rule_exists',
    paths: ['route_id'],
  });
  const made = answers.find(({ status }) => status === 201)!.body;
  await app.call('DELETE', `${PATH}/${String(made['id'])}`);
  await rules.create(body);
});

test('a change keeps what it does not name', async ({ routeId }) => {
  const rule = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const { id } = rule;
  const same = await rules.change(id, {});
  assert.equal({ ...same, updated_at: '' }, { ...rule, updated_at: '' });
  assert.equal(await rules.change(id, { status: 'disabled' }).then((one) => one['destinations']), [
    'a@outside.test',
  ]);
  const moved = await rules.change(id, { destinations: ['b@outside.test'] });
  assert.equal([moved['status'], moved['destinations']], ['disabled', ['b@outside.test']]);
  assert.is((await rules.change(id, { status: 'active' }))['status'], 'active');
});

test('the latest attempt is shown, in a list with one question for all', async (context) => {
  const { domain, domainId, routeId } = context;
  const second = await rules.addRoute(domainId, `second${count}`);
  const destinations = ['a@outside.test'];
  const made = [
    await rules.create({ route_id: routeId, destinations }),
    await rules.create({ route_id: second, destinations }),
  ];
  const tenantOf = 'select tenant_id from forwarding_rule where id = $1';
  const attempts = made.flatMap(({ id }, number) =>
    Array.from({ length: 3 }, (_, turn) => ({
      id: newId(),
      rule_id: String(id),
      received_email_id: newId(),
      email_id: turn === 2 && number === 1 ? null : newId(),
      created_at: new Date(Date.UTC(2026, 4, 6, 12, 0, turn, 5)).toISOString(),
    })),
  );
  await onDatabase(app, async (pool) => {
    for (const one of attempts) {
      const isQueued = one.email_id !== null;
      await pool.query(
        `insert into forwarding_attempt (tenant_id, id, received_email_id, rule_id, recipient,
           destinations, status, reason, explanation, method, email_id, created_at)
         select (${tenantOf}), $2, $3, $1, $4, $5, $6, $7, $8, $9, $10, $11`,
        [
          one.rule_id,
          one.id,
          one.received_email_id,
          `in@${domain}`,
          JSON.stringify(destinations),
          isQueued ? 'queued' : 'skipped',
          isQueued ? null : 'loop',
          'Because.',
          isQueued ? 'relayed' : null,
          one.email_id,
          one.created_at,
        ],
      );
    }
  });
  const { body } = await app.call<Page>('GET', `${PATH}?domain_id=${domainId}`);
  const shown = body.data.slice(0, 2).map((rule) => rule['last_attempt']);
  const about = { recipient: `in@${domain}`, destinations, explanation: 'Because.' };
  assert.equal(shown, [
    { ...attempts[5], ...about, status: 'skipped', reason: 'loop', method: null },
    { ...attempts[2], ...about, status: 'queued', reason: null, method: 'relayed' },
  ]);
  assert.equal((await rules.read(made[0]!['id']))['last_attempt'], shown[1]);
  assert.equal(
    (await rules.change(made[1]!['id'], { status: 'disabled' }))['last_attempt'],
    shown[0],
  );
});

test('deleted is gone; missing, foreign and malformed ids are one 404', async ({ routeId }) => {
  const { id } = await rules.create({ route_id: routeId, destinations: ['a@outside.test'] });
  const calls = async (name: string, key: string): Promise<void> => {
    for (const method of ['GET', 'PATCH', 'DELETE']) {
      const body = method === 'PATCH' ? { body: { status: 'disabled' } } : {};
      assertRefused(await app.call(method, `${PATH}/${name}`, { ...body, key }), notFound);
    }
  };
  await calls(String(id), stranger);
  for (const name of [UNKNOWN_ID, 'nobody', routeId]) await calls(name, app.key);
  assert.is((await rules.read(id))['status'], 'active');
  const answer = await app.call('DELETE', `/api${PATH}/${String(id).toUpperCase()}`);
  assert.is(answer.status, 200);
  assertHeaders(answer);
  assert.equal(answer.body, { object: 'forwarding_rule', id, deleted: true });
  await calls(String(id), app.key);
  assert.is((await app.call('GET', `/receiving/routes/${routeId}`)).status, 200);
});

test('a list is newest first, of one domain or all, and goes both ways', async ({ domainId }) => {
  const { key } = await assertPages(app, PATH, async (id, n, owner) => {
    const route = await rules.addRoute(id, `r${n}`, owner);
    return rules.create({ route_id: route, destinations: ['a@outside.test'] }, owner);
  });
  for (const [query, path, code] of [
    ['limit=0', 'limit', 'validation_error'],
    ['limit=1e1', 'limit', 'validation_error'],
    ['after=x', 'after', 'validation_error'],
    [`before=${UNKNOWN_ID}`, 'before', 'validation_error'],
    ['domain_id=x', 'domain_id', 'invalid_parameter'],
  ] as const) {
    assertRefused(await app.call('GET', `${PATH}?${query}`, { key }), {
      status: 422,
      code,
      paths: [path],
    });
  }
  for (const id of [domainId, UNKNOWN_ID]) {
    assertRefused(await app.call('GET', `${PATH}?domain_id=${id}`, { key }), noDomain);
  }
});

test('a tenant has so many rules and no more', async () => {
  const { tenantId, key } = await secondTenant(app);
  const domainId = await receivingDomain(app, `full${count}.test`, key);
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
         destinations, status, created_at, updated_at)
       select $1, gen_random_uuid(), $2, 'x.test', gen_random_uuid(), 'a@x.test',
         '["a@outside.test"]', 'disabled', now(), now() from generate_series(2, $3::integer)`,
      [tenantId, domainId, RULES_PER_TENANT_MAX],
    ),
  );
  const destinations = ['a@outside.test'];
  await rules.create({ route_id: await rules.addRoute(domainId, 'last', key), destinations }, key);
  const body = { route_id: await rules.addRoute(domainId, 'more', key), destinations };
  assertRefused(await app.call('POST', PATH, { body, key }), {
    status: 422,
    code: 'validation_error',
    paths: ['route_id'],
    says: /10000 forwarding rules/,
  });
});

test('every route needs a key that may do more than send, and JSON', async () => {
  const { body: key } = await app.call('POST', '/api-keys', {
    body: { name: 'sender', permission: 'sending_access' },
  });
  for (const [method, path] of [
    ['POST', PATH],
    ['GET', PATH],
    ['GET', `${PATH}/${UNKNOWN_ID}`],
    ['PATCH', `${PATH}/${UNKNOWN_ID}`],
    ['DELETE', `${PATH}/${UNKNOWN_ID}`],
  ] as const) {
    const nobody = await app.call(method, path, { key: null });
    assertRefused(nobody, { status: 401, code: 'missing_api_key' });
    const sender = await app.call(method, path, { key: String(key['token']) });
    assertRefused(sender, { status: 401, code: 'restricted_api_key' });
    if (method === 'POST' || method === 'PATCH') {
      const answer = await app.call(method, path, { body: '{' });
      assertRefused(answer, { status: 400, code: 'invalid_json' });
    }
  }
});

test.run();
