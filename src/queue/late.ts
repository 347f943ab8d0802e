// What came back by mail about a delivery that was decided before: the only writer of late outcomes. The row is
// locked first, so reports and workers come one after the other.
//
//   report          delivered, unknown            in flight     every other state
//   failed          -> bounced                    not now       noted
//   delayed         noted                         noted         noted
//   arrived         unknown -> delivered          nothing       nothing
//   complained      shown; unknown -> delivered   not now       shown
//
// `not now`: the worker's own result comes first, the reporter tries again. A failed report about a delivery
// that is tried again is only noted: the next attempt decides. A bounced one cannot bounce again: nothing.
//
// The return path of a transaction with several recipients names the email and the destination only: its report counts
// for those there that it names, and for nobody where it names none; then it is noted. Who goes to a destination alone
// was in no such transaction, so nobody who was can speak for them.
import type { PoolClient } from 'pg';
import { normalizedAddress } from '../mail/address.ts';
import type { BounceRule } from '../mail/bounce-rules.ts';
import { causeTexts, classOf } from '../mail/outcome.ts';
import type { Report, ReportedRecipient } from '../mail/report.ts';
import { verdictOfReport, type LateVerdict } from '../mail/report-verdict.ts';
import {
  positionMax,
  sharedPosition,
  WHOLE_EMAIL,
  type ReturnPathSubject,
} from '../mail/return-path.ts';
import type { DeliveryState } from '../store/delivery.ts';
import { SANDBOX_LANE } from '../store/destination.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { suppress } from '../suppressions/suppressions.ts';
import { tellWebhooks } from '../timeline/outbox.ts';
import { recordComplaint } from './complaint.ts';
import { showEmails } from './settle.ts';
import { bounced, delivered } from './told.ts';

/** `settled`: something changed; `noted`: the timeline has it; `not_now`: ask again when the attempt has ended. */
export type LateResult = 'settled' | 'noted' | 'nothing' | 'not_now';

/** Reports that change nothing are noted this often for one email: whoever has its return path may write many. */
const NOTES_MAX = 20;
const REPORTER_CHARS_MAX = 255;
/** Nothing of these has ever left. */
const UNSENT: ReadonlySet<DeliveryState> = new Set([
  'scheduled',
  'preparing',
  'suppressed',
  'canceled',
  'failed',
]);

interface LateRow {
  readonly tenant_id: string;
  readonly position: number;
  readonly recipient: string;
  readonly state: DeliveryState;
  readonly lane: string;
  readonly recipient_count: number;
}

interface About {
  readonly report: Report;
  readonly rules: readonly BounceRule[];
}

/** Applies the report to the delivery, or to those of the email that it names. A delivery that is gone: nothing. */
export async function settleReport(
  store: Store,
  { emailId, position }: ReturnPathSubject,
  about: About,
): Promise<LateResult> {
  const tenantId = await findTenant(store, emailId);
  if (tenantId === null) return 'nothing';
  return store.transact(async (client) => {
    const rows = await lockRows(client, { tenantId, emailId, position });
    const sent = rows.filter(({ state }) => !UNSENT.has(state));
    if (position > positionMax) {
      // WHOLE_EMAIL is on mail that left before there was one for each destination.
      const shared = sent.filter(
        ({ lane, position: own }) =>
          rows.some((one) => one.position !== own && one.lane === lane) &&
          (position === WHOLE_EMAIL || sharedPosition(emailId, lane) === position),
      );
      return settleNamed(client, { emailId, rows: shared }, about);
    }
    const [row] = sent;
    return row === undefined ? 'nothing' : settleOne(client, { row, emailId }, about);
  });
}

/**
 * Applies a report that came to the rewritten sender of a forwarded email, inside the caller's transaction; and which of its
 * deliveries it says have failed. All of them share that address, which other mail of its author has, too: nobody is suppressed.
 */
export async function settleForwardReport(
  client: PoolClient,
  { tenantId, emailId }: { readonly tenantId: string; readonly emailId: string },
  about: About,
): Promise<{ readonly result: LateResult; readonly failed: readonly number[] }> {
  const rows = await lockRows(client, { tenantId, emailId, position: WHOLE_EMAIL });
  const sent = rows.filter(({ state }) => !UNSENT.has(state));
  const [only] = sent.length === 1 ? sent : [];
  const spokenOf =
    only === undefined
      ? sent.filter((row) => about.report.recipients.some((one) => rowNamed(sent, one) === row))
      : [only];
  const failed = spokenOf.filter((row) => {
    const own =
      only === undefined
        ? about.report.recipients.filter((one) => rowNamed(sent, one) === row)
        : about.report.recipients;
    const report = { ...about.report, recipients: own };
    const { recipient } = row;
    return verdictOfReport(report, { recipient, tenantId, rules: about.rules })?.kind === 'failed';
  });
  const result =
    only === undefined
      ? await settleNamed(client, { emailId, rows: sent }, about)
      : await settleOne(client, { row: only, emailId, isShared: true }, about);
  return { result, failed: failed.map(({ position }) => position) };
}

