// One message handed to an SMTP listener line by line, for tests that ask what it says to it.
import { once } from 'node:events';
import { connect } from 'node:net';
import { createInterface } from 'node:readline';

const REPLY_MAX_MS = 60_000;

/** The code of the reply that decided: 250 when the message was taken; 0 when the connection ended or nothing was said. */
export async function handIn(
  port: number,
  about: {
    readonly recipient: string;
    readonly message: string;
    /** Empty for the null sender. */
    readonly mailFrom?: string;
  },
): Promise<{ readonly code: number; readonly reply: string }> {
  const socket = connect({ port, host: '127.0.0.1' });
  socket.on('error', () => undefined); // the lines end
  const late = setTimeout(() => socket.destroy(), REPLY_MAX_MS);
  try {
    const lines = createInterface({ input: socket })[Symbol.asyncIterator]();
    const hear = async (): Promise<string> => {
      try {
        for (;;) {
          const { value, done } = await lines.next();
          if (done === true || value === undefined) return '';
          if (value[3] !== '-') return value;
        }
      } catch {
        return ''; // refused, or reset
      }
    };
    const commands = [
      'EHLO torture.test',
      `MAIL FROM:<${about.mailFrom ?? 'someone@else.test'}>`,
      `RCPT TO:<${about.recipient}>`,
      'DATA',
      `${about.message.replace(/\r?\n/g, '\r\n')}\r\n.`,
    ];
    let reply = await hear();
    for (const command of commands) {
      if (!/^[23]/.test(reply)) break;
      socket.write(`${command}\r\n`);
      reply = await hear();
    }
    return { code: Number(reply.slice(0, 3)) || 0, reply };
  } finally {
    clearTimeout(late);
    socket.end('QUIT\r\n');
    if (!socket.destroyed) void once(socket, 'close').catch(() => undefined);
    socket.destroySoon();
  }
}

export const shortMessage = (number: number): string =>
  `From: someone@else.test\r\nTo: x@mailstead.test\r\nSubject: ${number}\r\nMessage-ID: <${number}@else.test>\r\n\r\nx`;
