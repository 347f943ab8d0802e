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
import type { PoolClient } from 'pg';
import type { BounceRule } from '../mail/bounce-rules.ts';
import { causeTexts } from '../mail/outcome.ts';
import type { Report } from '../mail/report.ts';
import { verdictOfReport, type LateVerdict } from '../mail/report-verdict.ts';
import type { ReturnPathSubject } from '../mail/return-path.ts';
import { SANDBOX_LANE, type DeliveryState } from '../store/delivery.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { suppress } from '../suppressions/suppressions.ts';
import { recordComplaint } from './complaint.ts';
import { showEmails } from './settle.ts';

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
  readonly recipient: string;
  readonly state: DeliveryState;
  readonly lane: string;
  readonly recipient_count: number;
}

/** Applies the report to the delivery. A delivery that is gone: nothing. */
export async function settleReport(
  store: Store,
  { emailId, position }: ReturnPathSubject,
  about: { readonly report: Report; readonly rules: readonly BounceRule[] },
): Promise<LateResult> {
  const tenantId = await findTenant(store, emailId);
  if (tenantId === null) return 'nothing';
  return store.transact(async (client) => {
    const { rows } = await client.query<LateRow>({
      text: `select d.tenant_id, d.recipient, d.state, d.lane, e.recipient_count
        from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
        where d.tenant_id = $1 and d.email_id = $2 and d.position = $3 for no key update of d`,
      values: [tenantId, emailId, position],
    });
    const [row] = rows;
    if (row === undefined || UNSENT.has(row.state)) return 'nothing';
    const { recipient } = row;
    const verdict = verdictOfReport(about.report, { recipient, tenantId, rules: about.rules });
    if (verdict === null) return 'nothing';
    return apply(client, { row, emailId, position }, { verdict, report: about.report });
  });
}

/** A return path does not say whose email it is: each tenant is asked by its key, which is a look at an index. */
async function findTenant(store: Store, emailId: string): Promise<string | null> {
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
  readonly position: number;
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
    await tell(client, at, 'bounced', { ...told, cause: verdict.cause });
    if (verdict.isDead) await suppressRecipient(client, at, 'bounce');
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
  { row, emailId, position }: At,
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
      position,
      to.state,
      to.state === 'bounced' ? to.cause : null,
      to.state === 'bounced' ? to.reply : null,
    ],
  });
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
  if (isNew) await suppressRecipient(client, at, 'complaint');
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
