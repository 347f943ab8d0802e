// Sending emails and following them.
import {
  Body,
  Controller,
  Example,
  Get,
  Header,
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
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { EmailRecord } from '../sending/read.ts';
import { checkIdempotencyKey } from '../sending/idempotency.ts';
import type { SendEmailRequest, SendEmailTag } from '../sending/request.ts';
import type { EmailEvent, ProviderError } from '../store/email.ts';
import type { Trace, TraceRecipient, Waiting } from '../timeline/trace.ts';
import { callerOf } from './authenticate.ts';
import { requestIdOf, type ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** An accepted email. */
export interface EmailAccepted {
  object: 'email';
  id: string;
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
  /** `accepted`, `attempt_started`, `delivered`, `deferred`, `bounced`, `failed`, `unknown` or `interrupted`. */
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
  'The database is away or too much is arriving at once; nothing was accepted',
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
      idempotencyKey: checkIdempotencyKey(idempotencyKey),
      origin: {
        via: 'http',
        requestId: requestIdOf(request.res!),
        userAgent: request.headers['user-agent']?.slice(0, 500) ?? null,
        address: request.socket.remoteAddress ?? null,
      },
    });
    this.setStatus(accepted.status);
    if (accepted.replayed) this.setHeader('idempotent-replayed', 'true');
    return accepted.body as EmailAccepted;
  }

  /**
   * Lists emails, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listEmails')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<EmailList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.listEmails(callerOf(request), { limit, after, before });
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
    scheduled_at: null,
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
    topic_id: null,
  };
}
