// What arrived for the tenant's receiving domains.
import {
  Controller,
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
import type { ReceivedRecord, ReceivedSummary } from '../receiving/read-received.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
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
   */
  @Get()
  @OperationId('listReceivedEmails')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ReceivedEmailList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.receiving.list(callerOf(request), { limit, after, before });
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
    const wanted = checkId(attachmentId);
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
    created_at: email.createdAt,
  };
}
