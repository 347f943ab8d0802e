// Takes a message that an SMTP client hands over: decides at RCPT whose it is, and at the final dot stores
// it once for every tenant that it is for, before it is acknowledged. No tenant sees another's recipients.
// A message that cannot be read at once is stored all the same, and read later (late-reader.ts).
import type { Pool, PoolClient } from 'pg';
import { normalizedAddress, parseDomain } from '../mail/address.ts';
import type { ParsedMessage } from '../mail/parse.ts';
import type { Parser } from '../mail/parse-aside.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { RouteDecision } from '../store/received-email.ts';
import { contentColumns, shownColumns } from './shown.ts';

/** The receiving domain of an envelope recipient. */
export interface Receiver {
  readonly tenantId: string;
  readonly domainId: string;
  /** As the client wrote it. */
  readonly recipient: string;
}

export interface IncomingMessage {
  /** Empty for the null sender. */
  readonly mailFrom: string;
  readonly receivers: readonly Receiver[];
  /** The bytes as they came, with our trace fields on top. */
  readonly raw: Buffer;
  readonly receivedAt: Date;
}

/** Who takes mail for this address: a verified domain with receiving on. Null: nobody here does. */
export async function findReceiver(pool: Pool, address: string): Promise<Receiver | null> {
  const at = address.lastIndexOf('@');
  const domain = at === -1 ? null : parseDomain(address.slice(at + 1));
  if (domain === null || !domain.ok) return null;
  const { rows } = await pool.query<{ tenant_id: string; id: string }>({
    name: 'find-receiver',
    text: `select tenant_id, id from sending_domain
      where name = $1 and receiving and receiving_verified order by created_at limit 1`,
    values: [domain.domain],
  });
  const [row] = rows;
  return row === undefined
    ? null
    : { tenantId: row.tenant_id, domainId: row.id, recipient: address };
}

/**
 * Who reads what is for the postmaster of this host (RFC 5321 §4.5.1): the owner of the receiving domain that the
 * host has its name from, the longest first, or of `homeDomain`. Null: nobody.
 */
export async function findPostmaster(
  pool: Pool,
  host: { readonly hostname: string; readonly homeDomain: string | null },
): Promise<Receiver | null> {
  const ends = host.hostname.split('.').map((_, at, labels) => labels.slice(at).join('.'));
  for (const domain of host.homeDomain === null ? ends : [...ends, host.homeDomain]) {
    const receiver = await findReceiver(pool, `${POSTMASTER}@${domain}`);
    if (receiver !== null) return receiver;
  }
  return null;
}

const POSTMASTER = 'postmaster';

export interface Receiving {
  readonly store: Store;
  readonly blobs: BlobStore;
  /** Null after a second or two: the client and those behind it wait for this. */
  readonly parse: Parser;
  /** A message was stored that has not been read. */
  readonly onUnread: () => void;
}

/** Stores the message for every tenant that it is for; its ids. Durable once it resolves. */
export async function receive(d: Receiving, message: IncomingMessage): Promise<readonly string[]> {
  const parsed = await d.parse(message.raw);
  const byTenant = Map.groupBy(message.receivers, ({ tenantId }) => tenantId);
  const copies = [...byTenant].map(([tenantId, receivers]): Copy => ({
    tenantId,
    receivers,
    id: newId(),
    blobKey: message.raw.length <= INLINE_MAX_BYTES ? null : newId(),
  }));
  // Until the commit is asked for, nothing can be stored; after a lost commit nobody knows, so the blobs stay.
  let isCertainlyLost = true;
  try {
    for (const { blobKey } of copies) if (blobKey !== null) await d.blobs.put(blobKey, message.raw);
    await d.store.transact(async (client) => {
      for (const copy of copies) await insert(client, copy, { message, parsed });
      isCertainlyLost = false;
    });
  } catch (error) {
    const keys = isCertainlyLost ? copies.flatMap(({ blobKey }) => blobKey ?? []) : [];
    await Promise.allSettled(keys.map((key) => d.blobs.remove(key)));
    throw error;
  }
  if (parsed === null) d.onUnread();
  return copies.map(({ id }) => id);
}

/** What one tenant gets of a message. */
interface Copy {
  readonly tenantId: string;
  readonly receivers: readonly Receiver[];
  readonly id: string;
  readonly blobKey: string | null;
}

async function insert(
  client: PoolClient,
  copy: Copy,
  { message, parsed }: { readonly message: IncomingMessage; readonly parsed: ParsedMessage | null },
): Promise<void> {
  await client.query(
    `insert into received_email (tenant_id, id, created_at, mail_from, received_for,
       route_decisions, is_read, from_shown, to_shown, cc_shown, bcc_shown, reply_to_shown,
       subject, message_id, attachments)
     values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`,
    [
      copy.tenantId,
      copy.id,
      message.receivedAt,
      message.mailFrom,
      JSON.stringify(distinct(copy.receivers).map(({ recipient }) => recipient)),
      JSON.stringify(distinct(copy.receivers).map(decide)),
      parsed !== null,
      ...shownColumns(parsed),
    ],
  );
  await client.query(
    `insert into received_content (tenant_id, email_id, html, text, headers, raw, blob_key,
       raw_size_bytes)
     values ($1, $2, $3, $4, $5, $6, $7, $8)`,
    [
      copy.tenantId,
      copy.id,
      ...contentColumns(parsed),
      copy.blobKey === null ? message.raw : null,
      copy.blobKey,
      message.raw.length,
    ],
  );
}

function distinct(receivers: readonly Receiver[]): readonly Receiver[] {
  const keyed = receivers.map((one) => [normalizedAddress(one.recipient), one] as const);
  return [...new Map(keyed).values()];
}

/** A domain without routes takes every local part, and no route decides about it. */
const decide = ({ recipient, domainId }: Receiver): RouteDecision => ({
  recipient,
  status: 'unrouteable',
  route_id: null,
  route_type: null,
  local_part: null,
  domain_id: domainId,
  target_address: null,
  forwarding_rule_id: null,
});
