// The contract of every path below /domains, on both mounts: what it answers, each error that it lists, and that no
// tenant sees another's. The DNS is a real server.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { zonesOf } from '../support/domains.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

interface DomainRecord {
  record: string;
  name: string;
  type: 'MX' | 'TXT' | 'CNAME';
  ttl: string;
  status: string;
  value: string;
  priority?: number;
  detail: string | null;
}
interface Domain {
  object: string;
  id: string;
  name: string;
  status: string;
  capabilities: unknown;
  records: DomainRecord[];
  [key: string]: unknown;
}
interface Page {
  object: string;
  data: Domain[];
  has_more: boolean;
}

const test = suite('domains over http');
let app: App;
let dns: DnsServer;
let pool: Pool;
let tenantId: string;
/** A key of a second tenant. */
let stranger: string;
test.before(async () => {
  dns = await startDns({});
  app = await startApp({
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_PUBLIC_URL: 'https://track.host.test',
  });
  pool = new Pool({ connectionString: app.databaseUrl, max: 2 });
  // On a busy machine the database is dropped before it has read our goodbye.
  pool.on('error', () => undefined);
  const { rows } = await pool.query<{ id: string }>('select id from tenant');
  tenantId = rows[0]!.id;
  const otherId = randomUUID();
  await pool.query('insert into tenant (id, name) values ($1, $2)', [otherId, 'second']);
  stranger = newToken();
  const key = { name: 'x', permission: 'full_access', domainId: null } as const;
  await createKey(pool, { ...key, tenantId: otherId, token: stranger });
});
test.after(async () => {
  await pool.end();
  await app.stop();
  await dns.stop();
});

let count = 0;
const freshName = (): string => `h${(count += 1)}.test`;
async function create(body: Record<string, unknown> = {}, path = '/domains'): Promise<Domain> {
  const answer = await app.call<Domain>('POST', path, { body: { name: freshName(), ...body } });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return answer.body;
}
function publish({ records }: Domain): void {
  Object.assign(dns.zones, zonesOf({ records }));
}

const OBJECT = { sending: 'enabled', receiving: 'disabled' };
const ARRAY = [
  { name: 'sending', enabled: true },
  { name: 'receiving', enabled: false },
];
const SUMMARY_KEYS = (
  'object id name status region custom_return_path return_path open_tracking ' +
  'click_tracking tracking_subdomain tls inbound_dmarc mta_sts capabilities created_at'
).split(' ');

test('POST /domains: 201, the whole domain with its records', async () => {
  const answer = await app.call<Domain>('POST', '/domains', {
    body: {
      name: 'Bücher.test',
      region: 'eu-west-1',
      custom_return_path: 'bounce',
      open_tracking: true,
      click_tracking: false,
      tracking_subdomain: 'links',
      tls: 'enforced',
      inbound_dmarc: 'tag',
      capabilities: { receiving: 'enabled' },
    },
  });
  assert.is(answer.status, 201);
  assertHeaders(answer);
  const { records, id, created_at, ...rest } = answer.body;
  assertInstant(created_at);
  assert.match(id, /^[0-9a-f-]{36}$/);
  assert.equal(rest, {
    object: 'domain',
    name: 'xn--bcher-kva.test',
    status: 'not_started',
    region: 'eu-west-1',
    custom_return_path: 'bounce',
    return_path: 'bounce.xn--bcher-kva.test',
    open_tracking: true,
    click_tracking: false,
    tracking_subdomain: 'links',
    tls: 'enforced',
    inbound_dmarc: 'tag',
    mta_sts: 'off',
    capabilities: { sending: 'enabled', receiving: 'enabled' },
  });
  assert.equal(
    records.map(({ record, type, priority }) => [record, type, priority]),
    [
      ['SPF', 'MX', 10],
      ['SPF', 'TXT', undefined],
      ['DKIM', 'TXT', undefined],
      ['DKIM', 'TXT', undefined],
      ['Receiving', 'MX', 10],
      ['Tracking', 'CNAME', undefined],
      ['DMARC', 'TXT', undefined],
    ],
  );
  for (const record of records) {
    assert.ok(record.name.endsWith('xn--bcher-kva.test'));
    assert.equal([record.ttl, record.status, record.detail], ['Auto', 'not_started', null]);
  }
});

