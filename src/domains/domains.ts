// What a tenant can do with domains: create, list, read, change, remove, verify. A name is the tenant's own as often as
// tenants like, until one of them has it verified (check.ts); claims (claims.ts) move it from there.
import type { Caller } from '../access/keys.ts';
import { checkPage, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
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
}

export function createDomainVerbs(d: DomainDependencies): DomainVerbs {
  const { store } = d;
  const view = (domain: DomainRow): DomainView => viewOf(domain, d.place);
  const turns = takeTurns();
  const claims = createClaimVerbs(d);
  return {
    async create({ tenantId }, request) {
      const checked = checkCreate(request);
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
      const cursor = checkPage(page);
      const at = cursor.after ?? cursor.before;
      if (at !== null && (await readDomain(store.pool, tenantId, at)) === null)
        refuseCursor(cursor);
      const { items, hasMore } = toPage(await readPage(store.pool, tenantId, cursor), cursor);
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
    await writeSettings(d, client, after, outcomeOfChange(d, before, after));
    return true;
  });
}

/** Records that stay as they are keep what is known of them; new ones get 72 hours to appear. */
function outcomeOfChange(d: DomainDependencies, before: DomainRow, after: DomainRow) {
  const namesOf = (domain: DomainRow): ReadonlyMap<RecordKind, string> =>
    new Map(wantedRecords(domain, domain.keys, d.place).map(({ kind, name }) => [kind, name]));
  const [old, wanted] = [namesOf(before), namesOf(after)];
  const kept = [...wanted].flatMap(([kind, name]) => {
    const check = before.recordChecks[kind];
    return check !== undefined && old.get(kind) === name ? [[kind, check] as const] : [];
  });
  const recordChecks = Object.fromEntries(kept);
  const now = d.now();
  const isNew = [...wanted].some(([kind, name]) => old.get(kind) !== name);
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
      { status: standing.status, recordChecks },
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
