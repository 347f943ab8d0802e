// The resolver against a real DNS server on loopback: what each kind of reply becomes, and what is remembered.

import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createResolver } from '../../src/dns/resolver.ts';
import type { Resolver } from '../../src/dns/resolver.ts';
import { startDns } from '../support/dns.ts';
import type { DnsServer, DnsZones } from '../support/dns.ts';

const START = Date.parse('2026-01-01T00:00:00Z');
type Context = { dns: DnsServer; resolver: Resolver; clock: { ms: number } };
const resolving = suite<Context>('resolver');

function zones(): DnsZones {
  return {
    'full.test': {
      MX: ['10 mx.full.test', '0 MX0.Full.Test.'],
      A: ['192.0.2.1', '192.0.2.2'],
      AAAA: ['2001:db8::1'],
      TXT: ['v=spf1 -all', 'k'.repeat(700), ''],
    },
    'alias.test': { CNAME: 'full.test' },
    'lone.test': { CNAME: 'full.test', loneCname: true },
    'dangling.test': { CNAME: 'nowhere.test' },
    'loop.test': { CNAME: 'loop2.test' },
    'loop2.test': { CNAME: 'loop.test' },
    'null.test': { MX: ['0 .'] },
    'only-a.test': { A: ['192.0.2.3'] },
    'below.parent.test': { A: ['192.0.2.4'] },
    '_dmarc.full.test': { TXT: ['v=DMARC1; p=none'] },
    'servfail.test': 'SERVFAIL',
    'refused.test': 'REFUSED',
    'notimp.test': 'NOTIMP',
    'formerr.test': 'FORMERR',
    'garbage.test': 'GARBAGE',
    'hangup.test': 'HANGUP',
    'timeout.test': 'TIMEOUT',
    'odd.test': { MX: ['10 bad host.test', '20 192.0.2.1', '30 _ok.test', '40 back\\slash.test'] },
    'large.test': {
      MX: Array.from({ length: 90 }, (_, at) => `10 a-long-host-name-${at}.large.test`),
    },
    'brief.test': { A: ['192.0.2.5'], AAAA: ['2001:db8::5'], ttlSeconds: 7 },
    'unkept.test': { A: ['192.0.2.6'], ttlSeconds: 0 },
    'lasting.test': { A: ['192.0.2.7'], ttlSeconds: 86_400 },
  };
}

resolving.before.each(async (context) => {
  context.clock = { ms: START };
  context.dns = await startDns(zones());
  context.resolver = createResolver({
    servers: [context.dns.server],
    timeoutMs: 500,
    tries: 1,
    now: () => new Date(context.clock.ms),
  });
});
resolving.after.each(async ({ dns, resolver }) => {
  resolver.close();
  await dns.stop();
});

type Method = 'mx' | 'a' | 'aaaa' | 'cname' | 'txt';
const NO_DATA = { kind: 'no_data' };
const NO_NAME = { kind: 'no_name' };
const found = (...records: readonly unknown[]): unknown => ({ kind: 'found', records });
const failed = (cause: string): unknown => ({ kind: 'failed', cause });
const fullMx = found(
  { preference: 10, exchange: 'mx.full.test' },
  { preference: 0, exchange: 'MX0.Full.Test' },
);

