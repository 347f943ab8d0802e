// The doctor: the list of its checks, made of what it finds in the operator's files, and one look that runs them. Works with
// and without an appliance, and without a database: then that is what it finds.
import { join } from 'node:path';
import type { Pool } from 'pg';
import type { Config } from '../config.ts';
import { createAddressGuard } from '../dns/address-guard.ts';
import { createSecureResolver } from '../dns/dnssec.ts';
import { createResolver } from '../dns/resolver.ts';
import type { DomainRow } from '../domains/rows.ts';
import type { Logger } from '../log.ts';
import {
  checkHelo,
  checkReverse,
  findOwnAddresses,
  type OwnAddress,
  type OwnAddresses,
} from './addresses.ts';
import { checkBlockList } from './block-lists.ts';
import { checkCertificates, checkHttps } from './certificates.ts';
import { checkDatabase } from './database.ts';
import { checkDomain, nextDomains } from './domains.ts';
import { bad, shown, worstFirst, type Finding } from './finding.ts';
import { checkClock, checkDisk } from './machine.ts';
import { checkBlobStore, checkDeadLetters, checkOutbox, checkQueue } from './own-state.ts';
import { readAuthorities, readOperatorFiles, type OperatorFiles } from './policy.ts';
import { checkPort25In, checkPort25Out } from './port25.ts';
import { checkResolver } from './resolver.ts';
import { runChecks, type Check, type Checked } from './run.ts';
import { asksDns, type Surroundings } from './surroundings.ts';

/** Of a whole look; a turn is longer (kept.ts). */
export const LOOK_MAX_MS = 60_000;
const DNS_TIMEOUT_MS = 2_000;
const SMTP_PORT = 25;
const HTTPS_PORT = 443;
const ZONES_PER_CHECK_MAX = 200;

export interface DoctorParts {
  readonly config: Config;
  readonly log: Logger;
  /** Absolute. */
  readonly dataDir: string;
  readonly now: () => Date;
  /** Null: not asked here. */
  readonly readBlobMark: (() => Promise<string | null>) | null;
}

export interface LookAt {
  /** Why it is away, or the database. */
  readonly database: Pool | { readonly why: string };
  readonly isActive: boolean;
  /** Only what is about this domain; null: everything. */
  readonly domain: string | null;
  readonly signal?: AbortSignal;
}

/** One look at everything, or at one domain. Never rejects but for files of ours that are broken. */
export async function look(parts: DoctorParts, at: LookAt): Promise<readonly Checked[]> {
  const { config, log, dataDir } = parts;
  const files = await readOperatorFiles(join(dataDir, 'config'));
  const resolver = createResolver({ servers: config.dnsServers, timeoutMs: DNS_TIMEOUT_MS });
  const daneResolver = files.delivery.dane.resolver;
  const pool = 'why' in at.database ? null : at.database;
  const s: Surroundings = {
    config,
    policy: files.doctor,
    delivery: files.delivery,
    resolver,
    secureResolver:
      daneResolver === null
        ? null
        : createSecureResolver({ server: daneResolver, timeoutMs: DNS_TIMEOUT_MS }),
    guard: createAddressGuard({ allow: config.privateHosts }),
    pool,
    readBlobMark: parts.readBlobMark,
    dataDir,
    now: parts.now,
    ticks: () => performance.now(),
    isActive: at.isActive,
    port: SMTP_PORT,
    httpsPort: HTTPS_PORT,
    ownAuthorities: await readAuthorities(files.tls),
  };
  try {
    const until = s.ticks() + LOOK_MAX_MS;
    const check = (checks: readonly Check[]): Promise<readonly Checked[]> =>
      runChecks(checks, {
        log,
        timeMs: until - s.ticks(),
        ...(at.signal === undefined ? {} : { signal: at.signal }),
      });
    const first =
      at.domain === null ? await check([{ name: 'resolver', run: () => checkResolver(s) }]) : [];
    const own = await findOwnAddresses(s);
    // Without the DNS there is one thing to say, not one of every domain.
    const isDeaf =
      own.isUnknown ||
      first.some(({ isMissed, findings }) => isMissed || findings.some(isSilentResolver));
    const others = await check([
      ...(at.domain === null ? generalChecks(s, { own, files, database: at.database }) : []),
      ...(isDeaf && at.domain === null
        ? []
        : await domainChecks(s, { addresses: own.list, name: at.domain, log })),
    ]);
    return [...first, ...others];
  } finally {
    resolver.close();
  }
}

