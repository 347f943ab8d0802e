// DANE: which records ask for what, over real DNS packets; and which chains of certificates satisfy them.
import { X509Certificate } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { daneMismatch, findDane, findSecureHosts } from '../../src/dns/dane.ts';
import { createSecureResolver, type TlsaRecord } from '../../src/dns/dnssec.ts';
import { issue, sha256, sha512, type Issued } from '../support/certificates.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

const test = suite('dane');
let dns: DnsServer;
const some = sha256(Buffer.from('some'));

test.before(async () => {
  dns = await startDns({
    'a.test': { MX: ['10 mx.a.test'] },
    'mx.a.test': { A: ['192.0.2.1'] },
    '_25._tcp.mx.a.test': { TLSA: [`3 1 1 ${some}`] },
    'bare.a.test': { A: ['192.0.2.1'] },
    'odd.a.test': { A: ['192.0.2.1'] },
    '_25._tcp.odd.a.test': {
      TLSA: [`0 0 1 ${some}`, `1 1 1 ${some}`, '3 1 1 abcd', `3 7 1 ${some}`],
    },
    'agile.a.test': { A: ['192.0.2.1'] },
    '_25._tcp.agile.a.test': {
      TLSA: [`3 1 1 ${some}`, `3 1 2 ${some}${some}`, `2 1 1 ${some}`],
    },
    'bogus.a.test': { A: ['192.0.2.1'] },
    '_25._tcp.bogus.a.test': 'SERVFAIL',
    'dark.a.test': 'SERVFAIL',
    'half.a.test': { A: ['192.0.2.1'], AAAA: 'SERVFAIL' },
    '_25._tcp.half.a.test': { TLSA: [`3 1 1 ${some}`] },
    'unsigned.a.test': { A: ['192.0.2.1'] },
    '_25._tcp.unsigned.a.test': { CNAME: 'tlsa.insecure.test' },
    'tlsa.insecure.test': { TLSA: [`3 1 1 ${some}`] },
    'alias.a.test': { CNAME: 'mx.a.test' },
    'own.a.test': { CNAME: 'bare.a.test' },
    '_25._tcp.own.a.test': { TLSA: [`3 1 1 ${some}`] },
    'out.a.test': { CNAME: 'mx.insecure.test' },
    '_25._tcp.out.a.test': { TLSA: [`3 1 1 ${some}`] },
    'mx.insecure.test': { A: ['192.0.2.3'] },
    '_25._tcp.mx.insecure.test': 'SERVFAIL',
    'insecure.test': { MX: ['10 mx.insecure.test'] },
    'direct.a.test': { A: ['192.0.2.1'] },
    'www.a.test': { CNAME: 'a.test' },
    'broken.a.test': { MX: 'SERVFAIL' },
  });
  dns.secure.add('a.test');
});
test.after(() => dns.stop());

const resolver = () => createSecureResolver({ server: dns.server });
const kindOf = async (host: string): Promise<string> => (await findDane(resolver(), host)).kind;

test('the hosts of a domain: proven, not proven, not to be had', async () => {
  assert.equal(await findSecureHosts(resolver(), 'a.test'), {
    kind: 'secure',
    hosts: new Set(['mx.a.test']),
    names: ['a.test'],
  });
  assert.equal(await findSecureHosts(resolver(), 'insecure.test'), { kind: 'insecure' });
  assert.is((await findSecureHosts(resolver(), 'broken.a.test')).kind, 'failed');
  const implicit = await findSecureHosts(resolver(), 'direct.a.test');
  assert.equal(implicit.kind === 'secure' && [...implicit.hosts], ['direct.a.test']);
  const led = await findSecureHosts(resolver(), 'www.a.test');
  assert.equal(led.kind === 'secure' && led.names, ['www.a.test', 'a.test']);
});

test('the outcome table of TLSA lookups', async () => {
  assert.is(await kindOf('mx.a.test'), 'usable');
  assert.is(await kindOf('bare.a.test'), 'none', 'securely absent');
  assert.is(
    await kindOf('odd.a.test'),
    'unusable',
    'PKIX usages, a short digest, a strange selector',
  );
  assert.is(await kindOf('bogus.a.test'), 'failed');
  assert.is(await kindOf('dark.a.test'), 'failed');
  assert.is(await kindOf('half.a.test'), 'usable', 'one family is enough');
  assert.is(await kindOf('unsigned.a.test'), 'none', 'TLSA that is not proven');
});

test('TLSA is not asked for where the addresses are not proven', async () => {
  dns.questions.length = 0;
  assert.is(await kindOf('mx.insecure.test'), 'none');
  assert.not.ok(dns.questions.some(({ type }) => type === 'TLSA'));
});

test('aliases: the end of the chain first, then the name of the MX', async () => {
  const base = async (host: string): Promise<unknown> => {
    const found = await findDane(resolver(), host);
    return found.kind === 'usable' ? found.base : found.kind;
  };
  assert.is(await base('alias.a.test'), 'mx.a.test');
  assert.is(await base('own.a.test'), 'own.a.test');
  assert.is(await base('out.a.test'), 'out.a.test', 'a signed alias to an unsigned zone');
});

test('of one kind, only the strongest digest counts', async () => {
  const found = await findDane(resolver(), 'agile.a.test');
  const kinds = found.kind === 'usable' ? found.records : [];
  assert.equal(
    kinds.map(({ usage, matching }) => [usage, matching]),
    [
      [3, 2],
      [2, 1],
    ],
  );
});

