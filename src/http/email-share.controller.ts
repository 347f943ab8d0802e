// Showing an email to somebody without an API key.
import {
  Body,
  Controller,
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
import { shareLifetimeMs } from '../sending/share.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface ShareEmailRequest {
  /** How long the link works: `10m`, `1h`; at most and by default `48h`. */
  expires_in?: string | null;
}

/** A page that shows the email. */
export interface SharedEmailLink {
  object: 'email';
  id: string;
  /** Works without an API key until it expires; cannot be taken back. */
  url: string;
}

@Route('emails')
@Tags('Emails')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'No such email')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class EmailShareController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Makes a link to a page that shows a sent or received email to anybody who has the link. */
  @Post('{id}/share')
  @OperationId('shareEmail')
  @SuccessResponse(200, 'The link')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or the duration is not valid')
  async share(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body?: ShareEmailRequest,
  ): Promise<SharedEmailLink> {
    const caller = callerOf(request);
    const emailId = checkId(id);
    const lifetimeMs = shareLifetimeMs(body?.expires_in);
    const email =
      (await this.verbs.findEmail(caller, emailId)) ??
      (await this.verbs.receiving.find(caller, emailId));
    if (email === null) throw new Refusal('not_found', 'Email not found');
    const { url } = this.verbs.links.sign(
      { kind: 'email', tenantId: caller.tenantId, id: emailId, partId: null },
      lifetimeMs,
    );
    return { object: 'email', id: emailId, url };
  }
}
