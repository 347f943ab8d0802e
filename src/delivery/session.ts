// One SMTP session over nodemailer's SMTPConnection, each step as one awaited call. Whatever a peer
// says or fails to say comes back as a value. This file and engine.ts are the only ones that know the engine.
//
// After `send` returned kind `lost` the session is closed. `dotSent` tells the two losses apart: before
// the final dot nobody has the message; after it, nobody knows (RFC 1047).
import type { Socket } from 'node:net';
import SMTPConnection from 'nodemailer/lib/smtp-connection';
import {
  describePeer,
  faultOf,
  type Demand,
  type PeerFacts,
  type TlsFault,
} from '../dns/tls-policy.ts';
import type { Cause } from '../mail/outcome.ts';
import type { Stage } from '../mail/reply.ts';
import { dial } from './dial.ts';
import {
  acceptedIn,
  fits,
  hearAll,
  isUnasked,
  limitsIn,
  refusalsIn,
  saySmtpUtf8,
  sendAtOnce,
  type EngineParts,
  type SessionLimits,
} from './engine.ts';
import { readSlices, toWire, wholeOf, type MessageBody } from './message-source.ts';
import { createPhases, PHASE_LIMITS, type PhaseLimits, type Phases } from './phases.ts';
import { peerFactsOf, tlsOptionsFor } from './tls-session.ts';
import { createWatchdog } from './watchdog.ts';

/** How much encryption the session needs. */
export type TlsNeed = 'never' | 'opportunistic' | 'required' | 'implicit';

export interface Target {
  /** The name we meant to reach: for TLS, logs and evidence. */
  readonly host: string;
  readonly address: string;
  readonly port: number;
  readonly tls: TlsNeed;
  /** Whether the certificate must be valid for `host` for the handshake to succeed. */
  readonly verify: boolean;
  /** What its TLS must have before MAIL; absent: as `tls` and `verify` say. */
  readonly demand?: Demand;
  readonly login: { readonly user: string; readonly pass: string } | null;
  /** Our name in EHLO. */
  readonly helloName: string;
  /** The address of this machine to dial from; null: the system chooses. */
  readonly source: string | null;
  /** How long dialling may take; default that of dial.ts. */
  readonly connectMs?: number;
  /** Named by the operator, so private addresses are fine. */
  readonly trusted: boolean;
}

/** The reply as it came, with its stage; null: none came, and `cause` says why. */
export interface Failure {
  readonly stage: Stage;
  readonly cause: Cause;
  readonly reply: string | null;
  readonly message: string;
  /** What TLS failed at, where that is known. */
  readonly tlsFault?: TlsFault;
}

export type SendResult = {
  /**
   * For each recipient the reply that refused it; null: accepted, or without an answer of its own. Whatever became of the
   * others, these are refused. A 421 is no answer about a recipient, and none is where the answers do not fit.
   */
  readonly refusals: readonly (string | null)[];
} & (
  | { readonly kind: 'accepted'; readonly reply: string }
  | ({ readonly kind: 'refused' } & Failure)
  | ({ readonly kind: 'lost'; readonly dotSent: boolean } & Failure)
);

export interface Session {
  readonly target: Target;
  /** Protocol, cipher and whether the certificate was verified; null in plaintext. */
  readonly tls: string | null;
  /** What the peer showed in its handshake; null in plaintext. */
  readonly peer: PeerFacts | null;
  readonly supportsSmtpUtf8: boolean;
  readonly supports8Bit: boolean;
  /** The address of this machine that was dialled from. */
  readonly source: string | null;
  /** What the host announced it takes (RFC 9422), or what it was seen to take; Infinity: nothing is known. */
  readonly limits: SessionLimits;
  /** Messages sent so far. */
  readonly sent: number;
  /** False once it was closed, by us or by the peer, and when the peer speaks out of turn. */
  isOpen(): boolean;
  /** One transaction; the recipients differ from each other. */
  send(message: {
    readonly mailFrom: string;
    readonly recipients: readonly string[];
    readonly body: MessageBody;
    readonly sizeBytes: number;
    /** The message does, whatever the addresses do; only where the session supports it. */
    readonly needsSmtpUtf8?: boolean;
    /** It has octets above 127; only where the session supports it (RFC 6152). */
    readonly is8Bit?: boolean;
    /** Called once, with the recipients that were accepted, before the final dot is handed to the socket. */
    readonly onDot: (accepted: ReadonlySet<string>) => void;
  }): Promise<SendResult>;
  /** It was seen to refuse more recipients than these in one transaction. */
  takesAtMost(recipients: number): void;
  close(): void;
  /** Resolves when the connection is gone, within CLOSE_MAX_MS of `close`: the peer counts it until then. */
  readonly closed: Promise<void>;
}

