// The MX finder over a real resolver and a real DNS server on loopback. Most cases are rows: a domain of the zone
// map below, and what becomes of it in one line.

import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createMxFinder } from '../../src/dns/mx.ts';
import type { MxFinderOptions, MxResult } from '../../src/dns/mx.ts';
import { ADDRESSES_PER_ATTEMPT_MAX } from '../../src/dns/mx-hosts.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import type { Resolver } from '../../src/dns/resolver.ts';
import { startDns } from '../support/dns.ts';
import type { DnsServer, DnsZones } from '../support/dns.ts';

type Context = { dns: DnsServer; resolver: Resolver };
const finding = suite<Context>('mx');

// Documentation addresses stand for the public ones, so the guard of these tests opens them; 198.51.100.0/24 stays shut.
const guard = createAddressGuard({
  allow: ['192.0.2.0/24', '203.0.113.0/24', '2001:db8::/32'],
  ownAddresses: () => ['198.51.100.50'],
});

function zones(): DnsZones {
  const chain: DnsZones = {};
  for (let at = 0; at < 18; at += 1)
    chain[`c${at}.chain.test`] = { CNAME: `c${at + 1}.chain.test` };
  return {
    ...chain,
    'c18.chain.test': { MX: ['10 a.hosts.test'] },
    'a.hosts.test': { A: ['192.0.2.1'] },
    'b.hosts.test': { A: ['192.0.2.2'] },
    'c.hosts.test': { A: ['192.0.2.3'] },
    'dual.hosts.test': { A: ['192.0.2.4'], AAAA: ['2001:db8::4'] },
    'six.hosts.test': { AAAA: ['2001:db8::6'] },
    'many.hosts.test': { A: Array.from({ length: 9 }, (_, at) => `203.0.113.${at + 1}`) },
    'many-dual.hosts.test': {
      A: Array.from({ length: 9 }, (_, at) => `203.0.113.${at + 1}`),
      AAAA: ['2001:db8::9'],
    },
    'two.hosts.test': { A: ['192.0.2.21', '192.0.2.22'] },
    'alias.hosts.test': { CNAME: 'a.hosts.test' },
    'lone.hosts.test': { CNAME: 'a.hosts.test', loneCname: true },
    'alias-loop.hosts.test': { CNAME: 'alias-loop2.hosts.test', loneCname: true },
    'alias-loop2.hosts.test': { CNAME: 'alias-loop.hosts.test', loneCname: true },
    'under_score.hosts.test': { A: ['192.0.2.9'] },
    'cname-broken.hosts.test': { CNAME: 'SERVFAIL' },
    'empty.hosts.test': { TXT: ['no address'] },
    'servfail.hosts.test': 'SERVFAIL',
    'timeout.hosts.test': 'TIMEOUT',
    'half.hosts.test': { A: 'SERVFAIL', AAAA: ['2001:db8::7'] },
    'half-empty.hosts.test': { AAAA: 'SERVFAIL' },
    'shut.hosts.test': { A: ['127.0.0.1'], AAAA: ['::1'] },
    'shut2.hosts.test': { A: ['10.0.0.1', '169.254.169.254'] },
    'mapped.hosts.test': { AAAA: ['::ffff:127.0.0.1'] },
    'half-shut.hosts.test': { A: ['127.0.0.1', '192.0.2.10'] },
    'shut-half.hosts.test': { A: ['127.0.0.1'], AAAA: 'SERVFAIL' },
    'self.hosts.test': { A: ['192.0.2.50'] },
    'ours.hosts.test': { A: ['198.51.100.50'] },

    'plain.test': { MX: ['10 a.hosts.test'] },
    'case.test': { MX: ['10 A.Hosts.TEST.'] },
    'order.test': { MX: ['30 c.hosts.test', '10 a.hosts.test', '20 b.hosts.test'] },
    'extreme.test': { MX: ['65535 b.hosts.test', '0 a.hosts.test'] },
    'twice.test': { MX: ['30 a.hosts.test', '20 b.hosts.test', '10 a.hosts.test'] },
    'a-and-mx.test': { MX: ['10 a.hosts.test'], A: ['192.0.2.99'] },
    'xn--mnchen-3ya.test': { MX: ['10 a.hosts.test'] },
    'under_score.test': { MX: ['10 under_score.hosts.test'] },

    'implicit.test': { A: ['192.0.2.30'] },
    'implicit6.test': { AAAA: ['2001:db8::30'] },
    'implicit-shut.test': { A: ['192.168.1.1'] },
    'implicit-servfail.test': { A: 'SERVFAIL' },
    'parked.test': { TXT: ['nothing here'] },
    'below.parent.test': { A: ['192.0.2.31'] },

    'null.test': { MX: ['0 .'], A: ['192.0.2.32'] },
    'null10.test': { MX: ['10 .'] },
    'nulls.test': { MX: ['0 .', '5 .'] },
    'null-and-real.test': { MX: ['0 .', '10 a.hosts.test'] },
    'null-and-bad.test': { MX: ['0 .', '10 192.0.2.1'] },
    'ip-name.test': { MX: ['10 192.0.2.1'], A: ['192.0.2.33'] },
    'ip-names.test': { MX: ['10 192.0.2.1', '20 [192.0.2.1]', '30 ::1', '40 0x7f.1', '50 x.1'] },
    'bad-labels.test': {
      MX: ['10 -a.test', '20 a-.test', '30 a b.test', '40 ä.test', '50 a\\b.test'],
    },
    'mixed.test': { MX: ['10 192.0.2.1', '20 bad host.test', '30 b.hosts.test'] },

    'alias.test': { CNAME: 'plain.test' },
    'alias-of-alias.test': { CNAME: 'ALIAS.test.' },
    'lone-alias.test': { CNAME: 'plain.test', loneCname: true },
    'alias-implicit.test': { CNAME: 'implicit.test' },
    'alias-null.test': { CNAME: 'null.test' },
    'alias-servfail.test': { CNAME: 'servfail.test' },
    'dangling.test': { CNAME: 'nowhere.test' },
    'loop.test': { CNAME: 'loop2.test' },
    'loop2.test': { CNAME: 'loop.test' },
    'self-loop.test': { CNAME: 'self-loop.test' },
    'bad-alias.test': { CNAME: 'bad name.test' },
    'cname-broken.test': { CNAME: 'SERVFAIL', MX: ['10 a.hosts.test'] },
    'cname-broken-a.test': { CNAME: 'SERVFAIL', A: ['192.0.2.34'] },

    'servfail.test': { MX: 'SERVFAIL', A: ['192.0.2.35'] },
    'refused.test': { MX: 'REFUSED', A: ['192.0.2.35'] },
    'timeout.test': { MX: 'TIMEOUT', A: ['192.0.2.35'] },
    'garbage.test': { MX: 'GARBAGE', A: ['192.0.2.35'] },
    'hangup.test': { MX: 'HANGUP', A: ['192.0.2.35'] },

    'host-alias.test': { MX: ['10 alias.hosts.test'] },
    'host-lone-alias.test': { MX: ['10 lone.hosts.test'] },
    'host-alias-loop.test': { MX: ['10 alias-loop.hosts.test'] },
    'host-cname-broken.test': { MX: ['10 cname-broken.hosts.test'] },
    'host-dual.test': { MX: ['10 dual.hosts.test'] },
    'host-six.test': { MX: ['10 six.hosts.test'] },
    'host-gone.test': { MX: ['10 gone.hosts.test'] },
    'hosts-gone.test': { MX: ['10 gone.hosts.test', '20 empty.hosts.test'], A: ['192.0.2.36'] },
    'gone-and-good.test': { MX: ['10 gone.hosts.test', '20 b.hosts.test'] },
    'host-servfail.test': { MX: ['10 servfail.hosts.test'] },
    'host-timeout.test': { MX: ['10 timeout.hosts.test'] },
    'failed-and-good.test': { MX: ['10 servfail.hosts.test', '20 b.hosts.test'] },
    'failed-and-gone.test': { MX: ['10 servfail.hosts.test', '20 gone.hosts.test'] },
    'failed-and-shut.test': { MX: ['10 shut.hosts.test', '20 servfail.hosts.test'] },
    'half-failed.test': { MX: ['10 half.hosts.test'] },
    'half-empty.test': { MX: ['10 half-empty.hosts.test'] },
    'shut.test': { MX: ['10 shut.hosts.test', '20 shut2.hosts.test'] },
    'shut-and-gone.test': { MX: ['10 gone.hosts.test', '20 shut.hosts.test'] },
    'shut-and-good.test': { MX: ['10 shut.hosts.test', '20 b.hosts.test'] },
    'half-shut.test': { MX: ['10 half-shut.hosts.test'] },
    'shut-half.test': { MX: ['10 shut-half.hosts.test'] },
    'mapped.test': { MX: ['10 mapped.hosts.test'] },

    'self-best.test': { MX: ['10 SELF.hosts.test', '20 b.hosts.test'] },
    'self-equal.test': { MX: ['10 self.hosts.test', '10 b.hosts.test'] },
    'self-second.test': {
      MX: ['10 a.hosts.test', '20 self.hosts.test', '20 b.hosts.test', '30 c.hosts.test'],
    },
    'ours-best.test': { MX: ['10 ours.hosts.test', '20 b.hosts.test'] },
    'ours-second.test': { MX: ['10 a.hosts.test', '20 ours.hosts.test', '30 c.hosts.test'] },
    'ours-after-failed.test': { MX: ['10 servfail.hosts.test', '20 ours.hosts.test'] },

    'long.test': { MX: [...gone(7), '20 b.hosts.test'] },
    'too-long.test': { MX: [...gone(30), '99 b.hosts.test'] },
    'wide.test': { MX: ['10 many.hosts.test', '20 two.hosts.test', '30 c.hosts.test'] },
    'one-wide.test': { MX: ['10 many.hosts.test'] },
    'wide-dual.test': { MX: ['10 many-dual.hosts.test'] },
  };
}