const replies: readonly (readonly [Method, string, unknown])[] = [
  ['mx', 'full.test', fullMx],
  ['mx', 'FULL.Test.', fullMx],
  ['mx', 'alias.test', fullMx],
  // c-ares: an empty list, neither ENODATA nor the records behind the CNAME.
  ['mx', 'lone.test', NO_DATA],
  ['mx', 'dangling.test', NO_NAME],
  ['mx', 'loop.test', failed('SERVFAIL')],
  // c-ares: an empty exchange.
  ['mx', 'null.test', found({ preference: 0, exchange: '' })],
  ['mx', 'only-a.test', NO_DATA],
  ['mx', 'parent.test', NO_DATA],
  ['mx', 'nowhere.test', NO_NAME],
  ['mx', 'servfail.test', failed('SERVFAIL')],
  ['mx', 'refused.test', failed('REFUSED')],
  ['mx', 'notimp.test', failed('NOTIMP')],
  ['mx', 'formerr.test', failed('FORMERR')],
  ['mx', 'garbage.test', failed('malformed reply')],
  ['mx', 'hangup.test', failed('no DNS server reachable')],
  ['mx', 'timeout.test', failed('timeout')],
  // Odd names come through as they are, in zone-file escapes; the finder judges them.
  [
    'mx',
    'odd.test',
    found(
      { preference: 10, exchange: 'bad host.test' },
      { preference: 20, exchange: '192.0.2.1' },
      { preference: 30, exchange: '_ok.test' },
      { preference: 40, exchange: 'back\\\\slash.test' },
    ),
  ],
  ['a', 'full.test', found('192.0.2.1', '192.0.2.2')],
  ['a', 'alias.test', found('192.0.2.1', '192.0.2.2')],
  ['a', 'lone.test', NO_DATA],
  ['a', 'null.test', NO_DATA],
  ['a', 'nowhere.test', NO_NAME],
  ['a', 'localhost', NO_NAME],
  ['a', 'servfail.test', failed('SERVFAIL')],
  ['aaaa', 'full.test', found('2001:db8::1')],
  ['aaaa', 'only-a.test', NO_DATA],
  ['cname', 'alias.test', found('full.test')],
  ['cname', 'loop.test', found('loop2.test')],
  ['cname', 'full.test', NO_DATA],
  ['cname', 'nowhere.test', NO_NAME],
  ['txt', 'full.test', found('v=spf1 -all', 'k'.repeat(700), '')],
  ['txt', '_dmarc.full.test', found('v=DMARC1; p=none')],
  ['txt', 'null.test', NO_DATA],
];
for (const [method, name, expected] of replies) {
  resolving(`${method} ${name}`, async ({ resolver }) => {
    assert.equal(await resolver[method](name), expected);
  });
}

for (const name of [
  '',
  '.',
  'a..b',
  '.a',
  `${'x'.repeat(64)}.test`,
  `${'abcdefg.'.repeat(40)}test`,
]) {
  resolving(
    `a name that the DNS cannot carry: ${JSON.stringify(name.slice(0, 20))}`,
    async (context) => {
      assert.equal(await context.resolver.mx(name), NO_NAME);
    },
  );
}

for (const name of [
  'full.test\0.nowhere.test',
  'full\\.test',
  'fü.test',
  'full test',
  'full.test\n',
]) {
  resolving(
    `a name that c-ares would misread is not asked: ${JSON.stringify(name)}`,
    async (context) => {
      assert.equal(await context.resolver.a(name), NO_NAME);
      assert.equal(context.dns.questions, []);
    },
  );
}

resolving('a large answer comes over TCP', async ({ dns, resolver }) => {
  const answer = await resolver.mx('large.test');
  assert.is(answer.kind === 'found' && answer.records.length, 90);
  assert.equal(
    dns.questions.map(({ transport }) => transport),
    ['udp', 'tcp'],
  );
});

resolving(
  'NXDOMAIN of an MX question is heard twice; the second word counts',
  async ({ dns, resolver }) => {
    assert.equal(await resolver.mx('nowhere.test'), NO_NAME);
    assert.is(dns.questions.length, 2);
    dns.questions.length = 0;
    assert.equal(await resolver.a('nowhere.test'), NO_NAME);
    assert.is(dns.questions.length, 1);
  },
);

resolving(
  'another server is asked about NXDOMAIN and about a failure',
  async ({ dns, resolver }) => {
    const other = await startDns({
      'nowhere.test': { MX: ['10 mx.nowhere.test'] },
      'servfail.test': { A: ['192.0.2.9'] },
      'refused.test': 'SERVFAIL',
    });
    const pair = createResolver({ servers: [dns.server, other.server], timeoutMs: 500, tries: 1 });
    try {
      const mx = { preference: 10, exchange: 'mx.nowhere.test' };
      assert.equal(await pair.mx('nowhere.test'), found(mx));
      assert.equal(await pair.a('servfail.test'), found('192.0.2.9'));
      assert.equal(await pair.a('refused.test'), failed('SERVFAIL'));
      dns.questions.length = 0;
      assert.equal(await resolver.a('servfail.test'), failed('SERVFAIL'));
      assert.is(dns.questions.length, 1, 'without another server there is no second question');
    } finally {
      pair.close();
      await other.stop();
    }
  },
);

