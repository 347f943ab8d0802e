// The log of API requests.
import {
  Controller,
  Get,
  OperationId,
  Path,
  Queries,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import type { LogEntry, LogSummary } from '../access/logs.ts';
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface ListLogsQuery {
  /** 1 to 100, default 20. */
  limit?: number;
  /** The id of the last item of the page before. */
  after?: string;
  /** The id of the first item of the page after. */
  before?: string;
  /** A status like `404` or a class like `4xx`; several with commas. */
  status?: string;
  /** `GET`, `POST`, … */
  method?: string;
  /** Only requests with this key. */
  api_key_id?: string;
  /** From then on: a date (its whole day, UTC) or an ISO 8601 time. */
  start_date?: string;
  /** Until then, inclusive. */
  end_date?: string;
  /** Part of the endpoint or of the user agent, in any case; at most 200 characters. */
  search?: string;
  /** Only requests about an email with a tag of this name. */
  tag_name?: string;
  /** Another name of `tag_name`. */
  tagName?: string;
  /** With `tag_name`: only the tag with this value, which may be empty. */
  tag_value?: string;
  /** Another name of `tag_value`. */
  tagValue?: string;
}

/** One request, as a list shows it. */
export interface RequestLogSummary {
  id: string;
  /** When the request arrived. */
  created_at: Date;
  /** The path without `/api` and query. */
  endpoint: string;
  method: string;
  response_status: number;
  user_agent: string | null;
  api_key_id: string;
  /** The `x-request-id` of the answer. */
  request_id: string;
  duration_ms: number;
}

/** One request with what was said. */
export interface RequestLogEntry extends RequestLogSummary {
  object: 'log';
  /**
   * The body without secrets and contents of attachments. Of one above 64 KiB a shortened form, or
   * `{"truncated": true}`. Null: there was none, or it was not JSON.
   */
  request_body: unknown;
  /** The same for the answer. */
  response_body: unknown;
  /** The emails that it was about: `emailId`, or `emailIds` where there are several. */
  metadata: { emailId?: string; emailIds?: string[] };
}

export interface RequestLogList {
  object: 'list';
  data: RequestLogSummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

@Route('logs')
@Tags('Logs')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class LogsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Lists API requests of the last 30 days, newest first. A request shows up when it is answered,
   * one that another process answered within a second. */
  @Get()
  @OperationId('listLogs')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad filter, limit or cursor')
  async list(
    @Request() request: express.Request,
    @Queries() query: ListLogsQuery,
  ): Promise<RequestLogList> {
    checkLimitText(request.query['limit']);
    const { limit, after, before } = query;
    const page = await this.verbs.logs.list(
      callerOf(request),
      { limit, after, before },
      {
        status: query.status,
        method: query.method,
        apiKeyId: query.api_key_id,
        startDate: query.start_date,
        endDate: query.end_date,
        search: query.search,
        tagName: query.tag_name,
        tagNameAlias: query.tagName,
        tagValue: query.tag_value,
        tagValueAlias: query.tagValue,
      },
    );
    return { object: 'list', data: page.items.map(presentSummary), has_more: page.hasMore };
  }

  /** Retrieves one request with its bodies. */
  @Get('{id}')
  @OperationId('getLog')
  @SuccessResponse(200, 'The request')
  @Response<ErrorEnvelope>(404, 'No such log')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async get(@Request() request: express.Request, @Path() id: string): Promise<RequestLogEntry> {
    const log = await this.verbs.logs.find(callerOf(request), checkId(id));
    if (log === null) throw new Refusal('not_found', 'Log not found');
    return present(log);
  }
}

function presentSummary(log: LogSummary): RequestLogSummary {
  return {
    id: log.id,
    created_at: log.createdAt,
    endpoint: log.endpoint,
    method: log.method,
    response_status: log.responseStatus,
    user_agent: log.userAgent,
    api_key_id: log.apiKeyId,
    request_id: log.requestId,
    duration_ms: log.durationMs,
  };
}

function present(log: LogEntry): RequestLogEntry {
  const { emailIds } = log;
  return {
    object: 'log',
    ...presentSummary(log),
    request_body: log.requestBody,
    response_body: log.responseBody,
    metadata:
      emailIds.length === 0
        ? {}
        : emailIds.length === 1
          ? { emailId: emailIds[0]! }
          : { emailIds: [...emailIds] },
  };
}
