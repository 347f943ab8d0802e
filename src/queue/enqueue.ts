// Puts accepted emails into the database: email, content, deliveries and the first fact of the
// timeline, all emails of a call in one statement and so in one transaction. After it committed the
// emails are ours to deliver. It does not validate: sending/accept.ts did.
import type { Pool, PoolClient } from 'pg';
import { UNSUBSCRIBED } from '../audience/wanting.ts';
import type { DeliveryState } from '../store/delivery.ts';
import type { EmailEvent, Tag } from '../store/email.ts';
import { newId } from '../store/id.ts';
import {
  insertUntried,
  scheduled,
  suppressed,
  UNTRIED_TYPES,
  untriedColumns,
  unwanted,
  type Untried,
} from './told.ts';

/** A pool, or a client inside a transaction. */
export type Queryable = Pool | PoolClient;

export interface NewDelivery {
  readonly recipient: string;
  readonly lane: string;
  /** On the tenant's suppression list: no attempt is made. */
  readonly isSuppressed?: boolean;
  /** Does not want mail of this topic (audience/wanting.ts): no attempt is made; not both. */
  readonly isUnwanted?: boolean;
}

/** A file of the email; store/attachment.ts says what the fields mean. */
export interface NewAttachment {
  readonly id: string;
  readonly filename: string | null;
  readonly contentType: string;
  readonly contentId: string | null;
  readonly disposition: 'attachment' | 'inline';
  readonly sizeBytes: number | null;
  readonly url: string | null;
  readonly blobKey: string | null;
  readonly rawOffset: number | null;
  readonly rawLength: number | null;
}

export interface NewEmail {
  readonly tenantId: string;
  readonly id: string;
  readonly createdAt: Date;
  readonly messageId: string;
  readonly fromGiven: string;
  readonly fromDomain: string;
  readonly toGiven: readonly string[];
  readonly ccGiven: readonly string[] | null;
  readonly bccGiven: readonly string[] | null;
  readonly replyToGiven: readonly string[] | null;
  readonly subject: string;
  readonly tags: readonly Tag[] | null;
  readonly lastEvent: EmailEvent;
  readonly html: string | null;
  readonly text: string | null;
  readonly headers: Readonly<Record<string, string>> | null;
  /** Not before this; null: at once. */
  readonly scheduledAt: Date | null;
  readonly topicId: string | null;
  readonly templateId: string | null;
  /** The broadcast that it belongs to. */
  readonly broadcastId?: string | null;
  /** In order of position. One with a `url` and no bytes holds the email back until it is fetched. */
  readonly attachments: readonly NewAttachment[];
  /** Lexemes that the list of emails is searched by (sending/search.ts). */
  readonly searchTerms: readonly string[];
  /**
   * The bytes themselves, or the key of the blob that holds them: exactly one of the two, and
   * neither while attachments are to be fetched.
   */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  readonly needsSmtpUtf8: boolean;
  /** Our own TLS report: no TLS policy holds it back. */
  readonly ignoresTlsPolicy?: boolean;
  /** MAIL FROM, empty for the null sender; absent or null: a return path of ours for each delivery. */
  readonly envelopeFrom?: string | null;
  /** Relayed for others: a signature of ours is added where it can be made, and not waited for. */
  readonly mayGoUnsigned?: boolean;
  /** The domain whose keys sign. */
  readonly signingTenantId: string | null;
  readonly signingDomainId: string | null;
  /** How its html is tracked (tracking/track-html.ts), where the message is composed later; absent or null: not at all. */
  readonly tracking?: object | null;
  /** In order of position, without repeats; at least one. */
  readonly deliveries: readonly NewDelivery[];
  /** One of many that were handed in together: mail for one recipient goes before it. */
  readonly isBulk: boolean;
  readonly lifetimeMs: number;
  readonly timelineId: string;
  /** What the timeline says of the request that brought it. */
  readonly accepted: Readonly<Record<string, unknown>>;
}

/** Collects parameters and gives the placeholders that stand for them. */
class Parameters {
  readonly values: unknown[] = [];

  tuple(values: readonly unknown[]): string {
    const first = this.values.length + 1;
    this.values.push(...values);
    return `(${values.map((_, index) => `$${first + index}`).join(', ')})`;
  }

  one(value: unknown): string {
    this.values.push(value);
    return `$${this.values.length}`;
  }

  /** An array, for unnest: one parameter, however many rows. */
  column(values: readonly unknown[], type: string): string {
    return `${this.one(values)}::${type}[]`;
  }
}