/** The engine's own timer, for all phases: behind every limit of phases.ts, which know better. */
const idleMsOf = ({ dotMs }: PhaseLimits): number => dotMs + 60_000;
/** The refusal is known by then, and a new connection costs less than a long wait. */
const RESET_MAX_MS = 5_000;
/** A peer that ignores QUIT does not hold the connection for longer. */
const CLOSE_MAX_MS = 1_000;

/** Resolves with a session that is ready for MAIL, or with the failure that prevented it. */
export async function openSession(
  target: Target,
  checkPeer: (address: string) => { ok: true } | { ok: false; reason: string },
  limits: PhaseLimits = PHASE_LIMITS,
): Promise<Session | Failure> {
  const dialled = await dial(target);
  if ('cause' in dialled) return failure('connect', dialled.cause, null, dialled.message);
  // The address was checked before dialling; what answered is checked again.
  const peer = checkPeer(dialled.remoteAddress ?? target.address);
  if (!peer.ok) {
    dialled.destroy();
    return failure('connect', 'address_refused', null, `address refused: ${peer.reason}`);
  }
  const talk: Talk = {
    limits,
    late: null,
    astray: null,
    phases: createPhases(limits, (stage) => {
      talk.late = stage;
      connection.close();
    }),
  };
  const connection = new SMTPConnection({
    connection: dialled,
    host: target.host,
    port: target.port,
    name: target.helloName,
    secure: target.tls === 'implicit',
    requireTLS: target.tls === 'required',
    ignoreTLS: target.tls === 'never',
    // Both are the engine's limits of the whole opening; phases.ts has that of each step.
    greetingTimeout: limits.openMs,
    connectionTimeout: limits.openMs,
    socketTimeout: idleMsOf(limits),
    logger: listener(talk, () => connection),
    transactionLog: true,
    tls: tlsOptionsFor(target),
  });
  connection.once('end', () => talk.phases.end());
  connection.on('error', () => undefined); // told through the steps below; an error event without a listener ends the process
  /** At once: the next host may be this one again, and counts. */
  const giveUp = (why: Failure): Failure => {
    connection.close();
    dialled.destroy();
    return why;
  };
  const opened = await greet(connection, target, talk);
  if (opened !== null) return giveUp(opened);
  const shown = peerFactsOf((connection as unknown as EngineParts)._socket);
  const { demand, host } = target;
  const fault =
    demand === undefined ? null : faultOf(demand, { peer: shown, host, now: new Date() });
  if (fault !== null) {
    const { reason, failure: tlsFault } = fault;
    return giveUp({ ...failure('tls', 'tls_failed', null, reason), tlsFault });
  }
  return createSession(connection, { target, dialled, talk, peer: shown });
}

/** What is known of the conversation beside what the engine tells. */
interface Talk {
  readonly limits: PhaseLimits;
  readonly phases: Phases;
  /** What the peer took too long for. */
  late: Stage | null;
  /** Its answers are out of step with the commands: whose they are is not known. */
  astray: Failure | null;
}

