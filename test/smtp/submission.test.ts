// Submission through the whole appliance: nodemailer and swaks hand in mail, the sink gets it signed, the API shows it.
import { execFile, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { simpleParser } from 'mailparser';
import { createTransport } from 'nodemailer';
import type SMTPTransport from 'nodemailer/lib/smtp-transport';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { closeClients } from '../support/smtp-client.ts';
import { dialSubmission } from '../support/submission-session.ts';

let app: App;

const submission = suite('submission');

submission.before(async () => {
  app = await startApp();
});

submission.after(async () => {
  closeClients();
  await app.stop();
});

type Mail = Parameters<ReturnType<typeof createTransport>['sendMail']>[0];

/** The last reply, and the id in it. */
async function send(
  mail: Mail,
  options: { readonly key?: string; readonly user?: string; readonly isTls?: boolean } = {},
): Promise<{ readonly response: string; readonly id: string }> {
  const isTls = options.isTls ?? false;
  const settings: SMTPTransport.Options = {
    host: '127.0.0.1',
    port: (isTls ? app.appliance.submissionsPort : app.appliance.submissionPort) ?? 0,
    secure: isTls,
    requireTLS: !isTls,
    auth: { user: options.user ?? 'resend', pass: options.key ?? app.key },
    tls: { rejectUnauthorized: false },
  };
  const transport = createTransport(settings);
  try {
    const { response } = await transport.sendMail(mail);
    return { response, id: /queued as (\S+)$/.exec(response)?.[1] ?? '' };
  } finally {
    transport.close();
  }
}

const refusalOf = (work: Promise<unknown>): Promise<string> =>
  work.then(
    () => 'no refusal',
    (error: Error & { response?: string }) => error.response ?? error.message,
  );

interface SinkMessage {
  readonly rcpt_to: readonly string[];
  readonly raw: string;
}

/** What the sink got for this recipient. */
async function delivered(recipient: string): Promise<SinkMessage> {
  const found = await until(
    async () => {
      const { body } = await app.call<{ data: readonly SinkMessage[] }>('GET', '/sink/messages');
      return body.data.filter(({ rcpt_to: to }) => to.includes(recipient));
    },
    (messages) => messages.length > 0,
  );
  assert.is(found.length, 1);
  return found[0]!;
}

interface Shown {
  readonly id: string;
  readonly to: readonly string[];
  readonly cc: readonly string[] | null;
  readonly bcc: readonly string[] | null;
  readonly html: string | null;
  readonly text: string | null;
  readonly from: string;
  readonly subject: string;
  readonly reply_to: readonly string[] | null;
}

const find = async (id: string): Promise<Shown> =>
  (await app.call<Shown>('GET', `/emails/${id}`)).body;

for (const isTls of [false, true]) {
  const name = isTls ? 'implicit TLS' : 'STARTTLS';
  submission(
    `nodemailer over ${name}: delivered as it was written, shown as it reads`,
    async () => {
      const to = `ok+${isTls ? 'tls' : 'start'}@recipient.test`;
      const file = randomBytes(10_000);
      const { id, response } = await send(
        {
          from: 'Jörg <ada@mailstead.test>',
          to: `"Ünal, B" <${to}>`,
          cc: 'c@recipient.test',
          replyTo: 'r@mailstead.test',
          subject: 'Grüße',
          text: 'Schöne Grüße\nund Zeilen',
          html: `<p>Schöne Grüße ${'ä'.repeat(2_000)}</p>`,
          headers: { 'X-Campaign': 'spring' },
          attachments: [{ filename: 'größe.bin', content: file }],
        },
        { isTls, user: isTls ? 'mailstead' : 'resend' },
      );
      assert.match(response, /^250 2\.0\.0 Ok: queued as [0-9a-f-]{36}$/);
      const { raw } = await delivered(to);
      assert.match(raw, /^DKIM-Signature: /);
      assert.match(raw, /Received: from submission\.invalid/);
      assert.not.match(raw, /127\.0\.0\.1/);
      const parsed = await simpleParser(Buffer.from(raw, 'latin1'), {});
      assert.is(parsed.subject, 'Grüße');
      assert.is(parsed.text?.trim(), 'Schöne Grüße\nund Zeilen');
      assert.ok(parsed.attachments[0]?.content.equals(file));
      const shown = await find(id);
      assert.is(shown.from, 'Jörg <ada@mailstead.test>');
      assert.equal(shown.to, [`"Ünal, B" <${to}>`]);
      assert.equal(shown.cc, ['c@recipient.test']);
      assert.equal(shown.bcc, null);
      assert.equal(shown.reply_to, ['r@mailstead.test']);
      assert.is(shown.subject, 'Grüße');
      assert.is(shown.text?.trim(), 'Schöne Grüße\nund Zeilen');
      assert.match(shown.html ?? '', /^<p>Schöne Grüße ä{2000}<\/p>/);
    },
  );
}

submission('attachments can be downloaded, in whatever encoding they came', async () => {
  const file = randomBytes(5_000);
  const { id } = await send({
    from: 'ada@mailstead.test',
    to: 'ok+files@recipient.test',
    subject: 'files',
    text: 'see files',
    attachments: [
      { filename: 'a.bin', content: file },
      { filename: 'b.txt', content: 'words = text\n', contentTransferEncoding: 'quoted-printable' },
    ],
  });
  const { body } = await app.call<{ data: { id: string; filename: string; size: number }[] }>(
    'GET',
    `/emails/${id}/attachments`,
  );
  assert.equal(
    body.data.map(({ filename, size }) => [filename, size]),
    [
      ['a.bin', 5_000],
      ['b.txt', 14],
    ],
  );
  const wanted = [file, Buffer.from('words = text\r\n')];
  for (const [at, { id: attachmentId }] of body.data.entries()) {
    const one = await app.call<{ download_url: string }>(
      'GET',
      `/emails/${id}/attachments/${attachmentId}`,
    );
    const { pathname, search } = new URL(one.body.download_url);
    const bytes = Buffer.from(await (await fetch(app.base + pathname + search)).arrayBuffer());
    assert.ok(bytes.equals(wanted[at]!));
  }
});

submission('the envelope decides who gets it: Bcc is delivered and in no header', async () => {
  const { id } = await send({
    from: 'ada@mailstead.test',
    to: 'ok+seen@recipient.test',
    bcc: 'ok+hidden@recipient.test',
    subject: 'bcc',
    text: 'x',
  });
  const { raw } = await delivered('ok+hidden@recipient.test');
  await delivered('ok+seen@recipient.test');
  assert.not.match(raw, /hidden/);
  const shown = await find(id);
  assert.equal(shown.to, ['ok+seen@recipient.test']);
  assert.equal(shown.bcc, ['ok+hidden@recipient.test']);
  const other = await send({
    envelope: { from: 'bounce@elsewhere.test', to: ['ok+envelope@recipient.test'] },
    raw: 'From: ada@mailstead.test\r\nTo: nobody@recipient.test\r\nBcc: x@recipient.test\r\n\r\nx\r\n',
  });
  const alone = await delivered('ok+envelope@recipient.test');
  assert.not.match(alone.raw, /Bcc/i);
  assert.equal((await find(other.id)).bcc, ['ok+envelope@recipient.test']);
});

submission(
  'an idempotency key: the same message twice is one email, another one is refused',
  async () => {
    const mail = (text: string): Mail => ({
      from: 'ada@mailstead.test',
      to: 'ok+once@recipient.test',
      subject: 'once',
      text,
      html: '<p>x</p>', // two parts, so that nodemailer draws new boundaries each time
      headers: { 'Resend-Idempotency-Key': 'submission-1' },
    });
    const first = await send(mail('one'));
    const second = await send(mail('one'));
    assert.is(second.id, first.id);
    assert.match(await refusalOf(send(mail('two'))), /^554 5\.7\.0 .*idempotency key/);
    const { raw } = await delivered('ok+once@recipient.test');
    assert.not.match(raw, /idempotency/i);
    const long = { ...mail('x'), headers: { 'Resend-Idempotency-Key': 'k'.repeat(257) } };
    assert.match(await refusalOf(send(long)), /^550 5\.6\.0 .*1 to 256/);
  },
);

submission('the domain of From must be one of the tenant, and of the key', async () => {
  const { tenantId, key } = await secondTenant(app);
  assert.ok(tenantId);
  const mail = { from: 'x@unknown.test', to: 'ok@recipient.test', subject: 's', text: 't' };
  // Development mode takes an unknown author, as over HTTP; the timeline says so.
  const { id } = await send(mail, { key });
  assert.ok(id);
  const { body } = await app.call<{ data: { id: string }[] }>('GET', '/domains');
  const domainId = await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ id: string }>(
      `select id from sending_domain where name = 'mailstead.test'`,
    );
    return rows[0]!.id;
  });
  assert.ok(body);
  const made = await app.call<{ token: string }>('POST', '/api-keys', {
    body: { name: 'bound', permission: 'sending_access', domain_id: domainId },
  });
  assert.is(made.status, 201);
  const bound = { key: made.body.token };
  const own = { ...mail, from: 'x@mailstead.test', to: 'ok+bound@recipient.test' };
  assert.match((await send(own, bound)).response, /^250 /);
  assert.match(await refusalOf(send(mail, bound)), /^550 5\.7\.1 .*only send from its own domain/);
});

