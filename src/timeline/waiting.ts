// "Why has it not arrived yet, and what would change that?": one code, one sentence and one remedy for an email, from its
// deliveries, their last attempts, what the operator paused, what workers report of the lanes, and who runs at all. A
// tenant learns how the lanes are that its own mail takes; what other tenants' mail met there is for the operator.
import type { SqlEntityManager } from '@mikro-orm/postgresql';
import type { Attempt, Delivery, DeliveryState } from '../store/delivery.ts';
import { isTriedAgain } from '../store/delivery.ts';
import { HOME_LANE, readDestination, SMARTHOST_LANE } from '../store/destination.ts';

export interface Waiting {
  /**
   * The rule that decides now: `scheduled`, `preparing`, `queued`, `no_worker`, `paused`, `port_25_blocked`,
   * `circuit_open`, `lane_busy`, `in_flight`, `greylisted`, `policy_lookup_failed`, `tls_required`, `deferred` or
   * `unknown`.
   */
  code: string;
  /** One sentence that says why it is not delivered yet. */
  reason: string;
  /** What would change that, and whose turn it is. */
  remedy: string;
  /** Null where it does not depend on a time. */
  next_attempt_at: Date | null;
  recipients: string[];
}

export type DeliveryFacts = Pick<
  InstanceType<typeof Delivery.class>,
  | 'recipient'
  | 'position'
  | 'lane'
  | 'state'
  | 'attempts'
  | 'dueAt'
  | 'expiresAt'
  | 'unknowns'
  | 'lastCause'
  | 'lastReply'
>;
type LastAttempt = Pick<InstanceType<typeof Attempt.class>, 'position' | 'number' | 'cause'>;

/** What the fetcher of its attachments has to do and has met. */
export interface FetchFacts {
  readonly dueAt: Date;
  readonly attempts: number;
  readonly isUnderWay: boolean;
  readonly lastError: string | null;
}

/** What stands between deliveries and their attempts. */
export interface Obstacles {
  readonly isAnyWorker: boolean;
  readonly pauses: readonly PauseFacts[];
  /** By destination the lanes that serve it, one of each address that it may leave from, the last found first. */
  readonly lanes: ReadonlyMap<string, readonly LaneFacts[]>;
  /** Since when port 25 has been blocked, by egress. */
  readonly blocked: ReadonlyMap<string, Date>;
}

interface PauseFacts {
  readonly kind: 'lane' | 'destination' | 'tenant' | 'all';
  readonly name: string;
  readonly reason: string | null;
  readonly until: Date | null;
}

interface LaneFacts {
  readonly name: string;
  readonly egress: string;
  readonly circuit: 'closed' | 'open' | 'half_open';
  readonly openedAt: Date | null;
  readonly openUntil: Date | null;
  /** May hold words of hosts about mail of others: for the operator only. */
  readonly reason: string | null;
  /** Null as well when the report is too old to tell. */
  readonly limitedBy: string | null;
  readonly connections: number;
  readonly connectionsMax: number;
  readonly concurrency: number;
  readonly queued: number;
}

/** A worker that is silent for longer does not work (jobs/ calls it lost a little later). */
const HEARTBEAT_MAX = `interval '60 seconds'`;
/** A lane is reported when something about it changes; one that hangs is longer the same, up to the wait for an answer. */
const LIMIT_AGE_MAX = `interval '10 minutes'`;
/** As queue/egress-state.ts: a worker that watches a blocked egress keeps saying so. */
const BLOCKED_AGE_MAX = `interval '10 minutes'`;
/** Of all recipients together; one destination has a lane for every address that it may be sent from. */
const LANES_MAX = 1_000;

const OPEN: ReadonlySet<DeliveryState> = new Set(['scheduled', 'preparing', 'ready', 'in_flight']);

