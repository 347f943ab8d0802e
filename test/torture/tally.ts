// The peers of a torture run: SMTP servers in this process that outlive whatever is done to the program, and so can
// testify. They count what they said 250 to by Message-ID, and can be told to refuse, to cap connections, and to tell
// somebody that a moment of a conversation has come.
import { createServer, type Server, type Socket } from 'node:net';
import { once } from 'node:events';
import type { AddressInfo } from 'node:net';

export interface Tally {
  readonly port: number;
  /** How often each Message-ID was answered with 250. */
  readonly counts: ReadonlyMap<string, number>;
  /** When the first 250 for each Message-ID was said, in ms since the epoch. */
  readonly takenAt: ReadonlyMap<string, number>;
  /** Connections that were told 421, and the most that were served at the same time. */
  readonly turnedAway: () => number;
  readonly openMax: () => number;
  readonly accepted: () => number;
  stop(): Promise<void>;
}

export interface TallyOptions {
  /** Loopback addresses to listen on, all on one port. Default 127.0.0.1. */
  readonly hosts?: readonly string[];
  /** Default: a free one. */
  readonly port?: number;
  /** Connections at the same time; one more is told 421. */
  readonly connectionsMax?: number;
  /** A reply to RCPT that is not 250, or null. */
  readonly onRcpt?: (recipient: string) => string | null;
  /** Awaited before the 250 to the final dot. */
  readonly beforeDot?: (message: { readonly recipients: readonly string[] }) => Promise<void>;
}

const END = '\r\n.\r\n';
const BUFFER_CHARS_MAX = 64 * 1024 * 1024;
const EHLO = '250-tally\r\n250-PIPELINING\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250 SIZE\r\n';
const MESSAGE_ID = /^Message-ID:\s*(<[^>]+>)/im;

export async function startTally(options: TallyOptions = {}): Promise<Tally> {
  const counts = new Map<string, number>();
  const takenAt = new Map<string, number>();
  const sockets = new Set<Socket>();
  let turnedAway = 0;
  let open = 0;
  let openMax = 0;
  let accepted = 0;

  const take = (message: string): void => {
    accepted += 1;
    const id = MESSAGE_ID.exec(message)?.[1];
    if (id === undefined) return;
    counts.set(id, (counts.get(id) ?? 0) + 1);
    if (!takenAt.has(id)) takenAt.set(id, Date.now());
  };

  const serve = (socket: Socket): void => {
    sockets.add(socket);
    socket.on('error', () => socket.destroy());
    socket.on('close', () => sockets.delete(socket));
    socket.setEncoding('latin1').setNoDelay(true);
    if (open >= (options.connectionsMax ?? Infinity)) {
      turnedAway += 1;
      socket.end('421 4.7.0 too many connections\r\n');
      return;
    }
    openMax = Math.max(openMax, (open += 1));
    socket.on('close', () => (open -= 1));
    void converse(socket);
  };

  const converse = async (socket: Socket): Promise<void> => {
    let text = '';
    let inData = false;
    let recipients: string[] = [];
    const say = (words: string): void => {
      if (socket.writable) socket.write(words);
    };
    say('220 tally ESMTP\r\n');
    try {
      for await (const chunk of socket as AsyncIterable<string>) {
        text += chunk;
        if (text.length > BUFFER_CHARS_MAX) socket.destroy();
        for (;;) {
          const end = text.indexOf(inData ? END : '\r\n');
          if (end < 0) break;
          const unit = text.slice(0, end);
          text = text.slice(end + (inData ? END : '\r\n').length);
          if (inData) {
            inData = false;
            await options.beforeDot?.({ recipients });
            if (!socket.writable) break;
            take(unit);
            say('250 2.0.0 taken\r\n');
            continue;
          }
          const verb = unit.slice(0, 4).toUpperCase();
          if (verb === 'EHLO') say(EHLO);
          else if (verb === 'DATA') {
            inData = recipients.length > 0;
            say(inData ? '354 go on\r\n' : '503 5.5.1 no recipient\r\n');
          } else if (verb === 'RCPT') {
            const recipient = /<([^>]*)>/.exec(unit)?.[1] ?? '';
            const refusal = options.onRcpt?.(recipient) ?? null;
            if (refusal === null) recipients.push(recipient);
            say(`${refusal ?? '250 2.1.5 ok'}\r\n`);
          } else if (verb === 'QUIT') socket.end('221 2.0.0 bye\r\n');
          else {
            if (verb === 'MAIL' || verb === 'RSET') recipients = [];
            say('250 2.0.0 ok\r\n');
          }
        }
      }
    } catch {
      // reset by the client: what it did not finish was not taken
    }
    socket.end();
  };

  const servers: Server[] = [];
  const [first = '127.0.0.1', ...others] = options.hosts ?? [];
  const listen = async (host: string, port: number): Promise<number> => {
    const server = createServer(serve);
    servers.push(server);
    server.listen({ host, port, backlog: 1_024 });
    await once(server, 'listening');
    return (server.address() as AddressInfo).port;
  };
  const port = await listen(first, options.port ?? 0);
  for (const host of others) await listen(host, port);
  return {
    port,
    counts,
    takenAt,
    turnedAway: () => turnedAway,
    openMax: () => openMax,
    accepted: () => accepted,
    async stop() {
      const ended = servers.map((server) => once(server, 'close'));
      for (const server of servers) server.close();
      for (const socket of sockets) socket.destroy();
      await Promise.all(ended);
    },
  };
}