/** Those that a return path stands for, in order of position. */
async function lockRows(
  client: PoolClient,
  {
    tenantId,
    emailId,
    position,
  }: { readonly tenantId: string; readonly emailId: string; readonly position: number },
): Promise<readonly LateRow[]> {
  const isWhole = position > positionMax;
  const { rows } = await client.query<LateRow>({
    text: `select d.tenant_id, d.position, d.recipient, d.state, d.lane, e.recipient_count
      from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
      where d.tenant_id = $1 and d.email_id = $2 and ($3::boolean or d.position = $4)
      order by d.position for no key update of d`,
    values: [tenantId, emailId, isWhole, isWhole ? -1 : position],
  });
  return rows;
}

async function settleOne(
  client: PoolClient,
  at: At,
  { report, rules }: About,
): Promise<LateResult> {
  const { recipient, tenant_id: tenantId } = at.row;
  const verdict = verdictOfReport(report, { recipient, tenantId, rules });
  return verdict === null ? 'nothing' : apply(client, at, { verdict, report });
}

/** `rows`: those that have left, of an email whose return path several of them share. */
async function settleNamed(
  client: PoolClient,
  { emailId, rows }: { readonly emailId: string; readonly rows: readonly LateRow[] },
  { report, rules }: About,
): Promise<LateResult> {
  const named = new Map<LateRow, ReportedRecipient[]>();
  for (const one of report.recipients) {
    const row = rowNamed(rows, one);
    if (row !== null) named.set(row, [...(named.get(row) ?? []), one]);
  }
  if (named.size === 0) return noteUnnamed(client, { emailId, rows }, { report, rules });
  if ([...named.keys()].some(({ state }) => state === 'in_flight')) return 'not_now';
  const results: LateResult[] = [];
  for (const [row, recipients] of named) {
    const about = { report: { ...report, recipients }, rules };
    results.push(await settleOne(client, { row, emailId, isShared: true }, about));
  }
  return ORDER.find((result) => results.includes(result)) ?? 'nothing';
}

const ORDER: readonly LateResult[] = ['not_now', 'settled', 'noted'];

/** By the address that we sent to, where the report has it: behind an alias the final one may be another recipient's. */
function rowNamed(
  rows: readonly LateRow[],
  { address, originalAddress }: ReportedRecipient,
): LateRow | null {
  const find = (given: string | null): LateRow | undefined =>
    given === null
      ? undefined
      : rows.find(({ recipient }) => normalizedAddress(recipient) === normalizedAddress(given));
  return find(originalAddress) ?? find(address) ?? null;
}

async function noteUnnamed(
  client: PoolClient,
  { emailId, rows }: { readonly emailId: string; readonly rows: readonly LateRow[] },
  { report, rules }: About,
): Promise<LateResult> {
  const [row] = rows;
  if (row === undefined) return 'nothing';
  const { recipient, tenant_id: tenantId } = row;
  const verdict = verdictOfReport(report, { recipient, tenantId, rules });
  if (verdict === null) return 'nothing';
  const reporter = report.reporter?.slice(0, REPORTER_CHARS_MAX) ?? null;
  const told =
    verdict.kind === 'complained'
      ? { action: 'complained', feedback_type: verdict.feedbackType }
      : { action: verdict.kind, enhanced: verdict.status, reply: verdict.diagnostic };
  // Of the email as a whole: the timeline must not say it of a recipient.
  const recipients = undefined;
  return note(client, { row, emailId }, { source: report.kind, reporter, ...told, recipients });
}

/** A return path does not say whose email it is: each tenant is asked by its key, which is a look at an index. */
export async function findTenant(store: Store, emailId: string): Promise<string | null> {
  const { rows } = await store.pool.query<{ tenant_id: string }>({
    name: 'tenant-of-email',
    text: `select e.tenant_id from tenant t cross join lateral (
        select tenant_id from email where tenant_id = t.id and id = $1 limit 1) e limit 1`,
    values: [emailId],
  });
  return rows[0]?.tenant_id ?? null;
}

interface At {
  readonly row: LateRow;
  readonly emailId: string;
  /** The return path was that of several recipients: each of them could have written what it says of another. */
  readonly isShared?: boolean;
}