/**
 * Numbers of emails that a statement is prepared for. Planning one for each number takes a fifth of what it costs; more of
 * them would take memory in every connection.
 */
export const GROUP_SIZES: readonly number[] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32];

/** Of the statement: emails, contents, timeline, search. */
const ALWAYS_PARTS = 4;

const json = (value: unknown): string | null => (value === null ? null : JSON.stringify(value));

/** What is said of a recipient that is not sent to. */
export const SUPPRESSED = {
  cause: 'suppressed',
  reply: 'The address is on the suppression list, so nothing is sent to it.',
} as const;

/** One of the many of a broadcast that are sent now. */
const isOfBroadcast = (email: NewEmail): boolean =>
  (email.broadcastId ?? null) !== null && email.scheduledAt === null;

/** Nothing but a message for now: needs no columns and rows beyond those that every email has. */
const isPlain = (email: NewEmail): boolean =>
  email.scheduledAt === null &&
  email.topicId === null &&
  email.templateId === null &&
  (email.broadcastId ?? null) === null &&
  email.attachments.length === 0 &&
  !email.deliveries.some(isWithheld);

const isFetchedFirst = ({ attachments }: NewEmail): boolean =>
  attachments.some(
    ({ url, blobKey, rawOffset }) => url !== null && blobKey === null && rawOffset === null,
  );
const isWithheld = ({ isSuppressed, isUnwanted }: NewDelivery): boolean =>
  isSuppressed === true || isUnwanted === true;
const isNobodyLeft = ({ deliveries }: NewEmail): boolean => deliveries.every(isWithheld);
/** Nobody is left, and nobody is suppressed either. */
const isUnwanted = ({ deliveries }: NewEmail): boolean =>
  deliveries.every((delivery) => delivery.isUnwanted === true);

function stateOf(email: NewEmail, delivery: NewDelivery): DeliveryState {
  if (delivery.isSuppressed === true) return 'suppressed';
  if (delivery.isUnwanted === true) return 'failed';
  if (email.scheduledAt !== null) return 'scheduled';
  return isFetchedFirst(email) ? 'preparing' : 'ready';
}

/** `scheduled`, `suppressed` and `failed` follow from the email itself, so that row and deliveries agree. */
function eventOf(email: NewEmail): EmailEvent {
  if (isNobodyLeft(email)) return isUnwanted(email) ? 'failed' : 'suppressed';
  return email.scheduledAt === null ? email.lastEvent : 'scheduled';
}

/**
 * Stores the emails and their deliveries: to be claimed at once, or waiting for their time, for their
 * attachments, or for nothing where the address is suppressed or opted out. One statement: all of them or none.
 * Throws what Postgres says; a key that exists already is a bug of the caller.
 */
export async function enqueue(db: Queryable, emails: readonly NewEmail[]): Promise<void> {
  if (emails.length === 0) return;
  const parameters = new Parameters();
  const arePlain = emails.every(isPlain);
  const parts = [
    insertEmails(parameters, emails, arePlain),
    insertContents(parameters, emails),
    insertTimeline(parameters, emails),
    ...insertSearch(parameters, emails),
    ...(arePlain
      ? []
      : [...insertAttachments(parameters, emails), ...insertOutbox(parameters, emails)]),
  ];
  const text = `with ${parts.map((part, index) => `part${index} as (${part})`).join(', ')}
    ${insertDeliveries(parameters, emails, arePlain)}`;
  // A prepared statement for each number of emails that group commits make.
  const isSearched = emails.every(({ searchTerms }) => searchTerms.length > 0);
  const isUsual =
    arePlain && (isSearched || emails.every((email) => email.searchTerms.length === 0));
  // And one for broadcasts, whose groups are full, where it is made of the same parts.
  const isFullBroadcast =
    isSearched &&
    parts.length === ALWAYS_PARTS &&
    emails.length === GROUP_SIZES.at(-1) &&
    emails.every((email) => isOfBroadcast(email) && !email.deliveries.some(isWithheld));
  const name = isFullBroadcast
    ? { name: 'enqueue-broadcast' }
    : isUsual && GROUP_SIZES.includes(emails.length)
      ? { name: `enqueue-${emails.length}${isSearched ? '-searched' : ''}` }
      : {};
  await db.query({ ...name, text, values: parameters.values });
}