const record = (text: string): TlsaRecord => {
  const [usage, selector, matching, hex = ''] = text.split(' ');
  return {
    usage: Number(usage),
    selector: Number(selector),
    matching: Number(matching),
    data: Buffer.from(hex, 'hex'),
  };
};
const judge = (records: readonly string[], chain: readonly Issued[], names = ['mx.a.test']) =>
  daneMismatch(records.map(record), {
    chain: chain.map(({ der }) => der),
    names,
    now: new Date(),
  })?.failure ?? 'fits';

const root = issue({ commonName: 'root', isAuthority: true });
const middle = issue({ commonName: 'middle', isAuthority: true, issuer: root });
const leaf = issue({ names: ['mx.a.test'], issuer: middle });
const chain = [leaf, middle, root];

test('DANE-EE: every selector and matching type; name and date do not count', () => {
  const old = issue({ names: ['elsewhere.test'], from: -60, to: -30 });
  for (const what of ['der', 'spki'] as const) {
    const selector = what === 'der' ? 0 : 1;
    for (const [matching, data] of [
      [0, old[what].toString('hex')],
      [1, sha256(old[what])],
      [2, sha512(old[what])],
    ] as const) {
      assert.is(judge([`3 ${selector} ${matching} ${data}`], [old]), 'fits');
      assert.is(judge([`3 ${selector} ${matching} ${data}`], [leaf]), 'validation-failure');
    }
  }
  assert.is(judge([`3 1 1 ${some}`, `3 1 1 ${sha256(leaf.spki)}`], chain), 'fits', 'a rollover');
  assert.is(judge([`3 1 1 ${sha256(root.spki)}`], chain), 'validation-failure', 'not the leaf');
  assert.is(judge([`3 1 1 ${sha256(leaf.spki)}`], []), 'validation-failure', 'no certificate');
});

test('DANE-TA: an anchor in the chain, at any height, that really signed', () => {
  assert.is(judge([`2 0 1 ${sha256(root.der)}`], chain), 'fits');
  assert.is(judge([`2 1 2 ${sha512(middle.spki)}`], chain), 'fits');
  assert.is(judge([`2 1 1 ${sha256(root.spki)}`], [leaf, root, middle]), 'fits', 'any order');
  assert.is(judge([`2 1 1 ${some}`], chain), 'certificate-not-trusted');
  assert.is(judge([`2 0 1 ${sha256(leaf.der)}`], chain), 'certificate-not-trusted', 'the leaf');
  // The anchor is presented beside a certificate that it did not sign.
  const twin = issue({ commonName: 'middle', isAuthority: true });
  const forged = issue({ names: ['mx.a.test'], issuer: twin });
  assert.is(judge([`2 0 1 ${sha256(middle.der)}`], [forged, middle]), 'certificate-not-trusted');
  const noAuthority = issue({ commonName: 'middle', names: ['x.test'], issuer: root });
  const below = issue({ names: ['mx.a.test'], issuer: noAuthority });
  assert.is(
    judge([`2 0 1 ${sha256(root.der)}`], [below, noAuthority, root]),
    'certificate-not-trusted',
    'a server certificate signs nothing',
  );
});

test('DANE-TA: an anchor that only the record holds', () => {
  assert.is(judge([`2 0 0 ${root.der.toString('hex')}`], [leaf, middle]), 'fits');
  assert.is(judge([`2 1 0 ${root.spki.toString('hex')}`], [leaf, middle]), 'fits');
  assert.is(judge([`2 1 0 ${leaf.spki.toString('hex')}`], [leaf]), 'certificate-not-trusted');
});

test('a certificate with a key of a kind that nobody knows vouches for nothing', () => {
  const known = Buffer.from('06072a8648ce3d0201', 'hex'); // id-ecPublicKey
  const der = Buffer.from(middle.der);
  der[der.indexOf(known) + known.length - 1] = 0x7f;
  const strange = { ...middle, der };
  assert.throws(() => new X509Certificate(der).publicKey);
  for (const selector of [0, 1]) {
    const records = [`2 ${selector} 1 ${sha256(root.der)}`];
    assert.is(judge(records, [leaf, strange, root]), 'certificate-not-trusted');
  }
  assert.is(judge([`3 1 1 ${sha256(leaf.spki)}`], [strange]), 'validation-failure');
});

test('DANE-TA: name, date and purpose count', () => {
  const anchor = `2 0 1 ${sha256(root.der)}`;
  const of = (wanted: Parameters<typeof issue>[0]): readonly Issued[] => [
    issue({ issuer: root, ...wanted }),
    root,
  ];
  assert.is(judge([anchor], of({ names: ['other.test'] })), 'certificate-host-mismatch');
  assert.is(judge([anchor], of({ names: ['a.test'] }), ['mx.a.test', 'a.test']), 'fits');
  assert.is(judge([anchor], of({ names: ['*.a.test'] })), 'fits');
  assert.is(judge([anchor], of({ names: ['*.test'] })), 'certificate-host-mismatch');
  assert.is(judge([anchor], of({ commonName: 'mx.a.test' })), 'fits', 'RFC 7672 §3.2.3');
  assert.is(judge([anchor], of({ names: ['mx.a.test'], from: -9, to: -1 })), 'certificate-expired');
  assert.is(judge([anchor], of({ names: ['mx.a.test'], from: 1 })), 'certificate-expired');
  const forMail = of({ names: ['mx.a.test'], uses: ['1.3.6.1.5.5.7.3.4'] });
  assert.is(judge([anchor], forMail), 'certificate-not-trusted');
  const forServers = of({ names: ['mx.a.test'], uses: ['1.3.6.1.5.5.7.3.1'] });
  assert.is(judge([anchor], forServers), 'fits');
});

test.run();
