// Tells authors that what they wrote could not be passed on: for every forwarded email whose author is to hear of it, once
// nothing of it is under way any more, one report (RFC 3464) about all destinations that failed. The mark that it is
// owed goes in the transaction that enqueues the report, so it is sent once. Of a bounce that came back by mail and was
// sent on (home.ts) the author knows already.
//
// Nobody is written to who may not have sent the message: its envelope sender has to be vouched for by SPF, or belong to
// the domain that DMARC vouches for; and nothing that a program wrote is answered.
import type { Pool, PoolClient } from 'pg';
import type { Logger } from '../log.ts';
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import { composeDsn, type DsnFailure } from '../mail/dsn-compose.ts';
import { readForwardHeader } from '../mail/forward-header.ts';
import { findHeaders } from '../mail/header.ts';
import { enqueue } from '../queue/enqueue.ts';
import { tellFacts } from '../queue/facts.ts';
import { describeNullSender } from '../sending/dsn.ts';
import { findSuppressed, type NewEmailDependencies } from '../sending/new-email.ts';
import { UNKNOWNS_MAX } from '../store/delivery.ts';
import { LOWEST_ID, newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Authentication } from '../store/received-email.ts';
import { acceptedEmails } from '../telemetry/instruments.ts';
import { isSenderPlausible } from './forward-decision.ts';
import { readHead, type StoredOriginal } from './forward-message.ts';

export interface ForwardReportDependencies extends NewEmailDependencies {
  readonly log: Logger;
  /** Ours. */
  readonly hostname: string;
  /** Deliveries became ready. */
  readonly onReady: () => void;
}

/** The next look goes on where this one stopped. */
export interface ReportsPlace {
  readonly tenantId: string;
  readonly id: string;
}

/** Of one look at marks that are still open; most wait for a delivery. */
const PAGE = 500;
const PAGES_MAX = 20;
/** How long failures wait for the destinations that are still tried. */
const WAIT_MAX_MS = 4 * 86_400_000;
/** How long a bounce may come after a delivery, where nobody sends it on. */
const LATE_MAX_MS = 86_400_000;
/** After this nobody wants to know any more: lifetimes are days. */
const OPEN_MAX_MS = 30 * 86_400_000;
const START: ReportsPlace = {
  tenantId: LOWEST_ID,
  id: LOWEST_ID,
};

const IS_FAILED = `d.state in ('bounced', 'failed')`;
const IS_UNDER_WAY = `(d.state in ('scheduled', 'preparing', 'ready', 'in_flight', 'deferred')
  or (d.state = 'unknown' and d.unknowns < ${UNKNOWNS_MAX}))`;

interface OpenRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly under_way: number;
  readonly failed: number;
  readonly delivered: number;
  readonly age_ms: string;
  /** Its bounces come to a return path of ours, and nobody sends them on. */
  readonly is_rebuilt: boolean;
}

/**
 * Goes through the open marks from `from` on: reports what failed, and closes what needs no report. Where to go on; null:
 * at the beginning. One that fails is left for the next time.
 */
export async function reportFailedForwards(
  d: ForwardReportDependencies,
  from: ReportsPlace | null = null,
): Promise<ReportsPlace | null> {
  let at = from ?? START;
  for (let page = 0; page < PAGES_MAX; page += 1) {
    const rows = await readOpen(d.store.pool, at);
    const done = rows.filter(isDone);
    await close(d.store.pool, done);
    for (const row of rows.filter((one) => isDue(one) && !isDone(one))) {
      await reportOne(d, { tenantId: row.tenant_id, id: row.id }).catch((err: unknown) => {
        d.log.error(
          { err, forwarding_attempt_id: row.id, tenant_id: row.tenant_id },
          'a failed forward could not be reported',
        );
      });
    }
    const last = rows.at(-1);
    if (last === undefined || rows.length < PAGE) return null;
    at = { tenantId: last.tenant_id, id: last.id };
  }
  return at;
}

const isOver = (row: OpenRow): boolean =>
  Number(row.age_ms) >
  (row.under_way > 0 ? OPEN_MAX_MS : row.is_rebuilt && row.delivered > 0 ? LATE_MAX_MS : -1);
const isDone = (row: OpenRow): boolean =>
  Number(row.age_ms) > OPEN_MAX_MS || (row.failed === 0 && isOver(row));
const isDue = (row: OpenRow): boolean =>
  row.failed > 0 && (row.under_way === 0 || Number(row.age_ms) > WAIT_MAX_MS);

