// What people and attackers put into the fields of an email: every refusal is a whole envelope that names the field,
// and nothing that was refused leaves a trace. Then a good email still goes all the way.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ownedHeaders } from '../../src/mail/header.ts';
import { CONTENT_MAX_BYTES } from '../../src/sending/request.ts';
import { startApp, type App } from '../support/app.ts';
import { assertRefused, type Refused } from './envelope.ts';

interface Case {
  readonly title: string;
  /** Laid over a good email; undefined takes a field away. */
  readonly change: Record<string, unknown>;
  readonly code: string;
  readonly paths: readonly string[];
  readonly says?: RegExp;
}

const good = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Bad input',
  text: 'Plain words.',
};
const lists = ['to', 'cc', 'bcc', 'reply_to'] as const;

const wrong = (
  title: string,
  change: Record<string, unknown>,
  paths: string | readonly string[],
  rest: { readonly code?: string; readonly says?: RegExp } = {},
): Case => ({
  title,
  change,
  code: 'validation_error',
  paths: typeof paths === 'string' ? [paths] : paths,
  ...rest,
});

// ---- what ends a line ------------------------------------------------------------------------

const breakers: Readonly<Record<string, string>> = {
  CR: '\r',
  LF: '\n',
  NUL: '\0',
  'a header': '\r\nBcc: victim@recipient.test',
};
const ofControl = /line break|control character|NUL/;

const injections: readonly Case[] = Object.entries(breakers).flatMap(([what, breaker]) => {
  const address = (domain: string): string => `a${breaker}@${domain}`;
  const ending = (domain: string): string => `a@${domain}${breaker}`;
  const named = (domain: string): string => `A${breaker} <a@${domain}>`;
  const quoted = (domain: string): string => `"A${breaker}" <a@${domain}>`;
  const inFrom = [address, ending, named, quoted].map((make) =>
    wrong(`${what} in from: ${make.name}`, { from: make('mailstead.test') }, 'from', {
      says: ofControl,
    }),
  );
  const inLists = lists.flatMap((list) => [
    wrong(`${what} in ${list}`, { [list]: address('recipient.test') }, list, { says: ofControl }),
    wrong(`${what} at the end of ${list}`, { [list]: ending('recipient.test') }, list, {
      says: ofControl,
    }),
    wrong(
      `${what} in an item of ${list}, and in a name`,
      { [list]: ['b@recipient.test', address('recipient.test'), named('recipient.test')] },
      [`${list}.1`, `${list}.2`],
      { says: ofControl },
    ),
  ]);
  return [
    ...inFrom,
    ...inLists,
    wrong(`${what} in subject`, { subject: `Hello${breaker}` }, 'subject'),
    wrong(
      `${what} in a header name`,
      { headers: { [`X-A${breaker}`]: 'a' } },
      `headers.X-A${breaker}`,
    ),
    wrong(`${what} in a header value`, { headers: { 'X-A': `a${breaker}` } }, 'headers.X-A'),
    wrong(`${what} in a tag`, { tags: [{ name: `a${breaker}`, value: `b${breaker}` }] }, [
      'tags.0.name',
      'tags.0.value',
    ]),
  ];
});

// ---- addresses -------------------------------------------------------------------------------

const fiftyOne = Array.from({ length: 51 }, (_, index) => `r${index}@recipient.test`);
const badAddresses: Readonly<Record<string, string>> = {
  'no @': 'ada',
  'no local part': '@recipient.test',
  'no domain': 'ada@',
  'one label': 'ada@recipient',
  'two in one text': 'a@recipient.test, b@recipient.test',
  'two with a semicolon': 'a@recipient.test;b@recipient.test',
  'two with spaces': 'a@recipient.test b@recipient.test',
  'an IP literal': 'ada@[192.0.2.1]',
  'an IPv6 literal': 'ada@[IPv6:2001:db8::1]',
  'a bare IP': 'ada@192.0.2.1',
  'a group': 'friends: a@recipient.test, b@recipient.test;',
  'a comment': 'ada(comment)@recipient.test',
  'a source route': '<@relay.test:ada@recipient.test>',
  'two dots': 'a..da@recipient.test',
  'an empty label': 'ada@recipient..test',
  'a long local part': `${'a'.repeat(65)}@recipient.test`,
  'a long label': `ada@${'a'.repeat(64)}.test`,
  'a long domain': `ada@${'a.'.repeat(130)}test`,
  'a long address': `${'a'.repeat(64)}@${'abcdefg.'.repeat(24)}test`,
  'a long name': `${'n'.repeat(2_000)} <ada@recipient.test>`,
  'no closing >': 'Ada <ada@recipient.test',
  'an open quote': '"Ada <ada@recipient.test>',
  'half a character': 'ada\ud800@recipient.test',
  'a name alone': 'Ada <>',
  nothing: '',
  'white space': '  ',
};

