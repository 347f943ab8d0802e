// Checks what a domain has published: asks the DNS for every record, then stores what that means. The
// questions are asked outside any transaction; what is decided is decided under the lock on the name,
// so that no two tenants ever hold it at the same time.
import { Refusal } from '../access/refusal.ts';
import {
  findCname,
  findDkim,
  findDmarc,
  findHost,
  findMx,
  wrong,
  type Finding,
  type RecordResolver,
} from '../dns/records.ts';
import { oneLook } from '../dns/one-look.ts';
import { findSpf } from '../dns/spf-record.ts';
import { findSts, findTlsReporting } from '../dns/sts-record.ts';
import type { Store } from '../store/orm.ts';
import type { RecordCheck, RecordChecks, RecordKind } from '../store/sending-domain.ts';
import {
  loseName,
  takeDue,
  writeOutcome,
  type ChangeDependencies,
  type Outcome,
} from './changes.ts';
import { wantedRecords, type DomainSettings, type Place, type WantedRecord } from './records.ts';
import { isTaken, lockName, readDomain, type DomainRow } from './rows.ts';
import { holdsName, isPatient, judge, nextCheck, standingOf } from './status.ts';

export interface CheckDependencies extends ChangeDependencies {
  readonly store: Store;
  readonly resolver: RecordResolver;
  readonly place: Place;
  /**
   * Names that count as published without a question: development mode without DNS servers of its own. Null: for any
   * tenant.
   */
  readonly isAssumed: (tenantId: string | null, name: string) => boolean;
  /** How long all questions about one domain may take. */
  readonly lookMs?: number;
}

/** A caller waits for it; a slow zone must not hold up others for longer. */
export const LOOK_MS = 12_000;
/** Of one background run, and how many of them at a time: they wait for the DNS most of the time. */
const RECHECKS_MAX = 200;
const RECHECKS_AT_ONCE = 20;
/** A check that died is repeated after this; longer than the slowest one takes. */
const LEASE_MS = 5 * 60_000;

type Findings = ReadonlyMap<
  RecordKind,
  { readonly wanted: WantedRecord; readonly finding: Finding }
>;

/**
 * Asks the DNS now and answers the domain as it is then; null when the tenant has no such domain. The first call
 * opens 72 hours in which records may appear, and so does one after these have ended.
 * Throws a Refusal, code `domain_taken`, when another tenant holds the name.
 */
export async function verifyDomain(
  d: CheckDependencies,
  tenantId: string,
  id: string,
): Promise<DomainRow | null> {
  const before = await readDomain(d.store.pool, tenantId, id);
  if (before === null) return null;
  if (await isTaken(d.store.pool, tenantId, before.name)) throw refuseTaken(before.name);
  const startedAt = d.now();
  const findings = await look(d, before);
  const after = await settle(d, before, { findings, startedAt, isAsked: true });
  if (after === 'taken') throw refuseTaken(before.name);
  return after;
}

export const refuseTaken = (name: string): Refusal =>
  new Refusal(
    'domain_taken',
    `Another account on this server has verified ${name}. If the domain is yours, claim it with POST /domains/claim.`,
    {
      issues: [
        {
          path: 'name',
          message: `Another account on this server has verified ${name}. If the domain is yours, claim it with POST /domains/claim.`,
        },
      ],
    },
  );

/** Checks the domains that are due; how many there were. Called by the clock, in any number of processes. */
export async function recheckDomains(d: CheckDependencies): Promise<number> {
  const due = await takeDue(d.store.pool, { now: d.now(), max: RECHECKS_MAX, leaseMs: LEASE_MS });
  const queue = [...due];
  const failures: unknown[] = [];
  const work = async (): Promise<void> => {
    for (let next = queue.shift(); next !== undefined; next = queue.shift()) {
      try {
        const before = await readDomain(d.store.pool, next.tenantId, next.id);
        if (before === null) continue;
        const startedAt = d.now();
        await settle(d, before, { findings: await look(d, before), startedAt, isAsked: false });
      } catch (error) {
        failures.push(error); // the others go on; this one is due again when its lease ends
      }
    }
  };
  await Promise.all(Array.from({ length: RECHECKS_AT_ONCE }, work));
  if (failures.length > 0) throw new AggregateError(failures, 'some domains could not be checked');
  return due.length;
}

