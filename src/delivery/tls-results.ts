// Counts how TLS went with the hosts of each domain, for the daily report of RFC 8460: sessions per UTC day, domain,
// policy, host, addresses and result, in memory at first and every few seconds in table `tls_result`.
//
// Noting never waits and never fails: with the database away the counts are kept, up to a limit. Above every limit the
// finer points of a count are dropped before the count is. A batch whose commit was not heard of is counted again.
import { createHash } from 'node:crypto';
import type { AppliedPolicy, TlsFault } from '../dns/tls-policy.ts';
import type { Logger } from '../log.ts';
import type { Queryable } from '../queue/enqueue.ts';

/** RFC 8460 §4.3; that of a session without one is null. */
export type TlsFailure = TlsFault | 'dane-required';

export interface TlsResult {
  /** The policy domain: that of the recipient for STS and for none; for TLSA, whatever the report is to go to. */
  readonly domain: string;
  readonly policy: AppliedPolicy;
  readonly mxHost: string | null;
  readonly receivingIp: string | null;
  readonly sendingIp: string | null;
  readonly failure: TlsFailure | null;
  /** Words for who reads the report; no secrets. The first of a day's equal failures counts. */
  readonly reason?: string;
  /** The session was for one of our own TLS reports: it is not counted (RFC 8460 §3). */
  readonly isForReport?: boolean;
}

export interface TlsResults {
  /** Counts one session, or one failed try at one. */
  note(result: TlsResult): void;
  /** Stores what is counted, as far as the database lets. Call before the database is closed. */
  stop(): Promise<void>;
}

export interface TlsResultsOptions {
  readonly pool: Queryable;
  readonly log: Logger;
  readonly now: () => Date;
  /** Between two storings; 5 s unless a test is in a hurry. */
  readonly storeMs?: number;
}

const STORE_MS = 5_000;
/** Different counts that wait in memory; above it finer points are dropped, then whole counts. */
const WAITING_MAX = 20_000;
/** Counts that only say domain, policy type and result, beyond those. */
const COARSE_MAX = 5_000;
const BATCH = 500;
/** Rows of one domain and day; above it hosts, addresses and policy texts are left out. */
const ROWS_PER_DAY_MAX = 500;
/** Of a policy's lines, and of all their characters together. */
const STRINGS_MAX = 64;
const STRINGS_CHARS_MAX = 4_096;
const CHARS_MAX = 512;
/** What `result` says of a session without a failure. */
const SUCCESS = 'success';

interface Count {
  readonly day: string;
  readonly domain: string;
  readonly policy: AppliedPolicy;
  readonly policy_hash: string;
  readonly mx_host: string;
  readonly receiving_ip: string;
  readonly sending_ip: string;
  readonly result: string;
  readonly reason: string | null;
  sessions: number;
}

// Rows that exist or fit are kept as they are; the others become the one coarse row of their policy type and result.
// In the order of the key, so that two workers that store the same counts do not lock each other out.
const STORE = `
  with incoming as (
    select i.*, row_number() over (partition by i.day, i.domain order by i.policy_hash, i.mx_host,
      i.receiving_ip, i.sending_ip, i.result) as number
    from jsonb_to_recordset($1::jsonb) as i (day date, domain text, policy jsonb, policy_hash text,
      mx_host text, receiving_ip text, sending_ip text, result text, reason text,
      sessions bigint)
  ), stored as (
    select s.day, s.domain, (select count(*) from (select from tls_result r
      where r.day = s.day and r.domain = s.domain limit ${ROWS_PER_DAY_MAX}) rows) as count
    from (select distinct day, domain from incoming) s
  ), judged as (
    select i.*, s.count + i.number <= ${ROWS_PER_DAY_MAX} or exists (select from tls_result r
      where r.day = i.day and r.domain = i.domain and r.policy_hash = i.policy_hash
        and r.mx_host = i.mx_host and r.receiving_ip = i.receiving_ip
        and r.sending_ip = i.sending_ip and r.result = i.result) as is_kept
    from incoming i join stored s using (day, domain)
  ), placed as (
    select day, domain, policy, policy_hash, mx_host, receiving_ip, sending_ip, result, reason,
      sessions
    from judged where is_kept
    union all
    select day, domain, jsonb_build_object('type', policy->'type', 'strings', '[]'::jsonb,
      'mxHosts', '[]'::jsonb), policy->>'type', '', '', '', result, null, sessions
    from judged where not is_kept
  )
  insert into tls_result (day, domain, policy, policy_hash, mx_host, receiving_ip, sending_ip, result,
    reason, sessions)
  select day, domain, min(policy::text)::jsonb, policy_hash, mx_host, receiving_ip, sending_ip, result,
    min(reason), sum(sessions)
  from placed
  group by day, domain, policy_hash, mx_host, receiving_ip, sending_ip, result
  order by day, domain, policy_hash, mx_host, receiving_ip, sending_ip, result
  on conflict (day, domain, policy_hash, mx_host, receiving_ip, sending_ip, result) do update
  set sessions = tls_result.sessions + excluded.sessions,
    reason = coalesce(tls_result.reason, excluded.reason)`;

