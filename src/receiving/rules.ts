// Forwarding rules: to whom outside a copy of what a route takes is sent. One rule a route; it outlives its route, and is
// invalid then.
import type { Pool, PoolClient } from 'pg';
import { toPage, type PageRequest } from '../access/page.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import { msOf } from '../domains/rows.ts';
import { normalizedAddress, parseMailbox } from '../mail/address.ts';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { AttemptStatus, ForwardReason, RuleStatus } from '../store/receiving-route.ts';
import { checkDomainPage } from './domain-page.ts';
import { resolveRecipient } from './resolve.ts';
import { isReturnPathDomain } from './returned.ts';
import { lockCarrier, refuseUnsafe } from './rule-status.ts';

/** What came of one received email. */
export interface AttemptRecord {
  readonly id: string;
  readonly ruleId: string;
  readonly recipient: string;
  readonly status: AttemptStatus;
  readonly reason: ForwardReason | null;
  readonly explanation: string;
  readonly method: 'relayed' | 'rebuilt' | null;
  readonly receivedEmailId: string;
  readonly emailId: string | null;
  readonly destinations: readonly string[];
  readonly createdAt: Date;
}

export interface RuleRecord {
  readonly id: string;
  readonly domainId: string;
  readonly domain: string;
  readonly routeId: string;
  readonly routeTargetAddress: string;
  readonly destinations: readonly string[];
  readonly status: RuleStatus;
  readonly invalidReason: string | null;
  readonly createdAt: Date;
  readonly updatedAt: Date;
  readonly lastAttempt: AttemptRecord | null;
}

/** A new forwarding rule. */
export interface CreateRuleRequest {
  /** A receiving route of yours that has no rule. */
  route_id: string;
  /** 1 to 25 addresses without names. */
  destinations: string[];
  /** Absent: `active`. */
  status?: 'active' | 'disabled';
}

/** A change of a forwarding rule: what is absent stays. */
export interface UpdateRuleRequest {
  /** 1 to 25 addresses without names. */
  destinations?: string[];
  /** `active` checks everything again, and so makes an `invalid` rule run again when it can. */
  status?: 'active' | 'disabled';
  /** Cannot be changed. */
  route_id?: string;
}

