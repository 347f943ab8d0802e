// The inbound listener: mail for the receiving domains of our tenants, bounces and complaints that come home
// to our return paths, and nothing else.
//
// In: SMTP. Out: each message handed to `receive` and `takeReport`, and the 250 after the final dot only when
// both have resolved. Decided in this order: may this client come in (mx-conduct.ts, client-count.ts, a block list), is the
// recipient somebody's (mx-recipients.ts), are these the bytes of a message (mx-structure.ts), is its author who it says,
// is the client known. A database that is away is a 451, never a 5xx: the client tries again.
import { isIPv4 } from 'node:net';
import type { SMTPServerDataStream, SMTPServerSession } from 'smtp-server';
import type { Logger } from '../log.ts';
import { normalizedAddress } from '../mail/address.ts';
import type { ReturnPathSubject } from '../mail/return-path.ts';
import type { Arrival, ArrivalClient } from '../receiving/arrival.ts';
import type { FindListing } from '../receiving/dnsbl.ts';
import { isProven, type GreylistQuestion } from '../receiving/greylist.ts';
import type { ForwardReturnResult, ReturnedMessage } from '../receiving/home.ts';
import type { ReceivingPolicy } from '../receiving/policy.ts';
import {
  inboundBytes,
  inboundConnections,
  inboundDuration,
  inboundMessages,
  inboundOpen,
  inboundRecipients,
  inboundVerdicts,
} from '../telemetry/instruments.ts';
import { traced } from '../telemetry/trace.ts';
import { createByteGate } from './byte-gate.ts';
import { createClientCount, createConnectionRate } from './client-count.ts';
import { Listener, refusal, type Reply } from './listener.ts';
import {
  createConduct,
  isStressed,
  longestIdle,
  overstays,
  patienceOf,
  type Patience,
} from './mx-conduct.ts';
import {
  createRecipientDecision,
  emptyEnvelope,
  type Envelope,
  type RecipientRules,
} from './mx-recipients.ts';
import * as replies from './mx-replies.ts';
import { examine } from './mx-structure.ts';
import { traceFields, transactionOf, type Transaction } from './mx-trace.ts';
import { NEEDS_SMTPUTF8, NO_REQUIRETLS, STOPPING, TOO_MANY } from './replies.ts';
import { createSpool, type SpooledMessage } from './spool.ts';

export interface MxOptions extends Pick<
  RecipientRules,
  'resolve' | 'findPostmaster' | 'readReturnPath' | 'isReturnPathDomain' | 'readForwardReturn'
> {
  /** Null: all interfaces. */
  readonly host: string | null;
  /** 0: any free port. */
  readonly port: number;
  readonly hostname: string;
  /** PEM; null: STARTTLS is not offered. */
  readonly tls: { readonly key: string; readonly cert: string } | null;
  /** As the operator has it now. */
  readonly policy: () => ReceivingPolicy;
  readonly findListing: FindListing;
  /** What the checks of a message show, and whether its author's domain wants it refused; null: nothing is checked. */
  readonly verify: Verify | null;
  /** Whether this client has come before; asked of mail that proves nothing. */
  readonly isKnown: (question: GreylistQuestion) => Promise<boolean>;
  /** Applies what the message reports, if it is a report. False: it should come again later. */
  readonly takeReport: (message: {
    readonly raw: Buffer;
    readonly subjects: readonly ReturnPathSubject[];
  }) => Promise<boolean>;
  /** What came back of mail that we forwarded goes on to its author. */
  readonly takeForwardReturn: (message: ReturnedMessage) => Promise<ForwardReturnResult>;
  /** Durable once it resolves; the ids of what was stored. */
  readonly receive: (arrival: Arrival) => Promise<readonly string[]>;
  /** For large messages while they arrive. */
  readonly spoolFolder: string;
  readonly log: Logger;
  readonly now: () => Date;
  readonly limits?: Partial<MxLimits>;
}

