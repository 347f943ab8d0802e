// Block lists over real DNS packets: what is asked about whom, and that a list which is away lists nobody.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { createDnsbl, type FindListing } from '../../src/receiving/dnsbl.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

const test = suite<{ dns: DnsServer; resolver: Resolver; find: FindListing }>('block lists');
let zones: readonly string[] = [];

test.before.each(async (context) => {
  context.dns = await startDns({
    '1.8.8.8.list.test': { A: ['127.0.0.2'] },
    '2.8.8.8.list.test': { A: ['127.255.255.254'] },
    '3.8.8.8.list.test': { A: ['198.51.100.1'] },
    '4.8.8.8.list.test': 'SERVFAIL',
    '5.8.8.8.list.test': 'TIMEOUT',
    '5.8.8.8.quick.test': { A: ['127.0.0.4'] },
    '6.8.8.8.list.test': { A: ['127.0.0.1'] },
    '1.8.8.8.dead.test': { A: ['127.0.0.2'] },
    '1.0.0.127.dead.test': { A: ['127.0.0.2'] },
    'list.test': { A: ['127.0.0.2'] },
    '8.8.8.8.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.8.4.0.6.8.4.1.0.0.2.list.test': {
      A: ['127.0.0.2'],
    },
  });
  context.resolver = createResolver({ servers: [context.dns.server], timeoutMs: 60_000 });
  const guard = createAddressGuard({ allow: [], ownAddresses: () => [] });
  zones = ['list.test'];
  context.find = createDnsbl({
    resolver: context.resolver,
    zones: () => zones,
    isPublic: (address) => guard.check(address).ok,
  });
});
test.after.each(async ({ dns, resolver }) => {
  resolver.close();
  await dns.stop();
});

test('a listing is an address in 127.0.0.0/8 that is no error code', async ({ find }) => {
  assert.is(await find('8.8.8.1'), 'list.test');
  assert.is(await find('8.8.8.2'), null);
  assert.is(await find('8.8.8.3'), null);
  assert.is(await find('8.8.8.6'), null);
  assert.is(await find('8.8.8.9'), null);
  assert.is(await find('2001:4860:4860::8888'), 'list.test');
});

test('a list that is away lists nobody, and does not keep the others from it', async ({ find }) => {
  assert.is(await find('8.8.8.4'), null);
  assert.is(await find('8.8.8.5'), null); // long before the resolver gives up
  zones = ['list.test', 'quick.test'];
  assert.is(await find('8.8.8.5'), 'quick.test');
});

test('nobody asks about this machine and private networks, nor where no zone is named', async ({
  dns,
  find,
}) => {
  for (const address of ['127.0.0.1', '::1', '10.1.2.3', '192.168.1.1', 'fd00::1', '169.254.0.1']) {
    assert.is(await find(address), null);
  }
  zones = [];
  assert.is(await find('8.8.8.1'), null);
  assert.equal(dns.questions, []);
});

test('an answer is kept', async ({ dns, find }) => {
  for (let count = 0; count < 3; count += 1) assert.is(await find('8.8.8.1'), 'list.test');
  assert.is(dns.questions.length, 2);
});

test('a list that lists everybody lists nobody', async ({ find }) => {
  zones = ['dead.test'];
  assert.is(await find('8.8.8.1'), null);
  zones = ['dead.test', 'list.test'];
  assert.is(await find('8.8.8.1'), 'list.test');
});

test.run();
