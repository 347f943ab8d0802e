// What webhooks are told about emails on their way: the detail of each event, beside what is known of the email itself.
// Written where the state of a delivery changes, in the same transaction. One event for each recipient, but for
// `email.scheduled` and `email.sent`, which are of the email.
import { causeTexts, type Cause } from '../mail/outcome.ts';
import { normalizedAddress } from '../mail/address.ts';
import { UNKNOWNS_MAX } from '../store/delivery.ts';
import { idNamed, NEW_ID } from '../store/id.ts';
import { isHooked, tellWebhooks, type EventType, type OutboxEvent } from '../timeline/outbox.ts';
import type { Queryable } from './enqueue.ts';

export interface Recipient {
  readonly tenantId: string;
  readonly emailId: string;
  readonly recipient: string;
}

/** A peer's reply, and not our own words: it begins with its code (RFC 5321 §4.2). */
const REPLY = /^[2-5]\d\d(?:[ -]|$)/;
/** Enhanced status codes and causes that say which kind of bounce it was (RFC 3463). */
const TOO_LARGE = /^5\.(?:2\.3|3\.4)$/;
const SUBTYPES: Partial<Record<string, string>> = {
  no_mailbox: 'NoEmail',
  mailbox_full: 'MailboxFull',
  content_refused: 'ContentRejected',
};

/** `code`: the enhanced status where there was one, else the cause; `expired` when its time was over. As in metrics. */
function bounceType(code: string | null): 'Permanent' | 'Transient' | 'Undetermined' {
  if (code === 'expired' || code?.startsWith('4.') === true) return 'Transient';
  return code?.startsWith('5.') === true ? 'Permanent' : 'Undetermined';
}

function bounceSubType(code: string | null, cause: string | null): string {
  if (code !== null && TOO_LARGE.test(code)) return 'MessageTooLarge';
  if (cause === null) return 'Undetermined';
  return SUBTYPES[cause] ?? 'General';
}

const textOf = (cause: string | null): string | null =>
  cause !== null && cause in causeTexts ? causeTexts[cause as Cause] : null;

export function bounced(
  { tenantId, emailId, recipient }: Recipient,
  why: {
    readonly code: string | null;
    readonly cause: string | null;
    readonly reply: string | null;
  },
): OutboxEvent {
  const { code, cause, reply } = why;
  const expired = code === 'expired' ? causeTexts.expired : null;
  const bounce = {
    message: expired ?? textOf(cause) ?? reply ?? 'The recipient could not be reached.',
    type: bounceType(code),
    subType: bounceSubType(code, cause),
    diagnosticCode: reply !== null && REPLY.test(reply) ? [`smtp; ${reply}`] : [],
  };
  return { tenantId, subjectId: emailId, type: 'email.bounced', detail: { recipient, bounce } };
}

/** It could not be sent at all; `reason`: a short code. */
export const failed = (
  { tenantId, emailId, recipient }: Recipient,
  why: { readonly reason: string; readonly message: string | null },
): OutboxEvent => ({
  tenantId,
  subjectId: emailId,
  type: 'email.failed',
  detail: { recipient, failed: { reason: why.reason, message: why.message } },
});

export const delivered = ({ tenantId, emailId, recipient }: Recipient): OutboxEvent => ({
  tenantId,
  subjectId: emailId,
  type: 'email.delivered',
  detail: { recipient },
});

/** `unknown`: the answer to the final dot was lost, so it may have arrived; without a next attempt nobody will ever know. */
export const delayed = (
  { tenantId, emailId, recipient }: Recipient,
  delay: {
    readonly outcome: 'deferred' | 'unknown';
    readonly attempts: number;
    readonly cause: string | null;
    readonly message: string | null;
    readonly next_attempt_at: string | null;
    readonly expires_at: string | null;
  },
): OutboxEvent => ({
  tenantId,
  subjectId: emailId,
  type: 'email.delivery_delayed',
  detail: { recipient, delay },
});

/** What a settlement wrote of one delivery. */
export interface SettledDelivery {
  readonly tenant_id: string;
  readonly email_id: string;
  readonly recipient: string;
  readonly cause: string | null;
  readonly state: string;
  readonly unknowns: number;
  readonly attempts: number;
  readonly last_cause: string | null;
  readonly last_reply: string | null;
  readonly is_delay_told: boolean;
  readonly due_ms: string;
  readonly expires_ms: string;
}

/** What follows from a settlement, but for `email.delivered`, which its statement tells. */
export function eventsOf(row: SettledDelivery): readonly OutboxEvent[] {
  const { state, cause, attempts, last_cause: code, last_reply: reply } = row;
  const about = { tenantId: row.tenant_id, emailId: row.email_id, recipient: row.recipient };
  if (state === 'bounced') return [bounced(about, { code, cause, reply })];
  if (state === 'failed') {
    return [failed(about, { reason: cause ?? 'internal', message: reply ?? textOf(cause) })];
  }
  if (state !== 'unknown' && !row.is_delay_told) return [];
  const timeOf = (ms: string): string => new Date(Number(ms)).toISOString();
  const isOver = state === 'unknown' && row.unknowns >= UNKNOWNS_MAX;
  return [
    delayed(about, {
      outcome: state === 'unknown' ? 'unknown' : 'deferred',
      attempts,
      cause,
      message: reply ?? textOf(cause),
      next_attempt_at: isOver ? null : timeOf(row.due_ms),
      expires_at: isOver ? null : timeOf(row.expires_ms),
    }),
  ];
}