export type Verify = (message: {
  readonly raw: Buffer;
  readonly mailFrom: string;
  readonly client: ArrivalClient;
  readonly receivers: Arrival['receivers'];
}) => Promise<Verified>;

export interface Verified {
  readonly authentication: NonNullable<Arrival['authentication']>;
  /** Header fields for the top, with their CRLF. */
  readonly field: string;
  /** The message without fields that pretend to be ours. */
  readonly raw: Buffer;
  /** What the author's domain and the recipient's come to; null: it is taken. */
  readonly refused: Reply | null;
}

export interface MxLimits {
  readonly patienceOf: (isStressed: boolean) => Patience;
  /** How often it is looked who keeps a place for too long. */
  readonly watchMs: number;
  /** Who has been idle for so long gives its place to who waits for one. */
  readonly makeRoomIdleMs: number;
  /** Strangers wait this long for the greeting: who speaks first does not wait for answers later either. */
  readonly greetingDelayMs: number;
  readonly tarpitMs: number;
  /** Of our own work at RCPT and at the final dot. */
  readonly answerMaxMs: number;
  /** What messages that arrive may hold, in memory (64 KiB each) or on disk. */
  readonly spoolBytesMax: number;
  /** What messages that are being stored may hold in memory. */
  readonly storeBytesMax: number;
  /** Of one message; four times as much is read over, so that the client hears why. */
  readonly messageBytesMax: number;
}

export interface MxListener {
  readonly port: number;
  /** The next connections see this certificate. */
  updateCertificate(tls: { readonly key: string; readonly cert: string }): void;
  /** Resolves when no socket is left: idle clients get a 421, a running transaction has a while to finish. */
  stop(): Promise<void>;
}

const LIMITS: MxLimits = {
  patienceOf,
  watchMs: 1_000,
  makeRoomIdleMs: 2_000,
  greetingDelayMs: 100,
  tarpitMs: 1_000,
  answerMaxMs: 30_000,
  spoolBytesMax: 2 * 1024 * 1024 * 1024,
  storeBytesMax: 128 * 1024 * 1024,
  messageBytesMax: 50 * 1024 * 1024,
};
const READ_OVER = 4;
const COMMAND_BYTES_MAX = 4_096;
/** Those who are shown out may linger for a second beside those who are served; more are closed without a word. */
const LEAVING_MAX = 1_000;
/** A message is held as it came and as it is stored. */
const COPIES = 2;
/** What a stream says whose client is lost before the final dot. */
const GONE = new Set(['ECONNECTION', 'ERR_STREAM_PREMATURE_CLOSE']);
const STOP_GRACE_MS = 5_000;
/** In a span. */
const SHOWN_IDS_MAX = 10;