export interface RulePage {
  readonly items: readonly RuleRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** An `id` that is missing, foreign or no UUID is one Refusal: not_found. */
export interface RuleVerbs {
  /** Throws a Refusal: a field is wrong, `forwarding_loop`, `rule_exists`, the domain does not receive. */
  create(tenantId: string, request: CreateRuleRequest): Promise<RuleRecord>;
  /** Newest first; of one domain or, for null, of all. */
  list(tenantId: string, page: PageRequest, domainId: string | null): Promise<RulePage>;
  find(tenantId: string, id: string): Promise<RuleRecord>;
  /** Throws a Refusal as `create` does. */
  update(tenantId: string, id: string, request: UpdateRuleRequest): Promise<RuleRecord>;
  /** What it forwarded stays. The id as it is stored. */
  remove(tenantId: string, id: string): Promise<string>;
}

export interface RuleDependencies {
  readonly store: Store;
  readonly now: () => Date;
  /** Where bounces come home beside the domains of tenants. */
  readonly hostname: string;
}

export const DESTINATIONS_MAX = 25;
export const RULES_PER_TENANT_MAX = 10_000;
/** Postgres: the route has a rule. */
const UNIQUE_VIOLATION = '23505';
/** Any constant that no other advisory lock of two keys has. */
const COUNT_LOCK = 724_518;

export function createRuleVerbs(d: RuleDependencies): RuleVerbs {
  const { store, now } = d;
  return {
    async create(tenantId, request) {
      const destinations = checkDestinations(request.destinations, routeIdIssues(request.route_id));
      await refuseReturnPaths(store.pool, d.hostname, destinations);
      try {
        return await store.transact((client) =>
          insertRule(client, { tenantId, request, at: now() }, destinations),
        );
      } catch (error) {
        if ((error as { readonly code?: unknown }).code !== UNIQUE_VIOLATION) throw error;
        const message =
          'The route of this `route_id` has a forwarding rule already; change that one.';
        throw refuseFields([{ path: 'route_id', message }], 'rule_exists');
      }
    },

    async list(tenantId, page, domainId) {
      const cursor = await checkDomainPage(store, { tenantId, page, domainId }, (id) =>
        readRule(store.pool, tenantId, id),
      );
      const { rows } = await store.pool.query<RawRule>(
        `select ${COLUMNS} from ${RULES}
         where f.tenant_id = $1 and ($2::uuid is null or f.domain_id = $2)
           and ($3::uuid is null or f.id < $3) and ($4::uuid is null or f.id > $4)
         order by f.id ${cursor.before === null ? 'desc' : 'asc'} limit $5`,
        [tenantId, domainId, cursor.after, cursor.before, cursor.limit + 1],
      );
      return toPage(rows.map(toRecord), cursor);
    },

    find: async (tenantId, id) => (await readRule(store.pool, tenantId, id)) ?? refuseMissing(),

    async update(tenantId, id, request) {
      const before = (await readRule(store.pool, tenantId, id)) ?? refuseMissing();
      const fixed =
        request.route_id === undefined
          ? []
          : [{ path: 'route_id', message: '`route_id` cannot be changed; make another rule.' }];
      const given =
        request.destinations === undefined ? null : checkDestinations(request.destinations, fixed);
      if (given === null && fixed.length > 0) throw refuseFields(fixed);
      if (given !== null) await refuseReturnPaths(store.pool, d.hostname, given);
      return store.transact((client) =>
        updateRule(client, { tenantId, before, at: now() }, { ...request, destinations: given }),
      );
    },

    async remove(tenantId, id) {
      if (!isUuid(id)) refuseMissing();
      const { rows } = await store.pool.query<{ id: string }>(
        'delete from forwarding_rule where tenant_id = $1 and id = $2 returning id',
        [tenantId, id],
      );
      return rows[0]?.id ?? refuseMissing();
    },
  };
}

const routeIdIssues = (routeId: string): readonly Issue[] =>
  isUuid(routeId) ? [] : [{ path: 'route_id', message: '`route_id` must be a valid UUID.' }];

/** Each mailbox once, in the order given. Throws a Refusal that lists these issues, too. */
function checkDestinations(
  given: readonly string[],
  issues: readonly Issue[] = [],
): readonly string[] {
  const isCountRight = given.length >= 1 && given.length <= DESTINATIONS_MAX;
  const countIssues = isCountRight
    ? []
    : [
        {
          path: 'destinations',
          message: `\`destinations\` must have 1 to ${DESTINATIONS_MAX} addresses.`,
        },
      ];
  const parsed = given.slice(0, DESTINATIONS_MAX).map((text, index) => {
    const path = `destinations.${index}`;
    const mailbox = parseMailbox(text);
    if (!mailbox.ok) return { issue: { path, message: `\`${path}\` ${mailbox.problem}.` } };
    if (mailbox.mailbox.name !== null) {
      return { issue: { path, message: `\`${path}\` must be an address without a name.` } };
    }
    return { address: mailbox.mailbox.address };
  });
  const all = [...issues, ...countIssues, ...parsed.flatMap(({ issue }) => issue ?? [])];
  if (all.length > 0) throw refuseFields(all);
  return [...new Set(parsed.flatMap(({ address }) => address ?? []).map(normalizedAddress))];
}

/** Local parts of the return paths that we make ourselves, by their form. */
const RETURN_PATH = /^(?:b\+[a-z0-9][a-z2-7]{45}|srs[01][=+-].*)$/i;

/** Mail to where bounces come home settles deliveries and reaches nobody. Throws a Refusal. */
async function refuseReturnPaths(
  pool: Pool,
  hostname: string,
  destinations: readonly string[],
): Promise<void> {
  const issues: Issue[] = [];
  for (const [index, destination] of destinations.entries()) {
    if (!(await isReturnPathDomain(pool, { hostname }, destination))) continue;
    const at = destination.lastIndexOf('@');
    const isPath = RETURN_PATH.test(destination.slice(0, at));
    // The host's own name may be a receiving domain as well.
    const domain = await resolveRecipient(pool, `postmaster${destination.slice(at)}`);
    if (!isPath && domain.kind !== 'not_ours') continue;
    const path = `destinations.${index}`;
    const message = `\`${path}\` is where bounces come back to this server, and no mailbox.`;
    issues.push({ path, message });
  }
  if (issues.length > 0) throw refuseFields(issues);
}

async function insertRule(
  client: PoolClient,
  about: { readonly tenantId: string; readonly request: CreateRuleRequest; readonly at: Date },
  destinations: readonly string[],
): Promise<RuleRecord> {
  const { tenantId, request, at } = about;
  // One after the other, so that the limit holds.
  await client.query('select pg_advisory_xact_lock($1, hashtext($2))', [COUNT_LOCK, tenantId]);
  const { rows: routes } = await client.query<{ domain_id: string }>(
    'select domain_id from receiving_route where tenant_id = $1 and id = $2',
    [tenantId, request.route_id],
  );
  const [found] = routes;
  if (found === undefined) throw routeNotFound();
  const place = { tenantId, domainId: found.domain_id, routeId: request.route_id };
  const carrier = await lockCarrier(client, place);
  const { domain, route } = carrier;
  if (domain === null || route === null) throw routeNotFound();
  const status = request.status ?? 'active';
  if (status === 'active') refuseUnsafe(carrier, destinations);
  const { rows: counted } = await client.query<{ count: number }>(
    'select count(*)::integer as count from forwarding_rule where tenant_id = $1',
    [tenantId],
  );
  if ((counted[0]?.count ?? 0) >= RULES_PER_TENANT_MAX) {
    const message = `There are ${RULES_PER_TENANT_MAX} forwarding rules, which is the most; delete some before you add one for this \`route_id\`.`;
    throw refuseFields([{ path: 'route_id', message }]);
  }
  const id = newId();
  await client.query(
    `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
       destinations, status, created_at, updated_at)
     values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)`,
    [
      tenantId,
      id,
      place.domainId,
      domain.name,
      place.routeId,
      `${route.targetLocalPart}@${domain.name}`,
      JSON.stringify(destinations),
      status,
      at,
    ],
  );
  return (await readRule(client, tenantId, id))!;
}

async function updateRule(
  client: PoolClient,
  about: { readonly tenantId: string; readonly before: RuleRecord; readonly at: Date },
  change: {
    readonly destinations: readonly string[] | null;
    readonly status?: 'active' | 'disabled';
  },
): Promise<RuleRecord> {
  const { tenantId, at } = about;
  const { id, domainId, routeId } = about.before;
  const carrier = await lockCarrier(client, { tenantId, domainId, routeId });
  const before = (await readRule(client, tenantId, id, 'lock')) ?? refuseMissing();
  const status = change.status ?? before.status;
  const destinations = change.destinations ?? before.destinations;
  if (status === 'active') refuseUnsafe(carrier, destinations);
  const isRevived = before.status === 'invalid' && status !== 'invalid';
  await client.query(
    `update forwarding_rule set destinations = $3, status = $4, invalid_reason = $5, updated_at = $6,
       loops = case when $7 then 0 else loops end,
       loops_since = case when $7 then null else loops_since end
     where tenant_id = $1 and id = $2`,
    [
      tenantId,
      id,
      JSON.stringify(destinations),
      status,
      status === 'invalid' ? before.invalidReason : null,
      at,
      isRevived,
    ],
  );
  return (await readRule(client, tenantId, id))!;
}

const routeNotFound = (): Refusal => new Refusal('not_found', 'Receiving route not found');

function refuseMissing(): never {
  throw new Refusal('not_found', 'Forwarding rule not found');
}

/** With the latest attempt of each, by one range of an index. */
const RULES = `forwarding_rule f left join lateral (
    select jsonb_build_object('id', id, 'ruleId', rule_id, 'recipient', recipient, 'status', status, 'reason', reason, 'explanation', explanation,
      'method', method, 'receivedEmailId', received_email_id, 'emailId', email_id,
      'destinations', destinations, 'createdMs', ${msOf('created_at')}) as value
    from forwarding_attempt
    where tenant_id = f.tenant_id and rule_id = f.id order by id desc limit 1
  ) a on true`;
const COLUMNS = `f.id, f.domain_id as "domainId", f.domain, f.route_id as "routeId",
  f.route_target_address as "routeTargetAddress", f.destinations, f.status,
  f.invalid_reason as "invalidReason", ${msOf('f.created_at')} as "createdMs",
  ${msOf('f.updated_at')} as "updatedMs", a.value as "lastAttempt"`;

interface RawTimes {
  readonly createdMs: string;
  readonly updatedMs: string;
}
type RawRule = Omit<RuleRecord, 'createdAt' | 'updatedAt' | 'lastAttempt'> &
  RawTimes & {
    readonly lastAttempt: (Omit<AttemptRecord, 'createdAt'> & Pick<RawTimes, 'createdMs'>) | null;
  };

function toRecord({ createdMs, updatedMs, lastAttempt, ...row }: RawRule): RuleRecord {
  const at = (ms: string): Date => new Date(Number(ms));
  if (lastAttempt === null) {
    return { ...row, createdAt: at(createdMs), updatedAt: at(updatedMs), lastAttempt };
  }
  const { createdMs: attemptedMs, ...attempt } = lastAttempt;
  return {
    ...row,
    createdAt: at(createdMs),
    updatedAt: at(updatedMs),
    lastAttempt: { ...attempt, createdAt: at(attemptedMs) },
  };
}

/** Null: missing, foreign or no id. `lock` keeps others from changing it. */
async function readRule(
  db: Pick<PoolClient, 'query'>,
  tenantId: string,
  id: string,
  lock: 'lock' | null = null,
): Promise<RuleRecord | null> {
  if (!isUuid(id)) return null;
  const { rows } = await db.query<RawRule>(
    `select ${COLUMNS} from ${RULES} where f.tenant_id = $1 and f.id = $2
     ${lock === null ? '' : 'for update of f'}`,
    [tenantId, id],
  );
  return rows[0] === undefined ? null : toRecord(rows[0]);
}
