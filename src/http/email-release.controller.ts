// Sending given-up mail after all.
import {
  Body,
  Controller,
  Example,
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
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface ReleaseEmailRequest {
  /** Also recipients that may have the email already: the answer of their host was lost. Default: false. */
  include_unknown?: boolean | null;
}

/** An email that is on its way again. */
export interface ReleasedEmail {
  object: 'email';
  id: string;
  /** The recipients it is sent to once more. */
  released: string[];
}

@Route('emails')
@Tags('Emails')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'No such email')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class EmailReleaseController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Sends an email once more to the recipients that were given up: those that could not be sent to at all, and those
   * whose time ran out. The message stays the same, byte for byte, and gets a new lifetime. Recipients who have it, whose host refused it
   * or who are suppressed are left alone.
   */
  @Post('{id}/release')
  @OperationId('releaseEmail')
  @SuccessResponse(200, 'On its way again')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(
    422,
    'The id is not a UUID, no recipient was given up, or the message is not there any more',
  )
  @Example<ReleasedEmail>({
    object: 'email',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    released: ['ada@example.com'],
  })
  async release(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body?: ReleaseEmailRequest,
  ): Promise<ReleasedEmail> {
    const email = checkId(id);
    const released = await this.verbs.releaseEmail(callerOf(request), {
      id: email,
      includeUnknown: body?.include_unknown ?? false,
    });
    return { object: 'email', id: email, released: [...released] };
  }
}
