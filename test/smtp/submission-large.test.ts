// A message of 30 MB through submission: taken, kept whole, delivered, and its file handed out again.
import { randomBytes } from 'node:crypto';
import { createTransport } from 'nodemailer';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp } from '../support/app.ts';

test('a message of 30 MB', async () => {
  const app = await startApp();
  const transport = createTransport({
    host: '127.0.0.1',
    port: app.appliance.submissionPort ?? 0,
    requireTLS: true,
    auth: { user: 'resend', pass: app.key },
    tls: { rejectUnauthorized: false },
  });
  try {
    const file = randomBytes(22 * 1024 * 1024); // 30 MB in base64
    const { response } = await transport.sendMail({
      from: 'ada@mailstead.test',
      to: 'ok+large@recipient.test',
      subject: 'large',
      text: 'see file',
      attachments: [{ filename: 'large.bin', content: file }],
    });
    const id = /queued as (\S+)$/.exec(response)?.[1] ?? '';
    await app.untilEvent(id, 'delivered');
    const sink = await app.call<{ data: { raw: string }[] }>('GET', '/sink/messages');
    const raw = sink.body.data[0]?.raw ?? '';
    assert.ok(raw.length > 30_000_000);
    const start = raw.indexOf('\r\n\r\n', raw.indexOf('large.bin')) + 4;
    const lines = raw.slice(start, raw.indexOf('\r\n--', start));
    assert.ok(Buffer.from(lines, 'base64').equals(file), 'delivered as it was');
    const { body } = await app.call<{ data: { download_url: string; size: number }[] }>(
      'GET',
      `/emails/${id}/attachments`,
    );
    assert.is(body.data[0]?.size, file.length);
    const { pathname } = new URL(body.data[0]?.download_url ?? '');
    const bytes = await (await fetch(app.base + pathname)).arrayBuffer();
    assert.ok(Buffer.from(bytes).equals(file), 'handed out as it was');
  } finally {
    transport.close();
    await app.stop();
  }
});

test.run();
