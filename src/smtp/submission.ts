// The submission listeners: programs of our tenants hand in mail, over STARTTLS or implicit TLS (RFC 6409, RFC 8314).
//
// In: SMTP, user `resend` or `mailstead`, an API key as the password. Out: each message handed to `submit` with its
// envelope, and the 250 after the final dot only when that has resolved; the header does not decide who gets it.
// Refused with the reason: a login without TLS, mail without a login, a wrong key, a tenant above its rate, bad addresses,
// and what is above a limit below. Return path and DSN parameters are read and not used: bounces are events.
import type { Socket } from 'node:net';
import type { SMTPServerDataStream, SMTPServerOptions, SMTPServerSession } from 'smtp-server';
import type { Caller } from '../access/keys.ts';
import { networkOf, type RateLimiter } from '../access/rate-limit.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import type { Logger } from '../log.ts';
import { MESSAGE_MAX_BYTES, type Submission } from '../sending/submit.ts';
import { createByteGate } from './byte-gate.ts';
import { Listener, refusal, type Reply } from './listener.ts';
import { createLogins } from './logins.ts';
import { NEEDS_SMTPUTF8, NO_REQUIRETLS, STOPPING, TOO_MANY } from './replies.ts';
import { createSpool, type SpooledMessage } from './spool.ts';
import * as replies from './submission-replies.ts';

export interface SubmissionOptions {
  /** Null: all interfaces. */
  readonly host: string | null;
  /** With STARTTLS; 0: any free port. */
  readonly port: number;
  /** With implicit TLS; 0: any free port. */
  readonly tlsPort: number;
  readonly hostname: string;
  /** PEM. */
  readonly tls: { readonly key: string; readonly cert: string };
  readonly authenticate: (token: string) => Promise<Caller | null>;
  readonly limiter: Pick<RateLimiter, 'take'>;
  /** Durable once it resolves. Throws a Refusal or an UnfitMessage. */
  readonly submit: (caller: Caller, submission: Submission) => Promise<{ readonly id: string }>;
  /** For large messages while they arrive. */
  readonly spoolFolder: string;
  readonly log: Logger;
  /** See createLogins. */
  readonly firstLoginDelayMs?: number;
  readonly limits?: Partial<SubmissionLimits>;
}

export interface SubmissionLimits {
  /** Both listeners together. */
  readonly connectionsMax: number;
  readonly connectionsPerClientMax: number;
  readonly recipientsMax: number;
  /** What all messages that arrive may hold, in memory or on disk. */
  readonly spoolBytesMax: number;
  /** What all messages that are being accepted may hold in memory. */
  readonly acceptBytesMax: number;
  /** From the connection to a login. */
  readonly loginMaxMs: number;
  readonly idleMaxMs: number;
  /** From 354 to the final dot. */
  readonly dataMaxMs: number;
}

export interface SubmissionListener {
  readonly port: number;
  readonly tlsPort: number;
  /** The next connections see this certificate. */
  updateCertificate(tls: { readonly key: string; readonly cert: string }): void;
  /** Resolves when no socket is left: idle clients get a 421, a running transaction has a while to finish. */
  stop(): Promise<void>;
}

const LIMITS: SubmissionLimits = {
  connectionsMax: 500,
  connectionsPerClientMax: 100,
  // The API takes 50 in each of `to`, `cc` and `bcc`.
  recipientsMax: 150,
  spoolBytesMax: 4 * 1024 * 1024 * 1024,
  acceptBytesMax: 256 * 1024 * 1024,
  loginMaxMs: 60_000,
  // RFC 5321 §4.5.3.2.7: a server waits at least 5 minutes for the next command.
  idleMaxMs: 300_000,
  dataMaxMs: 30 * 60_000,
};
const COMMAND_BYTES_MAX = 8_192;
const FAILED_LOGINS_MAX = 3;
const COMMANDS_BEFORE_LOGIN_MAX = 20;
/** A message is held as it came and as it goes out. */
const COPIES = 2;
const STOP_GRACE_MS = 5_000;

/** Who logged in on a session. */
interface Login {
  readonly caller: Caller;
  /** Asked for again with each message: a revoked key stops at once. */
  readonly token: string;
}

