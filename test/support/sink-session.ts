// Sessions with the built-in sink for tests: servers and connections that are closed together.
import type { Socket } from 'node:net';
import SMTPConnection from 'nodemailer/lib/smtp-connection';
import { dialBare, startTestSink } from './sink.ts';
import type { BareClient, TestSink } from './sink.ts';

const sinks: TestSink[] = [];
const sockets: Socket[] = [];

/** Stops and closes what was opened here: after each test. */
export async function closeAll(): Promise<void> {
  for (const socket of sockets.splice(0)) socket.destroy();
  await Promise.all(sinks.splice(0).map((one) => one.stop()));
}

/** Closes a socket of the caller's along with the others. */
export function closeLater(socket: Socket): void {
  sockets.push(socket);
}

/** A sink of its own. */
export async function start(options: Parameters<typeof startTestSink>[0] = {}): Promise<TestSink> {
  const started = await startTestSink(options);
  sinks.push(started);
  return started;
}

/** A connection that has read the greeting, and has said EHLO unless `bare`. */
export async function dial(port: number, bare = false): Promise<BareClient> {
  const client = await dialBare(port);
  closeLater(client.socket);
  if (!bare) await client.say('EHLO client.test');
  return client;
}

/** MAIL, one RCPT, DATA; the connection is ready for the message. */
export async function open(port: number, rcpt = 'ok@a.test'): Promise<BareClient> {
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  await wire.say(`RCPT TO:<${rcpt}>`);
  await wire.say('DATA');
  return wire;
}

/** One message over nodemailer's client, in a session of its own. */
export async function send(
  port: number,
  message: { from?: string; to?: readonly string[]; raw?: Buffer | string; tls?: boolean } = {},
): Promise<{ response: string; rejected: readonly string[] }> {
  const client = new SMTPConnection({
    host: '127.0.0.1',
    port,
    name: 'client.test',
    ignoreTLS: message.tls !== true,
    requireTLS: message.tls === true,
    tls: { rejectUnauthorized: false },
  });
  const { promise, resolve, reject } = Promise.withResolvers<Awaited<ReturnType<typeof send>>>();
  client.on('error', reject);
  client.connect(() => {
    const envelope = {
      from: message.from ?? 'from@b.test',
      to: [...(message.to ?? ['ok@a.test'])],
    };
    client.send(envelope, message.raw ?? 'Subject: x\r\n\r\nx\r\n', (error, info) => {
      if (error) reject(error);
      else resolve({ response: info.response ?? '', rejected: info.rejected ?? [] });
    });
  });
  try {
    return await promise;
  } finally {
    client.close();
  }
}

/** What the other side said when the work failed; `no failure` when it did not. */
export async function failure(work: Promise<unknown>): Promise<string> {
  try {
    await work;
    return 'no failure';
  } catch (error) {
    return (error as { response?: string }).response ?? (error as Error).message;
  }
}
