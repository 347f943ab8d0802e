// The check of a request by itself: what it makes of a good one, and how it tells what is wrong with a bad one.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { checkRequest, type SendEmailRequest } from '../../src/sending/request.ts';

const good: SendEmailRequest = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Hello',
  text: 'Plain words.',
};

function refusalOf(change: Record<string, unknown>): Refusal {
  try {
    checkRequest({ ...good, ...change });
  } catch (error) {
    assert.instance(error, Refusal);
    return error as Refusal;
  }
  throw new Error(`accepted: ${JSON.stringify(change)}`);
}

const test = suite('request');

test('one address or a list, null or nothing: lists of mailboxes', () => {
  const checked = checkRequest({ ...good, cc: ['A <a@recipient.test>', ' b@recipient.test '] });
  assert.is(checked.from.given, 'Ada <ada@mailstead.test>');
  assert.is(checked.from.domain, 'mailstead.test');
  assert.equal(
    checked.cc.map(({ given }) => given),
    ['A <a@recipient.test>', 'b@recipient.test'],
  );
  assert.equal(checkRequest({ ...good, bcc: null, reply_to: [] }).bcc, []);
});

test('a recipient that is named twice is one recipient, in the order of the lists', () => {
  const { recipients } = checkRequest({
    ...good,
    to: ['b@recipient.test', 'B <b@RECIPIENT.test>', 'ü@münchen.test'],
    cc: ['a@recipient.test', '"b"@recipient.test'],
    bcc: 'ü@xn--mnchen-3ya.test',
    reply_to: 'nobody@recipient.test',
  });
  assert.equal(
    recipients.map(({ address }) => address),
    ['b@recipient.test', 'ü@xn--mnchen-3ya.test', 'a@recipient.test'],
  );
});

test('absent, empty and given text stay apart', () => {
  assert.is(checkRequest({ ...good, text: null, html: '<p></p>' }).text, null);
  assert.is(checkRequest({ ...good, text: '', html: '<p></p>' }).text, '');
  assert.is(checkRequest({ ...good, html: null }).html, null);
  assert.is(checkRequest({ ...good, text: '' }).text, '', 'an empty email is an email');
});

test('headers come in one order, whatever the order of their keys', () => {
  const inOrder = checkRequest({ ...good, headers: { 'X-A': 'a', 'X-B': 'b' } });
  assert.equal(inOrder, checkRequest({ ...good, headers: { 'X-B': 'b', 'X-A': 'a' } }));
  assert.equal(inOrder.headers, [
    ['X-A', 'a'],
    ['X-B', 'b'],
  ]);
});

test('tags keep their name and value and nothing else', () => {
  const tag = { name: 'a', value: '', extra: 'x' };
  assert.equal(checkRequest({ ...good, tags: [tag] }).tags, [{ name: 'a', value: '' }]);
  assert.is(checkRequest(good).tags, null);
});

test('what is missing gives the code, and everything else is listed after it', () => {
  const { code, status, message, issues } = refusalOf({
    from: undefined,
    to: ['nobody'],
    tags: [{ name: 'a b', value: 'c' }],
  });
  assert.is(code, 'missing_required_field');
  assert.is(status, 422);
  assert.is(message, 'Missing `from` field.');
  assert.equal(
    issues.map(({ path }) => path),
    ['from', 'to.0', 'tags.0.name'],
  );
});

test('what this release does not have is said first', () => {
  const refusal = refusalOf({ to: undefined, topic_id: 'x', template: {} });
  assert.is(refusal.code, 'not_supported');
  assert.equal(
    refusal.issues.map(({ path }) => path),
    ['topic_id', 'template'],
  );
  assert.ok(checkRequest({ ...good, attachments: [], template: null }));
});

test('an answer stays small, however much is wrong', () => {
  const many = refusalOf({ to: Array.from({ length: 50 }, () => 'x'), cc: fifty(), bcc: fifty() });
  assert.is(many.issues.length, 100);
  const name = 'X'.repeat(60_000);
  const [issue] = refusalOf({ headers: { [name]: 'a\n' } }).issues;
  assert.ok((issue?.path.length ?? 0) <= 201);
  assert.ok((issue?.message.length ?? 0) <= 501);
});

const fifty = (): string[] => Array.from({ length: 50 }, () => 'x');

test('fifty recipients in each list are allowed, fifty-one are not', () => {
  const list = Array.from({ length: 50 }, (_, index) => `r${index}@recipient.test`);
  const full = checkRequest({ ...good, to: list, cc: list, bcc: list, reply_to: list });
  assert.is(full.recipients.length, 50);
  for (const field of ['to', 'cc', 'bcc', 'reply_to']) {
    const refusal = refusalOf({ [field]: [...list, 'one-more@recipient.test'] });
    assert.equal(refusal.issues, [
      { path: field, message: `\`${field}\` has 51 addresses; at most 50 are allowed.` },
    ]);
  }
});

test.run();