submission('the timeline tells of the submission', async () => {
  const { id } = await send({
    from: 'ada@mailstead.test',
    to: 'ok+trace@recipient.test',
    subject: 's',
    text: 't',
    xMailer: 'TestMailer 1',
  });
  const { body } = await app.call<{ events: { type: string; detail: Record<string, unknown> }[] }>(
    'GET',
    `/emails/${id}/timeline`,
  );
  const detail = body.events[0]?.detail ?? {};
  assert.is(detail['via'], 'smtp');
  assert.is(detail['user_agent'], 'TestMailer 1');
  assert.is(detail['remote_address'], '127.0.0.1');
  const { raw } = await delivered('ok+trace@recipient.test');
  assert.ok(raw.includes(`id ${String(detail['request_id'])};`), 'the trace line has the same id');
});

// ---- swaks -------------------------------------------------------------------------------------

const hasSwaks = spawnSync('swaks', ['--version']).status === 0;

function swaks(...options: readonly string[]): Promise<{ code: number; said: string }> {
  const fixed = ['--server', '127.0.0.1', '--helo', 'client.test', '--timeout', '15'];
  return new Promise((resolve) => {
    execFile('swaks', [...fixed, ...options], (error, stdout, stderr) => {
      resolve({ code: error === null ? 0 : Number(error.code), said: stdout + stderr });
    });
  });
}

