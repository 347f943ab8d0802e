// What is found of a record in the DNS, against a real server: the right value in every form that is right, and for every
// wrong one a sentence that helps to mend it.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  findCname,
  findDkim,
  findDmarc,
  findMx,
  findText,
  type Finding,
} from '../../src/dns/records.ts';
import { findSpf } from '../../src/dns/spf-record.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { startDns, type DnsRecords, type DnsServer, type DnsZones } from '../support/dns.ts';

const HOST = 'mail.host.test';
const KEY = `v=DKIM1; k=rsa; p=${'A'.repeat(300)}/${'b'.repeat(88)}==`;

const test = suite('dns records');
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

function publish(zones: DnsZones): void {
  for (const name of Object.keys(dns.zones)) delete dns.zones[name];
  Object.assign(dns.zones, zones);
}

/** `right`, or the kind and its words. */
const shown = (finding: Finding): string =>
  finding.kind === 'right' ? 'right' : `${finding.kind}: ${finding.detail}`;

const dkim = async (zone: DnsRecords | null): Promise<string> => {
  publish(zone === null ? {} : { 'm._domainkey.a.test': zone });
  return shown(await findDkim(resolver, { name: 'm._domainkey.a.test', value: KEY }));
};
const spf = async (txt: readonly string[], others: DnsZones = {}): Promise<string> => {
  publish({ 'send.a.test': { TXT: txt, MX: [`10 ${HOST}`] }, ...others });
  return shown(await findSpf(resolver, { name: 'send.a.test', host: HOST }));
};

test('a DKIM key is right in any chunks, order and white space', async () => {
  assert.is(await dkim({ TXT: [KEY] }), 'right');
  assert.is(await dkim({ TXT: [KEY], chunkBytes: 100 }), 'right');
  assert.is(await dkim({ TXT: [KEY], chunkBytes: 1 }), 'right');
  const p = KEY.slice(KEY.indexOf('p='));
  assert.is(await dkim({ TXT: [`${p};`] }), 'right', 'v and k have defaults');
  assert.is(await dkim({ TXT: [`v=DKIM1;k=rsa;t=s;${p.replace('/', ' / ')}`] }), 'right');
  assert.is(await dkim({ TXT: [`v=DKIM1; h=sha1:sha256; s=email; ${p}`] }), 'right');
  assert.is(await dkim({ TXT: ['google-site-verification=1', KEY] }), 'right');
});

test('a DKIM key that no verifier would take is wrong, and says why', async () => {
  assert.match(await dkim(null), /^absent: There is no TXT record at m\._domainkey\.a\.test/);
  assert.match(await dkim({ TXT: ['hello'] }), /^wrong: .*hold no DKIM key: "hello"/);
  assert.match(await dkim({ TXT: [KEY.replace('AAA', 'AAB')] }), /^wrong: .* another key/);
  assert.match(await dkim({ TXT: [KEY.slice(0, 255)] }), /^wrong: .* is cut off/);
  assert.match(await dkim({ TXT: ['v=DKIM1; k=rsa; p='] }), /^wrong: .* revokes it/);
  assert.match(await dkim({ TXT: [KEY.replace('k=rsa', 'k=ed25519')] }), /^wrong: .* type ed25519/);
  assert.match(await dkim({ TXT: [`${KEY}; h=sha1`] }), /^wrong: .* sha256/);
  assert.match(await dkim({ TXT: [`${KEY}; s=tlsrpt`] }), /^wrong: .* not for email/);
  const two = await dkim({ TXT: [KEY, KEY.replace('AAA', 'AAB')] });
  assert.match(two, /^wrong: There are 2 DKIM keys/);
});

test('a key behind a CNAME is right; a CNAME to nowhere is in the way', async () => {
  publish({
    'm._domainkey.a.test': { CNAME: 'keys.b.test' },
    'keys.b.test': { TXT: [KEY] },
  });
  const ask = () => findDkim(resolver, { name: 'm._domainkey.a.test', value: KEY });
  assert.is(shown(await ask()), 'right');
  dns.zones['keys.b.test'] = { A: ['192.0.2.1'] };
  assert.match(
    shown(await ask()),
    /^wrong: A CNAME record at m\._domainkey\.a\.test leads to keys/,
  );
});