/** What a delivery was not made for, found before any attempt. */
export interface Untried extends Omit<Recipient, 'recipient'> {
  readonly type: Extract<EventType, 'email.scheduled' | 'email.suppressed' | 'email.failed'>;
  /** Null: of the email. */
  readonly recipient: string | null;
  readonly detail: Readonly<Record<string, unknown>>;
}

export const scheduled = (about: Omit<Recipient, 'recipient'>, scheduledAt: Date): Untried => ({
  ...about,
  recipient: null,
  type: 'email.scheduled',
  detail: { scheduled_at: scheduledAt.toISOString() },
});

/** Resend's word for a list that holds for all mail of an account. */
const SUPPRESSED_TYPE = 'OnAccountSuppressionList';

export const suppressed = (about: Recipient, message: string): Untried => ({
  ...about,
  type: 'email.suppressed',
  detail: { recipient: about.recipient, suppressed: { message, type: SUPPRESSED_TYPE } },
});

export const unwanted = (
  about: Recipient,
  why: { readonly reason: string; readonly message: string },
): Untried => {
  const { detail } = failed(about, why);
  return { ...about, type: 'email.failed', detail };
};

/**
 * Part of a statement: `columns` are the expressions of its five arrays. Of who is suppressed it adds why, where that is
 * known.
 */
export const insertUntried = (columns: readonly string[]): string => `
  insert into outbox (tenant_id, id, type, subject_id, detail, at)
  select t.tenant_id, ${NEW_ID}, t.type, t.email_id,
    case when s.origin in ('bounce', 'complaint')
      then jsonb_set(t.detail, '{suppressed,reason}', to_jsonb('previous_' || s.origin))
      else t.detail end,
    now()
  from unnest(${columns.join(', ')}) as t (tenant_id, email_id, type, address, detail)
  left join suppression s on t.type = 'email.suppressed'
    and s.tenant_id = t.tenant_id and s.address = t.address
  where ${isHooked('t.tenant_id', 't.type')}`;

export const UNTRIED_TYPES: readonly string[] = ['uuid', 'uuid', 'text', 'text', 'jsonb'];

/** The values of those arrays. */
export const untriedColumns = (events: readonly Untried[]): readonly (readonly unknown[])[] => [
  events.map(({ tenantId }) => tenantId),
  events.map(({ emailId }) => emailId),
  events.map(({ type }) => type),
  events.map(({ recipient }) => (recipient === null ? null : normalizedAddress(recipient))),
  events.map(({ detail }) => JSON.stringify(detail)),
];

/** Inside the caller's transaction. */
export async function tellUntried(db: Queryable, events: readonly Untried[]): Promise<void> {
  if (events.length === 0) return;
  await db.query({
    name: 'tell-untried',
    text: insertUntried(UNTRIED_TYPES.map((type, index) => `$${index + 1}::${type}[]`)),
    values: [...untriedColumns(events)],
  });
}

/** A claimed delivery, as far as it decides whether its email is `sent` now. */
export interface Begun {
  readonly tenantId: string;
  readonly emailId: string;
  readonly attempt: number;
  readonly unknowns: number;
  readonly interruptions: number;
  /** Somebody wants to hear of `email.sent`. */
  readonly isHooked: boolean;
  /** When the email was to go: its schedule, or when it was accepted. */
  readonly plannedMs: number;
}

/**
 * Tells `email.sent`, after what is not to be attempted was taken out of the claim and before anything is dialled. A crash
 * between the claim and this is made up for by the next claim, and what was told already has the same id, at every claim:
 * so it is told once for each email, whatever happens to its recipients.
 */
export async function tellSent(db: Queryable, claimed: readonly Begun[]): Promise<void> {
  const first = claimed.filter(
    ({ isHooked: isWanted, attempt, interruptions, unknowns }) =>
      isWanted && (attempt === 1 || interruptions > 0 || unknowns > 0),
  );
  const emails = new Map(first.map((one) => [one.emailId, one]));
  // Another worker may tell the same at this moment, for other recipients of these emails.
  const inOneOrder = [...emails.values()].toSorted((a, b) => (a.emailId < b.emailId ? -1 : 1));
  await tellWebhooks(
    db,
    inOneOrder.map(({ tenantId, emailId, plannedMs }) => ({
      tenantId,
      subjectId: emailId,
      type: 'email.sent',
      detail: {},
      id: idNamed(`email.sent ${emailId}`, plannedMs),
    })),
  );
}