test('capabilities take both forms everywhere and answer in that of the mount', async () => {
  const forms = [
    ['/domains', undefined, OBJECT],
    ['/domains', OBJECT, OBJECT],
    ['/domains', ARRAY, ARRAY],
    ['/api/domains', undefined, ARRAY],
    ['/api/domains', OBJECT, ARRAY],
    ['/api/domains', ARRAY, ARRAY],
  ] as const;
  for (const [path, capabilities, expected] of forms) {
    const domain = await create(capabilities === undefined ? {} : { capabilities }, path);
    assert.equal(domain.capabilities, expected, path);
    for (const [mount, form] of [
      ['', OBJECT],
      ['/api', ARRAY],
    ] as const) {
      const one = await app.call<Domain>('GET', `${mount}/domains/${domain.id}`);
      assert.equal(one.body.capabilities, form);
      const list = await app.call<Page>('GET', `${mount}/domains?limit=1`);
      assert.equal(list.body.data[0]!.capabilities, form);
      const verified = await app.call<Domain>('POST', `${mount}/domains/${domain.id}/verify`);
      assert.equal(verified.body.capabilities, form);
    }
  }
});

test('POST /domains: every issue in an envelope', async () => {
  const refused = async (body: unknown, code: string, paths: readonly string[]): Promise<void> => {
    for (const path of ['/domains', '/api/domains']) {
      assertRefused(await app.call('POST', path, { body }), { status: 422, code, paths });
    }
  };
  await refused({}, 'missing_required_field', ['name']);
  await refused({ name: 1 }, 'validation_error', ['name']);
  await refused({ name: 'com' }, 'validation_error', ['name']);
  await refused({ name: 'a.test', region: 'mars-1' }, 'invalid_region', ['region']);
  await refused({ name: 'a.test', tls: 'maybe' }, 'validation_error', ['tls']);
  await refused({ name: 'a.test', open_tracking: 'yes' }, 'validation_error', ['open_tracking']);
  await refused({ name: 'a.test', tracking_subdomain: 'a.b' }, 'validation_error', [
    'tracking_subdomain',
  ]);
  await refused({ name: 'a.test', tracking_subdomain: 'a'.repeat(64) }, 'validation_error', [
    'tracking_subdomain',
  ]);
  await refused({ name: 'a.test', custom_return_path: '' }, 'validation_error', [
    'custom_return_path',
  ]);
  const none = { sending: 'disabled', receiving: 'disabled' };
  await refused({ name: 'a.test', capabilities: none }, 'validation_error', ['capabilities']);
  const all = await app.call('POST', '/domains', { body: { name: 'a', region: 'x' } });
  assertRefused(all, { status: 422, code: 'validation_error', paths: ['name', 'region'] });
  for (const capabilities of [5, 'sending', [1], { sending: true }, [{ name: 'sending' }]]) {
    const answer = await app.call('POST', '/domains', { body: { name: 'a.test', capabilities } });
    assert.is(answer.status, 422, JSON.stringify(capabilities));
  }
  const broken = await app.call('POST', '/domains', { body: '{' });
  assertRefused(broken, { status: 400, code: 'invalid_json' });
});

test('a name that you have, and one that another account has verified', async () => {
  const domain = await create();
  const again = await app.call('POST', '/api/domains', { body: { name: domain.name } });
  assertRefused(again, { status: 422, code: 'domain_exists', paths: ['name'] });
  const twice = await app.call('POST', '/domains', { body: { name: domain.name }, key: stranger });
  assert.is(twice.status, 201, 'not verified: still free');
  publish(domain);
  await app.call('POST', `/domains/${domain.id}/verify`);
  const theirs = (twice.body as { id: string }).id;
  const verify = await app.call('POST', `/domains/${theirs}/verify`, { key: stranger });
  assertRefused(verify, { status: 422, code: 'domain_taken', paths: ['name'], says: /claim/ });
  await app.call('DELETE', `/domains/${theirs}`, { key: stranger });
  const taken = await app.call('POST', '/domains', { body: { name: domain.name }, key: stranger });
  assertRefused(taken, { status: 422, code: 'domain_taken', paths: ['name'], says: /claim/ });
  const both = await Promise.all(
    Array.from({ length: 3 }, () => app.call('POST', '/domains', { body: { name: 'same.test' } })),
  );
  assert.equal(both.map(({ status }) => String(status)).toSorted(), ['201', '422', '422']);
});