test('SPF: our mechanism is found among others, in any order and by every way', async () => {
  assert.is(await spf([`v=spf1 a:${HOST} ~all`]), 'right');
  assert.is(
    await spf([`V=SPF1  include:none.test a:${HOST.toUpperCase()}/32 -all`], {
      'none.test': { TXT: ['v=spf1 -all'] },
    }),
    'right',
  );
  assert.is(await spf(['v=spf1 mx -all', 'another text']), 'right');
  assert.is(await spf([`v=spf1 mx:a.test ?all`], { 'a.test': { MX: [`5 ${HOST}`] } }), 'right');
  assert.is(
    await spf(['v=spf1 include:spf.a.test -all'], {
      'spf.a.test': { TXT: [`v=spf1 a:${HOST} -all`] },
    }),
    'right',
  );
  assert.is(
    await spf(['v=spf1 redirect=spf.a.test'], {
      'spf.a.test': { TXT: [`v=spf1 a:${HOST} -all`] },
    }),
    'right',
  );
  const addresses = { [HOST]: { A: ['192.0.2.25'], AAAA: ['2001:db8::25'] } };
  assert.is(await spf(['v=spf1 ip4:192.0.2.0/24 -all'], addresses), 'right');
  assert.is(await spf(['v=spf1 ip6:2001:db8::/32 -all'], addresses), 'right');
});

test('SPF: what does not let us send is wrong, and says why', async () => {
  publish({ 'a.test': { A: ['192.0.2.1'] } });
  const ask = async () => shown(await findSpf(resolver, { name: 'send.a.test', host: HOST }));
  assert.match(await ask(), /^absent: There is no TXT record at send\.a\.test/);
  assert.match(await spf(['hello']), /^wrong: .* hold no SPF record: "hello"/);
  assert.match(
    await spf([`v=spf1 a:${HOST} ~all`, 'v=spf1 -all']),
    /^wrong: There are 2 SPF records .* an error for every receiver/,
  );
  assert.match(await spf(['v=spf1 a:other.test ~all']), /^wrong: .* reaches `~all` before/);
  assert.match(await spf([`v=spf1 -all a:${HOST}`]), /^wrong: .* reaches `-all` before/);
  assert.match(await spf([`v=spf1 ?a:${HOST} -all`]), /^wrong: .* reaches `\?a:mail\.host\.test`/);
  assert.match(
    await spf(['v=spf1 ip4:198.51.100.1'], { [HOST]: { A: ['192.0.2.25'] } }),
    /^wrong: .* does not name this host; add a:mail\.host\.test/,
  );
  assert.match(await spf(['v=spf1 include:gone.test ~all']), /^wrong: .* includes gone\.test/);
  const loop = await spf(['v=spf1 include:send.a.test ~all']);
  assert.match(loop, /^wrong: .* more than 10 lookups/);
  assert.match(await spf(['v=spf10 a:x ~all']), /^wrong: .* hold no SPF record/);
});

test('MX: our host is compared as a name, and may have to be the best', async () => {
  const mx = async (must: 'contain' | 'prefer', ...records: readonly string[]) => {
    publish({ 'a.test': { MX: records } });
    return shown(await findMx(resolver, { name: 'a.test', host: HOST, must }));
  };
  assert.is(await mx('contain', `10 ${HOST}`), 'right');
  assert.is(await mx('prefer', '10 MAIL.Host.Test'), 'right');
  assert.is(await mx('contain', '1 other.test', `10 ${HOST}`), 'right');
  assert.is(await mx('prefer', `0 ${HOST}`, '10 other.test'), 'right');
  assert.match(
    await mx('prefer', '1 other.test', `10 ${HOST}`),
    /^wrong: .* "1 other\.test".*lowest/,
  );
  assert.match(await mx('prefer', '10 other.test', `10 ${HOST}`), /^wrong: /);
  assert.match(
    await mx('contain', '10 other.test'),
    /^wrong: .* "10 other\.test"; mail\.host\.test/,
  );
  assert.match(await mx('contain', '0 .'), /^wrong: .* "0 \."/);
});

