// What the built-in sink took. Only where there is a sink: development mode, or delivery set to it.
import {
  Controller,
  Delete,
  Get,
  OperationId,
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
import { Refusal } from '../access/refusal.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A message as it arrived at the sink. */
export interface SinkMessage {
  id: string;
  /** The return path; empty for the null sender. */
  mail_from: string;
  rcpt_to: string[];
  /** The message as received; bytes that are not UTF-8 show as U+FFFD. */
  raw: string;
  received_at: Date;
  tls: boolean;
}

export interface SinkMessageList {
  object: 'list';
  data: SinkMessage[];
  has_more: boolean;
}

export interface SinkEmptied {
  object: 'list';
  deleted: boolean;
}

@Route('sink/messages')
@Tags('Sink')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'This appliance has no sink')
export class SinkController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Lists what the sink took, newest first.
   * @param limit 1 to 100, default 20.
   */
  @Get()
  @OperationId('listSinkMessages')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<SinkMessageList> {
    callerOf(request);
    checkLimitText(request.query['limit']);
    const page = await this.sink().list({ limit, after, before });
    return {
      object: 'list',
      data: page.items.map((message) => ({
        id: message.id,
        mail_from: message.mailFrom,
        rcpt_to: [...message.rcptTo],
        raw: Buffer.from(message.raw).toString('utf8'),
        received_at: message.receivedAt,
        tls: message.tls,
      })),
      has_more: page.hasMore,
    };
  }

  /** Empties the sink. */
  @Delete()
  @OperationId('emptySink')
  @SuccessResponse(200, 'Emptied')
  async empty(@Request() request: express.Request): Promise<SinkEmptied> {
    callerOf(request);
    await this.sink().empty();
    return { object: 'list', deleted: true };
  }

  private sink(): NonNullable<Verbs['sink']> {
    if (this.verbs.sink === null) throw new Refusal('not_found', 'This appliance has no sink.');
    return this.verbs.sink;
  }
}