test('GET /domains: a list without records, newest first, page by page', async () => {
  const made: string[] = [];
  for (let i = 0; i < 3; i += 1) made.unshift((await create()).id);
  const list = async (query: string): Promise<Page> => {
    const answer = await app.call<Page>('GET', `/domains${query}`);
    assert.is(answer.status, 200);
    return answer.body;
  };
  const all = await list('?limit=100');
  assert.is(all.object, 'list');
  assert.equal(
    all.data.slice(0, 3).map(({ id }) => id),
    made,
  );
  assert.equal(Object.keys(all.data[0]!).toSorted(), SUMMARY_KEYS.toSorted());
  const home = all.data.find(({ name }) => name === 'mailstead.test');
  assert.is(home?.status, 'verified');
  const first = await list('?limit=2');
  assert.equal([first.data.length, first.has_more], [2, true]);
  const next = await list(`?limit=2&after=${made[1]}`);
  assert.is(next.data[0]?.id, made[2]);
  const back = await list(`?limit=2&before=${made[2]}`);
  assert.equal(
    back.data.map(({ id }) => id),
    made.slice(0, 2),
  );
  assert.is(back.has_more, false);
  for (const [query, path] of [
    ['?limit=0', 'limit'],
    ['?limit=101', 'limit'],
    ['?after=x', 'after'],
    [`?after=${randomUUID()}`, 'after'],
    [`?before=${randomUUID()}`, 'before'],
  ] as const) {
    const answer = await app.call('GET', `/api/domains${query}`);
    assertRefused(answer, { status: 422, code: 'validation_error', paths: [path] });
  }
  const theirs = await app.call<Page>('GET', '/domains?limit=100', { key: stranger });
  assert.ok(theirs.body.data.every(({ id }) => !all.data.some((one) => one.id === id)));
});

test('verify looks now: from pending to verified, with what is wrong in words', async () => {
  const domain = await create();
  const verify = async (): Promise<Answer<Domain>> =>
    app.call<Domain>('POST', `/domains/${domain.id}/verify`);
  const before = await verify();
  assert.is(before.status, 200);
  assert.is(before.body.status, 'pending');
  assert.match(before.body.records[0]!.detail ?? '', /^There is no MX record at send\./);
  publish(domain);
  dns.zones[`send.${domain.name}`] = { CNAME: 'elsewhere.test' };
  const wrong = await verify();
  assert.is(wrong.body.records[0]!.status, 'failed');
  publish(domain);
  const after = await verify();
  assert.is(after.body.status, 'verified');
  assert.ok(after.body.records.every(({ status, detail }) => status === 'verified' && !detail));
  const got = await app.call<Domain>('GET', `/domains/${domain.id}`);
  assert.equal(got.body, after.body);
});

test('the domain of development mode stays verified, whatever the DNS says', async () => {
  const { body: list } = await app.call<Page>('GET', '/domains?limit=100');
  const home = list.data.find(({ name }) => name === 'mailstead.test')!;
  const { body } = await app.call<Domain>('POST', `/domains/${home.id}/verify`);
  assert.is(body.status, 'verified');
  assert.ok(body.records.every(({ status }) => status === 'verified'));
});

test('PATCH changes what is given', async () => {
  const domain = await create({ open_tracking: true, tracking_subdomain: 'links' });
  const patch = (body: unknown, mount = ''): Promise<Answer> =>
    app.call('PATCH', `${mount}/domains/${domain.id}`, { body });
  const done = await patch({ click_tracking: true, tls: 'enforced', tracking_subdomain: 'go' });
  assert.is(done.status, 200);
  assert.equal(done.body, { object: 'domain', id: domain.id });
  await patch(
    { open_tracking: false, capabilities: [{ name: 'receiving', enabled: true }] },
    '/api',
  );
  const { body } = await app.call<Domain>('GET', `/domains/${domain.id}`);
  assert.equal(
    [body['click_tracking'], body['open_tracking'], body['tls'], body['tracking_subdomain']],
    [true, false, 'enforced', 'go'],
  );
  assert.equal(body.capabilities, { sending: 'enabled', receiving: 'enabled' });
  assert.ok(body.records.some(({ name }) => name === `go.${domain.name}`));
  assert.is(body['inbound_dmarc'], 'reject');
  await patch({ tracking_subdomain: null, inbound_dmarc: 'tag' });
  const cleared = await app.call<Domain>('GET', `/domains/${domain.id}`);
  assert.is(cleared.body['tracking_subdomain'], null);
  assert.is(cleared.body['inbound_dmarc'], 'tag');
  assert.ok(cleared.body.records.some(({ name }) => name === `links.${domain.name}`));
  for (const [wrong, path] of [
    [{ tls: 'none' }, 'tls'],
    [{ inbound_dmarc: 'quarantine' }, 'inbound_dmarc'],
    [{ tracking_subdomain: 'a.b' }, 'tracking_subdomain'],
    [{ tracking_subdomain: 'send' }, 'tracking_subdomain'],
    [{ open_tracking: null }, 'open_tracking'],
    [{ capabilities: { sending: 'disabled', receiving: 'disabled' } }, 'capabilities'],
  ] as const) {
    assertRefused(await patch(wrong), { status: 422, code: 'validation_error', paths: [path] });
  }
  assertRefused(await patch('['), { status: 400, code: 'invalid_json' });
});