function gone(count: number): string[] {
  return Array.from({ length: count }, (_, at) => `${at + 1} g${at}.gone.test`);
}

finding.before(async (context) => {
  context.dns = await startDns(zones());
  context.resolver = createResolver({ servers: [context.dns.server], timeoutMs: 500, tries: 1 });
});
finding.before.each(({ dns }) => {
  dns.questions.length = 0;
});
finding.after(async ({ dns, resolver }) => {
  resolver.close();
  await dns.stop();
});

/** `random` 0.999… keeps the order of the zone map, so that rows can be exact. */
const inZoneOrder = (): number => 0.999_999;

function find(
  context: Context,
  domain: string,
  options: Partial<MxFinderOptions> = {},
): Promise<MxResult> {
  const given = { resolver: context.resolver, guard, random: inZoneOrder, ...options };
  return createMxFinder(given).findHosts(domain);
}

function inOneLine(result: MxResult): string {
  if (result.kind === 'deferred') return `deferred ${result.code} ${result.enhanced}`;
  if (result.kind === 'refused') {
    return `refused ${result.code} ${result.enhanced}${result.permanent ? ' for good' : ''}`;
  }
  const hosts = result.hosts.map(({ name, preference, addresses }) => {
    return `${preference} ${name} ${addresses.map(({ address }) => address).join(' ')}`;
  });
  const via = result.cnames.length === 0 ? '' : ` via ${result.cnames.join(' ')}`;
  return `${result.implicit ? 'implicit: ' : ''}${hosts.join(', ')}${via}`;
}

