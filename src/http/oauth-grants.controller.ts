// Grants of OAuth: this appliance gives none, since its API keys are made by their owner. Programs that ask for a list get
// an empty one.
import {
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Path,
  Query,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId, checkLimitText, pageOf } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { ErrorEnvelope } from './envelope.ts';

/** What a program of somebody else may do. */
export interface OAuthGrant {
  id: string;
  client_id: string;
  scopes: string[];
  created_at: Date;
  revoked_at: Date | null;
  revoked_reason: string | null;
  client: { name: string; logo_uri: string | null };
}

export interface OAuthGrantList {
  object: 'list';
  data: OAuthGrant[];
  has_more: boolean;
}

export interface OAuthGrantRevoked {
  object: 'oauth_grant';
  id: string;
  revoked_at: Date;
  revoked_reason: string;
}

@Route('oauth/grants')
@Tags('OAuth grants')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class OAuthGrantsController extends Controller {
  /**
   * Lists OAuth grants: there are none.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listOAuthGrants')
  @SuccessResponse(200, 'An empty page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<OAuthGrantList>({ object: 'list', data: [], has_more: false })
  list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): OAuthGrantList {
    checkLimitText(request.query['limit']);
    const { hasMore } = pageOf<OAuthGrant>([], { limit, after, before });
    return { object: 'list', data: [], has_more: hasMore };
  }

  /** Revokes an OAuth grant: there is none that could be. */
  @Delete('{id}')
  @OperationId('revokeOAuthGrant')
  @SuccessResponse(200, 'Revoked')
  @Response<ErrorEnvelope>(404, 'No such grant')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  revoke(@Path() id: string): OAuthGrantRevoked {
    checkId(id);
    throw new Refusal('not_found', 'OAuth grant not found');
  }
}