test('DELETE keeps the mail and revokes the keys of the domain', async () => {
  const domain = await create();
  publish(domain);
  await app.call('POST', `/domains/${domain.id}/verify`);
  const token = newToken();
  const key = { tenantId, name: 'bound', permission: 'sending_access', token } as const;
  const keyId = await createKey(pool, { ...key, domainId: domain.id });
  const email = { from: `a@${domain.name}`, to: 'ok@recipient.test', subject: 's', text: 't' };
  // The sender looks at the domain's state once a second.
  const sent = await until(
    () => app.call<{ id: string }>('POST', '/emails', { body: email, key: token }),
    ({ status }) => status === 200,
  );
  const gone = await app.call('DELETE', `/api/domains/${domain.id}`);
  assert.is(gone.status, 200);
  assert.equal(gone.body, { object: 'domain', id: domain.id, deleted: true });
  const kept = await app.call('GET', `/emails/${sent.body.id}`);
  assert.is(kept.status, 200);
  const { rows } = await pool.query<{ revoked: boolean }>(
    'select revoked_at is not null as revoked from api_key where id = $1',
    [keyId],
  );
  assert.equal(rows, [{ revoked: true }]);
  const refused = await app.call('POST', '/emails', { body: email, key: token });
  assertRefused(refused, { status: 401, code: 'invalid_api_key' });
  const again = await app.call('DELETE', `/domains/${domain.id}`);
  assertRefused(again, { status: 404, code: 'not_found' });
});

test('the domain of development mode stays with the first account, whatever the DNS says', async () => {
  const { body: claim } = await app.call<{
    domain_id: string;
    record: { name: string; value: string };
  }>('POST', '/domains/claim', { body: { name: 'mailstead.test' }, key: stranger });
  dns.zones[claim.record.name] = { TXT: [claim.record.value] };
  const checked = await app.call('POST', `/domains/${claim.domain_id}/claim/verify`, {
    key: stranger,
  });
  assert.is(checked.status, 200, JSON.stringify(checked.body));
  assert.is(checked.body['status'], 'pending');
  const list = await app.call<Page>('GET', '/domains?limit=100');
  assert.is(list.body.data.find(({ name }) => name === 'mailstead.test')?.status, 'verified');
  await app.call('DELETE', `/domains/${claim.domain_id}`, { key: stranger });
});