const A = 'a.hosts.test 192.0.2.1';
const B = 'b.hosts.test 192.0.2.2';
const C = 'c.hosts.test 192.0.2.3';
const DNS_FAILED = 'deferred dns_failed 4.4.3';
const NULL_MX = 'refused null_mx 5.1.10 for good';
const NO_DOMAIN = 'refused no_domain 5.1.2 for good';
const LITERAL = 'refused domain_literal 5.1.2 for good';
const NO_HOST_NOW = 'refused no_usable_host 4.4.4';
const NO_HOST = 'refused no_usable_host 5.4.4 for good';
const GUARDED = 'refused address_refused 5.4.4 for good';
const LOOP = 'refused mail_loop 5.4.6 for good';
const SELF = { ownHostname: 'Self.hosts.test.' };

const rows: readonly (readonly [string, string, Partial<MxFinderOptions>?])[] = [
  // Names.
  ['plain.test', `10 ${A}`],
  ['PLAIN.Test', `10 ${A}`],
  ['plain.test.', `10 ${A}`],
  ['case.test', `10 ${A}`],
  ['münchen.test', `10 ${A}`],
  ['MÜNCHEN.test', `10 ${A}`],
  ['münchen。test', `10 ${A}`],
  ['under_score.test', '10 under_score.hosts.test 192.0.2.9'],
  ['nowhere.test', NO_DOMAIN],
  ['', NO_DOMAIN],
  ['.', NO_DOMAIN],
  ['a..test', NO_DOMAIN],
  ['-a.test', NO_DOMAIN],
  ['a b.test', NO_DOMAIN],
  ['a/b.test', NO_DOMAIN],
  ['ü/../b.test', NO_DOMAIN],
  ['%61ü.test', NO_DOMAIN],
  ['plain.test\0x', NO_DOMAIN],
  ['plain.test\n', NO_DOMAIN],
  [`${'x'.repeat(64)}.test`, NO_DOMAIN],
  [`${'abcdefg.'.repeat(40)}test`, NO_DOMAIN],
  ['127.1', NO_DOMAIN],
  ['2130706433', NO_DOMAIN],
  ['0x7f.0x1', NO_DOMAIN],
  ['[192.0.2.1]', LITERAL],
  ['[IPv6:2001:db8::1]', LITERAL],
  ['192.0.2.1', LITERAL],
  ['2001:db8::1', LITERAL],
  ['１９２.0.2.1', LITERAL],

  // Order.
  ['order.test', `10 ${A}, 20 ${B}, 30 ${C}`],
  ['extreme.test', `0 ${A}, 65535 ${B}`],
  ['twice.test', `10 ${A}, 20 ${B}`],
  ['a-and-mx.test', `10 ${A}`],

  // No MX.
  ['implicit.test', 'implicit: 0 implicit.test 192.0.2.30'],
  ['implicit6.test', 'implicit: 0 implicit6.test 2001:db8::30'],
  ['implicit-shut.test', GUARDED],
  ['implicit-servfail.test', DNS_FAILED],
  ['parked.test', NO_HOST],
  ['parent.test', NO_HOST],
  ['implicit6.test', NO_HOST_NOW, { addressPolicy: 'ipv4_only' }],

  // Null MX and unusable records.
  ['null.test', NULL_MX],
  ['null10.test', NULL_MX],
  ['nulls.test', NULL_MX],
  ['null-and-real.test', `10 ${A}`],
  ['null-and-bad.test', NO_HOST_NOW],
  ['ip-name.test', NO_HOST_NOW],
  ['ip-names.test', NO_HOST_NOW],
  ['bad-labels.test', NO_HOST_NOW],
  ['mixed.test', `30 ${B}`],

  // CNAMEs of the domain.
  ['alias.test', `10 ${A} via plain.test`],
  ['alias-of-alias.test', `10 ${A} via alias.test plain.test`],
  ['lone-alias.test', `10 ${A} via plain.test`],
  ['alias-implicit.test', 'implicit: 0 implicit.test 192.0.2.30 via implicit.test'],
  ['alias-null.test', NULL_MX],
  ['alias-servfail.test', DNS_FAILED],
  ['dangling.test', NO_DOMAIN],
  ['loop.test', DNS_FAILED],
  ['self-loop.test', DNS_FAILED],
  ['bad-alias.test', DNS_FAILED],
  ['c1.chain.test', DNS_FAILED],
  ['cname-broken.test', `10 ${A}`],
  ['cname-broken-a.test', DNS_FAILED],

  // The DNS does not answer: never the A record instead.
  ['servfail.test', DNS_FAILED],
  ['refused.test', DNS_FAILED],
  ['timeout.test', DNS_FAILED],
  ['garbage.test', DNS_FAILED],
  ['hangup.test', DNS_FAILED],

  // Addresses of the hosts.
  ['host-alias.test', '10 alias.hosts.test 192.0.2.1'],
  ['host-lone-alias.test', '10 lone.hosts.test 192.0.2.1'],
  ['host-alias-loop.test', DNS_FAILED],
  ['host-cname-broken.test', DNS_FAILED],
  ['host-gone.test', NO_HOST_NOW],
  ['hosts-gone.test', NO_HOST_NOW],
  ['gone-and-good.test', `20 ${B}`],
  ['host-servfail.test', DNS_FAILED],
  ['host-timeout.test', DNS_FAILED],
  ['failed-and-good.test', `20 ${B}`],
  ['failed-and-gone.test', DNS_FAILED],
  ['failed-and-shut.test', DNS_FAILED],
  ['half-failed.test', '10 half.hosts.test 2001:db8::7'],
  ['half-empty.test', DNS_FAILED],
  ['shut.test', GUARDED],
  ['shut-and-gone.test', GUARDED],
  ['shut-and-good.test', `20 ${B}`],
  ['half-shut.test', '10 half-shut.hosts.test 192.0.2.10'],
  ['shut-half.test', DNS_FAILED],
  ['shut-half.test', GUARDED, { addressPolicy: 'ipv4_only' }],
  ['mapped.test', GUARDED],

  // Families.
  ['host-dual.test', '10 dual.hosts.test 192.0.2.4 2001:db8::4'],
  ['host-dual.test', '10 dual.hosts.test 2001:db8::4 192.0.2.4', { addressPolicy: 'ipv6_first' }],
  ['host-dual.test', '10 dual.hosts.test 192.0.2.4', { addressPolicy: 'ipv4_only' }],
  ['host-dual.test', '10 dual.hosts.test 2001:db8::4', { addressPolicy: 'ipv6_only' }],
  ['host-six.test', '10 six.hosts.test 2001:db8::6'],
  ['host-six.test', NO_HOST_NOW, { addressPolicy: 'ipv4_only' }],

  // This machine in the list.
  ['self-best.test', LOOP, SELF],
  ['self-equal.test', LOOP, SELF],
  ['self-second.test', `10 ${A}`, SELF],
  ['self-best.test', `10 self.hosts.test 192.0.2.50, 20 ${B}`],
  ['implicit.test', LOOP, { ownHostname: 'implicit.test' }],
  ['ours-best.test', LOOP],
  ['ours-second.test', `10 ${A}`],
  ['ours-after-failed.test', DNS_FAILED],

  // Limits.
  [
    'c2.chain.test',
    `10 ${A} via ${Array.from({ length: 16 }, (_, at) => `c${at + 3}.chain.test`).join(' ')}`,
  ],
  ['long.test', `20 ${B}`],
  ['too-long.test', NO_HOST_NOW],
];
for (const [at, [domain, expected, options]] of rows.entries()) {
  const shown = JSON.stringify(domain.slice(0, 40));
  finding(
    `${at + 1}: ${shown} ${JSON.stringify(options ?? {})} -> ${expected}`,
    async (context) => {
      assert.is(inOneLine(await find(context, domain, options)), expected);
    },
  );
}

