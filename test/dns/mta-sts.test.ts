// MTA-STS: records, policies and hosts as RFC 8461 has them, with mailauth's strict reader as a second opinion; and how
// long a policy holds when the record or the policy host is gone.
import { createRequire } from 'node:module';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createStsPolicies,
  isHostOf,
  parseStsPolicy,
  stsIdOf,
  type FetchedSts,
  type KnownPolicy,
  type StsAnswer,
  type StsMode,
  type StsStore,
} from '../../src/dns/mta-sts.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

interface Oracle {
  parsePolicy(
    text: string,
    options: { strict: true },
  ): { mode: string; mx?: string[]; maxAge: number };
  validateMx(host: string, policy: { mode: string; mx: readonly string[] }): { valid: boolean };
}
const oracle = createRequire(import.meta.url)('mailauth/lib/mta-sts.js') as Oracle;

const test = suite('mta-sts');

test('the record: exactly one that is valid', () => {
  const good: readonly (readonly [readonly string[], string])[] = [
    [['v=STSv1; id=20160831085700Z;'], '20160831085700Z'],
    [['v=STSv1;id=a'], 'a'],
    [['v=STSv1 ; id=1 ; x-ext=y'], '1'],
    [['v=STSv1; a=b; id=1; id=2'], '1'],
    [['v=spf1 -all', 'v=STSv1; id=1'], '1'],
    [['v=STSv10; id=9', 'v=STSv1; id=1'], '1'],
  ];
  for (const [records, id] of good) assert.is(stsIdOf(records), id, records.join('|'));
  const bad: readonly (readonly string[])[] = [
    [],
    ['v=STSv1'],
    ['v=STSv1;'],
    ['v=STSv2; id=1'],
    ['V=STSV1; id=1'],
    ['id=1; v=STSv1'],
    ['v=STSv1; id='],
    ['v=STSv1; id=with-hyphen'],
    ['v=STSv1; id=a b'],
    [`v=STSv1; id=${'1'.repeat(33)}`],
    ['v=STSv1;; id=1'],
    ['v=STSv1; nonsense; id=1'],
    ['v=STSv1; x=a=b; id=1'],
    ['v=STSv1; id=1', 'v=STSv1; id=1'],
    ['v=STSv1; id=1', 'v=STSv1;'],
  ];
  for (const records of bad) assert.is(stsIdOf(records), null, records.join('|'));
});

const policyText = (fields: Readonly<Record<string, string | readonly string[]>>, end = '\r\n') =>
  Object.entries(fields)
    .flatMap(([name, value]) => [value].flat().map((one) => `${name}: ${one}${end}`))
    .join('');
const usual = {
  version: 'STSv1',
  mode: 'enforce',
  mx: ['mx1.a.test', '*.b.test'],
  max_age: '604800',
};

test('the policy file: what is valid, and mailauth agrees', () => {
  const good: readonly string[] = [
    policyText(usual),
    policyText(usual, '\n'),
    policyText({ ...usual, mode: 'testing' }),
    policyText({ version: 'STSv1', mode: 'none', max_age: '86400' }),
    policyText({ ...usual, mx: ['MX1.A.test', 'mx1.a.test', 'a'] }),
    policyText({ ...usual, 'x-ext': 'any thing', 'odd line': 'ignored' }),
    policyText({ ...usual, max_age: '0' }),
    `${policyText(usual)}mode: none\r\nmax_age: 5\r\n`,
    `\r\nno colon\r\n${policyText(usual)}`,
    'version:STSv1\nmode:\t enforce \t\nmx:mx.a.test\nmax_age:1',
  ];
  for (const text of good) {
    const policy = parseStsPolicy(text);
    if (typeof policy === 'string') throw new Error(`${policy}: ${text}`);
    const other = oracle.parsePolicy(text, { strict: true });
    assert.equal(
      [policy.mode, policy.mx, policy.maxAgeSeconds, policy.raw],
      [other.mode, other.mx ?? [], other.maxAge, text],
    );
  }
});