function insertEmails(
  parameters: Parameters,
  emails: readonly NewEmail[],
  arePlain: boolean,
): string {
  const rows = emails.map((email) =>
    parameters.tuple([
      email.tenantId,
      email.id,
      email.createdAt,
      email.messageId,
      email.fromGiven,
      email.fromDomain,
      json(email.toGiven),
      json(email.ccGiven),
      json(email.bccGiven),
      json(email.replyToGiven),
      email.subject,
      json(email.tags),
      eventOf(email),
      email.deliveries.length,
      ...(arePlain
        ? []
        : [
            email.scheduledAt,
            email.topicId,
            email.templateId,
            email.broadcastId ?? null,
            email.attachments.length,
            isNobodyLeft(email)
              ? json(
                  isUnwanted(email)
                    ? { code: UNSUBSCRIBED.cause, message: UNSUBSCRIBED.ofTopic }
                    : { code: SUPPRESSED.cause, message: SUPPRESSED.reply },
                )
              : null,
          ]),
    ]),
  );
  const more = arePlain
    ? ''
    : ', scheduled_at, topic_id, template_id, broadcast_id, attachment_count, provider_last_error';
  return `
    insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given,
      cc_given, bcc_given, reply_to_given, subject, tags, last_event, recipient_count${more})
    values ${rows.join(', ')}`;
}

function insertContents(parameters: Parameters, emails: readonly NewEmail[]): string {
  const rows = emails.map((email) =>
    parameters.tuple([
      email.tenantId,
      email.id,
      email.html,
      email.text,
      json(email.headers),
      email.raw,
      email.rawSizeBytes,
      email.blobKey,
      email.needsSmtpUtf8,
      email.signingTenantId,
      email.signingDomainId,
      email.ignoresTlsPolicy === true,
      email.envelopeFrom ?? null,
      email.mayGoUnsigned === true,
      json(email.tracking ?? null),
    ]),
  );
  return `
    insert into email_content (tenant_id, email_id, html, text, headers, raw, raw_size_bytes,
      blob_key, needs_smtp_utf8, signing_tenant_id, signing_domain_id, ignores_tls_policy,
      envelope_from, may_go_unsigned, tracking)
    values ${rows.join(', ')}`;
}

function insertTimeline(parameters: Parameters, emails: readonly NewEmail[]): string {
  const rows = emails.flatMap((email) => {
    const { tenantId, id, timelineId, createdAt } = email;
    const tell = (kind: string, withheld: readonly NewDelivery[]): readonly string[] => {
      if (withheld.length === 0) return [];
      const detail = json({ recipients: withheld.map(({ recipient }) => recipient) });
      return [parameters.tuple([tenantId, id, newId(), createdAt, kind, detail])];
    };
    return [
      parameters.tuple([tenantId, id, timelineId, createdAt, 'accepted', json(email.accepted)]),
      ...tell(
        'suppressed',
        email.deliveries.filter((one) => one.isSuppressed === true),
      ),
      ...tell(
        'unsubscribed',
        email.deliveries.filter((one) => one.isUnwanted === true),
      ),
    ];
  });
  return `
    insert into timeline (tenant_id, email_id, id, at, kind, detail) values ${rows.join(', ')}`;
}

function insertSearch(parameters: Parameters, emails: readonly NewEmail[]): string[] {
  const rows = emails
    .filter(({ searchTerms }) => searchTerms.length > 0)
    .map(({ tenantId, id, searchTerms }) => {
      const key = [parameters.one(tenantId), parameters.one(id)];
      return `(${key[0]}::uuid, ${key[1]}::uuid, array_to_tsvector(${parameters.one(searchTerms)}::text[]))`;
    });
  if (rows.length === 0) return [];
  return [`insert into email_search (tenant_id, email_id, terms) values ${rows.join(', ')}`];
}