async function apply(
  client: PoolClient,
  at: At,
  { verdict, report }: { readonly verdict: LateVerdict; readonly report: Report },
): Promise<LateResult> {
  const { state } = at.row;
  const source = report.kind;
  const reporter = report.reporter?.slice(0, REPORTER_CHARS_MAX) ?? null;
  if (verdict.kind === 'complained') {
    if (state === 'in_flight') return 'not_now';
    if (state === 'unknown') await decide(client, at, { state: 'delivered' });
    return complain(client, at, { source, reporter, feedback_type: verdict.feedbackType });
  }
  const { status, diagnostic } = verdict;
  const told = { source, reporter, enhanced: status, reply: diagnostic };
  if (verdict.kind === 'failed') {
    if (state === 'in_flight') return 'not_now';
    if (state === 'bounced') return 'nothing';
    if (state !== 'delivered' && state !== 'unknown')
      return note(client, at, { ...told, action: 'failed' });
    await decide(client, at, {
      state: 'bounced',
      cause: status ?? verdict.cause,
      reply: diagnostic ?? causeTexts[verdict.cause],
    });
    const { cause } = verdict;
    const { tenant_id: tenantId, recipient } = at.row;
    await tellWebhooks(client, [
      bounced(
        { tenantId, emailId: at.emailId, recipient },
        { code: status ?? cause, cause, reply: diagnostic },
      ),
    ]);
    await tell(client, at, 'bounced', { ...told, cause, class: classOf(cause) });
    if (verdict.isDead && at.isShared !== true) await suppressRecipient(client, at, 'bounce');
    return 'settled';
  }
  if (verdict.kind === 'delayed') return note(client, at, { ...told, action: 'delayed' });
  if (state !== 'unknown') return 'nothing';
  await decide(client, at, { state: 'delivered' });
  await tell(client, at, 'delivered', told);
  return 'settled';
}

async function decide(
  client: PoolClient,
  { row, emailId }: At,
  to:
    | { readonly state: 'delivered' }
    | { readonly state: 'bounced'; readonly cause: string; readonly reply: string },
): Promise<void> {
  await client.query({
    text: `update delivery set state = $4, last_cause = $5, last_reply = $6
      where tenant_id = $1 and email_id = $2 and position = $3`,
    values: [
      row.tenant_id,
      emailId,
      row.position,
      to.state,
      to.state === 'bounced' ? to.cause : null,
      to.state === 'bounced' ? to.reply : null,
    ],
  });
  if (to.state === 'delivered') {
    const { tenant_id: tenantId, recipient } = row;
    await tellWebhooks(client, [delivered({ tenantId, emailId, recipient })]);
  }
  const shown = { tenantId: row.tenant_id, emailId, recipientCount: row.recipient_count };
  await showEmails(client, [shown]);
}

async function complain(
  client: PoolClient,
  at: At,
  detail: Readonly<Record<string, unknown>>,
): Promise<LateResult> {
  const { tenant_id: tenantId, recipient } = at.row;
  const isNew = await recordComplaint(client, {
    tenantId,
    emailId: at.emailId,
    recipient,
    detail: present(detail),
  });
  if (isNew && at.isShared !== true) await suppressRecipient(client, at, 'complaint');
  return isNew ? 'settled' : 'nothing';
}

/** Nobody is behind the addresses of the sandbox. */
async function suppressRecipient(
  client: PoolClient,
  { row, emailId }: At,
  origin: 'bounce' | 'complaint',
): Promise<void> {
  if (row.lane === SANDBOX_LANE) return;
  await suppress(client, [
    { tenantId: row.tenant_id, address: row.recipient, origin, sourceId: emailId },
  ]);
}

async function note(
  client: PoolClient,
  at: At,
  detail: Readonly<Record<string, unknown>>,
): Promise<LateResult> {
  const { rows } = await client.query<{ notes: number }>({
    text: `select count(*)::int as notes from timeline
      where tenant_id = $1 and email_id = $2 and kind = 'reported'`,
    values: [at.row.tenant_id, at.emailId],
  });
  if ((rows[0]?.notes ?? 0) >= NOTES_MAX) return 'nothing';
  await tell(client, at, 'reported', detail);
  return 'noted';
}

async function tell(
  client: PoolClient,
  { row, emailId }: At,
  kind: string,
  detail: Readonly<Record<string, unknown>>,
): Promise<void> {
  await client.query({
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      values ($1, $2, $3, now(), $4, $5)`,
    values: [
      row.tenant_id,
      emailId,
      newId(),
      kind,
      JSON.stringify({ recipients: [row.recipient], ...present(detail) }),
    ],
  });
}

const present = (detail: Readonly<Record<string, unknown>>): Record<string, unknown> =>
  Object.fromEntries(Object.entries(detail).filter(([, value]) => value !== null));
