// Segments: named sets of contacts that a broadcast can be sent to.
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
  CreateSegmentRequest,
  SegmentRecord,
  UpdateSegmentRequest,
} from '../audience/segments.ts';
import { callerOf } from './authenticate.ts';
import { presentContacts, type ContactList } from './contact-answer.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A named set of contacts. */
export interface Segment {
  object: 'segment';
  id: string;
  name: string;
  created_at: Date;
}

export interface SegmentList {
  object: 'list';
  data: Segment[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The segment that was changed. */
export interface SegmentChanged {
  object: 'segment';
  id: string;
}

export interface SegmentDeleted {
  object: 'segment';
  id: string;
  deleted: boolean;
}

@Route('segments')
@Tags('Segments')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class SegmentsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates a segment. */
  @Post()
  @OperationId('createSegment')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong')
  @Example<Segment>({
    object: 'segment',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    name: 'Customers',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateSegmentRequest,
  ): Promise<Segment> {
    const { tenantId } = callerOf(request);
    const id = await this.verbs.segments.create(tenantId, body);
    this.setStatus(201);
    return present(await this.verbs.segments.find(tenantId, id));
  }

  /**
   * Lists segments, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listSegments')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<SegmentList>({
    object: 'list',
    data: [
      {
        object: 'segment',
        id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
        name: 'Customers',
        created_at: new Date('2026-05-06T12:00:00.000Z'),
      },
    ],
    has_more: false,
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<SegmentList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = await this.verbs.segments.list(tenantId, { limit, after, before });
    return { object: 'list', data: page.items.map(present), has_more: page.hasMore };
  }

  /** Retrieves a segment. */
  @Get('{id}')
  @OperationId('getSegment')
  @SuccessResponse(200, 'The segment')
  @Response<ErrorEnvelope>(404, 'No such segment')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<Segment>({
    object: 'segment',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    name: 'Customers',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Segment> {
    return present(await this.verbs.segments.find(callerOf(request).tenantId, checkId(id)));
  }

  /** Renames a segment. */
  @Patch('{id}')
  @OperationId('updateSegment')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such segment')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<SegmentChanged>({ object: 'segment', id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateSegmentRequest,
  ): Promise<SegmentChanged> {
    const segmentId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.segments.update(tenantId, segmentId, body))) throw notFound();
    return { object: 'segment', id: segmentId };
  }

  /** Deletes a segment. Its contacts stay, in no segment or in others. */
  @Delete('{id}')
  @OperationId('deleteSegment')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such segment')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<SegmentDeleted>({
    object: 'segment',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<SegmentDeleted> {
    const segmentId = checkId(id);
    if (!(await this.verbs.segments.remove(callerOf(request).tenantId, segmentId))) {
      throw notFound();
    }
    return { object: 'segment', id: segmentId, deleted: true };
  }

  /**
   * Lists the contacts of a segment, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/contacts')
  @OperationId('listSegmentContacts')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such segment')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a bad limit or cursor')
  @Example<ContactList>({
    object: 'list',
    data: [
      {
        object: 'contact',
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        email: 'ada@example.org',
        first_name: 'Ada',
        last_name: 'Lovelace',
        unsubscribed: false,
        properties: { company: 'Analytical Engines', seats: 7 },
        created_at: new Date('2026-05-06T12:00:00.000Z'),
      },
    ],
    has_more: false,
  })
  async listContacts(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<ContactList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = { limit, after, before };
    return presentContacts(await this.verbs.contacts.list(tenantId, page, checkId(id)));
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Segment not found');

function present(segment: SegmentRecord | null): Segment {
  if (segment === null) throw notFound();
  const { id, name, createdAt } = segment;
  return { object: 'segment', id, name, created_at: createdAt };
}
