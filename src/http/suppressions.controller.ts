// Suppressions: addresses that are not sent to any more.
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
import { checkLimitText } from '../access/page.ts';
import type { RemovedSuppressions, SuppressionRecord } from '../suppressions/suppressions.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface AddSuppressionRequest {
  /** One address without a name. */
  email: string;
}

export interface AddSuppressionsRequest {
  /** 1 to 100 addresses without names. */
  emails: string[];
}

/** Why an address is not sent to, and since when. */
export interface Suppression {
  object: 'suppression';
  id: string;
  /** In lower case. */
  email: string;
  /** A hard bounce, a complaint of the recipient, or a call of this API. */
  origin: 'bounce' | 'complaint' | 'manual';
  /** The email that bounced or was complained about. */
  source_id: string | null;
  created_at: Date;
}

export interface SuppressionList {
  object: 'list';
  data: Suppression[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

export interface SuppressionAdded {
  object: 'suppression';
  id: string;
}

export interface SuppressionsAdded {
  /** One for each address, in their order. */
  data: SuppressionAdded[];
}

export interface SuppressionDeleted {
  object: 'suppression';
  id: string;
  deleted: boolean;
}

export interface SuppressionsDeleted {
  /** One for each that was there, in the order asked. */
  data: SuppressionDeleted[];
}

@Route('suppressions')
@Tags('Suppressions')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class SuppressionsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Stops sending to an address. Adding it again answers with the id that it has. */
  @Post()
  @OperationId('addSuppression')
  @SuccessResponse(201, 'Suppressed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'The address is missing or wrong')
  @Example<SuppressionAdded>({ object: 'suppression', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async add(
    @Request() request: express.Request,
    @Body() body: AddSuppressionRequest,
  ): Promise<SuppressionAdded> {
    const id = await this.verbs.suppressions.add(callerOf(request).tenantId, body.email);
    this.setStatus(201);
    return { object: 'suppression', id };
  }

  /** Stops sending to up to 100 addresses; to none of them when one is wrong. */
  @Post('batch/add')
  @OperationId('addSuppressions')
  @SuccessResponse(201, 'Suppressed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'An address is wrong, or there are none or too many')
  async addAll(
    @Request() request: express.Request,
    @Body() body: AddSuppressionsRequest,
  ): Promise<SuppressionsAdded> {
    const ids = await this.verbs.suppressions.addAll(callerOf(request).tenantId, body.emails);
    this.setStatus(201);
    return { data: ids.map((id) => ({ object: 'suppression', id })) };
  }

  /** Sends again to up to 100 addresses, named by address or by id. Those that are not suppressed are passed over. */
  @Post('batch/remove')
  @OperationId('removeSuppressions')
  @SuccessResponse(200, 'Removed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'An item is wrong, or there are none or too many')
  async removeAll(
    @Request() request: express.Request,
    @Body() body: RemovedSuppressions,
  ): Promise<SuppressionsDeleted> {
    const ids = await this.verbs.suppressions.removeAll(callerOf(request).tenantId, body);
    return { data: ids.map((id) => ({ object: 'suppression', id, deleted: true })) };
  }

  /**
   * Lists suppressions, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param origin Only these.
   */
  @Get()
  @OperationId('listSuppressions')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or origin')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() origin?: 'bounce' | 'complaint' | 'manual',
  ): Promise<SuppressionList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.suppressions.list(
      callerOf(request).tenantId,
      { limit, after, before },
      origin ?? null,
    );
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /**
   * Retrieves a suppression.
   * @param id The id or the address.
   */
  @Get('{id}')
  @OperationId('getSuppression')
  @SuccessResponse(200, 'The suppression')
  @Response<ErrorEnvelope>(404, 'The address is not suppressed')
  async get(@Request() request: express.Request, @Path() id: string): Promise<Suppression> {
    return present(await this.verbs.suppressions.find(callerOf(request).tenantId, id));
  }

  /**
   * Sends to an address again.
   * @param id The id or the address.
   */
  @Delete('{id}')
  @OperationId('removeSuppression')
  @SuccessResponse(200, 'Removed')
  @Response<ErrorEnvelope>(404, 'The address is not suppressed')
  async remove(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<SuppressionDeleted> {
    const removed = await this.verbs.suppressions.remove(callerOf(request).tenantId, id);
    return { object: 'suppression', id: removed, deleted: true };
  }
}

const present = (suppression: SuppressionRecord): Suppression => ({
  object: 'suppression',
  id: suppression.id,
  email: suppression.address,
  origin: suppression.origin,
  source_id: suppression.sourceId,
  created_at: suppression.createdAt,
});