export function createTlsResults(options: TlsResultsOptions): TlsResults {
  const { log } = options;
  let waiting = new Map<string, Count>();
  let lost = 0;
  let isAway = false;
  let storing: Promise<boolean> | null = null;

  const add = (count: Count): void => {
    const key = keyOf(count);
    const known = waiting.get(key);
    if (known !== undefined) {
      known.sessions += count.sessions;
    } else if (waiting.size < WAITING_MAX + (isCoarse(count) ? COARSE_MAX : 0)) {
      waiting.set(key, count);
    } else if (isCoarse(count)) {
      lost += count.sessions;
    } else {
      add(coarse(count));
    }
  };

  /** Whether everything was stored. */
  const storeAll = async (): Promise<boolean> => {
    const taken = waiting;
    waiting = new Map();
    const counts = [...taken.values()];
    for (let at = 0; at < counts.length; at += BATCH) {
      const batch = counts.slice(at, at + BATCH);
      try {
        await options.pool.query({
          name: 'store-tls-results',
          text: STORE,
          values: [JSON.stringify(batch)],
        });
      } catch (error) {
        for (const count of counts.slice(at)) add(count);
        if (!isAway) log.warn({ err: error }, 'TLS results cannot be stored now');
        isAway = true;
        return false;
      }
    }
    if (lost > 0) log.warn({ sessions: lost }, 'TLS results were too many to be kept');
    lost = 0;
    isAway = false;
    return true;
  };
  const store = (): Promise<boolean> => {
    storing ??= storeAll().finally(() => {
      storing = null;
    });
    return storing;
  };
  const timer = setInterval(() => void store(), options.storeMs ?? STORE_MS);
  timer.unref();

  return {
    note(result) {
      if (result.isForReport !== true) add(countOf(result, options.now()));
    },
    async stop() {
      clearInterval(timer);
      await storing;
      if (!(await store())) {
        log.warn({ counts: waiting.size }, 'TLS results are lost: the database is away');
      }
    },
  };
}

function countOf(result: TlsResult, at: Date): Count {
  const isSuccess = result.failure === null;
  const policy: AppliedPolicy = {
    type: result.policy.type,
    strings: clipAll(result.policy.strings),
    mxHosts: clipAll(result.policy.mxHosts),
  };
  return {
    day: at.toISOString().slice(0, 10),
    domain: nameOf(result.domain),
    policy,
    policy_hash: hashOf(policy),
    // A report tells of successes only how many there were.
    mx_host: isSuccess ? '' : nameOf(result.mxHost ?? ''),
    receiving_ip: isSuccess ? '' : clip(result.receivingIp ?? ''),
    sending_ip: isSuccess ? '' : clip(result.sendingIp ?? ''),
    result: result.failure ?? SUCCESS,
    reason: isSuccess || result.reason === undefined ? null : clip(result.reason),
    sessions: 1,
  };
}

const nameOf = (name: string): string => clip(name.toLowerCase().replace(/\.$/, ''));

/** Short, and nothing that Postgres does not take as text. */
// oxlint-disable-next-line no-control-regex
const clip = (text: string): string => text.slice(0, CHARS_MAX).toWellFormed().replace(/\0/g, '');

function clipAll(texts: readonly string[]): readonly string[] {
  let left = STRINGS_CHARS_MAX;
  const clipped = texts.slice(0, STRINGS_MAX).map(clip);
  return clipped.filter((text) => (left -= text.length) >= 0);
}

const hashOf = (policy: AppliedPolicy): string =>
  policy.strings.length + policy.mxHosts.length === 0
    ? policy.type
    : createHash('sha256').update(JSON.stringify(policy)).digest('base64url');

const keyOf = (count: Count): string =>
  JSON.stringify([
    count.day,
    count.domain,
    count.policy_hash,
    count.mx_host,
    count.receiving_ip,
    count.sending_ip,
    count.result,
  ]);

const isCoarse = (count: Count): boolean =>
  count.policy_hash === count.policy.type &&
  `${count.mx_host}${count.receiving_ip}${count.sending_ip}` === '';

const coarse = (count: Count): Count => ({
  ...count,
  policy: { type: count.policy.type, strings: [], mxHosts: [] },
  policy_hash: count.policy.type,
  mx_host: '',
  receiving_ip: '',
  sending_ip: '',
  reason: null,
});
