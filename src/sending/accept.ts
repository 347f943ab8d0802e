// Accepting an email: check -> author's domain -> render -> store and enqueue in one transaction. After
// it returned, the email is durable and will be delivered or its fate explained. Both doors, HTTP
// now and SMTP submission later, come through here.
import { Refusal, refuseFields } from '../access/refusal.ts';
import type { Caller } from '../access/keys.ts';
import type { DomainLookup } from '../domains/lookup.ts';
import { compose } from '../mail/compose.ts';
import { textFromHtml } from '../mail/html-text.ts';
import { enqueue, type NewEmail } from '../queue/enqueue.ts';
import type { GroupCommit } from '../queue/group-commit.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { hashRequest, takeKey, type StoredAnswer } from './idempotency.ts';
import { checkRequest, type CheckedEmail, type SendEmailRequest } from './request.ts';

export interface AcceptDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly domains: DomainLookup;
  readonly commit: GroupCommit;
  readonly now: () => Date;
  /** The lane of a recipient's domain (A-labels). */
  readonly laneOf: (domain: string) => string;
  readonly lifetimeMs: number;
  /**
   * The appliance's own domain, which signs where the author's domain is unknown; null
   * where an unknown domain is refused. Set only when nothing leaves the machine.
   */
  readonly standIn: { readonly tenantId: string; readonly domain: string } | null;
}

/** Where a request came from, for the timeline. */
export interface Origin {
  readonly via: 'http';
  readonly requestId: string;
  readonly userAgent: string | null;
  readonly address: string | null;
}

export interface Accepted extends StoredAnswer {
  readonly replayed: boolean;
}

const MESSAGE_MAX_BYTES = 60 * 1024 * 1024;
const SEND_SCOPE = '/emails';

/**
 * Accepts one email. The answer is `{object, id}`; with an idempotency key that was used for the same
 * request before, it is the first answer again. Throws a Refusal that says what to fix.
 */
export async function acceptEmail(
  d: AcceptDependencies,
  caller: Caller,
  send: {
    readonly request: SendEmailRequest;
    readonly idempotencyKey: string | null;
    readonly origin: Origin;
  },
): Promise<Accepted> {
  const checked = checkRequest(send.request);
  const email = await prepare(d, caller, {
    checked,
    origin: send.origin,
    idempotencyKey: send.idempotencyKey,
  });
  const answer = { status: 200, body: { object: 'email', id: email.id } };
  if (send.idempotencyKey === null) {
    await keepBlobUnlessRefused(d, email, () => d.commit(email));
    return { ...answer, replayed: false };
  }
  const key = {
    tenantId: caller.tenantId,
    scope: SEND_SCOPE,
    key: send.idempotencyKey,
    hash: hashRequest(meaning(checked)),
  };
  const replay = await keepBlobUnlessRefused(d, email, () =>
    d.store.transact(async (client) => {
      const stored = await takeKey(client, key, answer);
      if (stored === null) await enqueue(client, [email]);
      return stored;
    }),
  );
  if (replay !== null && email.blobKey !== null) await d.blobs.remove(email.blobKey);
  return replay === null ? { ...answer, replayed: false } : { ...replay, replayed: true };
}

/** What makes two requests the same: the fields that matter, as they were given. */
function meaning(checked: CheckedEmail): unknown {
  const given = (list: readonly { given: string }[]): string[] =>
    list.map(({ given: text }) => text);
  return {
    ...checked,
    from: checked.from.given,
    to: given(checked.to),
    cc: given(checked.cc),
    bcc: given(checked.bcc),
    replyTo: given(checked.replyTo),
    recipients: null,
  };
}

