// Received mail that answers sent mail: tied by the ids that it names, once, within the tenant, whichever door the sent
// email came through. Over real SMTP and HTTP.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readAnswering } from '../../src/receiving/replies.ts';
import { REPLIES_TOLD_MAX } from '../../src/receiving/store-copies.ts';
import { newId } from '../../src/store/id.ts';
import { startApp, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { closeAll, send } from '../support/sink-session.ts';
import { closeClients } from '../support/smtp-client.ts';
import { dialSubmission } from '../support/submission-session.ts';

const test = suite<{ app: App }>('replies');

test.before(async (context) => {
  context.app = await startApp();
});
test.after.each(async () => {
  closeClients();
  await closeAll();
});
test.after(async ({ app }) => {
  await app.stop();
});

interface Received {
  id: string;
  answers_email_id: string | null;
}
interface Event {
  type: string;
  recipient: string | null;
  detail: Record<string, unknown>;
}

let number = 0;
/** Hands in a message with these fields; what the API shows of it. */
async function receive(
  app: App,
  fields: readonly string[],
  to: readonly string[] = ['desk@mailstead.test'],
): Promise<Received> {
  number += 1;
  const raw = [`Subject: number ${number}`, ...fields, '', 'words', ''].join('\r\n');
  const { response } = await send(app.appliance.mxPort!, { from: 'x@outside.test', to, raw });
  const id = response.split(' ').at(-1)!;
  return (await app.call<Received & Record<string, unknown>>('GET', `/emails/receiving/${id}`))
    .body;
}

const messageIdOf = async (app: App, id: string): Promise<string> =>
  String((await app.call('GET', `/emails/${id}`)).body['message_id']);

const repliesTo = async (app: App, id: string): Promise<Event[]> =>
  (await app.call<{ events: Event[] }>('GET', `/emails/${id}/timeline`)).body.events.filter(
    ({ type }) => type === 'replied',
  );

test('a reply is tied to the email that it answers, and the timeline tells it', async ({ app }) => {
  const sent = await app.send();
  const messageId = await messageIdOf(app, sent);
  assert.is(messageId, `<${sent}@mailstead.test>`);
  const reply = await receive(app, [`In-Reply-To: ${messageId}`]);
  assert.is(reply.answers_email_id, sent);
  assert.equal(
    (await repliesTo(app, sent)).map(({ recipient, detail }) => ({ recipient, detail })),
    [{ recipient: null, detail: { received_email_id: reply.id, automatic: false } }],
  );
  const vacation = await receive(app, [
    `References: <other@x.test>\r\n ${messageId}`,
    'Auto-Submitted: auto-replied',
  ]);
  assert.is(vacation.answers_email_id, sent);
  assert.equal((await repliesTo(app, sent)).at(-1)!.detail, {
    received_email_id: vacation.id,
    automatic: true,
  });
  const { body } = await app.call<{ data: Received[] }>(
    'GET',
    `/emails/receiving?answers_email_id=${sent}`,
  );
  assert.equal(
    body.data.map(({ id }) => id),
    [vacation.id, reply.id],
  );
});

test('a second arrival of the reply is told once', async ({ app }) => {
  const sent = await app.send();
  const raw = `Message-ID: <twice@outside.test>\r\nIn-Reply-To: <${sent}@mailstead.test>\r\nSubject: twice\r\n\r\nx\r\n`;
  const message = { from: 'x@outside.test', to: ['desk@mailstead.test'], raw };
  for (let n = 0; n < 2; n += 1) await send(app.appliance.mxPort!, message);
  assert.is((await repliesTo(app, sent)).length, 1);
});

test('the direct parent goes before the rest of the thread', async ({ app }) => {
  const [root, middle, parent] = [await app.send(), await app.send(), await app.send()];
  const id = (email: string): string => `<${email}@mailstead.test>`;
  const thread = `References: ${id(root)} ${id(middle)} ${id(parent)}`;
  assert.is((await receive(app, [thread])).answers_email_id, parent);
  const direct = await receive(app, [thread, `In-Reply-To: ${id(middle)}`]);
  assert.is(direct.answers_email_id, middle);
  const ofOthers = await receive(app, [
    `In-Reply-To: <their.own@outside.test>`,
    `References: ${id(root)} <their.own@outside.test>`,
  ]);
  assert.is(ofOthers.answers_email_id, root);
});

test('what came by SMTP is found by its own Message-ID, of two the newer', async ({ app }) => {
  const submit = async (): Promise<string> => {
    const client = await dialSubmission(app.appliance.submissionsPort!, true);
    await client.logIn('resend', app.key);
    await client.say('MAIL FROM:<ada@mailstead.test>');
    await client.say('RCPT TO:<ok@recipient.test>');
    await client.say('DATA');
    number += 1;
    const said = await client.say(
      `From: ada@mailstead.test\r\nTo: ok@recipient.test\r\nMessage-ID: <Client's.own+%id@mua.test>\r\nSubject: ${number}\r\n\r\nx\r\n.`,
    );
    assert.match(said, /^250 /);
    return /[0-9a-f-]{36}/.exec(said)![0];
  };
  const first = await submit();
  const messageId = await messageIdOf(app, first);
  const one = await receive(app, [`In-Reply-To: ${messageId}`]);
  assert.is(one.answers_email_id, first);
  assert.is(messageId, "<Client's.own+%id@mua.test>");
  const second = await submit();
  const another = await receive(app, [`In-Reply-To: ${messageId}`]);
  assert.is(another.answers_email_id, second);
});

test('ids that only look like ours tie nothing', async ({ app }) => {
  const sent = await app.send();
  for (const field of [
    `In-Reply-To: <${sent}@elsewhere.test>`,
    `In-Reply-To: <${newId()}@mailstead.test>`,
    `In-Reply-To: ${sent}@mailstead.test`,
    `In-Reply-To: <>`,
    `In-Reply-To: <'|:*&!\\@x.test>`,
    `X-In-Reply-To: <${sent}@mailstead.test>`,
    `References: ${Array.from({ length: 30 }, (_, n) => `<${n}@x.test>`).join('\r\n ')}`,
  ]) {
    assert.is((await receive(app, [field])).answers_email_id, null, field);
  }
  const report = await receive(app, [
    `In-Reply-To: <${sent}@mailstead.test>`,
    'Content-Type: multipart/report; report-type=delivery-status; boundary=b',
  ]);
  assert.is(report.answers_email_id, null, 'a report is no answer');
  assert.equal(await repliesTo(app, sent), []);
});

test('nobody answers the mail of another tenant', async ({ app }) => {
  const { tenantId, key } = await secondTenant(app);
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into sending_domain (tenant_id, id, name, status, receiving, receiving_verified)
       values ($1, $2, 'replies.test', 'verified', true, true)`,
      [tenantId, newId()],
    ),
  );
  const sent = await app.send();
  const field = `In-Reply-To: <${sent}@mailstead.test>`;
  await receive(app, [field], ['a@replies.test']);
  const { body } = await app.call<{ data: Received[] }>('GET', '/emails/receiving', { key });
  assert.equal(
    body.data.map(({ answers_email_id }) => answers_email_id),
    [null],
  );
  assert.equal(await repliesTo(app, sent), []);
  const mine = await receive(app, [field], ['b@replies.test', 'desk@mailstead.test']);
  assert.is(mine.answers_email_id, sent);
  assert.is((await repliesTo(app, sent)).length, 1);
});

test('a thread without an end does not fill the timeline', async ({ app }) => {
  const sent = await app.send();
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into timeline (tenant_id, email_id, id, at, kind, detail)
       select tenant_id, id, gen_random_uuid(), now(), 'replied', '{}' from email,
         generate_series(2, $2) where id = $1`,
      [sent, REPLIES_TOLD_MAX],
    ),
  );
  for (let n = 0; n < 2; n += 1) {
    const reply = await receive(app, [`In-Reply-To: <${sent}@mailstead.test>`]);
    assert.is(reply.answers_email_id, sent);
  }
  assert.is((await repliesTo(app, sent)).length, REPLIES_TOLD_MAX);
});

test('a header can name as many as it likes: the first ones count', () => {
  const many = Array.from({ length: 5_000 }, (_, n) => `<${n}@x.test>`).join(' ');
  const read = readAnswering(
    Buffer.from(`In-Reply-To: <parent@x.test>\r\nReferences: ${many}\r\n\r\nx`),
  );
  assert.is(read?.named.length, 20);
  assert.is(read?.named[0], '<parent@x.test>');
  assert.is(read?.named[1], '<4999@x.test>');
  assert.is(readAnswering(Buffer.from('Subject: x\r\n\r\nIn-Reply-To: <a@b.test>')), null);
});

test.run();