async function readOpen(pool: Pool, behind: ReportsPlace): Promise<readonly OpenRow[]> {
  const { rows } = await pool.query<OpenRow>({
    name: 'open-forward-reports',
    text: `select a.tenant_id, a.id, x.under_way, x.failed, x.delivered, a.is_rebuilt,
        (extract(epoch from now() - a.created_at) * 1000)::bigint::text as age_ms
      from (
        select tenant_id, id, email_id, reported_positions, created_at,
          method = 'rebuilt' as is_rebuilt
        from forwarding_attempt
        where is_report_open and (tenant_id, id) > ($1, $2) order by tenant_id, id limit ${PAGE}
      ) a cross join lateral (
        select (count(*) filter (where ${IS_UNDER_WAY}))::integer as under_way,
          (count(*) filter (where ${IS_FAILED}
            and d.position <> all (a.reported_positions)))::integer as failed,
          (count(*) filter (where d.state = 'delivered'))::integer as delivered
        from delivery d where d.tenant_id = a.tenant_id and d.email_id = a.email_id
      ) x order by a.tenant_id, a.id`,
    values: [behind.tenantId, behind.id],
  });
  return rows;
}

async function close(db: Pool | PoolClient, rows: readonly OpenRow[]): Promise<void> {
  if (rows.length === 0) return;
  await db.query({
    name: 'close-forward-reports',
    text: `update forwarding_attempt a set is_report_open = false
      from unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
      where a.tenant_id = k.tenant_id and a.id = k.id and a.is_report_open`,
    values: [rows.map(({ tenant_id: tenantId }) => tenantId), rows.map(({ id }) => id)],
  });
}

/** What is known of a forward that failed. */
interface Forward extends StoredOriginal {
  readonly emailId: string;
  readonly recipient: string;
  readonly mailFrom: string;
  readonly authentication: Authentication | null;
  readonly receivedAt: Date;
  /** Of the route; null: it cannot sign. */
  readonly domain: { readonly id: string; readonly name: string } | null;
}

async function reportOne(d: ForwardReportDependencies, place: ReportsPlace): Promise<void> {
  const { pool } = d.store;
  const forward = await readForward(pool, place);
  const raw = forward === null ? null : await readHead(d.blobs, forward);
  const author =
    forward === null || raw === null ? null : authorToTell(d.hostname, { ...forward, raw });
  if (forward === null || raw === null || author === null) {
    await pool.query(
      `update forwarding_attempt set is_report_open = false where tenant_id = $1 and id = $2`,
      [place.tenantId, place.id],
    );
    return;
  }
  const reporter = forward.domain?.name ?? d.hostname;
  const parsed = parseMailbox(`Mail Delivery System <MAILER-DAEMON@${reporter}>`);
  if (!parsed.ok) throw new Error(`no address can be made of ${reporter}`);
  const suppressed = await findSuppressed(d.store, place.tenantId, [{ recipients: [author] }]);
  const isTold = await d.store.transact(async (client) => {
    const failures = await takeFailures(client, { place, forward });
    if (failures.length === 0) return false;
    const id = newId();
    const createdAt = d.now();
    const messageId = `<${id}@${reporter}>`;
    const dsn = composeDsn({
      reportingMta: d.hostname,
      from: parsed.mailbox,
      to: author,
      messageId,
      date: createdAt,
      boundarySeed: id,
      arrivedAt: forward.receivedAt,
      original: raw.subarray(forward.traceSizeBytes),
      failures,
    });
    const email = await describeNullSender(d, {
      ...dsn,
      tenantId: place.tenantId,
      id,
      createdAt,
      via: 'dsn',
      from: parsed.mailbox,
      to: author,
      messageId,
      signingDomainId: forward.domain?.id ?? null,
      about: forward.emailId,
      suppressed,
    });
    await enqueue(client, [email]);
    await tellFacts(client, [
      {
        tenantId: place.tenantId,
        emailId: forward.emailId,
        kind: 'author_told',
        recipients: failures.map(({ finalRecipient }) => finalRecipient),
        detail: { email_id: id, author: author.address },
      },
    ]);
    return true;
  });
  if (!isTold) return;
  acceptedEmails.inc({ channel: 'report' });
  d.onReady();
}

/** Whom to tell; null: nobody. */
function authorToTell(
  hostname: string,
  about: Pick<Forward, 'mailFrom' | 'authentication' | 'traceSizeBytes'> & {
    readonly raw: Buffer;
  },
): Mailbox | null {
  const { mailFrom, authentication, traceSizeBytes } = about;
  const header = readForwardHeader(about.raw, { hostname, traceSizeBytes });
  const types = findHeaders(header.fields, 'content-type');
  const isReport = types.some((value) => /^\s*multipart\/report\b/i.test(value));
  if (isReport || header.isAutomatic || !isSenderPlausible(mailFrom, authentication)) return null;
  const parsed = parseMailbox(`<${mailFrom}>`);
  return parsed.ok ? parsed.mailbox : null;
}

