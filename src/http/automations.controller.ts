// Automations: what is done by itself when a custom event comes, and the runs of them.
import {
  Body,
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Patch,
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
import type { RunRecord, RunStepRecord } from '../audience/automation-runs.ts';
import type {
  AutomationRecord,
  CreateAutomationRequest,
  UpdateAutomationRequest,
} from '../audience/automations.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export type AutomationStepType =
  | 'trigger'
  | 'delay'
  | 'send_email'
  | 'wait_for_event'
  | 'condition'
  | 'contact_update'
  | 'contact_delete'
  | 'add_to_segment';

/** An automation without its steps. */
export interface AutomationSummary {
  object: 'automation';
  id: string;
  name: string;
  status: 'enabled' | 'disabled';
  created_at: Date;
  updated_at: Date;
}

/** What is done by itself when an event comes. */
export interface AutomationDetails extends AutomationSummary {
  steps: { key: string; type: AutomationStepType; config: { [field: string]: unknown } }[];
  connections: {
    from: string;
    to: string;
    type: 'default' | 'condition_met' | 'condition_not_met' | 'timeout' | 'event_received';
  }[];
}

export interface AutomationList {
  object: 'list';
  data: AutomationSummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The automation that was made or changed. */
export interface AutomationChanged {
  object: 'automation';
  id: string;
}

export interface AutomationStopped {
  object: 'automation';
  id: string;
  status: 'disabled';
}

export interface AutomationDeleted {
  object: 'automation';
  id: string;
  deleted: boolean;
}

/** One way of one contact through an automation, without its steps. */
export interface AutomationRunSummary {
  object: 'automation_run';
  id: string;
  status: 'running' | 'completed' | 'failed' | 'cancelled';
  started_at: Date | null;
  /** When it ended. */
  completed_at: Date | null;
  created_at: Date;
}

export interface AutomationRunStepState {
  key: string;
  type: AutomationStepType;
  /** `skipped`: another way was taken, the run ended before, or there was nobody to do it for. */
  status: 'pending' | 'running' | 'completed' | 'failed' | 'skipped' | 'waiting';
  /** What came of it. */
  output: { [field: string]: unknown } | null;
  /** `code` and `message`: why it failed. */
  error: { [field: string]: unknown } | null;
  started_at: Date | null;
  completed_at: Date | null;
  created_at: Date;
}

export interface AutomationRunDetails extends AutomationRunSummary {
  steps: AutomationRunStepState[];
}

export interface AutomationRunList {
  object: 'list';
  data: AutomationRunSummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

@Route('automations')
@Tags('Automations')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class AutomationsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates an automation. */
  @Post()
  @OperationId('createAutomation')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or the steps make no graph')
  @Example<AutomationChanged>({ object: 'automation', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateAutomationRequest,
  ): Promise<AutomationChanged> {
    const id = await this.verbs.automations.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return { object: 'automation', id };
  }

  /**
   * Lists automations, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param status Only these.
   */
  @Get()
  @OperationId('listAutomations')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or status')
  @Example<AutomationList>({
    object: 'list',
    data: [
      {
        object: 'automation',
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        name: 'Welcome series',
        status: 'enabled',
        created_at: new Date('2026-05-28T14:03:11.210Z'),
        updated_at: new Date('2026-05-28T14:03:11.210Z'),
      },
    ],
    has_more: false,
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() status?: 'enabled' | 'disabled',
  ): Promise<AutomationList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.automations.list(
      callerOf(request).tenantId,
      { limit, after, before },
      status ?? null,
    );
    return { object: 'list', data: items.map(summarize), has_more: hasMore };
  }

  /** Retrieves an automation with its steps. */
  @Get('{id}')
  @OperationId('getAutomation')
  @SuccessResponse(200, 'The automation')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<AutomationDetails>({
    object: 'automation',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'Welcome series',
    status: 'enabled',
    created_at: new Date('2026-05-28T14:03:11.210Z'),
    updated_at: new Date('2026-05-28T14:03:11.210Z'),
    steps: [
      { key: 'start', type: 'trigger', config: { event_name: 'user.joined' } },
      { key: 'pause', type: 'delay', config: { duration: '1 hour' } },
      { key: 'welcome', type: 'send_email', config: { template: { id: 'welcome' } } },
    ],
    connections: [
      { from: 'start', to: 'pause', type: 'default' },
      { from: 'pause', to: 'welcome', type: 'default' },
    ],
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<AutomationDetails> {
    const automation = await this.verbs.automations.find(callerOf(request).tenantId, checkId(id));
    if (automation === null) throw notFound();
    return {
      ...summarize(automation),
      steps: automation.steps.map(({ key, type, config }) => ({
        key,
        type,
        config: { ...config },
      })),
      connections: automation.connections.map(({ from, to, type }) => ({ from, to, type })),
    };
  }

  /** Changes what the body names. Runs that have begun go on as they began. */
  @Patch('{id}')
  @OperationId('updateAutomation')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<AutomationChanged>({ object: 'automation', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateAutomationRequest,
  ): Promise<AutomationChanged> {
    const automationId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.automations.update(tenantId, automationId, body))) throw notFound();
    return { object: 'automation', id: automationId };
  }

  /** Makes a disabled copy. */
  @Post('{id}/duplicate')
  @OperationId('duplicateAutomation')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or there are too many automations')
  @Example<AutomationChanged>({ object: 'automation', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e71' })
  async duplicate(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<AutomationChanged> {
    const { tenantId } = callerOf(request);
    const copyId = await this.verbs.automations.duplicate(tenantId, checkId(id));
    if (copyId === null) throw notFound();
    this.setStatus(201);
    return { object: 'automation', id: copyId };
  }

  /** Disables an automation and cancels its runs. What they have sent stays sent. */
  @Post('{id}/stop')
  @OperationId('stopAutomation')
  @SuccessResponse(200, 'Stopped')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<AutomationStopped>({
    object: 'automation',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    status: 'disabled',
  })
  async stop(@Request() request: express.Request, @Path() id: string): Promise<AutomationStopped> {
    const automationId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.automations.stop(tenantId, automationId))) throw notFound();
    return { object: 'automation', id: automationId, status: 'disabled' };
  }

  /** Deletes an automation with its runs. What they have sent stays sent. */
  @Delete('{id}')
  @OperationId('deleteAutomation')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<AutomationDeleted>({
    object: 'automation',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<AutomationDeleted> {
    const automationId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.automations.remove(tenantId, automationId))) throw notFound();
    return { object: 'automation', id: automationId, deleted: true };
  }

  /**
   * Lists the runs of an automation, newest first. They are kept for 90 days after their end.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param status Only these: some of `running`, `completed`, `failed` and `cancelled`, with commas between or repeated.
   */
  @Get('{id}/runs')
  @OperationId('listAutomationRuns')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such automation')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit, cursor or status')
  @Example<AutomationRunList>({
    object: 'list',
    data: [
      {
        object: 'automation_run',
        id: '019e6f0b-1d20-7000-9a3e-5c7b8d2e1f04',
        status: 'running',
        started_at: new Date('2026-05-28T14:05:00.120Z'),
        completed_at: null,
        created_at: new Date('2026-05-28T14:05:00.120Z'),
      },
    ],
    has_more: false,
  })
  async listRuns(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() status?: string[],
  ): Promise<AutomationRunList> {
    checkLimitText(request.query['limit']);
    const runs = await this.verbs.automations.listRuns(callerOf(request).tenantId, checkId(id), {
      limit,
      after,
      before,
      status,
    });
    if (runs === null) throw notFound();
    return { object: 'list', data: runs.items.map(summarizeRun), has_more: runs.hasMore };
  }

  /** Retrieves a run with what became of each step. */
  @Get('{id}/runs/{runId}')
  @OperationId('getAutomationRun')
  @SuccessResponse(200, 'The run')
  @Response<ErrorEnvelope>(404, 'No such automation or run')
  @Response<ErrorEnvelope>(422, 'An id is not a UUID')
  @Example<AutomationRunDetails>({
    object: 'automation_run',
    id: '019e6f0b-1d20-7000-9a3e-5c7b8d2e1f04',
    status: 'running',
    started_at: new Date('2026-05-28T14:05:00.120Z'),
    completed_at: null,
    created_at: new Date('2026-05-28T14:05:00.120Z'),
    steps: [
      {
        key: 'start',
        type: 'trigger',
        status: 'completed',
        output: null,
        error: null,
        started_at: new Date('2026-05-28T14:05:00.120Z'),
        completed_at: new Date('2026-05-28T14:05:00.120Z'),
        created_at: new Date('2026-05-28T14:05:00.120Z'),
      },
      {
        key: 'pause',
        type: 'delay',
        status: 'waiting',
        output: null,
        error: null,
        started_at: new Date('2026-05-28T14:05:00.180Z'),
        completed_at: null,
        created_at: new Date('2026-05-28T14:05:00.120Z'),
      },
    ],
  })
  async getRun(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() runId: string,
  ): Promise<AutomationRunDetails> {
    const run = await this.verbs.automations.findRun(
      callerOf(request).tenantId,
      checkId(id),
      checkId(runId, 'runId'),
    );
    if (run === null) throw new Refusal('not_found', 'Automation run not found');
    return { ...summarizeRun(run), steps: run.steps.map(presentStep) };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Automation not found');

const summarize = (automation: AutomationRecord): AutomationSummary => ({
  object: 'automation',
  id: automation.id,
  name: automation.name,
  status: automation.status,
  created_at: automation.createdAt,
  updated_at: automation.updatedAt,
});

const summarizeRun = (run: RunRecord): AutomationRunSummary => ({
  object: 'automation_run',
  id: run.id,
  status: run.status,
  started_at: run.startedAt,
  completed_at: run.completedAt,
  created_at: run.createdAt,
});

const presentStep = (step: RunStepRecord): AutomationRunStepState => ({
  key: step.key,
  type: step.type,
  status: step.status,
  output: step.output,
  error: step.error,
  started_at: step.startedAt,
  completed_at: step.completedAt,
  created_at: step.createdAt,
});
