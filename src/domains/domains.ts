// What a tenant can do with domains: create, list, read, change, remove, verify. A name is the tenant's own as often as
// tenants like, until one of them has it verified (check.ts); claims (claims.ts) move it from there.
import type { Caller } from '../access/keys.ts';
import type { PageRequest } from '../access/page.ts';
import { refuseFields } from '../access/refusal.ts';
import type { RecordKind } from '../store/sending-domain.ts';
import { takeTurns } from './at-once.ts';
import { deleteDomain, writeSettings } from './changes.ts';
import { refuseTaken, verifyDomain, type CheckDependencies } from './check.ts';
import { createClaimVerbs, type ClaimVerbs } from './claims.ts';
import { addDomain, generateDkimKeys, refuseOwnName } from './create.ts';
import { wantedRecords } from './records.ts';
import {
  checkCreate,
  checkUpdate,
  settingIssues,
  type CreateDomainRequest,
  type UpdateDomainRequest,
} from './request.ts';
import { isTaken, lockName, readDomain, readPage, type DomainRow } from './rows.ts';
import { nextCheck, standingOf } from './status.ts';
import { tellDomain, viewOf, type DomainView } from './view.ts';

export type { DomainView, RecordView } from './view.ts';

export interface DomainVerbs {
  /** Throws a Refusal. */
  create(caller: Caller, request: CreateDomainRequest): Promise<DomainView>;
  list(
    caller: Caller,
    page: PageRequest,
  ): Promise<{ readonly items: readonly DomainView[]; readonly hasMore: boolean }>;
  /** Null: missing or foreign; here and below. */
  find(caller: Caller, id: string): Promise<DomainView | null>;
  /** False: missing or foreign. Throws a Refusal. */
  update(caller: Caller, id: string, request: UpdateDomainRequest): Promise<boolean>;
  /** Its emails and forwarding rules stay; its API keys are revoked. */
  remove(caller: Caller, id: string): Promise<boolean>;
  verify(caller: Caller, id: string): Promise<DomainView | null>;
  readonly claims: ClaimVerbs;
}

export interface DomainDependencies extends CheckDependencies {
  readonly sealingKey: Buffer;
  /**
   * Why senders would not trust the certificate of our inbound listener, as the end of a sentence; null: they do. Absent: nobody
   * knows here, and `enforce` is refused.
   */
  readonly certificateFault?: () => string | null;
}

export function createDomainVerbs(d: DomainDependencies): DomainVerbs {
  const { store } = d;
  const view = (domain: DomainRow): DomainView => viewOf(domain, d.place);
  const turns = takeTurns();
  const claims = createClaimVerbs(d);
  return {
    async create({ tenantId }, request) {
      const checked = checkCreate(request);
      if (checked.mtaSts === 'enforce') refuseUntrusted(d);
      await refuseOwnName(store.pool, tenantId, checked.name);
      if (await isTaken(store.pool, tenantId, checked.name)) throw refuseTaken(checked.name);
      const keys = await generateDkimKeys();
      return store.transact(async (client) => {
        await lockName(client, checked.name);
        await refuseOwnName(client, tenantId, checked.name);
        if (await isTaken(client, tenantId, checked.name)) throw refuseTaken(checked.name);
        const id = await addDomain(
          client,
          { tenantId, status: 'not_started', ...checked },
          { sealingKey: d.sealingKey, keys },
        );
        const domain = (await readDomain(client, tenantId, id))!;
        await tellDomain(client, 'domain.created', { ...d, domain, at: d.now() });
        return view(domain);
      });
    },

    async list({ tenantId }, page) {
      const { items, hasMore } = await readPage(store.pool, tenantId, page);
      return { items: items.map(view), hasMore };
    },

    async find({ tenantId }, id) {
      const domain = await readDomain(store.pool, tenantId, id);
      return domain === null ? null : view(domain);
    },

    update: ({ tenantId }, id, request) => updateDomain(d, { tenantId, id }, request),

    async remove({ tenantId }, id) {
      return store.transact(async (client) => {
        await client.query(
          `update api_key set revoked_at = now()
           where tenant_id = $1 and domain_id = $2 and revoked_at is null`,
          [tenantId, id],
        );
        return deleteDomain(d, client, { tenantId, id });
      });
    },

    async verify({ tenantId }, id) {
      const domain = await turns(tenantId, () => verifyDomain(d, tenantId, id));
      return domain === null ? null : view(domain);
    },

    claims: {
      ...claims,
      verify: (caller, id) => turns(caller.tenantId, () => claims.verify(caller, id)),
    },
  };
}

/** RFC 8461 §4.2: under `enforce` a sender keeps mail for a host whose certificate it does not trust. */
function refuseUntrusted({ certificateFault, place }: DomainDependencies): void {
  const fault = certificateFault === undefined ? 'is not known here' : certificateFault();
  if (fault === null) return;
  const message = `\`mta_sts\` cannot be 'enforce': the certificate of ${place.hostname} ${fault}, so senders would keep their mail. Use 'testing' until the operator has one.`;
  throw refuseFields([{ path: 'mta_sts', message }]);
}

async function updateDomain(
  d: DomainDependencies,
  about: { readonly tenantId: string; readonly id: string },
  request: UpdateDomainRequest,
): Promise<boolean> {
  const change = checkUpdate(request);
  return d.store.transact(async (client) => {
    const before = await readDomain(client, about.tenantId, about.id, 'lock');
    if (before === null) return false;
    const after = { ...before, ...change };
    const issues = settingIssues(after);
    if (issues.length > 0) throw refuseFields(issues);
    if (after.mtaSts === 'enforce' && before.mtaSts !== 'enforce') refuseUntrusted(d);
    await writeSettings(d, client, after, outcomeOfChange(d, before, after));
    return true;
  });
}

/** Records that stay as they are keep what is known of them; new ones get 72 hours to appear. */
function outcomeOfChange(d: DomainDependencies, before: DomainRow, after: DomainRow) {
  const recordsOf = (domain: DomainRow): ReadonlyMap<RecordKind, string> =>
    new Map(
      wantedRecords(domain, domain.keys, d.place).map(({ kind, name, value }) => [
        kind,
        `${name} ${value}`,
      ]),
    );
  const [old, wanted] = [recordsOf(before), recordsOf(after)];
  const kept = [...wanted].flatMap(([kind, record]) => {
    const check = before.recordChecks[kind];
    return check !== undefined && old.get(kind) === record ? [[kind, check] as const] : [];
  });
  const recordChecks = Object.fromEntries(kept);
  const now = d.now();
  const isNew = [...wanted].some(([kind, record]) => old.get(kind) !== record);
  const { verifyingSince } = before;
  if (verifyingSince === null && before.status === 'not_started') {
    return { ...untouched(before), recordChecks, ...standingOf({ ...after, recordChecks }, null) };
  }
  const since = isNew || verifyingSince === null ? now : verifyingSince;
  const checkCount = isNew ? 0 : before.checkCount;
  const clock = { now, verifyingSince: since };
  const standing = standingOf({ ...after, recordChecks }, clock);
  return {
    ...standing,
    recordChecks,
    verifyingSince: since,
    checkCount,
    checkedAt: null,
    nextCheckAt: nextCheck(
      // What is new is looked for soon, also where nothing depends on it.
      { status: isNew ? 'pending' : standing.status, recordChecks },
      { ...clock, count: checkCount },
    ),
  };
}

const untouched = (domain: DomainRow) => ({
  verifyingSince: domain.verifyingSince,
  checkCount: domain.checkCount,
  checkedAt: null,
  nextCheckAt: null,
});
