// Keeps what was found: one row for each code and subject, and since when it is so. Where the severity of one changes, the
// operator is told: by the caller in the log, and by webhooks in the transaction of the change. A look that brought no
// answer changes nothing; two in a row do.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { tellWebhooks } from '../timeline/outbox.ts';
import { severities, worstFirst, type Finding, type Severity } from './finding.ts';
import type { Checked } from './run.ts';

export interface KeptFinding extends Finding {
  readonly since: Date;
  /** When it was last seen to be so. */
  readonly seenAt: Date;
}

export interface Change {
  readonly finding: Pick<Finding, 'code' | 'subject' | 'message' | 'advice'>;
  /** Null: there was none. */
  readonly before: Severity | null;
  /** Null: there is none any more. */
  readonly after: Severity | null;
}

/** Any constant that no other advisory lock of ours has. */
const KEEP_LOCK = 7_245_178_340;
const MISSES_MAX = 2;
const SHOWN_MAX = 500;
const GONE_MAX = 5_000;
const TURN_FACT = 'doctor_turn';
const LOOKED_FACT = 'doctor_looked_at';

interface Row {
  readonly id: string;
  readonly checkName: string;
  readonly domainId: string | null;
  readonly code: string;
  readonly subject: string;
  readonly severity: Severity;
  readonly misses: number;
  readonly message: string;
  readonly advice: string | null;
  readonly detail: Readonly<Record<string, unknown>> | string;
  readonly sinceMs: string;
  readonly seenMs: string;
}

const COLUMNS = `id, check_name as "checkName", domain_id as "domainId", code, subject, severity, misses, message, advice,
  detail, (extract(epoch from since) * 1000)::bigint::text as "sinceMs",
  (extract(epoch from seen_at) * 1000)::bigint::text as "seenMs"`;

/**
 * Takes the turn to look: of all processes one gets it in `everyMs`, which is longer than a look takes. Null: it is yours;
 * else how long it is until it is anybody's.
 */
export async function takeTurn(store: Store, everyMs: number): Promise<number | null> {
  const { rowCount } = await store.pool.query(
    `insert into appliance_fact as f (name, value) values ($1, now()::text)
     on conflict (name) do update set value = excluded.value
     where f.value::timestamptz <= now() - $2 * interval '1 millisecond'
       or f.value::timestamptz > now() + interval '1 minute'
     returning 1`,
    [TURN_FACT, everyMs],
  );
  if (rowCount === 1) return null;
  const { rows } = await store.pool.query<{ ms: number }>(
    `select (extract(epoch from now() - value::timestamptz) * 1000)::float8 as ms
     from appliance_fact where name = $1`,
    [TURN_FACT],
  );
  return Math.max(1_000, everyMs - (rows[0]?.ms ?? 0));
}

/** Stores what a look found; what changed by it. */
export async function keepFindings(
  store: Store,
  d: {
    readonly checked: readonly Checked[];
    readonly at: Date;
    /** Whose webhooks are told. */
    readonly tenantId: string;
  },
): Promise<readonly Change[]> {
  return store.transact(async (client) => {
    await client.query('select pg_advisory_xact_lock($1)', [KEEP_LOCK]);
    const before = await readRows(client, d.checked);
    const { rows, gone } = merge(before, d);
    await writeRows(client, rows, d.at);
    const lost = [...gone, ...(await readGone(client))];
    await client.query('delete from finding where id = any ($1)', [lost.map(({ id }) => id)]);
    const known = new Map(before.map((row) => [keyOf(row), row]));
    const changes = [
      ...rows.map((row) => changeOf(known.get(keyOf(row)) ?? null, row)),
      ...lost.map((row) => changeOf(row, null)),
    ].filter((change) => change !== null);
    await tellWebhooks(
      client,
      changes.map(({ row, before: severity, after }) => ({
        tenantId: d.tenantId,
        type: 'doctor.finding_changed' as const,
        subjectId: row.id,
        detail: {
          id: row.id,
          code: row.code,
          subject: row.subject,
          severity: after,
          previous_severity: severity,
          message: row.message,
          advice: row.advice,
          since: new Date(Number(row.sinceMs)).toISOString(),
        },
      })),
    );
    await client.query(
      `insert into appliance_fact (name, value) values ($1, $2)
       on conflict (name) do update set value = excluded.value`,
      [LOOKED_FACT, d.at.toISOString()],
    );
    return changes.map(({ row, before: severity, after }) => ({
      finding: row,
      before: severity,
      after,
    }));
  });
}

const keyOf = ({ code, subject }: Pick<Row, 'code' | 'subject'>): string => `${code} ${subject}`;

async function readRows(client: PoolClient, checked: readonly Checked[]): Promise<readonly Row[]> {
  const findings = checked.flatMap((one) => one.findings);
  const { rows } = await client.query<Row>(
    `select ${COLUMNS} from finding where check_name = any ($1)
     union
     select ${COLUMNS} from finding
     where (code, subject) in (select * from unnest($2::text[], $3::text[]))`,
    [
      checked.map(({ name }) => name),
      findings.map(({ code }) => code),
      findings.map(({ subject }) => subject),
    ],
  );
  return rows;
}

/** Of domains that are not looked at any more. */
async function readGone(client: PoolClient): Promise<readonly Row[]> {
  const { rows } = await client.query<Row>(
    `select ${COLUMNS} from finding f where domain_id is not null and not exists (
       select 1 from sending_domain s where s.id = f.domain_id
         and (s.sending_verified or s.receiving_verified))
     limit ${GONE_MAX}`,
  );
  return rows;
}

