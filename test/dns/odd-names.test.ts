// Names that c-ares does not ask for, over real packets: only who wants them gets answers, in the forms of Resolver.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

const it = suite<{ dns: DnsServer; resolver: Resolver }>('odd names');
it.before.each(async (context) => {
  context.dns = await startDns({
    'a+b=c.test': {
      A: ['192.0.2.1', '192.0.2.2'],
      AAAA: ['2001:db8::1'],
      MX: ['10 mx.test', '0 .'],
      TXT: ['one', 'x'.repeat(600)],
    },
    'with space.test': { A: ['192.0.2.3'] },
    'al+ias.test': { CNAME: 'a+b=c.test' },
    'em+pty.test': {},
    'fa+il.test': 'SERVFAIL',
    'plain.test': { A: ['192.0.2.4'] },
  });
  const servers = [context.dns.server];
  context.resolver = createResolver({ servers, timeoutMs: 500, asksOddNames: true });
});
it.after.each(async ({ dns, resolver }) => {
  resolver.close();
  await dns.stop();
});

it('have answers in the forms of all others', async ({ resolver }) => {
  const found = (records: readonly unknown[]) => ({ kind: 'found', records });
  assert.equal(await resolver.a('A+b=C.test.'), found(['192.0.2.1', '192.0.2.2']));
  assert.equal(await resolver.aaaa('a+b=c.test'), found(['2001:db8::1']));
  assert.equal(
    await resolver.mx('a+b=c.test'),
    found([
      { preference: 10, exchange: 'mx.test' },
      { preference: 0, exchange: '' },
    ]),
  );
  assert.equal(await resolver.txt('a+b=c.test'), found(['one', 'x'.repeat(600)]));
  assert.equal(await resolver.a('with space.test'), found(['192.0.2.3']));
  assert.equal(await resolver.a('al+ias.test'), found(['192.0.2.1', '192.0.2.2']));
  assert.equal(await resolver.a('plain.test'), found(['192.0.2.4']));
});

it('that are not there, or of which nothing is known', async ({ resolver }) => {
  assert.equal(await resolver.a('em+pty.test'), { kind: 'no_data' });
  assert.equal(await resolver.a('no+where.test'), { kind: 'no_name' });
  assert.equal(await resolver.a('fa+il.test'), { kind: 'failed', cause: 'SERVFAIL' });
});

it('are asked once a while', async ({ dns, resolver }) => {
  await Promise.all([resolver.a('a+b=c.test'), resolver.a('a+b=c.test')]);
  await resolver.a('a+b=c.test');
  assert.is(dns.questions.length, 1);
});

it('which no packet can carry, and those that nobody wants, are not asked', async ({
  dns,
  resolver,
}) => {
  const bad = [
    'a+..test',
    '+.test.'.padStart(300, 'x'),
    `${'+'.repeat(64)}.test`,
    'a+\0.test',
    'a+ü.test',
    'a\\+.test',
    '+\n.test',
  ];
  for (const name of bad) assert.equal(await resolver.a(name), { kind: 'no_name' }, name);
  assert.equal(await resolver.ptr('a+b=c.test'), { kind: 'no_name' });
  const others = createResolver({ servers: [dns.server] });
  assert.equal(await others.a('a+b=c.test'), { kind: 'no_name' });
  others.close();
  assert.equal(dns.questions, []);
});

it('PTR records', async ({ dns, resolver }) => {
  dns.zones['1.2.0.192.in-addr.arpa'] = { PTR: ['host.test', 'other.test'] };
  assert.equal(await resolver.ptr('1.2.0.192.in-addr.arpa'), {
    kind: 'found',
    records: ['host.test', 'other.test'],
  });
  assert.equal(await resolver.ptr('2.2.0.192.in-addr.arpa'), { kind: 'no_name' });
});

it.run();
