// Webhooks: endpoints that are told what happens.
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
import type { WebhookRecord } from '../webhooks/endpoints.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A new endpoint. */
export interface CreateWebhookRequest {
  /** An http or https URL on a public web server, without user name and password; at most 2048 characters. */
  endpoint: string;
  /**
   * At least one of `email.sent`, `email.scheduled`, `email.delivered`, `email.delivery_delayed`, `email.complained`,
   * `email.bounced`, `email.opened`, `email.clicked`, `email.received`, `email.failed`, `email.suppressed`,
   * `contact.created`, `contact.updated`, `contact.deleted`, `contact.topics.updated`, `domain.created`,
   * `domain.updated`, `domain.deleted`, `suppression.added`, `suppression.removed`, `topic.created`, `topic.updated`,
   * `topic.deleted`; and `doctor.finding_changed`, which only the operator's tenant is told.
   */
  events: string[];
}

/** A change of a webhook: what is absent stays. */
export interface UpdateWebhookRequest {
  /** As when it was created. */
  endpoint?: string;
  /** In place of those before. */
  events?: string[];
  /** `disabled`: nothing is told, and what waits has failed; `enabled`: it begins anew. */
  status?: 'enabled' | 'disabled';
}

/** An endpoint that is told what happens. */
export interface WebhookItem {
  id: string;
  endpoint: string;
  events: string[];
  status: 'enabled' | 'disabled';
  /** Why the service disabled it; null when it did not. */
  disabled_reason: string | null;
  created_at: Date;
}

export interface Webhook extends WebhookItem {
  object: 'webhook';
  /** What calls are signed with (Standard Webhooks): `whsec_` and base64. */
  signing_secret: string;
}

export interface WebhookList {
  object: 'list';
  data: WebhookItem[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The webhook, and the secret that its calls are signed with. */
export interface WebhookSecret {
  object: 'webhook';
  id: string;
  /** `whsec_` and base64. */
  signing_secret: string;
}

/** The webhook that was changed. */
export interface WebhookChanged {
  object: 'webhook';
  id: string;
}

export interface WebhookDeleted {
  object: 'webhook';
  id: string;
  deleted: boolean;
}

@Route('webhooks')
@Tags('Webhooks')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class WebhooksController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates a webhook. Its endpoint is called with a POST for every event of these types. */
  @Post()
  @OperationId('createWebhook')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or the endpoint may not be called')
  @Example<WebhookSecret>({
    object: 'webhook',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    signing_secret: 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwvtYlBWtyTYY=',
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateWebhookRequest,
  ): Promise<WebhookSecret> {
    const { id, secret } = await this.verbs.webhooks.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return { object: 'webhook', id, signing_secret: secret };
  }

  /**
   * Lists webhooks, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listWebhooks')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<WebhookList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        endpoint: 'https://app.example.com/hooks/mail',
        events: ['email.delivered', 'email.bounced'],
        status: 'enabled',
        disabled_reason: null,
        created_at: new Date('2026-05-06T09:30:00.000Z'),
      },
    ],
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<WebhookList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.webhooks.list(callerOf(request).tenantId, {
      limit,
      after,
      before,
    });
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /** Retrieves a webhook with its signing secret. */
  @Get('{id}')
  @OperationId('getWebhook')
  @SuccessResponse(200, 'The webhook')
  @Response<ErrorEnvelope>(404, 'No such webhook')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<Webhook>({
    object: 'webhook',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    endpoint: 'https://app.example.com/hooks/mail',
    events: ['email.delivered', 'email.bounced'],
    status: 'enabled',
    disabled_reason: null,
    created_at: new Date('2026-05-06T09:30:00.000Z'),
    signing_secret: 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwvtYlBWtyTYY=',
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Webhook> {
    const found = await this.verbs.webhooks.find(callerOf(request).tenantId, checkId(id));
    if (found === null) throw notFound();
    return { object: 'webhook', ...present(found), signing_secret: found.secret };
  }

  /** Changes what the body names. */
  @Patch('{id}')
  @OperationId('updateWebhook')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such webhook')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<WebhookChanged>({ object: 'webhook', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateWebhookRequest,
  ): Promise<WebhookChanged> {
    const webhookId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.webhooks.update(tenantId, webhookId, body))) throw notFound();
    return { object: 'webhook', id: webhookId };
  }

  /** Deletes a webhook with the log of its events. */
  @Delete('{id}')
  @OperationId('deleteWebhook')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such webhook')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<WebhookDeleted>({
    object: 'webhook',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<WebhookDeleted> {
    const webhookId = checkId(id);
    if (!(await this.verbs.webhooks.remove(callerOf(request).tenantId, webhookId))) {
      throw notFound();
    }
    return { object: 'webhook', id: webhookId, deleted: true };
  }

  /** Makes a new signing secret. The old one signs as well for 24 hours: calls have both signatures. */
  @Post('{id}/signing-secret/rotate')
  @OperationId('rotateWebhookSigningSecret')
  @SuccessResponse(200, 'The new secret')
  @Response<ErrorEnvelope>(404, 'No such webhook')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<WebhookSecret>({
    object: 'webhook',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    signing_secret: 'whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oDK8a6XN5w0kQ=',
  })
  async rotate(@Request() request: express.Request, @Path() id: string): Promise<WebhookSecret> {
    const webhookId = checkId(id);
    const secret = await this.verbs.webhooks.rotate(callerOf(request).tenantId, webhookId);
    if (secret === null) throw notFound();
    return { object: 'webhook', id: webhookId, signing_secret: secret };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Webhook not found');

const present = (webhook: WebhookRecord): WebhookItem => ({
  id: webhook.id,
  endpoint: webhook.endpoint,
  events: [...webhook.events],
  status: webhook.status,
  disabled_reason: webhook.disabledReason,
  created_at: webhook.createdAt,
});
