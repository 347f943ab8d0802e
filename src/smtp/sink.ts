// The built-in SMTP sink: the far end of development mode, and a peer that can fail on request.
//
// In: SMTP on a loopback port. Out: each message, byte for byte as it was sent (dot-stuffing undone),
// handed to `store`; the 250 after the final dot leaves only when `store` has resolved. The local part of a
// recipient, with or without a `+label`, chooses the reply:
//
//   tempfail@ 451 4.3.0   tempfail-N@ the same, N times   reject@ 550 5.1.1   full@ 452 4.2.2
//   blocked@ 554 5.7.1    slow@ 250 after a pause         drop-after-dot@ no reply to the dot, nothing stored
//   ok@ and all others 250
//
// Refuses what is above a limit below, and relays nothing.
import type { SMTPServerDataStream, SMTPServerSession } from 'smtp-server';
import builtInTlsOptions from 'smtp-server/lib/tls-options.js';
import type { Logger } from '../log.ts';
import { createCollector } from './collector.ts';
import { Listener, refusal, type Reply } from './listener.ts';

export interface SinkMessageInput {
  /** Empty for the null sender. */
  readonly mailFrom: string;
  /** The accepted recipients as the client wrote them; a repeated one is listed once. */
  readonly rcptTo: readonly string[];
  readonly raw: Buffer;
  /** When the final dot was read. */
  readonly receivedAt: Date;
  readonly tls: boolean;
}

export interface SinkCertificate {
  /** PEM. */
  readonly key: string;
  /** PEM. */
  readonly cert: string;
}

export interface SinkOptions {
  /** Defaults to 127.0.0.1. */
  readonly host?: string;
  /** 0: any free port. */
  readonly port: number;
  /** Our name in the greeting and in the reply to EHLO. */
  readonly hostname: string;
  /** Must settle: the client waits for it. A rejection is answered with 451 4.3.0. */
  readonly store: (message: SinkMessageInput) => Promise<void>;
  /** The pause of `slow@`. */
  readonly slowMs?: number;
  /** Absent or null: STARTTLS is neither offered nor known. */
  readonly tls?: SinkCertificate | null;
  readonly maxMessageBytes?: number;
  /** What all connections together may hold between DATA and the reply; beyond it 452 4.3.1. */
  readonly maxBufferedBytes?: number;
  readonly log: Logger;
  readonly now?: () => Date;
}

export interface Sink {
  readonly port: number;
  /**
   * Resolves when no socket is left: idle clients get a 421 at once, a running transaction has 2 s to
   * finish. Does not wait for a `store` that takes longer than that.
   */
  stop(): Promise<void>;
}

const SLOW_MS = 5_000;
const MESSAGE_BYTES_MAX = 50 * 1024 * 1024;
const BUFFERED_BYTES_MAX = 512 * 1024 * 1024;
const RECIPIENTS_MAX = 1_000;
const HEADER_LINES_MAX = 5_000;
const CONNECTIONS_MAX = 200;
/** Refused connections may linger beside the served ones until their client leaves. */
const SOCKETS_MAX = 2 * CONNECTIONS_MAX;
const COMMAND_BYTES_MAX = 4_096;
const TEMPFAIL_ADDRESSES_MAX = 10_000;
const STOP_GRACE_MS = 2_000;
// RFC 5321 §4.5.3.2.7: a server waits at least 5 minutes for the next command.
const IDLE_TIMEOUT_MS = 300_000;

const TEMPFAIL: Reply = { code: 451, text: '4.3.0 Temporary failure, try again later' };
const REFUSALS: Readonly<Record<string, Reply>> = {
  reject: { code: 550, text: '5.1.1 No such mailbox' },
  full: { code: 452, text: '4.2.2 Mailbox is full' },
  blocked: { code: 554, text: '5.7.1 Blocked, the sending host is listed' },
};
const NOT_STORED: Reply = { code: 451, text: '4.3.0 The message could not be stored' };
const NO_MEMORY: Reply = { code: 452, text: '4.3.1 Too much mail at once, try again later' };
const TOO_MANY_LINES: Reply = {
  code: 552,
  text: `5.3.4 The message has more than ${HEADER_LINES_MAX} header lines`,
};
const STOPPING: Reply = { code: 421, text: '4.3.2 The sink is shutting down' };
const TOO_MANY_CLIENTS: Reply = { code: 421, text: '4.3.2 Too many connections' };

