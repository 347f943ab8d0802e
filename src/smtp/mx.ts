// The inbound listener: mail for the receiving domains of our tenants, bounces and complaints that come home
// to our return paths, and nothing else.
//
// In: SMTP. Out: each message handed to `receive` and `takeReport`, and the 250 after the final dot only when
// both have resolved. Every recipient is decided at RCPT. Refused with the reason: relaying, bare CR or LF and NUL
// (what mail servers disagree about where a message ends), loops, header bombs, and what is above a
// limit below. A database that is away is a 451, never a 5xx: the client tries again.
import { isIPv6 } from 'node:net';
import type { SMTPServerDataStream, SMTPServerSession } from 'smtp-server';
import type { Logger } from '../log.ts';
import type { ReturnPathSubject } from '../mail/return-path.ts';
import type { Receiver, IncomingMessage } from '../receiving/receive.ts';
import { createClientCount } from './client-count.ts';
import { createCollector } from './collector.ts';
import { Listener, refusal, type Reply } from './listener.ts';

export interface MxOptions {
  /** Null: all interfaces. */
  readonly host: string | null;
  /** 0: any free port. */
  readonly port: number;
  readonly hostname: string;
  /** PEM; null: STARTTLS is not offered. */
  readonly tls: { readonly key: string; readonly cert: string } | null;
  readonly findReceiver: (address: string) => Promise<Receiver | null>;
  /** Who reads the mail for the postmaster of this host. */
  readonly findPostmaster: () => Promise<Receiver | null>;
  /** The delivery whose return path this address is. */
  readonly readReturnPath: (address: string) => ReturnPathSubject | null;
  /** Whether bounces come home at the domain of this address. */
  readonly isReturnPathDomain: (address: string) => Promise<boolean>;
  /** Applies what the message reports, if it is a report. False: it should come again later. */
  readonly takeReport: (message: {
    readonly raw: Buffer;
    readonly subjects: readonly ReturnPathSubject[];
  }) => Promise<boolean>;
  /** Durable once it resolves; the ids of what was stored. */
  readonly receive: (message: IncomingMessage) => Promise<readonly string[]>;
  readonly log: Logger;
  readonly now: () => Date;
}

export interface MxListener {
  readonly port: number;
  /** The next connections see this certificate. */
  updateCertificate(tls: { readonly key: string; readonly cert: string }): void;
  /** Resolves when no socket is left: idle clients get a 421, a running transaction has a while to finish. */
  stop(): Promise<void>;
}

const MESSAGE_BYTES_MAX = 50 * 1024 * 1024;
/** What all connections together may hold between DATA and the reply. */
const BUFFERED_BYTES_MAX = 256 * 1024 * 1024;
const RECIPIENTS_MAX = 100;
const CONNECTIONS_MAX = 200;
const CONNECTIONS_PER_CLIENT_MAX = 20;
const COMMAND_BYTES_MAX = 4_096;
const HEADER_BYTES_MAX = 256 * 1024;
/** RFC 5321 §6.3: a message with this many trace fields goes round in a circle. */
const RECEIVED_MAX = 100;
const BAD_RECIPIENTS_MAX = 20;
const STOP_GRACE_MS = 5_000;
// RFC 5321 §4.5.3.2.7: a server waits at least 5 minutes for the next command.
const IDLE_TIMEOUT_MS = 300_000;

const STOPPING: Reply = { code: 421, text: '4.3.2 The service is shutting down, try again later' };
const TOO_MANY: Reply = { code: 421, text: '4.7.0 Too many connections, try again later' };
const NOT_OURS: Reply = { code: 550, text: '5.7.1 We do not relay: this domain is not ours' };
const NO_SUCH: Reply = { code: 550, text: '5.1.1 No such mailbox: this is no return path of ours' };
/** RFC 5321 §4.5.1: the one recipient that has no domain. */
const POSTMASTER = /^postmaster$/i;
const NO_POSTMASTER: Reply = {
  code: 550,
  text: '5.1.1 Nobody reads the mail for the postmaster of this host: write to postmaster@ a domain that receives here',
};
/** RFC 5321 §4.5.5: what has the null sender is about one message of one sender. */
const ONE_RECIPIENT: Reply = {
  code: 452,
  text: '4.5.3 One recipient at a time for mail with the null sender',
};
const NOT_NOW: Reply = {
  code: 451,
  text: '4.2.1 The delivery that this is about is under way, try again later',
};
const BAD_RECIPIENTS: Reply = { code: 421, text: '4.7.0 Too many unknown recipients' };
const AWAY: Reply = {
  code: 451,
  text: '4.3.0 The mail cannot be stored right now, try again later',
};
const NO_MEMORY: Reply = { code: 452, text: '4.3.1 Too much mail at once, try again later' };
const BARE: Reply = {
  code: 550,
  text: '5.5.2 The message has a bare CR or LF; lines must end with CRLF',
};
const NUL: Reply = { code: 550, text: '5.6.0 The message has a NUL character' };
const LOOP: Reply = { code: 554, text: '5.4.6 Too many hops: this message goes round in a circle' };
const HEADER_TOO_LARGE: Reply = {
  code: 552,
  text: `5.3.4 The header has more than ${HEADER_BYTES_MAX} bytes`,
};

