// Which domains share a lane: the same hosts in any order, or all hosts of one provider.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readProviders } from '../../src/delivery/providers.ts';
import { laneName, siteOf } from '../../src/delivery/site.ts';

const providers = readProviders({ providers: [{ name: 'big', mx: ['big.example'] }] });
const nameOf = (...hosts: string[]): string => siteOf(providers, hosts).name;
const test = suite('site');

test('the hosts in order of the alphabet, each once', () => {
  assert.is(nameOf('mx2.a.test', 'mx1.a.test', 'mx2.a.test'), 'mx1.a.test,mx2.a.test');
  assert.is(nameOf('mx1.a.test', 'mx2.a.test'), nameOf('mx2.a.test', 'mx1.a.test'));
  assert.is.not(nameOf('mx1.a.test'), nameOf('mx1.a.test', 'mx2.a.test'));
});

test('a provider is one place', () => {
  assert.is(nameOf('mx1.big.example'), 'big');
  assert.is(nameOf('mx2.big.example', 'mx3.big.example'), 'big');
});

test('a long list is shortened and stays its own', () => {
  const list = Array.from({ length: 20 }, (_, number) => `mx${number}.a-long-name.test`);
  const name = nameOf(...list);
  assert.ok(name.length <= 120);
  assert.is(name, nameOf(...list.toReversed()));
  assert.is.not(name, nameOf(...list.slice(1)));
  assert.is.not(name, nameOf(...list, 'one-more.test'));
});

test('a lane is an address of ours and a place of theirs', () => {
  assert.is(laneName('default', nameOf('mx.a.test')), 'default/mx.a.test');
});

test.run();