const addresses: readonly Case[] = [
  ...Object.entries(badAddresses).flatMap(([what, address]) => [
    wrong(`to: ${what}`, { to: address }, 'to'),
    wrong(`from: ${what}`, { from: address }, 'from'),
  ]),
  ...(['cc', 'bcc', 'reply_to'] as const).flatMap((list) => [
    wrong(`${list}: empty text`, { [list]: '' }, list),
    wrong(`${list}: one bad of two`, { [list]: ['a@recipient.test', 'b'] }, `${list}.1`),
  ]),
  ...lists.map((list) =>
    wrong(`51 addresses in ${list}`, { [list]: fiftyOne }, list, { says: /51.*50/ }),
  ),
  wrong('to: an empty list', { to: [] }, 'to'),
];

// ---- missing, null and of the wrong type -----------------------------------------------------

const missing = { code: 'missing_required_field' };
const required: readonly Case[] = [
  ...(['from', 'to', 'subject'] as const).flatMap((field) => [
    wrong(`no ${field}`, { [field]: undefined }, field, missing),
    wrong(`${field}: null`, { [field]: null }, field, missing),
  ]),
  wrong('neither html nor text', { text: undefined }, 'html', { ...missing, says: /`text`/ }),
  wrong('html and text null', { text: null, html: null }, 'html', { ...missing, says: /`text`/ }),
  wrong(
    'nothing at all',
    { from: undefined, to: undefined, subject: undefined, text: undefined },
    ['to', 'html', 'subject', 'from'],
    { ...missing, says: /^Missing `to` field\.$/ },
  ),
  wrong('a tag without a value', { tags: [{ name: 'a' }] }, 'tags.0.value', missing),
  wrong('a tag without a name', { tags: [{ value: 'a' }] }, 'tags.0.name', missing),
];

const texts = ['from', 'subject', 'html', 'text', 'scheduled_at', 'topic_id'] as const;
const notText: Readonly<Record<string, unknown>> = {
  number: 7,
  zero: 0,
  true: true,
  false: false,
  object: { a: 1 },
  array: ['a@mailstead.test'],
  'empty array': [],
  'a toString of its own': { toString: null, valueOf: null },
};
const types: readonly Case[] = [
  ...texts.flatMap((field) =>
    Object.entries(notText).map(([what, value]) =>
      wrong(
        `${field}: ${what}`,
        { [field]: value },
        what.startsWith('a toString') ? `${field}.toString` : field,
      ),
    ),
  ),
  ...lists.flatMap((list) => [
    ...[7, 0, true, false, { a: 1 }, { 0: 'a@recipient.test', length: 1 }].map((value) =>
      wrong(`${list}: ${JSON.stringify(value)}`, { [list]: value }, list, {
        says: /must be a string or an array of strings/,
      }),
    ),
    ...[7, null, true, {}, ['a@recipient.test']].map((item) =>
      wrong(
        `${list}: an item ${JSON.stringify(item)}`,
        { [list]: ['a@recipient.test', item] },
        `${list}.1`,
        { says: new RegExp(`\`${list}\\.1\` must be a string`) },
      ),
    ),
  ]),
  ...['X: a', 7, true, ['X-A'], [['X-A', 'a']]].map((value) =>
    wrong(`headers: ${JSON.stringify(value)}`, { headers: value }, 'headers'),
  ),
  ...[7, null, true, {}, ['a']].map((value) =>
    wrong(`a header ${JSON.stringify(value)}`, { headers: { 'X-A': value } }, 'headers.X-A'),
  ),
  ...['a', 7, true].map((value) =>
    wrong(`tags: ${JSON.stringify(value)}`, { tags: value }, 'tags', {
      says: /must be an array/,
    }),
  ),
  ...['a', 7, null, ['a'], [{ name: 'a', value: 'b' }]].map((item) =>
    wrong(`a tag ${JSON.stringify(item)}`, { tags: [item] }, 'tags.0'),
  ),
  ...[7, null, {}, ['a']].map((value) =>
    wrong(
      `a tag's value ${JSON.stringify(value)}`,
      { tags: [{ name: 'a', value }] },
      'tags.0.value',
    ),
  ),
];

// ---- subject, bodies, headers, tags ----------------------------------------------------------

const anyCase = (name: string): readonly string[] => [name, name.toLowerCase(), name.toUpperCase()];
const owned = ownedHeaders.flatMap((name) =>
  name === 'Content-*' ? ['Content-Type', 'Content-Transfer-Encoding', 'Content-X'] : [name],
);
const tag = (name: string, value: string): Record<string, unknown> => ({ tags: [{ name, value }] });