test('the policy file: what is not valid', () => {
  const { version, mode, mx, max_age: age } = usual;
  const bad: readonly string[] = [
    '',
    '<html>',
    policyText({ mode, mx, max_age: age }),
    policyText({ ...usual, version: 'STSv2' }),
    policyText({ ...usual, version: 'stsv1' }),
    policyText({ version, mx, max_age: age }),
    policyText({ ...usual, mode: 'Enforce' }),
    policyText({ ...usual, mode: 'report' }),
    policyText({ version, mode, mx }),
    policyText({ ...usual, max_age: '-1' }),
    policyText({ ...usual, max_age: '1.5' }),
    policyText({ ...usual, max_age: '99999999999' }),
    policyText({ version, mode, max_age: age }),
    policyText({ ...usual, mx: ['*.*.a.test'] }),
    policyText({ ...usual, mx: ['mx.*.test'] }),
    policyText({ ...usual, mx: ['.a.test'] }),
    policyText({ ...usual, mx: ['mx.a.test.'] }),
    policyText({ ...usual, mx: [''] }),
    policyText({ ...usual, mx: ['a.test, b.test'] }),
    `Version: STSv1\r\n${policyText({ mode, mx, max_age: age })}`,
  ];
  for (const text of bad) {
    assert.type(parseStsPolicy(text), 'string', text);
    assert.throws(() => oracle.parsePolicy(text, { strict: true }), undefined, text);
  }
});

// What takes the square of this would not end.
const MUCH_SPACE = ' \t'.repeat(1 << 20);

test('white space costs what its length is, however much there is', () => {
  const text = policyText({ ...usual, mx: [`mx.a.test${MUCH_SPACE}x`] });
  assert.is(parseStsPolicy(text), 'it names a mail host that no mail host can have');
  const spaced = parseStsPolicy(
    policyText({ ...usual, mx: [`${MUCH_SPACE}mx.a.test${MUCH_SPACE}`] }),
  );
  assert.equal(typeof spaced === 'string' ? spaced : spaced.mx, ['mx.a.test']);
  assert.is(stsIdOf([`v=STSv1; id=1${MUCH_SPACE}x;`]), null);
  assert.is(stsIdOf([`v=STSv1;${MUCH_SPACE}id=1${MUCH_SPACE};`]), '1');
});

test('a policy names 500 hosts at most', () => {
  const hosts = (count: number): string[] =>
    Array.from({ length: count }, (_, number) => `mx${number}.a.test`);
  const full = parseStsPolicy(policyText({ ...usual, mx: hosts(500) }));
  assert.is(typeof full === 'string' ? full : full.mx.length, 500);
  const more = parseStsPolicy(policyText({ ...usual, mx: hosts(501) }));
  assert.is(more, 'it names more than 500 mail hosts');
});

test('max_age is capped at a year', () => {
  const policy = parseStsPolicy(policyText({ ...usual, max_age: '9999999999' }));
  assert.is(typeof policy === 'string' ? policy : policy.maxAgeSeconds, 31_557_600);
});

test('hosts: a wildcard is exactly one label, the left-most', () => {
  const mx = ['mx1.a.test', '*.b.test', '*.example'];
  const cases: Readonly<Record<string, boolean>> = {
    'mx1.a.test': true,
    'mx2.a.test': false,
    'x.mx1.a.test': false,
    'a.test': false,
    'any.b.test': true,
    'b.test': false,
    'x.any.b.test': false,
    'xb.test': false,
    'b.example': true,
    example: false,
  };
  for (const [host, expected] of Object.entries(cases)) {
    assert.is(isHostOf({ mx }, host), expected, host);
    assert.is(oracle.validateMx(host, { mode: 'enforce', mx }).valid, expected, host);
  }
});

