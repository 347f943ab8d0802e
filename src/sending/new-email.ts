// From an email that may be sent to the rows and bytes that are stored of it: its id, Message-ID and Date are fixed
// here, once; its message is composed, and its recipients who are suppressed are marked.
import type { Caller } from '../access/keys.ts';
import { normalizedAddress, type Mailbox } from '../mail/address.ts';
import { textFromHtml } from '../mail/html-text.ts';
import { sandboxFate } from '../mail/sandbox.ts';
import type { NewDelivery, NewEmail } from '../queue/enqueue.ts';
import type { BlobStore } from '../store/blob.ts';
import type { EmailEvent } from '../store/email.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { suppressedAmong } from '../suppressions/suppressions.ts';
import type { TrackedEmail } from '../tracking/tokens.ts';
import type { TrackedHtml, TrackingPlan } from '../tracking/track-html.ts';
import type { HtmlTracker } from '../tracking/tracker.ts';
import type { AuthorDomain, CompleteEmail } from './complete.ts';
import { storeMessage, type StoredMessage } from './message.ts';
import { searchTermsOf } from './search.ts';

export interface NewEmailDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly now: () => Date;
  /** The destination of a recipient's domain for a sender (store/destination.ts); both domains in A-labels. */
  readonly laneOf: (
    domain: string,
    sender: { readonly tenantId: string; readonly domain: string },
  ) => string;
  readonly lifetimeMs: number;
  /** Absent: nothing is tracked, as in reports of our own. */
  readonly tracker?: HtmlTracker;
}

/** Where a request came from, for the timeline. */
export interface Origin {
  readonly via:
    'http' | 'smtp' | 'tls_report' | 'dsn' | 'returned' | 'forward' | 'broadcast' | 'automation';
  readonly requestId: string;
  readonly userAgent: string | null;
  readonly address: string | null;
}

/** What the rows of an email say beside its message. */
export interface NewEmailFacts {
  readonly caller: Caller;
  readonly origin: Origin;
  readonly idempotencyKey: string | null;
  /** It came with others in one request. */
  readonly isOfBatch?: boolean;
  /** Of the recipients: those that the tenant does not send to any more, normalized. */
  readonly suppressed: ReadonlySet<string>;
  /** Of the recipients: those that do not want this topic, normalized. Absent: none. */
  readonly unwanted?: ReadonlySet<string>;
  /** Where it was needed before the email was made. */
  readonly id?: string;
  /** The broadcast that it belongs to; absent: none. */
  readonly broadcastId?: string;
}

/** An email and its stored message, whichever door it came through. */
interface Composed {
  readonly id: string;
  readonly createdAt: Date;
  readonly messageId: string;
  readonly from: Mailbox;
  readonly toGiven: readonly string[];
  readonly ccGiven: readonly string[];
  readonly bccGiven: readonly string[];
  readonly replyToGiven: readonly string[];
  readonly subject: string;
  readonly html: string | null;
  readonly text: string | null;
  readonly headers: Readonly<Record<string, string>> | null;
  readonly tags: NewEmail['tags'];
  readonly scheduledAt: Date | null;
  readonly topicId: string | null;
  readonly templateId: string | null;
  readonly recipients: readonly Mailbox[];
  readonly author: AuthorDomain;
  /** One of our TLS reports. */
  readonly ignoresTlsPolicy?: boolean;
  /** Mail of others that is sent on: its MAIL FROM (null: a return path of ours), and what the timeline says of it. */
  readonly forwarding?: {
    readonly envelopeFrom: string | null;
    readonly about: Readonly<Record<string, string>>;
  };
  /** How the html in `stored` is tracked; absent: not at all. */
  readonly tracking?: Tracked | null;
  readonly stored: StoredMessage;
}

interface Tracked {
  readonly plan: TrackingPlan;
  readonly made: TrackedHtml;
}

/** Which of the recipients of all these emails are suppressed, or stand for one who is (mail/sandbox.ts). */
export async function findSuppressed(
  store: Store,
  tenantId: string,
  emails: readonly { readonly recipients: readonly Mailbox[] }[],
): Promise<ReadonlySet<string>> {
  const addresses = new Set(
    emails.flatMap(({ recipients }) => recipients.map(({ address }) => normalizedAddress(address))),
  );
  const listed = await suppressedAmong(store.pool, tenantId, [...addresses]);
  const pretended = [...addresses].filter((address) => sandboxFate(address) === 'suppressed');
  return pretended.length === 0 ? listed : new Set([...listed, ...pretended]);
}

const NOBODY: ReadonlySet<string> = new Set();

/** Suppressed wins: that is told whatever the topic is. */
function fateOf(
  address: string,
  about: Required<Pick<NewEmailFacts, 'suppressed' | 'unwanted'>>,
): Pick<NewDelivery, 'isSuppressed' | 'isUnwanted'> {
  const isSuppressed = about.suppressed.has(address);
  return { isSuppressed, isUnwanted: !isSuppressed && about.unwanted.has(address) };
}

