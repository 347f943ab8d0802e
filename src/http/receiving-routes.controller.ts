// Receiving routes: which addresses of a receiving domain take mail.
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
import type { TestRouteRequest } from '../receiving/dry-run.ts';
import type { CreateRouteRequest, RouteRecord, UpdateRouteRequest } from '../receiving/routes.ts';
import { callerOf } from './authenticate.ts';
import type { ReceivedRouteDecision } from './email-receiving.controller.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** Which mail of a domain is taken, and for whom. */
export interface ReceivingRoute {
  object: 'receiving_route';
  id: string;
  domain_id: string;
  /** The domain's name. */
  domain: string;
  type: 'exact' | 'alias' | 'catch_all';
  /** As given; its case does not matter. Null for `catch_all`. */
  local_part: string | null;
  target_local_part: string;
  /** The target with the domain. */
  target_address: string;
  created_at: Date;
  updated_at: Date;
}

export interface ReceivingRouteList {
  object: 'list';
  data: ReceivingRoute[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

export interface ReceivingRouteDeleted {
  object: 'receiving_route';
  id: string;
  deleted: boolean;
}

/** What the forwarding rule of the route would do. */
export interface RouteTestForwarding {
  forwarding_rule_id: string;
  status: 'active' | 'disabled' | 'invalid';
  outcome: 'queued' | 'skipped';
  /** Why it would be skipped. */
  reason: 'rule_disabled' | 'rule_invalid' | null;
  destinations: string[];
  /** Those of them that are on the suppression list. */
  suppressed: string[];
}

/** What would become of a message to an address. */
export interface ReceivingRouteTest {
  object: 'receiving_route_test';
  recipient: string;
  /** Whether it would be taken and stored. */
  accepted: boolean;
  /** Null: the address is at no receiving domain of this account. */
  decision: ReceivedRouteDecision | null;
  /** Null: nothing would be forwarded, for want of a rule. */
  forwarding: RouteTestForwarding | null;
  /** The same in words. */
  explanation: string;
}

const EXAMPLE: ReceivingRoute = {
  object: 'receiving_route',
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  domain_id: '019e6f0a-4b0d-7000-9c4d-1a5b3c2d8e6f',
  domain: 'example.com',
  type: 'alias',
  local_part: 'sales',
  target_local_part: 'team',
  target_address: 'team@example.com',
  created_at: new Date('2026-05-06T12:00:00.000Z'),
  updated_at: new Date('2026-05-06T12:00:00.000Z'),
};

@Route('receiving/routes')
@Tags('Receiving')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class ReceivingRoutesController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Creates a route. Once a domain has one, mail for addresses that no route is for is refused; a domain without routes
   * takes everything. Exact goes before alias, then both for what is before a `+`, then the catch-all.
   */
  @Post()
  @OperationId('createReceivingRoute')
  @SuccessResponse(201, 'The route')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(409, 'The domain has such a route (`route_exists`)')
  @Response<ErrorEnvelope>(
    422,
    'A field is missing or wrong; or the domain does not receive (`receiving_disabled`, `domain_not_verified`)',
  )
  @Example<ReceivingRoute>(EXAMPLE)
  async create(
    @Request() request: express.Request,
    @Body() body: CreateRouteRequest,
  ): Promise<ReceivingRoute> {
    const route = await this.verbs.receivingRoutes.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return present(route);
  }

  /**
   * Says what would become of a message to an address, without any mail: the route that takes it, and what the
   * forwarding rule on it would do.
   */
  @Post('test')
  @OperationId('testReceivingRoutes')
  @SuccessResponse(200, 'What would happen')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or no address')
  @Example<ReceivingRouteTest>({
    object: 'receiving_route_test',
    recipient: 'sales@example.com',
    accepted: true,
    decision: {
      recipient: 'sales@example.com',
      status: 'alias',
      route_id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
      route_type: 'alias',
      local_part: 'sales',
      domain_id: '019e6f0a-4b0d-7000-9c4d-1a5b3c2d8e6f',
      target_address: 'team@example.com',
      forwarding_rule_id: null,
    },
    forwarding: null,
    explanation:
      'It would be stored: the alias route sales takes it for team@example.com. No forwarding rule is on it.',
  })
  async test(
    @Request() request: express.Request,
    @Body() body: TestRouteRequest,
  ): Promise<ReceivingRouteTest> {
    const run = await this.verbs.receivingRoutes.test(callerOf(request).tenantId, body);
    const { forwarding } = run;
    return {
      object: 'receiving_route_test',
      recipient: run.recipient,
      accepted: run.isTaken,
      decision: run.decision,
      forwarding:
        forwarding === null
          ? null
          : {
              forwarding_rule_id: forwarding.ruleId,
              status: forwarding.status,
              outcome: forwarding.outcome,
              reason: forwarding.reason,
              destinations: [...forwarding.destinations],
              suppressed: [...forwarding.suppressed],
            },
      explanation: run.explanation,
    };
  }

  /**
   * Lists routes, newest first.
   * @param domain_id Only those of this domain.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listReceivingRoutes')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor, or a domain id that is no UUID')
  async list(
    @Request() request: express.Request,
    @Query() domain_id?: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ReceivingRouteList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.receivingRoutes.list(
      callerOf(request).tenantId,
      { limit, after, before },
      domain_id ?? null,
    );
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /** Retrieves a route. */
  @Get('{id}')
  @OperationId('getReceivingRoute')
  @SuccessResponse(200, 'The route')
  @Response<ErrorEnvelope>(404, 'No such route')
  @Example<ReceivingRoute>(EXAMPLE)
  async get(@Request() request: express.Request, @Path() id: string): Promise<ReceivingRoute> {
    return present(await this.verbs.receivingRoutes.find(callerOf(request).tenantId, id));
  }

  /**
   * Changes what the body names. An exact route whose target is its own local part keeps it so. Its forwarding rule shows
   * the new target.
   */
  @Patch('{id}')
  @OperationId('updateReceivingRoute')
  @SuccessResponse(200, 'The route')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such route')
  @Response<ErrorEnvelope>(409, 'The domain has such a route (`route_exists`)')
  @Response<ErrorEnvelope>(422, 'A field is wrong, or cannot be changed')
  @Example<ReceivingRoute>(EXAMPLE)
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateRouteRequest,
  ): Promise<ReceivingRoute> {
    return present(await this.verbs.receivingRoutes.update(callerOf(request).tenantId, id, body));
  }

  /** Deletes a route. Received mail stays; a forwarding rule on it stays and becomes `invalid`. */
  @Delete('{id}')
  @OperationId('deleteReceivingRoute')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such route')
  @Example<ReceivingRouteDeleted>({
    object: 'receiving_route',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<ReceivingRouteDeleted> {
    const removed = await this.verbs.receivingRoutes.remove(callerOf(request).tenantId, id);
    return { object: 'receiving_route', id: removed, deleted: true };
  }
}

const present = (route: RouteRecord): ReceivingRoute => ({
  object: 'receiving_route',
  id: route.id,
  domain_id: route.domainId,
  domain: route.domain,
  type: route.type,
  local_part: route.localPart,
  target_local_part: route.targetLocalPart,
  target_address: `${route.targetLocalPart}@${route.domain}`,
  created_at: route.createdAt,
  updated_at: route.updatedAt,
});
