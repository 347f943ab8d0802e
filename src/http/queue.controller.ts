// The queue for whoever runs the appliance: how it stands, and pausing and resuming parts of it. The gate (app.ts) lets
// only operators come this far; for every other key these routes do not exist.
import {
  Body,
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Path,
  Post,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { CountedState, LaneLoad, Load, QueueOverview, TenantLoad } from '../queue/overview.ts';
import type { Pause } from '../queue/pauses.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import { readPauseRequest, type CreatePauseRequest } from './pause-request.ts';
import type { Verbs } from './verbs.ts';

/** How many deliveries are in a state; those that `capped` names are more. */
export interface QueueTotals {
  /** Due, and not claimed by a worker. */
  ready: number;
  /** Being attempted. */
  in_flight: number;
  /** Put off, to be tried again. */
  deferred: number;
  /** The answer was lost; to be tried once more. */
  unknown: number;
  scheduled: number;
  /** Emails whose attachments are being fetched. */
  preparing: number;
  /** Given up without an answer of the recipient's host that says why: failed, expired or unknown for good. */
  dead_lettered: number;
  /** The states of which there are more than was counted. */
  capped: CountedState[];
}

/** What waits. */
export interface QueueLoad {
  /** Due, and not claimed by a worker. */
  ready: number;
  /** There is more: counting stops, so that asking stays cheap. */
  ready_is_capped: boolean;
  /** Of the next deliveries to become due; put off, to be tried again. */
  deferred: number;
  deferred_is_capped: boolean;
  /** Since when the oldest ready one is due. */
  oldest_due_at: Date | null;
}

/** A way out: from one of our addresses to the hosts of one place. */
export interface QueueLane extends QueueLoad {
  name: string;
  /** The source address, by its name in `config/delivery.json`. */
  egress: string;
  /** The provider, or the MX hosts. */
  site: string;
  provider: string | null;
  /** `open`: nothing is sent until `open_until`, since the hosts failed; `half_open`: one delivery tries them. */
  circuit: 'closed' | 'open' | 'half_open';
  opened_at: Date | null;
  open_until: Date | null;
  reason: string | null;
  /** Null: it takes whatever comes. */
  limited_by: 'connections' | 'rate' | 'concurrency' | 'circuit' | 'paused' | 'blocked' | null;
  connections: number;
  connections_max: number;
  /** How many connections it trusts itself to use now. */
  concurrency: number;
  /** Claimed and not begun. */
  queued: number;
  in_flight: number;
  last_success_at: Date | null;
  last_failure_at: Date | null;
  paused: boolean;
}

export interface QueueTenant extends QueueLoad {
  id: string;
  name: string;
  paused: boolean;
}

/** Destinations that no worker has found the hosts of yet. */
export interface QueueUnassigned extends QueueLoad {
  destinations: number;
}

export interface QueuePause {
  object: 'pause';
  id: string;
  kind: 'lane' | 'destination' | 'tenant' | 'all';
  /** Null for `all`. */
  name: string | null;
  reason: string | null;
  paused_at: Date;
  /** Null: until it is resumed. */
  until: Date | null;
}

export interface BlockedSource {
  /** Of the source address in `config/delivery.json`. */
  name: string;
  since: Date;
  reason: string;
}

export interface QueueState {
  object: 'queue';
  generated_at: Date;
  /** Delivery workers that were heard of within the last minute. */
  workers: number;
  totals: QueueTotals;
  /** Since when the oldest ready delivery is due. */
  oldest_due_at: Date | null;
  /** Whether the network lets us reach port 25 of other hosts. */
  port_25: {
    blocked: boolean;
    since: Date | null;
    reason: string | null;
    sources: BlockedSource[];
  };
  /** Those with the most waiting mail first, at most 100. */
  lanes: { data: QueueLane[]; has_more: boolean };
  /** Those with the most waiting mail first, at most 100. */
  tenants: { data: QueueTenant[]; has_more: boolean };
  unassigned: QueueUnassigned;
  pauses: QueuePause[];
}

export interface QueuePauseList {
  object: 'list';
  data: QueuePause[];
  has_more: boolean;
}

export interface QueueResumed {
  object: 'pause';
  id: string;
  deleted: boolean;
}

@Route('queue')
@Tags('Queue')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'Not a full-access key of the first tenant, or no such pause')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class QueueController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * How the queue stands: what waits, for which lane, of which tenant, and since when. For the operator: a full-access key
   * of the first tenant. Numbers are counted up to a limit and say so when there is more.
   */
  @Get()
  @OperationId('getQueue')
  @SuccessResponse(200, 'The queue')
  async get(@Request() request: express.Request): Promise<QueueState> {
    this.checkOperator(request);
    return presentQueue(await this.verbs.queue.read());
  }

  /**
   * Pauses a lane, a destination, a tenant or everything: nothing more of it is claimed until it is resumed, and no retry
   * is used up. What is under way ends as it would. Pausing the same again changes its reason and end.
   */
  @Post('pauses')
  @OperationId('createQueuePause')
  @SuccessResponse(201, 'Paused')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or no such tenant')
  @Example<QueuePause>({
    object: 'pause',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    kind: 'destination',
    name: 'mx:example.com',
    reason: 'Their postmaster asked for a day.',
    paused_at: new Date('2026-08-01T10:00:00.000Z'),
    until: new Date('2026-08-02T10:00:00.000Z'),
  })
  async pause(
    @Request() request: express.Request,
    @Body() body: CreatePauseRequest,
  ): Promise<QueuePause> {
    this.checkOperator(request);
    const pause = await this.verbs.queue.pause(readPauseRequest(body, new Date()));
    this.setStatus(201);
    return presentPause(pause);
  }

  /** Lists what is paused, the newest first; at most 1,000 at a time are possible. */
  @Get('pauses')
  @OperationId('listQueuePauses')
  @SuccessResponse(200, 'All of them')
  async listPauses(@Request() request: express.Request): Promise<QueuePauseList> {
    this.checkOperator(request);
    const pauses = await this.verbs.queue.listPauses();
    return { object: 'list', data: pauses.map(presentPause), has_more: false };
  }

  /** Resumes: what waited is claimed within a second or two. */
  @Delete('pauses/{id}')
  @OperationId('deleteQueuePause')
  @SuccessResponse(200, 'Resumed')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async resume(@Request() request: express.Request, @Path() id: string): Promise<QueueResumed> {
    this.checkOperator(request);
    const pauseId = checkId(id);
    if (!(await this.verbs.queue.resume(pauseId))) {
      throw new Refusal('not_found', 'Pause not found');
    }
    return { object: 'pause', id: pauseId, deleted: true };
  }

  /** The gate has looked already; a route that is reached past it stays closed. */
  private checkOperator(request: express.Request): void {
    if (!this.verbs.queue.isOperator(callerOf(request))) {
      throw new Refusal('not_found', 'There is no such thing here.');
    }
  }
}

