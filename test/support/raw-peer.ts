// An SMTP server for tests that says exactly what its script says, byte for byte, and notes what it heard.
//
// In: a script, one answer per moment of a session: `connect`, a verb in upper case (`EHLO`, `MAIL`…; a 354
// to DATA lets the message in), `body` (once `bodyBytes` of the message came), `dot`. Out: a port, a
// transcript per connection, every message whose final dot was read. What the script leaves out is answered
// as a polite server would. Commands are answered in order, also when pipelined: an answer that waits holds
// back all that follow. It refuses nothing and judges no syntax; only sizes are bounded.
import { once } from 'node:events';
import { createServer } from 'node:net';
import type { AddressInfo, Socket } from 'node:net';

export type PeerAction =
  /** As it is, with CRLF for each `\n` and at the end: `'250-one\n250 two'` is a reply of two lines. */
  | { readonly reply: string }
  /** As it is, nothing added: garbage, bare LF, half a line. */
  | { readonly raw: string | Buffer }
  /** One byte every `everyMs`, nothing added. */
  | { readonly drip: string; readonly everyMs: number }
  /** FIN behind what was written, RST, or silence; the script is over for this connection. */
  | { readonly close: true }
  | { readonly reset: true }
  | { readonly hang: true };

/** Several actions happen in order: a 250, then a reset. None: no answer to this, go on. */
export type PeerActions = PeerAction | readonly PeerAction[];

/** A function sees the command line (empty where there is none); the promise it returns is a gate. */
export type PeerAnswer =
  PeerActions | ((line: string, connection: PeerConnection) => PeerActions | Promise<PeerActions>);

export interface PeerScript {
  /** In the reply to EHLO; default: what a good server of today offers, without STARTTLS. */
  readonly keywords?: readonly string[];
  /** Connections beyond these, at the same time, are told 421 and closed. */
  readonly connectionsMax?: number;
  /** When `body` is answered; default 1. */
  readonly bodyBytes?: number;
  readonly on?: Readonly<Record<string, PeerAnswer>>;
}

export interface PeerConnection {
  /** 1 for the first one. */
  readonly number: number;
  /** `C: EHLO x`, `S: 250-a\n250 b`, `* reset`, `* closed`, in order; of a message its size only. */
  readonly transcript: string[];
  /** How often each moment came, this time included. */
  readonly counts: Record<string, number>;
  /** The lines of the running transaction, without the verb: `FROM:<a@b.test>`; refused ones too. */
  mail: string;
  rcpts: string[];
  /** Resolves when the socket is gone. */
  readonly closed: Promise<void>;
}

export interface PeerMessage {
  readonly connection: number;
  readonly mail: string;
  readonly rcpts: readonly string[];
  /** Dot-stuffing undone, without the final dot line. */
  readonly raw: Buffer;
  /** As it came, with the final dot line. */
  readonly wire: Buffer;
  /** Whether the answer to the dot began with a 2. */
  accepted: boolean;
}

export interface RawPeer {
  readonly port: number;
  readonly connections: readonly PeerConnection[];
  readonly messages: readonly PeerMessage[];
  /** The most connections there were at the same time; those over `connectionsMax` do not count. */
  openMax(): number;
  stop(): Promise<void>;
}

const KEYWORDS = ['PIPELINING', 'SIZE 52428800', '8BITMIME', 'ENHANCEDSTATUSCODES', 'SMTPUTF8'];
const BUFFERED_BYTES_MAX = 64 * 1024 * 1024;
const TRANSCRIPT_LINES_MAX = 10_000;
const POLITE: Readonly<Record<string, PeerActions>> = {
  connect: { reply: '220 peer.test ESMTP' },
  HELO: { reply: '250 peer.test' },
  MAIL: { reply: '250 2.1.0 ok' },
  RCPT: { reply: '250 2.1.5 ok' },
  DATA: { reply: '354 go ahead' },
  body: [],
  dot: { reply: '250 2.0.0 taken' },
  RSET: { reply: '250 2.0.0 ok' },
  NOOP: { reply: '250 2.0.0 ok' },
  QUIT: [{ reply: '221 2.0.0 bye' }, { close: true }],
};

