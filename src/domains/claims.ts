// Claims: how a tenant gets a name that another tenant holds. The claimer publishes a TXT record that only who
// controls the DNS of the name can publish. Where the holder still uses the name, the claim waits: at most 72
// hours from when the record was first seen, so that a holder cannot keep a name for ever that is not theirs.
// docs/domains.md has the rules in words.
import type { Caller } from '../access/keys.ts';
import { refuseFields } from '../access/refusal.ts';
import { oneLook } from '../dns/one-look.ts';
import { findText, type Finding } from '../dns/records.ts';
import type { BlockedReason, ClaimStatus } from '../store/domain-claim.ts';
import { newId, randomText } from '../store/id.ts';
import { loseName } from './changes.ts';
import { LOOK_MS } from './check.ts';
import { addDomain, generateDkimKeys, refuseOwnName } from './create.ts';
import type { DomainDependencies } from './domains.ts';
import { checkCreate, type CheckedDomain, type ClaimDomainRequest } from './request.ts';
import {
  holdersOf,
  lockName,
  msOf,
  readDomain,
  toDate,
  type DomainRow,
  type Queryable,
} from './rows.ts';
import { holdsName, PATIENCE_MS } from './status.ts';
import { tellDomain } from './view.ts';

export interface ClaimView {
  readonly id: string;
  readonly domainId: string;
  readonly name: string;
  readonly region: string;
  readonly status: ClaimStatus;
  /** What to publish. */
  readonly record: { readonly name: string; readonly value: string };
  readonly blockedReason: BlockedReason | null;
  readonly failureReason: string | null;
  readonly createdAt: Date;
  readonly expiresAt: Date;
}

export interface ClaimVerbs {
  /** `isNew` is false when the same claim is open already. Throws a Refusal. */
  create(
    caller: Caller,
    request: ClaimDomainRequest,
  ): Promise<{ readonly claim: ClaimView; readonly isNew: boolean }>;
  /** The latest claim of the domain; null: no such domain, or it was never claimed. */
  find(caller: Caller, domainId: string): Promise<ClaimView | null>;
  /** Asks the DNS now, and completes the claim when nothing stands against it. */
  verify(caller: Caller, domainId: string): Promise<ClaimView | null>;
}

const CLAIM_LIFE_MS = 7 * 24 * 3_600_000;
/** Within this before the check, a sent email shows that the holder uses the name. */
const ACTIVITY_MS = 7 * 24 * 3_600_000;
/** How long a holder's activity can hold a proven claim up. */
const OWNER_GRACE_MS = PATIENCE_MS;
const TOKEN_CHARACTERS = 32;
const OPEN: readonly ClaimStatus[] = ['pending', 'blocked'];

interface ClaimRow {
  readonly tenantId: string;
  readonly id: string;
  readonly domainId: string;
  readonly name: string;
  readonly region: string;
  readonly token: string;
  readonly status: ClaimStatus;
  readonly blockedReason: BlockedReason | null;
  readonly failureReason: string | null;
  readonly createdAt: Date;
  readonly expiresAt: Date;
  readonly provenAt: Date | null;
}

