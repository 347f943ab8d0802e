// What a template may say, and where its variables stand: the rules that need no database.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import {
  applyRequest,
  checkCreate,
  type UpdateTemplateRequest,
} from '../../src/templates/content.ts';
import { parsePlaceholders } from '../../src/templates/placeholder.ts';

const test = suite('template content');
const at = new Date('2026-01-02T03:04:05.678Z');
const later = new Date('2026-02-02T03:04:05.678Z');
const good = { name: 'Welcome', html: '<p>Hi</p>' };

function issuesOf(change: UpdateTemplateRequest): readonly string[] {
  try {
    checkCreate({ ...good, ...change }, at);
  } catch (error) {
    assert.instance(error, Refusal);
    assert.is((error as Refusal).status, 422);
    return (error as Refusal).issues.map(({ path }) => path);
  }
  return [];
}

const keysOf = (text: string): readonly string[] =>
  parsePlaceholders(text).placeholders.map(({ key }) => key);

test('a text is taken apart and nothing of it is lost', () => {
  assert.equal(parsePlaceholders('a {{{ONE}}}{{{ two_2 | b | c }}} d').segments, [
    'a ',
    { key: 'ONE', fallback: null },
    { key: 'two_2', fallback: 'b | c' },
    ' d',
  ]);
  assert.equal(parsePlaceholders('').segments, []);
  assert.equal(parsePlaceholders('{{{A|}}}').segments, [{ key: 'A', fallback: '' }]);
});

test('what is no placeholder stays as it is', () => {
  for (const text of [
    '{{A}}',
    '{ {{A}} }',
    '{{{A}}',
    '{{{A|b}c}}}',
    '{{{}}}',
    '{{{|x}}}',
    '{{{if(a){b()}}}}',
    '{{{a:"b"}}}',
  ]) {
    assert.equal(parsePlaceholders(text).segments, [text]);
    assert.equal(parsePlaceholders(text).misnamed, []);
  }
  assert.equal(parsePlaceholders('{{{{A}}}}').segments, ['{', { key: 'A', fallback: null }, '}']);
});

test('a key is 1 to 50 letters, digits and underscores; what a person would take for one is told', () => {
  assert.equal(keysOf(`{{{${'A'.repeat(50)}}}}`), ['A'.repeat(50)]);
  for (const name of ['A'.repeat(51), 'first-name', 'contact.email', 'TWO WORDS', 'größe']) {
    assert.equal(parsePlaceholders(`{{{${name}}}}`).misnamed, [name]);
    assert.equal(issuesOf({ html: `{{{${name}}}}` }), ['html'], name);
  }
});

test('a hostile text is read in one pass', () => {
  for (const piece of ['{', '{{{', '{{{A', '{{{A|', '{{{ ', '}', '{{{A}}']) {
    const text = piece.repeat(Math.ceil(2_000_000 / piece.length));
    assert.equal(parsePlaceholders(text).placeholders, [], piece);
  }
  assert.equal(keysOf(`{{{A|${'x'.repeat(2_000_000)}}}}`), ['A']);
});

test('the least and the most that a template can be', () => {
  assert.equal(issuesOf({ name: 'n', html: '' }), []);
  assert.equal(checkCreate(good, at).content.replyToGiven, []);
  assert.equal(
    issuesOf({
      name: 'n'.repeat(255),
      alias: 'a'.repeat(128),
      from: 'Ünï <a@münchen.test>',
      reply_to: Array.from({ length: 50 }, (_, index) => `r${index}@x.test`),
      subject: 's'.repeat(2_000),
      preview_text: 'p',
      html: 'x'.repeat(5 * 1024 * 1024),
      text: '',
      variables: Array.from({ length: 50 }, (_, index) => ({ key: `K${index}` })),
    }),
    [],
  );
});

test('every wrong field is named', () => {
  const wrong: UpdateTemplateRequest = {
    name: ' ',
    alias: 'not an alias',
    from: 'nobody',
    reply_to: ['a@x.test', 'nobody'],
    subject: 'two\r\nlines',
    preview_text: 'a\0b',
    html: 'a\ud800b',
    text: 'x'.repeat(5 * 1024 * 1024 + 1),
  };
  const paths = ['name', 'alias', 'from', 'reply_to.1', 'subject', 'preview_text', 'html', 'text'];
  assert.equal(issuesOf(wrong), paths);
});

