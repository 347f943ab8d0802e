// One SMTP session over nodemailer's SMTPConnection, each step as one awaited call. Whatever a peer
// says or fails to say comes back as a value. This is the only file that knows the engine.
//
// After `send` returned kind `lost` the session is closed. `dotSent` tells the two losses apart: before
// the final dot nobody has the message; after it, nobody knows (RFC 1047).
import { connect, isIP, type Socket } from 'node:net';
import { Readable } from 'node:stream';
import type { TLSSocket } from 'node:tls';
import SMTPConnection from 'nodemailer/lib/smtp-connection';
import type { Cause } from '../mail/outcome.ts';
import type { Stage } from '../mail/reply.ts';

/** How much encryption the session needs. */
export type TlsNeed = 'never' | 'opportunistic' | 'required' | 'implicit';

export interface Target {
  /** The name we meant to reach: for TLS, logs and evidence. */
  readonly host: string;
  readonly address: string;
  readonly port: number;
  readonly tls: TlsNeed;
  /** Whether the certificate must be valid for `host`. */
  readonly verify: boolean;
  readonly login: { readonly user: string; readonly pass: string } | null;
  /** Our name in EHLO. */
  readonly helloName: string;
  /** Named by the operator, so private addresses are fine. */
  readonly trusted: boolean;
}

/** The reply as it came, with its stage; null: none came, and `cause` says why. */
export interface Failure {
  readonly stage: Stage;
  readonly cause: Cause;
  readonly reply: string | null;
  readonly message: string;
}

export type SendResult =
  | { readonly kind: 'accepted'; readonly reply: string }
  | ({ readonly kind: 'refused' } & Failure)
  | ({ readonly kind: 'lost'; readonly dotSent: boolean } & Failure);

/** The message from its first byte to its last: in memory, or read as the connection takes it. */
export type MessageBody = readonly Buffer[] | AsyncIterable<Buffer>;

export interface Session {
  readonly target: Target;
  /** Protocol and cipher, or null in plaintext. */
  readonly tls: string | null;
  readonly supportsSmtpUtf8: boolean;
  /** Messages sent so far. */
  readonly sent: number;
  /** False once it was closed, by us or by the peer. */
  isOpen(): boolean;
  send(message: {
    readonly mailFrom: string;
    readonly rcptTo: string;
    readonly body: MessageBody;
    readonly sizeBytes: number;
    /** Called once, before the final dot is handed to the socket. */
    readonly onDot: () => void;
  }): Promise<SendResult>;
  close(): void;
}

// RFC 5321 §4.5.3.2 asks for 5 minutes a command and 10 after the final dot. nodemailer has one idle
// timer for all of them, so it is the longest: a timeout in the last phase makes duplicates.
const CONNECT_TIMEOUT_MS = 30_000;
const GREETING_TIMEOUT_MS = 60_000;
const IDLE_TIMEOUT_MS = 600_000;
const SLICE_BYTES = 64 * 1024;
/** A peer that drips keeps the idle timer from firing, so each part has an end of its own as well. */
const OPEN_MAX_MS = 120_000;
const BODY_MAX_MS = 300_000;
const SLOWEST_BYTES_PER_S = 10_000;
const DOT_MAX_MS = 660_000;
/** The refusal is known by then, and a new connection costs less than a long wait. */
const RESET_MAX_MS = 5_000;

/** Resolves with a session that is ready for MAIL, or with the failure that prevented it. */
export async function openSession(
  target: Target,
  checkPeer: (address: string) => { ok: true } | { ok: false; reason: string },
): Promise<Session | Failure> {
  const dialled = await dial(target);
  if ('cause' in dialled) return dialled;
  // The address was checked before dialling; what answered is checked again.
  const peer = checkPeer(dialled.remoteAddress ?? target.address);
  if (!peer.ok) {
    dialled.destroy();
    return failure('connect', 'address_refused', null, `address refused: ${peer.reason}`);
  }
  const connection = new SMTPConnection({
    connection: dialled,
    host: target.host,
    port: target.port,
    name: target.helloName,
    secure: target.tls === 'implicit',
    requireTLS: target.tls === 'required',
    ignoreTLS: target.tls === 'never',
    greetingTimeout: GREETING_TIMEOUT_MS,
    connectionTimeout: GREETING_TIMEOUT_MS,
    socketTimeout: IDLE_TIMEOUT_MS,
    tls: {
      rejectUnauthorized: target.verify,
      minVersion: 'TLSv1.2',
      // RFC 6066 §3: a name, never an address; Node refuses one.
      ...(isIP(target.host) === 0 ? { servername: target.host } : {}),
    },
  });
  connection.on('error', () => undefined); // told through the steps below; an error event without a listener ends the process
  const opened = await greet(connection, target);
  if (opened !== null) {
    connection.close();
    return opened;
  }
  return createSession(connection, target, dialled);
}

