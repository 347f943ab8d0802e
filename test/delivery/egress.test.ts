// The operator's file about leaving mail: what it means, that every slip in it is named, and that the same mail leaves
// from the same address.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  egressesOf,
  poolOf,
  readDeliveryPolicy,
  SYSTEM_EGRESS,
} from '../../src/delivery/egress.ts';

const test = suite('egress');

const three = {
  egresses: {
    one: { ipv4: '192.0.2.1' },
    two: { ipv4: '192.0.2.2', ipv6: '2001:db8::2', helo: 'mail2.example.com' },
    three: { ipv4: '192.0.2.3' },
  },
  pools: { default: ['one'], bulk: ['one', 'two', 'three'] },
  assign: [
    { tenant: 't1', domain: 'News.Example.com', pool: 'bulk' },
    { domain: 'otp.example.com', pool: 'default' },
    { tenant: 't2', pool: 'bulk' },
  ],
};
const about = (pool: string, emailId: string): Parameters<typeof egressesOf>[1] => ({
  pool,
  emailId,
  domain: 'recipient.test',
});
const ids = Array.from({ length: 600 }, (_, index) => `email ${index}`);

test('the file that ships says nothing: the system chooses the address', () => {
  const shipped = readFileSync(join(import.meta.dirname, '../../config/delivery.json'), 'utf8');
  const policy = readDeliveryPolicy(JSON.parse(shipped));
  assert.equal(egressesOf(policy, about('default', 'x')), [SYSTEM_EGRESS]);
  assert.equal(policy, readDeliveryPolicy({}), 'and an empty one says the same');
  assert.is(policy.addresses, 'ipv4_first');
  assert.equal(policy.unknown, { default: 'retry_once', tenants: {} });
  assert.is(policy.spill.smarthost, false);
  assert.is(policy.dane.resolver, null);
  assert.is(policy.delayedAfterMs, 4 * 3_600_000);
  assert.equal(policy.port25Probes, []);
});

test('a pool is given to a tenant, to a domain, or to both; the first that fits decides', () => {
  const policy = readDeliveryPolicy(three);
  const of = (tenantId: string, domain: string): string => poolOf(policy, { tenantId, domain });
  assert.is(of('t1', 'news.example.com'), 'bulk');
  assert.is(of('t1', 'example.com'), 'default');
  assert.is(of('t3', 'news.example.com'), 'default');
  assert.is(of('t2', 'otp.example.com'), 'default');
  assert.is(of('t2', 'example.com'), 'bulk');
});

test('one mail leaves from one address at every attempt, many spread over the pool', () => {
  const policy = readDeliveryPolicy(three);
  const counts = new Map<string, number>();
  for (const id of ids) {
    const order = egressesOf(policy, about('bulk', id)).map(({ name }) => name);
    assert.equal(
      order,
      egressesOf(policy, about('bulk', id)).map(({ name }) => name),
    );
    assert.equal(order.toSorted(), ['one', 'three', 'two']);
    counts.set(order[0]!, (counts.get(order[0]!) ?? 0) + 1);
  }
  for (const [name, count] of counts) assert.ok(count > 130 && count < 270, `${name}: ${count}`);
});

test('an egress less moves only its own share', () => {
  const before = readDeliveryPolicy(three);
  const after = readDeliveryPolicy({ ...three, pools: { bulk: ['one', 'three'] } });
  for (const id of ids) {
    const [was] = egressesOf(before, about('bulk', id));
    const [is] = egressesOf(after, about('bulk', id));
    if (was?.name !== 'two') assert.is(is?.name, was?.name);
  }
});

test('a pool that is gone: the default one', () => {
  const policy = readDeliveryPolicy(three);
  assert.is(egressesOf(policy, about('gone', 'x'))[0]?.ipv4, '192.0.2.1');
  assert.equal(egressesOf(readDeliveryPolicy({}), about('gone', 'x')), [SYSTEM_EGRESS]);
});

const egress = { egresses: { one: {} } };
for (const [file, complaint] of [
  [[], 'the file: must be an object'],
  [{ egress: {} }, '"egress" is not known'],
  [{ egresses: { 'a/b': {} } }, 'egresses.a/b: a name is at most 32 of a-z, 0-9'],
  [{ egresses: { one: { ip: '192.0.2.1' } } }, 'egresses.one: "ip" is not known'],
  [{ egresses: { one: { ipv4: '2001:db8::1' } } }, 'egresses.one.ipv4: must be an IPv4 address'],
  [{ egresses: { one: { ipv4: '192.0.2.01' } } }, 'egresses.one.ipv4: must be an IPv4 address'],
  [{ egresses: { one: { ipv6: '192.0.2.1' } } }, 'egresses.one.ipv6: must be an IPv6 address'],
  [{ egresses: { one: { helo: 'mail' } } }, 'egresses.one.helo: must be a full host name'],
  [
    { egresses: { one: { ipv6: '2001:db8::1' } }, addresses: 'ipv4_only' },
    'egresses.one: has no address of the family',
  ],
  [{ pools: { bulk: ['one'] } }, 'pools.bulk: "one" is none of the egresses'],
  [{ ...egress, pools: { bulk: [] } }, 'pools.bulk: must be a list of at least one egress'],
  [{ ...egress, pools: { 'a@b': ['one'] } }, 'pools.a@b: a name is'],
  [
    { egresses: { default: { ipv4: '192.0.2.1' } }, pools: { bulk: ['default'] } },
    'egresses.default: this is the name of the address of the system',
  ],
  [{ assign: [{ tenant: 'x', pool: 'bulk' }] }, 'assign[0].pool: "bulk" is none of the pools'],
  [{ assign: [{ pool: 'default' }] }, 'assign[0]: says neither `tenant` nor `domain`'],
  [{ assign: [{ domain: 'a b', pool: 'default' }] }, 'assign[0].domain: must be a full host name'],
  [{ addresses: 'ipv4' }, 'addresses: must be one of ipv4_first, ipv6_first, ipv4_only, ipv6_only'],
  [{ unknown: { default: 'never' } }, 'unknown.default: must be one of retry_once, at_most_once'],
  [{ unknown: { tenants: { x: 'no' } } }, 'unknown.tenants.x: must be one of'],
  [{ spill: { smarthost: 'yes' } }, 'spill.smarthost: must be true or false'],
  [{ dane: { resolver: 'localhost' } }, 'dane.resolver: must be an address with a port'],
  [{ dane: { resolver: '127.0.0.1:99999' } }, 'dane.resolver: must be an address with a port'],
  [{ delayed_after: '4' }, 'delayed_after: must be a duration'],
  [{ delayed_after: '0s' }, 'delayed_after: must be a duration'],
  [{ port25_probes: ['localhost'] }, 'port25_probes[0]: must be a full host name'],
] as const) {
  test(`refuses ${JSON.stringify(file)}`, () => {
    assert.throws(
      () => readDeliveryPolicy(file),
      (error: Error) => error.message.includes(complaint),
    );
  });
}

test('what is allowed of the rest', () => {
  const policy = readDeliveryPolicy({
    dane: { resolver: '[::1]:53' },
    delayed_after: '90m',
    port25_probes: ['MX.example.com'],
    egresses: { default: { ipv4: '192.0.2.1' } },
    pools: { default: ['default'] },
  });
  assert.is(policy.pools.get('default')?.[0]?.ipv4, '192.0.2.1');
  assert.is(policy.dane.resolver, '[::1]:53');
  assert.is(policy.delayedAfterMs, 5_400_000);
  assert.equal(policy.port25Probes, ['mx.example.com']);
});

test.run();
