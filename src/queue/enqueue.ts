// Puts accepted emails into the database: email, content, deliveries and the first fact of the
// timeline, all emails of a call in one statement and so in one transaction. After it committed the
// emails are ours to deliver. It does not validate: sending/accept.ts did.
import type { Pool, PoolClient } from 'pg';
import type { EmailEvent, Tag } from '../store/email.ts';

/** A pool, or a client inside a transaction. */
export type Queryable = Pool | PoolClient;

export interface NewDelivery {
  readonly recipient: string;
  readonly lane: string;
  /** On the tenant's suppression list: no attempt is made. */
  readonly isSuppressed?: boolean;
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
  /** The domain whose keys sign. */
  readonly signingTenantId: string | null;
  readonly signingDomainId: string | null;
  /** In order of position, without repeats; at least one. */
  readonly deliveries: readonly NewDelivery[];
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
}

const json = (value: unknown): string | null => (value === null ? null : JSON.stringify(value));

/**
 * Stores the emails and their deliveries, ready to be claimed at once. One statement: all of them or
 * none. Throws what Postgres says; a key that exists already is a bug of the caller.
 */
export async function enqueue(db: Queryable, emails: readonly NewEmail[]): Promise<void> {
  if (emails.length === 0) return;
  const parameters = new Parameters();
  const emailRows = emails.map((email) =>
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
      email.lastEvent,
      email.deliveries.length,
    ]),
  );
  const contentRows = emails.map((email) =>
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
    ]),
  );
  const timelineRows = emails.map((email) =>
    parameters.tuple([
      email.tenantId,
      email.id,
      email.timelineId,
      email.createdAt,
      'accepted',
      json(email.accepted),
    ]),
  );
  // Deliveries come as arrays: their number varies, and the database's clock sets their times.
  const deliveries = emails.flatMap((email) =>
    email.deliveries.map((delivery, position) => ({ email, delivery, position })),
  );
  const column = (values: readonly unknown[], type: string): string => {
    parameters.values.push(values);
    return `$${parameters.values.length}::${type}[]`;
  };
  const deliveryColumns = [
    column(
      deliveries.map(({ email }) => email.tenantId),
      'uuid',
    ),
    column(
      deliveries.map(({ email }) => email.id),
      'uuid',
    ),
    column(
      deliveries.map(({ position }) => position),
      'smallint',
    ),
    column(
      deliveries.map(({ delivery }) => delivery.recipient),
      'text',
    ),
    column(
      deliveries.map(({ delivery }) => delivery.lane),
      'text',
    ),
    column(
      deliveries.map(({ email }) => email.lifetimeMs),
      'bigint',
    ),
  ];
  const text = `
    with new_email as (
      insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given,
        cc_given, bcc_given, reply_to_given, subject, tags, last_event, recipient_count)
      values ${emailRows.join(', ')}
    ), new_content as (
      insert into email_content (tenant_id, email_id, html, text, headers, raw, raw_size_bytes,
        blob_key, needs_smtp_utf8, signing_tenant_id, signing_domain_id)
      values ${contentRows.join(', ')}
    ), new_timeline as (
      insert into timeline (tenant_id, email_id, id, at, kind, detail)
      values ${timelineRows.join(', ')}
    )
    insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at)
    select tenant_id, email_id, position, recipient, lane, 'ready', now(),
      now() + lifetime_ms * interval '1 millisecond'
    from unnest(${deliveryColumns.join(', ')})
      as d (tenant_id, email_id, position, recipient, lane, lifetime_ms)`;
  // A prepared statement for each number of emails that group commits make again and again.
  const name = emails.length <= 8 ? { name: `enqueue-${emails.length}` } : {};
  await db.query({ ...name, text, values: parameters.values });
}