test('claims: made once, read, verified by their record', async () => {
  const domain = await create();
  publish(domain);
  await app.call('POST', `/domains/${domain.id}/verify`);
  const claim = (mount = '') =>
    app.call('POST', `${mount}/domains/claim`, {
      body: { name: domain.name },
      key: stranger,
    });
  const first = await claim();
  assert.is(first.status, 201);
  const { id, domain_id, record, created_at, expires_at, ...rest } = first.body;
  assertInstant(created_at);
  assertInstant(expires_at);
  assert.is.not(id, domain_id);
  assert.equal(rest, {
    object: 'domain_claim',
    name: domain.name,
    status: 'pending',
    region: 'us-east-1',
    blocked_reason: null,
    failure_reason: null,
  });
  const { name, value, ...form } = record as Record<string, string>;
  assert.equal(form, { type: 'TXT', ttl: 'Auto' });
  const again = await claim('/api');
  assert.is(again.status, 200);
  assert.equal(again.body, first.body);
  const path = `/domains/${String(domain_id)}/claim`;
  assert.equal((await app.call('GET', path, { key: stranger })).body, first.body);
  const early = await app.call('POST', `${path}/verify`, { key: stranger });
  assert.equal([early.status, early.body], [200, first.body]);
  dns.zones[name!] = { TXT: [value!] };
  const done = await app.call('POST', `/api${path}/verify`, { key: stranger });
  assert.is(done.body['status'], 'completed');
  const lost = await app.call<Domain>('GET', `/domains/${domain.id}`);
  assert.is(lost.body.status, 'failed');
  const bad = await app.call('POST', '/domains/claim', { body: { name: 'x' } });
  assertRefused(bad, { status: 422, code: 'validation_error', paths: ['name'] });
  const missing = await app.call('POST', '/api/domains/claim', { body: {} });
  assertRefused(missing, { status: 422, code: 'missing_required_field', paths: ['name'] });
  const own = await app.call('POST', '/domains/claim', { body: { name: 'mailstead.test' } });
  assertRefused(own, { status: 422, code: 'domain_exists', paths: ['name'] });
  const unclaimed = await create();
  const none = await app.call('GET', `/domains/${unclaimed.id}/claim`);
  assertRefused(none, { status: 404, code: 'not_found' });
});

test('a foreign domain is as missing as one that never was; an id is a UUID; a key is needed', async () => {
  const domain = await create();
  const paths = (id: string): readonly (readonly [string, string])[] => [
    ['GET', `/domains/${id}`],
    ['PATCH', `/domains/${id}`],
    ['DELETE', `/domains/${id}`],
    ['POST', `/domains/${id}/verify`],
    ['GET', `/domains/${id}/claim`],
    ['POST', `/domains/${id}/claim/verify`],
  ];
  for (const mount of ['', '/api']) {
    for (const [index, [method, path]] of paths(domain.id).entries()) {
      const ask = (at: string, key: string | null): Promise<Answer> =>
        app.call(method, mount + at, { key, ...(method === 'PATCH' ? { body: {} } : {}) });
      const foreign = await ask(path, stranger);
      assertRefused(foreign, { status: 404, code: 'not_found' });
      const unknown = await ask(paths(randomUUID())[index]![1], stranger);
      assert.equal(unknown.body, foreign.body);
      const malformed = await ask(paths('x')[index]![1], app.key);
      assertRefused(malformed, { status: 422, code: 'invalid_parameter', paths: ['id'] });
      assertRefused(await ask(path, null), { status: 401, code: 'missing_api_key' });
    }
  }
  const token = newToken();
  const key = { tenantId, name: 'sending', permission: 'sending_access', token } as const;
  await createKey(pool, { ...key, domainId: null });
  for (const [method, path] of [
    ...paths(domain.id),
    ['GET', '/domains'] as const,
    ['POST', '/domains'] as const,
  ]) {
    const answer = await app.call(method, path, { key: token });
    assertRefused(answer, { status: 401, code: 'restricted_api_key' });
  }
  const wrong = await app.call('PUT', `/domains/${domain.id}`);
  assertRefused(wrong, { status: 405, code: 'method_not_allowed' });
});

test('without DNS servers of its own, development takes reserved names as published', async () => {
  const plain = await startApp();
  try {
    const resend = new Resend(plain.key, { baseUrl: plain.base });
    const ask = async (path: string, body?: unknown): Promise<Domain> =>
      (await plain.call<Domain>('POST', path, { body })).body;
    for (const name of ['a.test', 'b.example', 'c.localhost', 'mail.example.com']) {
      const { id } = await ask('/domains', { name, capabilities: { receiving: 'enabled' } });
      assert.is((await ask(`/domains/${id}/verify`)).status, 'verified', name);
    }
    const { data } = await resend.domains.create({ name: 'tour.test', openTracking: true });
    await resend.domains.update({
      id: data!.id,
      clickTracking: true,
      trackingSubdomain: 'go',
    });
    const { error } = await resend.domains.verify(data!.id);
    assert.is(error, null);
    const got = await resend.domains.get(data!.id);
    assert.is(got.data?.status, 'partially_failed');
    const claim = await resend.domains.claims.create({ name: 'claim.test' });
    assert.is(claim.data?.status, 'pending');
    const checked = await resend.domains.claims.verify(claim.data?.domain_id ?? '');
    assert.is(checked.data?.status, 'pending');
  } finally {
    await plain.stop();
  }
});

test.run();