// A store as the database is one, with a clock of its own.
class Shelf implements StsStore {
  now = 0;
  finds = 0;
  isAway = false;
  /** It answers, and takes nothing. */
  isFull = false;
  unkept = 0;
  readonly failures: string[] = [];
  readonly rows = new Map<string, { until: number; usedAt: number; policy: KnownPolicy }>();
  find(domain: string): Promise<KnownPolicy | null> {
    this.finds += 1;
    if (this.isAway) {
      return Promise.reject(Object.assign(new Error('away'), { code: 'ECONNREFUSED' }));
    }
    const row = this.rows.get(domain);
    if (row === undefined || row.until <= this.now) return Promise.resolve(null);
    const { until, usedAt, policy } = row;
    return Promise.resolve({ ...policy, leftMs: until - this.now, unusedMs: this.now - usedAt });
  }
  keep(domain: string, policy: Parameters<StsStore['keep']>[1]): Promise<void> {
    if (this.isFull) return Promise.reject(new Error('full'));
    const until = this.now + policy.maxAgeSeconds * 1_000;
    this.rows.set(domain, {
      until,
      usedAt: this.now,
      policy: { ...policy, leftMs: 0, unusedMs: 0 },
    });
    return Promise.resolve();
  }
  touch(domain: string): Promise<void> {
    const row = this.rows.get(domain);
    if (row !== undefined) row.usedAt = this.now;
    return Promise.resolve();
  }
  noteFailure(_domain: string, reason: string): Promise<void> {
    this.failures.push(reason);
    return Promise.resolve();
  }
}

const MINUTE = 60_000;
const DAY = 86_400_000;
let dns: DnsServer;
test.before(async () => {
  dns = await startDns({});
});
test.after(() => dns.stop());

function setUp() {
  const shelf = new Shelf();
  const resolver = createResolver({ servers: [dns.server], keepsAnswers: false, timeoutMs: 50 });
  const fetched: string[] = [];
  let next: FetchedSts | 'hang' = {
    kind: 'failed',
    failure: 'sts-policy-fetch-error',
    reason: 'x',
  };
  const policies = createStsPolicies({
    resolver,
    store: shelf,
    async fetch(domain) {
      fetched.push(domain);
      if (next === 'hang') return new Promise(() => undefined);
      return Promise.resolve(next);
    },
    now: () => new Date(shelf.now),
    onUnkept: () => (shelf.unkept += 1),
  });
  const modeOf = (answer: StsAnswer): StsMode | null | 'unknown' =>
    answer.kind === 'unknown' ? 'unknown' : (answer.policy?.mode ?? null);
  return {
    shelf,
    resolver,
    fetched,
    policies,
    publish(mode: StsMode, maxAgeSeconds = 7 * 86_400) {
      const mx = mode === 'none' ? [] : ['mx.a.test'];
      next = { kind: 'policy', policy: { mode, mx, maxAgeSeconds, raw: mode } };
    },
    break() {
      next = { kind: 'failed', failure: 'sts-policy-fetch-error', reason: 'the server is away' };
    },
    record(id: string | null) {
      if (id === null) delete dns.zones['_mta-sts.a.test'];
      else dns.zones['_mta-sts.a.test'] = { TXT: [`v=STSv1; id=${id}`] };
    },
    mode: async () => modeOf(await policies.find('a.test')),
    pass(ms: number) {
      shelf.now += ms;
    },
  };
}

test('no record, no policy, no fetch; asked again after a minute', async () => {
  const s = setUp();
  s.record(null);
  assert.is(await s.mode(), null);
  assert.is(await s.mode(), null);
  assert.is(s.shelf.finds, 1);
  assert.equal(s.fetched, []);
  s.record('1');
  s.publish('enforce');
  s.pass(MINUTE + 1);
  assert.is(await s.mode(), 'enforce');
  s.resolver.close();
});

test('an id is fetched once; a new id fetches again', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce');
  for (let i = 0; i < 50; i += 1) {
    assert.is(await s.mode(), 'enforce');
    s.pass(10 * MINUTE);
  }
  assert.is(s.fetched.length, 1);
  s.record('2');
  s.publish('testing');
  assert.is(await s.mode(), 'testing');
  s.record('3');
  s.publish('none');
  s.pass(2 * MINUTE);
  assert.is(await s.mode(), null, 'mode none is no policy');
  assert.is(s.fetched.length, 3);
  s.resolver.close();
});

