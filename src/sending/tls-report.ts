// Sends, once a day, each domain that asks for it a report of how TLS went with its hosts (RFC 8460).
//
// In: the counts that delivery left in `tls_result`. Out: for each day and domain one row of `tls_report`, which says
// what came of it, and a report by email (an ordinary email of the first tenant, so it is retried, shown and bounced like
// any other) or by HTTPS. The row is written before anything leaves, each address is noted in it, and an email has an
// idempotency key made of day, domain and address: a crash in between sends nothing twice. An HTTPS request that was
// under way in a crash counts as sent.
import { createHash } from 'node:crypto';
import type { Pool } from 'pg';
import { Refusal } from '../access/refusal.ts';
import type { GuardedDependencies } from '../dns/guarded-http.ts';
import type { Resolver } from '../dns/resolver.ts';
import type { Logger } from '../log.ts';
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import { newId } from '../store/id.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import type { SubmittedMessage } from './accept.ts';
import {
  GZIP_TYPE,
  packReport,
  writeReport,
  writeReportMessage,
  type ReportAbout,
  type ReportFile,
  type TlsCount,
  type TlsReport,
} from './tls-report-document.ts';
import { postReport } from './tls-report-post.ts';
import { readTlsReportRecord, type ReportTarget } from './tls-report-record.ts';

export interface TlsReporterDependencies {
  readonly pool: Pool;
  readonly log: Logger;
  readonly now: () => Date;
  readonly hostname: string;
  /** Whose email the reports are. */
  readonly tenantId: string;
  readonly resolver: Pick<Resolver, 'txt'>;
  readonly web: GuardedDependencies;
  /** Accepts the email of that tenant; the same key again is the same email. Throws a Refusal. */
  readonly accept: (message: SubmittedMessage, idempotencyKey: string) => Promise<unknown>;
}

export interface TlsReporter {
  /** Plans the reports of the days that are over and sends those that are due; nothing while that goes on already. */
  run(): Promise<void>;
  stop(): Promise<void>;
}

/** RFC 8460 §4.1: not all at midnight. From this long after it, over four hours. */
const DELAY_SECONDS = 600;
const SPREAD_SECONDS = 4 * 3_600;
const RETRY_SECONDS = 3_600;
/** From the first try; less than an idempotency key lives. */
const TRYING_MAX_SECONDS = 20 * 3_600;
const PLANNED_PER_RUN = 5_000;
const SENT_PER_RUN = 500;
const PARALLEL = 8;
const COUNTS_MAX = 1_000;
const DETAIL_CHARS_MAX = 500;
/** How long counts of a domain that nobody reported are kept; the rows that say what became of a report, a little longer. */
const KEPT_DAYS = 8;

type State = 'sent' | 'failed' | 'nobody';

/** What became of one address of the record. */
interface TargetState {
  readonly state: 'begun' | 'done' | 'failed';
  readonly detail?: string;
}

interface DueReport {
  readonly day: string;
  readonly domain: string;
  readonly is_late: boolean;
  readonly targets: Record<string, TargetState>;
}

/** What one try came to; `again` is tried an hour later. */
interface Result {
  readonly state: State | 'again';
  readonly detail: string;
}

export function createTlsReporter(d: TlsReporterDependencies): TlsReporter {
  const ending = new AbortController();
  let running: Promise<void> | null = null;

  const sendDue = async (): Promise<void> => {
    await plan(d.pool);
    let left = SENT_PER_RUN;
    const worker = async (): Promise<void> => {
      while (!ending.signal.aborted && left-- > 0) {
        const due = await takeDue(d.pool);
        if (due === null) return;
        const result = await sendOne(d, due, ending.signal);
        await note(d.pool, due, result);
        d.log.info({ domain: due.domain, day: due.day, ...result }, 'TLS report');
      }
    };
    const ended = await Promise.allSettled(Array.from({ length: PARALLEL }, worker));
    const failed = ended.find((one) => one.status === 'rejected');
    if (failed !== undefined) throw failed.reason;
  };
  return {
    run() {
      if (ending.signal.aborted) return Promise.resolve();
      running ??= sendDue().finally(() => {
        running = null;
      });
      return running;
    },
    async stop() {
      ending.abort();
      await running?.catch(() => undefined);
    },
  };
}

// ---- rows ----------------------------------------------------------------------------------------

/** A row for each past day and domain that has results. */
async function plan(pool: Pool): Promise<void> {
  await pool.query({
    text: `insert into tls_report (day, domain, state, due_at)
      select day, domain, 'pending', (day + 1)::timestamp at time zone 'utc' +
        make_interval(secs => $1 + mod(hashtextextended(domain, 0) & 2147483647, $2))
      from tls_result r
      where day < (now() at time zone 'utc')::date and day >= (now() at time zone 'utc')::date - $3::integer
        and not exists (select from tls_report t where t.day = r.day and t.domain = r.domain)
      group by day, domain limit $4
      on conflict do nothing`,
    values: [DELAY_SECONDS, SPREAD_SECONDS, KEPT_DAYS, PLANNED_PER_RUN],
  });
}

