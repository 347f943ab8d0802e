// Reads everything that is known about one email, in order of time: the facts of its timeline and each
// attempt with what the peer said, for every recipient. Why it has not arrived yet, waiting.ts says.
import { IsolationLevel } from '@mikro-orm/core';
import type { SqlEntityManager } from '@mikro-orm/postgresql';
import { causes, classOf } from '../mail/outcome.ts';
import type { Store } from '../store/orm.ts';
import { Attempt, Delivery, isTriedAgain, type DeliveryState } from '../store/delivery.ts';
import { Email } from '../store/email.ts';
import { TimelineEntry } from '../store/timeline-entry.ts';
import {
  explain,
  findObstacles,
  type DeliveryFacts,
  type FetchFacts,
  type Waiting,
} from './waiting.ts';

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

export interface Trace {
  events: TraceEvent[];
  recipients: TraceRecipient[];
  /** Null when nothing is left to wait for. */
  waiting: Waiting | null;
}

/** Far above what 150 recipients with a four-day schedule can make. */
const EVENTS_MAX = 10_000;

/** The whole story of the tenant's email, or null when the tenant has no such email. */
export async function readTrace(
  store: Store,
  tenantId: string,
  id: string,
  /** Who asks; the operator also learns what other tenants' mail met on the way. */
  reader: { readonly isOperator: boolean } = { isOperator: false },
): Promise<Trace | null> {
  // One snapshot: an attempt that ends between two reads must not be half of the story.
  const rows = await store.em().transactional(
    async (em) => {
      if ((await em.count(Email, { tenantId, id })) === 0) return null;
      const ofEmail = { tenantId, emailId: id };
      const deliveries = await em.find(Delivery, ofEmail, { orderBy: { position: 'asc' } });
      return {
        deliveries,
        entries: await em.find(TimelineEntry, ofEmail, { limit: EVENTS_MAX }),
        attempts: await findAttempts(em, ofEmail),
        fetch: await findFetch(em, ofEmail),
        obstacles: await findObstacles(em, tenantId, deliveries),
      };
    },
    { isolationLevel: IsolationLevel.REPEATABLE_READ, readOnly: true },
  );
  if (rows === null) return null;
  const { entries, deliveries, attempts } = rows;
  const recipientAt = new Map(deliveries.map(({ position, recipient }) => [position, recipient]));
  const events = [
    ...entries.flatMap(eventsOfEntry),
    ...attempts.flatMap((row) => eventsOf(row, recipientAt.get(row.position) ?? null)),
  ];
  events.sort((a, b) => a.at.getTime() - b.at.getTime() || rankOf(a) - rankOf(b));
  return {
    events,
    recipients: deliveries.map(presentRecipient),
    waiting: explain({ ...rows, isOperator: reader.isOperator }),
  };
}

/** Of more than the limit, the last ones; in order. */
async function findAttempts(
  em: SqlEntityManager,
  of: { readonly tenantId: string; readonly emailId: string },
): Promise<readonly InstanceType<typeof Attempt.class>[]> {
  const orderBy = { number: 'desc', position: 'desc' } as const;
  return (await em.find(Attempt, of, { orderBy, limit: EVENTS_MAX })).toReversed();
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

/** What follows from the end of an attempt is stored with it, and told after it. */
const rankOf = ({ type }: TraceEvent): number =>
  type === 'expired' || type === 'delivery_delayed' ? 1 : 0;

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
  | 'tlsPolicy'
  | 'source'
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
  const about = outcome === 'bounced' ? causes.find((one) => one === cause) : undefined;
  const transport = { attempt, stage, host, address, port, tls, code, enhanced, reply, cause };
  const detail = {
    ...transport,
    tls_policy: row.tlsPolicy,
    source: row.source,
    class: about === undefined ? null : classOf(about),
  };
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