test('a policy holds until its max_age, though the record and the policy host are gone', async () => {
  for (const damage of ['gone', 'invalid', 'servfail', 'new id, no fetch'] as const) {
    const s = setUp();
    s.record('1');
    s.publish('enforce', 7 * 86_400);
    assert.is(await s.mode(), 'enforce');
    s.break();
    if (damage === 'gone') s.record(null);
    if (damage === 'invalid') dns.zones['_mta-sts.a.test'] = { TXT: ['v=STSv1;'] };
    if (damage === 'servfail') dns.zones['_mta-sts.a.test'] = 'SERVFAIL';
    if (damage === 'new id, no fetch') s.record('2');
    for (let day = 0; day < 6; day += 1) {
      s.pass(DAY);
      assert.is(await s.mode(), 'enforce', `${damage}, day ${day + 1}`);
    }
    s.pass(DAY + 1);
    assert.is(await s.mode(), null, `${damage}: expired`);
    if (damage === 'new id, no fetch') assert.ok(s.shelf.failures.length > 0);
    s.resolver.close();
  }
});

test('first contact that fails is no policy, and is not tried again for five minutes', async () => {
  const s = setUp();
  s.record('1');
  s.break();
  const first = await s.policies.find('a.test');
  assert.equal(first, {
    kind: 'known',
    policy: null,
    trouble: { failure: 'sts-policy-fetch-error', reason: 'the server is away' },
  });
  await Promise.all(Array.from({ length: 100 }, s.mode));
  s.pass(4 * MINUTE);
  await s.mode();
  assert.is(s.fetched.length, 1);
  s.publish('enforce');
  s.pass(MINUTE + 1);
  assert.is(await s.mode(), 'enforce');
  assert.is(s.fetched.length, 2);
  s.resolver.close();
});

test('a policy that another process has stored holds, though our own fetch failed just now', async () => {
  const s = setUp();
  s.record('1');
  s.break();
  assert.is(await s.mode(), null);
  await s.shelf.keep('a.test', {
    id: '1',
    mode: 'enforce',
    mx: ['mx.a.test'],
    maxAgeSeconds: 86_400,
    raw: '',
  });
  s.pass(MINUTE + 1);
  assert.is(await s.mode(), 'enforce');
  assert.is(s.fetched.length, 1);
  s.resolver.close();
});

test('a clock that is set back makes no answer live longer', async () => {
  const s = setUp();
  s.pass(DAY);
  s.record('1');
  s.publish('enforce');
  assert.is(await s.mode(), 'enforce');
  s.pass(-DAY / 2);
  s.record('2');
  s.publish('testing');
  assert.is(await s.mode(), 'testing');
  s.resolver.close();
});

test('many that ask at one time share one lookup and one fetch', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce');
  const modes = await Promise.all(Array.from({ length: 200 }, s.mode));
  assert.ok(modes.every((mode) => mode === 'enforce'));
  assert.is(s.fetched.length, 1);
  assert.is(s.shelf.finds, 1);
  s.resolver.close();
});

test('a max_age of nothing does not fetch for every message', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce', 0);
  for (let i = 0; i < 20; i += 1) assert.is(await s.mode(), 'enforce');
  assert.is(s.fetched.length, 1);
  s.resolver.close();
});

test('use is noted once a day', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce', 31_000_000);
  await s.mode();
  s.pass(DAY + 2 * MINUTE);
  await s.mode();
  assert.is(s.shelf.rows.get('a.test')?.usedAt, s.shelf.now);
  s.resolver.close();
});

test('our own store being away is not "no policy", and is not remembered', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce');
  s.shelf.isAway = true;
  assert.is(await s.mode(), 'unknown');
  s.shelf.isAway = false;
  assert.is(await s.mode(), 'enforce');
  s.resolver.close();
});

test('a policy that cannot be kept holds all the same', async () => {
  const s = setUp();
  s.record('1');
  s.publish('enforce');
  s.shelf.isFull = true;
  assert.is(await s.mode(), 'enforce');
  assert.is(s.shelf.unkept, 1);
  s.resolver.close();
});

test('lookups under way have a limit; more are unknown, not none', async () => {
  const shelf = new Shelf();
  const resolver = createResolver({ servers: [dns.server] });
  shelf.find = () => new Promise(() => undefined);
  const policies = createStsPolicies({
    resolver,
    store: shelf,
    fetch: () => new Promise(() => undefined),
    now: () => new Date(),
    onUnkept: () => undefined,
  });
  for (let i = 0; i < 500; i += 1) void policies.find(`d${i}.test`);
  assert.is((await policies.find('one-more.test')).kind, 'unknown');
  resolver.close();
});

test.run();