/** Composes the email's message, stores it where it is too large for a row, and describes the rows. */
export async function makeEmail(
  d: NewEmailDependencies,
  email: CompleteEmail,
  facts: NewEmailFacts,
): Promise<NewEmail> {
  const { id = newId() } = facts;
  const createdAt = d.now();
  const messageId = `<${id}@${email.from.domain}>`;
  const text = email.text ?? (email.html === null ? null : textFromHtml(email.html));
  const { from, to, cc, bcc, replyTo, subject, html, headers, attachments } = email;
  const tracking = track(d, email, { tenantId: facts.caller.tenantId, emailId: id });
  const stored = await storeMessage(d.blobs, {
    emailId: id,
    from,
    to,
    cc,
    replyTo,
    subject,
    text: text === '' && html !== null ? null : text,
    html: tracking?.made.html ?? html,
    headers,
    messageId,
    // What was written a month before it arrives would be sorted there, or taken for spam.
    date: email.scheduledAt ?? createdAt,
    attachments,
  });
  const given = (list: readonly { given: string }[]): string[] => list.map((one) => one.given);
  return describeEmail(d, facts, {
    ...email,
    id,
    createdAt,
    messageId,
    text,
    toGiven: given(to),
    ccGiven: given(cc),
    bccGiven: given(bcc),
    replyToGiven: given(replyTo),
    headers: headers.length > 0 ? Object.fromEntries(headers) : null,
    tracking,
    stored,
  });
}

function track(
  { tracker }: NewEmailDependencies,
  { html, author }: CompleteEmail,
  of: TrackedEmail,
): Tracked | null {
  if (tracker === undefined || author.tracking === undefined || html === null) return null;
  const plan = tracker.plan(author.tracking);
  return plan === null ? null : { plan, made: tracker.apply(html, plan, of) };
}

/** The rows of an email whose message is stored. */
export function describeEmail(
  d: Pick<NewEmailDependencies, 'laneOf' | 'lifetimeMs'>,
  {
    caller,
    origin,
    idempotencyKey,
    suppressed,
    unwanted = NOBODY,
    isOfBatch = false,
    broadcastId,
  }: NewEmailFacts,
  email: Composed,
): NewEmail {
  const { from, scheduledAt, author, stored } = email;
  const orNull = <T>(list: readonly T[]): readonly T[] | null => (list.length > 0 ? list : null);
  const sender = { tenantId: caller.tenantId, domain: from.domain };
  const deliveries = email.recipients.map(({ address, domain }): NewDelivery => ({
    recipient: address,
    lane: d.laneOf(domain, sender),
    ...fateOf(normalizedAddress(address), { suppressed, unwanted }),
  }));
  const withheld = deliveries.filter(({ isSuppressed }) => isSuppressed);
  const optedOut = deliveries.filter(({ isUnwanted }) => isUnwanted);
  const lastEvent: EmailEvent =
    withheld.length + optedOut.length === deliveries.length
      ? withheld.length > 0
        ? 'suppressed'
        : 'failed'
      : scheduledAt === null
        ? 'queued'
        : 'scheduled';
  return {
    tenantId: caller.tenantId,
    id: email.id,
    createdAt: email.createdAt,
    messageId: email.messageId,
    fromGiven: from.given,
    fromDomain: from.domain,
    toGiven: email.toGiven,
    ccGiven: orNull(email.ccGiven),
    bccGiven: orNull(email.bccGiven),
    replyToGiven: orNull(email.replyToGiven),
    subject: email.subject,
    tags: email.tags,
    lastEvent,
    scheduledAt,
    topicId: email.topicId,
    templateId: email.templateId,
    broadcastId: broadcastId ?? null,
    attachments: stored.attachments,
    searchTerms: searchTermsOf({
      tenantId: caller.tenantId,
      subject: email.subject,
      fromDomain: from.domain,
      from: from.given,
      recipients: email.recipients.map(({ address }) => address),
      tags: email.tags,
      clientMessageId: origin.via === 'smtp' ? email.messageId : null,
    }),
    html: email.html,
    text: email.text,
    headers: email.headers,
    raw: stored.raw,
    blobKey: stored.blobKey,
    rawSizeBytes: stored.rawSizeBytes,
    needsSmtpUtf8: stored.needsSmtpUtf8,
    ignoresTlsPolicy: email.ignoresTlsPolicy === true,
    envelopeFrom: email.forwarding?.envelopeFrom ?? null,
    mayGoUnsigned: email.forwarding !== undefined,
    signingTenantId: author.signingTenantId,
    signingDomainId: author.signingDomainId,
    tracking: isComposedLater(stored) ? (email.tracking?.plan ?? null) : null,
    deliveries,
    isBulk: isOfBatch || deliveries.length > 1,
    lifetimeMs: d.lifetimeMs,
    timelineId: newId(),
    accepted: {
      via: origin.via,
      request_id: origin.requestId,
      // Our own mail comes with no key.
      api_key_id: caller.keyId === '' ? null : caller.keyId,
      user_agent: origin.userAgent,
      remote_address: origin.address,
      idempotency_key: idempotencyKey,
      recipients: email.recipients.length,
      size_bytes: stored.rawSizeBytes,
      ...email.forwarding?.about,
      ...(broadcastId === undefined ? {} : { broadcast_id: broadcastId }),
      ...(scheduledAt === null ? {} : { scheduled_at: scheduledAt.toISOString() }),
      ...(email.templateId === null ? {} : { template_id: email.templateId }),
      ...(stored.attachments.length === 0 ? {} : { attachments: stored.attachments.length }),
      ...(withheld.length === 0 ? {} : { suppressed: withheld.map(({ recipient }) => recipient) }),
      ...(optedOut.length === 0
        ? {}
        : { unsubscribed: optedOut.map(({ recipient }) => recipient) }),
      ...(author.warning === null ? {} : { warning: author.warning }),
      ...(email.tracking === undefined || email.tracking === null
        ? {}
        : { tracking: told(email.tracking.made) }),
    },
  };
}

const isComposedLater = ({ raw, blobKey }: StoredMessage): boolean =>
  raw === null && blobKey === null;

const told = ({ opens, links, skipped }: TrackedHtml): Readonly<Record<string, unknown>> =>
  skipped === null ? { opens, links } : { skipped };
