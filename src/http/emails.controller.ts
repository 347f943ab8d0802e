// Sending emails and following them.
import {
  Body,
  Controller,
  Example,
  Get,
  Header,
  OperationId,
  Patch,
  Path,
  Post,
  Queries,
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
import type { EmailRecord } from '../sending/read.ts';
import { checkIdempotencyKey } from '../sending/idempotency.ts';
import type { Origin } from '../sending/accept.ts';
import type { SendEmailRequest, SendEmailTag } from '../sending/request.ts';
import type { EmailEvent, ProviderError } from '../store/email.ts';
import type { Trace, TraceRecipient } from '../timeline/trace.ts';
import type { Waiting } from '../timeline/waiting.ts';
import { callerOf } from './authenticate.ts';
import { misshapenOf } from './batch-items.ts';
import { requestIdOf, type ErrorEnvelope } from './envelope.ts';
import { spooledOf } from './spool.ts';
import type { Verbs } from './verbs.ts';

/** An accepted email. */
export interface EmailAccepted {
  object: 'email';
  id: string;
}

/** An email that was left out of a permissive batch. */
export interface BatchError {
  /** Its place in the request, from 0. */
  index: number;
  message: string;
}

/** An accepted batch. */
export interface BatchAccepted {
  /** The accepted emails, in the order of the request. */
  data: EmailAccepted[];
  /** Only with `x-batch-validation: permissive`. */
  errors?: BatchError[];
}

/** What can be changed of an email that waits for its time. */
export interface UpdateEmailRequest {
  /** When to send it, as in a send-email request. */
  scheduled_at?: string | null;
}

export interface ListEmailsQuery {
  /** 1 to 100, default 20. */
  limit?: number;
  /** The id of the last item of the page before. */
  after?: string;
  /** The id of the first item of the page after. */
  before?: string;
  /** A value of `last_event`; several with commas. */
  status?: string;
  /** Only emails with a tag of this name. */
  tag_name?: string;
  /** Another name of `tag_name`. */
  tagName?: string;
  /** With `tag_name`: only the tag with this value, which may be empty. */
  tag_value?: string;
  /** Another name of `tag_value`. */
  tagValue?: string;
  /** Only emails whose `from` is at this domain. */
  domain?: string;
  /** Created then or later: a date (its whole day, UTC) or an ISO 8601 time. */
  start_date?: string;
  /** Created until then, inclusive. */
  end_date?: string;
  /**
   * Words of the subject, of `from` or of a recipient, 2 to 200 characters. Every word must occur, in any case;
   * the end of a word or of an address may be left out.
   */
  search?: string;
}

/** What a list shows of an email. */
export interface EmailSummary {
  id: string;
  /** With angle brackets. */
  message_id: string;
  from: string;
  to: string[];
  cc: string[] | null;
  bcc: string[] | null;
  reply_to: string[] | null;
  subject: string;
  /** Always equal to `last_event`. */
  status: EmailEvent;
  /** With several recipients: the worst that is still undecided, else the worst final one. */
  last_event: EmailEvent;
  /** Not sent before this; stays when it was sent or canceled. */
  scheduled_at: Date | null;
  created_at: Date;
  /** Attempts after the first, over all recipients. */
  provider_retry_count: number;
  provider_last_attempted_at: Date | null;
  /** The earliest next try of any recipient. */
  provider_next_retry_at: Date | null;
  /** The last refusal or failure: enhanced status code or cause, and the peer's words. */
  provider_last_error: ProviderError | null;
  /** When delivery was given up: it could not be sent at all, or its lifetime ended. */
  provider_dead_lettered_at: Date | null;
}

/** An email with its content. */
export interface Email extends EmailSummary {
  object: 'email';
  html: string | null;
  /** As given, or as made from `html`. */
  text: string | null;
  headers: { [name: string]: string } | null;
  tags: SendEmailTag[];
  topic_id: string | null;
  /** When html, text, headers and attachments were removed because of their age; null: they are kept. */
  content_removed_at: Date | null;
}

export interface EmailList {
  object: 'list';
  data: EmailSummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** One fact about an email. */
export interface TimelineEvent {
  at: Date;
  /**
   * `accepted`, `rescheduled`, `canceled`, `suppressed`, `unsubscribed` (did not want it), `attempt_started`, `delivered`, `deferred`, `bounced`,
   * `complained`, `reported` (what a host wrote later and what changed nothing),
   * `failed`, `unknown`, `interrupted`, `delivery_delayed` (put off for hours), `expired`, `released` (sent after all)
   * or `possible_duplicate` (the attempt after `unknown`).
   */
  type: string;
  /** Null for facts about the whole email. */
  recipient: string | null;
  /** What proves it: request, host, TLS, the peer's reply. */
  detail: { [name: string]: unknown };
}

export interface Timeline {
  object: 'timeline';
  email_id: string;
  /** In order of time. */
  events: TimelineEvent[];
  recipients: TraceRecipient[];
  /** Why it has not been delivered yet; null when nothing is left to wait for. */
  waiting: Waiting | null;
}

@Route('emails')
@Tags('Emails')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(
  503,
  'The database is away or too much is arriving at once. Where its answer was lost, an email may have been accepted all the same: repeat with the same Idempotency-Key',
)
export class EmailsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Sends an email. The answer means that it is stored and queued, not that it was delivered: follow it
   * with `GET /emails/{id}/timeline`.
   * @param idempotencyKey 1 to 256 characters. The same key and request give the same answer for 24 hours.
   */
  @Post()
  @OperationId('sendEmail')
  @SuccessResponse(200, 'Accepted')
  @Response<ErrorEnvelope>(400, 'The body is not JSON, or the idempotency key is not valid')
  @Response<ErrorEnvelope>(409, 'The idempotency key was used for another request')
  @Response<ErrorEnvelope>(413, 'The body is too large')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong; details lists every issue')
  @Example<EmailAccepted>({ object: 'email', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async send(
    @Request() request: express.Request,
    @Body() body: SendEmailRequest,
    @Header('Idempotency-Key') idempotencyKey?: string,
  ): Promise<EmailAccepted> {
    const accepted = await this.verbs.acceptEmail(callerOf(request), {
      request: body,
      spooled: spooledOf(request),
      idempotencyKey: checkIdempotencyKey(idempotencyKey),
      origin: originOf(request),
    });
    this.setStatus(accepted.status);
    if (accepted.replayed) this.setHeader('idempotent-replayed', 'true');
    return accepted.body as EmailAccepted;
  }

  /**
   * Sends up to 100 emails, all of them or none: with one wrong email the batch is refused and every issue is
   * listed. With `x-batch-validation: permissive` the right ones are sent and the wrong ones are named in `errors`.
   * @param idempotencyKey 1 to 256 characters. The same key and batch give the same answer for 24 hours.
   * @param batchValidation `strict` (the default) or `permissive`.
   */
  @Post('batch')
  @OperationId('sendBatch')
  @SuccessResponse(200, 'Accepted')
  @Response<ErrorEnvelope>(400, 'The body is not JSON, or the idempotency key is not valid')
  @Response<ErrorEnvelope>(413, 'The body is too large')
  @Response<ErrorEnvelope>(
    422,
    'An email is wrong, there are none or more than 100, or the idempotency key was used for another batch',
  )
  @Example<BatchAccepted>({
    data: [{ object: 'email', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' }],
  })
  async sendBatch(
    @Request() request: express.Request,
    @Body() body: SendEmailRequest[],
    @Header('Idempotency-Key') idempotencyKey?: string,
    @Header('x-batch-validation') batchValidation?: 'strict' | 'permissive',
  ): Promise<BatchAccepted> {
    const accepted = await this.verbs.acceptBatch(callerOf(request), {
      requests: body,
      misshapen: misshapenOf(request),
      isPermissive: batchValidation === 'permissive',
      spooled: spooledOf(request),
      idempotencyKey: checkIdempotencyKey(idempotencyKey),
      origin: originOf(request),
    });
    this.setStatus(accepted.status);
    if (accepted.replayed) this.setHeader('idempotent-replayed', 'true');
    return accepted.body as BatchAccepted;
  }

  /** Lists emails, newest first, all of them or those that every filter lets through. */
  @Get()
  @OperationId('listEmails')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad filter, limit or cursor')
  async list(
    @Request() request: express.Request,
    @Queries() query: ListEmailsQuery,
  ): Promise<EmailList> {
    checkLimitText(request.query['limit']);
    const { limit, after, before } = query;
    const page = await this.verbs.listEmails(
      callerOf(request),
      { limit, after, before },
      {
        status: query.status,
        tagName: query.tag_name,
        tagNameAlias: query.tagName,
        tagValue: query.tag_value,
        tagValueAlias: query.tagValue,
        domain: query.domain,
        startDate: query.start_date,
        endDate: query.end_date,
        search: query.search,
      },
    );
    return { object: 'list', data: page.items.map(presentSummary), has_more: page.hasMore };
  }

  /** Retrieves one email with its content and state. */
  @Get('{id}')
  @OperationId('getEmail')
  @SuccessResponse(200, 'The email')
  @Response<ErrorEnvelope>(404, 'No such email')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async get(@Request() request: express.Request, @Path() id: string): Promise<Email> {
    const email = await this.verbs.findEmail(callerOf(request), checkId(id));
    if (email === null) throw notFound();
    return present(email);
  }

  /** Moves a scheduled email to another time. Nothing else of an email can be changed. */
  @Patch('{id}')
  @OperationId('updateEmail')
  @SuccessResponse(200, 'Moved')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such email')
  @Response<ErrorEnvelope>(
    422,
    'The id or the time is wrong, or the email is not scheduled any more',
  )
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateEmailRequest,
  ): Promise<EmailAccepted> {
    const email = checkId(id);
    const scheduledAt = body.scheduled_at;
    await this.verbs.rescheduleEmail(callerOf(request), { id: email, scheduledAt });
    return { object: 'email', id: email };
  }

  /** Cancels a scheduled email, for good. */
  @Post('{id}/cancel')
  @OperationId('cancelEmail')
  @SuccessResponse(200, 'Canceled')
  @Response<ErrorEnvelope>(404, 'No such email')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or the email is not scheduled any more')
  async cancel(@Request() request: express.Request, @Path() id: string): Promise<EmailAccepted> {
    const email = checkId(id);
    await this.verbs.cancelEmail(callerOf(request), email);
    return { object: 'email', id: email };
  }

  /** Everything that is known about one email, from the HTTP request to the last SMTP reply. */
  @Get('{id}/timeline')
  @OperationId('getEmailTimeline')
  @SuccessResponse(200, 'The timeline')
  @Response<ErrorEnvelope>(404, 'No such email')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async timeline(@Request() request: express.Request, @Path() id: string): Promise<Timeline> {
    const trace: Trace | null = await this.verbs.readTrace(callerOf(request), checkId(id));
    if (trace === null) throw notFound();
    return { object: 'timeline', email_id: id, ...trace };
  }
}

const originOf = (request: express.Request): Origin => ({
  via: 'http',
  requestId: requestIdOf(request.res!),
  userAgent: request.headers['user-agent']?.slice(0, 500) ?? null,
  address: request.socket.remoteAddress ?? null,
});

const notFound = (): Refusal => new Refusal('not_found', 'Email not found');

type Summarised = Omit<EmailRecord, 'content'>;
const listOf = (given: readonly string[] | null | undefined): string[] | null =>
  given === null || given === undefined ? null : [...given];

function presentSummary(email: Summarised): EmailSummary {
  return {
    id: email.id,
    message_id: email.messageId,
    from: email.fromGiven,
    to: [...email.toGiven],
    cc: listOf(email.ccGiven),
    bcc: listOf(email.bccGiven),
    reply_to: listOf(email.replyToGiven),
    subject: email.subject,
    status: email.lastEvent,
    last_event: email.lastEvent,
    scheduled_at: email.scheduledAt ?? null,
    created_at: email.createdAt,
    provider_retry_count: email.providerRetryCount,
    provider_last_attempted_at: email.providerLastAttemptedAt ?? null,
    provider_next_retry_at: email.providerNextRetryAt ?? null,
    provider_last_error: email.providerLastError ?? null,
    provider_dead_lettered_at: email.providerDeadLetteredAt ?? null,
  };
}

function present(email: EmailRecord): Email {
  const { content } = email;
  return {
    object: 'email',
    ...presentSummary(email),
    html: content.html ?? null,
    text: content.text ?? null,
    headers: content.headers ?? null,
    tags: (email.tags ?? []).map(({ name, value }) => ({ name, value })),
    topic_id: email.topicId ?? null,
    content_removed_at: email.contentRemovedAt ?? null,
  };
}
