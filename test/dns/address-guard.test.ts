// Tables of addresses against the guard: what is refused and why, what passes, what the allow list changes.

import { isIP } from 'node:net';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';

/** Address, then a part of the reason, in which the words of the range stand. */
const refused: readonly (readonly [string, string])[] = [
  // Loopback and "this host".
  ['127.0.0.1', 'a loopback'],
  ['127.255.255.254', 'a loopback'],
  ['::1', 'a loopback'],
  ['0.0.0.0', 'an unspecified'],
  ['0.1.2.3', 'an unspecified'],
  ['::', 'an unspecified'],
  // RFC 1918, both ends of each range.
  ['10.0.0.0', 'a private'],
  ['10.255.255.255', 'a private'],
  ['172.16.0.1', 'a private'],
  ['172.31.255.255', 'a private'],
  ['192.168.0.1', 'a private'],
  ['192.168.255.255', 'a private'],
  // Link-local, site-local, unique local, CGNAT.
  ['169.254.1.1', 'a link-local'],
  ['fe80::1', 'a link-local'],
  ['febf::1', 'a link-local'],
  ['fec0::1', 'a site-local'],
  ['fc00::1', 'a unique local'],
  ['fdff:ffff::1', 'a unique local'],
  ['100.64.0.1', 'a carrier-grade NAT'],
  ['100.127.255.255', 'a carrier-grade NAT'],
  // Multicast and broadcast.
  ['224.0.0.1', 'a multicast'],
  ['239.255.255.255', 'a multicast'],
  ['ff02::1', 'a multicast'],
  ['ff0e::1', 'a multicast'],
  ['255.255.255.255', 'a broadcast'],
  // Reserved, documentation, benchmarking, black holes.
  ['192.0.0.8', 'a reserved or documentation'],
  ['192.0.2.1', 'a reserved or documentation'],
  ['198.18.0.1', 'a reserved or documentation'],
  ['198.19.255.255', 'a reserved or documentation'],
  ['198.51.100.7', 'a reserved or documentation'],
  ['203.0.113.9', 'a reserved or documentation'],
  ['240.0.0.1', 'a reserved or documentation'],
  ['254.1.1.1', 'a reserved or documentation'],
  ['192.88.99.1', 'a reserved or documentation'],
  ['2001:db8::1', 'a reserved or documentation'],
  ['3fff::1', 'a reserved or documentation'],
  ['2001:2::1', 'a benchmarking'],
  ['100::1', 'a discard-only'],
  ['2001:10::1', 'a special-purpose'],
  ['2620:4f:8000::1', 'a special-purpose'],
  ['5f00::1', 'a special-purpose'],
  ['4000::1', 'an unallocated'],
  ['1::1', 'an unallocated'],
  ['e000::1', 'an unallocated'],
  // Cloud metadata.
  ['169.254.169.254', 'a cloud metadata'],
  ['169.254.170.2', 'a cloud metadata'],
  ['100.100.100.200', 'a cloud metadata'],
  ['168.63.129.16', 'a cloud metadata'],
  ['192.0.0.192', 'a cloud metadata'],
  ['fd00:ec2::254', 'a cloud metadata'],
  ['::ffff:168.63.129.16', 'a cloud metadata'],
  // IPv4 inside IPv6, by the address inside.
  ['::ffff:127.0.0.1', 'wraps 127.0.0.1 is a loopback'],
  ['::ffff:7f00:1', 'wraps 127.0.0.1 is a loopback'],
  ['::ffff:10.1.2.3', 'wraps 10.1.2.3 is a private'],
  ['::ffff:0.0.0.0', 'wraps 0.0.0.0 is an unspecified'],
  ['::127.0.0.1', 'wraps 127.0.0.1 is a loopback'],
  ['::10.0.0.1', 'wraps 10.0.0.1 is a private'],
  ['::2', 'wraps 0.0.0.2 is an unspecified'],
  ['::ffff:0:127.0.0.1', 'wraps 127.0.0.1 is a loopback'],
  ['64:ff9b::127.0.0.1', 'wraps 127.0.0.1 is a loopback'],
  ['64:ff9b::a9fe:a9fe', 'wraps 169.254.169.254 is a cloud metadata'],
  ['64:ff9b:1::10.0.0.1', 'wraps 10.0.0.1 is a private'],
  ['2002:7f00:1::', 'wraps 127.0.0.1 is a loopback'],
  ['2002:c0a8:101::1', 'wraps 192.168.1.1 is a private'],
  // Teredo: the client 127.0.0.1 flipped; then a private server with a public client.
  ['2001:0:808:808:0:0:80ff:fffe', 'wraps 127.0.0.1 is a loopback'],
  ['2001:0:a00:1:0:0:f7f7:f7f7', 'wraps 10.0.0.1 is a private'],
  // ISATAP, with and without the universal bit, and behind a link-local prefix.
  ['2606:4700::5efe:127.0.0.1', 'wraps 127.0.0.1 is a loopback'],
  ['2606:4700::200:5efe:10.0.0.1', 'wraps 10.0.0.1 is a private'],
  ['fe80::5efe:8.8.8.8', 'a link-local'],
  // Wrappings that no public route exists for, even around a public address.
  ['::8.8.8.8', 'an unallocated'],
  ['::ffff:0:8.8.8.8', 'an IPv4-translated'],
  ['64:ff9b:1::8.8.8.8', 'a local NAT64'],
];