export function createClaimVerbs(d: DomainDependencies): ClaimVerbs {
  const { store } = d;
  const view = (claim: ClaimRow): ClaimView => viewOf(claim, d.now());
  return {
    async create({ tenantId }, request) {
      const checked = checkCreate(request);
      const known = await readOwn(store.pool, tenantId, checked.name);
      if (known === null) await refuseOwnName(store.pool, tenantId, checked.name);
      const keys = known === null ? await generateDkimKeys() : null;
      return store.transact(async (client) => {
        await lockName(client, checked.name);
        const own = await readOwn(client, tenantId, checked.name);
        const latest = own === null ? null : await readLatest(client, tenantId, own.id);
        if (own !== null && latest !== null && isOpen(latest, d.now()) && isSame(own, checked)) {
          return { claim: view(latest), isNew: false };
        }
        if (own === null) await refuseOwnName(client, tenantId, checked.name);
        if (own !== null && !(isSame(own, checked) && mayClaim(own, latest, d.now()))) {
          const message = `You have the domain ${checked.name} already; remove it before you claim this \`name\`.`;
          throw refuseFields([{ path: 'name', message }], 'domain_exists');
        }
        const domainId =
          own?.id ??
          (await addDomain(
            client,
            { tenantId, status: 'not_started', ...checked },
            // Null: it was there a moment ago.
            { sealingKey: d.sealingKey, keys: keys ?? (await generateDkimKeys()) },
          ));
        if (own === null) {
          const domain = (await readDomain(client, tenantId, domainId))!;
          await tellDomain(client, 'domain.created', { ...d, domain, at: d.now() });
        }
        await client.query(
          `insert into domain_claim (tenant_id, id, domain_id, name, token, status, created_at, expires_at)
           values ($1, $2, $3, $4, $5, 'pending', $6, $7)`,
          [
            tenantId,
            newId(),
            domainId,
            checked.name,
            randomText(TOKEN_CHARACTERS),
            d.now(),
            new Date(d.now().getTime() + CLAIM_LIFE_MS),
          ],
        );
        const claim = await readLatest(client, tenantId, domainId);
        return { claim: view(claim!), isNew: true };
      });
    },

    async find({ tenantId }, domainId) {
      const claim = await readLatest(store.pool, tenantId, domainId);
      return claim === null ? null : view(claim);
    },

    async verify({ tenantId }, domainId) {
      const claim = await readLatest(store.pool, tenantId, domainId);
      if (claim === null || !isOpen(claim, d.now())) return claim === null ? null : view(claim);
      const proof = await findProof(d, claim);
      // A DNS that does not answer proves nothing, nor does it take a proof back.
      if (proof === 'unknown') return view(claim);
      const after = await settleClaim(d, claim, proof === 'right');
      return after === null ? null : view(after);
    },
  };
}

async function findProof(d: DomainDependencies, claim: ClaimRow): Promise<Finding['kind']> {
  // A name that nobody can publish in cannot be proven either, whatever a DNS says.
  if (d.isAssumed(null, claim.name)) return 'absent';
  const { record } = viewOf(claim, d.now());
  const { kind } = await oneLook(d.resolver, d.lookMs ?? LOOK_MS, async (resolver) =>
    findText(resolver, record),
  );
  return kind;
}

async function settleClaim(
  d: DomainDependencies,
  before: ClaimRow,
  isPublished: boolean,
): Promise<ClaimRow | null> {
  return d.store.transact(async (client) => {
    await lockName(client, before.name);
    const claim = await readLatest(client, before.tenantId, before.domainId);
    if (claim === null || claim.id !== before.id || !isOpen(claim, d.now())) return claim;
    const now = d.now();
    const provenAt = isPublished ? (claim.provenAt ?? now) : null;
    const holders = isPublished ? await holdersOf(client, claim.tenantId, claim.name) : [];
    const inGrace = provenAt !== null && now.getTime() - provenAt.getTime() < OWNER_GRACE_MS;
    let blockedReason: BlockedReason | null = null;
    for (const holder of inGrace ? holders : []) {
      blockedReason ??= await whyBlocked(client, {
        tenantId: holder.tenantId,
        name: claim.name,
        now,
      });
    }
    const status = !isPublished ? 'pending' : blockedReason === null ? 'completed' : 'blocked';
    if (status === 'completed') {
      for (const holder of holders) await loseName(d, client, holder);
      await client.query(
        `update domain_claim set status = 'superseded', blocked_reason = null
         where name = $1 and tenant_id <> $2 and status in ('pending', 'blocked', 'completed')`,
        [claim.name, claim.tenantId],
      );
    }
    await client.query(
      `update domain_claim set status = $3, blocked_reason = $4, proven_at = $5
       where tenant_id = $1 and id = $2`,
      [claim.tenantId, claim.id, status, blockedReason, provenAt],
    );
    return readLatest(client, claim.tenantId, claim.domainId);
  });
}