const contents: readonly Case[] = [
  wrong('NUL in html', { html: '<p>\0</p>' }, 'html'),
  wrong('NUL in text', { text: 'a\0b' }, 'text'),
  ...(['html', 'text'] as const).map((path) =>
    // Two bytes a character.
    wrong(`a long ${path}`, { [path]: 'ü'.repeat(CONTENT_MAX_BYTES / 2 + 1) }, path, {
      says: /5242882.*5242880/,
    }),
  ),
  wrong('a long subject', { subject: 's'.repeat(2_001) }, 'subject', { says: /2001.*2000/ }),
  wrong('a control character in subject', { subject: 'a\u0007b' }, 'subject'),
  ...owned
    .flatMap(anyCase)
    .map((name) => wrong(`the header ${name}`, { headers: { [name]: 'a' } }, `headers.${name}`)),
  ...['', ' ', 'X A', 'X-A:', 'X-Ä', 'X-\ud800', 'X'.repeat(77)].map((name) =>
    wrong(
      `the header name ${JSON.stringify(name)}`,
      { headers: { [name]: 'a' } },
      `headers.${name}`,
    ),
  ),
  wrong('a long header value', { headers: { 'X-A': 'a '.repeat(16_385) } }, 'headers.X-A'),
  wrong(
    'a header value that cannot be folded',
    { headers: { 'X-A': 'a'.repeat(999) } },
    'headers.X-A',
  ),
  wrong('half a character in a header', { headers: { 'X-A': 'a\ud800b' } }, 'headers.X-A'),
  wrong(
    '101 headers',
    {
      headers: Object.fromEntries(
        fiftyOne.flatMap((_, i) => [
          [`X-${i}`, 'a'],
          [`Y-${i}`, 'a'],
        ]),
      ),
    },
    'headers',
  ),
  wrong(
    'headers of more than 64 KB',
    {
      headers: {
        'X-A': 'a '.repeat(16_000),
        'X-B': 'a '.repeat(16_000),
        'X-C': 'a '.repeat(2_000),
      },
    },
    'headers',
  ),
  ...['constructor', '__proto__', 'hasOwnProperty', 'valueOf'].map((name) =>
    wrong(`the header ${name}: 5`, { headers: JSON.parse(`{"${name}":5}`) }, `headers.${name}`),
  ),
  wrong(
    'the header __proto__: an object',
    { headers: JSON.parse('{"__proto__":{"X-A":"a"}}') },
    'headers.__proto__',
  ),
  wrong('headers with a toString', { headers: { toString: 'a' } }, 'headers.toString'),
  wrong('76 tags', { tags: Array.from({ length: 76 }, () => ({ name: 'a', value: '' })) }, 'tags', {
    says: /76.*75/,
  }),
  ...['', 'a b', 'ä', 'a.b', 'a'.repeat(257), 'a\u200b'].map((name) =>
    wrong(`the tag name ${JSON.stringify(name)}`, tag(name, 'a'), 'tags.0.name'),
  ),
  ...['a b', 'ä', 'a.b', 'a'.repeat(257)].map((value) =>
    wrong(`the tag value ${JSON.stringify(value)}`, tag('a', value), 'tags.0.value'),
  ),
  wrong(
    'several things at once: all are listed',
    { to: 'nobody', subject: 'a\nb', headers: { From: 'a' }, tags: [{ name: '', value: 'a' }] },
    ['to', 'subject', 'headers.From', 'tags.0.name'],
  ),
];

const inHours = (hours: number): string => new Date(Date.now() + hours * 3_600_000).toISOString();
const unknownId = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const options: readonly Case[] = [
  ...['', 'soon', 'tomorrow at 9am', 'in 0 minutes', 'in 31 days', 'in 1 week', 'in -1 hours'].map(
    (text) =>
      wrong(`scheduled_at: ${JSON.stringify(text)}`, { scheduled_at: text }, 'scheduled_at'),
  ),
  wrong('scheduled_at: past', { scheduled_at: inHours(-0.01) }, 'scheduled_at', { says: /future/ }),
  wrong('scheduled_at: too distant', { scheduled_at: inHours(30 * 24 + 1) }, 'scheduled_at', {
    says: /30 days/,
  }),
  wrong('scheduled_at: no zone', { scheduled_at: inHours(1).slice(0, -1) }, 'scheduled_at', {
    says: /time zone/,
  }),
  wrong('scheduled_at: no such day', { scheduled_at: '2030-02-30T12:00:00Z' }, 'scheduled_at', {
    says: /does not exist/,
  }),
  wrong('topic_id: no UUID', { topic_id: 'news' }, 'topic_id'),
  wrong('topic_id: nobody has it', { topic_id: unknownId }, 'topic_id'),
  ...['x', 7, true, []].map((template) =>
    wrong(`template: ${JSON.stringify(template)}`, { text: undefined, template }, 'template'),
  ),
  wrong('a template without an id', { text: undefined, template: {} }, 'template.id', missing),
  wrong('a template whose id is a number', { text: undefined, template: { id: 7 } }, 'template.id'),
  ...['x', 7, ['a']].map((variables) =>
    wrong(
      `template variables ${JSON.stringify(variables)}`,
      { text: undefined, template: { id: unknownId, variables } },
      'template.variables',
    ),
  ),
  ...['text', 'html'].map((content) =>
    wrong(
      `a template beside ${content}`,
      { text: undefined, [content]: '', template: { id: unknownId } },
      'template',
    ),
  ),
  ...['x', 7, {}].map((attachments) =>
    wrong(`attachments: ${JSON.stringify(attachments)}`, { attachments }, 'attachments'),
  ),
  wrong('an attachment without a file', { attachments: [{ filename: 'a.txt' }] }, 'attachments.0', {
    code: 'invalid_attachment',
  }),
  wrong(
    'an attachment with a bad file, and a bad address',
    { to: 'x', attachments: [{ filename: 'a.txt', content: '!' }] },
    ['to', 'attachments.0.content'],
  ),
];

