// Sessions with a submission listener for tests: replies as whole texts, STARTTLS and implicit TLS.
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';

export interface SubmissionClient {
  socket: Socket;
  /** The next whole reply, lines joined with `\n`; empty when the connection ended. */
  reply(): Promise<string>;
  say(line: string | Buffer): Promise<string>;
  /** STARTTLS and EHLO; the reply to EHLO. */
  secure(): Promise<string>;
  /** AUTH PLAIN. */
  logIn(user: string, password: string): Promise<string>;
}

const clients: Socket[] = [];

/** Closes what was opened here: after each test. */
export function closeClients(): void {
  for (const socket of clients.splice(0)) socket.destroy();
}

/** Has read the greeting and said EHLO. */
export async function dialSubmission(port: number, isTls = false): Promise<SubmissionClient> {
  const tls = { rejectUnauthorized: false };
  const first = isTls
    ? connectTls({ port, host: '127.0.0.1', ...tls })
    : connect({ port, host: '127.0.0.1' });
  const client = wrap(first);
  await client.reply();
  await client.say('EHLO client.test');
  return client;
}

function wrap(first: Socket): SubmissionClient {
  let take = follow(first);
  const client: SubmissionClient = {
    socket: first,
    reply: () => take(),
    say(line) {
      client.socket.write(typeof line === 'string' ? `${line}\r\n` : line);
      return take();
    },
    async secure() {
      await client.say('STARTTLS');
      client.socket.removeAllListeners('data');
      const socket = connectTls({ socket: client.socket, rejectUnauthorized: false });
      clients.push(socket);
      socket.on('error', () => undefined);
      await once(socket, 'secureConnect');
      client.socket = socket;
      take = follow(socket);
      return client.say('EHLO client.test');
    },
    logIn: (user, password) =>
      client.say(`AUTH PLAIN ${Buffer.from(`\0${user}\0${password}`).toString('base64')}`),
  };
  return client;
}

function follow(socket: Socket): () => Promise<string> {
  clients.push(socket);
  let pending = '';
  let isOver = false;
  let wake = (): void => undefined;
  socket.on('error', () => undefined);
  socket.on('data', (chunk: Buffer) => {
    pending += chunk.toString();
    wake();
  });
  socket.on('close', () => {
    isOver = true;
    wake();
  });
  return async () => {
    for (;;) {
      const whole = /^(?:\d{3}-.*\r\n)*\d{3} .*\r\n/.exec(pending)?.[0];
      if (whole !== undefined) {
        pending = pending.slice(whole.length);
        return whole.trimEnd().replaceAll('\r', '');
      }
      if (isOver) return '';
      await new Promise<void>((resolve) => (wake = resolve));
    }
  };
}
