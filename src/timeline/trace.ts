// Reads everything that is known about one email, in order of time: the facts of its timeline and each
// attempt with what the peer said, for every recipient. And answers "why has it not arrived yet?"
// with one code, one sentence and the time of the next try.
import { IsolationLevel } from '@mikro-orm/core';
import type { SqlEntityManager } from '@mikro-orm/postgresql';
import type { Store } from '../store/orm.ts';
import { Attempt, Delivery, isTriedAgain, type DeliveryState } from '../store/delivery.ts';
import { Email } from '../store/email.ts';
import { TimelineEntry } from '../store/timeline-entry.ts';

/** One fact. */
export interface TraceEvent {
  at: Date;
  /** `accepted`, `rescheduled`, `canceled`, `suppressed`, `attempt_started`, `delivered`, `deferred`, … */
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
  /** Null unless a try is planned for a time. */
  next_attempt_at: Date | null;
  last_code: string | null;
  last_reply: string | null;
}

export interface Waiting {
  /** `scheduled`, `preparing`, `queued`, `in_flight`, `deferred` or `unknown`. */
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
        fetch: await findFetch(em, ofEmail),
      };
    },
    { isolationLevel: IsolationLevel.REPEATABLE_READ, readOnly: true },
  );
  if (rows === null) return null;
  const { entries, deliveries, attempts, fetch } = rows;
  const recipientAt = new Map(deliveries.map(({ position, recipient }) => [position, recipient]));
  const events = [
    ...entries.flatMap(eventsOfEntry),
    ...attempts.flatMap((row) => eventsOf(row, recipientAt.get(row.position) ?? null)),
  ];
  events.sort((a, b) => a.at.getTime() - b.at.getTime());
  return {
    events,
    recipients: deliveries.map(presentRecipient),
    waiting: explain(deliveries, fetch),
  };
}

/** What the fetcher of its attachments has to do and has met. */
interface FetchFacts {
  readonly dueAt: Date;
  readonly attempts: number;
  readonly isUnderWay: boolean;
  readonly lastError: string | null;
}

async function findFetch(
  em: SqlEntityManager,
  of: { readonly tenantId: string; readonly emailId: string },
): Promise<FetchFacts | null> {
  const [row] = await em.execute<
    { due_ms: string; attempts: number; is_under_way: boolean; last_error: string | null }[]
  >(
    `select (extract(epoch from due_at) * 1000)::bigint::text as due_ms, attempts, last_error,
       leased_until is not null and leased_until >= now() as is_under_way
     from attachment_fetch where tenant_id = ? and email_id = ?`,
    [of.tenantId, of.emailId],
  );
  if (row === undefined) return null;
  return {
    dueAt: new Date(Number(row.due_ms)),
    attempts: row.attempts,
    isUnderWay: row.is_under_way,
    lastError: row.last_error,
  };
}

/** A fact about several recipients is one event for each. */
function eventsOfEntry(
  entry: Pick<InstanceType<typeof TimelineEntry.class>, 'at' | 'kind' | 'detail'>,
): TraceEvent[] {
  const { recipients, ...detail } = { ...entry.detail };
  const about = (recipient: string | null, rest: TraceEvent['detail']): TraceEvent => ({
    at: entry.at,
    type: entry.kind,
    recipient,
    detail: rest,
  });
  return Array.isArray(recipients)
    ? recipients.map((recipient) => about(String(recipient), detail))
    : [about(null, { ...entry.detail })];
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
    next_attempt_at: isTriedAgain(row) || row.state === 'scheduled' ? row.dueAt : null,
    last_code: row.lastCause ?? null,
    last_reply: row.lastReply ?? null,
  };
}

const OPEN: ReadonlySet<DeliveryState> = new Set(['scheduled', 'preparing', 'ready', 'in_flight']);

/** The recipient that waits longest decides what is said; the list names all that wait. */
function explain(deliveries: readonly DeliveryFacts[], fetch: FetchFacts | null): Waiting | null {
  const open = deliveries.filter((row) => OPEN.has(row.state) || isTriedAgain(row));
  const [first] = open.toSorted((a, b) => b.dueAt.getTime() - a.dueAt.getTime());
  if (first === undefined) return null;
  const recipients = open.map(({ recipient }) => recipient);
  const about = (code: string, reason: string, next: Date | null = null): Waiting => ({
    code,
    reason,
    next_attempt_at: next,
    recipients,
  });
  switch (first.state) {
    case 'scheduled':
      return about(
        'scheduled',
        `It is scheduled for ${first.dueAt.toISOString()}; until then it can be moved or canceled.`,
        first.dueAt,
      );
    case 'preparing': {
      const { reason, next } = explainFetch(fetch);
      return about('preparing', reason, next);
    }
    case 'ready':
      return about('queued', 'It is due and waits for a free delivery worker.');
    case 'in_flight':
      return about('in_flight', `Attempt ${first.attempts} to ${first.recipient} is under way.`);
    case 'unknown':
      return about(
        'unknown',
        `The connection was lost after the message for ${first.recipient} was complete, so it may have arrived; it is tried once more.`,
        first.dueAt,
      );
    default:
      return about(
        'deferred',
        `Attempt ${first.attempts} to ${first.recipient} was put off: ${first.lastReply ?? first.lastCause ?? 'no answer'}`,
        first.dueAt,
      );
  }
}

function explainFetch(fetch: FetchFacts | null): { reason: string; next: Date | null } {
  const last = fetch?.lastError ?? null;
  if (fetch === null || (last === null && fetch.attempts === 0)) {
    return { reason: 'Its attachments are about to be fetched.', next: null };
  }
  const said = last === null ? '' : ` The try before failed: ${last}`;
  return fetch.isUnderWay
    ? { reason: `Its attachments are being fetched (try ${fetch.attempts}).${said}`, next: null }
    : {
        reason: `Its attachments could not be fetched yet: ${last ?? 'the try did not end'}`,
        next: fetch.dueAt,
      };
}
