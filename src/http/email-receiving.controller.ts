// What arrived for the tenant's receiving domains.
import {
  Controller,
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
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { SignedLink } from '../access/signed-link.ts';
import type {
  ForwardingRecord,
  ReceivedRecord,
  ReceivedSummary,
} from '../receiving/read-received.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import { receivedExample, receivedFoundExample } from './received-example.ts';
import type { Verbs } from './verbs.ts';

/** A file of a received email. */
export interface ReceivedEmailAttachment {
  id: string;
  filename: string | null;
  /** In bytes, decoded. */
  size: number;
  content_type: string;
  content_id: string | null;
  content_disposition: 'attachment' | 'inline';
}

/** A file with a link to its bytes. */
export interface ReceivedAttachmentLink extends ReceivedEmailAttachment {
  /** Works without an API key until `expires_at`, one hour from now. */
  download_url: string;
  expires_at: Date;
}

export interface ReceivedAttachmentFound extends ReceivedAttachmentLink {
  object: 'attachment';
}

export interface ReceivedAttachmentList {
  object: 'list';
  data: ReceivedAttachmentLink[];
  has_more: boolean;
}

/** What was decided for one envelope recipient; nulls where nothing applies. */
export interface ReceivedRouteDecision {
  recipient: string;
  status: 'exact' | 'alias' | 'catch_all' | 'unrouteable';
  route_id: string | null;
  route_type: 'exact' | 'alias' | 'catch_all' | null;
  local_part: string | null;
  domain_id: string | null;
  target_address: string | null;
  forwarding_rule_id: string | null;
}

/** What a list shows of a received email. */
export interface ReceivedEmailSummary {
  id: string;
  /** As the header shows it; empty when there is none. Whether it is true, `authentication` says. */
  from: string;
  to: string[];
  cc: string[] | null;
  bcc: string[] | null;
  reply_to: string[] | null;
  /** The envelope recipients of this tenant. */
  received_for: string[];
  subject: string;
  /** With angle brackets; null when the message has none. */
  message_id: string | null;
  attachments: ReceivedEmailAttachment[];
  route_decisions: ReceivedRouteDecision[];
  /** The email of yours that it replies to, by In-Reply-To and References; whoever wrote it. */
  answers_email_id: string | null;
  /**
   * `complete`: everything in the message is shown. `partial`: not all of it could be read, or it has more than is shown; the
   * bytes in `raw` are whole. `pending`: it is being read, its fields are still empty.
   */
  parsing: 'complete' | 'partial' | 'pending';
  created_at: Date;
}

/** RFC 7208: whether the client may send for the envelope sender. */
export interface ReceivedSpf {
  result: 'pass' | 'fail' | 'softfail' | 'neutral' | 'none' | 'temperror' | 'permerror';
  /** Of the envelope sender, or the client's own name where that is empty. */
  domain: string | null;
  reason: string | null;
}

/** RFC 6376: one signature. */
export interface ReceivedDkim {
  result: 'pass' | 'fail' | 'policy' | 'neutral' | 'none' | 'temperror' | 'permerror';
  domain: string | null;
  selector: string | null;
  /** Whether it speaks for the domain of `from`. */
  aligned: boolean;
  reason: string | null;
}

export interface ReceivedAlignment {
  spf: boolean;
  dkim: boolean;
}

/** RFC 9989: whether SPF or DKIM vouch for the domain of `from`. */
export interface ReceivedDmarc {
  result: 'pass' | 'fail' | 'none' | 'temperror' | 'permerror';
  domain: string | null;
  /** What that domain wants done with mail that fails. */
  policy: 'none' | 'quarantine' | 'reject' | null;
  aligned: ReceivedAlignment;
  reason: string | null;
}

/** RFC 8617: what those said who handed it on. */
export interface ReceivedArc {
  result: 'pass' | 'fail' | 'none';
  sealer: string | null;
  instances: number;
}

/** What the checks at the door showed. */
export interface ReceivedAuthentication {
  spf: ReceivedSpf;
  /** In the order of the message; empty: not signed. */
  dkim: ReceivedDkim[];
  dmarc: ReceivedDmarc;
  arc: ReceivedArc;
  /** `tagged`: the policy of the domain of `from` says to refuse it, and it was taken all the same. */
  verdict: 'accepted' | 'tagged';
}

/** What came of one forward. */
export interface ReceivedForwardingAttempt {
  id: string;
  rule_id: string;
  /** The envelope recipient that the route matched. */
  recipient: string;
  /** As the rule had them then. */
  destinations: string[];
  status: 'queued' | 'skipped' | 'failed';
  /** Null when queued. */
  reason: string | null;
  /** What was done and why, or why not. */
  explanation: string;
  /** `relayed`: the original bytes; `rebuilt`: a message of the route's own around them. */
  method: 'relayed' | 'rebuilt' | null;
  /** The outbound email; null unless queued. */
  email_id: string | null;
  created_at: Date;
}

export interface ReceivedEmailList {
  object: 'list';
  data: ReceivedEmailSummary[];
  has_more: boolean;
}

/** The message as it came. */
export interface RawMessageLink {
  /** Works without an API key until `expires_at`, one hour from now. */
  download_url: string;
  expires_at: Date;
}

/** A received email with its content. */
export interface ReceivedEmailFound extends ReceivedEmailSummary {
  object: 'email';
  html: string | null;
  /** How `cid:` images are shown in `html`. */
  html_format: 'data_uri' | 'cid';
  text: string | null;
  /** Lower-case name to value; of a repeated field the values of all, one a line. */
  headers: { [name: string]: string } | null;
  raw: RawMessageLink;
  /** Null: it was not checked. */
  authentication: ReceivedAuthentication | null;
  /** Newest last; of more than 100 the newest. */
  forwarding_attempts: ReceivedForwardingAttempt[];
  /** The envelope sender; empty for bounces. */
  mail_from: string;
  /** The host that handed it over. */
  remote_address: string | null;
  /** As that host named itself. */
  helo: string | null;
  /** When html, text, headers, the raw message and the files were removed because of their age; null: they are kept. */
  content_removed_at: Date | null;
}

const LINK_LIFETIME_MS = 3_600_000;

@Route('emails/receiving')
@Tags('Receiving')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class EmailReceivingController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Lists received emails, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param start_date Received on this day (`2026-05-06`, UTC) or at this ISO 8601 time, or later.
   * @param end_date Received on this day or at this time, or before.
   * @param answers_email_id The id of an email that you sent: its replies.
   */
  @Get()
  @OperationId('listReceivedEmails')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or filter')
  @Example<ReceivedEmailList>({ object: 'list', data: [receivedExample], has_more: false })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() start_date?: string,
    @Query() end_date?: string,
    @Query() answers_email_id?: string,
  ): Promise<ReceivedEmailList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.receiving.list(
      callerOf(request),
      { limit, after, before },
      { startDate: start_date, endDate: end_date, answersEmailId: answers_email_id },
    );
    return { object: 'list', data: page.items.map(summaryOf), has_more: page.hasMore };
  }

  /**
   * Retrieves one received email with its content.
   * @param html_format `data_uri` (default): the images of the message are inside the HTML; `cid`: as it came.
   */
  @Get('{id}')
  @OperationId('getReceivedEmail')
  @SuccessResponse(200, 'The received email')
  @Response<ErrorEnvelope>(404, 'No such received email')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ReceivedEmailFound>(receivedFoundExample)
  async get(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() html_format?: 'data_uri' | 'cid',
  ): Promise<ReceivedEmailFound> {
    const caller = callerOf(request);
    const email = await this.verbs.receiving.find(caller, checkId(id));
    if (email === null) throw notFound();
    const format = html_format ?? 'data_uri';
    const html =
      format === 'cid'
        ? (email.content.html ?? null)
        : await this.verbs.receiving.inlineImages(caller, email);
    const link = this.verbs.links.sign(
      { kind: 'received_raw', tenantId: caller.tenantId, id: email.id, partId: null },
      LINK_LIFETIME_MS,
    );
    return {
      object: 'email',
      ...summaryOf(email),
      html,
      html_format: format,
      text: email.content.text ?? null,
      headers: email.content.headers ?? null,
      raw: presentLink(link),
      authentication: presentAuthentication(email.authentication ?? null),
      forwarding_attempts: email.forwardingAttempts.map(presentAttempt),
      mail_from: email.mailFrom,
      remote_address: email.remoteAddress ?? null,
      helo: email.helo ?? null,
      content_removed_at: email.contentRemovedAt ?? null,
    };
  }

  /**
   * Lists the files of a received email, in the order of the message.
   * @param limit 1 to 100, default 20.
   */
  @Get('{id}/attachments')
  @OperationId('listReceivedAttachments')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such received email')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit or cursor')
  async attachments(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ReceivedAttachmentList> {
    checkLimitText(request.query['limit']);
    const caller = callerOf(request);
    const email = await this.verbs.receiving.find(caller, checkId(id));
    if (email === null) throw notFound();
    const page = this.verbs.receiving.attachmentsOf(email, { limit, after, before });
    return {
      object: 'list',
      data: page.items.map((part) => ({
        ...part,
        ...this.linkTo(caller.tenantId, email.id, part.id),
      })),
      has_more: page.hasMore,
    };
  }

  /** Retrieves one file of a received email, with a link to its bytes. */
  @Get('{id}/attachments/{attachmentId}')
  @OperationId('getReceivedAttachment')
  @SuccessResponse(200, 'The file')
  @Response<ErrorEnvelope>(404, 'No such received email or file')
  @Response<ErrorEnvelope>(422, 'An id is not a UUID')
  async attachment(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() attachmentId: string,
  ): Promise<ReceivedAttachmentFound> {
    const caller = callerOf(request);
    const wanted = checkId(attachmentId, 'attachmentId');
    const email = await this.verbs.receiving.find(caller, checkId(id));
    const part = email?.attachments.find((one) => one.id === wanted);
    if (email === null || part === undefined)
      throw new Refusal('not_found', 'Attachment not found');
    return {
      object: 'attachment',
      ...part,
      ...this.linkTo(caller.tenantId, email.id, part.id),
    };
  }

  private linkTo(tenantId: string, id: string, partId: string): RawMessageLink {
    return presentLink(
      this.verbs.links.sign(
        { kind: 'received_attachment', tenantId, id, partId },
        LINK_LIFETIME_MS,
      ),
    );
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Email not found');

const presentLink = ({ url, expiresAt }: SignedLink): RawMessageLink => ({
  download_url: url,
  expires_at: expiresAt,
});

const orNull = (list: readonly string[]): string[] | null => (list.length > 0 ? [...list] : null);

function summaryOf(email: ReceivedSummary | ReceivedRecord): ReceivedEmailSummary {
  return {
    id: email.id,
    from: email.fromShown,
    to: [...email.toShown],
    cc: orNull(email.ccShown),
    bcc: orNull(email.bccShown),
    reply_to: orNull(email.replyToShown),
    received_for: [...email.receivedFor],
    subject: email.subject,
    message_id: email.messageId ?? null,
    attachments: email.attachments.map((part) => ({ ...part })),
    route_decisions: email.routeDecisions.map((decision) => ({ ...decision })),
    answers_email_id: email.answersEmailId ?? null,
    parsing: email.isRead ? (email.isPartial ? 'partial' : 'complete') : 'pending',
    created_at: email.createdAt,
  };
}

function presentAuthentication(
  found: ReceivedRecord['authentication'],
): ReceivedAuthentication | null {
  if (!found) return null;
  const { spf, dkim, dmarc, arc, verdict } = found;
  return {
    spf: { ...spf },
    dkim: dkim.map((one) => ({ ...one })),
    dmarc: { ...dmarc, aligned: { ...dmarc.aligned } },
    arc: { ...arc },
    verdict,
  };
}

/** Also of a rule's latest one. */
export const presentAttempt = (
  attempt: Pick<
    ForwardingRecord,
    | 'id'
    | 'ruleId'
    | 'recipient'
    | 'destinations'
    | 'status'
    | 'reason'
    | 'explanation'
    | 'method'
    | 'emailId'
    | 'createdAt'
  >,
): ReceivedForwardingAttempt => ({
  id: attempt.id,
  rule_id: attempt.ruleId,
  recipient: attempt.recipient,
  destinations: [...attempt.destinations],
  status: attempt.status,
  reason: attempt.reason ?? null,
  explanation: attempt.explanation,
  method: attempt.method ?? null,
  email_id: attempt.emailId ?? null,
  created_at: attempt.createdAt,
});