/** Resolves when it listens; rejects when it cannot (a port in use). */
export async function startMx(options: MxOptions): Promise<MxListener> {
  const { log, now } = options;
  const clients = createClientCount();
  const envelopes = new WeakMap<object, Envelope>();
  const badRecipients = new WeakMap<object, number>();
  const collectBytes = createCollector(BUFFERED_BYTES_MAX);
  let stopping: Promise<void> | null = null;

  const server = new Listener(
    {
      name: options.hostname,
      banner: 'ESMTP',
      heloResponse: '%s greets %s',
      size: MESSAGE_BYTES_MAX,
      rejectOversized: true,
      maxRecipients: RECIPIENTS_MAX,
      maxCommandLength: COMMAND_BYTES_MAX,
      socketTimeout: IDLE_TIMEOUT_MS,
      disableReverseLookup: true,
      hideENHANCEDSTATUSCODES: false,
      logger: false,
      minVersion: 'TLSv1.2',
      ...options.tls,
      disabledCommands: ['AUTH', 'WIZ', 'SHELL', 'KILL', ...(options.tls ? [] : ['STARTTLS'])],
      onConnect: (session, reply) => {
        const open = clients.enter(session.remoteAddress);
        if (stopping !== null) return reply(refusal(STOPPING));
        return reply(open > CONNECTIONS_PER_CLIENT_MAX ? refusal(TOO_MANY) : null);
      },
      onClose: (session) => clients.leave(session.remoteAddress),
      onMailFrom: (_address, session, reply) =>
        queueMicrotask(() => {
          envelopes.set(session, { receivers: [], subjects: [] });
          reply(stopping === null ? null : refusal(STOPPING));
        }),
      onRcptTo: ({ address }, session, reply) => {
        decideRecipient(address, session).then(reply, (err: unknown) => {
          log.warn({ err }, 'a recipient could not be decided');
          reply(refusal(AWAY));
        });
      },
      onData: collect,
    },
    { connectionsMax: CONNECTIONS_MAX, tooMany: TOO_MANY, stopping: STOPPING },
  );

  async function decideRecipient(
    address: string,
    session: SMTPServerSession,
  ): Promise<Error | null> {
    const envelope = envelopes.get(session) ?? { receivers: [], subjects: [] };
    const taken = envelope.receivers.length + envelope.subjects.length;
    const subject = options.readReturnPath(address);
    const isPostmaster = POSTMASTER.test(address);
    const find = isPostmaster ? options.findPostmaster : options.findReceiver;
    const receiver = subject === null ? await find(address) : null;
    if ((subject ?? receiver) !== null && taken > 0 && senderOf(session) === '') {
      return refusal(ONE_RECIPIENT);
    }
    if (subject !== null) {
      envelope.subjects.push(subject);
      return null;
    }
    if (receiver !== null) {
      envelope.receivers.push(receiver);
      return null;
    }
    const isKnownDomain = !isPostmaster && (await options.isReturnPathDomain(address));
    const bad = (badRecipients.get(session) ?? 0) + 1;
    badRecipients.set(session, bad);
    if (bad > BAD_RECIPIENTS_MAX) return refusal(BAD_RECIPIENTS);
    if (isPostmaster) return refusal(NO_POSTMASTER);
    return refusal(isKnownDomain ? NO_SUCH : NOT_OURS);
  }

  /** `reply` is called once, when `stream` has ended; never when the client is lost. */
  function collect(
    stream: SMTPServerDataStream,
    session: SMTPServerSession,
    reply: (error?: Error | null, text?: string) => void,
  ): void {
    collectBytes(stream, ({ isTooMuch, bytes, release }) => {
      const finish = (error: Error | null, text?: string): void => {
        release();
        reply(error, text);
        if (stopping !== null) server.dismiss(session.id);
      };
      if (stream.sizeExceeded) return finish(null);
      const body = bytes();
      const problem = isTooMuch ? NO_MEMORY : problemOf(body);
      if (problem !== null) return finish(refusal(problem));
      const receivedAt = now();
      const raw = Buffer.concat([
        Buffer.from(traceFields(session, { hostname: options.hostname, at: receivedAt })),
        body,
      ]);
      handOver(session, raw, receivedAt).then(
        (text) => finish(text === null ? refusal(NOT_NOW) : null, text ?? undefined),
        (err: unknown) => {
          log.error({ err, sizeBytes: raw.length }, 'an incoming message could not be stored');
          finish(refusal(AWAY));
        },
      );
    });
  }

  /** The words of the 250, or null: the client should come again. */
  async function handOver(
    session: SMTPServerSession,
    raw: Buffer,
    receivedAt: Date,
  ): Promise<string | null> {
    const { receivers, subjects } = envelopes.get(session) ?? { receivers: [], subjects: [] };
    const isTaken = subjects.length === 0 || (await options.takeReport({ raw, subjects }));
    if (!isTaken) return null;
    if (receivers.length === 0) return '2.0.0 Ok: read';
    const mailFrom = senderOf(session);
    const ids = await options.receive({ mailFrom, receivers, raw, receivedAt });
    // A feedback loop may have its address anywhere. What is stored needs no second try.
    if (subjects.length === 0) await options.takeReport({ raw, subjects });
    return `2.0.0 Ok: stored as ${ids.join(' ')}`;
  }

  server.on('error', (err) => log.debug({ err }, 'an inbound connection failed'));
  // Refused connections may linger beside the served ones until their client leaves.
  server.server.maxConnections = 2 * CONNECTIONS_MAX;
  return {
    port: await server.open(options.port, options.host),
    updateCertificate: (tls) => server.updateSecureContext(tls),
    stop: () => (stopping ??= server.end(STOP_GRACE_MS)),
  };
}