/** The deliveries that something is still to happen to, the one that waits longest first. */
function openAmong<T extends DeliveryFacts>(deliveries: readonly T[]): readonly T[] {
  return deliveries
    .filter((row) => OPEN.has(row.state) || isTriedAgain(row))
    .toSorted((a, b) => b.dueAt.getTime() - a.dueAt.getTime());
}

const ms = (column: string): string => `(extract(epoch from ${column}) * 1000)::float8`;
const dateOf = (value: number | null): Date | null => (value === null ? null : new Date(value));

/** What may hold up the deliveries; null when none is waiting. */
export async function findObstacles(
  em: SqlEntityManager,
  tenantId: string,
  deliveries: readonly DeliveryFacts[],
): Promise<Obstacles | null> {
  const destinations = JSON.stringify([...new Set(openAmong(deliveries).map(({ lane }) => lane))]);
  if (destinations === '[]') return null;
  const lanes = await em.execute<LaneRow[]>(
    `select d.destination, l.name, l.egress, l.reason, l.connections, l.connections_max, l.concurrency, l.queued,
       ${ms('l.opened_at')} as opened_ms, ${ms('l.open_until')} as until_ms,
       case when l.reported_at > now() - ${LIMIT_AGE_MAX} then l.limited_by end as limited_by,
       case when greatest(l.open_until, l.reported_at) < now() - ${LIMIT_AGE_MAX} then 'closed'
         else l.circuit end as circuit
     from lane_destination d join lane l on l.name = d.lane
     where d.destination in (select jsonb_array_elements_text(?::jsonb))
     order by d.seen_at desc, l.name limit ${LANES_MAX}`,
    [destinations],
  );
  const pauses = await em.execute<PauseRow[]>(
    `select kind, name, reason, ${ms('until')} as until_ms from pause
     where (until is null or until > now()) and (kind = 'all' or (kind = 'tenant' and name = ?)
       or (kind = 'destination' and name in (select jsonb_array_elements_text(?::jsonb)))
       or (kind = 'lane' and name in (select jsonb_array_elements_text(?::jsonb))))
     order by until desc nulls first, kind`,
    [tenantId, destinations, JSON.stringify(lanes.map(({ name }) => name))],
  );
  const [worker] = await em.execute<{ is_any: boolean }[]>(
    `select exists (select 1 from worker where heartbeat_at > now() - ${HEARTBEAT_MAX}) as is_any`,
  );
  const blocked = await em.execute<{ name: string; since_ms: number }[]>(
    `select name, ${ms('blocked_since')} as since_ms from egress
     where blocked_since is not null and reported_at > now() - ${BLOCKED_AGE_MAX} limit 1000`,
  );
  return {
    isAnyWorker: worker?.is_any === true,
    pauses: pauses.map((row) => ({ ...row, until: dateOf(row.until_ms) })),
    lanes: lanesInUse(lanes),
    blocked: new Map(blocked.map((row) => [row.name, new Date(row.since_ms)])),
  };
}

/**
 * An address has one lane at a time, the one that was found last: hosts move, providers are named anew, and what was
 * spilled to the smarthost comes back. `rows`: the last found first.
 */
function lanesInUse(rows: readonly LaneRow[]): ReadonlyMap<string, readonly LaneFacts[]> {
  const byDestination = new Map<string, LaneFacts[]>();
  for (const row of rows) {
    const lanes = byDestination.get(row.destination) ?? [];
    const isFormer = isWithoutPort25(lanes[0]) || lanes.some(({ egress }) => egress === row.egress);
    if (isFormer || (lanes.length > 0 && isWithoutPort25(row))) continue;
    byDestination.set(row.destination, [...lanes, readLane(row)]);
  }
  return byDestination;
}

/** It serves a destination whatever the address of departure is. */
const isWithoutPort25 = (lane: { readonly name: string } | undefined): boolean =>
  lane?.name === SMARTHOST_LANE || lane?.name === HOME_LANE;

