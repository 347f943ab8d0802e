// Keeps the MTA-STS policies of recipient domains in table `sts_policy`, for as long as they hold, and fetches them anew
// once a day while mail goes there, so that one who blocks the policy host for a while cannot make a policy run out
// (RFC 8461 §10.2). The database's clock decides what has expired. What a policy means is not known here.
import type { Logger } from '../log.ts';
import {
  readStsId,
  type FetchedSts,
  type KnownPolicy,
  type StsMode,
  type StsStore,
} from '../dns/mta-sts.ts';
import type { Resolver } from '../dns/resolver.ts';
import type { Queryable } from '../queue/enqueue.ts';

const REASON_CHARS_MAX = 500;
/** Refreshed after 20 h and up to 8 h more, by its name: what was fetched in one hour does not stay together. */
const REFRESH_AFTER_S = 72_000;
const REFRESH_SPREAD_S = 28_800;
const REFRESHED_MAX = 200;
const IN_PARALLEL = 4;
const UNUSED_DAYS = 180;
const DROPPED_MAX = 10_000;

interface Row {
  readonly policy_id: string;
  readonly mode: StsMode;
  readonly mx: readonly string[];
  readonly raw: string;
  readonly max_age_seconds: number;
  readonly left_ms: string;
  readonly unused_ms: string;
}

export function createStsStore(db: Queryable): StsStore {
  return {
    async find(domain): Promise<KnownPolicy | null> {
      const { rows } = await db.query<Row>({
        name: 'sts-find',
        text: `select policy_id, mode, mx, raw, max_age_seconds,
            (extract(epoch from expires_at - now()) * 1000)::bigint::text as left_ms,
            (extract(epoch from now() - last_used_at) * 1000)::bigint::text as unused_ms
          from sts_policy where domain = $1 and expires_at > now()`,
        values: [domain],
      });
      const [row] = rows;
      if (row === undefined) return null;
      return {
        id: row.policy_id,
        mode: row.mode,
        mx: row.mx,
        raw: row.raw,
        maxAgeSeconds: row.max_age_seconds,
        leftMs: Number(row.left_ms),
        unusedMs: Number(row.unused_ms),
      };
    },
    async keep(domain, policy) {
      await db.query({
        name: 'sts-keep',
        text: `insert into sts_policy (domain, policy_id, mode, mx, raw, max_age_seconds, fetched_at,
            checked_at, expires_at, last_used_at, last_error)
          values ($1, $2, $3, $4::jsonb, $5, $6::integer, now(), now(), now() + $6::integer * interval '1 second', now(), null)
          on conflict (domain) do update
          set policy_id = excluded.policy_id, mode = excluded.mode, mx = excluded.mx, raw = excluded.raw,
            max_age_seconds = excluded.max_age_seconds, fetched_at = now(), checked_at = now(),
            expires_at = excluded.expires_at, last_used_at = now(), last_error = null`,
        values: [
          domain,
          policy.id,
          policy.mode,
          JSON.stringify(policy.mx),
          // Postgres takes no NUL; the text is shown to people only.
          policy.raw.replaceAll('\0', ''),
          policy.maxAgeSeconds,
        ],
      });
    },
    async touch(domain) {
      await db.query({
        name: 'sts-touch',
        text: 'update sts_policy set last_used_at = now() where domain = $1',
        values: [domain],
      });
    },
    async noteFailure(domain, reason) {
      await db.query({
        name: 'sts-note',
        text: 'update sts_policy set last_error = $2 where domain = $1',
        values: [domain, reason.slice(0, REASON_CHARS_MAX)],
      });
    },
  };
}

export interface StsRefreshDependencies {
  readonly db: Queryable;
  readonly resolver: Pick<Resolver, 'txt'>;
  readonly fetch: (domain: string) => Promise<FetchedSts>;
  readonly log: Logger;
}

/** Fetches what is due, at most 200 policies, and forgets those that nobody used for half a year; how many of each. */
export async function refreshStsPolicies(
  d: StsRefreshDependencies,
): Promise<{ readonly fetched: number; readonly failed: number; readonly dropped: number }> {
  const { rowCount } = await d.db.query(
    `delete from sts_policy where domain in (select domain from sts_policy
      where last_used_at < now() - interval '${UNUSED_DAYS} days' limit ${DROPPED_MAX})`,
  );
  // Marked before they are fetched: another process, and the next run, take others.
  const { rows } = await d.db.query<{ domain: string }>(
    `update sts_policy set checked_at = now() where domain in (
       select domain from sts_policy
       where checked_at < now() - (${REFRESH_AFTER_S} + abs(hashtext(domain)::bigint) % ${REFRESH_SPREAD_S}) * interval '1 second'
       order by checked_at limit ${REFRESHED_MAX} for update skip locked)
     returning domain`,
  );
  const due = rows.map(({ domain }) => domain);
  let fetched = 0;
  let failed = 0;
  const one = async (): Promise<void> => {
    for (;;) {
      const domain = due.pop();
      if (domain === undefined) return;
      const problem = await refresh(d, domain);
      if (problem === null) fetched += 1;
      else failed += 1;
      if (problem !== null) d.log.debug({ domain, problem }, 'an MTA-STS policy was not refreshed');
    }
  };
  await Promise.all(Array.from({ length: IN_PARALLEL }, one));
  return { fetched, failed, dropped: rowCount ?? 0 };
}

/** Null, or why the policy stays as it is. */
async function refresh(d: StsRefreshDependencies, domain: string): Promise<string | null> {
  const id = await readStsId(d.resolver, domain);
  const fetched = id === null ? null : await d.fetch(domain);
  const problem =
    fetched === null
      ? 'no valid _mta-sts record'
      : fetched.kind === 'failed'
        ? fetched.reason
        : null;
  if (id === null || fetched === null || fetched.kind === 'failed') {
    await d.db.query('update sts_policy set last_error = $2 where domain = $1', [
      domain,
      problem?.slice(0, REASON_CHARS_MAX),
    ]);
    return problem ?? 'unknown';
  }
  const { policy } = fetched;
  // `last_used_at` stays: a refresh is no use.
  await d.db.query(
    `update sts_policy set policy_id = $2, mode = $3, mx = $4::jsonb, raw = $5, max_age_seconds = $6::integer,
       fetched_at = now(), expires_at = now() + $6::integer * interval '1 second', last_error = null
     where domain = $1`,
    [
      domain,
      id,
      policy.mode,
      JSON.stringify(policy.mx),
      policy.raw.replaceAll('\0', ''),
      policy.maxAgeSeconds,
    ],
  );
  return null;
}