const cases = [...injections, ...addresses, ...required, ...types, ...contents, ...options];

// ---- what is unusual but right ---------------------------------------------------------------

const accepted: Readonly<Record<string, Record<string, unknown>>> = {
  'optional fields null': {
    html: null,
    cc: null,
    bcc: null,
    reply_to: null,
    headers: null,
    tags: null,
    attachments: null,
    scheduled_at: null,
    topic_id: null,
    template: null,
  },
  'optional lists empty': { cc: [], bcc: [], reply_to: [], headers: {}, tags: [], attachments: [] },
  'fifty in each list': Object.fromEntries(lists.map((list) => [list, fiftyOne.slice(1)])),
  'everything at its limit': {
    subject: 's'.repeat(2_000),
    tags: Array.from({ length: 75 }, () => ({ name: 'n'.repeat(256), value: 'v'.repeat(256) })),
    headers: { ['X'.repeat(76)]: 'a'.repeat(900) },
  },
  'names that every object has': JSON.parse(`{
    "headers": { "__proto__": "p", "constructor": "c", "valueOf": "v" },
    "tags": [{ "name": "__proto__", "value": "constructor", "__proto__": { "name": "x" } }],
    "__proto__": { "subject": "x" },
    "constructor": { "name": "x" }
  }`) as Record<string, unknown>,
  'fields nobody knows': { zzz: { a: [1, 2] }, status: 'delivered', id: 'x' },
  'an empty subject and an empty tag value': { subject: '', tags: [{ name: 'a', value: '' }] },
  'half a character in subject and text': { subject: 'a\ud800', text: 'b\udc00' },
};

const test = suite('bad input');
let app: App;
let database: Client;
const acceptedIds: string[] = [];
test.before(async () => {
  app = await startApp();
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
});

test('the table is what it says', () => {
  assert.ok(cases.length >= 80);
  assert.is(new Set(cases.map(({ title }) => title)).size, cases.length, 'no title twice');
});

for (const { title, change, ...rest } of cases) {
  test(`refused: ${title}`, async () => {
    const expected: Refused = { status: 422, ...rest };
    assertRefused(await app.call('POST', '/emails', { body: { ...good, ...change } }), expected);
  });
}

for (const [title, change] of Object.entries(accepted)) {
  test(`accepted: ${title}`, async () => {
    const id = await app.send({ ...good, ...change });
    acceptedIds.push(id);
    const { status, body } = await app.call('GET', `/emails/${id}`);
    assert.is(status, 200);
    if (typeof change['headers'] === 'object')
      assert.equal(body['headers'], nonEmpty(change['headers']));
  });
}

const nonEmpty = (value: object | null): object | null =>
  value === null || Object.keys(value).length === 0 ? null : value;

test('of two equal keys the last one counts', async () => {
  const body = JSON.stringify(good).replace('{', '{"subject":5,"to":[],');
  const { status, body: answer } = await app.call<{ id: string }>('POST', '/emails', { body });
  assert.is(status, 200);
  acceptedIds.push(answer.id);
});

test('afterwards a good email is delivered, nothing refused was kept, nothing was logged', async () => {
  const id = await app.send(good);
  acceptedIds.push(id);
  await app.untilEvent(id, 'delivered');
  const { rows } = await database.query<{ id: string }>('select id from email order by id');
  assert.equal(
    rows.map((row) => row.id),
    acceptedIds.toSorted(),
  );
  assert.equal(({} as Record<string, unknown>)['name'], undefined, 'no prototype was touched');
  assert.equal(app.complaints, []);
});

test.run();
