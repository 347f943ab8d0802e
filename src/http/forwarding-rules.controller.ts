// Forwarding rules: to whom outside a copy of what a receiving route takes is sent.
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
import { checkLimitText } from '../access/page.ts';
import type {
  AttemptRecord,
  CreateRuleRequest,
  RuleRecord,
  UpdateRuleRequest,
} from '../receiving/rules.ts';
import { callerOf } from './authenticate.ts';
import { presentAttempt, type ReceivedForwardingAttempt } from './email-receiving.controller.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** What came of the latest message that the rule matched. */
export interface LastForwardingAttempt extends ReceivedForwardingAttempt {
  received_email_id: string;
}

export interface ForwardingRule {
  object: 'forwarding_rule';
  id: string;
  domain_id: string;
  /** The domain's name. */
  domain: string;
  route_id: string;
  route_target_address: string;
  /** 1 to 25 addresses, each once. */
  destinations: string[];
  /** `invalid`: the service found it unsafe to run; `status: active` tries again. */
  status: 'active' | 'disabled' | 'invalid';
  /** Null unless `invalid`. */
  invalid_reason: string | null;
  last_attempt: LastForwardingAttempt | null;
  created_at: Date;
  updated_at: Date;
}

export interface ForwardingRuleList {
  object: 'list';
  data: ForwardingRule[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

export interface ForwardingRuleDeleted {
  object: 'forwarding_rule';
  id: string;
  deleted: boolean;
}

const EXAMPLE: ForwardingRule = {
  object: 'forwarding_rule',
  id: '019e6f0a-1f90-7000-b6a2-9e04d1c87f25',
  domain_id: '019e6f0a-4b0d-7000-9c4d-1a5b3c2d8e6f',
  domain: 'example.com',
  route_id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  route_target_address: 'support@example.com',
  destinations: ['team@elsewhere.example'],
  status: 'active',
  invalid_reason: null,
  last_attempt: {
    id: '019e6f0a-5a1c-7001-9b0e-70d2c6f1a834',
    rule_id: '019e6f0a-1f90-7000-b6a2-9e04d1c87f25',
    recipient: 'Support+urgent@example.com',
    destinations: ['team@elsewhere.example'],
    status: 'queued',
    reason: null,
    explanation: 'Relayed as it came: the signature of outside.example is still valid there.',
    method: 'relayed',
    received_email_id: '019e6f0a-5a1c-7000-8a55-3f6de20b7c91',
    email_id: '019e6f0a-5f02-7000-8c1d-3e9b7a45d610',
    created_at: new Date('2026-05-06T07:08:09.500Z'),
  },
  created_at: new Date('2026-05-06T07:00:00.000Z'),
  updated_at: new Date('2026-05-06T07:00:00.000Z'),
};

@Route('receiving/forwarding-rules')
@Tags('Receiving')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class ForwardingRulesController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Forwards what a route takes from now on. A disabled rule is saved and forwards nothing. */
  @Post()
  @OperationId('createForwardingRule')
  @SuccessResponse(201, 'The rule')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such route')
  @Response<ErrorEnvelope>(409, 'The route has a rule (`rule_exists`)')
  @Response<ErrorEnvelope>(
    422,
    'A field is missing or wrong; or an active rule would forward in a circle (`forwarding_loop`), or its domain does not receive (`receiving_disabled`, `domain_not_verified`)',
  )
  @Example<ForwardingRule>(EXAMPLE)
  async create(
    @Request() request: express.Request,
    @Body() body: CreateRuleRequest,
  ): Promise<ForwardingRule> {
    const rule = await this.verbs.forwardingRules.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return present(rule);
  }

  /**
   * Lists forwarding rules with the latest attempt of each, newest first.
   * @param domain_id Only those of this domain.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listForwardingRules')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor, or a domain id that is no UUID')
  async list(
    @Request() request: express.Request,
    @Query() domain_id?: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ForwardingRuleList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.forwardingRules.list(
      callerOf(request).tenantId,
      { limit, after, before },
      domain_id ?? null,
    );
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /** Retrieves a forwarding rule with its latest attempt. */
  @Get('{id}')
  @OperationId('getForwardingRule')
  @SuccessResponse(200, 'The rule')
  @Response<ErrorEnvelope>(404, 'No such rule')
  @Example<ForwardingRule>(EXAMPLE)
  async get(@Request() request: express.Request, @Path() id: string): Promise<ForwardingRule> {
    return present(await this.verbs.forwardingRules.find(callerOf(request).tenantId, id));
  }

  /**
   * Changes what the body names. Whatever leaves the rule active is checked as if it were new; when it is refused, nothing
   * changes.
   */
  @Patch('{id}')
  @OperationId('updateForwardingRule')
  @SuccessResponse(200, 'The rule')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such rule')
  @Response<ErrorEnvelope>(
    422,
    'A field is wrong or cannot be changed; or an active rule would forward in a circle (`forwarding_loop`), or its domain does not receive (`receiving_disabled`, `domain_not_verified`)',
  )
  @Example<ForwardingRule>(EXAMPLE)
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateRuleRequest,
  ): Promise<ForwardingRule> {
    return present(await this.verbs.forwardingRules.update(callerOf(request).tenantId, id, body));
  }

  /** Deletes a forwarding rule. Received mail, and what was forwarded of it, stays. */
  @Delete('{id}')
  @OperationId('deleteForwardingRule')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such rule')
  @Example<ForwardingRuleDeleted>({
    object: 'forwarding_rule',
    id: '019e6f0a-1f90-7000-b6a2-9e04d1c87f25',
    deleted: true,
  })
  async remove(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<ForwardingRuleDeleted> {
    const removed = await this.verbs.forwardingRules.remove(callerOf(request).tenantId, id);
    return { object: 'forwarding_rule', id: removed, deleted: true };
  }
}

const present = (rule: RuleRecord): ForwardingRule => ({
  object: 'forwarding_rule',
  id: rule.id,
  domain_id: rule.domainId,
  domain: rule.domain,
  route_id: rule.routeId,
  route_target_address: rule.routeTargetAddress,
  destinations: [...rule.destinations],
  status: rule.status,
  invalid_reason: rule.invalidReason,
  last_attempt: rule.lastAttempt === null ? null : presentLast(rule.lastAttempt),
  created_at: rule.createdAt,
  updated_at: rule.updatedAt,
});

const presentLast = (attempt: AttemptRecord): LastForwardingAttempt => ({
  ...presentAttempt(attempt),
  received_email_id: attempt.receivedEmailId,
});