finding(
  'the result names the original domain, with families, for the policies that need it',
  async (context) => {
    assert.equal(await find(context, 'ALIAS.test'), {
      kind: 'hosts',
      domain: 'alias.test',
      hosts: [
        { name: 'a.hosts.test', preference: 10, addresses: [{ address: '192.0.2.1', family: 4 }] },
      ],
      names: ['a.hosts.test'],
      implicit: false,
      cnames: ['plain.test'],
    });
  },
);

finding('names that are no domain and literals are not asked of the DNS', async (context) => {
  for (const domain of ['[192.0.2.1]', '192.0.2.1', 'a..test', '', '127.1'])
    await find(context, domain);
  assert.equal(context.dns.questions, []);
});

finding('NXDOMAIN is heard twice before it is final', async (context) => {
  assert.is(inOneLine(await find(context, 'never-asked-before.test')), NO_DOMAIN);
  assert.is(context.dns.questions.filter(({ type }) => type === 'MX').length, 2);
});

finding('after a failed MX question no address is asked for', async (context) => {
  context.dns.zones['fresh-servfail.test'] = { MX: 'SERVFAIL', A: ['192.0.2.1'] };
  assert.is(inOneLine(await find(context, 'fresh-servfail.test')), DNS_FAILED);
  assert.equal(context.dns.questions.map(({ type }) => type).sort(), ['CNAME', 'MX']);
});

