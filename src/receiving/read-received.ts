// Reads back what arrived for a tenant: the list, one message, its files and its bytes.
import type { Caller } from '../access/keys.ts';
import {
  checkPage,
  pageOf,
  refuseCursor,
  toPage,
  type PageRequest,
  orderOf,
  rangeOf,
} from '../access/page.ts';
import { refuseFields } from '../access/refusal.ts';
import { parseAside } from '../mail/parse-aside.ts';
import { checkEmailFilters, NO_FILTERS } from '../sending/search.ts';
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';
import {
  ReceivedContent,
  ReceivedEmail,
  type ReceivedAttachment,
} from '../store/received-email.ts';
import { ForwardingAttempt } from '../store/receiving-route.ts';
import { isUuid } from '../store/id.ts';

export type ReceivedSummary = InstanceType<typeof ReceivedEmail.class>;
export type ReceivedRecord = ReceivedSummary & {
  readonly content: Pick<
    InstanceType<typeof ReceivedContent.class>,
    'html' | 'text' | 'headers' | 'rawSizeBytes'
  >;
  /** Newest last, and of many the newest. */
  readonly forwardingAttempts: readonly ForwardingRecord[];
};
export type ForwardingRecord = InstanceType<typeof ForwardingAttempt.class>;

/** As the query of a list has them; an undefined one is not there. */
export interface ReceivedFilters {
  readonly startDate: string | undefined;
  readonly endDate: string | undefined;
  /** The id of a sent email: its replies. */
  readonly answersEmailId: string | undefined;
}

export interface ReceivedDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
}

export interface ReceivedPage<T> {
  readonly items: readonly T[];
  readonly hasMore: boolean;
}

/** What the API can do with received emails. */
export interface ReceivingVerbs {
  list(
    caller: Caller,
    page: PageRequest,
    filters: ReceivedFilters,
  ): Promise<ReceivedPage<ReceivedSummary>>;
  find(caller: Caller, id: string): Promise<ReceivedRecord | null>;
  inlineImages(caller: Caller, email: ReceivedRecord): Promise<string | null>;
  attachmentsOf(email: ReceivedRecord, page: PageRequest): ReceivedPage<ReceivedAttachment>;
}

export function createReceivingVerbs(d: ReceivedDependencies): ReceivingVerbs {
  return {
    list: (caller, page, filters) => listReceived(d.store, caller.tenantId, { page, filters }),
    find: (caller, id) => findReceived(d.store, caller.tenantId, id),
    inlineImages: (caller, email) => inlineImages(d, caller.tenantId, email),
    attachmentsOf: (email, page) => pageOf(email.attachments, page),
  };
}

/** Of the images that one message shows inline, as data URIs. */
const INLINED_MAX_BYTES = 20 * 1024 * 1024;
/** A message may be forwarded again and again; older ones are found at the rule. */
const ATTEMPTS_SHOWN_MAX = 100;

/** A page of what arrived, newest first. */
async function listReceived(
  store: Store,
  tenantId: string,
  { page, filters }: { readonly page: PageRequest; readonly filters: ReceivedFilters },
): Promise<ReceivedPage<ReceivedSummary>> {
  const cursor = checkPage(page);
  const wanted = checkFilters(tenantId, filters);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  if (at !== null && (await em.count(ReceivedEmail, { tenantId, id: at })) === 0) {
    refuseCursor(cursor);
  }
  const rows = await em.find(
    ReceivedEmail,
    { $and: [{ tenantId, ...rangeOf(cursor) }, ...wanted] },
    orderOf(cursor),
  );
  return toPage(rows, cursor);
}