const readLane = (row: LaneRow): LaneFacts => ({
  ...row,
  openedAt: dateOf(row.opened_ms),
  openUntil: dateOf(row.until_ms),
  limitedBy: row.limited_by,
  connectionsMax: row.connections_max,
});

interface LaneRow extends Pick<
  LaneFacts,
  'name' | 'egress' | 'circuit' | 'reason' | 'connections' | 'concurrency' | 'queued'
> {
  readonly destination: string;
  readonly opened_ms: number | null;
  readonly until_ms: number | null;
  readonly limited_by: string | null;
  readonly connections_max: number;
}

interface PauseRow extends Pick<PauseFacts, 'kind' | 'name' | 'reason'> {
  readonly until_ms: number | null;
}

/** Why, what to do, and when it goes on by itself. */
interface Explained {
  readonly code: string;
  readonly reason: string;
  readonly remedy: string;
  readonly next?: Date;
  /** It does not go on by itself. */
  readonly isStuck?: boolean;
}

/** How long it takes, as far as is known: the greater, the longer. */
function endOf({ code, next, isStuck = false }: Explained): number {
  if (isStuck) return Infinity;
  return next?.getTime() ?? (code === 'in_flight' ? 0 : code === 'queued' ? 1 : 2);
}

/** The recipient that waits longest decides what is said; the list names all that wait. */
export function explain(about: {
  readonly deliveries: readonly DeliveryFacts[];
  readonly attempts: readonly LastAttempt[];
  readonly fetch: FetchFacts | null;
  readonly obstacles: Obstacles | null;
  /** Whether the reader may see what other tenants' mail met. */
  readonly isOperator: boolean;
}): Waiting | null {
  const open = openAmong(about.deliveries);
  if (open.length === 0) return null;
  const explained = open.map((row) => {
    const last = about.attempts.find(
      ({ position, number }) => position === row.position && number === row.attempts,
    );
    return explainOne(row, { ...about, cause: last?.cause ?? null });
  });
  const { code, reason, remedy, next } = explained.reduce((a, b) => (endOf(b) > endOf(a) ? b : a));
  const recipients = open.map(({ recipient }) => recipient);
  return { code, reason, remedy, next_attempt_at: next ?? null, recipients };
}

interface Known {
  readonly cause: string | null;
  readonly fetch: FetchFacts | null;
  readonly obstacles: Obstacles | null;
  readonly isOperator: boolean;
}

function explainOne(row: DeliveryFacts, known: Known): Explained {
  const pause = longestPause(row, known.obstacles);
  switch (row.state) {
    case 'scheduled':
      return {
        code: 'scheduled',
        reason: `It is scheduled for ${row.dueAt.toISOString()}.`,
        remedy: 'Until then it can be moved or canceled with the API.',
        next: row.dueAt,
      };
    case 'preparing':
      return explainFetch(known.fetch);
    case 'in_flight':
      return {
        code: 'in_flight',
        reason: `Attempt ${row.attempts} to ${row.recipient} is under way.`,
        remedy: 'Nothing is to be done: it ends within minutes, and the timeline says how.',
      };
    case 'ready':
      return pause ?? explainReady(row, known);
    default:
      return pause ?? explainPutOff(row, known.cause);
  }
}