finding('messages say what to do and what failed', async (context) => {
  const words: readonly (readonly [string, RegExp])[] = [
    [
      'shut.test',
      /address guard.*shut\.hosts\.test: 127\.0\.0\.1 is a loopback address.*MAILSTEAD_PRIVATE_HOSTS/,
    ],
    ['servfail.test', /MX records of servfail\.test failed: SERVFAIL/],
    ['timeout.test', /timeout/],
    ['host-servfail.test', /servfail\.hosts\.test: SERVFAIL/],
    ['loop.test', /CNAME records of loop\.test form a loop at loop\.test/],
    ['c1.chain.test', /more than 16/],
    ['null.test', /null MX/],
    ['dangling.test', /nowhere\.test does not exist/],
    ['192.0.2.1', /192\.0\.2\.1/],
    ['host-gone.test', /usable name and an address/],
  ];
  for (const [domain, pattern] of words) {
    const result = await find(context, domain);
    assert.match(result.kind === 'hosts' ? '' : result.message, pattern, domain);
  }
});

finding('a message stays short, however long the domain', async (context) => {
  const result = await find(context, `[${'x'.repeat(100_000)}]`);
  assert.ok(result.kind === 'refused' && result.message.length < 400);
});

finding('one attempt has at most five addresses, and every host its share', async (context) => {
  const wide = await find(context, 'wide.test');
  assert.ok(wide.kind === 'hosts');
  if (wide.kind !== 'hosts') return;
  assert.equal(
    wide.hosts.map(({ name, addresses }) => [name, addresses.length]),
    [
      ['many.hosts.test', 2],
      ['two.hosts.test', 2],
      ['c.hosts.test', 1],
    ],
  );
  const one = await find(context, 'one-wide.test');
  assert.is(one.kind === 'hosts' && one.hosts[0]?.addresses.length, ADDRESSES_PER_ATTEMPT_MAX);
});