/** The report that is due for longest; nobody else takes it before its next time. */
async function takeDue(pool: Pool): Promise<DueReport | null> {
  const { rows } = await pool.query<Omit<DueReport, 'targets'> & { targets: string }>({
    text: `update tls_report
      set attempts = attempts + 1, due_at = now() + make_interval(secs => $1),
        started_at = coalesce(started_at, now())
      where (day, domain) in (select day, domain from tls_report
        where state = 'pending' and due_at <= now() order by due_at limit 1 for update skip locked)
      returning to_char(day, 'YYYY-MM-DD') as day, domain, targets::text as targets,
        started_at < now() - make_interval(secs => $2) as is_late`,
    values: [RETRY_SECONDS, TRYING_MAX_SECONDS],
  });
  const [row] = rows;
  if (row === undefined) return null;
  return { ...row, targets: JSON.parse(row.targets) as DueReport['targets'] };
}

async function note(pool: Pool, { day, domain }: DueReport, result: Result): Promise<void> {
  await pool.query({
    text: `update tls_report set state = $3, detail = $4 where day = $1 and domain = $2`,
    values: [
      day,
      domain,
      result.state === 'again' ? 'pending' : result.state,
      result.detail.slice(0, DETAIL_CHARS_MAX),
    ],
  });
}

async function noteTarget(
  pool: Pool,
  { day, domain }: DueReport,
  uri: string,
  state: TargetState | null,
): Promise<void> {
  await pool.query({
    text: `update tls_report set targets = case when $4::jsonb is null then targets - $3::text
        else targets || jsonb_build_object($3::text, $4::jsonb) end
      where day = $1 and domain = $2`,
    values: [day, domain, uri, state === null ? null : JSON.stringify(state)],
  });
}

async function countsOf(pool: Pool, { day, domain }: DueReport): Promise<readonly TlsCount[]> {
  const { rows } = await pool.query<{
    policy: string;
    policy_hash: string;
    mx_host: string;
    receiving_ip: string;
    sending_ip: string;
    result: string;
    reason: string | null;
    sessions: string;
  }>({
    text: `select policy::text as policy, policy_hash, mx_host, receiving_ip, sending_ip, result, reason,
        sessions::text as sessions
      from tls_result where day = $1 and domain = $2
      order by policy_hash, result, mx_host, receiving_ip, sending_ip limit $3`,
    values: [day, domain, COUNTS_MAX],
  });
  return rows.map((row) => ({
    policy: JSON.parse(row.policy) as TlsCount['policy'],
    policyHash: row.policy_hash,
    mxHost: row.mx_host,
    receivingIp: row.receiving_ip,
    sendingIp: row.sending_ip,
    result: row.result,
    reason: row.reason,
    sessions: Number(row.sessions),
  }));
}

/** Forgets counts that were reported or are too old, and what became of reports long ago; at most `max` each. */
export async function forgetTlsResults(pool: Pool, max: number): Promise<void> {
  await pool.query({
    text: `delete from tls_result where ctid = any (array(
      select r.ctid from tls_result r
      left join tls_report t on t.day = r.day and t.domain = r.domain
      where r.day < (now() at time zone 'utc')::date - $1::integer or t.state <> 'pending' limit $2))`,
    values: [KEPT_DAYS, max],
  });
  await pool.query({
    text: `delete from tls_report where ctid = any (array(
      select ctid from tls_report where day < (now() at time zone 'utc')::date - $1::integer limit $2))`,
    values: [KEPT_DAYS + 1, max],
  });
}

// ---- one report ----------------------------------------------------------------------------------

async function sendOne(
  d: TlsReporterDependencies,
  due: DueReport,
  signal: AbortSignal,
): Promise<Result> {
  if (due.is_late) {
    const hours = TRYING_MAX_SECONDS / 3_600;
    return { state: 'failed', detail: `it could not be sent within ${hours} hours` };
  }
  const answer = await d.resolver.txt(`_smtp._tls.${due.domain}`);
  if (answer.kind === 'failed') return { state: 'again', detail: `DNS: ${answer.cause}` };
  const read = readTlsReportRecord(answer.kind === 'found' ? answer.records : []);
  if (!read.ok) return { state: 'nobody', detail: read.problem };
  const counts = await countsOf(d.pool, due);
  if (counts.length === 0) return { state: 'nobody', detail: 'there are no counts any more' };
  const author = await findAuthor(d);
  const about: ReportAbout = {
    day: due.day,
    domain: due.domain,
    hostname: d.hostname,
    submitter: author?.domain ?? d.hostname,
  };
  const report = writeReport(about, counts);
  const parcel: Parcel = { due, about, report, file: packReport(about, report), author };
  const results: TargetResult[] = [];
  for (const target of read.targets) results.push(await sendTo(d, parcel, target, signal));
  return sumUp(results);
}