/** The engine logs each command and each whole reply: the one place where it says in which order. */
function listener(talk: Talk, connection: () => SMTPConnection): SMTPConnection.Options['logger'] {
  const ignore = (): void => undefined;
  const debug = (entry: unknown, line: unknown): void => {
    const { tnx } = entry as { readonly tnx?: string };
    if (tnx === 'client') talk.phases.said(String(line));
    else if (tnx === 'server') hear(String(line));
  };
  const hear = (reply: string): void => {
    const { phases } = talk;
    phases.heard();
    const stage = phases.answered();
    const behind = (connection() as unknown as EngineParts)._responseQueue;
    if (fits(stage, reply, phases.waiting() === null ? behind : [])) return;
    talk.astray ??= outOfStep(stage, reply);
    connection().close(); // before the engine acts on it
  };
  return { trace: ignore, debug, info: ignore, warn: ignore, error: ignore, fatal: ignore };
}

const failure = (stage: Stage, cause: Cause, reply: string | null, message: string): Failure => ({
  stage,
  cause,
  reply,
  message,
});

const outOfStep = (stage: Stage, reply: string): Failure => {
  const why = `the answers of the peer do not fit what it was asked: ${reply}`;
  return failure(stage, 'protocol_error', null, why);
};

/** What nodemailer's errors carry beyond Error. */
interface EngineError extends Error {
  readonly code?: string | undefined;
  readonly response?: string | undefined;
  readonly command?: string | undefined;
}

function greet(connection: SMTPConnection, target: Target, talk: Talk): Promise<Failure | null> {
  return new Promise((resolve) => {
    const watchdog = createWatchdog(() => {
      talk.late ??= stageNow(connection, talk);
      connection.close();
    });
    watchdog.refresh(talk.limits.openMs);
    const done = (result: Failure | null): void => {
      watchdog.end();
      connection.removeListener('error', onError);
      connection.removeListener('end', onEnd);
      resolve(result);
    };
    const onError = (error: EngineError): void => done(describe(error, connection, talk));
    // A connection that we close ourselves is told in no other way.
    const onEnd = (): void => {
      setImmediate(() => onError(new Error('the connection was closed')));
    };
    connection.once('error', onError);
    connection.once('end', onEnd);
    connection.connect((error?: EngineError | null) => {
      if (error) return onError(error);
      if (target.login === null) return done(null);
      const { user, pass } = target.login;
      connection.login({ user, pass }, (loginError: EngineError | null) => {
        if (loginError) onError(loginError);
        else done(null);
      });
    });
  });
}

/** What the peer is expected to do: the stage of a failure that no reply tells of. */
function stageNow(connection: SMTPConnection, { phases }: Talk): Stage {
  // A peer that breaks off in the handshake is told by the engine as a lost connection.
  if (connection.upgrading === true) return 'tls';
  return phases.waiting() ?? phases.answered();
}

/** The stage from what was said and heard; the engine's own word where it refuses by itself. */
function stageOf(error: EngineError, connection: SMTPConnection, talk: Talk): Stage {
  const { code, command, response } = error;
  if (code === 'ETLS') return 'tls';
  if (code === 'EAUTH') return 'auth';
  // With PIPELINING a refusal is told when the reply to the last command has come.
  if (command === 'MAIL FROM') return 'mail';
  if (command === 'RCPT TO') return 'rcpt';
  if (command === 'DATA') return code === 'EMESSAGE' ? 'dot' : 'data';
  if (response !== undefined) return talk.phases.answered();
  return code === 'EENVELOPE' ? 'mail' : stageNow(connection, talk);
}

function describe(error: EngineError, connection: SMTPConnection, talk: Talk): Failure {
  const { late, astray } = talk;
  if (astray !== null) return astray;
  if (late !== null) {
    return failure(late, late === 'tls' ? 'tls_failed' : 'timeout', null, LATE[late] ?? LATE_REPLY);
  }
  const stage = stageOf(error, connection, talk);
  const reply = isOfNobody(error, stage) ? null : (error.response ?? null);
  if (reply !== null) return failure(stage, 'protocol_error', reply, reply);
  const cause = causeOf(error, stage);
  const why =
    cause === 'internal'
      ? 'a fault of this server kept the message from being completed'
      : plainly(error.message);
  return failure(stage, cause, null, why);
}