/** Resolves when the sink listens; rejects when it cannot (a port in use). */
export async function startSink(options: SinkOptions): Promise<Sink> {
  const { log, slowMs = SLOW_MS, tls = null, now = () => new Date() } = options;
  const { maxBufferedBytes = BUFFERED_BYTES_MAX } = options;
  const countTempfail = createTempfailCounter();
  const collectBytes = createCollector(maxBufferedBytes);
  let stopping: Promise<void> | null = null;

  const server = new Listener(
    {
      name: options.hostname,
      banner: 'Mailstead sink',
      heloResponse: '%s greets %s',
      size: options.maxMessageBytes ?? MESSAGE_BYTES_MAX,
      rejectOversized: true,
      maxRecipients: RECIPIENTS_MAX,
      maxCommandLength: COMMAND_BYTES_MAX,
      socketTimeout: IDLE_TIMEOUT_MS,
      disableReverseLookup: true,
      hideENHANCEDSTATUSCODES: false,
      // Whatever is between the angle brackets is accepted: the sink judges no address.
      lenientAddressParsing: true,
      logger: false,
      minVersion: 'TLSv1.2',
      ...(tls === null ? {} : { key: tls.key, cert: tls.cert }),
      disabledCommands: ['AUTH', 'WIZ', 'SHELL', 'KILL', ...(tls === null ? ['STARTTLS'] : [])],
      // The defaults of these three wait a turn of the event loop each.
      onConnect: (_session, reply) => reply(stopping === null ? null : refusal(STOPPING)),
      // One step of every transaction must not be synchronous: smtp-server loses the rest of a write that
      // holds two whole messages when it can run through the second one while it still ends the first.
      onMailFrom: (_address, _session, reply) =>
        queueMicrotask(() => reply(stopping === null ? null : refusal(STOPPING))),
      onRcptTo: ({ address }, _session, reply) => answerRecipient(address, reply),
      onData: receive,
    },
    { connectionsMax: CONNECTIONS_MAX, tooMany: TOO_MANY_CLIENTS, stopping: STOPPING },
  );

  function answerRecipient(address: string, reply: (error?: Error | null) => void): void {
    const fault = faultOf(address);
    const refused = REFUSALS[fault.name] ?? null;
    if (refused !== null) return reply(refusal(refused));
    if (fault.name === 'tempfail' && countTempfail(address, fault.times)) {
      return reply(refusal(TEMPFAIL));
    }
    if (fault.name !== 'slow') return reply();
    // Nothing to answer to when the client has left, so the timer does not keep the process alive.
    setTimeout(reply, slowMs).unref();
  }

  /** Collects one message. `reply` is called once, when `stream` has ended; never when the client is lost. */
  function receive(
    stream: SMTPServerDataStream,
    session: SMTPServerSession,
    reply: (error?: Error | null, text?: string) => void,
  ): void {
    collectBytes(stream, ({ isTooMuch, bytes, release }) => {
      const finish = (error: Error | null): void => {
        release();
        reply(error, 'Message stored');
        if (stopping !== null) server.dismiss(session.id);
      };
      const { mailFrom, rcptTo: accepted } = session.envelope;
      const rcptTo = accepted.map(({ address }) => address);
      if (rcptTo.some((address) => faultOf(address).name === 'drop-after-dot')) {
        release();
        return server.drop(session.id);
      }
      if (stream.sizeExceeded) return finish(null);
      if (isTooMuch) return finish(refusal(NO_MEMORY));
      const raw = bytes();
      if (hasTooManyHeaderLines(raw)) return finish(refusal(TOO_MANY_LINES));
      const message: SinkMessageInput = {
        mailFrom: mailFrom === false ? '' : mailFrom.address,
        rcptTo,
        raw,
        receivedAt: now(),
        tls: session.secure,
      };
      save(message).then(
        () => finish(null),
        (err: unknown) => {
          log.error(
            { err, rcptCount: rcptTo.length, sizeBytes: raw.length },
            'sink could not store a message',
          );
          finish(refusal(NOT_STORED));
        },
      );
    });
  }

  /** A `store` that throws is one that rejects. */
  async function save(message: SinkMessageInput): Promise<void> {
    await options.store(message);
  }

  server.on('error', (err) => log.debug({ err }, 'sink connection failed'));
  server.server.maxConnections = SOCKETS_MAX;
  const port = await server.open(options.port, options.host ?? '127.0.0.1');
  return { port, stop: () => (stopping ??= server.end(STOP_GRACE_MS)) };
}

/**
 * The self-signed certificate for `localhost` that smtp-server ships. Its key is public and it has
 * expired: good for opportunistic TLS on loopback, where nobody checks it, and for nothing else.
 */
export function sinkCertificate(): SinkCertificate {
  const { key, cert } = builtInTlsOptions();
  return { key: String(key), cert: String(cert) };
}

const FAULT =
  /^(?:(tempfail)(?:-(\d{1,9}))?|(reject|full|blocked|slow|drop-after-dot))(?:\+.*)?$/is;

/** What the local part asks for. `times` is Infinity for `tempfail@` itself. */
function faultOf(address: string): { readonly name: string; readonly times: number } {
  const local = address.slice(0, address.lastIndexOf('@'));
  const [, tempfail, times, other] = FAULT.exec(local) ?? [];
  const name = (tempfail ?? other ?? 'ok').toLowerCase();
  return { name, times: times === undefined ? Infinity : Number(times) };
}

/**
 * Counts refusals per exact address: true for the first `times` questions about one.
 *
 * Remembers the addresses that were asked about last, TEMPFAIL_ADDRESSES_MAX of them.
 */
function createTempfailCounter(): (address: string, times: number) => boolean {
  const refusedTimes = new Map<string, number>();
  return (address, times) => {
    if (times === Infinity) return true;
    const key = address.toLowerCase();
    const before = refusedTimes.get(key) ?? 0;
    // A Map keeps the order of insertion, so its first key is the one that was not asked for longest.
    refusedTimes.delete(key);
    refusedTimes.set(key, Math.min(before + 1, times));
    for (const oldest of refusedTimes.keys()) {
      if (refusedTimes.size <= TEMPFAIL_ADDRESSES_MAX) break;
      refusedTimes.delete(oldest);
    }
    return before < times;
  };
}

function hasTooManyHeaderLines(raw: Buffer): boolean {
  let start = 0;
  for (let lineCount = 0; lineCount <= HEADER_LINES_MAX; lineCount += 1) {
    const end = raw.indexOf(0x0a, start);
    const length = end - start;
    // The empty line ends the header; a message may also end inside it.
    if (end === -1 || length === 0 || (length === 1 && raw[start] === 0x0d)) return false;
    start = end + 1;
  }
  return true;
}
