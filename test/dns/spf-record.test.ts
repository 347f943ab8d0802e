// SPF records as receivers read them (RFC 7208), against a real server: what lets our host send, what does not, and what
// is an error for the whole record.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { findSpf } from '../../src/dns/spf-record.ts';
import { parseSpfTerm } from '../../src/dns/spf-term.ts';
import { startDns, type DnsServer, type DnsZones } from '../support/dns.ts';

const HOST = 'mail.host.test';
const ADDRESSES = { A: ['192.0.2.25'], AAAA: ['2001:db8::25'] };

const test = suite('spf records');
let dns: DnsServer;
let resolver: Resolver;
test.before(async () => {
  dns = await startDns({});
  resolver = createResolver({
    servers: [dns.server],
    timeoutMs: 200,
    tries: 1,
    keepsAnswers: false,
  });
});
test.after(async () => {
  resolver.close();
  await dns.stop();
});

const spf = async (record: string, others: DnsZones = {}): Promise<string> => {
  for (const name of Object.keys(dns.zones)) delete dns.zones[name];
  Object.assign(dns.zones, { [HOST]: ADDRESSES, 'send.a.test': { TXT: [record] } }, others);
  const finding = await findSpf(resolver, { name: 'send.a.test', host: HOST });
  return finding.kind === 'right' ? 'right' : `${finding.kind}: ${finding.detail}`;
};

test('terms are those of the grammar, and nothing else', () => {
  const right =
    'all -ALL ~all include:a.test a a:a.test a/24 a:a.test/24//64 a//64 mx mx:%{d} ptr ptr:a.test ip4:192.0.2.1 ' +
    'ip4:192.0.2.0/24 ip6:2001:db8::/32 ip6:::1/128 exists:%{i}.a.test redirect=a.test exp=%{d} x-y.z=1 x=';
  for (const term of right.split(' ')) assert.ok(parseSpfTerm(term), term);
  const wrong =
    'ALL. all:x all/8 include include: include:a/24 a: a/33 a//129 mx/x ip4 ip4:a.test ip4:192.0.2.0/33 ip4:::1 ip4:1.2.3 ' +
    'ip6:192.0.2.1 ip6:::1/129 exists ipv4:192.0.2.1 192.0.2.1 mail.host.test *all =x a:ü.test a:a.test\t~all';
  for (const term of wrong.split(' ')) assert.is(parseSpfTerm(term), null, term);
  assert.equal(parseSpfTerm('~IP6:2001:DB8::/32'), {
    kind: 'ip6',
    qualifier: '~',
    value: '2001:DB8::',
    bits4: 32,
    bits6: 32,
  });
});

test('an error anywhere makes the record useless to every receiver', async () => {
  for (const bad of ['ipv4:192.0.2.1', 'ip4:192.0.2.256', 'include:', 'mail.host.test']) {
    const said = await spf(`v=spf1 a:${HOST} ${bad} ~all`);
    assert.is(said.includes(`has \`${bad}\` in it, which is an error`), true, said);
  }
  assert.match(await spf(`v=spf1 a:${HOST}\u00a0~all`), /^wrong: .* is an error/);
  assert.is(await spf(`v=spf1   a:${HOST} x-new=thing  ~all  `), 'right');
});

test('every mechanism that asks counts towards ten lookups', async () => {
  const others = Array.from({ length: 9 }, (_, index) => `a:h${index}.test`).join(' ');
  assert.is(await spf(`v=spf1 ${others} a:${HOST} ~all`), 'right');
  for (const one of ['a', 'mx', 'ptr', 'exists:%{i}.a.test']) {
    const said = await spf(`v=spf1 ${others} ${one} a:${HOST} ~all`);
    assert.match(said, /^wrong: .* more than 10 lookups/, one);
  }
  const after = await spf(`v=spf1 a:${HOST} ${others} mx ptr ~all`);
  assert.is(after, 'right', 'a receiver ends at the first that matches');
});

test('another name with our address lets us send', async () => {
  const alias = { 'smtp.a.test': { A: ['192.0.2.25'] } };
  assert.is(await spf('v=spf1 a:smtp.a.test -all', alias), 'right');
  assert.is(
    await spf('v=spf1 a:web.a.test/24 -all', { 'web.a.test': { A: ['192.0.2.80'] } }),
    'right',
  );
  assert.match(
    await spf('v=spf1 a:web.a.test -all', { 'web.a.test': { A: ['192.0.2.80'] } }),
    /^wrong: .* reaches `-all`/,
  );
  assert.match(
    await spf(`v=spf1 -ip4:192.0.2.0/24 -ip6:2001:db8::/32 a:${HOST} ~all`),
    /^wrong: .* reaches `-ip/,
  );
  const inside = { 'spf.a.test': { TXT: ['v=spf1 ip4:192.0.2.25 -all'] } };
  assert.is(await spf('v=spf1 include:spf.a.test -all', inside), 'right');
  assert.is(await spf('v=spf1 redirect=spf.a.test', inside), 'right');
});

test('where the addresses of our host cannot be had, nothing is known', async () => {
  for (const fault of ['SERVFAIL', 'TIMEOUT'] as const) {
    const said = await spf('v=spf1 ip4:192.0.2.0/24 -all', { [HOST]: fault });
    assert.match(said, /^unknown: .* mail\.host\.test/);
    assert.is(await spf(`v=spf1 ip4:192.0.2.0/24 a:${HOST} -all`, { [HOST]: fault }), 'right');
  }
  const half = { [HOST]: { A: ADDRESSES.A, AAAA: 'SERVFAIL' } } as const;
  assert.is(await spf('v=spf1 ip4:192.0.2.25 -all', half), 'right');
});

test('what a zone says is shown short and printable', async () => {
  const bell = '\u0000\u0007';
  for (const record of [
    `v=spf1 -all/${bell}`,
    `v=spf1 -a:${HOST}/${bell}${'x'.repeat(5_000)} ~all`,
    `v=spf1 include:${bell}.test ~all`,
    `v=spf1 include:${'x'.repeat(5_000)} ~all`,
    `v=spf1 -ip4:192.0.2.25/32 ${'x'.repeat(5_000)}=`,
  ]) {
    const said = await spf(record);
    assert.match(said, /^wrong: [\x20-\x7e…]+$/);
    assert.ok(said.length < 500, said);
  }
});

test.run();