const isSilentResolver = ({ code, severity }: Finding): boolean =>
  code === 'resolver' && severity === 'unknown';

/** What a look found, the worst first. */
export const findingsOf = (checked: readonly Checked[]): readonly Finding[] =>
  worstFirst(checked.flatMap(({ findings }) => findings));

function generalChecks(
  s: Surroundings,
  d: {
    readonly own: OwnAddresses;
    readonly files: OperatorFiles;
    readonly database: LookAt['database'];
  },
): readonly Check[] {
  const { list, findings } = d.own;
  const { pool } = s;
  return [
    { name: 'egress-address', run: async () => findings },
    ...(d.own.isUnknown ? [] : addressChecks(s, list)),
    { name: 'port25-out', run: () => checkPort25Out(s) },
    { name: 'port25-in', run: () => checkPort25In(s) },
    { name: 'certificates', run: () => checkCertificates(s) },
    { name: 'https', run: () => checkHttps(s) },
    { name: 'clock', run: () => checkClock(s) },
    { name: 'disk', run: () => checkDisk(s) },
    { name: 'files', run: async () => judgeFiles(d.files) },
    ...(pool === null ? [awayCheck(d.database)] : databaseChecks(s, pool)),
  ];
}

function addressChecks(s: Surroundings, list: readonly OwnAddress[]): readonly Check[] {
  return [
    {
      name: 'reverse-dns',
      run: () => Promise.all(list.map((own) => checkReverse(s, own))),
    },
    { name: 'helo', run: () => Promise.all(list.map((own) => checkHelo(s, own))) },
    {
      name: 'block-lists',
      run: () =>
        Promise.all(
          list
            .flatMap((own) => s.policy.dnsblZones.map((zone) => ({ own, zone })))
            .slice(0, ZONES_PER_CHECK_MAX)
            .map(({ own, zone }) => checkBlockList(s, own, zone)),
        ),
    },
  ];
}

function awayCheck(database: LookAt['database']): Check {
  const why = 'why' in database ? database.why : '';
  return {
    name: 'database',
    run: async () => [
      bad('error', ['database', 'connection'], {
        message: `The database cannot be used: ${shown(why.replace(/[.\s]+$/, ''), 400)}.`,
        advice:
          'Start it, or correct MAILSTEAD_DATABASE_URL; until then nothing can be accepted, and what it alone knows was not looked at.',
      }),
    ],
  };
}

const databaseChecks = (s: Surroundings, pool: Pool): readonly Check[] => [
  { name: 'database', run: () => checkDatabase(s, pool) },
  { name: 'queue', run: () => checkQueue(pool) },
  {
    name: 'dead-letters',
    run: () => checkDeadLetters(pool, { now: s.now(), lifetimeMs: s.config.messageLifetimeMs }),
  },
  { name: 'outbox', run: () => checkOutbox(pool) },
  { name: 'blob-store', run: () => checkBlobStore(s, pool) },
];

function judgeFiles({ problems }: OperatorFiles): readonly Finding[] {
  return problems.map(({ path, why }) =>
    bad('error', ['settings_file', path], {
      message: `${path} cannot be used: ${shown(why, 400)}.`,
      advice:
        'Correct the file; what it said before stays in force until the next start, which it would stop.',
    }),
  );
}

async function domainChecks(
  s: Surroundings,
  d: {
    readonly addresses: readonly OwnAddress[];
    readonly name: string | null;
    readonly log: Logger;
  },
): Promise<readonly Check[]> {
  if (s.pool === null || !asksDns(s)) return [];
  const domains = await nextDomains(s.pool, d).catch((error: unknown): readonly DomainRow[] => {
    d.log.warn({ err: error }, 'the domains cannot be looked at now');
    return [];
  });
  return domains.map((domain) => ({
    name: `domain ${domain.id}`,
    domainId: domain.id,
    title: domain.name,
    run: () => checkDomain(s, domain, d.addresses),
  }));
}
