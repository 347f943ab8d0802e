// A client of an SMTP listener, for tests: replies as whole texts, before and after STARTTLS.
import { once } from 'node:events';
import type { Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';

export interface SmtpClient {
  socket: Socket;
  /** The next whole reply, lines joined with `\n`; empty when the connection ended. */
  reply(): Promise<string>;
  /** Sends a line, or bytes as they are; the reply. */
  say(line: string | Buffer): Promise<string>;
  /** STARTTLS; nothing is said in it yet. */
  startTls(): Promise<void>;
}

const sockets: Socket[] = [];

/** Closes what was opened here: after each test. */
export function closeClients(): void {
  // What lies on top first: a socket that is torn down below its TLS ends the process in some versions of Node.
  for (const socket of sockets.splice(0).toReversed()) socket.destroy();
}

/** Nothing was read or said. */
export function smtpClient(opened: Socket): SmtpClient {
  let take = follow(opened);
  const client: SmtpClient = {
    socket: opened,
    reply: () => take(),
    say(line) {
      client.socket.write(typeof line === 'string' ? `${line}\r\n` : line);
      return take();
    },
    async startTls() {
      await client.say('STARTTLS');
      client.socket.removeAllListeners('data');
      const socket = connectTls({ socket: client.socket, rejectUnauthorized: false });
      sockets.push(socket);
      socket.on('error', () => undefined);
      await once(socket, 'secureConnect');
      client.socket = socket;
      take = follow(socket);
    },
  };
  return client;
}

function follow(socket: Socket): () => Promise<string> {
  sockets.push(socket);
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