/** Ids sort by time, so a range of dates is a range of the key. Throws a Refusal. */
function checkFilters(tenantId: string, { answersEmailId, ...dates }: ReceivedFilters) {
  const { fromId, toId } = checkEmailFilters(tenantId, { ...NO_FILTERS, ...dates });
  if (answersEmailId !== undefined && !isUuid(answersEmailId)) {
    const message = '`answers_email_id` must be the id of an email that was sent.';
    throw refuseFields([{ path: 'answers_email_id', message }]);
  }
  return [
    ...(fromId === null ? [] : [{ id: { $gte: fromId } }]),
    ...(toId === null ? [] : [{ id: { $lt: toId } }]),
    ...(answersEmailId === undefined ? [] : [{ answersEmailId }]),
  ];
}

/** Retention took it away. */
const REMOVED: ReceivedRecord['content'] = {
  html: null,
  text: null,
  headers: null,
  rawSizeBytes: 0,
};

/** The tenant's received email, or null: missing and foreign are the same. */
export async function findReceived(
  store: Store,
  tenantId: string,
  id: string,
): Promise<ReceivedRecord | null> {
  const em = store.em();
  const email = await em.findOne(ReceivedEmail, { tenantId, id });
  if (email === null) return null;
  const content =
    (await em.findOne(ReceivedContent, { tenantId, emailId: id }, { exclude: ['raw'] })) ?? REMOVED;
  const newest = await em.find(
    ForwardingAttempt,
    { tenantId, receivedEmailId: id },
    { orderBy: { id: 'desc' }, limit: ATTEMPTS_SHOWN_MAX },
  );
  return Object.assign(email, { content, forwardingAttempts: newest.toReversed() });
}

/** The bytes as they came, with our trace fields on top; null: no such email, or they are gone. */
export async function readReceivedRaw(
  d: ReceivedDependencies,
  tenantId: string,
  id: string,
): Promise<Buffer | null> {
  const content = await d.store.em().findOne(ReceivedContent, { tenantId, emailId: id });
  if (content === null) return null;
  if (content.raw) return Buffer.from(content.raw);
  return content.blobKey ? d.blobs.get(content.blobKey) : null;
}

/** A file of the received email with its bytes, or null. */
export async function readReceivedAttachment(
  d: ReceivedDependencies,
  tenantId: string,
  at: { readonly emailId: string; readonly attachmentId: string },
): Promise<{ readonly about: ReceivedAttachment; readonly content: Buffer } | null> {
  const email = await d.store.em().findOne(ReceivedEmail, { tenantId, id: at.emailId });
  const position = email?.attachments.findIndex(({ id }) => id === at.attachmentId) ?? -1;
  if (email === null || position === -1) return null;
  const raw = await readReceivedRaw(d, tenantId, at.emailId);
  const part = raw === null ? undefined : (await parseAside(raw))?.attachments[position];
  return part === undefined ? null : { about: email.attachments[position]!, content: part.content };
}

/** The HTML with the images of the message inside it, so that it shows without any further request. */
async function inlineImages(
  d: ReceivedDependencies,
  tenantId: string,
  email: ReceivedRecord,
): Promise<string | null> {
  const html = email.content.html ?? null;
  if (html === null || !/\bcid:/.test(html)) return html;
  const raw = await readReceivedRaw(d, tenantId, email.id);
  const parts = (raw === null ? null : await parseAside(raw))?.attachments ?? [];
  const images = new Map(
    parts
      .filter(({ contentId, contentType }) => contentId !== null && /^image\/\w+/.test(contentType))
      .map((part) => [part.contentId!, part]),
  );
  let inlinedBytes = 0;
  return html.replace(/\bcid:([^'"\s>)]{1,256})/g, (link, id: string) => {
    const image = images.get(id) ?? images.get(unescaped(id));
    if (image === undefined) return link;
    inlinedBytes += image.content.length;
    if (inlinedBytes > INLINED_MAX_BYTES) return link;
    return `data:${image.contentType};base64,${image.content.toString('base64')}`;
  });
}

/** RFC 2392 §2: a link writes the id as a URL does. What is no such writing stays as it is. */
function unescaped(id: string): string {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}
