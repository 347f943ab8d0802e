// Claims due deliveries for one worker run: fair over tenants and destinations, in batches, each row locked past
// others' locks, at a cost that does not follow the length of the queue. In the same statement the attempt is
// stored and the email becomes `sent`, so whatever happens after the claim, the database already knows that an
// attempt began and by whom.
import { LOWEST_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { firstAttemptDelay } from '../telemetry/instruments.ts';
import { CLAIM } from './claim-statement.ts';
import { tellSent, type Begun } from './told.ts';
import { flagSecondCopies, withholdUnsendable, type Offer } from './withhold.ts';

export interface ClaimedDelivery {
  readonly tenantId: string;
  readonly emailId: string;
  readonly position: number;
  readonly recipient: string;
  readonly lane: string;
  /** The number of the attempt that this claim begins; 1 for the first. */
  readonly attempt: number;
  readonly isBulk: boolean;
  /** How many of the attempts before were the lane's fault. */
  readonly laneFaults: number;
  /** How often the answer to its final dot was lost: above 0, this attempt may make a second copy. */
  readonly unknowns: number;
  readonly createdAt: Date;
  /** When it was accepted, or its scheduled time, as `Date.now()` tells it; absent: unknown. */
  readonly plannedMs?: number;
  readonly recipientCount: number;
  /** Null when the message lies in the blob store. */
  readonly raw: Buffer | null;
  readonly rawSizeBytes: number;
  readonly blobKey: string | null;
  readonly needsSmtpUtf8: boolean;
  readonly signingTenantId: string | null;
  readonly signingDomainId: string | null;
  /** Where bounces of this email come home; null where no domain of ours is behind `from`. */
  readonly fromDomain: string;
  /** One of our TLS reports: it goes out whatever MTA-STS and DANE say (RFC 8689 §3). */
  readonly ignoresTlsPolicy: boolean;
  /** MAIL FROM, empty for the null sender; null: a return path of ours. */
  readonly envelopeFrom: string | null;
  /** A signature of ours is added where it can be made, and not waited for. */
  readonly mayGoUnsigned: boolean;
}

interface ClaimRow {
  /** Which of the tenant's destinations it was, in the order of the visit. */
  number: string;
  /** What its tenant could have in this look. */
  share: number;
  tenant_id: string;
  email_id: string;
  position: number;
  recipient: string;
  lane: string;
  attempts: number;
  is_bulk: boolean;
  lane_faults: number;
  unknowns: number;
  interruptions: number;
  is_hooked: boolean;
  planned_ms: string;
  created_ms: string;
  recipient_count: number;
  topic_id: string | null;
  broadcast_id: string | null;
  raw: Buffer | null;
  raw_size_bytes: number;
  blob_key: string | null;
  needs_smtp_utf8: boolean;
  signing_tenant_id: string | null;
  signing_domain_id: string | null;
  from_domain: string;
  ignores_tls_policy: boolean;
  envelope_from: string | null;
  may_go_unsigned: boolean;
}

/** Where a look stopped before it had seen everything: at a destination, or (none) at a tenant. */
interface StopRow {
  number: string;
  tenant_id: string;
  email_id: null;
  lane: string | null;
  is_bulk: boolean | null;
}

export interface ClaimOptions {
  /** The worker run that claims. */
  readonly epoch: string;
  /** At most 1,000. */
  readonly max: number;
  /** One tenant's share of a claim. */
  readonly perTenant: number;
  /** Destinations (the words of store/destination.ts) that nothing is claimed for. */
  readonly exceptLanes: readonly string[];
  readonly exceptTenants: readonly string[];
  /** How many more a destination can take; one that is not named takes `roomOfOthers`. */
  readonly rooms: ReadonlyMap<string, number>;
  readonly roomOfOthers: number;
  /** As the last claim gave them; empty at first. */
  readonly cursors: ClaimCursors;
}

/** Where the next claim goes on. */
export interface ClaimCursors {
  /** Behind this tenant. */
  readonly tenant?: string;
  /** By tenant, behind these destinations: of mail for one recipient, and of bulk. */
  readonly lanes?: Readonly<Record<string, Stops>>;
}
type Stops = readonly [single: string | null, bulk: string | null];

export interface Claimed {
  readonly deliveries: readonly ClaimedDelivery[];
  readonly cursors: ClaimCursors;
  /** It stopped before it had looked everywhere: when nothing was found, the next claim may find something. */
  readonly hasMore: boolean;
}

/** Above this the places where claims stopped are forgotten, the oldest first. */
const CURSORS_MAX = 1_000;
/** Looks at other tenants and destinations while nothing was found. */
const LOOKS_MAX = 4;
/** Mail of the tenants that have the most fills what others left, where they left more than this share. */
const REST_MIN = 0.5;

/**
 * Claims at most `max` due deliveries for the worker run `epoch`: every tenant gets the same share, and what some do
 * not use goes to the others, up to `perTenant`. Of a tenant's mail that for one recipient goes first; of bulk
 * mail that waits beside it one in four goes along. Of one destination no more than its room, all
 * tenants together. What was claimed for an address that is suppressed or opted out by now ends here and is not in the list;
 * of the rest webhooks are told `email.sent`.
 */
export async function claim(store: Store, options: ClaimOptions): Promise<Claimed> {
  let look = await lookFor(store, options, { only: null, max: options.max });
  for (let looks = 1; look.rows.length === 0 && look.hasMore && looks < LOOKS_MAX; looks++) {
    const { cursors } = look;
    look = await lookFor(store, { ...options, cursors }, { only: null, max: options.max });
  }
  const rows = [...look.rows];
  let { cursors } = look;
  const rest = options.max - rows.length;
  const hungry = rest <= options.max * REST_MIN ? [] : hungryAmong(look.rows, options.perTenant);
  if (hungry.length > 0) {
    const rooms = roomsAfter(options, rows);
    const second = await lookFor(
      store,
      { ...options, rooms, perTenant: options.perTenant - hungry[0]!.share, cursors },
      { only: hungry.map(({ tenantId }) => tenantId), max: rest },
    );
    rows.push(...second.rows);
    cursors = { ...second.cursors, ...(cursors.tenant && { tenant: cursors.tenant }) };
  }
  const deliveries = await withholdUnsendable(store, options.epoch, rows.map(readRow));
  await flagSecondCopies(store.pool, deliveries);
  await tellSent(store.pool, deliveries);
  return { deliveries, cursors, hasMore: look.hasMore };
}

interface Look {
  readonly rows: readonly ClaimRow[];
  readonly cursors: ClaimCursors;
  readonly hasMore: boolean;
}

async function lookFor(
  store: Store,
  options: ClaimOptions,
  { only, max }: { readonly only: readonly string[] | null; readonly max: number },
): Promise<Look> {
  const { cursors } = options;
  const rooms = new Map([
    ...options.rooms,
    ...options.exceptLanes.map((lane) => [lane, 0] as const),
  ]);
  const { rows } = await store.pool.query<ClaimRow | StopRow>({
    name: 'claim',
    text: CLAIM,
    values: [
      options.epoch,
      max,
      options.perTenant,
      JSON.stringify(Object.fromEntries(rooms)),
      options.roomOfOthers,
      options.exceptTenants,
      only,
      cursors.tenant ?? LOWEST_ID,
      JSON.stringify(cursors.lanes ?? {}),
      options.roomOfOthers > 0 ? null : inAnyOrder(rooms),
    ],
  });
  const claimed = rows.filter(isClaimed);
  for (const { attempts, planned_ms } of claimed) {
    if (attempts === 1) firstAttemptDelay.observe(secondsSince(Number(planned_ms)));
  }
  const stops = rows.filter((row): row is StopRow => !isClaimed(row));
  return {
    rows: claimed,
    cursors: cursorsAfter(cursors, claimed, stops),
    hasMore: stops.length > 0,
  };
}

/** Two clocks: never below 0. */
const secondsSince = (ms: number): number => Math.max(0, (Date.now() - ms) / 1_000);

/** Where nobody else has room, these are looked at for every tenant, and not always the same first. */
function inAnyOrder(rooms: ReadonlyMap<string, number>): readonly string[] {
  const open = [...rooms].flatMap(([lane, room]) => (room > 0 ? [lane] : []));
  const from = Math.floor(Math.random() * open.length);
  return [...open.slice(from), ...open.slice(0, from)];
}

const isClaimed = (row: ClaimRow | StopRow): row is ClaimRow => row.email_id !== null;

/** The tenants that used all of their share and may have more. */
function hungryAmong(
  rows: readonly ClaimRow[],
  perTenant: number,
): readonly { tenantId: string; share: number }[] {
  const counts = new Map<string, { count: number; share: number }>();
  for (const { tenant_id, share } of rows) {
    counts.set(tenant_id, { count: (counts.get(tenant_id)?.count ?? 0) + 1, share });
  }
  return [...counts]
    .filter(([, { count, share }]) => count >= share && share < perTenant)
    .map(([tenantId, { share }]) => ({ tenantId, share }));
}

/** What is left of the rooms after these were claimed. */
function roomsAfter(
  { rooms, roomOfOthers }: ClaimOptions,
  rows: readonly ClaimRow[],
): ReadonlyMap<string, number> {
  const left = new Map(rooms);
  for (const { lane } of rows) left.set(lane, (left.get(lane) ?? roomOfOthers) - 1);
  return left;
}

/** The last destination of each tenant and class; who took what there was needs none. */
function cursorsAfter(
  before: ClaimCursors,
  rows: readonly ClaimRow[],
  stops: readonly StopRow[],
): ClaimCursors {
  const last = new Map<string, ClaimRow | StopRow>();
  for (const row of [...rows, ...stops]) {
    const key = `${row.tenant_id} ${row.is_bulk}`;
    if (row.lane !== null && Number(row.number) >= Number(last.get(key)?.number ?? 0))
      last.set(key, row);
  }
  const lanes = new Map(Object.entries(before.lanes ?? {}));
  for (const { tenant_id, is_bulk, lane } of last.values()) {
    const [single, bulk] = lanes.get(tenant_id) ?? [null, null];
    lanes.delete(tenant_id); // to the end: the newest
    lanes.set(tenant_id, is_bulk === true ? [single, lane] : [lane, bulk]);
  }
  const kept = [...lanes].slice(-CURSORS_MAX);
  // Without a stop every tenant was visited: it begins anew.
  const tenant = stops.find(({ lane }) => lane === null)?.tenant_id;
  return { ...(tenant !== undefined && { tenant }), lanes: Object.fromEntries(kept) };
}

const readRow = (row: ClaimRow): ClaimedDelivery & Offer & Begun => ({
  tenantId: row.tenant_id,
  emailId: row.email_id,
  position: row.position,
  recipient: row.recipient,
  lane: row.lane,
  attempt: row.attempts,
  isBulk: row.is_bulk,
  laneFaults: row.lane_faults,
  unknowns: row.unknowns,
  interruptions: row.interruptions,
  isHooked: row.is_hooked,
  plannedMs: Number(row.planned_ms),
  createdAt: new Date(Number(row.created_ms)),
  recipientCount: row.recipient_count,
  topicId: row.topic_id,
  isBroadcast: row.broadcast_id !== null,
  raw: row.raw,
  rawSizeBytes: row.raw_size_bytes,
  blobKey: row.blob_key,
  needsSmtpUtf8: row.needs_smtp_utf8,
  signingTenantId: row.signing_tenant_id,
  signingDomainId: row.signing_domain_id,
  fromDomain: row.from_domain,
  ignoresTlsPolicy: row.ignores_tls_policy,
  envelopeFrom: row.envelope_from,
  mayGoUnsigned: row.may_go_unsigned,
});