async function look(d: CheckDependencies, domain: DomainRow): Promise<Findings> {
  const isAssumed = d.isAssumed(domain.tenantId, domain.name);
  const wanted = wantedRecords(domain, domain.keys, d.place);
  return oneLook(d.resolver, d.lookMs ?? LOOK_MS, async (resolver) => {
    const found = await Promise.all(
      wanted.map(async (record) => {
        const finding = isAssumed ? assume(record) : await find({ ...d, resolver }, domain, record);
        return [record.kind, { wanted: record, finding }] as const;
      }),
    );
    return new Map(found);
  });
}

/** Nobody can publish a reserved name; what mail on this machine needs is taken as there. */
function assume({ kind, name }: WantedRecord): Finding {
  if (kind !== 'tracking_cname' && kind !== 'mta_sts_host') return { kind: 'right' };
  return wrong(`${name} is below a reserved name, which no browser can reach.`);
}

async function find(
  d: CheckDependencies,
  domain: DomainSettings,
  { kind, name, value }: WantedRecord,
): Promise<Finding> {
  const { resolver, place } = d;
  switch (kind) {
    case 'return_path_mx':
      return findMx(resolver, { name, host: value, must: 'contain' });
    case 'receiving_mx':
      return findMx(resolver, { name, host: value, must: 'prefer' });
    case 'return_path_spf':
      return findSpf(resolver, { name, host: place.hostname });
    case 'dkim_rsa':
    case 'dkim_ed25519':
      return findDkim(resolver, { name, value });
    case 'tracking_cname':
      return findCname(resolver, { name, target: value });
    case 'mta_sts_host':
      return findHost(resolver, { name, target: value });
    case 'mta_sts_txt':
      return findSts(resolver, { name, value });
    case 'tls_rpt':
      return findTlsReporting(resolver, name);
    default:
      return findDmarc(resolver, domain.name);
  }
}

/**
 * Stores what was found. What was changed meanwhile is looked at the next time, and a look that began later knows
 * better: this one is forgotten then.
 */
async function settle(
  d: CheckDependencies,
  before: DomainRow,
  about: { readonly findings: Findings; readonly startedAt: Date; readonly isAsked: boolean },
): Promise<DomainRow | 'taken' | null> {
  return d.store.transact(async (client) => {
    await lockName(client, before.name);
    const domain = await readDomain(client, before.tenantId, before.id, 'lock');
    if (domain === null) return null;
    if (domain.checkedAt !== null && domain.checkedAt > about.startedAt) return domain;
    const now = d.now();
    const ended =
      domain.verifyingSince !== null &&
      domain.status === 'failed' &&
      !isPatient({ now, verifyingSince: domain.verifyingSince });
    const opens = domain.verifyingSince === null || (about.isAsked && ended);
    const verifyingSince = opens || domain.verifyingSince === null ? now : domain.verifyingSince;
    const checkCount = opens ? 1 : domain.checkCount + 1;
    const clock = { now, verifyingSince };
    const recordChecks = judgeAll(domain, about.findings, { ...clock, place: d.place });
    const standing = standingOf({ ...domain, recordChecks }, clock);
    if (holdsName(standing.status) && (await isTaken(client, domain.tenantId, domain.name))) {
      await loseName(d, client, domain);
      return 'taken';
    }
    const outcome: Outcome = {
      ...standing,
      recordChecks,
      verifyingSince,
      checkCount,
      checkedAt: about.startedAt,
      nextCheckAt: nextCheck(
        { status: standing.status, recordChecks },
        { ...clock, count: checkCount },
      ),
    };
    await writeOutcome(d, client, domain, outcome);
    return { ...domain, ...outcome };
  });
}

function judgeAll(
  domain: DomainRow,
  findings: Findings,
  clock: {
    readonly now: Date;
    readonly verifyingSince: Date;
    readonly place: Place;
  },
): RecordChecks {
  const checks: Partial<Record<RecordKind, RecordCheck>> = {};
  for (const wanted of wantedRecords(domain, domain.keys, clock.place)) {
    const { kind } = wanted;
    const known = domain.recordChecks[kind];
    const found = findings.get(kind);
    const isSame = found?.wanted.name === wanted.name && found.wanted.value === wanted.value;
    const check = isSame ? judge(known, found.finding, clock) : known;
    if (check !== undefined) checks[kind] = check;
  }
  return checks;
}