/** Resolves when both listen; rejects when one cannot (a port in use), and then none does. */
export async function startSubmission(options: SubmissionOptions): Promise<SubmissionListener> {
  const { log } = options;
  const limits = { ...LIMITS, ...options.limits };
  const logins = createLogins({
    authenticate: options.authenticate,
    ...(options.firstLoginDelayMs === undefined ? {} : { firstDelayMs: options.firstLoginDelayMs }),
  });
  const spool = createSpool({ folder: options.spoolFolder, maxBytes: limits.spoolBytesMax });
  const gate = createByteGate(limits.acceptBytesMax);
  const failedLogins = new WeakMap<SMTPServerSession, number>();
  const recipients = new WeakMap<SMTPServerSession, Map<string, Mailbox>>();
  /** Sockets by the client's network, also those whose TLS handshake is not over. */
  const clients = new Map<string, number>();
  let open = 0;
  let stopping: Promise<void> | null = null;

  const common: SMTPServerOptions = {
    name: options.hostname,
    banner: 'Mailstead submission',
    heloResponse: '%s greets %s',
    size: MESSAGE_MAX_BYTES,
    rejectOversized: true,
    maxRecipients: limits.recipientsMax,
    maxCommandLength: COMMAND_BYTES_MAX,
    maxAllowedUnauthenticatedCommands: COMMANDS_BEFORE_LOGIN_MAX,
    socketTimeout: limits.idleMaxMs,
    disableReverseLookup: true,
    hideENHANCEDSTATUSCODES: false,
    hideDSN: false,
    // Whatever is between the angle brackets comes to us; parseMailbox judges it.
    lenientAddressParsing: true,
    authMethods: ['PLAIN', 'LOGIN'],
    disabledCommands: ['WIZ', 'SHELL', 'KILL', 'XCLIENT', 'XFORWARD'],
    logger: false,
    minVersion: 'TLSv1.2',
    ...options.tls,
    onSecure: (_socket, _session, answer) => answer(),
    onAuth: ({ username = '', password }, session, answer) => {
      logIn(session, username, password ?? '').then(
        (login) => answer(null, { user: login }),
        (error: unknown) => answer(asError(error, replies.LOGIN_AWAY)),
      );
    },
    onMailFrom: (_address, session, answer) => {
      beginMessage(session).then(
        () => answer(),
        (error: unknown) => answer(asError(error, replies.AWAY)),
      );
    },
    onRcptTo: ({ address }, session, answer) => answer(addRecipient(session, address)),
  };
  const rules = {
    connectionsMax: limits.connectionsMax,
    tooMany: TOO_MANY,
    stopping: STOPPING,
    reword: replies.createRewording(limits.recipientsMax),
  };
  const servers = [false, true].map((secure) => {
    const server: Listener = new Listener(
      {
        ...common,
        secure,
        onConnect: (session, answer) => {
          const deadline = setTimeout(() => {
            if (loginOf(session) === null) server.drop(session.id);
          }, limits.loginMaxMs);
          deadline.unref();
          answer(stopping === null ? null : refusal(STOPPING));
        },
        onData: (stream, session, answer) => void takeMessage(server, { stream, session, answer }),
      },
      rules,
    );
    server.on('error', (err) => log.debug({ err }, 'a submission connection failed'));
    guardSockets(server, secure);
    return server;
  });

  /** Counts every socket before anything is read from it: a handshake that never ends is a connection, too. */
  function guardSockets(server: Listener, secure: boolean): void {
    const [accept] = server.server.listeners('connection') as ((socket: Socket) => void)[];
    server.server.removeAllListeners('connection');
    server.server.on('connection', (socket: Socket) => {
      const client = networkOf(socket.remoteAddress ?? '');
      const count = clients.get(client) ?? 0;
      if (open >= limits.connectionsMax || count >= limits.connectionsPerClientMax) {
        socket.on('error', () => undefined);
        // Nothing can be said before the handshake.
        if (secure) return void socket.destroy();
        socket.end(`${TOO_MANY.code} ${TOO_MANY.text}\r\n`);
        return void setTimeout(() => socket.destroy(), 1_000).unref();
      }
      open += 1;
      clients.set(client, count + 1);
      const deadline = setTimeout(() => server.dropHandshake(socket), limits.loginMaxMs);
      deadline.unref();
      socket.once('close', () => {
        clearTimeout(deadline);
        open -= 1;
        const left = (clients.get(client) ?? 1) - 1;
        if (left > 0) clients.set(client, left);
        else clients.delete(client);
      });
      accept?.(socket);
    });
  }

  async function logIn(session: SMTPServerSession, user: string, password: string): Promise<Login> {
    if (!session.secure) throw refusal(replies.NEEDS_TLS);
    const result = await logins({ address: session.remoteAddress, user, password }).catch(
      (err: unknown) => {
        log.warn({ err }, 'a key could not be checked');
        throw refusal(replies.LOGIN_AWAY);
      },
    );
    if ('tenantId' in result) return { caller: result, token: password };
    const failed = (failedLogins.get(session) ?? 0) + 1;
    failedLogins.set(session, failed);
    log.info({ address: session.remoteAddress, failed }, 'a login to submission failed');
    throw refusal(failed >= FAILED_LOGINS_MAX ? replies.TOO_MANY_FAILED_LOGINS : result);
  }

  async function beginMessage(session: SMTPServerSession): Promise<void> {
    if (stopping !== null) throw refusal(STOPPING);
    const { envelope } = session;
    if (envelope.requireTLS) {
      envelope.requireTLS = false; // smtp-server keeps it for the next MAIL
      throw refusal(NO_REQUIRETLS);
    }
    const login = loginOf(session);
    const caller = login === null ? null : await options.authenticate(login.token);
    if (caller === null) throw refusal(replies.KEY_REVOKED);
    const rate = await options.limiter.take(caller.tenantId);
    if (rate.refusal !== null) throw refusal(replies.refusalReply(rate.refusal));
    recipients.set(session, new Map());
  }

  function addRecipient(session: SMTPServerSession, address: string): Error | null {
    const parsed = parseMailbox(address);
    if (!parsed.ok) {
      return refusal(replies.reply(553, '5.1.3', `The address <${address}> ${parsed.problem}`));
    }
    const { mailbox } = parsed;
    if (mailbox.needsSmtpUtf8 && session.envelope.smtpUtf8 !== true) {
      return refusal(NEEDS_SMTPUTF8);
    }
    const known = recipients.get(session);
    const key = normalizedAddress(mailbox.address);
    if (known !== undefined && !known.has(key)) known.set(key, mailbox);
    return null;
  }

  /** Never rejects. `answer` is not called when the client left before the end of its message. */
  async function takeMessage(
    server: Listener,
    d: {
      readonly stream: SMTPServerDataStream;
      readonly session: SMTPServerSession;
      readonly answer: (error?: Error | null, text?: string) => void;
    },
  ): Promise<void> {
    const { stream, session, answer } = d;
    const deadline = setTimeout(() => server.drop(session.id), limits.dataMaxMs);
    deadline.unref();
    // What belongs to this message is kept: the session is used for the next one.
    const envelope = {
      login: loginOf(session),
      recipients: [...(recipients.get(session)?.values() ?? [])],
      allowsUtf8: session.envelope.smtpUtf8 === true,
      trace: {
        hostname: options.hostname,
        id: `${session.id}.${session.transaction}`,
        isTls: session.secure,
      },
      address: session.remoteAddress,
    };
    const finish = (error: Error | null, text?: string): void => {
      answer(error, text);
      if (stopping !== null) server.dismiss(session.id);
    };
    let message: SpooledMessage;
    try {
      message = await spool.receive(stream);
    } catch (error) {
      const said = replies.replyTo(error);
      if (said !== null) finish(refusal(said));
      else log.debug({ err: error }, 'a submission ended before its message');
      return;
    } finally {
      clearTimeout(deadline);
    }
    try {
      if (stream.sizeExceeded) return finish(null); // smtp-server says 552
      if (envelope.login === null) return finish(refusal(replies.KEY_REVOKED));
      const { caller } = envelope.login;
      const { id } = await gate(message.sizeBytes * COPIES, async () =>
        options.submit(caller, { ...envelope, ...message, message: await message.read() }),
      );
      finish(null, `2.0.0 Ok: queued as ${id}`);
    } catch (error) {
      finish(asError(error, replies.AWAY));
    } finally {
      await message.discard().catch((err: unknown) => log.warn({ err }, 'a spool file stays'));
    }
  }

  /** What the client hears of an error; what is a fault of ours is in the log, and `otherwise` is said. */
  function asError(error: unknown, otherwise: Reply): Error {
    if (error instanceof Error && 'responseCode' in error) return error;
    const said = replies.replyTo(error);
    if (said === null) log.error({ err: error }, 'a submission failed');
    return refusal(said ?? otherwise);
  }

  async function stop(): Promise<void> {
    await Promise.all(servers.map((server) => server.end(STOP_GRACE_MS)));
  }

  const [plain, implicit] = servers as [Listener, Listener];
  const port = await plain.open(options.port, options.host);
  const tlsPort = await implicit.open(options.tlsPort, options.host).catch((error: unknown) => {
    plain.server.close();
    throw error;
  });
  return {
    port,
    tlsPort,
    updateCertificate(tls) {
      for (const server of servers) server.updateSecureContext(tls);
    },
    stop: () => (stopping ??= stop()),
  };
}

const loginOf = (session: SMTPServerSession): Login | null =>
  (session.user as Login | false | undefined) || null;