resolving('a dead server beside a live one does no harm', async ({ dns }) => {
  const dead = await startDns({});
  await dead.stop();
  const pair = createResolver({ servers: [dead.server, dns.server], timeoutMs: 500, tries: 1 });
  assert.equal(await pair.mx('full.test'), fullMx);
  pair.close();
});

/** Method, name, and for how many seconds the answer is kept. */
const lives: readonly (readonly [Method, string, number])[] = [
  ['mx', 'full.test', 60],
  ['txt', 'full.test', 60],
  ['cname', 'alias.test', 60],
  ['a', 'brief.test', 7],
  ['aaaa', 'brief.test', 7],
  ['a', 'lasting.test', 300],
  ['mx', 'only-a.test', 30],
  ['a', 'nowhere.test', 30],
  ['a', 'servfail.test', 5],
];
for (const [method, name, seconds] of lives) {
  resolving(`${method} ${name} is kept for ${seconds} s`, async ({ dns, resolver, clock }) => {
    const answer = await resolver[method](name);
    clock.ms += seconds * 1_000 - 1;
    dns.questions.length = 0;
    assert.equal(await resolver[method](name.toUpperCase()), answer);
    assert.equal(dns.questions, []);
    clock.ms += 1;
    await resolver[method](name);
    assert.not.equal(dns.questions, []);
  });
}

resolving('an answer with TTL 0 is not kept', async ({ dns, resolver }) => {
  await resolver.a('unkept.test');
  await resolver.a('unkept.test');
  assert.is(dns.questions.length, 2);
});

resolving('a clock set back empties what was kept before', async ({ dns, resolver, clock }) => {
  await resolver.mx('full.test');
  clock.ms -= 3_600_000;
  await resolver.mx('full.test');
  assert.is(dns.questions.length, 2);
});

resolving(
  'a changed zone is seen once the old answer has aged',
  async ({ dns, resolver, clock }) => {
    assert.equal(await resolver.a('servfail.test'), failed('SERVFAIL'));
    dns.zones['servfail.test'] = { A: ['192.0.2.8'] };
    assert.equal(await resolver.a('servfail.test'), failed('SERVFAIL'));
    clock.ms += 5_000;
    assert.equal(await resolver.a('servfail.test'), found('192.0.2.8'));
  },
);

resolving(
  'one question for all who ask at the same time, one for each type',
  async ({ dns, resolver }) => {
    const asked = Array.from({ length: 50 }, (_, at) =>
      at % 2 === 0 ? 'full.test' : 'Full.TEST.',
    );
    const answers = await Promise.all(asked.map((name) => resolver.mx(name)));
    for (const answer of answers) assert.equal(answer, fullMx);
    await Promise.all([resolver.a('full.test'), resolver.aaaa('full.test')]);
    assert.equal(dns.questions.map(({ type }) => type).sort(), ['A', 'AAAA', 'MX']);
  },
);

resolving(
  'the cache is bounded: the oldest of more than 10,000 answers is asked for again',
  async (context) => {
    const { dns, resolver } = context;
    const LIMIT = 10_000;
    await resolver.a('only-a.test');
    await resolver.a('lasting.test');
    for (let at = 0; at < LIMIT - 1; at += 100) {
      const names = Array.from(
        { length: Math.min(100, LIMIT - 1 - at) },
        (_, n) => `n${at + n}.gone.test`,
      );
      await Promise.all(names.map((name) => resolver.a(name)));
    }
    dns.questions.length = 0;
    await resolver.a('lasting.test');
    assert.equal(dns.questions, []);
    await resolver.a('only-a.test');
    assert.equal(dns.questions, [{ name: 'only-a.test', type: 'A', transport: 'udp' }]);
  },
);

resolving('close ends open questions and refuses new ones', async ({ dns }) => {
  const patient = createResolver({ servers: [dns.server] });
  const open = patient.mx('timeout.test');
  patient.close();
  assert.equal(await open, failed('cancelled'));
  assert.equal(await patient.mx('full.test'), failed('the resolver is closed'));
});

resolving('a malformed server is an error at the start', () => {
  assert.throws(() => createResolver({ servers: ['not-an-address'] }));
  assert.throws(() => createResolver({ servers: ['dns.example.test:53'] }));
});

resolving('the system servers are taken without asking them anything', () => {
  createResolver({ servers: null }).close();
});

resolving.run();
