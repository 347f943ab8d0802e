// Reads everything that is known about one email, in order of time: the facts of its timeline and each
// attempt with what the peer said, for every recipient. And answers "why has it not arrived yet?"
// with one code, one sentence and the time of the next try.
import { IsolationLevel } from '@mikro-orm/core';
import type { Store } from '../store/orm.ts';
import { Attempt, Delivery, isTriedAgain, type DeliveryState } from '../store/delivery.ts';
import { Email } from '../store/email.ts';
import { TimelineEntry } from '../store/timeline-entry.ts';

/** One fact. */
export interface TraceEvent {
  at: Date;
  /** `accepted`, `attempt_started`, `delivered`, `deferred`, `bounced`, `failed`, `unknown`, … */
  type: string;
  /** Null for facts about the whole email. */
  recipient: string | null;
  detail: { [name: string]: unknown };
}

export interface TraceRecipient {
  recipient: string;
  state: DeliveryState;
  /** Attempts begun. */
  attempts: number;
  /** Null unless a next try is planned. */
  next_attempt_at: Date | null;
  last_code: string | null;
  last_reply: string | null;
}

export interface Waiting {
  /** `queued`, `in_flight`, `deferred` or `unknown`. */
  code: string;
  /** One sentence that says why it is not delivered yet. */
  reason: string;
  /** Null when it is tried as soon as a worker is free, or under way. */
  next_attempt_at: Date | null;
  recipients: string[];
}

export interface Trace {
  events: TraceEvent[];
  recipients: TraceRecipient[];
  /** Null when nothing is left to wait for. */
  waiting: Waiting | null;
}

/** Far above what 150 recipients with a four-day schedule can make. */
const EVENTS_MAX = 10_000;

/** The whole story of the tenant's email, or null when the tenant has no such email. */
export async function readTrace(store: Store, tenantId: string, id: string): Promise<Trace | null> {
  // One snapshot: an attempt that ends between two reads must not be half of the story.
  const rows = await store.em().transactional(
    async (em) => {
      if ((await em.count(Email, { tenantId, id })) === 0) return null;
      const ofEmail = { tenantId, emailId: id };
      return {
        entries: await em.find(TimelineEntry, ofEmail, { limit: EVENTS_MAX }),
        deliveries: await em.find(Delivery, ofEmail, { orderBy: { position: 'asc' } }),
        attempts: await em.find(Attempt, ofEmail, { limit: EVENTS_MAX }),
      };
    },
    { isolationLevel: IsolationLevel.REPEATABLE_READ, readOnly: true },
  );
  if (rows === null) return null;
  const { entries, deliveries, attempts } = rows;
  const recipientAt = new Map(deliveries.map(({ position, recipient }) => [position, recipient]));
  const events = [
    ...entries.map((entry): TraceEvent => ({
      at: entry.at,
      type: entry.kind,
      recipient: null,
      detail: { ...entry.detail },
    })),
    ...attempts.flatMap((row) => eventsOf(row, recipientAt.get(row.position) ?? null)),
  ];
  events.sort((a, b) => a.at.getTime() - b.at.getTime());
  return {
    events,
    recipients: deliveries.map(presentRecipient),
    waiting: explain(deliveries),
  };
}

type AttemptFacts = Pick<
  InstanceType<typeof Attempt.class>,
  | 'number'
  | 'startedAt'
  | 'finishedAt'
  | 'outcome'
  | 'cause'
  | 'stage'
  | 'host'
  | 'address'
  | 'port'
  | 'tls'
  | 'code'
  | 'enhanced'
  | 'reply'
>;

function eventsOf(row: AttemptFacts, recipient: string | null): TraceEvent[] {
  const started: TraceEvent = {
    at: row.startedAt,
    type: 'attempt_started',
    recipient,
    detail: { attempt: row.number },
  };
  const { finishedAt, outcome } = row;
  if (!finishedAt || !outcome) return [started];
  const { number: attempt, stage, host, address, port, tls, code, enhanced, reply, cause } = row;
  const detail = { attempt, stage, host, address, port, tls, code, enhanced, reply, cause };
  return [
    started,
    {
      at: finishedAt,
      type: outcome,
      recipient,
      detail: Object.fromEntries(
        Object.entries(detail).filter(([, value]) => value !== null && value !== undefined),
      ),
    },
  ];
}

type DeliveryFacts = Pick<
  InstanceType<typeof Delivery.class>,
  'recipient' | 'state' | 'attempts' | 'dueAt' | 'unknowns' | 'lastCause' | 'lastReply'
>;

function presentRecipient(row: DeliveryFacts): TraceRecipient {
  return {
    recipient: row.recipient,
    state: row.state,
    attempts: row.attempts,
    next_attempt_at: isTriedAgain(row) ? row.dueAt : null,
    last_code: row.lastCause ?? null,
    last_reply: row.lastReply ?? null,
  };
}

/** The recipient that waits longest decides what is said; the list names all that wait. */
function explain(deliveries: readonly DeliveryFacts[]): Waiting | null {
  const open = deliveries.filter(
    (row) => row.state === 'ready' || row.state === 'in_flight' || isTriedAgain(row),
  );
  const [first] = open.toSorted((a, b) => b.dueAt.getTime() - a.dueAt.getTime());
  if (first === undefined) return null;
  const recipients = open.map(({ recipient }) => recipient);
  const next = isTriedAgain(first) ? first.dueAt : null;
  const about = (code: string, reason: string): Waiting => ({
    code,
    reason,
    next_attempt_at: next,
    recipients,
  });
  switch (first.state) {
    case 'ready':
      return about('queued', 'It is due and waits for a free delivery worker.');
    case 'in_flight':
      return about('in_flight', `Attempt ${first.attempts} to ${first.recipient} is under way.`);
    case 'unknown':
      return about(
        'unknown',
        `The connection was lost after the message for ${first.recipient} was complete, so it may have arrived; it is tried once more.`,
      );
    default:
      return about(
        'deferred',
        `Attempt ${first.attempts} to ${first.recipient} was put off: ${first.lastReply ?? first.lastCause ?? 'no answer'}`,
      );
  }
}