/** The pause that holds the delivery for longest; null: none, or it ends before the next try. */
function longestPause(row: DeliveryFacts, obstacles: Obstacles | null): Explained | null {
  const pauses = (obstacles?.pauses ?? []).filter(
    ({ kind, name }) => kind !== 'destination' || name === row.lane,
  );
  const wide = pauses.filter(({ kind }) => kind !== 'lane');
  // A destination with several lanes goes on while one of them does.
  const inUse = new Set(obstacles?.lanes.get(row.lane)?.map(({ name }) => name));
  const lanes = pauses.filter(({ kind, name }) => kind === 'lane' && inUse.has(name));
  const areAllPaused = lanes.length > 0 && lanes.length === inUse.size;
  const endOf = (pause: PauseFacts): number => pause.until?.getTime() ?? Infinity;
  const pause = (areAllPaused ? [...wide, ...lanes] : wide).toSorted(
    (a, b) => endOf(b) - endOf(a),
  )[0];
  if (pause === undefined) return null;
  if (row.state !== 'ready' && endOf(pause) <= row.dueAt.getTime()) return null;
  const what = {
    all: 'All delivery',
    tenant: 'Delivery for this tenant',
    destination: `Delivery to ${domainOf(row)}`,
    lane: `The lane ${pause.name}`,
  }[pause.kind];
  const why = pause.reason === null ? '' : `: ${pause.reason}`;
  const until = pause.until === null ? '' : ` until ${pause.until.toISOString()}`;
  return {
    code: 'paused',
    reason: `${what} is paused by the operator${until}${why}`.replace(/[.!?]?$/, '.'),
    remedy:
      pause.until === null
        ? 'The operator has to resume it; nothing is lost meanwhile but time.'
        : 'It goes on by itself then, or as soon as the operator resumes it.',
    ...(pause.until === null ? { isStuck: true } : { next: later(pause.until, row.dueAt) }),
  };
}

const later = (a: Date, b: Date): Date => (a > b ? a : b);

function domainOf(row: DeliveryFacts): string {
  const destination = readDestination(row.lane);
  return destination.kind === 'mx' ? destination.domain : `the ${destination.kind}`;
}

const noWorker: Explained = {
  code: 'no_worker',
  isStuck: true,
  reason: 'It is due, and no delivery worker has been heard of for a minute.',
  remedy: 'The operator has to start a process with the delivery role, or look into its log.',
};

const queued: Explained = {
  code: 'queued',
  reason: 'It is due and waits for a free delivery worker.',
  remedy: 'Nothing is to be done: its turn comes, whatever other tenants send.',
};

function explainReady(row: DeliveryFacts, { obstacles, isOperator }: Known): Explained {
  if (obstacles === null) return queued;
  if (!obstacles.isAnyWorker) return noWorker;
  const { blocked } = obstacles;
  const lanes = obstacles.lanes.get(row.lane) ?? [];
  const isByPort = readDestination(row.lane).kind === 'mx';
  const sinces = lanes.map(({ name, egress }) =>
    isWithoutPort25({ name }) ? undefined : blocked.get(egress),
  );
  const since = lanes.length > 0 ? sinces[0] : [...blocked.values()][0];
  if (isByPort && since !== undefined && sinces.every((one) => one !== undefined)) {
    return {
      code: 'port_25_blocked',
      isStuck: true,
      reason: `No connection to port 25 of a mail host has succeeded since ${since.toISOString()}: a firewall or the network's owner blocks it.`,
      remedy:
        'The operator has to have outgoing port 25 opened, or to send through a smarthost; then it goes on by itself.',
    };
  }
  // It goes on as soon as one of its lanes does.
  const held = lanes.map((lane) => explainLane(lane, isOperator));
  return held.length > 0 && held.every((one) => one !== null) ? held[0]! : queued;
}

function explainLane(lane: LaneFacts, isOperator: boolean): Explained | null {
  if (lane.circuit !== 'closed') {
    const since = lane.openedAt === null ? '' : ` since ${lane.openedAt.toISOString()}`;
    const until = lane.openUntil === null ? '' : ` until ${lane.openUntil.toISOString()}`;
    const why = isOperator && lane.reason !== null ? `: ${lane.reason}` : '';
    const isProbed = lane.circuit === 'half_open';
    return {
      code: 'circuit_open',
      reason: (isProbed
        ? `The lane ${lane.name} has been closed${since} because its hosts failed again and again; one delivery tries them now${why}`
        : `The lane ${lane.name} is closed${since}${until} because its hosts failed again and again, or asked for it${why}`
      ).replace(/[.!?]?$/, '.'),
      remedy:
        'It is tried by itself when that time is over, and goes on when the hosts answer; this attempt is not counted.',
      ...(lane.openUntil !== null && !isProbed && { next: lane.openUntil }),
    };
  }
  const busy = busyWords(lane);
  if (busy === null) return null;
  return {
    code: 'lane_busy',
    reason: `The lane ${lane.name} takes no more for the moment: ${busy}; ${lane.queued} deliveries wait in it.`,
    remedy:
      'Nothing is to be done: it goes on as connections become free. The limits protect the reputation of this machine; the operator sets them by provider.',
  };
}