/** Half a reply to one of several RCPT, and then the end of the connection. */
const isOfNobody = ({ command, response }: EngineError, stage: Stage): boolean =>
  stage === 'rcpt' && command === 'CONN' && response?.startsWith('421') !== true;

function causeOf({ code }: EngineError, stage: Stage): Cause {
  if (stage === 'tls') return 'tls_failed';
  if (stage === 'auth') return 'auth_failed';
  if (code === 'ESTREAM') return 'internal'; // our own body, or a lease that is gone
  return code === 'ETIMEDOUT' ? 'timeout' : 'connection_lost';
}

const LATE_REPLY = 'the peer took too long to answer';
const LATE: Partial<Record<Stage, string>> = {
  greeting: 'the peer took too long to be ready',
  tls: 'the peer took too long for the TLS handshake',
  dot: 'the peer took too long to take the message or to answer it',
};

/** Without what OpenSSL and Node say to programmers: places in memory and in sources, switches of the program. */
function plainly(message: string): string {
  return message
    .replace(/[0-9A-F]+:error:[0-9A-F]+:[^:]*:[^:]*:([^:]+):.*/s, '$1')
    .replace(/; if the root CA .*/s, '');
}

function createSession(
  connection: SMTPConnection,
  {
    target,
    dialled,
    talk,
    peer,
  }: {
    readonly target: Target;
    readonly dialled: Socket;
    readonly talk: Talk;
    readonly peer: PeerFacts | null;
  },
): Session {
  const engine = connection as unknown as EngineParts;
  const { limits, phases } = talk;
  let isOpen = true;
  let sent = 0;
  let needsSmtpUtf8 = false;
  let known = limitsIn(engine);
  saySmtpUtf8(engine, () => needsSmtpUtf8);
  let beforeDot = nothing;
  sendAtOnce(engine, (whole) => {
    phases.block();
    const wire = toWire(whole);
    beforeDot();
    return wire;
  });
  for (const end of ['error', 'close']) engine._socket.prependListener(end, () => hearAll(engine));
  connection.on('error', () => {
    isOpen = false;
  });
  connection.once('end', () => {
    isOpen = false;
  });
  const closed = new Promise<void>((resolve) => {
    // Inside TLS the one that was dialled may be told later.
    for (const socket of [dialled, engine._socket]) socket.once('close', resolve);
    if (dialled.closed) resolve();
  });
  dialled.once('close', () => {
    isOpen = false;
  });
  const endNow = (): void => {
    connection.close();
    dialled.destroy();
  };
  const close = (): void => {
    phases.end();
    if (!isOpen) return endNow();
    isOpen = false;
    connection.quit();
    const timer = setTimeout(endNow, CLOSE_MAX_MS);
    void closed.then(() => clearTimeout(timer));
  };
  return {
    target,
    tls: peer === null ? null : describePeer(target, peer),
    peer,
    supportsSmtpUtf8: engine._supportedExtensions.includes('SMTPUTF8'),
    supports8Bit: engine._supportedExtensions.includes('8BITMIME'),
    source: dialled.localAddress?.replace(/^::ffff:(?=\d+\.)/, '') ?? target.source,
    get limits() {
      return known;
    },
    get sent() {
      return sent;
    },
    isOpen: () => isOpen && !isUnasked(engine),
    close,
    closed,
    takesAtMost(recipients) {
      known = { ...known, recipients: Math.min(known.recipients, recipients) };
    },
    async send(message) {
      sent += 1;
      needsSmtpUtf8 = message.needsSmtpUtf8 === true;
      engine._envelope = undefined; // that of the last message would speak for this one until MAIL
      let dotSent = false;
      const onDot = (): void => {
        message.onDot(acceptedIn(engine)); // throws when the dot must not leave
        dotSent = true;
        phases.dot();
        watchdog.end();
      };
      beforeDot = onDot;
      const body =
        wholeOf(message.body) ?? readSlices(message.body, { onSlice: () => phases.block(), onDot });
      const watchdog = createWatchdog(() => {
        talk.late ??= stageNow(connection, talk);
        connection.close();
      });
      const bodyMs = (message.sizeBytes / limits.slowestBytesPerS) * 1_000;
      watchdog.refresh(limits.transactionMs + bodyMs);
      const fail = (error: EngineError): Outcome =>
        toOutcome(error, { about: describe(error, connection, talk), dotSent });
      let onEnd = (): void => undefined;
      const outcome = await new Promise<Outcome>((resolve) => {
        const { mailFrom: from, sizeBytes: size, is8Bit: use8BitMime = false } = message;
        const envelope = { from, to: [...message.recipients], size, use8BitMime };
        connection.send(envelope, body, (error, info) => {
          resolve(error ? fail(error) : { kind: 'accepted', reply: info.response });
        });
        // A connection that we close ourselves tells the engine's caller nothing. Where the engine does tell, it
        // does so in this turn, and knows more.
        onEnd = () => {
          setImmediate(() => resolve(fail(new Error('the connection was closed'))));
        };
        connection.once('end', onEnd);
      });
      connection.removeListener('end', onEnd);
      watchdog.end();
      beforeDot = nothing; // an idle session holds no message
      if (!Buffer.isBuffer(body)) body.destroy(); // closes what it reads from, wherever it stopped
      const refusals = refusalsIn(engine, message.recipients);
      // Answered before all of it left: what came next over this connection would become a part of this message.
      const isHalf = Boolean(engine._currentDataStream);
      if (outcome.kind === 'lost' || isHalf) connection.close();
      else if (outcome.kind === 'refused' && outcome.stage !== 'dot') await reset(message);
      const none = refusals.map(() => null);
      if (talk.astray !== null) return { kind: 'lost', dotSent, ...talk.astray, refusals: none };
      // The reply that never came may be that to an earlier command.
      const isPipelined = engine._supportedExtensions.includes('PIPELINING');
      if (talk.late !== null && !dotSent && isPipelined) return { ...outcome, refusals: none };
      if (outcome.kind !== 'accepted' || !isHalf) return { ...outcome, refusals };
      const why = 'the peer took the message before it was complete';
      const lost = failure('dot', 'protocol_error', null, why);
      return { kind: 'lost', dotSent, ...lost, refusals };
    },
  };

  /** Ends the refused transaction; a session that cannot is given up. */
  function reset({ recipients }: { readonly recipients: readonly string[] }): Promise<void> {
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
      connection.reset((error: EngineError | null) => {
        const reply = error?.response;
        // Every host grants it or does not know it: this was the answer to the command before.
        const isOther = reply !== undefined && !/^(?:421|50[02])/.test(reply);
        if (isOther && recipients.length > 1) talk.astray ??= outOfStep('rcpt', reply);
        if (error) connection.close();
        done();
      });
    });
  }
}

const nothing = (): void => undefined;

type Outcome =
  | { readonly kind: 'accepted'; readonly reply: string }
  | ({ readonly kind: 'refused' } & Failure)
  | ({ readonly kind: 'lost'; readonly dotSent: boolean } & Failure);

function toOutcome(
  error: EngineError,
  { about, dotSent }: { readonly about: Failure; readonly dotSent: boolean },
): Outcome {
  const { reply } = about;
  // A reply to the dot is an answer even when the connection then broke.
  if (reply !== null) return { kind: 'refused', ...about };
  if (error.code === 'EMESSAGE' || error.code === 'EENVELOPE') {
    return { kind: 'refused', ...about, cause: 'message_refused' }; // too large for SIZE, or not sendable
  }
  return { kind: 'lost', dotSent, ...about };
}