const CR = 0x0d;
const LF = 0x0a;

/** Who the running transaction is for. */
interface Envelope {
  readonly receivers: Receiver[];
  readonly subjects: ReturnPathSubject[];
}

/** Empty for the null sender. */
function senderOf({ envelope: { mailFrom } }: SMTPServerSession): string {
  return mailFrom === false ? '' : mailFrom.address;
}

/** Why these bytes are no message for us, or null. */
function problemOf(body: Buffer): Reply | null {
  if (body.includes(0)) return NUL;
  let before = 0;
  for (let at = 0; at < body.length; at += 1) {
    const octet = body[at]!;
    if ((octet === LF) !== (before === CR)) return BARE;
    before = octet;
  }
  if (before === CR) return BARE;
  const end = body.indexOf('\r\n\r\n');
  const headerBytes = end === -1 ? body.length : end + 2;
  if (headerBytes > HEADER_BYTES_MAX && !body.subarray(0, 2).equals(Buffer.from('\r\n'))) {
    return HEADER_TOO_LARGE;
  }
  const header = body.subarray(0, headerBytes).toString('latin1');
  return (header.match(/^received:/gim) ?? []).length > RECEIVED_MAX ? LOOP : null;
}

/** Return-Path and Received on top (RFC 5321 §4.4). */
function traceFields(
  session: SMTPServerSession,
  about: { readonly hostname: string; readonly at: Date },
): string {
  const helo = (session.hostNameAppearsAs || 'unknown').replace(/[^\x21-\x7e]/g, '?').slice(0, 255);
  const address = isIPv6(session.remoteAddress)
    ? `IPv6:${session.remoteAddress}`
    : session.remoteAddress;
  const tls = session.secure ? 'ESMTPS' : 'ESMTP';
  const date = about.at.toUTCString().replace('GMT', '+0000');
  return [
    `Return-Path: <${senderOf(session)}>`,
    `Received: from ${helo} ([${address}])`,
    `\tby ${about.hostname} with ${tls} id ${session.id};`,
    `\t${date}`,
    '',
  ].join('\r\n');
}
