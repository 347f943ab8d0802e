// One batch of a broadcast: the next contacts of its segment, who of them is left out, an email for each of the others.
// All in one transaction with the place where the next batch begins, so whatever is killed in between, nobody is missed and
// nobody gets it twice. Whoever opts out while a batch is under way is found when the delivery is claimed
// (queue/withhold.ts), so contacts need no lock here, and nobody who unsubscribes waits for a batch.
import type { PoolClient } from 'pg';
import type { Caller } from '../access/keys.ts';
import { fillBroadcast } from '../audience/broadcast-text.ts';
import type { PreferenceLinks } from '../audience/preference-links.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import { sandboxFate } from '../mail/sandbox.ts';
import { enqueue, GROUP_SIZES, type NewEmail } from '../queue/enqueue.ts';
import type { LeftOutReason } from '../store/broadcast.ts';
import type { PropertyValue } from '../store/contact.ts';
import { LOWEST_ID, newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { suppressedAmong } from '../suppressions/suppressions.ts';
import type { AuthorDomain } from './complete.ts';
import type { FanOutPlan, Queued } from './fan-out-plan.ts';
import { makeEmail, type NewEmailDependencies } from './new-email.ts';
import { optOutHeaders } from './opt-out.ts';
import { removeBlobs } from './store-emails.ts';

export interface BatchDependencies extends NewEmailDependencies {
  readonly preferenceLinks: PreferenceLinks;
}

/** What one batch did. */
export interface BatchDone {
  readonly emails: number;
  /** That was the last one. */
  readonly isOver: boolean;
}

/** Contacts that one batch looks at. */
export const BATCH_MAX = 256;
/** A batch ends early when its messages are large or the machine is slow: others want their turn. */
const BATCH_MAX_MS = 300;
const BATCH_MAX_BYTES = 8 * 1024 * 1024;
/** Emails made between two looks at what else there is to do in this process. */
const MADE_AT_ONCE = 8;
/** Of one statement: its size is prepared (queue/enqueue.ts), and its messages fit into memory. */
const GROUP_MAX = Math.max(...GROUP_SIZES);
const GROUP_MAX_BYTES = 2 * 1024 * 1024;
/** Invalid data, a broken constraint, a limit of Postgres's: about what was to be written. */
const REFUSED = /^(?:22|23|54)/;
/** SQLSTATE of `nowait`. */
const LOCK_NOT_AVAILABLE = '55P03';

/** The segment or the topic of a broadcast is gone. */
export class BroadcastBroken extends Error {
  override name = 'BroadcastBroken';
}

/** An email that cannot be made, for what is known of its contact and not for want of a disk or a database. */
export class Uncomposable extends Error {
  override name = 'Uncomposable';
}

interface LockedRow {
  readonly segment_id: string;
  readonly topic_id: string | null;
  readonly cursor_id: string | null;
  readonly api_key_id: string | null;
  /** Null: it is gone. Like the topic it stays until the batch is stored, with all memberships and choices. */
  readonly has_segment: true | null;
  /** Null: it has no topic, or the topic is gone. */
  readonly topic_default: 'opt_in' | 'opt_out' | null;
}

interface ContactRow {
  readonly id: string;
  readonly email: string;
  readonly address: string;
  readonly first_name: string | null;
  readonly last_name: string | null;
  /** By the ids of properties. */
  readonly properties: Readonly<Record<string, PropertyValue>> | string;
  readonly is_unwanted: boolean;
}

interface Batch {
  readonly client: PoolClient;
  readonly queued: Queued;
  readonly row: LockedRow;
  readonly plan: FanOutPlan;
  readonly author: AuthorDomain;
  /** Each email alone, so that one which cannot be made or stored is found and passed over. */
  readonly isCareful: boolean;
  /** Of what was made, for whoever has to remove its blobs. */
  readonly withBlobs: NewEmail[];
}

/**
 * Runs in the caller's transaction; null: another process has it, or it is being sent no more. `withBlobs` collects the
 * emails whose blobs are to be removed when the transaction is rolled back (`removeBatchBlobs`). Throws BroadcastBroken
 * when it cannot be sent any further, and what `isLocked` knows while its segment or topic is being deleted: that may
 * take as long as it has members, and other tenants do not wait for it.
 */
export async function runBatch(
  d: BatchDependencies,
  about: Omit<Batch, 'row'>,
): Promise<BatchDone | null> {
  const { client, queued } = about;
  const startedAt = performance.now();
  const { rows } = await client.query<LockedRow>({
    name: 'take-broadcast',
    text: `select b.segment_id, b.topic_id, b.cursor_id, b.api_key_id,
        (select true from segment s where s.tenant_id = $1 and s.id = b.segment_id for key share nowait) as has_segment,
        (select t.default_subscription from topic t where t.tenant_id = $1 and t.id = b.topic_id for key share nowait)
          as topic_default
      from broadcast b
      where b.tenant_id = $1 and b.id = $2 and b.status = 'queued'
        and (extract(epoch from b.queued_at) * 1000)::bigint = $3::bigint
      for update skip locked`,
    values: [queued.tenantId, queued.id, queued.queuedMs],
  });
  const [row] = rows;
  if (row === undefined) return null;
  if (row.has_segment === null) throw new BroadcastBroken('Its segment was deleted.');
  if (row.topic_id !== null && row.topic_default === null) {
    throw new BroadcastBroken('Its topic was deleted.');
  }
  const batch: Batch = { ...about, row };
  const contacts = await readContacts(batch);
  const addresses = contacts.map(({ address }) => address);
  const suppressed = await suppressedAmong(client, queued.tenantId, addresses);
  const reachedBefore = await findReached(batch, addresses);

  const reached: Reached[] = [];
  let group: Made[] = [];
  let groupBytes = 0;
  let batchBytes = 0;
  let writing: Promise<unknown> = Promise.resolve();
  /** While Postgres writes one group, the next is made. */
  const flush = async (): Promise<void> => {
    await writing;
    const full = group;
    group = [];
    groupBytes = 0;
    writing = write(batch, full, reached);
    writing.catch(() => undefined); // it is awaited later
  };
  let taken = 0;
  for (const contact of contacts) {
    taken += 1;
    const { id: contactId, address } = contact;
    if (reachedBefore.has(address)) continue;
    const left: LeftOutReason | null = contact.is_unwanted
      ? 'unsubscribed'
      : suppressed.has(address) || sandboxFate(address) === 'suppressed'
        ? 'suppressed'
        : null;
    const email = left === null ? await tryCompose(d, batch, contact) : null;
    if (email === null) {
      reached.push({ contactId, address, emailId: null, leftOut: left ?? 'failed' });
      continue;
    }
    group.push({ contactId, address, email });
    // Only those: what is in the rows should be free as soon as it is written.
    if (email.blobKey !== null) batch.withBlobs.push(email);
    if (group.length % MADE_AT_ONCE === 0) await othersFirst();
    groupBytes += email.rawSizeBytes;
    batchBytes += email.rawSizeBytes;
    if (group.length < GROUP_MAX && groupBytes < GROUP_MAX_BYTES) continue;
    await flush();
    if (batchBytes > BATCH_MAX_BYTES || performance.now() - startedAt > BATCH_MAX_MS) break;
  }
  await flush();
  await writing;
  const isOver = taken === contacts.length && contacts.length < BATCH_MAX;
  await moveOn(batch, reached, {
    cursorId: contacts[taken - 1]?.id ?? row.cursor_id,
    isOver,
  });
  return { emails: reached.filter(({ emailId }) => emailId !== null).length, isOver };
}

/** Requests that have arrived are answered before it goes on. */
const othersFirst = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** After a batch was rolled back. */
export const removeBatchBlobs = (d: BatchDependencies, made: readonly NewEmail[]): Promise<void> =>
  removeBlobs(d.blobs, made);

export const isRefused = (error: unknown): boolean =>
  REFUSED.test(String((error as { code?: string }).code));

export const isLocked = (error: unknown): boolean =>
  (error as { code?: string }).code === LOCK_NOT_AVAILABLE;

/** The next contacts of the segment, and whether they want this. */
async function readContacts({ client, queued, row }: Batch): Promise<readonly ContactRow[]> {
  const { rows } = await client.query<ContactRow>({
    name: 'broadcast-contacts',
    text: `select c.id, c.email, c.address, c.first_name, c.last_name, c.properties,
        c.unsubscribed or coalesce(ct.subscription, $5::text, 'opt_in') = 'opt_out' as is_unwanted
      from segment_contact sc
      join contact c on c.tenant_id = sc.tenant_id and c.id = sc.contact_id
      left join contact_topic ct
        on ct.tenant_id = sc.tenant_id and ct.contact_id = sc.contact_id and ct.topic_id = $4
      where sc.tenant_id = $1 and sc.segment_id = $2 and sc.contact_id > $3
      order by sc.contact_id limit ${BATCH_MAX}`,
    values: [
      queued.tenantId,
      row.segment_id,
      row.cursor_id ?? LOWEST_ID,
      row.topic_id,
      row.topic_default,
    ],
  });
  return rows;
}

/**
 * Which of the addresses have their email already: of contacts that were removed since, and made again with the same
 * address and a later id.
 */
async function findReached(
  { client, queued, row }: Batch,
  addresses: readonly string[],
): Promise<ReadonlySet<string>> {
  if (row.cursor_id === null) return new Set();
  const { rows } = await client.query<{ address: string }>({
    name: 'broadcast-reached-before',
    // One by one: as a list, an empty table's statistics make a walk over all recipients of it.
    text: `select a.address from unnest($3::text[]) as a (address)
      cross join lateral (select 1 from broadcast_recipient r
        where r.tenant_id = $1 and r.broadcast_id = $2 and r.address = a.address and r.email_id is not null
        limit 1) k`,
    values: [queued.tenantId, queued.id, addresses],
  });
  return new Set(rows.map(({ address }) => address));
}

interface Made {
  readonly contactId: string;
  readonly address: string;
  readonly email: NewEmail;
}

/** A row of broadcast_recipient. */
interface Reached {
  readonly contactId: string;
  readonly address: string;
  readonly emailId: string | null;
  readonly leftOut: LeftOutReason | null;
}

/** As `compose`; whoever is careful passes over what cannot be made. Throws Uncomposable, and what is no fault of the email. */
async function tryCompose(
  d: BatchDependencies,
  batch: Batch,
  contact: ContactRow,
): Promise<NewEmail | null> {
  try {
    return await compose(d, batch, contact);
  } catch (error) {
    const isOfDisk = typeof (error as { syscall?: unknown }).syscall === 'string';
    if (isOfDisk || isDatabaseUnavailable(error)) throw error;
    if (batch.isCareful) return null;
    throw new Uncomposable('an email of a broadcast cannot be made', { cause: error });
  }
}

/** The email for this contact, composed; null when none can be made of what is known of it. */
async function compose(
  d: BatchDependencies,
  { queued, row, plan, author }: Batch,
  contact: ContactRow,
): Promise<NewEmail | null> {
  const { tenantId, id: broadcastId } = queued;
  const to = parseMailbox(contact.email);
  if (!to.ok || normalizedAddress(to.mailbox.address) !== contact.address) return null;
  const id = newId();
  const topicId = row.topic_id;
  const preferenceUrl = d.preferenceLinks.url({
    tenantId,
    contactId: contact.id,
    topicId,
    broadcastId,
    emailId: id,
  });
  const values = fromJson(contact.properties);
  const filled = fillBroadcast(plan.parsed, {
    email: to.mailbox.address,
    firstName: contact.first_name,
    lastName: contact.last_name,
    preferenceUrl,
    propertyOf(key) {
      const property = plan.properties.get(key);
      return property !== undefined && Object.hasOwn(values, property.id)
        ? values[property.id]!
        : null;
    },
    fallbackOf: (key) => plan.properties.get(key)?.fallback ?? null,
  });
  if (filled === null) return null;
  const caller: Caller = {
    tenantId,
    keyId: row.api_key_id ?? '',
    permission: 'full_access',
    domainId: null,
  };
  const recipient: Mailbox = { ...to.mailbox, name: null, given: contact.email };
  return makeEmail(
    d,
    {
      ...filled,
      ...NOTHING_MORE,
      from: plan.from,
      to: [recipient],
      replyTo: plan.replyTo,
      recipients: [recipient],
      headers: optOutHeaders(preferenceUrl),
      topicId,
      author,
    },
    {
      caller,
      id,
      broadcastId,
      origin: { via: 'broadcast', requestId: broadcastId, userAgent: null, address: null },
      idempotencyKey: null,
      isOfBatch: true,
      suppressed: NOBODY,
    },
  );
}

const NOBODY: ReadonlySet<string> = new Set();

/** What an email can have and a broadcast has not. */
const NOTHING_MORE = {
  cc: [],
  bcc: [],
  tags: null,
  attachments: [],
  scheduledGiven: null,
  scheduledAt: null,
  template: null,
  templateId: null,
} as const;

/** Stores a group and says whom it reached. */
async function write(
  { client, isCareful }: Batch,
  group: readonly Made[],
  reached: Reached[],
): Promise<void> {
  const say = ({ contactId, address, email }: Made, isStored: boolean): void => {
    const emailId = isStored ? email.id : null;
    reached.push({ contactId, address, emailId, leftOut: isStored ? null : 'failed' });
  };
  if (!isCareful) {
    await enqueue(
      client,
      group.map(({ email }) => email),
    );
    for (const one of group) say(one, true);
    return;
  }
  for (const one of group) {
    await client.query('savepoint one_email');
    try {
      await enqueue(client, [one.email]);
      say(one, true);
    } catch (error) {
      if (!isRefused(error)) throw error;
      await client.query('rollback to savepoint one_email');
      say(one, false);
    }
    await client.query('release savepoint one_email');
  }
}

/** Notes whom the batch reached, and where the next one begins. */
async function moveOn(
  { client, queued }: Batch,
  reached: readonly Reached[],
  to: { readonly cursorId: string | null; readonly isOver: boolean },
): Promise<void> {
  await client.query({
    name: 'broadcast-reached',
    text: `with reached as (
        insert into broadcast_recipient (tenant_id, broadcast_id, contact_id, address, email_id, left_out)
        select $1, $2, r.* from unnest($3::uuid[], $4::text[], $5::uuid[], $6::text[])
          as r (contact_id, address, email_id, left_out)
      )
      update broadcast
      set cursor_id = $7, recipients = recipients + $8, left_out = left_out + $9, next_turn_at = clock_timestamp(),
        status = case when $10 then 'sent' else status end, sent_at = case when $10 then clock_timestamp() end
      where tenant_id = $1 and id = $2`,
    values: [
      queued.tenantId,
      queued.id,
      reached.map(({ contactId }) => contactId),
      reached.map(({ address }) => address),
      reached.map(({ emailId }) => emailId),
      reached.map(({ leftOut }) => leftOut),
      to.cursorId,
      reached.filter(({ emailId }) => emailId !== null).length,
      reached.filter(({ emailId }) => emailId === null).length,
      to.isOver,
    ],
  });
}