const people = ['--from', 'ada@mailstead.test', '--to'];

if (hasSwaks) {
  submission('swaks over STARTTLS, pipelined, PLAIN; over implicit TLS, LOGIN', async () => {
    const login = ['--auth-user', 'resend', '--auth-password', app.key];
    const plain = await swaks(
      '--port',
      String(app.appliance.submissionPort),
      '-tls',
      '--pipeline',
      '--auth',
      'PLAIN',
      ...login,
      ...people,
      'ok+swaks1@recipient.test,ok+swaks2@recipient.test',
    );
    assert.is(plain.code, 0, plain.said);
    assert.match(plain.said, /250 2\.0\.0 Ok: queued as/);
    await delivered('ok+swaks2@recipient.test');
    const implicit = await swaks(
      '--port',
      String(app.appliance.submissionsPort),
      '-tlsc',
      '--auth',
      'LOGIN',
      ...login,
      ...people,
      'ok+swaks3@recipient.test',
    );
    assert.is(implicit.code, 0, implicit.said);
    await delivered('ok+swaks3@recipient.test');
  });

  submission('swaks without TLS finds no login, and a wrong key is refused', async () => {
    const at = ['--port', String(app.appliance.submissionPort), ...people, 'ok@recipient.test'];
    const bare = await swaks(
      ...at,
      '--auth',
      'PLAIN',
      '--auth-user',
      'resend',
      '--auth-password',
      app.key,
    );
    assert.is(bare.code, 28, bare.said);
    const wrong = await swaks(
      ...at,
      '-tls',
      '--auth',
      'PLAIN',
      '--auth-user',
      'resend',
      '--auth-password',
      'x',
    );
    assert.is(wrong.code, 28, wrong.said);
    assert.match(wrong.said, /535 5\.7\.8/);
    const anonymous = await swaks(...at, '-tls');
    assert.is(anonymous.code, 23, anonymous.said);
    assert.match(anonymous.said, /530 5\.7\.0/);
  });
} else {
  submission.skip('swaks is not installed: its two tests are left out', () => undefined);
}

// The last one: what comes after failed logins has to wait.
submission('a wrong key, a wrong user, an unfit message: each reply says what to fix', async () => {
  const mail = { from: 'ada@mailstead.test', to: 'ok@recipient.test', subject: 's', text: 't' };
  assert.match(await refusalOf(send(mail, { key: 're_wrong' })), /^535 5\.7\.8 .*API key/);
  assert.match(await refusalOf(send(mail, { user: 'ada' })), /^535 5\.7\.8 .*"resend"/);
  const client = await dialSubmission(app.appliance.submissionsPort ?? 0, true);
  await client.logIn('resend', app.key);
  await client.say('MAIL FROM:<ada@mailstead.test>');
  await client.say('RCPT TO:<ok@recipient.test>');
  await client.say('DATA');
  const bare = Buffer.from('From: ada@mailstead.test\r\n\r\na\nb\r\n.\r\n');
  assert.match(await client.say(bare), /^550 5\.6\.11 .*CRLF/);
});

submission.run();