const misspelt: readonly string[] = [
  '',
  ' ',
  'localhost',
  'mx.example.test',
  '127.1',
  '127.0.1',
  '2130706433',
  '0x7f000001',
  '0x7f.0.0.1',
  '0177.0.0.1',
  '127.0.0.01',
  '010.0.0.1',
  '08.8.8.8',
  '8.8.8.8 ',
  ' 8.8.8.8',
  '8.8.8.8\n',
  '8.8.8.8.',
  '8.8.8.8:25',
  '8.8.8.8/32',
  '8.8.8.256',
  '[8.8.8.8]',
  '[::1]',
  '::ffff:010.0.0.1',
  '::ffff:127.1',
  'fe80::1%eth0',
  '2606:4700::1111%1',
  '2606:4700::1111::',
  '1:2:3:4:5:6:7:8:9',
  '１２７.0.0.1',
];

const passed: readonly string[] = [
  '1.1.1.1',
  '8.8.8.8',
  '9.255.255.255',
  '11.0.0.0',
  '100.63.255.255',
  '100.128.0.0',
  '126.255.255.255',
  '128.0.0.1',
  '169.253.255.255',
  '169.255.0.0',
  '172.15.255.255',
  '172.32.0.0',
  '168.63.129.15',
  '192.167.255.255',
  '192.169.0.0',
  '198.17.255.255',
  '198.20.0.0',
  '223.255.255.255',
  '2606:4700:4700::1111',
  '2606:4700:4700:0:0:0:0:1111',
  '2A00:1450:4001:81B::200E',
  '2001:4860:4860::8888',
  '3ffe::1',
  // A public IPv4 address behind the wrappings that carry real traffic.
  '::ffff:8.8.8.8',
  '64:ff9b::8.8.8.8',
  '2002:808:808::1',
  '2001:0:808:808:0:0:f7f7:f7f7',
  '2606:4700::5efe:8.8.8.8',
];

const closed = createAddressGuard({ allow: [] });

for (const [ip, words] of refused) {
  test(`refuses ${ip}: ${words}`, () => {
    const verdict = closed.check(ip);
    assert.not.ok(verdict.ok);
    if (verdict.ok) return;
    assert.is(verdict.kind, 'range');
    assert.match(verdict.reason, words);
    assert.match(verdict.reason, /address$/);
  });
}

