// Receiving routes: which local parts of a domain take mail, and which address stands behind each. Type and domain of
// a route never change; how they are matched is in resolve.ts.
import type { PoolClient } from 'pg';
import { toPage, type PageRequest } from '../access/page.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import { msOf } from '../domains/rows.ts';
import { parseMailbox } from '../mail/address.ts';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { RouteType } from '../store/receiving-route.ts';
import { checkDomainPage } from './domain-page.ts';
import { localKeyOf } from './resolve.ts';
import { endRuleOf, refuseClosedDomain, type DomainState } from './rule-status.ts';

export interface RouteRecord {
  readonly id: string;
  readonly domainId: string;
  readonly domain: string;
  readonly type: RouteType;
  /** As given; null for `catch_all`. */
  readonly localPart: string | null;
  readonly targetLocalPart: string;
  readonly createdAt: Date;
  readonly updatedAt: Date;
}

/** A new route. */
export interface CreateRouteRequest {
  /** A verified domain of yours that has receiving enabled. Never changes. */
  domain_id: string;
  /**
   * `exact`: mail for the local part is its own; `alias`: it belongs to another local part; `catch_all`: everything that no other
   * route takes. Never changes.
   */
  type: 'exact' | 'alias' | 'catch_all';
  /** The address without its domain, at most 64 octets; its case does not matter. Null or absent for `catch_all`. */
  local_part?: string | null;
  /** The local part that the mail belongs to. `exact` may leave it out, and has its own local part then. */
  target_local_part?: string | null;
}

/** A change of a route: what is absent stays. */
export interface UpdateRouteRequest {
  /** The address without its domain; null for `catch_all`. */
  local_part?: string | null;
  /** The local part that the mail belongs to; null: that of an `exact` route itself. */
  target_local_part?: string | null;
  /** Cannot be changed. */
  type?: 'exact' | 'alias' | 'catch_all';
  /** Cannot be changed. */
  domain_id?: string;
}

