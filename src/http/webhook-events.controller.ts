// What a webhook was told, every call of its endpoint, and calling once more.
import {
  Controller,
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
import type { EventRecord } from '../webhooks/events.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** An event that a webhook is told of. */
export interface WebhookEventItem {
  /** The `webhook-id` of every call about it. */
  id: string;
  type: string;
  /** `pending`: a call is planned; `attempting`: one is under way; `failed`: no further call is planned. */
  status: 'pending' | 'attempting' | 'success' | 'failed';
  /** When it happened. */
  created_at: Date;
}

export interface WebhookEventList {
  object: 'list';
  data: WebhookEventItem[];
  /** Whether there is more. */
  has_more: boolean;
}

export interface WebhookEvent extends WebhookEventItem {
  object: 'webhook_event';
  /** When the endpoint is called next; null: not any more, or right now. */
  next_attempt_at: Date | null;
  /** The body of the calls: `type`, `created_at` and `data`. */
  payload: Record<string, unknown>;
}

/** The event that is called with again. */
export interface WebhookEventReplayed {
  object: 'webhook_event';
  id: string;
}

/** A call of the endpoint. */
export interface WebhookAttempt {
  id: string;
  /** Of the answer; null: there was none. */
  http_status_code: number | null;
  /** The beginning of the answer's body, or what happened instead of an answer. */
  response: string | null;
  sent_at: Date;
  duration_ms: number | null;
}

export interface WebhookAttemptList {
  object: 'list';
  data: WebhookAttempt[];
  /** Whether there is more. */
  has_more: boolean;
}

@Route('webhooks/{id}/events')
@Tags('Webhooks')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class WebhookEventsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Lists what a webhook was told in the last 30 days, newest first.
   * @param limit 1 to 100; absent: 20.
   * @param after The id of the last item of the page before.
   */
  @Get()
  @OperationId('listWebhookEvents')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such webhook')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit or cursor')
  @Example<WebhookEventList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: 'msg_019e6f0a5a1c70008f3e2b6a4c1d9e70',
        type: 'email.delivered',
        status: 'success',
        created_at: new Date('2026-05-06T09:30:00.000Z'),
      },
    ],
  })
  async list(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
  ): Promise<WebhookEventList> {
    checkLimitText(request.query['limit']);
    const { events } = this.verbs.webhooks;
    const page = await events.list(callerOf(request).tenantId, checkId(id), { limit, after });
    if (page === null) throw new Refusal('not_found', 'Webhook not found');
    return { object: 'list', data: page.items.map(present), has_more: page.hasMore };
  }

  /** Retrieves an event with what the endpoint is told. */
  @Get('{eventId}')
  @OperationId('getWebhookEvent')
  @SuccessResponse(200, 'The event')
  @Response<ErrorEnvelope>(404, 'No such webhook or event')
  @Response<ErrorEnvelope>(422, 'The id of the webhook is not a UUID')
  @Example<WebhookEvent>({
    object: 'webhook_event',
    id: 'msg_019e6f0a5a1c70008f3e2b6a4c1d9e70',
    type: 'email.delivered',
    status: 'success',
    created_at: new Date('2026-05-06T09:30:00.000Z'),
    next_attempt_at: null,
    payload: {
      type: 'email.delivered',
      created_at: '2026-05-06T09:30:00.000Z',
      data: {
        created_at: '2026-05-06T09:29:58.000Z',
        email_id: '019e6f0a-52d4-7000-9a1b-5c0d3e7f2a46',
        message_id: '<019e6f0a-52d4-7000-9a1b-5c0d3e7f2a46@example.com>',
        from: 'Ada <ada@example.com>',
        to: ['grace@example.org'],
        subject: 'Hello',
        recipient: 'grace@example.org',
      },
    },
  })
  async get(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() eventId: string,
  ): Promise<WebhookEvent> {
    const key = { webhookId: checkId(id), eventId };
    const found = await this.verbs.webhooks.events.find(callerOf(request).tenantId, key);
    if (found === null) throw notFound();
    return {
      object: 'webhook_event',
      ...present(found),
      next_attempt_at: found.nextAttemptAt,
      payload: found.payload as Record<string, unknown>,
    };
  }

  /** Calls the endpoint again now, under the same id, whatever became of the calls before. */
  @Post('{eventId}/replay')
  @OperationId('replayWebhookEvent')
  @SuccessResponse(200, 'It is called with again')
  @Response<ErrorEnvelope>(404, 'No such webhook or event')
  @Response<ErrorEnvelope>(422, 'The id of the webhook is not a UUID, or it is disabled')
  @Example<WebhookEventReplayed>({
    object: 'webhook_event',
    id: 'msg_019e6f0a5a1c70008f3e2b6a4c1d9e70',
  })
  async replay(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() eventId: string,
  ): Promise<WebhookEventReplayed> {
    const key = { webhookId: checkId(id), eventId };
    if (!(await this.verbs.webhooks.events.replay(callerOf(request).tenantId, key))) {
      throw notFound();
    }
    return { object: 'webhook_event', id: eventId.toLowerCase() };
  }

  /**
   * Lists the calls about an event, newest first.
   * @param limit 1 to 100; absent: 20.
   * @param after The id of the last item of the page before.
   */
  @Get('{eventId}/attempts')
  @OperationId('listWebhookEventAttempts')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such webhook or event')
  @Response<ErrorEnvelope>(422, 'The id of the webhook is not a UUID, or a bad limit or cursor')
  @Example<WebhookAttemptList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: '019e6f0a-61b8-7000-b2c4-8d9e0f1a2b3c',
        http_status_code: 200,
        response: '{"received":true}',
        sent_at: new Date('2026-05-06T09:30:00.200Z'),
        duration_ms: 41,
      },
    ],
  })
  async attempts(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() eventId: string,
    @Query() limit?: number,
    @Query() after?: string,
  ): Promise<WebhookAttemptList> {
    checkLimitText(request.query['limit']);
    const { events } = this.verbs.webhooks;
    const key = { webhookId: checkId(id), eventId };
    const page = await events.attempts(callerOf(request).tenantId, key, { limit, after });
    if (page === null) throw notFound();
    return {
      object: 'list',
      data: page.items.map((attempt) => ({
        id: attempt.id,
        http_status_code: attempt.httpStatus,
        response: attempt.response ?? attempt.error,
        sent_at: attempt.sentAt,
        duration_ms: attempt.durationMs,
      })),
      has_more: page.hasMore,
    };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Webhook event not found');

const present = (event: EventRecord): WebhookEventItem => ({
  id: event.id,
  type: event.type,
  status: event.status,
  created_at: event.createdAt,
});
