// Connects to a mail host, reads its greeting and leaves: no mail is offered. Bounded in time and bytes; it never rejects.
import { connect } from 'node:net';

export type Greeting =
  | { readonly kind: 'greeted'; readonly line: string }
  | { readonly kind: 'failed'; readonly cause: string };

const WAIT_MS = 8_000;
const LINE_BYTES_MAX = 1_024;

export function greetingOf(to: {
  readonly address: string;
  readonly port: number;
  /** Of this machine; null: the system chooses. */
  readonly source: string | null;
}): Promise<Greeting> {
  return new Promise((resolve) => {
    const socket = connect({
      host: to.address,
      port: to.port,
      ...(to.source === null ? {} : { localAddress: to.source }),
    });
    let seen = '';
    const end = (greeting: Greeting): void => {
      clearTimeout(timer);
      if (greeting.kind === 'greeted') socket.end('QUIT\r\n');
      setTimeout(() => socket.destroy(), greeting.kind === 'greeted' ? 1_000 : 0).unref();
      resolve(greeting);
    };
    const timer = setTimeout(() => end({ kind: 'failed', cause: 'timeout' }), WAIT_MS);
    socket.on('error', (error: NodeJS.ErrnoException) =>
      end({ kind: 'failed', cause: error.code ?? 'network error' }),
    );
    socket.on('close', () => end({ kind: 'failed', cause: 'the connection was closed' }));
    socket.on('data', (chunk: Buffer) => {
      seen += chunk.toString('latin1');
      const lineEnd = seen.indexOf('\n');
      if (lineEnd !== -1) end({ kind: 'greeted', line: seen.slice(0, lineEnd).trimEnd() });
      else if (seen.length > LINE_BYTES_MAX) {
        end({ kind: 'failed', cause: 'what answers does not speak SMTP' });
      }
    });
  });
}