const loadOf = (load: Load): QueueLoad => ({
  ready: load.ready,
  ready_is_capped: load.isReadyCapped,
  deferred: load.deferred,
  deferred_is_capped: load.isDeferredCapped,
  oldest_due_at: load.oldestDueAt,
});

const laneOf = (lane: LaneLoad): QueueLane => ({
  name: lane.name,
  egress: lane.egress,
  site: lane.site,
  provider: lane.provider,
  circuit: lane.circuit,
  opened_at: lane.openedAt,
  open_until: lane.openUntil,
  reason: lane.reason,
  limited_by: lane.limitedBy,
  connections: lane.connections,
  connections_max: lane.connectionsMax,
  concurrency: lane.concurrency,
  queued: lane.queued,
  in_flight: lane.inFlight,
  ...loadOf(lane),
  last_success_at: lane.lastSuccessAt,
  last_failure_at: lane.lastFailureAt,
  paused: lane.isPaused,
});

const tenantOf = (tenant: TenantLoad): QueueTenant => ({
  id: tenant.id,
  name: tenant.name,
  ...loadOf(tenant),
  paused: tenant.isPaused,
});

/** As the API and the command line answer it. */
export const presentPause = (pause: Pause): QueuePause => ({
  object: 'pause',
  id: pause.id,
  kind: pause.kind,
  name: pause.kind === 'all' ? null : pause.name,
  reason: pause.reason,
  paused_at: pause.pausedAt,
  until: pause.until,
});

/** As the API and the command line answer it. */
export function presentQueue(queue: QueueOverview): QueueState {
  const [blocked] = queue.blocked.toSorted((a, b) => a.since.getTime() - b.since.getTime());
  return {
    object: 'queue',
    generated_at: queue.at,
    workers: queue.workers,
    totals: { ...queue.totals, capped: [...queue.totals.capped] },
    oldest_due_at: queue.oldestDueAt,
    port_25: {
      blocked: blocked !== undefined,
      since: blocked?.since ?? null,
      reason: blocked?.reason ?? null,
      sources: queue.blocked.map(({ name, since, reason }) => ({ name, since, reason })),
    },
    lanes: { data: queue.lanes.map(laneOf), has_more: queue.hasMoreLanes },
    tenants: { data: queue.tenants.map(tenantOf), has_more: queue.hasMoreTenants },
    unassigned: {
      ...loadOf(queue.unassigned),
      destinations: queue.unassigned.destinations,
    },
    pauses: queue.pauses.map(presentPause),
  };
}