for (const text of misspelt) {
  test(`refuses the notation ${JSON.stringify(text)}`, () => {
    const verdict = createAddressGuard({ allow: ['0.0.0.0/0', '::/0'] }).check(text);
    assert.not.ok(verdict.ok);
    if (!verdict.ok) assert.is(verdict.kind, 'notation');
  });
}

for (const ip of passed) {
  test(`lets ${ip} through`, () => assert.equal(closed.check(ip), { ok: true }));
}

test('an overlong text is not repeated in the reason', () => {
  const verdict = closed.check('9'.repeat(100_000));
  assert.ok(!verdict.ok && verdict.reason.length < 150);
});

test('the allow list opens its ranges, wrapped addresses included, and nothing beside them', () => {
  const guard = createAddressGuard({ allow: ['127.0.0.0/8', '10.1.2.3', 'fd00::/8', '::1/128'] });
  const open = ['127.0.0.1', '127.9.9.9', '10.1.2.3', 'fd12::1', '::1', '::ffff:127.0.0.1'];
  for (const ip of [...open, '64:ff9b::127.0.0.1', 'fd00:ec2::254']) {
    assert.equal(guard.check(ip), { ok: true }, ip);
  }
  const shut = ['10.1.2.4', '192.168.0.1', 'fe80::1', '169.254.169.254', '::ffff:10.1.2.4', '::2'];
  for (const ip of [...shut, 'fc00::1']) assert.not.ok(guard.check(ip).ok, ip);
});

test('a CIDR whose base has host bits means the whole range', () => {
  assert.ok(createAddressGuard({ allow: ['10.9.9.9/8'] }).check('10.0.0.1').ok);
});

test('own addresses are refused as such, in every spelling, unless allowed', () => {
  const ownAddresses = ['8.8.8.8', '2606:4700::1', '10.0.0.5', 'fe80::1', '::ffff:9.9.9.9'];
  const guard = createAddressGuard({
    allow: ['10.0.0.0/8'],
    ownAddresses: () => ownAddresses,
  });
  for (const ip of ['8.8.8.8', '::ffff:8.8.8.8', '2606:4700:0::1', 'fe80::1', '9.9.9.9']) {
    const verdict = guard.check(ip);
    assert.ok(!verdict.ok && verdict.kind === 'own_address', ip);
  }
  assert.ok(guard.check('10.0.0.5').ok);
  assert.ok(guard.check('8.8.4.4').ok);
  ownAddresses.push('8.8.4.4', 'no address', 'fe80::2%eth0');
  assert.not.ok(guard.check('8.8.4.4').ok, 'an address that the machine got later');
});

for (const bad of [
  '',
  '10/8',
  '10.0.0.0/33',
  '::/129',
  '10.0.0.0/8/8',
  '010.0.0.0/8',
  '10.0.0.0/',
  'x',
]) {
  test(`an allow list with ${JSON.stringify(bad)} is an error`, () => {
    assert.throws(() => createAddressGuard({ allow: [bad] }));
  });
}

test('no address of 16,384 scattered over the private and special blocks of IPv4 passes', () => {
  const first = [
    '10',
    '127',
    '0',
    '224',
    '239',
    '240',
    '255',
    '172.16',
    '172.31',
    '192.168',
    '169.254',
  ];
  let count = 0;
  for (const block of [...first, '100.64', '100.127', '198.18', '198.19', '192.0.2']) {
    for (let at = 0; at < 1_024; at += 1) {
      const tail = [at % 256, (at * 7) % 256, (at * 31) % 256].slice(
        0,
        4 - block.split('.').length,
      );
      const ip = [block, ...tail].join('.');
      assert.is(isIP(ip), 4);
      if (!closed.check(ip).ok && !closed.check(`::ffff:${ip}`).ok) count += 1;
    }
  }
  assert.is(count, 16_384);
});

test.run();