function insertAttachments(parameters: Parameters, emails: readonly NewEmail[]): string[] {
  const files = emails.flatMap((email) =>
    email.attachments.map((file, position) => ({ email, file, position })),
  );
  if (files.length === 0) return [];
  const of = (type: string, pick: (row: (typeof files)[number]) => unknown): string =>
    parameters.column(files.map(pick), type);
  const attachments = `
    insert into attachment (tenant_id, email_id, id, position, filename, content_type, content_id,
      disposition, size_bytes, url, blob_key, raw_offset, raw_length)
    select * from unnest(${[
      of('uuid', ({ email }) => email.tenantId),
      of('uuid', ({ email }) => email.id),
      of('uuid', ({ file }) => file.id),
      of('smallint', ({ position }) => position),
      of('text', ({ file }) => file.filename),
      of('text', ({ file }) => file.contentType),
      of('text', ({ file }) => file.contentId),
      of('text', ({ file }) => file.disposition),
      of('integer', ({ file }) => file.sizeBytes),
      of('text', ({ file }) => file.url),
      of('text', ({ file }) => file.blobKey),
      of('integer', ({ file }) => file.rawOffset),
      of('integer', ({ file }) => file.rawLength),
    ].join(', ')})`;
  // Nobody left to send to: nothing to fetch.
  const fetched = emails.filter((email) => isFetchedFirst(email) && !isNobodyLeft(email));
  if (fetched.length === 0) return [attachments];
  const fetches = `
    insert into attachment_fetch (tenant_id, email_id, due_at)
    select tenant_id, email_id, coalesce(scheduled_at, now()) from unnest(${[
      parameters.column(
        fetched.map(({ tenantId }) => tenantId),
        'uuid',
      ),
      parameters.column(
        fetched.map(({ id }) => id),
        'uuid',
      ),
      parameters.column(
        fetched.map(({ scheduledAt }) => scheduledAt),
        'timestamptz',
      ),
    ].join(', ')}) as f (tenant_id, email_id, scheduled_at)`;
  return [attachments, fetches];
}

/** What webhooks are told of emails that are not on their way yet. */
function insertOutbox(parameters: Parameters, emails: readonly NewEmail[]): string[] {
  const events = emails.flatMap((email): readonly Untried[] => {
    const { tenantId, id: emailId, scheduledAt } = email;
    const isPlanned = scheduledAt !== null && !isNobodyLeft(email);
    return [
      ...(isPlanned ? [scheduled({ tenantId, emailId }, scheduledAt)] : []),
      ...email.deliveries.flatMap((delivery) => {
        const about = { tenantId, emailId, recipient: delivery.recipient };
        if (delivery.isSuppressed === true) return [suppressed(about, SUPPRESSED.reply)];
        if (delivery.isUnwanted !== true) return [];
        return [unwanted(about, { reason: UNSUBSCRIBED.cause, message: UNSUBSCRIBED.ofTopic })];
      }),
    ];
  });
  if (events.length === 0) return [];
  const columns = untriedColumns(events).map((values, index) =>
    parameters.column(values, UNTRIED_TYPES[index]!),
  );
  return [insertUntried(columns)];
}

/** As arrays: their number varies, and the database's clock sets their times. */
function insertDeliveries(
  parameters: Parameters,
  emails: readonly NewEmail[],
  arePlain: boolean,
): string {
  const deliveries = emails.flatMap((email) =>
    email.deliveries.map((delivery, position) => ({ email, delivery, position })),
  );
  const of = (type: string, pick: (row: (typeof deliveries)[number]) => unknown): string =>
    parameters.column(deliveries.map(pick), type);
  const columns = [
    of('uuid', ({ email }) => email.tenantId),
    of('uuid', ({ email }) => email.id),
    of('smallint', ({ position }) => position),
    of('text', ({ delivery }) => delivery.recipient),
    of('text', ({ delivery }) => delivery.lane),
    of('bigint', ({ email }) => email.lifetimeMs),
    of('boolean', ({ email }) => email.isBulk),
  ];
  if (arePlain) {
    return `
    insert into delivery (tenant_id, email_id, position, recipient, lane, is_bulk, state, due_at, expires_at)
    select tenant_id, email_id, position, recipient, lane, is_bulk, 'ready', now(),
      now() + lifetime_ms * interval '1 millisecond'
    from unnest(${columns.join(', ')})
      as d (tenant_id, email_id, position, recipient, lane, lifetime_ms, is_bulk)`;
  }
  columns.push(
    of('text', ({ email, delivery }) => stateOf(email, delivery)),
    of('timestamptz', ({ email }) => email.scheduledAt),
  );
  return `
    insert into delivery (tenant_id, email_id, position, recipient, lane, is_bulk, state, due_at,
      expires_at, last_cause, last_reply)
    select tenant_id, email_id, position, recipient, lane, is_bulk, state, coalesce(scheduled_at, now()),
      coalesce(scheduled_at, now()) + lifetime_ms * interval '1 millisecond',
      case state when 'suppressed' then ${parameters.one(SUPPRESSED.cause)}
        when 'failed' then ${parameters.one(UNSUBSCRIBED.cause)} end,
      case state when 'suppressed' then ${parameters.one(SUPPRESSED.reply)}
        when 'failed' then ${parameters.one(UNSUBSCRIBED.ofTopic)} end
    from unnest(${columns.join(', ')})
      as d (tenant_id, email_id, position, recipient, lane, lifetime_ms, is_bulk, state,
        scheduled_at)`;
}