/** The caller must `stop()` it or the process does not exit. */
export async function startRawPeer(
  script: PeerScript = {},
  at: { readonly host?: string; readonly port?: number } = {},
): Promise<RawPeer> {
  const connections: PeerConnection[] = [];
  const messages: PeerMessage[] = [];
  const sockets = new Set<Socket>();
  let open = 0;
  let openMax = 0;
  const words = ['peer.test', ...(script.keywords ?? KEYWORDS)];
  const ehlo = words.map((word, i) => `250${i < words.length - 1 ? '-' : ' '}${word}`).join('\n');
  const answers: Readonly<Record<string, PeerAnswer>> = {
    ...POLITE,
    EHLO: { reply: ehlo },
    ...script.on,
  };

  const server = createServer({ allowHalfOpen: true, noDelay: true }, (socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined); // A reset is the client's right; 'close' follows.
    socket.on('close', () => sockets.delete(socket));
    if (open >= (script.connectionsMax ?? Infinity)) {
      socket.resume().end('421 4.7.0 too many connections\r\n');
      return;
    }
    openMax = Math.max(openMax, (open += 1));
    const { promise: closed, resolve } = Promise.withResolvers<void>();
    const number = connections.length + 1;
    const connection = { number, transcript: [], counts: {}, mail: '', rcpts: [], closed };
    connections.push(connection);
    let isOpen = true;
    const leave = (): void => {
      if (isOpen) open -= 1;
      isOpen = false;
    };
    socket.on('end', leave); // the client has gone, whenever this side follows
    socket.on('close', () => {
      leave();
      note(connection, '* closed');
      resolve();
    });
    void converse(socket, connection);
  });

  async function converse(socket: Socket, connection: PeerConnection): Promise<void> {
    const take = reader(socket);

    /** What was said to one moment, and whether the script is over with it. */
    async function answer(moment: string, line = ''): Promise<{ said: string; over: boolean }> {
      connection.counts[moment] = (connection.counts[moment] ?? 0) + 1;
      const scripted = answers[moment] ?? { reply: '500 5.5.2 not known' };
      const actions = typeof scripted === 'function' ? await scripted(line, connection) : scripted;
      let said = '';
      for (const action of [actions].flat()) {
        const text = await act(socket, action);
        note(
          connection,
          text === null
            ? `* ${Object.keys(action)[0]}`
            : `S: ${text.trimEnd().replaceAll('\r', '')}`,
        );
        if (text === null || socket.destroyed) return { said, over: true };
        said += text;
      }
      return { said, over: false };
    }

    /** From 354 to the answer to the dot; whether the script is over with it. */
    async function takeMessage(): Promise<boolean> {
      const enough = script.bodyBytes ?? 1;
      await take((bytes) => (bytes.length >= enough || messageLength(bytes) !== -1 ? 0 : -1));
      if ((await answer('body')).over) return true;
      const wire = await take(messageLength);
      if (wire === null) return true;
      note(connection, `C: (${wire.length} bytes)`);
      const { number, mail, rcpts } = connection;
      const message = {
        connection: number,
        mail,
        rcpts,
        raw: unstuff(wire),
        wire,
        accepted: false,
      };
      messages.push(message);
      Object.assign(connection, { mail: '', rcpts: [] });
      const { said, over } = await answer('dot');
      message.accepted = said.startsWith('2');
      return over;
    }

    let { over } = await answer('connect');
    while (!over) {
      const bytes = await take((pending) => pending.indexOf('\n') + 1 || -1);
      if (bytes === null) break;
      const line = bytes.toString().replace(/\r?\n$/, '');
      note(connection, `C: ${line}`);
      const [verb = '', ...rest] = line.split(' ');
      const moment = verb.toUpperCase();
      if (moment === 'MAIL') Object.assign(connection, { mail: rest.join(' '), rcpts: [] });
      if (moment === 'RCPT') connection.rcpts.push(rest.join(' '));
      const answered = await answer(moment, line);
      const takes = moment === 'DATA' && answered.said.startsWith('354') && !answered.over;
      over = takes ? await takeMessage() : answered.over;
    }
    await take(() => -1); // Until the client ends its side.
    socket.end();
  }

  async function stop(): Promise<void> {
    const ended = once(server, 'close');
    server.close();
    for (const socket of sockets) socket.destroy();
    await ended;
  }

  server.listen(at.port ?? 0, at.host ?? '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  return { port, connections, messages, openMax: () => openMax, stop };
}

function note(connection: PeerConnection, line: string): void {
  if (connection.transcript.length < TRANSCRIPT_LINES_MAX) connection.transcript.push(line);
}

/** What was written, or null when nothing more will be said. */
async function act(socket: Socket, action: PeerAction): Promise<string | null> {
  if ('close' in action) socket.end();
  if ('reset' in action) socket.resetAndDestroy();
  if ('close' in action || 'reset' in action || 'hang' in action) return null;
  if ('drip' in action) {
    for (const byte of Buffer.from(action.drip)) {
      if (socket.writable) socket.write(Uint8Array.of(byte));
      await new Promise((resolve) => setTimeout(resolve, action.everyMs));
    }
    return action.drip;
  }
  const bytes = 'raw' in action ? action.raw : `${action.reply.replaceAll('\n', '\r\n')}\r\n`;
  if (socket.writable) socket.write(bytes);
  return bytes.toString();
}

/** Takes the first bytes, as many as `length` says (-1: not yet), or null when they will never come. */
function reader(socket: Socket): (length: (pending: Buffer) => number) => Promise<Buffer | null> {
  let pending: Buffer = Buffer.alloc(0);
  let ended = false;
  let wake = (): void => undefined;
  const end = (): void => {
    ended = true;
    wake();
  };
  socket.on('end', end).on('close', end);
  socket.on('data', (chunk: Buffer) => {
    pending = Buffer.concat([pending, chunk]);
    if (pending.length > BUFFERED_BYTES_MAX) socket.destroy();
    wake();
  });
  return async (length) => {
    let count = length(pending);
    while (count === -1 && !ended) {
      await new Promise<void>((resolve) => (wake = resolve));
      count = length(pending);
    }
    if (count === -1) return null;
    const taken = pending.subarray(0, count);
    pending = pending.subarray(count);
    return taken;
  };
}

/** With its final dot line; -1: not yet whole. Only CRLF counts (RFC 5321 §4.1.1.4). */
function messageLength(bytes: Buffer): number {
  if (bytes.subarray(0, 3).toString('latin1') === '.\r\n') return 3;
  const at = bytes.indexOf('\r\n.\r\n');
  return at === -1 ? -1 : at + 5;
}

function unstuff(wire: Buffer): Buffer {
  const text = wire.subarray(0, -3).toString('latin1');
  return Buffer.from(text.replace(/(^|\r\n)\./g, '$1'), 'latin1');
}
