// The check of a request by itself: what it makes of a good one, and how it tells what is wrong with a bad one.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import {
  checkRequest,
  meaningOf,
  planRequest,
  readRequest,
  type PlannedEmail,
  type SendEmailRequest,
} from '../../src/sending/request.ts';

const good: SendEmailRequest = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Hello',
  text: 'Plain words.',
};

const now = new Date('2030-01-01T00:00:00.000Z');
const check = (request: SendEmailRequest): PlannedEmail =>
  checkRequest(request, { now, spooled: new Map() });

function refusalOf(change: Record<string, unknown>): Refusal {
  try {
    check({ ...good, ...change });
  } catch (error) {
    assert.instance(error, Refusal);
    return error as Refusal;
  }
  throw new Error(`accepted: ${JSON.stringify(change)}`);
}

const test = suite('request');

test('one address or a list, null or nothing: lists of mailboxes', () => {
  const checked = check({ ...good, cc: ['A <a@recipient.test>', ' b@recipient.test '] });
  assert.is(checked.from?.given, 'Ada <ada@mailstead.test>');
  assert.is(checked.from?.domain, 'mailstead.test');
  assert.equal(
    checked.cc.map(({ given }) => given),
    ['A <a@recipient.test>', 'b@recipient.test'],
  );
  assert.equal(check({ ...good, bcc: null, reply_to: [] }).bcc, []);
});

test('a recipient that is named twice is one recipient, in the order of the lists', () => {
  const { recipients } = check({
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
  assert.is(check({ ...good, text: null, html: '<p></p>' }).text, null);
  assert.is(check({ ...good, text: '', html: '<p></p>' }).text, '');
  assert.is(check({ ...good, html: null }).html, null);
  assert.is(check({ ...good, text: '' }).text, '', 'an empty email is an email');
});

test('headers come in one order, whatever the order of their keys', () => {
  const inOrder = check({ ...good, headers: { 'X-A': 'a', 'X-B': 'b' } });
  assert.equal(inOrder, check({ ...good, headers: { 'X-B': 'b', 'X-A': 'a' } }));
  assert.equal(inOrder.headers, [
    ['X-A', 'a'],
    ['X-B', 'b'],
  ]);
});

test('tags keep their name and value and nothing else', () => {
  const tag = { name: 'a', value: '', extra: 'x' };
  assert.equal(check({ ...good, tags: [tag] }).tags, [{ name: 'a', value: '' }]);
  assert.is(check(good).tags, null);
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

test('a template stands for content, author and subject; not beside html or text', () => {
  const template = { id: 'welcome', variables: { NAME: 'Ada' } };
  const checked = check({ to: good.to ?? null, template });
  assert.is(checked.from, null);
  assert.is(checked.subject, null);
  assert.equal(checked.template, template);
  assert.equal(check({ ...good, text: null, template: { id: 'x' } }).template?.variables, {});
  for (const content of [{ text: 'a' }, { text: '' }, { html: '<p>a</p>' }]) {
    const { code, issues } = refusalOf({ text: null, ...content, template });
    assert.is(code, 'validation_error');
    assert.equal(
      issues.map(({ path }) => path),
      ['template'],
    );
  }
});

test('the time is told as of now, and among everything else that is wrong', () => {
  const at = (scheduled_at: string): Date | null => check({ ...good, scheduled_at }).scheduledAt;
  assert.equal(at('in 2 hours'), new Date('2030-01-01T02:00:00.000Z'));
  assert.equal(at('2030-01-31T00:00:00Z'), new Date('2030-01-31T00:00:00.000Z'));
  assert.is(check(good).scheduledAt, null);
  const { code, issues } = refusalOf({ to: 'nobody', scheduled_at: '2029-12-31T23:59:59Z' });
  assert.is(code, 'validation_error');
  assert.equal(
    issues.map(({ path }) => path),
    ['to', 'scheduled_at'],
  );
  assert.match(refusalOf({ scheduled_at: 'soon' }).message, /^`scheduled_at` must be an ISO 8601/);
});

test('what a request means does not depend on the clock', () => {
  const request = { ...good, scheduled_at: '2030-01-02T00:00:00Z' };
  const read = readRequest(request, new Map());
  assert.ok(planRequest(read, now));
  assert.throws(() => planRequest(read, new Date('2030-01-03T00:00:00Z')), /in the future/);
  assert.ok(read.email !== null, 'it is still the same request');
  const later = readRequest({ ...request, scheduled_at: '2030-01-02T00:00:01Z' }, new Map());
  if (later.email !== null) assert.not.equal(meaningOf(later.email), meaningOf(read.email));
  assert.ok(later.email !== null);
});

test('a topic is a UUID, an attachment a file', () => {
  const topic_id = '019E6F0A-5a1c-7000-8f3e-2b6a4c1d9e70';
  assert.is(check({ ...good, topic_id }).topicId, topic_id.toLowerCase());
  assert.is(check({ ...good, topic_id: null }).topicId, null);
  assert.equal(
    refusalOf({ topic_id: 'news' }).issues.map(({ path }) => path),
    ['topic_id'],
  );
  const content = Buffer.from('a').toString('base64');
  const [file] = check({ ...good, attachments: [{ filename: 'a.txt', content }] }).attachments;
  assert.is(file?.contentType, 'text/plain');
  const refusal = refusalOf({ attachments: [{ filename: 'a.txt' }] });
  assert.is(refusal.code, 'invalid_attachment');
  assert.is(refusalOf({ attachments: [{ filename: 'a.txt' }], to: 'x' }).code, 'validation_error');
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
  const full = check({ ...good, to: list, cc: list, bcc: list, reply_to: list });
  assert.is(full.recipients.length, 50);
  for (const field of ['to', 'cc', 'bcc', 'reply_to']) {
    const refusal = refusalOf({ [field]: [...list, 'one-more@recipient.test'] });
    assert.equal(refusal.issues, [
      { path: field, message: `\`${field}\` has 51 addresses; at most 50 are allowed.` },
    ]);
  }
});

test.run();
