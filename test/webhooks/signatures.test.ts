// What a receiver can rely on: signatures that three libraries verify, before, while and after a secret is rotated, and
// what is told about an email, a received email and everything else.
import { randomBytes } from 'node:crypto';
import { Resend } from 'resend';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import { Webhook as Svix } from 'svix';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { newSecret, sealSecret } from '../../src/webhooks/secrets.ts';
import { until } from '../support/app.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';
import {
  startReceiver,
  startTeller,
  type Happening,
  type ReceivedCall,
  type Receiver,
  type Teller,
} from '../support/webhooks.ts';

const test = suite('webhook signatures');
let bench: Bench;
let teller: Teller;
let endpoint: Receiver;
let webhookId: string;
test.before(async () => {
  bench = await openQueue();
  teller = startTeller({ store: bench.store, log: silent });
  endpoint = await startReceiver();
  ({ id: webhookId } = await teller.verbs.create(bench.tenantId, {
    endpoint: `${endpoint.url}?a=b`,
    events: ['email.sent', 'email.bounced', 'email.received', 'topic.created', 'topic.created'],
  }));
});
test.after(async () => {
  await teller.stop();
  await endpoint.stop();
  await bench.stop();
});

async function tell(about: Partial<Happening>): Promise<ReceivedCall> {
  const [id] = await teller.happen(bench.tenantId, 1, about);
  await teller.tell();
  return until(
    async () => endpoint.calls.find((call) => call.id === id)!,
    (call) => call !== undefined,
  );
}

/** What all three say it is; throws when one does not believe it. */
function verify({ headers, body }: ReceivedCall, secret: string): Record<string, unknown> {
  const given = headers as Record<string, string>;
  const [id, timestamp, signature] = ['id', 'timestamp', 'signature'].map((name) => {
    assert.is(given[`webhook-${name}`], given[`svix-${name}`]);
    return given[`webhook-${name}`]!;
  }) as [string, string, string];
  const standard = new StandardWebhook(secret).verify(body, given);
  new Svix(secret).verify(body, given);
  const resend = new Resend('re_unused', { baseUrl: 'http://127.0.0.1:1' });
  const read = resend.webhooks.verify({
    payload: body,
    headers: { id, timestamp, signature },
    webhookSecret: secret,
  });
  assert.equal(read, standard);
  return standard as Record<string, unknown>;
}

test('three libraries verify a call, and nobody a forged one', async () => {
  const { secret } = (await teller.verbs.find(bench.tenantId, webhookId))!;
  assert.match(secret, /^whsec_[A-Za-z0-9+/]{43}=$/);
  const call = await tell({ type: 'topic.created', detail: { name: 'ü “quoted” \u2028' } });
  assert.is(call.path, '/hook?a=b');
  assert.is(call.headers['content-type'], 'application/json');
  assert.equal(verify(call, secret)['data'], { name: 'ü “quoted” \u2028' });
  for (const forged of [
    { ...call, body: call.body.replace('quoted', 'forged') },
    { ...call, headers: { ...call.headers, 'webhook-id': 'msg_x', 'svix-id': 'msg_x' } },
  ]) {
    const given = forged.headers as Record<string, string>;
    assert.throws(() => verify(forged, secret));
    assert.throws(() => new Svix(secret).verify(forged.body, given));
  }
});

test('after a rotation both secrets sign for a day, then the new one alone', async () => {
  const { secret: before } = (await teller.verbs.find(bench.tenantId, webhookId))!;
  const after = (await teller.verbs.rotate(bench.tenantId, webhookId))!;
  assert.is.not(after, before);
  const both = await tell({ type: 'topic.created' });
  assert.is(String(both.headers['webhook-signature']).split(' ').length, 2);
  verify(both, before);
  verify(both, after);
  teller.advance(24 * 3_600_000);
  const alone = await tell({ type: 'topic.created' });
  const [signature, ...others] = String(alone.headers['webhook-signature']).split(' ');
  assert.equal(others, []);
  // Libraries refuse the time of tomorrow, so it is signed again here.
  const at = new Date(Number(alone.headers['webhook-timestamp']) * 1_000);
  assert.is(signature, new StandardWebhook(after).sign(alone.id, at, alone.body));
  const { rows } = await bench.store.pool.query<{ secret_sealed: Buffer }>(
    'select secret_sealed from webhook where id = $1',
    [webhookId],
  );
  assert.not.match(rows[0]!.secret_sealed.toString('latin1'), /whsec_/);
});

