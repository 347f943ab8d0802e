// The provider table: what ships, who is recognized by which hosts, and what is refused with which words.
import { readFileSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { providerOf, readProviders } from '../../src/delivery/providers.ts';
import { siteOf } from '../../src/delivery/site.ts';

const shipped = readProviders(
  JSON.parse(readFileSync(new URL('../../config/providers.json', import.meta.url), 'utf8')),
);
const test = suite('providers');

const hosts: readonly (readonly [string | null, readonly string[]])[] = [
  ['google', ['gmail-smtp-in.l.google.com', 'alt1.gmail-smtp-in.l.google.com']],
  ['google', ['aspmx.l.google.com', 'aspmx2.googlemail.com']],
  ['yahoo', ['mta5.am0.yahoodns.net', 'mta6.am0.yahoodns.net']],
  ['outlook', ['outlook-com.olc.protection.outlook.com']],
  ['office365', ['example-com.mail.protection.outlook.com']],
  ['office365', ['example-com.a-v1.mx.microsoft']],
  ['apple', ['mx01.mail.icloud.com', 'mx02.mail.icloud.com']],
  ['orange', ['smtp-in.orange.fr']],
  [null, ['mx.example.com']],
  [null, ['notgoogle.com']],
  [null, ['aspmx.l.google.com', 'backup.example.com']],
  [null, []],
];
for (const [name, list] of hosts) {
  test(`${list.join(', ') || 'no host'}: ${name ?? 'nobody we know'}`, () => {
    assert.is(providerOf(shipped, list)?.name ?? null, name);
  });
}

test('what ships says what the providers say', () => {
  const limits = (host: string) => siteOf(shipped, [host]).limits;
  assert.is(limits('aspmx.l.google.com').connectionsMax, 5);
  assert.is(limits('aspmx.l.google.com').messagesPerConnection, 50);
  assert.ok(limits('aspmx.l.google.com').needsTls);
  assert.is(limits('mta5.am0.yahoodns.net').messagesPerConnection, 20);
  assert.is(limits('smtp-in.orange.fr').connectionsMax, 2);
  const other = limits('mx.example.com');
  assert.equal(
    [other.connectionsMax, other.newConnectionsPerMinute, other.messagesPerConnection],
    [10, 100, 100],
  );
  assert.equal(other.circuit, { failuresMax: 5, openMs: 300_000, openMaxMs: 3_600_000 });
  assert.not.ok(other.needsTls);
});

test('the longest end that fits decides, whatever the order', () => {
  const list = [
    { name: 'all', mx: ['example.com'] },
    { name: 'east', mx: ['east.example.com'], connections: 1 },
  ];
  for (const providers of [list, list.toReversed()]) {
    const read = readProviders({ providers });
    assert.is(providerOf(read, ['mx.east.example.com'])?.name, 'east');
    assert.is(providerOf(read, ['east.example.com'])?.name, 'east');
    assert.is(providerOf(read, ['mx.west.example.com'])?.name, 'all');
  }
});

test('a section says what differs from the default', () => {
  const { list, smarthost } = readProviders({
    default: { connections: 3, messages_per_second: 2 },
    smarthost: { messages_per_second: null },
    providers: [{ name: 'a', mx: ['a.example'], messages_per_connection: 7 }],
  });
  assert.equal([list[0]!.limits.connectionsMax, list[0]!.limits.messagesPerConnection], [3, 7]);
  assert.is(list[0]!.limits.messagesPerSecond, 2);
  assert.is(smarthost.messagesPerSecond, null);
});

const good = { name: 'a', mx: ['a.example'] };
const refused: readonly (readonly [RegExp, unknown])[] = [
  [/must be an object/, []],
  [/"provider" is not known/, { provider: [] }],
  [/number 1 needs a `name`/, { providers: [{ mx: ['a.example'] }] }],
  [/number 1 needs a `name`/, { providers: [{ name: 'A/b', mx: ['a.example'] }] }],
  [/"a" needs `mx`/, { providers: [{ name: 'a' }] }],
  [/"a" needs `mx`/, { providers: [{ name: 'a', mx: ['.a.example'] }] }],
  [/"a" has `conections`/, { providers: [{ ...good, conections: 1 }] }],
  [/"a" has `connections`.*whole number from 1/, { providers: [{ ...good, connections: 0 }] }],
  [/"a" has `idle_seconds`.*to 60/, { providers: [{ ...good, idle_seconds: 600 }] }],
  [
    /"a" has `messages_per_second`.*or null/,
    { providers: [{ ...good, messages_per_second: '9' }] },
  ],
  [/"a" has `tls`/, { providers: [{ ...good, tls: 'maybe' }] }],
  [/"a" has `pauses`/, { providers: [{ ...good, pauses: {} }] }],
  [
    /"a" has a pause.*no regular expression/,
    { providers: [{ ...good, pauses: [{ text: '(', minutes: 1 }] }] },
  ],
  [/"a" has a pause.*`minutes`/, { providers: [{ ...good, pauses: [{ text: 'x' }] }] }],
  [
    /"a" has a pause.*`example`/,
    { providers: [{ ...good, pauses: [{ text: 'x', minutes: 1, example: 'y' }] }] },
  ],
  [/`default` has `name`/, { default: { name: 'x' } }],
  [/two are named "a"/, { providers: [good, good] }],
];
for (const [words, file] of refused) {
  test(`refused: ${words.source}`, () => {
    assert.throws(() => readProviders(file), words);
  });
}

test.run();
