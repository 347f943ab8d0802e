// The files of sent emails, with links to their bytes.
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
import type { AttachmentRecord } from '../sending/read-attachments.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A file of a sent email. */
export interface EmailAttachment {
  id: string;
  filename: string | null;
  /** In bytes; null until the file was fetched from its URL. */
  size: number | null;
  content_type: string;
  content_disposition: 'attachment' | 'inline';
  /** Without angle brackets. */
  content_id: string | null;
  /** Works without an API key until `expires_at`; null until the file was fetched from its URL. */
  download_url: string | null;
  expires_at: Date | null;
}

/** One file of a sent email. */
export interface EmailAttachmentFound extends EmailAttachment {
  object: 'attachment';
}

export interface EmailAttachmentList {
  object: 'list';
  data: EmailAttachment[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** Of a link to the bytes. */
const LINK_LIFETIME_MS = 3_600_000;

@Route('emails')
@Tags('Emails')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'No such email or attachment')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class EmailAttachmentsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Lists the files of an email in their order, each with a link to its bytes that works for an hour.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/attachments')
  @OperationId('listEmailAttachments')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<EmailAttachmentList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const emailId = checkId(id);
    const page = await this.verbs.attachments.list(tenantId, emailId, { limit, after, before });
    if (page === null) throw new Refusal('not_found', 'Email not found');
    return {
      object: 'list',
      data: page.items.map((one) => this.present(one, { tenantId, emailId })),
      has_more: page.hasMore,
    };
  }

  /** Retrieves one file of an email, with a link to its bytes that works for an hour. */
  @Get('{id}/attachments/{attachmentId}')
  @OperationId('getEmailAttachment')
  @SuccessResponse(200, 'The file')
  @Response<ErrorEnvelope>(422, 'An id is not a UUID')
  @Example<EmailAttachmentFound>({
    object: 'attachment',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e71',
    filename: 'invoice.pdf',
    size: 48_213,
    content_type: 'application/pdf',
    content_disposition: 'attachment',
    content_id: null,
    download_url: 'https://mail.example.com/links/YXR0YWNobWVudA.c2lnbmF0dXJl',
    expires_at: new Date('2026-05-06T13:00:00.000Z'),
  })
  async get(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() attachmentId: string,
  ): Promise<EmailAttachmentFound> {
    const { tenantId } = callerOf(request);
    const emailId = checkId(id);
    const found = await this.verbs.attachments.find(
      tenantId,
      emailId,
      checkId(attachmentId, 'attachmentId'),
    );
    if (found === null) throw new Refusal('not_found', 'Attachment not found');
    return { object: 'attachment', ...this.present(found, { tenantId, emailId }) };
  }

  private present(
    one: AttachmentRecord,
    of: { readonly tenantId: string; readonly emailId: string },
  ): EmailAttachment {
    const link =
      one.sizeBytes === null
        ? null
        : this.verbs.links.sign(
            { kind: 'attachment', tenantId: of.tenantId, id: of.emailId, partId: one.id },
            LINK_LIFETIME_MS,
          );
    return {
      id: one.id,
      filename: one.filename,
      size: one.sizeBytes,
      content_type: one.contentType,
      content_disposition: one.disposition,
      content_id: one.contentId,
      download_url: link?.url ?? null,
      expires_at: link?.expiresAt ?? null,
    };
  }
}