async function prepare(
  d: AcceptDependencies,
  caller: Caller,
  about: {
    readonly checked: CheckedEmail;
    readonly origin: Origin;
    readonly idempotencyKey: string | null;
  },
): Promise<NewEmail> {
  const { checked, origin } = about;
  const author = await findAuthorDomain(d, caller, checked.from.domain);
  const id = newId();
  const createdAt = d.now();
  const text = checked.text ?? (checked.html === null ? null : textFromHtml(checked.html));
  const messageId = `<${id}@${checked.from.domain}>`;
  const { raw, needsSmtpUtf8 } = compose({
    from: checked.from,
    to: checked.to,
    cc: checked.cc,
    replyTo: checked.replyTo,
    subject: checked.subject,
    text: text === '' && checked.html !== null ? null : text,
    html: checked.html,
    headers: checked.headers,
    messageId,
    date: createdAt,
    boundarySeed: id,
  });
  if (raw.length > MESSAGE_MAX_BYTES) {
    throw new Refusal(
      'request_too_large',
      `The message has ${raw.length} bytes; at most ${MESSAGE_MAX_BYTES} are allowed.`,
    );
  }
  const inline = raw.length <= INLINE_MAX_BYTES;
  const blobKey = inline ? null : newId();
  if (blobKey !== null) await d.blobs.put(blobKey, raw);
  const orNull = <T>(list: readonly T[]): readonly T[] | null => (list.length > 0 ? list : null);
  const given = (list: readonly { given: string }[]): string[] => list.map((one) => one.given);
  return {
    tenantId: caller.tenantId,
    id,
    createdAt,
    messageId,
    fromGiven: checked.from.given,
    fromDomain: checked.from.domain,
    toGiven: given(checked.to),
    ccGiven: orNull(given(checked.cc)),
    bccGiven: orNull(given(checked.bcc)),
    replyToGiven: orNull(given(checked.replyTo)),
    subject: checked.subject,
    tags: checked.tags,
    lastEvent: 'queued',
    scheduledAt: null,
    topicId: null,
    templateId: null,
    attachments: [],
    searchTerms: [],
    html: checked.html,
    text,
    headers: checked.headers.length > 0 ? Object.fromEntries(checked.headers) : null,
    raw: inline ? raw : null,
    blobKey,
    rawSizeBytes: raw.length,
    needsSmtpUtf8,
    signingTenantId: author.signingTenantId,
    signingDomainId: author.signingDomainId,
    deliveries: checked.recipients.map(({ address, domain }) => ({
      recipient: address,
      lane: d.laneOf(domain),
    })),
    lifetimeMs: d.lifetimeMs,
    timelineId: newId(),
    accepted: {
      via: origin.via,
      request_id: origin.requestId,
      api_key_id: caller.keyId,
      user_agent: origin.userAgent,
      remote_address: origin.address,
      idempotency_key: about.idempotencyKey,
      recipients: checked.recipients.length,
      size_bytes: raw.length,
      ...(author.warning === null ? {} : { warning: author.warning }),
    },
  };
}

/** Who signs for this author, or a refusal: mail from a domain that is not verified must not leave. */
async function findAuthorDomain(
  d: AcceptDependencies,
  caller: Caller,
  name: string,
): Promise<{ signingTenantId: string; signingDomainId: string; warning: string | null }> {
  const domain = await d.domains.sendingDomain(caller.tenantId, name);
  const mayUse = caller.domainId === null || caller.domainId === domain?.id;
  if (!mayUse) {
    throw refuseFields(
      [
        {
          path: 'from',
          message: `This API key may only send from its own domain, not from ${name}.`,
        },
      ],
      'domain_not_verified',
    );
  }
  const isVerified = domain?.status === 'verified' || domain?.status === 'partially_verified';
  if (domain !== null && isVerified && domain.sending) {
    return { signingTenantId: caller.tenantId, signingDomainId: domain.id, warning: null };
  }
  const standIn =
    d.standIn === null ? null : await d.domains.sendingDomain(d.standIn.tenantId, d.standIn.domain);
  if (d.standIn === null || standIn === null) {
    throw refuseFields(
      [
        {
          path: 'from',
          message: `The domain ${name} is not verified. Add and verify it before sending from it.`,
        },
      ],
      'domain_not_verified',
    );
  }
  return {
    signingTenantId: d.standIn.tenantId,
    signingDomainId: standIn.id,
    warning: `${name} is not a verified domain; outside development mode this email is refused.`,
  };
}

/**
 * Runs the write; when it was certainly refused, the email's blob goes too. After a lost connection
 * nobody knows whether the email exists, so its blob stays.
 */
async function keepBlobUnlessRefused<T>(
  d: AcceptDependencies,
  email: NewEmail,
  write: () => Promise<T>,
): Promise<T> {
  try {
    return await write();
  } catch (error) {
    if (error instanceof Refusal && email.blobKey !== null) await d.blobs.remove(email.blobKey);
    throw error;
  }
}
