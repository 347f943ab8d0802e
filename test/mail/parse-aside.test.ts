// Messages that are read by a thread: the same as here, and none of them holds up this process.
import { randomBytes } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMessage } from '../../src/mail/parse.ts';
import { createParser } from '../../src/mail/parse-aside.ts';

const test = suite('parse aside');

const file = randomBytes(100_000);
const message = (head: string): Buffer =>
  Buffer.from(
    [
      'From: a@outside.test',
      'Subject: =?utf-8?q?J=C3=BCrgen?=',
      'Content-Type: multipart/mixed; boundary=b',
      '',
      '--b',
      head,
      '',
      'Text',
      '--b',
      'Content-Type: application/pdf; name="a.pdf"',
      'Content-Transfer-Encoding: base64',
      '',
      file.toString('base64').replace(/.{76}/g, '$&\r\n'),
      '--b--',
      '',
    ].join('\r\n'),
  );

test('a thread reads what is read here', async () => {
  const parse = createParser();
  const raw = message('Content-Type: text/plain');
  const [apart, again, here] = await Promise.all([parse(raw), parse(raw), parseMessage(raw)]);
  assert.equal(apart, here);
  assert.equal(again, here);
  assert.ok(Buffer.isBuffer(apart!.attachments[0]!.content));
  assert.ok(apart!.attachments[0]!.content.equals(file));
});

test('what takes too long cannot be read, and holds nobody up', async () => {
  const parse = createParser({ readingMaxMs: 1_500 });
  const part = `To: ${'a:b;'.repeat(60_000)}\r\n\r\nx\r\n--b\r\n`;
  const slow = message(part.repeat(20));
  const startedAt = performance.now();
  let lastAt = performance.now();
  let blockedMs = 0;
  const watch = setInterval(() => {
    blockedMs = Math.max(blockedMs, performance.now() - lastAt);
    lastAt = performance.now();
  }, 10);
  const good = message('Content-Type: text/plain');
  const [first, second, third] = await Promise.all([parse(slow), parse(slow), parse(good)]);
  clearInterval(watch);
  assert.ok(performance.now() - startedAt > 1_500);
  assert.is(first, null);
  assert.is(second, null);
  assert.is(third?.attachments.length, 1, 'the next one gets a new thread');
  assert.ok(blockedMs < 500, `${Math.round(blockedMs)} ms without a turn`);
});

test('who will not wait for a thread gets null while the others are read', async () => {
  const parse = createParser({ readingMaxMs: 3_000, waitingMaxMs: 200, threadsMax: 1 });
  const slow = message(`To: ${'a:b;'.repeat(60_000)}\r\n\r\nx\r\n--b\r\n`.repeat(20));
  const order: string[] = [];
  const first = parse(slow).then(() => order.push('slow'));
  const second = await parse(message('Content-Type: text/plain'));
  order.push('impatient');
  assert.is(second, null);
  await first;
  assert.equal(order, ['impatient', 'slow']);
  const next = await parse(message('Content-Type: text/plain'));
  assert.is(next?.attachments.length, 1, 'a free thread is taken at once');
});

test.run();