/** Null: nobody is to hear of it. A replay is the tenant's own doing, perhaps months after the author's. */
async function readForward(pool: Pool, { tenantId, id }: ReportsPlace): Promise<Forward | null> {
  const { rows } = await pool.query<{
    email_id: string;
    recipient: string;
    mail_from: string;
    authentication: Authentication | string | null;
    raw: Buffer | null;
    blob_key: string | null;
    raw_size_bytes: number;
    received_ms: string;
    trace_size_bytes: number;
    domain_id: string | null;
    domain: string | null;
  }>({
    name: 'failed-forward',
    text: `select a.email_id, a.recipient, r.mail_from, r.authentication,
        (extract(epoch from r.created_at) * 1000)::bigint::text as received_ms, c.raw, c.blob_key, c.raw_size_bytes, c.trace_size_bytes,
        s.id as domain_id, s.name as domain
      from forwarding_attempt a
      join received_email r on r.tenant_id = a.tenant_id and r.id = a.received_email_id
      join received_content c on c.tenant_id = a.tenant_id and c.email_id = a.received_email_id
      left join forwarding_rule f on f.tenant_id = a.tenant_id and f.id = a.rule_id
      left join sending_domain s on s.tenant_id = a.tenant_id and s.id = f.domain_id
        and s.sending_verified
      where a.tenant_id = $1 and a.id = $2 and a.is_report_open and a.email_id is not null
        and a.replay_id is null`,
    values: [tenantId, id],
  });
  const [row] = rows;
  if (row === undefined) return null;
  const { domain_id: domainId, domain } = row;
  return {
    emailId: row.email_id,
    recipient: row.recipient,
    mailFrom: row.mail_from,
    authentication: fromJson(row.authentication),
    receivedAt: new Date(Number(row.received_ms)),
    raw: row.raw,
    blobKey: row.blob_key,
    rawSizeBytes: row.raw_size_bytes,
    traceSizeBytes: row.trace_size_bytes,
    domain: domainId === null || domain === null ? null : { id: domainId, name: domain },
  };
}

/** Takes the mark, and with it what failed so far; empty when somebody else has it. */
async function takeFailures(
  client: PoolClient,
  { place, forward }: { readonly place: ReportsPlace; readonly forward: Forward },
): Promise<readonly DsnFailure[]> {
  const { tenantId, id } = place;
  const mark = await client.query<{ reported_positions: number[] }>({
    text: `select reported_positions from forwarding_attempt
      where tenant_id = $1 and id = $2 and is_report_open for update skip locked`,
    values: [tenantId, id],
  });
  const [taken] = mark.rows;
  if (taken === undefined) return [];
  await client.query(
    `update forwarding_attempt set is_report_open = false where tenant_id = $1 and id = $2`,
    [tenantId, id],
  );
  const { rows } = await client.query<{
    recipient: string;
    last_cause: string | null;
    last_reply: string | null;
    host: string | null;
    attempted_ms: string | null;
  }>({
    name: 'forward-failures',
    text: `select d.recipient, d.last_cause, d.last_reply, t.host,
        (extract(epoch from t.started_at) * 1000)::bigint::text as attempted_ms
      from delivery d left join lateral (
        select a.host, a.started_at from attempt a
        where a.tenant_id = d.tenant_id and a.email_id = d.email_id and a.position = d.position
        order by a.number desc limit 1) t on true
      where d.tenant_id = $1 and d.email_id = $2 and ${IS_FAILED}
        and d.position <> all ($3::smallint[])
      order by d.position`,
    values: [tenantId, forward.emailId, taken.reported_positions],
  });
  return rows.map((row) => ({
    finalRecipient: row.recipient,
    originalRecipient: forward.recipient,
    status: statusOf(row.last_cause),
    remoteMta: row.host,
    reason: row.last_reply ?? 'The delivery failed.',
    lastAttemptAt: row.attempted_ms === null ? null : new Date(Number(row.attempted_ms)),
  }));
}

/** RFC 3463 §3.5: what was given up for its age. */
const EXPIRED = '4.4.7';

function statusOf(cause: string | null): string | null {
  if (cause === 'expired') return EXPIRED;
  return cause !== null && /^[45]\.\d{1,3}\.\d{1,3}$/.test(cause) ? cause : null;
}
