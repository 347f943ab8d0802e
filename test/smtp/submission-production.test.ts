// Submission in production: off without a certificate, and with one only for the tenant's own verified domains.
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createTransport } from 'nodemailer';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { makeSelfSigned } from '../../src/self-signed.ts';
import { startApp } from '../support/app.ts';
import { SECRET } from '../support/settings.ts';

const PRODUCTION = {
  MAILSTEAD_MODE: 'production',
  MAILSTEAD_PUBLIC_URL: 'https://mail.example.com',
  MAILSTEAD_HOSTNAME: 'mail.example.com',
  MAILSTEAD_SECRET: SECRET,
  MAILSTEAD_DELIVERY: 'sink',
};

const production = suite('submission: production');

production('without a certificate it is off, and the log says what it needs', async () => {
  const app = await startApp(PRODUCTION);
  try {
    assert.is(app.appliance.submissionPort, null);
    assert.is(app.appliance.submissionsPort, null);
    assert.is((await app.call('GET', '/emails')).status, 200);
    const said = app.complaints.filter((line) => line.includes('MAILSTEAD_TLS_CERT'));
    assert.is(said.length, 1, app.complaints.join('\n'));
  } finally {
    await app.stop();
  }
});

production('with one, clients can verify us, and an unknown author is refused', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-tls-'));
  const { cert, key } = makeSelfSigned('mail.example.com', new Date());
  await writeFile(join(folder, 'cert.pem'), cert);
  await writeFile(join(folder, 'key.pem'), key);
  const app = await startApp({
    ...PRODUCTION,
    MAILSTEAD_TLS_CERT: join(folder, 'cert.pem'),
    MAILSTEAD_TLS_KEY: join(folder, 'key.pem'),
    MAILSTEAD_RATE_LIMIT: '1/1d',
  });
  const transport = createTransport({
    host: '127.0.0.1',
    port: app.appliance.submissionsPort ?? 0,
    secure: true,
    auth: { user: 'resend', pass: app.key },
    tls: { ca: cert, servername: 'mail.example.com' },
  });
  const send = (): Promise<string> =>
    transport
      .sendMail({ from: 'x@unverified.test', to: 'ok@recipient.test', subject: 's', text: 't' })
      .then(
        ({ response }) => response,
        (error: Error & { response?: string }) => error.response ?? error.message,
      );
  try {
    assert.match(await send(), /^550 5\.7\.1 The domain unverified\.test is not verified/);
    assert.match(await send(), /^450 4\.7\.1 Too many requests.* Retry after \d+ s\.$/);
  } finally {
    transport.close();
    await app.stop();
    await rm(folder, { recursive: true, force: true });
  }
});

production.run();
