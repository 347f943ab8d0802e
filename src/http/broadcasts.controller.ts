// Broadcasts: one text for every contact of a segment.
import {
  Body,
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Patch,
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
import type {
  CreateBroadcastRequest,
  UpdateBroadcastRequest,
} from '../audience/broadcast-content.ts';
import type { RecipientRecord } from '../audience/broadcast-recipients.ts';
import type { BroadcastRecord, BroadcastSummary } from '../audience/broadcasts.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** When to send a broadcast. */
export interface SendBroadcastRequest {
  /**
   * Within 30 days: an ISO 8601 date-time with a time zone, or `in <number> <unit>`, as in `POST /emails`. Absent: now.
   */
  scheduled_at?: string | null;
  /** Taken and not used; `PATCH` changes a broadcast. */
  name?: string | null;
  /** Taken and not used; `PATCH` changes a broadcast. */
  subject?: string | null;
  /** Taken and not used; `PATCH` changes a broadcast. */
  from?: string | null;
}

/** What lists show of a broadcast. */
export interface BroadcastListItem {
  id: string;
  name: string;
  segment_id: string | null;
  /** The old name of `segment_id`. */
  audience_id: string | null;
  topic_id: string | null;
  status: 'draft' | 'scheduled' | 'queued' | 'sent' | 'failed' | 'canceled';
  created_at: Date;
  scheduled_at: Date | null;
  /** When the last of its emails was on its way. */
  sent_at: Date | null;
}

/** One text for every contact of a segment. */
export interface Broadcast extends BroadcastListItem {
  object: 'broadcast';
  from: string | null;
  subject: string | null;
  reply_to: string[] | null;
  preview_text: string | null;
  html: string | null;
  text: string | null;
  /** Why it failed. */
  failure: string | null;
}

export interface BroadcastList {
  object: 'list';
  data: BroadcastListItem[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The broadcast that the request was about. */
export interface BroadcastChanged {
  object: 'broadcast';
  id: string;
}

export interface BroadcastDeleted {
  object: 'broadcast';
  id: string;
  deleted: boolean;
}

export interface BroadcastClickedLink {
  /** Where a page goes on; names nothing else. */
  id: string;
  url: string;
  clicks: number;
  /** Recipients who clicked it. */
  unique_clicks: number;
}

export interface BroadcastClickedLinkList {
  object: 'list';
  /** By their first click, the latest first. */
  data: BroadcastClickedLink[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** What became of a broadcast for one contact. */
export interface BroadcastRecipient {
  /** Where a page goes on; names nothing else. */
  id: string;
  /** Null: the contact was deleted. */
  contact_id: string | null;
  email: string;
  /** Of `opened` and `clicked`: how often. */
  count?: number;
  /** Of `clicked`. */
  clicked_links?: { url: string; clicks: number }[];
  /** Of `bounced`. */
  bounce_type?: 'permanent' | 'transient' | 'undetermined';
}

export interface BroadcastRecipientList {
  object: 'list';
  data: BroadcastRecipient[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

const SAMPLE_ID = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const SAMPLE_SEGMENT = '019e6ef8-91d2-7000-9c40-6b1f0a7de352';

@Route('broadcasts')
@Tags('Broadcasts')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class BroadcastsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Creates a broadcast: a draft, or with `send` one that is sent at once or at `scheduled_at`. `segment_id`, `from` and
   * `subject` are needed; `html` or `text` by the time it is sent.
   */
  @Post()
  @OperationId('createBroadcast')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong')
  @Example<BroadcastChanged>({ object: 'broadcast', id: SAMPLE_ID })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateBroadcastRequest,
  ): Promise<BroadcastChanged> {
    const id = await this.verbs.broadcasts.create(callerOf(request), body);
    this.setStatus(201);
    return { object: 'broadcast', id };
  }

  /**
   * Lists broadcasts, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listBroadcasts')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<BroadcastList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: SAMPLE_ID,
        name: 'News of May',
        segment_id: SAMPLE_SEGMENT,
        audience_id: SAMPLE_SEGMENT,
        topic_id: null,
        status: 'draft',
        created_at: new Date('2026-05-04T09:30:00.000Z'),
        scheduled_at: null,
        sent_at: null,
      },
    ],
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<BroadcastList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.broadcasts.list(callerOf(request).tenantId, {
      limit,
      after,
      before,
    });
    return { object: 'list', data: items.map(presentItem), has_more: hasMore };
  }

  /** Retrieves a broadcast. */
  @Get('{id}')
  @OperationId('getBroadcast')
  @SuccessResponse(200, 'The broadcast')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<Broadcast>({
    object: 'broadcast',
    id: SAMPLE_ID,
    name: 'News of May',
    segment_id: SAMPLE_SEGMENT,
    audience_id: SAMPLE_SEGMENT,
    topic_id: null,
    status: 'sent',
    created_at: new Date('2026-05-04T09:30:00.000Z'),
    scheduled_at: null,
    sent_at: new Date('2026-05-04T10:00:07.214Z'),
    from: 'Acme <news@acme.example>',
    subject: 'What is new in May',
    reply_to: null,
    preview_text: 'Three things that you can do now',
    html: '<p>Hello {{{FIRST_NAME|there}}}!</p><p><a href="{{{RESEND_UNSUBSCRIBE_URL}}}">Unsubscribe</a></p>',
    text: null,
    failure: null,
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Broadcast> {
    const { tenantId } = callerOf(request);
    const broadcast = await this.verbs.broadcasts.find(tenantId, checkId(id));
    if (broadcast === null) throw new Refusal('not_found', 'Broadcast not found');
    return present(broadcast);
  }

  /** Changes what the body names, as long as the broadcast is a draft. */
  @Patch('{id}')
  @OperationId('updateBroadcast')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(
    422,
    'The id is not a UUID, a field is wrong, or the broadcast is no draft',
  )
  @Example<BroadcastChanged>({ object: 'broadcast', id: SAMPLE_ID })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateBroadcastRequest,
  ): Promise<BroadcastChanged> {
    const broadcastId = checkId(id);
    await this.verbs.broadcasts.update(callerOf(request).tenantId, broadcastId, body);
    return { object: 'broadcast', id: broadcastId };
  }

  /** Deletes a draft for good. */
  @Delete('{id}')
  @OperationId('deleteBroadcast')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or the broadcast is no draft')
  @Example<BroadcastDeleted>({ object: 'broadcast', id: SAMPLE_ID, deleted: true })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<BroadcastDeleted> {
    const broadcastId = checkId(id);
    await this.verbs.broadcasts.remove(callerOf(request).tenantId, broadcastId);
    return { object: 'broadcast', id: broadcastId, deleted: true };
  }

  /**
   * Sends a draft, now or at `scheduled_at`, to every contact of its segment who wants it: who has not unsubscribed, has
   * not opted out of its topic and is not suppressed.
   */
  @Post('{id}/send')
  @OperationId('sendBroadcast')
  @SuccessResponse(200, 'On its way, or planned')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(
    422,
    'The id is not a UUID, the broadcast is no draft, or something is missing or wrong',
  )
  @Example<BroadcastChanged>({ object: 'broadcast', id: SAMPLE_ID })
  async send(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body?: SendBroadcastRequest,
  ): Promise<BroadcastChanged> {
    const broadcastId = checkId(id);
    const scheduledAt = body?.scheduled_at ?? null;
    await this.verbs.broadcasts.send(callerOf(request), broadcastId, scheduledAt);
    return { object: 'broadcast', id: broadcastId };
  }

  /**
   * Cancels a broadcast. A planned one is a draft again. One that is being sent goes to nobody else; emails that are
   * queued and have not been tried yet are canceled, too.
   */
  @Post('{id}/cancel')
  @OperationId('cancelBroadcast')
  @SuccessResponse(200, 'Canceled')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or there is nothing to cancel')
  @Example<BroadcastChanged>({ object: 'broadcast', id: SAMPLE_ID })
  async cancel(@Request() request: express.Request, @Path() id: string): Promise<BroadcastChanged> {
    const broadcastId = checkId(id);
    await this.verbs.broadcasts.cancel(callerOf(request).tenantId, broadcastId);
    return { object: 'broadcast', id: broadcastId };
  }

  /** Makes a draft that says the same. */
  @Post('{id}/duplicate')
  @OperationId('duplicateBroadcast')
  @SuccessResponse(200, 'Made')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<BroadcastChanged>({ object: 'broadcast', id: '019e6f0c-0d4b-7000-a2c7-5f8e3b9d1046' })
  async duplicate(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<BroadcastChanged> {
    const { tenantId } = callerOf(request);
    const copyId = await this.verbs.broadcasts.duplicate(tenantId, checkId(id));
    return { object: 'broadcast', id: copyId };
  }

  /**
   * Lists recipients by what became of their email.
   * @param type sent, delivered, opened, clicked, bounced, complained, unsubscribed or suppressed.
   * @param email Only this address.
   * @param bounce_type permanent, transient or undetermined; with `type=bounced`.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/recipients')
  @OperationId('listBroadcastRecipients')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad type, filter, limit or cursor')
  @Example<BroadcastRecipientList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: 'AZ5u-4KZcACNOhhPO3hVkg',
        contact_id: '019e6efb-8299-7000-8d3a-184f3b785592',
        email: 'grace@customer.example',
        count: 2,
        clicked_links: [{ url: 'https://acme.example/may', clicks: 2 }],
      },
    ],
  })
  async recipients(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() type?: string,
    @Query() email?: string,
    @Query() bounce_type?: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<BroadcastRecipientList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = { limit, after, before };
    const { items, hasMore } = await this.verbs.broadcasts.listRecipients(tenantId, checkId(id), {
      type,
      email,
      bounceType: bounce_type,
      page,
    });
    return { object: 'list', data: items.map(presentRecipient), has_more: hasMore };
  }

  /**
   * Lists the links that recipients clicked, the latest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/clicked-links')
  @OperationId('listBroadcastClickedLinks')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such broadcast')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit or cursor')
  @Example<BroadcastClickedLinkList>({
    object: 'list',
    has_more: false,
    data: [
      {
        id: 'AZ5u-8SLcACy0RhPO3hVkg',
        url: 'https://acme.example/may',
        clicks: 31,
        unique_clicks: 24,
      },
    ],
  })
  async clickedLinks(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<BroadcastClickedLinkList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = { limit, after, before };
    const { items, hasMore } = await this.verbs.broadcasts.listClickedLinks(
      tenantId,
      checkId(id),
      page,
    );
    return {
      object: 'list',
      data: items.map(({ id: cursor, url, clicks, uniqueClicks }) => ({
        id: cursor,
        url,
        clicks,
        unique_clicks: uniqueClicks,
      })),
      has_more: hasMore,
    };
  }
}

const presentItem = (broadcast: BroadcastSummary): BroadcastListItem => ({
  id: broadcast.id,
  name: broadcast.name,
  segment_id: broadcast.segmentId,
  audience_id: broadcast.segmentId,
  topic_id: broadcast.topicId,
  status: broadcast.status,
  created_at: broadcast.createdAt,
  scheduled_at: broadcast.scheduledAt,
  sent_at: broadcast.sentAt,
});

const present = (broadcast: BroadcastRecord): Broadcast => ({
  object: 'broadcast',
  ...presentItem(broadcast),
  from: broadcast.fromGiven,
  subject: broadcast.subject,
  reply_to: broadcast.replyToGiven.length === 0 ? null : [...broadcast.replyToGiven],
  preview_text: broadcast.previewText,
  html: broadcast.html,
  text: broadcast.text,
  failure: broadcast.failure,
});

const presentRecipient = (recipient: RecipientRecord): BroadcastRecipient => ({
  id: recipient.id,
  contact_id: recipient.contactId,
  email: recipient.email,
  ...(recipient.count === null ? {} : { count: recipient.count }),
  ...(recipient.clickedLinks === null
    ? {}
    : { clicked_links: recipient.clickedLinks.map(({ url, clicks }) => ({ url, clicks })) }),
  ...(recipient.bounceType === null ? {} : { bounce_type: recipient.bounceType }),
});
