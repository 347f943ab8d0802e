// Which command of an SMTP conversation waits for its reply, and how long the peer may take (RFC 5321 §4.5.3.2). Told
// what was said and heard; one timer at a time, always for the oldest command without a reply. Half a reply is none,
// so a peer that drips gains nothing.
import type { Stage } from '../mail/reply.ts';
import { attemptPhase } from '../telemetry/instruments.ts';

export interface PhaseLimits {
  readonly greetingMs: number;
  /** EHLO, STARTTLS, AUTH, MAIL and RCPT, each. */
  readonly commandMs: number;
  readonly dataMs: number;
  /** Between two pieces of the message that the connection takes. */
  readonly blockMs: number;
  /** From the last piece to the reply that decides; an early end makes duplicates. */
  readonly dotMs: number;
  /** From the connection to the first MAIL, whatever it is made of. */
  readonly openMs: number;
  /** From MAIL to the final dot, beside what the size of the message allows. */
  readonly transactionMs: number;
  /** A message may take as long as it takes at this rate. */
  readonly slowestBytesPerS: number;
}

export const PHASE_LIMITS: PhaseLimits = {
  greetingMs: 60_000,
  commandMs: 300_000,
  dataMs: 120_000,
  blockMs: 180_000,
  dotMs: 600_000,
  openMs: 600_000,
  transactionMs: 900_000,
  slowestBytesPerS: 10_000,
};

export interface Phases {
  /** A command line went out. */
  said(command: string): void;
  /** A whole reply came in. */
  heard(): void;
  /** A piece of the message is about to go out. */
  block(): void;
  /** The last of the message is about to go out. */
  dot(): void;
  /** What waits for a reply. */
  waiting(): Stage | null;
  /** What the last reply was to. */
  answered(): Stage;
  /** No limit holds any more. */
  end(): void;
}

const STAGES: Readonly<Record<string, Stage>> = {
  EHLO: 'ehlo',
  HELO: 'ehlo',
  STARTTLS: 'tls',
  MAIL: 'mail',
  RCPT: 'rcpt',
  DATA: 'data',
  // The engine's end of an empty message, where DATA was granted for nobody.
  '.': 'dot',
  RSET: 'mail',
};

/** Begins with the greeting. `onLate` is called at most once for each wait. */
export function createPhases(limits: PhaseLimits, onLate: (stage: Stage) => void): Phases {
  const waiting: Stage[] = ['greeting'];
  let answered: Stage = 'connect';
  let ended = false;
  let timer: NodeJS.Timeout | undefined;
  let sinceMs = performance.now();

  const wait = (stage: Stage, ms: number): void => {
    clearTimeout(timer);
    sinceMs = performance.now();
    if (!ended) timer = setTimeout(() => onLate(stage), ms);
  };
  const waitForFirst = (): void => {
    clearTimeout(timer);
    const [first] = waiting;
    if (first === 'greeting') wait(first, limits.greetingMs);
    else if (first === 'data') wait(first, limits.dataMs);
    else if (first !== undefined) wait(first, limits.commandMs);
  };
  waitForFirst();
  return {
    said(command) {
      const verb = /^[A-Za-z.]*/.exec(command)?.[0].toUpperCase() ?? '';
      if (verb === 'QUIT') return;
      // What is no command here is a part of AUTH.
      waiting.push(STAGES[verb] ?? 'auth');
      if (waiting.length === 1) waitForFirst();
    },
    heard() {
      const [first] = waiting;
      if (first !== undefined) {
        attemptPhase.observe({ phase: first }, (performance.now() - sinceMs) / 1_000);
      }
      answered = waiting.shift() ?? answered;
      waitForFirst();
    },
    block() {
      if (waiting.length === 0) waiting.push('dot');
      wait('dot', limits.blockMs);
    },
    dot() {
      if (waiting.length === 0) waiting.push('dot');
      wait('dot', limits.dotMs);
    },
    waiting: () => waiting[0] ?? null,
    answered: () => answered,
    end() {
      ended = true;
      clearTimeout(timer);
    },
  };
}