finding(
  'a host with many addresses of one family is tried over the other as well',
  async (context) => {
    const dual = await find(context, 'wide-dual.test');
    const families =
      dual.kind === 'hosts' ? dual.hosts[0]?.addresses.map(({ family }) => family) : [];
    assert.equal(families, [4, 4, 4, 4, 6]);
  },
);

finding('who asks may say which families to take, for this question', async (context) => {
  const finder = createMxFinder({ resolver: context.resolver, guard, random: inZoneOrder });
  const line = async (domain: string, addresses?: 'ipv4_only' | 'ipv6_only'): Promise<string> =>
    inOneLine(await finder.findHosts(domain, addresses));
  assert.is(await line('host-dual.test', 'ipv6_only'), '10 dual.hosts.test 2001:db8::4');
  assert.is(await line('host-dual.test', 'ipv4_only'), '10 dual.hosts.test 192.0.2.4');
  assert.is(await line('host-dual.test'), '10 dual.hosts.test 192.0.2.4 2001:db8::4');
  const none = await finder.findHosts('host-six.test', 'ipv4_only');
  assert.match(none.kind === 'hosts' ? '' : none.message, /usable name and an IPv4 address/);
});

finding(
  'equal preference is shuffled, unequal never, and the addresses of a host are',
  async (context) => {
    const equal = ['a', 'b', 'c'].map((letter) => `20 ${letter}.hosts.test`);
    context.dns.zones['equal.test'] = { MX: ['10 two.hosts.test', ...equal] };
    const firsts = new Map<string, number>();
    const firstAddresses = new Map<string, number>();
    const random = seeded(7);
    const ROUNDS = 600;
    for (let round = 0; round < ROUNDS; round += 1) {
      const result = await find(context, 'equal.test', { random });
      assert.ok(result.kind === 'hosts');
      if (result.kind !== 'hosts') return;
      const [best, next] = result.hosts;
      assert.is(best?.name, 'two.hosts.test');
      count(firsts, next?.name ?? '');
      count(firstAddresses, best?.addresses[0]?.address ?? '');
    }
    assert.equal([...firsts.keys()].sort(), ['a.hosts.test', 'b.hosts.test', 'c.hosts.test']);
    for (const times of firsts.values())
      assert.ok(Math.abs(times - ROUNDS / 3) < 60, String(times));
    assert.is(firstAddresses.size, 2);
    for (const times of firstAddresses.values())
      assert.ok(Math.abs(times - ROUNDS / 2) < 60, String(times));
    // All of it out of the cache: one question a name and type.
    assert.ok(context.dns.questions.length <= 12, String(context.dns.questions.length));
  },
);

finding('the sixth host is asked about only when the first five are of no use', async (context) => {
  const good = Array.from({ length: 8 }, (_, at) => `${at + 1} h${at}.fresh.test`);
  context.dns.zones['eight.test'] = { MX: good };
  for (let at = 0; at < 8; at += 1)
    context.dns.zones[`h${at}.fresh.test`] = { A: [`192.0.2.${at + 100}`] };
  const result = await find(context, 'eight.test', { addressPolicy: 'ipv4_only' });
  assert.is(result.kind === 'hosts' && result.hosts.length, 5);
  assert.is(context.dns.questions.filter(({ type }) => type === 'A').length, 5);
});

/** Park and Miller's generator: the same draw on every run. */
function seeded(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 48_271) % 2_147_483_647;
    return state / 2_147_483_647;
  };
}

function count(counts: Map<string, number>, key: string): void {
  counts.set(key, (counts.get(key) ?? 0) + 1);
}

finding.run();