test('a CNAME in the way of an MX is named', async () => {
  publish({ 'send.a.test': { CNAME: 'web.test' }, 'web.test': { A: ['192.0.2.1'] } });
  const ask = async () =>
    shown(await findMx(resolver, { name: 'send.a.test', host: HOST, must: 'contain' }));
  assert.match(await ask(), /^wrong: A CNAME record at send\.a\.test leads to web\.test/);
  delete dns.zones['web.test'];
  assert.match(await ask(), /^wrong: A CNAME record at send\.a\.test leads to web\.test/);
  dns.zones['web.test'] = { MX: ['10 mx.web.test'] };
  assert.match(
    await ask(),
    /^wrong: .* A CNAME record at send\.a\.test leads to web\.test and hides/,
  );
});

test('a CNAME leads to its target at once or by others', async () => {
  const cname = async (zones: DnsZones): Promise<string> => {
    publish(zones);
    return shown(await findCname(resolver, { name: 'links.a.test', target: HOST }));
  };
  assert.is(await cname({ 'links.a.test': { CNAME: 'Mail.Host.test' } }), 'right');
  assert.is(
    await cname({ 'links.a.test': { CNAME: 'b.test' }, 'b.test': { CNAME: HOST } }),
    'right',
  );
  assert.match(await cname({}), /^absent: There is no CNAME record at links\.a\.test/);
  assert.match(
    await cname({ 'links.a.test': { CNAME: 'b.test' } }),
    /^wrong: .* leads to b\.test, not/,
  );
  assert.match(
    await cname({ 'links.a.test': { A: ['192.0.2.1'] } }),
    /^wrong: .* has the address "192/,
  );
});

test('a DMARC policy counts at the name or above it, and only one', async () => {
  const dmarc = async (zones: DnsZones): Promise<string> => {
    publish(zones);
    return shown(await findDmarc(resolver, 'news.a.test'));
  };
  assert.is(await dmarc({ '_dmarc.news.a.test': { TXT: ['v=DMARC1; p=none;'] } }), 'right');
  assert.is(await dmarc({ '_dmarc.a.test': { TXT: ['v=DMARC1;p=reject'] } }), 'right');
  assert.match(await dmarc({}), /^absent: /);
  assert.match(
    await dmarc({ '_dmarc.a.test': { TXT: ['v=DMARC1; sp=none'] } }),
    /^wrong: .*p=none/,
  );
  assert.match(
    await dmarc({ '_dmarc.news.a.test': { TXT: ['v=DMARC1; p=none', 'v=DMARC1; p=reject'] } }),
    /^wrong: There are 2/,
  );
});

test('a DNS that does not answer proves nothing', async () => {
  for (const fault of ['SERVFAIL', 'REFUSED', 'TIMEOUT', 'GARBAGE'] as const) {
    publish({ 'a.test': fault });
    const findings = [
      await findMx(resolver, { name: 'a.test', host: HOST, must: 'prefer' }),
      await findDkim(resolver, { name: 'a.test', value: KEY }),
      await findSpf(resolver, { name: 'a.test', host: HOST }),
      await findCname(resolver, { name: 'a.test', target: HOST }),
      await findText(resolver, { name: 'a.test', value: 'x' }),
    ];
    assert.equal(
      findings.map(({ kind }) => kind),
      Array(5).fill('unknown'),
      fault,
    );
  }
  publish({ 'send.a.test': { TXT: ['v=spf1 include:slow.test ~all'] }, 'slow.test': 'SERVFAIL' });
  const inner = await findSpf(resolver, { name: 'send.a.test', host: HOST });
  assert.match(shown(inner), /^unknown: .* slow\.test \(SERVFAIL\)/);
});

test('a text record is compared as a whole, and what is shown of others is printable and short', async () => {
  publish({ 'c.a.test': { TXT: ['token=1 ', '\u0007\u{1F600}', 'x'.repeat(1_000)] } });
  const find = (value: string) => findText(resolver, { name: 'c.a.test', value });
  assert.is(shown(await find('token=1')), 'right');
  const other = shown(await find('token=2'));
  assert.match(other, /^wrong: [\x20-\x7e…]+$/);
  assert.ok(other.length < 400);
});

test('answers are not kept: what was just published is seen', async () => {
  publish({});
  const ask = () => findText(resolver, { name: 'new.test', value: '1' });
  assert.is((await ask()).kind, 'absent');
  dns.zones['new.test'] = { TXT: ['1'] };
  assert.is((await ask()).kind, 'right');
  delete dns.zones['new.test'];
  assert.is((await ask()).kind, 'absent');
});

test.run();
