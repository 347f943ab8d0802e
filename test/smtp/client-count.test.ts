// Who counts as one client.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createClientCount } from '../../src/smtp/client-count.ts';

const test = suite('client count');

test('an IPv4 address is a client', () => {
  const clients = createClientCount();
  assert.is(clients.enter('192.0.2.1'), 1);
  assert.is(clients.enter('192.0.2.1'), 2);
  assert.is(clients.enter('192.0.2.2'), 1);
  clients.leave('192.0.2.1');
  assert.is(clients.enter('192.0.2.1'), 2);
});

test('an IPv6 /64 is a client', () => {
  const clients = createClientCount();
  assert.is(clients.enter('2001:db8:1:2::1'), 1);
  assert.is(clients.enter('2001:db8:1:2:ffff:ffff:ffff:ffff'), 2);
  assert.is(clients.enter('2001:db8:1:3::1'), 1);
  clients.leave('2001:db8:1:2::77');
  clients.leave('2001:db8:1:2::77');
  assert.is(clients.enter('2001:db8:1:2::1'), 1);
});

test.run();