/** What the rows are after the look, and which of those before are not any more. */
function merge(
  before: readonly Row[],
  d: { readonly checked: readonly Checked[]; readonly at: Date },
): { readonly rows: readonly Row[]; readonly gone: readonly Row[] } {
  const known = new Map(before.map((row) => [keyOf(row), row]));
  const rows = new Map<string, Row>();
  const missed = new Set(d.checked.flatMap(({ name, isMissed }) => (isMissed ? [name] : [])));
  for (const { name, domainId, findings } of d.checked) {
    for (const finding of findings) {
      const row = rowOf(known.get(keyOf(finding)) ?? null, finding, d.at);
      rows.set(keyOf(row), { ...row, checkName: name, domainId });
    }
  }
  const gone = before.filter((row) => !rows.has(keyOf(row)) && !missed.has(row.checkName));
  return { rows: [...rows.values()], gone };
}

function rowOf(known: Row | null, finding: Finding, at: Date): Row {
  const { code, subject, message, advice, detail } = finding;
  const misses = finding.severity === 'unknown' ? (known?.misses ?? 0) + 1 : 0;
  if (known !== null && misses > 0 && misses < MISSES_MAX) return { ...known, misses };
  const severity = misses >= MISSES_MAX ? (finding.whenLasting ?? 'unknown') : finding.severity;
  const now = String(at.getTime());
  const isSame = known !== null && known.severity === severity;
  return {
    id: known?.id ?? newId(),
    checkName: '',
    domainId: null,
    code,
    subject,
    severity,
    misses,
    message,
    advice,
    detail,
    sinceMs: isSame ? known.sinceMs : now,
    seenMs: now,
  };
}

/** What an operator has been told of it; null: nothing yet. */
const toldOf = (row: Row | null): Severity | null =>
  row === null || (row.severity === 'unknown' && row.misses < MISSES_MAX) ? null : row.severity;

/** Null: nothing that anybody wants to hear of. */
function changeOf(
  before: Row | null,
  after: Row | null,
): { readonly row: Row; readonly before: Severity | null; readonly after: Severity | null } | null {
  const [was, is] = [toldOf(before), toldOf(after)];
  if (was === is) return null;
  // What comes or goes and is well: a new domain, an address that is not used any more.
  const isQuiet = (severity: Severity | null): boolean =>
    severity === null || severity === 'ok' || severity === 'info';
  if ((was === null || is === null) && isQuiet(was) && isQuiet(is)) return null;
  return { row: after ?? before!, before: was, after: is };
}

async function writeRows(client: PoolClient, rows: readonly Row[], at: Date): Promise<void> {
  await client.query(
    `insert into finding (id, check_name, domain_id, code, subject, severity, misses, message, advice, detail, since,
       seen_at, looked_at)
     select r.id, r.check_name, r.domain_id, r.code, r.subject, r.severity, r.misses, r.message, r.advice, r.detail,
       r.since, r.seen_at, $13
     from unnest($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::integer[], $8::text[],
       $9::text[], $10::jsonb[], $11::timestamptz[], $12::timestamptz[])
       as r (id, check_name, domain_id, code, subject, severity, misses, message, advice, detail, since, seen_at)
     on conflict (code, subject) do update set check_name = excluded.check_name, domain_id = excluded.domain_id,
       severity = excluded.severity, misses = excluded.misses, message = excluded.message, advice = excluded.advice,
       detail = excluded.detail, since = excluded.since, seen_at = excluded.seen_at, looked_at = excluded.looked_at`,
    [
      rows.map(({ id }) => id),
      rows.map(({ checkName }) => checkName),
      rows.map(({ domainId }) => domainId),
      rows.map(({ code }) => code),
      rows.map(({ subject }) => subject),
      rows.map(({ severity }) => severity),
      rows.map(({ misses }) => misses),
      rows.map(({ message }) => message),
      rows.map(({ advice }) => advice),
      rows.map(({ detail }) => (typeof detail === 'string' ? detail : JSON.stringify(detail))),
      rows.map(({ sinceMs }) => new Date(Number(sinceMs))),
      rows.map(({ seenMs }) => new Date(Number(seenMs))),
      at,
    ],
  );
}

export interface KeptLook {
  /** When the last look was; null: never. */
  readonly lookedAt: Date | null;
  readonly counts: Readonly<Record<Severity, number>>;
  /** The worst first, at most 500. */
  readonly findings: readonly KeptFinding[];
  readonly hasMore: boolean;
}

export async function readFindings(store: Store): Promise<KeptLook> {
  const { rows: counted } = await store.pool.query<{ severity: Severity; count: number }>(
    'select severity, count(*)::integer as count from finding group by severity',
  );
  const { rows } = await store.pool.query<Row>(
    `select ${COLUMNS} from finding
     order by array_position($1::text[], severity), code, subject limit ${SHOWN_MAX + 1}`,
    [severities],
  );
  const { rows: facts } = await store.pool.query<{ value: string }>(
    'select value from appliance_fact where name = $1',
    [LOOKED_FACT],
  );
  const counts = new Map(counted.map(({ severity, count }) => [severity, count]));
  const findings = rows.slice(0, SHOWN_MAX).map(({ sinceMs, seenMs, detail, ...row }) => ({
    ...row,
    detail: fromJson<Readonly<Record<string, unknown>>>(detail),
    since: new Date(Number(sinceMs)),
    seenAt: new Date(Number(seenMs)),
  }));
  return {
    lookedAt: facts[0] === undefined ? null : new Date(facts[0].value),
    counts: Object.fromEntries(
      severities.map((severity) => [severity, counts.get(severity) ?? 0]),
    ) as Record<Severity, number>,
    findings: worstFirst(findings),
    hasMore: rows.length > SHOWN_MAX,
  };
}