const failure = (stage: Stage, cause: Cause, reply: string | null, message: string): Failure => ({
  stage,
  cause,
  reply,
  message,
});

function dial(target: Target): Promise<Socket | Failure> {
  return new Promise((resolve) => {
    const socket = connect({ host: target.address, port: target.port, noDelay: true });
    const timer = setTimeout(() => {
      socket.destroy();
      resolve(failure('connect', 'connect_timeout', null, 'no connection within 30 s'));
    }, CONNECT_TIMEOUT_MS);
    const onError = (error: NodeJS.ErrnoException): void => {
      clearTimeout(timer);
      const cause = error.code === 'ECONNREFUSED' ? 'connect_refused' : 'connect_failed';
      resolve(failure('connect', cause, null, `connection failed: ${error.code ?? error.message}`));
    };
    socket.once('error', onError);
    socket.once('connect', () => {
      clearTimeout(timer);
      socket.removeListener('error', onError);
      resolve(socket);
    });
  });
}

/** What nodemailer's errors carry beyond Error. */
interface EngineError extends Error {
  readonly code?: string | undefined;
  readonly response?: string | undefined;
  readonly command?: string | undefined;
}

function greet(connection: SMTPConnection, target: Target): Promise<Failure | null> {
  return new Promise((resolve) => {
    const watchdog = createWatchdog(() => {
      done(failure('greeting', 'timeout', null, 'the peer took too long to be ready'));
    });
    watchdog.refresh(OPEN_MAX_MS);
    const done = (result: Failure | null): void => {
      watchdog.end();
      connection.removeListener('error', onError);
      resolve(result);
    };
    const onError = (error: EngineError): void => {
      // A peer that breaks off in the handshake is told by the engine as a lost connection.
      const stage = connection.upgrading ? 'tls' : stageOf(error, true);
      done(describe(error, stage));
    };
    connection.once('error', onError);
    connection.connect((error?: EngineError | null) => {
      if (error) return onError(error);
      if (target.login === null) return done(null);
      const { user, pass } = target.login;
      connection.login({ user, pass }, (loginError: EngineError | null) => {
        done(loginError ? describe(loginError, 'auth') : null);
      });
    });
  });
}

/** The phase that an engine error belongs to, from its code and the command it names. */
function stageOf(error: EngineError, isOpening: boolean): Stage {
  if (error.code === 'ETLS') return 'tls';
  if (error.code === 'EAUTH') return 'auth';
  if (error.code === 'EMESSAGE') return error.command === 'MAIL FROM' ? 'mail' : 'dot';
  switch (error.command) {
    case 'EHLO':
    case 'HELO':
      return 'ehlo';
    case 'STARTTLS':
      return 'tls';
    case 'MAIL FROM':
      return 'mail';
    case 'RCPT TO':
      return 'rcpt';
    case 'DATA':
      return 'data';
    default:
      return isOpening ? 'greeting' : 'data';
  }
}

function describe(error: EngineError, stage: Stage): Failure {
  const reply = error.response ?? null;
  if (reply !== null) return failure(stage, 'protocol_error', reply, reply);
  const cause =
    stage === 'tls' ? 'tls_failed' : stage === 'auth' ? 'auth_failed' : 'connection_lost';
  return failure(stage, cause, null, plainly(error.message));
}

/** Without what OpenSSL and Node say to programmers: places in memory and in sources, switches of the program. */
function plainly(message: string): string {
  return message
    .replace(/[0-9A-F]+:error:[0-9A-F]+:[^:]*:[^:]*:([^:]+):.*/s, '$1')
    .replace(/; if the root CA .*/s, '');
}