test('a rotation mends a secret that was sealed with another key', async () => {
  const owner = { tenantId: bench.tenantId, webhookId };
  const lost = sealSecret(randomBytes(32), owner, newSecret());
  await bench.store.pool.query('update webhook set secret_sealed = $2 where id = $1', [
    webhookId,
    lost,
  ]);
  const secret = (await teller.verbs.rotate(bench.tenantId, webhookId))!;
  const call = await tell({ type: 'topic.created' });
  const at = new Date(Number(call.headers['webhook-timestamp']) * 1_000);
  assert.is(
    call.headers['webhook-signature'],
    new StandardWebhook(secret).sign(call.id, at, call.body),
  );
});

test('of an email is told what is known of it, and what the event adds', async () => {
  const broadcastId = newId();
  const [emailId = ''] = await bench.enqueue(1, {
    tags: [
      { name: 'campaign', value: 'spring' },
      { name: '__proto__', value: 'x' },
    ],
    headers: { 'X-Own': '1' },
    broadcastId,
  });
  const detail = {
    recipient: 'gone@recipient.test',
    bounce: { message: 'no such user', type: 'Permanent', subType: 'General' },
  };
  const { body } = await tell({ type: 'email.bounced', subjectId: emailId, detail });
  const { rows } = await bench.store.pool.query<Record<string, string>>(
    `select message_id, from_given, subject, to_given ->> 0 as first from email where id = $1`,
    [emailId],
  );
  const [row] = rows;
  const told = JSON.parse(body) as {
    type: string;
    created_at: string;
    data: Record<string, unknown>;
  };
  const { created_at: createdAt, ...data } = told.data;
  assert.is(told.type, 'email.bounced');
  for (const time of [told.created_at, createdAt]) {
    assert.match(String(time), /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
  }
  assert.equal(data, {
    email_id: emailId,
    message_id: row!['message_id'],
    from: row!['from_given'],
    to: [row!['first']],
    subject: row!['subject'],
    broadcast_id: broadcastId,
    tags: JSON.parse('{"campaign":"spring","__proto__":"x"}') as unknown,
    headers: [{ name: 'X-Own', value: '1' }],
    ...detail,
  });
  // It has no tags and no headers of its own: they are not there. One that is gone: what the event says.
  const [plain = ''] = await bench.enqueue(1);
  const sent = JSON.parse(
    (await tell({ type: 'email.sent', subjectId: plain, detail: {} })).body,
  ) as typeof told;
  assert.equal(Object.keys(sent.data), [
    'created_at',
    'email_id',
    'message_id',
    'from',
    'to',
    'subject',
  ]);
  const unknown = newId();
  const gone = await tell({
    type: 'email.sent',
    subjectId: unknown,
    detail: { recipient: 'a@b.test' },
  });
  assert.equal((JSON.parse(gone.body) as typeof told).data, {
    email_id: unknown,
    recipient: 'a@b.test',
  });
});

test('of a received email its metadata is told', async () => {
  const id = newId();
  await bench.store.pool.query(
    `insert into received_email (tenant_id, id, created_at, mail_from, received_for, route_decisions,
        from_shown, to_shown, cc_shown, bcc_shown, reply_to_shown, subject, message_id, attachments,
        is_read, is_partial)
      values ($1, $2, '2026-01-02T03:04:05.678Z', 'a@b.test', '["me@mailstead.test"]', '[]',
        'A <a@b.test>', '["me@mailstead.test"]', '["c@b.test"]', '[]', '[]', 'Hi', '<x@b.test>', $3,
        true, false)`,
    [
      bench.tenantId,
      id,
      JSON.stringify([
        {
          id: newId(),
          filename: 'a.pdf',
          size: 5,
          content_type: 'application/pdf',
          content_id: null,
          content_disposition: 'attachment',
        },
      ]),
    ],
  );
  const { body } = await tell({ type: 'email.received', subjectId: id, detail: {} });
  const { data } = JSON.parse(body) as { data: { attachments: Record<string, unknown>[] } };
  const [{ id: attachmentId, ...attachment } = {}] = data.attachments;
  assert.type(attachmentId, 'string');
  assert.equal(attachment, {
    filename: 'a.pdf',
    content_type: 'application/pdf',
    content_disposition: 'attachment',
    content_id: null,
  });
  assert.equal(
    { ...data, attachments: [] },
    {
      email_id: id,
      created_at: '2026-01-02T03:04:05.678Z',
      from: 'A <a@b.test>',
      to: ['me@mailstead.test'],
      cc: ['c@b.test'],
      bcc: [],
      received_for: ['me@mailstead.test'],
      message_id: '<x@b.test>',
      subject: 'Hi',
      attachments: [],
    },
  );
});

test.run();
