// Large messages in a bucket that goes away: who brings one is asked to come again, small ones go on, and what waits to be
// sent is put off without its pauses growing.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { startS3, type S3Bench } from '../support/s3.ts';
import { handIn } from '../support/hand-in.ts';

const LARGE = 'large '.repeat(50_000);

const test = suite('bucket away');
let s3: S3Bench;
let app: App;
test.before(async () => {
  s3 = await startS3();
  app = await startApp({ MAILSTEAD_BLOB_STORE: s3.url, MAILSTEAD_RETRY_SCHEDULE: '300ms,1h' });
});
test.before.each(() => {
  s3.fault = 'none';
});
test.after(async () => {
  s3.fault = 'none';
  await app.stop();
  await s3.stop();
});

const post = (text: string) =>
  app.call('POST', '/emails', {
    body: { from: 'ada@mailstead.test', to: 'ok@recipient.test', subject: 'x', text },
  });

test('a large message goes through the bucket', async () => {
  const id = await app.send({ text: LARGE });
  await app.untilEvent(id, 'delivered');
  assert.ok(s3.asked.some((one) => one.startsWith('PUT')));
  const { body } = await app.call<{ data: { raw: string }[] }>('GET', '/sink/messages?limit=1');
  assert.ok(body.data[0]!.raw.replaceAll('=\r\n', '').includes(LARGE.slice(0, 1_000)));
});

test('away, the API asks to come again with large messages, and takes small ones', async () => {
  s3.fault = 'away';
  const large = await post(LARGE);
  assert.equal([large.status, large.body['name']], [503, 'service_unavailable']);
  assert.match(String(large.body['message']), 'store of large messages');
  assert.not.match(JSON.stringify(large.body), /127\.0\.0\.1|S3RVER|bucket/);
  assert.ok(Number(large.headers.get('retry-after')) > 0);
  const small = await post('small');
  assert.is(small.status, 200);
  await app.untilEvent(String(small.body['id']), 'delivered');
});

test('away, the MX listener asks to come again with large messages', async () => {
  const message = (n: number, text: string): string =>
    `From: a@else.test\r\nSubject: ${n}\r\nMessage-ID: <${n}@else.test>\r\n\r\n${text}`;
  const about = { recipient: 'x@mailstead.test' };
  const port = app.appliance.mxPort!;
  const text = `${'x'.repeat(70)}\r\n`.repeat(4_000);
  s3.fault = 'away';
  const away = await handIn(port, { ...about, message: message(1, text) });
  assert.is(away.code, 451, away.reply);
  assert.is((await handIn(port, { ...about, message: message(2, 'small') })).code, 250);
  s3.fault = 'none';
  assert.is((await handIn(port, { ...about, message: message(1, text) })).code, 250);
});

test('what cannot be read is put off again and again, and is sent when the bucket is back', async () => {
  s3.fault = 'unreadable';
  const id = await app.send({ text: LARGE });
  const attempts = async (): Promise<readonly Record<string, unknown>[]> => {
    const { body } = await app.call<{ events: Record<string, unknown>[] }>(
      'GET',
      `/emails/${id}/timeline`,
    );
    return body.events.filter(({ type }) => type === 'deferred');
  };
  await app.untilEvent(id, 'delivery_delayed');
  // By the schedule the second pause is an hour.
  for (let tries = 0; (await attempts()).length < 2; tries++) {
    assert.ok(tries < 300, JSON.stringify(await attempts()));
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  const detail = (await attempts())[0]!['detail'] as Record<string, unknown>;
  assert.is(detail['cause'], 'store_unavailable');
  assert.match(String(detail['reply']), 'nothing was sent');
  s3.fault = 'none';
  await app.untilEvent(id, 'delivered');
});

test.run();