function createSession(connection: SMTPConnection, target: Target, dialled: Socket): Session {
  const socket = (connection as unknown as { _socket: Socket | TLSSocket })._socket;
  const extensions = (connection as unknown as { _supportedExtensions: readonly string[] })
    ._supportedExtensions;
  let isOpen = true;
  let sent = 0;
  connection.on('error', () => {
    isOpen = false;
  });
  connection.once('end', () => {
    isOpen = false;
  });
  dialled.once('close', () => {
    isOpen = false;
  });
  const close = (): void => {
    if (isOpen) connection.quit();
    isOpen = false;
    // A peer that ignores QUIT must not hold the socket.
    setTimeout(() => connection.close(), 1_000).unref();
  };
  return {
    target,
    tls: describeTls(socket),
    supportsSmtpUtf8: extensions.includes('SMTPUTF8'),
    get sent() {
      return sent;
    },
    isOpen: () => isOpen,
    close,
    async send(message) {
      sent += 1;
      let dotSent = false;
      const body = source(message.body, () => {
        message.onDot(); // throws when the dot must not leave
        dotSent = true;
        watchdog.refresh(DOT_MAX_MS);
      });
      const watchdog = createWatchdog(() => connection.close());
      watchdog.refresh(BODY_MAX_MS + (message.sizeBytes / SLOWEST_BYTES_PER_S) * 1_000);
      let onEnd = (): void => undefined;
      const result = await new Promise<SendResult>((resolve) => {
        connection.send(
          { from: message.mailFrom, to: [message.rcptTo], size: message.sizeBytes },
          body,
          (error, info) => {
            if (!error) resolve({ kind: 'accepted', reply: info.response });
            else resolve(toResult(error, dotSent));
          },
        );
        // A connection that we close ourselves tells the engine's caller nothing. Where the engine does tell, it
        // does so in this turn, and knows more.
        onEnd = () => {
          setImmediate(() => resolve(toResult(new Error('the connection was closed'), dotSent)));
        };
        connection.once('end', onEnd);
      });
      connection.removeListener('end', onEnd);
      watchdog.end();
      body.destroy(); // closes what it reads from, wherever it stopped
      // Answered before all of it left: what came next over this connection would become a part of this message.
      const isHalf = (connection as unknown as { _currentDataStream: unknown })._currentDataStream;
      if (result.kind === 'lost' || Boolean(isHalf)) connection.close();
      else if (result.kind === 'refused' && result.stage !== 'dot') await reset();
      if (result.kind !== 'accepted' || !isHalf) return result;
      const why = 'the peer took the message before it was complete';
      return { kind: 'lost', dotSent, ...failure('data', 'protocol_error', null, why) };
    },
  };

  /** Ends the refused transaction; a session that cannot is given up. */
  function reset(): Promise<void> {
    if (!isOpen) return Promise.resolve();
    return new Promise((resolve) => {
      const watchdog = createWatchdog(() => connection.close());
      watchdog.refresh(RESET_MAX_MS);
      const done = (): void => {
        watchdog.end();
        connection.removeListener('end', done);
        resolve();
      };
      connection.once('end', done);
      connection.reset((error) => {
        if (error) connection.close();
        done();
      });
    });
  }
}

function toResult(error: EngineError, dotSent: boolean): SendResult {
  const about = describe(error, dotSent ? 'dot' : stageOf(error, false));
  // The peer has the whole message, and what it says is neither yes nor no: answers have got out of step.
  if (dotSent && about.reply !== null && !/^[45]/.test(about.reply)) {
    const why = `the peer answered the final dot with ${about.reply}`;
    return { kind: 'lost', dotSent, ...failure('dot', 'protocol_error', null, why) };
  }
  // A reply to the dot is an answer even when the connection then broke.
  if (about.reply !== null && (error.code === 'EENVELOPE' || error.code === 'EMESSAGE')) {
    return { kind: 'refused', ...about };
  }
  if (about.reply !== null && !dotSent) return { kind: 'refused', ...about };
  if (error.code === 'EMESSAGE' || error.code === 'EENVELOPE') {
    return { kind: 'refused', ...about, cause: 'message_refused' }; // too large for SIZE, or not sendable
  }
  return { kind: 'lost', dotSent, ...about };
}

function describeTls(socket: Socket | TLSSocket): string | null {
  if (!('getCipher' in socket)) return null;
  return `${socket.getProtocol() ?? 'TLS'} ${socket.getCipher().name}`;
}

function createWatchdog(bite: () => void): { refresh(ms: number): void; end(): void } {
  let timer: NodeJS.Timeout | undefined;
  return {
    refresh(ms) {
      clearTimeout(timer);
      timer = setTimeout(bite, ms);
    },
    end: () => clearTimeout(timer),
  };
}

/** The message in slices, and the last thing before its end is to call `onDot`. */
function source(body: MessageBody, onDot: () => void): Readable {
  if (Array.isArray(body)) return fromMemory(body as readonly Buffer[], onDot);
  const read = async function* (): AsyncGenerator<Buffer> {
    yield* body;
    onDot();
  };
  return Readable.from(read(), { objectMode: false, highWaterMark: SLICE_BYTES });
}

function fromMemory(chunks: readonly Buffer[], onDot: () => void): Readable {
  let chunk = 0;
  let offset = 0;
  return new Readable({
    highWaterMark: SLICE_BYTES,
    read() {
      const current = chunks[chunk];
      if (current === undefined) {
        try {
          onDot();
          this.push(null);
        } catch (error) {
          this.destroy(error as Error);
        }
        return;
      }
      const end = Math.min(offset + SLICE_BYTES, current.length);
      const slice = current.subarray(offset, end);
      if (end === current.length) {
        chunk += 1;
        offset = 0;
      } else {
        offset = end;
      }
      this.push(slice);
    },
  });
}