/** Resolves when it listens; rejects when it cannot (a port in use). */
export async function startMx(options: MxOptions): Promise<MxListener> {
  const { log, now, policy } = options;
  const limits = { ...LIMITS, ...options.limits };
  const clients = createClientCount();
  const rate = createConnectionRate();
  const envelopes = new WeakMap<SMTPServerSession, Envelope>();
  const spool = createSpool({ folder: options.spoolFolder, maxBytes: limits.spoolBytesMax });
  const gate = createByteGate(limits.storeBytesMax);
  const decide = createRecipientDecision({
    ...options,
    recipientsMax: () => policy().recipientsMax,
    tarpitMs: limits.tarpitMs,
  });
  const patience = (): Patience =>
    limits.patienceOf(isStressed(server.connections.size, policy().connections.max));
  const conduct = createConduct(patience);
  let stopping: Promise<void> | null = null;

  const server = new Listener(
    {
      name: options.hostname,
      banner: 'Mailstead',
      heloResponse: '%s greets %s',
      size: limits.messageBytesMax,
      rejectOversized: true,
      maxCommandLength: COMMAND_BYTES_MAX,
      socketTimeout: limits.patienceOf(false).idleMaxMs,
      disableReverseLookup: true,
      hideENHANCEDSTATUSCODES: false,
      hideREQUIRETLS: true,
      logger: false,
      minVersion: 'TLSv1.2',
      ...(options.tls === null ? {} : { key: options.tls.key, cert: options.tls.cert }),
      disabledCommands: [
        'AUTH',
        'WIZ',
        'SHELL',
        'KILL',
        'XCLIENT',
        'XFORWARD',
        ...(options.tls ? [] : ['STARTTLS']),
      ],
      onConnect: (session, reply) => {
        letIn(session).then(
          (refused) => reply(refused === null ? null : refusal(refused)),
          (err: unknown) => {
            log.warn({ err }, 'a client could not be let in');
            reply(refusal(TOO_MANY));
          },
        );
      },
      onMailFrom: ({ address }, session, reply) =>
        queueMicrotask(() => {
          const refused = begin(address, session);
          reply(refused === null ? null : refusal(refused));
        }),
      onRcptTo: ({ address }, session, reply) => {
        const envelope = envelopes.get(session) ?? emptyEnvelope();
        within(limits.answerMaxMs, decide(address, session, envelope)).then(
          (refused) => {
            inboundRecipients.inc({ code: classOf(refused) });
            reply(refused === null ? null : refusal(refused));
          },
          (err: unknown) => {
            inboundRecipients.inc({ code: classOf(replies.AWAY) });
            log.warn({ err }, 'a recipient could not be decided');
            reply(refusal(replies.AWAY));
          },
        );
      },
      onData: (stream, session, answer) => void takeMessage(stream, session, answer),
    },
    {
      connectionsMax: Number.POSITIVE_INFINITY, // `admit` decides
      tooMany: TOO_MANY,
      stopping: STOPPING,
      reword: replies.reword,
      takesAnyName: true,
      takesOldSenders: true,
      admit(address) {
        const refused = admit(address);
        inboundConnections.inc({ result: refused === null ? 'admitted' : 'refused' });
        return refused;
      },
      onGone: (address) => clients.leave(address),
      isProxy: (address) => policy().isProxy(address),
      judge: conduct.judge,
      onReply: conduct.note,
    },
  );

  /** Null: there is a connection for it, which is counted until it is closed. */
  function admit(address: string): Reply | null {
    if (stopping !== null) return STOPPING;
    const { max, perClient, newPerMinute } = policy().connections;
    const isOften = !isLoopback(address) && rate(address, performance.now()) > newPerMinute;
    if (isOften) return replies.TOO_OFTEN;
    if (clients.enter(address) <= perClient && hasRoom(max)) return null;
    clients.leave(address);
    return TOO_MANY;
  }

  /** Whoever has been idle for long makes room for one more. */
  function hasRoom(max: number): boolean {
    if (server.connections.size < max) return true;
    const idle = longestIdle(server.lives(), performance.now() - limits.makeRoomIdleMs);
    if (idle !== null) server.dismiss(idle.id, replies.MAKING_ROOM);
    return idle !== null;
  }

  /** Null: the client is greeted. */
  async function letIn({ remoteAddress: address }: SMTPServerSession): Promise<Reply | null> {
    if (isLoopback(address)) return null;
    const [zone] = await Promise.all([
      options.findListing(address),
      new Promise<void>((resolve) => void setTimeout(resolve, limits.greetingDelayMs).unref()),
    ]);
    return zone === null ? null : replies.listed(zone, address);
  }

  /** Null: a transaction begins. */
  function begin(mailFrom: string, session: SMTPServerSession): Reply | null {
    const { envelope } = session;
    const { requireTLS, smtpUtf8 } = envelope;
    // smtp-server keeps both for the next MAIL when this one is refused.
    envelope.requireTLS = false;
    const refused = requireTLS === true ? NO_REQUIRETLS : needsUtf8(mailFrom, smtpUtf8);
    if (refused !== null) envelope.smtpUtf8 = false;
    else envelopes.set(session, emptyEnvelope());
    return stopping === null ? refused : STOPPING;
  }

  /** Never rejects. `answer` is not called when the client left before the end of its message. */
  async function takeMessage(
    stream: SMTPServerDataStream,
    session: SMTPServerSession,
    answer: (error?: Error | null, text?: string) => void,
  ): Promise<void> {
    // What belongs to this message is kept: the session is used for the next one.
    const transaction = transactionOf(session);
    const envelope = envelopes.get(session) ?? emptyEnvelope();
    let dottedAt = performance.now();
    const finish = (refused: Reply | null, text?: string): void => {
      const error = refused === null ? null : refusal(refused);
      inboundDuration.observe((performance.now() - dottedAt) / 1_000);
      const result = refused !== null || stream.sizeExceeded ? 'refused' : 'taken';
      inboundMessages.inc({ result, code: stream.sizeExceeded ? '5xx' : classOf(refused) });
      if (error === null && text !== undefined) conduct.forgive(session);
      answer(error, text);
      if (stopping !== null) server.dismiss(session.id);
    };
    let message: SpooledMessage;
    try {
      message = await spool.receive(stream);
      dottedAt = performance.now();
      inboundBytes.inc(message.sizeBytes);
    } catch (error) {
      if (GONE.has(String((error as NodeJS.ErrnoException).code))) {
        inboundMessages.inc({ result: 'lost', code: 'none' });
        return log.debug({ err: error }, 'a client left before the end of its message');
      }
      log.warn({ err: error }, 'an incoming message has no place to be kept while it arrives');
      return finish(replies.replyToFailure(error));
    }
    let isLate = false;
    const work = stream.sizeExceeded
      ? Promise.resolve({ text: '' }) // smtp-server says 552
      : gate(message.sizeBytes * COPIES, async () =>
          isLate
            ? { refused: replies.AWAY }
            : traced(
                'inbound message',
                {
                  kind: 'server',
                  parent: null,
                  attributes: { 'mailstead.session_id': session.id },
                },
                async (span) => {
                  const handed = await handOver(message, transaction, envelope);
                  const isRefused = 'refused' in handed;
                  span?.set({
                    'mailstead.smtp_code': isRefused ? handed.refused.code : 250,
                    'mailstead.size_bytes': message.sizeBytes,
                  });
                  return handed;
                },
              ),
        );
    // Also when nobody waits for it any more.
    const discarded = work.then(
      () => message.discard(),
      () => message.discard(),
    );
    try {
      const outcome = await within(limits.answerMaxMs, work);
      if ('refused' in outcome) finish(outcome.refused);
      else finish(null, outcome.text);
    } catch (error) {
      isLate = true;
      log.error(
        { err: error, size_bytes: message.sizeBytes },
        'an incoming message could not be stored',
      );
      finish(replies.replyToFailure(error));
    }
    await discarded.catch((err: unknown) => log.warn({ err }, 'a spool file stays'));
  }

  async function handOver(
    message: SpooledMessage,
    transaction: Transaction,
    envelope: Envelope,
  ): Promise<{ readonly refused: Reply } | { readonly text: string }> {
    const rules = policy();
    const receivedAt = now();
    const examined = examine(await message.read(), message.survey, rules);
    if ('refused' in examined) return examined;
    const { mailFrom, client } = transaction;
    // A recipient whose answer came too late was told to come again.
    const taken = new Set(transaction.recipients.map(normalizedAddress));
    const told = <T>(all: ReadonlyMap<string, T>): readonly T[] =>
      [...all].flatMap(([key, one]) => (taken.has(key) ? [one] : []));
    const receivers = told(envelope.receivers);
    const subjects = told(envelope.subjects);
    const verified =
      options.verify === null || receivers.length === 0
        ? null
        : await options.verify({ raw: examined.message, mailFrom, client, receivers });
    if (verified !== null) inboundVerdicts.inc({ result: verified.authentication.dmarc.result });
    if (verified !== null && verified.refused !== null) return { refused: verified.refused };
    if (
      rules.greylisting.enabled &&
      receivers.length > 0 &&
      (verified === null || !isProven(verified.authentication)) &&
      !(await options.isKnown({
        address: client.address,
        mailFrom,
        recipients: receivers.map(({ recipient }) => recipient),
        now: receivedAt,
      }))
    ) {
      return { refused: replies.GREYLISTED };
    }
    const results = verified?.field ?? '';
    const trace = Buffer.from(
      traceFields(transaction, { hostname: options.hostname, at: receivedAt, results }),
    );
    const raw = Buffer.concat([trace, verified?.raw ?? examined.message]);
    const isTaken = subjects.length === 0 || (await options.takeReport({ raw, subjects }));
    if (!isTaken) return { refused: replies.NOT_NOW };
    for (const about of told(envelope.returns)) {
      const traceSizeBytes = trace.length;
      const result = await options.takeForwardReturn({ ...about, raw, traceSizeBytes });
      if (result.kind === 'refused') return { refused: result };
    }
    if (receivers.length === 0) return { text: '2.0.0 Ok: read' };
    const ids = await traced('receive', {}, async (span) => {
      const stored = await options.receive({
        mailFrom,
        receivers,
        unrouteable: [...envelope.unrouteable.values()],
        raw,
        traceSizeBytes: trace.length,
        receivedAt,
        client,
        authentication: verified?.authentication ?? null,
      });
      span?.set({ 'mailstead.received_email_ids': stored.slice(0, SHOWN_IDS_MAX).join(' ') });
      return stored;
    });
    // A feedback loop may have its address anywhere. What is stored needs no second try.
    if (subjects.length === 0) await options.takeReport({ raw, subjects });
    return { text: `2.0.0 Ok: stored as ${ids.join(' ')}` };
  }

  /** Shows out whoever keeps a place for too long. */
  function watch(): void {
    server.server.maxConnections = policy().connections.max + LEAVING_MAX;
    const [nowMs, patient] = [performance.now(), patience()];
    for (const life of server.lives()) {
      const isEndless = life.messageBytes > READ_OVER * limits.messageBytesMax;
      const reply = isEndless ? replies.ENDLESS : overstays(life, nowMs, patient);
      if (reply !== null) server.dismiss(life.id, reply);
    }
  }

  server.on('error', (err) => log.debug({ err }, 'an inbound connection failed'));
  watch();
  const port = await server.open(options.port, options.host);
  const unmeasure = inboundOpen.read(() => [[{}, server.connections.size]]);
  const watching = setInterval(watch, limits.watchMs);
  watching.unref();
  return {
    port,
    updateCertificate: ({ key, cert }) => server.updateSecureContext({ key, cert }),
    stop: () =>
      (stopping ??= server.end(STOP_GRACE_MS).finally(() => {
        unmeasure();
        clearInterval(watching);
      })),
  };
}

const classOf = (refused: Reply | null): string =>
  refused === null ? '2xx' : `${Math.floor(refused.code / 100)}xx`;

/** Programs of this machine, its own deliveries among them. */
const isLoopback = (address: string): boolean =>
  (isIPv4(address) && address.startsWith('127.')) || address === '::1';

const needsUtf8 = (address: string, isAnnounced: boolean | undefined): Reply | null =>
  isAnnounced === true || /^[\0-\x7f]*$/.test(address) ? null : NEEDS_SMTPUTF8;

/** What `work` comes to; rejects when that takes longer, and then nobody waits for it. */
async function within<T>(maxMs: number, work: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer within ${maxMs} ms`)), maxMs);
  });
  try {
    return await Promise.race([work, late]);
  } finally {
    clearTimeout(timer);
  }
}