/** What the holder would lose by a claim right now. */
async function whyBlocked(
  db: Queryable,
  holder: { readonly tenantId: string; readonly name: string; readonly now: Date },
): Promise<BlockedReason | null> {
  const { tenantId, name, now } = holder;
  const { rows } = await db.query<{ scheduled: boolean; recent: boolean }>(
    `select
       exists (select 1 from email
         where tenant_id = $1 and last_event = 'scheduled' and from_domain = $2) as scheduled,
       exists (select 1 from email
         where tenant_id = $1 and id > $3 and from_domain = $2) as recent`,
    [tenantId, name, firstIdOf(now.getTime() - ACTIVITY_MS)],
  );
  const { scheduled, recent } = rows[0]!;
  if (scheduled) return 'pending_scheduled_emails';
  return recent ? 'recent_owner_activity' : null;
}

/** Below every id that was made at this time or later (RFC 9562 §5.7). */
function firstIdOf(ms: number): string {
  const time = Math.max(0, ms).toString(16).padStart(12, '0');
  return `${time.slice(0, 8)}-${time.slice(8)}-0000-0000-000000000000`;
}

const isOpen = (claim: ClaimRow, now: Date): boolean =>
  OPEN.includes(claim.status) && claim.expiresAt > now;

/** A row of the name that is not verified, with no claim on its way: nothing is lost by claiming for it. */
const mayClaim = (own: DomainRow, latest: ClaimRow | null, now: Date): boolean =>
  !holdsName(own.status) &&
  (latest === null || !isOpen(latest, now)) &&
  latest?.status !== 'completed';

const isSame = (own: DomainRow, checked: CheckedDomain): boolean =>
  own.region === checked.region &&
  own.returnPathLabel === checked.returnPathLabel &&
  own.trackingSubdomain === checked.trackingSubdomain &&
  own.openTracking === checked.openTracking &&
  own.clickTracking === checked.clickTracking;

async function readOwn(db: Queryable, tenantId: string, name: string): Promise<DomainRow | null> {
  const { rows } = await db.query<{ id: string }>(
    'select id from sending_domain where tenant_id = $1 and name = $2',
    [tenantId, name],
  );
  return rows[0] === undefined ? null : readDomain(db, tenantId, rows[0].id);
}

type RawClaim = Omit<ClaimRow, 'createdAt' | 'expiresAt' | 'provenAt'> & {
  readonly createdMs: string;
  readonly expiresMs: string;
  readonly provenMs: string | null;
};

async function readLatest(
  db: Queryable,
  tenantId: string,
  domainId: string,
): Promise<ClaimRow | null> {
  const { rows } = await db.query<RawClaim>(
    `select c.tenant_id as "tenantId", c.id, c.domain_id as "domainId", c.name, d.region, c.token, c.status,
       c.blocked_reason as "blockedReason", c.failure_reason as "failureReason",
       ${msOf('c.created_at')} as "createdMs", ${msOf('c.expires_at')} as "expiresMs",
       ${msOf('c.proven_at')} as "provenMs"
     from domain_claim c
     join sending_domain d on d.tenant_id = c.tenant_id and d.id = c.domain_id
     where c.tenant_id = $1 and c.domain_id = $2 order by c.id desc limit 1`,
    [tenantId, domainId],
  );
  if (rows[0] === undefined) return null;
  const { createdMs, expiresMs, provenMs, ...row } = rows[0];
  return {
    ...row,
    createdAt: new Date(Number(createdMs)),
    expiresAt: new Date(Number(expiresMs)),
    provenAt: toDate(provenMs),
  };
}

function viewOf(claim: ClaimRow, now: Date): ClaimView {
  const isExpired = OPEN.includes(claim.status) && claim.expiresAt <= now;
  return {
    id: claim.id,
    domainId: claim.domainId,
    name: claim.name,
    region: claim.region,
    status: isExpired ? 'expired' : claim.status,
    record: { name: `_mailstead-claim.${claim.name}`, value: `mailstead-claim=${claim.token}` },
    blockedReason: isExpired ? null : claim.blockedReason,
    failureReason: claim.failureReason,
    createdAt: claim.createdAt,
    expiresAt: claim.expiresAt,
  };
}