interface Parcel {
  readonly due: DueReport;
  readonly about: ReportAbout;
  readonly report: TlsReport;
  readonly file: ReportFile;
  /** Null: no domain may send. */
  readonly author: Mailbox | null;
}

type TargetResult =
  | { readonly kind: 'done' }
  | { readonly kind: 'failed' | 'again' | 'nobody'; readonly detail: string };

function sumUp(results: readonly TargetResult[]): Result {
  const problems = results.flatMap((one) => (one.kind === 'done' ? [] : [one.detail]));
  const detail = problems.join('; ');
  const has = (kind: TargetResult['kind']): boolean => results.some((one) => one.kind === kind);
  if (has('again')) return { state: 'again', detail };
  if (has('done')) return { state: 'sent', detail };
  return { state: has('failed') ? 'failed' : 'nobody', detail };
}

async function sendTo(
  d: TlsReporterDependencies,
  parcel: Parcel,
  target: ReportTarget,
  signal: AbortSignal,
): Promise<TargetResult> {
  const { due } = parcel;
  const before = due.targets[target.uri];
  const about = (detail: string): string => `${target.uri}: ${detail}`;
  if (before?.state === 'done') return { kind: 'done' };
  if (before?.state === 'failed') return { kind: 'failed', detail: before.detail ?? '' };
  let outcome: TargetResult;
  if (target.kind === 'mail') outcome = await mailTo(d, parcel, target.to);
  else if (before?.state === 'begun') outcome = { kind: 'done' };
  else if (signal.aborted) return { kind: 'again', detail: about('the appliance stops') };
  else {
    await noteTarget(d.pool, due, target.uri, { state: 'begun' });
    const fault = await postReport(d.web, {
      url: target.uri,
      gzipped: parcel.file.gzipped,
      signal,
    });
    if (fault === null) outcome = { kind: 'done' };
    else {
      const kind = fault.kind === 'transient' ? 'again' : 'failed';
      outcome = { kind, detail: fault.reason };
    }
  }
  const isMail = target.kind === 'mail';
  if (outcome.kind === 'done') await noteTarget(d.pool, due, target.uri, { state: 'done' });
  else if (outcome.kind === 'failed') {
    const detail = about(outcome.detail).slice(0, DETAIL_CHARS_MAX);
    await noteTarget(d.pool, due, target.uri, { state: 'failed', detail });
  } else if (!isMail) await noteTarget(d.pool, due, target.uri, null);
  return outcome.kind === 'done' ? outcome : { ...outcome, detail: about(outcome.detail) };
}

async function mailTo(
  d: TlsReporterDependencies,
  { due, about, report, file, author }: Parcel,
  to: Mailbox,
): Promise<TargetResult> {
  if (author === null) {
    return { kind: 'nobody', detail: 'the first tenant has no verified domain to send it from' };
  }
  const message = writeReportMessage(about, { from: author, to, date: d.now(), report, file });
  const identity = `${due.day} ${due.domain} ${to.address}`;
  const key = `tls-report ${createHash('sha256').update(identity).digest('hex')}`;
  try {
    await d.accept(
      {
        from: author,
        to: [to.address],
        cc: [],
        replyTo: [],
        recipients: [to],
        subject: message.subject,
        html: null,
        text: message.text,
        raw: message.raw,
        messageId: message.messageId,
        headers: message.headers,
        attachments: [
          {
            id: newId(),
            filename: file.name,
            contentType: GZIP_TYPE,
            contentId: null,
            disposition: 'attachment',
            sizeBytes: file.gzipped.length,
            url: null,
            blobKey: null,
            rawOffset: message.place.offset,
            rawLength: message.place.length,
          },
        ],
        // Not its bytes: counts that came late are no reason to send it again.
        fingerprint: identity,
        ignoresTlsPolicy: true,
      },
      key,
    );
    return { kind: 'done' };
  } catch (error) {
    if (error instanceof Refusal) return { kind: 'failed', detail: error.message };
    if (!isDatabaseUnavailable(error)) d.log.warn({ err: error }, 'a TLS report was not accepted');
    return { kind: 'again', detail: 'it could not be stored' };
  }
}

/**
 * `tls-reports@` of this host's name or the nearest domain above it that the tenant may send from, else of the first
 * domain that it may send from; null: there is none.
 */
async function findAuthor(d: TlsReporterDependencies): Promise<Mailbox | null> {
  const labels = d.hostname.toLowerCase().split('.');
  const names = labels.map((_, at) => labels.slice(at).join('.'));
  const { rows } = await d.pool.query<{ name: string }>({
    text: `select name from sending_domain where tenant_id = $1 and sending and sending_verified
      order by array_position($2::text[], name) nulls last, id limit 1`,
    values: [d.tenantId, names],
  });
  const [row] = rows;
  if (row === undefined) return null;
  const parsed = parseMailbox(`tls-reports@${row.name}`);
  return parsed.ok ? parsed.mailbox : null;
}