export interface RoutePage {
  readonly items: readonly RouteRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** An `id` that is missing, foreign or no UUID is one Refusal: not_found. */
export interface RouteVerbs {
  /** Throws a Refusal: a field is wrong, the domain does not receive, `route_exists`. */
  create(tenantId: string, request: CreateRouteRequest): Promise<RouteRecord>;
  /** Newest first; of one domain or, for null, of all. */
  list(tenantId: string, page: PageRequest, domainId: string | null): Promise<RoutePage>;
  find(tenantId: string, id: string): Promise<RouteRecord>;
  /** Its forwarding rule follows. Throws a Refusal: a field is wrong, `route_exists`. */
  update(tenantId: string, id: string, request: UpdateRouteRequest): Promise<RouteRecord>;
  /** Its forwarding rule stays and is invalid. The id as it is stored. */
  remove(tenantId: string, id: string): Promise<string>;
}

export const ROUTES_PER_DOMAIN_MAX = 10_000;
/** Postgres: the domain has such a route. */
const UNIQUE_VIOLATION = '23505';
/** Any domain will do where only the local part is looked at. */
const SOME_DOMAIN = 'local.test';

export function createRouteVerbs(store: Store, now: () => Date): RouteVerbs {
  return {
    async create(tenantId, request) {
      const locals = checkCreate(request);
      return refuseDuplicate(request.type, () =>
        store.transact((client) => insertRoute(client, { tenantId, request, at: now() }, locals)),
      );
    },

    async list(tenantId, page, domainId) {
      const cursor = await checkDomainPage(store, { tenantId, page, domainId }, (id) =>
        readRoute(store.pool, tenantId, id),
      );
      const { rows } = await store.pool.query<RawRoute>(
        `select ${COLUMNS} from ${ROUTES}
         where r.tenant_id = $1 and ($2::uuid is null or r.domain_id = $2)
           and ($3::uuid is null or r.id < $3) and ($4::uuid is null or r.id > $4)
         order by r.id ${cursor.before === null ? 'desc' : 'asc'} limit $5`,
        [tenantId, domainId, cursor.after, cursor.before, cursor.limit + 1],
      );
      return toPage(rows.map(toRecord), cursor);
    },

    find: async (tenantId, id) => (await readRoute(store.pool, tenantId, id)) ?? refuseMissing(),

    async update(tenantId, id, request) {
      const before = (await readRoute(store.pool, tenantId, id)) ?? refuseMissing();
      return refuseDuplicate(before.type, () =>
        store.transact((client) => updateRoute(client, { tenantId, id, at: now() }, request)),
      );
    },

    async remove(tenantId, id) {
      if (!isUuid(id)) refuseMissing();
      return store.transact(async (client) => {
        const { rows } = await client.query<{ id: string }>(
          'delete from receiving_route where tenant_id = $1 and id = $2 returning id',
          [tenantId, id],
        );
        const gone = rows[0]?.id ?? refuseMissing();
        await endRuleOf(client, { tenantId, id: gone, at: now() });
        return gone;
      });
    },
  };
}

/** What a route says, checked without a look at its domain. */
interface Locals {
  readonly localPart: string | null;
  readonly targetLocalPart: string;
}

function checkCreate(request: CreateRouteRequest): Locals {
  const issues = isUuid(request.domain_id)
    ? []
    : [{ path: 'domain_id', message: '`domain_id` must be a valid UUID.' }];
  return checkLocals(
    request.type,
    { localPart: request.local_part ?? null, targetLocalPart: request.target_local_part ?? null },
    issues,
  );
}

/** Throws a Refusal that lists these issues and what is wrong with the local parts of such a route. */
function checkLocals(
  type: RouteType,
  given: { readonly localPart: string | null; readonly targetLocalPart: string | null },
  issues: readonly Issue[] = [],
): Locals {
  const { localPart } = given;
  const targetLocalPart = given.targetLocalPart ?? (type === 'exact' ? localPart : null);
  const missing = [
    ...(type !== 'catch_all' && localPart === null ? ['local_part'] : []),
    ...(type !== 'exact' && targetLocalPart === null ? ['target_local_part'] : []),
  ].map((path) => ({ path, message: `A route of type \`${type}\` needs a \`${path}\`.` }));
  const wrong = [
    ...(type === 'catch_all' && localPart !== null
      ? [
          {
            path: 'local_part',
            message: 'A `catch_all` route takes every local part: its `local_part` is null.',
          },
        ]
      : localIssues('local_part', localPart)),
    ...localIssues('target_local_part', given.targetLocalPart),
  ];
  const all = [...missing, ...issues, ...wrong];
  if (all.length > 0) {
    throw refuseFields(all, missing.length > 0 ? 'missing_required_field' : 'validation_error');
  }
  return { localPart, targetLocalPart: targetLocalPart ?? '' };
}

/** RFC 5321 §4.1.2, RFC 6531 §3.3: what may stand before the @ of that domain. */
function localIssues(path: string, local: string | null, domain = SOME_DOMAIN): readonly Issue[] {
  if (local === null) return [];
  const issue = (words: string): readonly Issue[] => [{ path, message: `\`${path}\` ${words}.` }];
  if (local.trim() === '') return issue('must not be empty; give what stands before the @');
  if (local !== local.trim()) return issue('has white space at its start or end');
  const parsed = parseMailbox(`${local}@${domain}`);
  if (!parsed.ok && /^[^"]*@/.test(local)) {
    return issue('is only what stands before the @, without the domain');
  }
  if (!parsed.ok) return issue(`does not make an address: it ${parsed.problem}`);
  const isWhole = parsed.mailbox.domain === domain && parsed.mailbox.name === null;
  return isWhole ? [] : issue('is only what stands before the @, without a name or a domain');
}

async function insertRoute(
  client: PoolClient,
  about: { readonly tenantId: string; readonly request: CreateRouteRequest; readonly at: Date },
  locals: Locals,
): Promise<RouteRecord> {
  const { tenantId, request, at } = about;
  // One after the other, so that the limit holds.
  const { rows: domains } = await client.query<DomainState>(
    `select name, receiving, receiving_verified as "receivingVerified" from sending_domain
     where tenant_id = $1 and id = $2 for no key update`,
    [tenantId, request.domain_id],
  );
  const [domain] = domains;
  if (domain === undefined) throw new Refusal('not_found', 'Domain not found');
  refuseClosedDomain(domain, 'domain_id');
  checkLengths(locals, domain.name);
  const { rows: counted } = await client.query<{ count: number }>(
    `select count(*)::integer as count from receiving_route where tenant_id = $1 and domain_id = $2`,
    [tenantId, request.domain_id],
  );
  if ((counted[0]?.count ?? 0) >= ROUTES_PER_DOMAIN_MAX) {
    const message = `The domain of this \`domain_id\` has ${ROUTES_PER_DOMAIN_MAX} routes, which is the most; delete some first.`;
    throw refuseFields([{ path: 'domain_id', message }]);
  }
  const id = newId();
  await client.query(
    `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
       target_local_part, created_at, updated_at)
     values ($1, $2, $3, $4, $5, $6, $7, $8, $8)`,
    [
      tenantId,
      id,
      request.domain_id,
      request.type,
      locals.localPart,
      keyOf(locals),
      locals.targetLocalPart,
      at,
    ],
  );
  return (await readRoute(client, tenantId, id))!;
}

async function updateRoute(
  client: PoolClient,
  about: { readonly tenantId: string; readonly id: string; readonly at: Date },
  request: UpdateRouteRequest,
): Promise<RouteRecord> {
  const { tenantId, id, at } = about;
  const before = (await readRoute(client, tenantId, id, 'lock')) ?? refuseMissing();
  const fixed = (['type', 'domain_id'] as const)
    .filter((path) => request[path] !== undefined)
    .map((path) => ({
      path,
      message: `\`${path}\` cannot be changed; make another route.`,
    }));
  const locals = checkLocals(before.type, changedLocals(before, request), fixed);
  checkLengths(locals, before.domain);
  await client.query(
    `update receiving_route set local_part = $3, local_key = $4, target_local_part = $5, updated_at = $6
     where tenant_id = $1 and id = $2`,
    [tenantId, id, locals.localPart, keyOf(locals), locals.targetLocalPart, at],
  );
  // It stays safe to run: its destinations are at other domains, and the route's is the same as before.
  if (locals.targetLocalPart !== before.targetLocalPart) {
    await client.query(
      `update forwarding_rule set route_target_address = $3, updated_at = $4
       where tenant_id = $1 and route_id = $2`,
      [tenantId, id, `${locals.targetLocalPart}@${before.domain}`, at],
    );
  }
  return (await readRoute(client, tenantId, id))!;
}

/** An exact route that has its own local part as its target keeps that when the local part changes. */
function changedLocals(before: RouteRecord, request: UpdateRouteRequest) {
  const isOwnTarget = before.type === 'exact' && before.targetLocalPart === before.localPart;
  const { local_part: local = before.localPart } = request;
  const { target_local_part: target = isOwnTarget ? null : before.targetLocalPart } = request;
  return { localPart: local, targetLocalPart: target };
}

/** The domain makes it too long. Throws a Refusal. */
function checkLengths(locals: Locals, domain: string): void {
  const issues = [
    ...localIssues('local_part', locals.localPart, domain),
    ...localIssues('target_local_part', locals.targetLocalPart, domain),
  ];
  if (issues.length > 0) throw refuseFields(issues);
}

/** The empty key is the catch-all's. */
const keyOf = ({ localPart }: Locals): string => (localPart === null ? '' : localKeyOf(localPart));

async function refuseDuplicate<T>(type: RouteType, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if ((error as { readonly code?: unknown }).code !== UNIQUE_VIOLATION) throw error;
    const [path, message] =
      type === 'catch_all'
        ? ['type', 'The domain has a route with the `type` `catch_all` already; change that one.']
        : [
            'local_part',
            `The domain has an \`${type}\` route with this \`local_part\` already; change that one.`,
          ];
    throw refuseFields([{ path, message }], 'route_exists');
  }
}

function refuseMissing(): never {
  throw new Refusal('not_found', 'Receiving route not found');
}

const ROUTES = `receiving_route r
  join sending_domain d on d.tenant_id = r.tenant_id and d.id = r.domain_id`;
const COLUMNS = `r.id, r.domain_id as "domainId", d.name as domain, r.type, r.local_part as "localPart",
  r.target_local_part as "targetLocalPart", ${msOf('r.created_at')} as "createdMs",
  ${msOf('r.updated_at')} as "updatedMs"`;

type RawRoute = Omit<RouteRecord, 'createdAt' | 'updatedAt'> & {
  readonly createdMs: string;
  readonly updatedMs: string;
};

const toRecord = ({ createdMs, updatedMs, ...row }: RawRoute): RouteRecord => ({
  ...row,
  createdAt: new Date(Number(createdMs)),
  updatedAt: new Date(Number(updatedMs)),
});

/** Null: missing, foreign or no id. `lock` keeps others from changing it. */
async function readRoute(
  db: Pick<PoolClient, 'query'>,
  tenantId: string,
  id: string,
  lock: 'lock' | null = null,
): Promise<RouteRecord | null> {
  if (!isUuid(id)) return null;
  const { rows } = await db.query<RawRoute>(
    `select ${COLUMNS} from ${ROUTES} where r.tenant_id = $1 and r.id = $2
     ${lock === null ? '' : 'for update of r'}`,
    [tenantId, id],
  );
  return rows[0] === undefined ? null : toRecord(rows[0]);
}
