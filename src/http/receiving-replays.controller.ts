// Replays: received mail is forwarded again, by id or by time, at a rate.
import {
  Body,
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Path,
  Post,
  Query,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { CreateReplayRequest, ReplayForwards, ReplayRecord } from '../receiving/replay.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** An order to forward received mail again, or to tell webhooks of it. */
export interface ReceivingReplaySummary {
  object: 'receiving_replay';
  id: string;
  /** `finished`: all of its forwards, and events for webhooks, are put in line. */
  status: 'running' | 'finished' | 'canceled';
  kinds: ('forward' | 'webhook')[];
  /** Only what this rule is for; null: every rule. */
  rule_id: string | null;
  /** Messages. */
  per_minute: number;
  /** Of received emails; null where it goes by time. */
  ids: string[] | null;
  /** Inside; null where it goes by id. */
  start_date: Date | null;
  /** Outside; null where it goes by id. */
  end_date: Date | null;
  /** Forwards that were put in line so far, of a message one for each rule; and events for webhooks, of a message one. */
  planned: number;
  /** Messages so far that no rule is for, and no webhook hears of. */
  skipped: number;
  created_at: Date;
  updated_at: Date;
}

/** A replay and what became of its forwards. */
export interface ReceivingReplay extends ReceivingReplaySummary {
  forwards: {
    /** In line. */
    waiting: number;
    queued: number;
    skipped: number;
    failed: number;
  };
}

export interface ReceivingReplayList {
  object: 'list';
  data: ReceivingReplaySummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

// Written out twice: the generator of the reference reads no spread.
const EXAMPLE: ReceivingReplaySummary = {
  object: 'receiving_replay',
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  status: 'running',
  kinds: ['forward'],
  rule_id: null,
  per_minute: 600,
  ids: null,
  start_date: new Date('2026-05-05T00:00:00.000Z'),
  end_date: new Date('2026-05-06T00:00:00.000Z'),
  planned: 120,
  skipped: 7,
  created_at: new Date('2026-05-06T07:00:00.000Z'),
  updated_at: new Date('2026-05-06T07:00:12.000Z'),
};

const EXAMPLE_COUNTED: ReceivingReplay = {
  object: 'receiving_replay',
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  status: 'running',
  kinds: ['forward'],
  rule_id: null,
  per_minute: 600,
  ids: null,
  start_date: new Date('2026-05-05T00:00:00.000Z'),
  end_date: new Date('2026-05-06T00:00:00.000Z'),
  planned: 120,
  skipped: 7,
  created_at: new Date('2026-05-06T07:00:00.000Z'),
  updated_at: new Date('2026-05-06T07:00:12.000Z'),
  forwards: { waiting: 2, queued: 110, skipped: 8, failed: 0 },
};

@Route('receiving/replays')
@Tags('Receiving')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class ReceivingReplaysController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Forwards received mail again: what each message's route wants, as its forwarding rule is now, each message once for
   * each rule; or, with the kind `webhook`, tells `email.received` anew. The messages go in the order in which they
   * arrived, `per_minute` of them; several replays take turns.
   */
  @Post()
  @OperationId('createReceivingReplay')
  @SuccessResponse(201, 'It is running')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(
    422,
    'A field is wrong, `ids` has what is no received email, or 10 replays are running already',
  )
  @Example<ReceivingReplaySummary>(EXAMPLE)
  async create(
    @Request() request: express.Request,
    @Body() body: CreateReplayRequest,
  ): Promise<ReceivingReplaySummary> {
    const replay = await this.verbs.replays.create(callerOf(request), body);
    this.setStatus(201);
    return summaryOf(replay);
  }

  /**
   * Lists replays, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listReceivingReplays')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ReceivingReplayList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.replays.list(callerOf(request), { limit, after, before });
    return { object: 'list', data: page.items.map(summaryOf), has_more: page.hasMore };
  }

  /** Retrieves a replay with what became of its forwards. */
  @Get('{id}')
  @OperationId('getReceivingReplay')
  @SuccessResponse(200, 'The replay')
  @Response<ErrorEnvelope>(404, 'No such replay')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ReceivingReplay>(EXAMPLE_COUNTED)
  async get(@Request() request: express.Request, @Path() id: string): Promise<ReceivingReplay> {
    return present(await this.verbs.replays.find(callerOf(request), checkId(id)));
  }

  /**
   * Cancels a replay that is running, with those of its forwards that are still in line. One that has finished stays as it
   * is; the record stays in any case.
   */
  @Delete('{id}')
  @OperationId('cancelReceivingReplay')
  @SuccessResponse(200, 'The replay as it is now')
  @Response<ErrorEnvelope>(404, 'No such replay')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ReceivingReplay>(EXAMPLE_COUNTED)
  async cancel(@Request() request: express.Request, @Path() id: string): Promise<ReceivingReplay> {
    const [caller, replayId] = [callerOf(request), checkId(id)];
    if (!(await this.verbs.replays.cancel(caller, replayId))) throw notFound();
    return present(await this.verbs.replays.find(caller, replayId));
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Replay not found');

function summaryOf(replay: ReplayRecord): ReceivingReplaySummary {
  return {
    object: 'receiving_replay',
    id: replay.id,
    status: replay.status,
    kinds: [...replay.kinds],
    rule_id: replay.ruleId ?? null,
    per_minute: replay.perMinute,
    ids: replay.ids ? [...replay.ids] : null,
    start_date: replay.startsAt ?? null,
    end_date: replay.endsAt ?? null,
    planned: replay.planned,
    skipped: replay.skipped,
    created_at: replay.createdAt,
    updated_at: replay.updatedAt,
  };
}

function present(
  found: { readonly replay: ReplayRecord; readonly forwards: ReplayForwards } | null,
): ReceivingReplay {
  if (found === null) throw notFound();
  return { ...summaryOf(found.replay), forwards: { ...found.forwards } };
}