function busyWords(lane: LaneFacts): string | null {
  switch (lane.limitedBy) {
    case 'connections':
      return `${lane.connectionsMax} of at most ${lane.connectionsMax} connections are in use by all workers together`;
    case 'concurrency':
      return `its hosts are trusted with ${Math.floor(lane.concurrency)} connections at a time by now, of at most ${lane.connectionsMax}`;
    case 'rate':
      return 'the messages or connections of this minute are used up';
    default:
      return null;
  }
}

/** Deferred, or unknown and tried once more. */
function explainPutOff(row: DeliveryFacts, cause: string | null): Explained {
  const said = row.lastReply ?? row.lastCause ?? 'no answer';
  const next = { next: row.dueAt };
  const again = `it is tried again at ${row.dueAt.toISOString()}`;
  const giveUp = row.expiresAt.toISOString();
  if (row.state === 'unknown') {
    return {
      code: 'unknown',
      reason: `The connection was lost after the message for ${row.recipient} was complete, so it may have arrived; ${again}, once.`,
      remedy:
        'Ask the recipient before you send it anew: it may be there already. The same message is sent once more by itself.',
      ...next,
    };
  }
  const putOff = `Attempt ${row.attempts} to ${row.recipient} was put off: ${said}`;
  switch (cause) {
    case 'greylisted':
      return {
        code: 'greylisted',
        reason: putOff,
        remedy: `Nothing is to be done: the host lets in who comes again, and ${again}.`,
        ...next,
      };
    case 'dns_failed':
    case 'tls_policy_unknown':
      return {
        code: 'policy_lookup_failed',
        reason: putOff,
        remedy: `Whoever runs the name servers or the policy host of ${domainOf(row)} has to repair them; ${again}, and given up after ${giveUp}.`,
        ...next,
      };
    case 'tls_required':
    case 'tls_failed':
    case 'tls_policy_failed':
      return {
        code: 'tls_required',
        reason: putOff,
        remedy:
          cause === 'tls_required'
            ? `The mail hosts of ${domainOf(row)} have to offer encryption, or the domain that sends must not be set to \`tls: enforced\`; ${again}, and given up after ${giveUp}.`
            : `The mail hosts of ${domainOf(row)} have to offer the encryption that is asked for; ${again}, and given up after ${giveUp}.`,
        ...next,
      };
    default:
      return {
        code: 'deferred',
        reason: putOff,
        remedy: `Nothing has to be done: ${again}, and given up after ${giveUp}.`,
        ...next,
      };
  }
}

function explainFetch(fetch: FetchFacts | null): Explained {
  const last = fetch?.lastError ?? null;
  const code = 'preparing';
  const remedy = 'Nothing is to be done unless the URL is wrong: it is sent when they are there.';
  if (fetch === null || (last === null && fetch.attempts === 0)) {
    return { code, reason: 'Its attachments are about to be fetched.', remedy };
  }
  const said = last === null ? '' : ` The try before failed: ${last}`;
  if (fetch.isUnderWay) {
    const reason = `Its attachments are being fetched (try ${fetch.attempts}).${said}`;
    return { code, reason, remedy };
  }
  return {
    code,
    reason: `Its attachments could not be fetched yet: ${last ?? 'the try did not end'}`,
    remedy: `The file has to be served at its URL; it is tried again at ${fetch.dueAt.toISOString()}.`,
    next: fetch.dueAt,
  };
}
