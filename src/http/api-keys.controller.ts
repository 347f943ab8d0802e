// API keys: made, listed, renamed, revoked. Only a full-access key gets this far.
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
import type { ApiKeyRecord } from '../access/api-keys.ts';
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface CreateApiKeyRequest {
  /** 1 to 50 characters. */
  name: string;
  /** What the key may do: everything (the default), or only send. */
  permission?: 'full_access' | 'sending_access';
  /** With `sending_access`: the only domain that may be in `from`. */
  domain_id?: string | null;
}

export interface UpdateApiKeyRequest {
  /** 1 to 50 characters. */
  name: string;
}

/** A key as it can be seen after its creation: without its token. */
export interface ApiKeySummary {
  id: string;
  name: string;
  /** The first part of the token, to recognise it by. */
  prefix: string;
  permission: 'full_access' | 'sending_access';
  /** The only domain that may be in `from`; null: every domain. */
  domain_id: string | null;
  created_at: Date;
  /** The same as `created_at`. */
  createdAt: Date;
  /** To within a few minutes; null: never. */
  last_used_at: Date | null;
}

/** A new key. */
export interface ApiKeyCreated extends ApiKeySummary {
  object: 'api_key';
  /** The secret itself. It is shown here and never again. */
  token: string;
}

export interface ApiKeyList {
  object: 'list';
  data: ApiKeySummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

export interface ApiKeyUpdated {
  object: 'api_key';
  id: string;
}

export interface ApiKeyDeleted {
  object: 'api_key';
  id: string;
  deleted: boolean;
}

@Route('api-keys')
@Tags('API keys')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class ApiKeysController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Makes a key. Its token is in this answer only: to replace a key, make the new one before deleting the old. */
  @Post()
  @OperationId('createApiKey')
  @SuccessResponse(201, 'The key with its token')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong; details lists every issue')
  @Example<ApiKeyCreated>({
    object: 'api_key',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'Production',
    prefix: 're_c7Qx1bZp',
    permission: 'full_access',
    domain_id: null,
    created_at: new Date('2026-05-06T12:00:00.000Z'),
    createdAt: new Date('2026-05-06T12:00:00.000Z'),
    last_used_at: null,
    token: 're_c7Qx1bZp_…',
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateApiKeyRequest,
  ): Promise<ApiKeyCreated> {
    const { key, token } = await this.verbs.apiKeys.create(callerOf(request), body);
    this.setStatus(201);
    return { object: 'api_key', ...present(key), token };
  }

  /**
   * Lists the keys that work, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listApiKeys')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ApiKeyList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.apiKeys.list(callerOf(request), { limit, after, before });
    return { object: 'list', data: page.items.map(present), has_more: page.hasMore };
  }

  /** Renames a key. */
  @Patch('{id}')
  @OperationId('updateApiKey')
  @SuccessResponse(200, 'Renamed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such key')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or the name is missing or wrong')
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateApiKeyRequest,
  ): Promise<ApiKeyUpdated> {
    const key = checkId(id);
    if (!(await this.verbs.apiKeys.rename(callerOf(request), key, body.name))) throw notFound();
    return { object: 'api_key', id: key };
  }

  /** Revokes a key: from now on it is refused everywhere. A key may revoke itself. */
  @Delete('{id}')
  @OperationId('deleteApiKey')
  @SuccessResponse(200, 'Revoked')
  @Response<ErrorEnvelope>(404, 'No such key')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async delete(@Request() request: express.Request, @Path() id: string): Promise<ApiKeyDeleted> {
    const key = checkId(id);
    if (!(await this.verbs.apiKeys.revoke(callerOf(request), key))) throw notFound();
    return { object: 'api_key', id: key, deleted: true };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'API key not found');

function present(key: ApiKeyRecord): ApiKeySummary {
  return {
    id: key.id,
    name: key.name,
    prefix: key.prefix,
    permission: key.permission,
    domain_id: key.domainId,
    created_at: key.createdAt,
    createdAt: key.createdAt,
    last_used_at: key.lastUsedAt,
  };
}
