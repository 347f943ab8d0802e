// Sessions with a submission listener for tests: STARTTLS, implicit TLS and AUTH.
import { connect } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { smtpClient, type SmtpClient } from './smtp-client.ts';

export interface SubmissionClient extends SmtpClient {
  /** STARTTLS and EHLO; the reply to EHLO. */
  secure(): Promise<string>;
  /** AUTH PLAIN. */
  logIn(user: string, password: string): Promise<string>;
}

/** Has read the greeting and said EHLO. */
export async function dialSubmission(port: number, isTls = false): Promise<SubmissionClient> {
  const tls = { rejectUnauthorized: false };
  const opened = isTls
    ? connectTls({ port, host: '127.0.0.1', ...tls })
    : connect({ port, host: '127.0.0.1' });
  const base = smtpClient(opened);
  const client: SubmissionClient = Object.assign(base, {
    async secure() {
      await base.startTls();
      return base.say('EHLO client.test');
    },
    logIn: (user: string, password: string) =>
      base.say(`AUTH PLAIN ${Buffer.from(`\0${user}\0${password}`).toString('base64')}`),
  });
  await client.reply();
  await client.say('EHLO client.test');
  return client;
}
