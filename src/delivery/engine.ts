// What the engine (nodemailer's SMTPConnection) knows and its results leave out, read from its state; what it has to be
// told beside its options; and whether what it took for an answer can be one. Only session.ts uses it.
//
// The engine gives each reply to the oldest command without one. A peer that says one too many, or one too few, would
// give a recipient the answer of another.
import type { Socket } from 'node:net';
import type { Stage } from '../mail/reply.ts';

export interface EngineParts {
  readonly _socket: Socket;
  readonly _supportedExtensions: readonly string[];
  readonly _ehloLines?: readonly string[];
  readonly _currentDataStream: unknown;
  /** Replies that came and were given to no command yet; the last may be half. */
  readonly _responseQueue: readonly string[];
  /** A line without its end. */
  readonly _remainder: string;
  /** Of the last transaction that got as far as MAIL. */
  _envelope:
    | {
        readonly accepted?: readonly string[];
        readonly mailError?: Error;
        readonly rejectedErrors?: readonly {
          readonly recipient?: string | undefined;
          readonly response?: string | undefined;
        }[];
      }
    | false
    | undefined;
  _sendCommand(line: string, shown?: string): void;
  /** What is called for the reply to each command without one, in their order. */
  readonly _responseActions: ((reply: string) => void)[];
  /** Of the message that is under way. */
  readonly _pendingSend:
    false | { readonly stream: unknown; readonly onStreamError: (error: Error) => void };
  /** Where the message is written to, once DATA was granted. */
  _createSendStream(answered: SendDone): unknown;
  _actionSMTPStream(reply: string, answered: SendDone): void;
  /** Gives the oldest reply to its command. */
  _processResponse(): unknown;
}

type SendDone = (error: Error | null, reply?: string) => void;

export interface SessionLimits {
  readonly messages: number;
  readonly recipients: number;
  readonly recipientDomains: number;
}

/** RFC 9422 §4. */
export function limitsIn({ _ehloLines: ehlo = [] }: EngineParts): SessionLimits {
  const line = ehlo.find((one) => /^LIMITS\b/i.test(one)) ?? '';
  const read = (name: string): number => {
    const found = new RegExp(`[ \\t]${name}=([1-9]\\d{0,5})(?:[ \\t]|$)`, 'i').exec(line)?.[1];
    return found === undefined ? Infinity : Number(found);
  };
  return {
    messages: read('MAILMAX'),
    recipients: read('RCPTMAX'),
    recipientDomains: read('RCPTDOMAINMAX'),
  };
}

export const acceptedIn = ({ _envelope: envelope }: EngineParts): ReadonlySet<string> =>
  new Set(envelope ? envelope.accepted : []);

/** Behind a refused MAIL every RCPT is out of turn (503): the answer to MAIL is that of all. */
export function refusalsIn(
  { _envelope: envelope }: EngineParts,
  recipients: readonly string[],
): readonly (string | null)[] {
  const errors =
    envelope && envelope.mailError === undefined ? (envelope.rejectedErrors ?? []) : [];
  const replies = new Map(errors.map(({ recipient, response }) => [recipient, response ?? '']));
  return recipients.map((recipient) => {
    const reply = replies.get(recipient);
    return reply === undefined || reply.startsWith('421') ? null : reply;
  });
}

/** Something was said that nobody asked for: it would be taken for the answer to what is asked next. */
export const isUnasked = ({ _responseQueue: queue, _remainder: rest }: EngineParts): boolean =>
  queue.length > 0 || rest !== '';

/** Hears what came before the connection broke: the engine takes one reply in each turn, and drops the others. */
export function hearAll(engine: EngineParts): void {
  for (let left = engine._responseQueue.length; left > 0;) {
    engine._processResponse();
    if (engine._responseQueue.length >= left) return; // half a reply
    left = engine._responseQueue.length;
  }
}

/** The engine says SMTPUTF8 for addresses alone; a header may need it as well (RFC 6531 §3.1). */
export function saySmtpUtf8(engine: EngineParts, isNeeded: () => boolean): void {
  const send = engine._sendCommand.bind(engine);
  engine._sendCommand = (line, shown) => {
    const isMissing = isNeeded() && line.startsWith('MAIL FROM:') && !/ SMTPUTF8(?: |$)/.test(line);
    send(isMissing ? `${line} SMTPUTF8` : line, shown);
  };
}

/**
 * Has the engine send messages that are given to it as bytes in one write: its own streams cost more than all
 * else that it does for a small message, and send the dot in a packet of its own. `finish` gets what was given, and gives
 * what is to be written; where it throws nothing is.
 */
export function sendAtOnce(engine: EngineParts, finish: (message: Buffer) => Buffer): void {
  const stream = engine._createSendStream.bind(engine);
  engine._createSendStream = (answered) => {
    if (engine._pendingSend === false || engine._pendingSend.stream !== false)
      return stream(answered);
    const { onStreamError } = engine._pendingSend;
    engine._responseActions.push((reply) => engine._actionSMTPStream(reply, answered));
    return {
      write(message: Buffer): void {
        try {
          engine._socket.write(finish(message));
        } catch (error) {
          onStreamError(error as Error);
        }
      },
      end: () => undefined,
    };
  };
}

/** The first digits of what each command from MAIL on may be answered with (RFC 5321 §4.3.2). */
const DIGITS: Partial<Record<Stage, string>> = {
  mail: '245',
  rcpt: '245',
  data: '345',
  dot: '245',
};

/**
 * Whether this can be the answer to a command of that stage; one of two minds is none (RFC 5321 §4.2.1). `unasked`: what
 * came behind it and waits for no command; 421 may always come, and the answer to the dot is not undone by what follows.
 */
export function fits(stage: Stage, reply: string, unasked: readonly string[]): boolean {
  const allowed = DIGITS[stage];
  if (allowed === undefined) return true;
  const digits = reply.split('\n').map((line) => /^([2-5])\d\d(?:[ -]|$)/.exec(line)?.[1]);
  const [first] = digits;
  return (
    first !== undefined &&
    allowed.includes(first) &&
    digits.every((digit) => digit === undefined || digit === first) &&
    (stage === 'dot' || unasked.every((one) => one.startsWith('421') || one.trim() === ''))
  );
}