test('what is refused field by field', () => {
  const refused: readonly (readonly [UpdateTemplateRequest, string])[] = [
    [{ name: 'n'.repeat(256) }, 'name'],
    [{ name: 'a\nb' }, 'name'],
    [{ alias: '' }, 'alias'],
    [{ alias: 'a'.repeat(129) }, 'alias'],
    [{ alias: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' }, 'alias'],
    [{ alias: 'ünï' }, 'alias'],
    [{ from: '{{{WHO}}} <a@x.test>' }, 'from'],
    [{ reply_to: 'nobody' }, 'reply_to'],
    [{ reply_to: Array.from({ length: 51 }, () => 'a@x.test') }, 'reply_to'],
    [{ subject: 's'.repeat(2_001) }, 'subject'],
    [{ html: '{{{NAME}}}' }, 'html'],
    [{ text: '{{{NAME}}}' }, 'text'],
    [{ subject: '{{{NAME}}}' }, 'subject'],
    [{ html: '{{{FIRST_NAME|you}}}' }, 'html'],
    [{ html: '{{{A|b}}}'.repeat(10_001) }, 'html'],
    [{ variables: Array.from({ length: 51 }, (_, n) => ({ key: `K${n}` })) }, 'variables'],
    [{ variables: [{ key: 'A' }, { key: 'A' }] }, 'variables.1.key'],
    [{ variables: [{ key: 'A', name: '' }] }, 'variables.0.name'],
  ];
  for (const [change, path] of refused) assert.equal(issuesOf(change), [path], path);
});

test('a bad or reserved key is refused', () => {
  for (const key of [
    '',
    'A-B',
    'ä',
    'K'.repeat(51),
    'FIRST_NAME',
    'LAST_NAME',
    'EMAIL',
    'UNSUBSCRIBE_URL',
    'RESEND_UNSUBSCRIBE_URL',
    'contact',
    'this',
    '__proto__',
    'constructor',
    'toString',
  ]) {
    assert.equal(issuesOf({ variables: [{ key }] }), ['variables.0.key'], key);
  }
  assert.equal(issuesOf({ variables: [{ key: 'first_name' }, { key: 'A_1' }] }), []);
});

test('a fallback is of the type of its variable', () => {
  const types = {
    string: ['', 'x'.repeat(2_000)],
    number: [0, -1.5, 2 ** 53 - 1],
    boolean: [false, true],
    object: [{}, { a: [1] }],
    list: [[], ['a', 1]],
  } as const;
  for (const [type, values] of Object.entries(types)) {
    for (const other of Object.keys(types) as (keyof typeof types)[]) {
      for (const fallback_value of values) {
        const issues = issuesOf({ variables: [{ key: 'A', type: other, fallback_value }] });
        const expected = other === type ? [] : ['variables.0.fallback_value'];
        assert.equal(issues, expected, `${type} for ${other}`);
      }
    }
  }
  const bad = [
    { type: 'string', fallback_value: 'x'.repeat(2_001) },
    { type: 'string', fallback_value: 'a\0b' },
    { type: 'number', fallback_value: 2 ** 53 },
    { type: 'number', fallback_value: Infinity },
    { type: 'object', fallback_value: { a: ['\ud800'] } },
    { type: 'object', fallback_value: { '\0': 1 } },
    { type: 'list', fallback_value: ['x'.repeat(2_000)] },
  ] as const;
  for (const one of bad) {
    const issues = issuesOf({ variables: [{ key: 'A', ...one }] });
    assert.equal(issues, ['variables.0.fallback_value'], JSON.stringify(one).slice(0, 60));
  }
});

test('a fallback that stands in the subject is one line', () => {
  const variables = [{ key: 'A', fallback_value: 'a\r\nBcc: b@x.test' }];
  assert.equal(issuesOf({ variables, html: '{{{A}}}' }), []);
  assert.equal(issuesOf({ variables, subject: '{{{A}}}' }), ['subject']);
});

test('an undeclared variable may stand where it brings its own default', () => {
  assert.equal(issuesOf({ html: '{{{A|b}}}' }), []);
  assert.equal(issuesOf({ html: '{{{A|b}}}{{{A}}}' }), ['html']);
});

test('a change keeps what it does not name and is checked against it', () => {
  const first = checkCreate(
    { ...good, alias: 'a', subject: 'Hi {{{A}}}', variables: [{ key: 'A' }, { key: 'B' }] },
    at,
  );
  assert.equal(applyRequest(first, {}, later), first);
  assert.is(applyRequest(first, { alias: null }, later).alias, null);
  for (const change of [{ variables: null }, { variables: [{ key: 'B' }] }, { text: '{{{C}}}' }]) {
    assert.throws(() => applyRequest(first, change, later), /declared/);
  }
  const second = applyRequest(
    first,
    { variables: [{ key: 'B', type: 'number' }, { key: 'A' }, { key: 'C' }] },
    later,
  );
  const [a, b] = first.content.variables;
  const [b2, a2, c2] = second.content.variables;
  assert.equal(a2, a, 'the same declaration');
  assert.equal(b2, { ...b, type: 'number', updatedAt: later.toISOString() });
  assert.is(c2?.createdAt, later.toISOString());
});

test.run();
