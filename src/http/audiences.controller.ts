// Audiences: what segments were called before. The same rows by the older paths, for clients that still use them.
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
import type { CreateContactRequest, UpdateContactRequest } from '../audience/contacts.ts';
import type {
  CreateSegmentRequest,
  SegmentRecord,
  UpdateSegmentRequest,
} from '../audience/segments.ts';
import { callerOf } from './authenticate.ts';
import {
  presentContact,
  presentContacts,
  presentOne,
  type Contact,
  type ContactChanged,
  type ContactDeleted,
  type ContactList,
} from './contact-answer.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A named set of contacts. */
export interface Audience {
  object: 'audience';
  id: string;
  name: string;
  created_at: Date;
}

export interface AudienceList {
  object: 'list';
  data: Audience[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The audience that was changed. */
export interface AudienceChanged {
  object: 'audience';
  id: string;
}

export interface AudienceDeleted {
  object: 'audience';
  id: string;
  deleted: boolean;
}

@Route('audiences')
@Tags('Audiences')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class AudiencesController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates an audience. An audience is a segment by its older name. */
  @Post()
  @OperationId('createAudience')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong')
  @Example<Audience>({
    object: 'audience',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    name: 'Customers',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateSegmentRequest,
  ): Promise<Audience> {
    const { tenantId } = callerOf(request);
    const id = await this.verbs.segments.create(tenantId, body);
    this.setStatus(201);
    return present(await this.verbs.segments.find(tenantId, id));
  }

  /**
   * Lists audiences, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listAudiences')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<AudienceList>({
    object: 'list',
    data: [
      {
        object: 'audience',
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
  ): Promise<AudienceList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = await this.verbs.segments.list(tenantId, { limit, after, before });
    return { object: 'list', data: page.items.map(present), has_more: page.hasMore };
  }

  /** Retrieves an audience. */
  @Get('{id}')
  @OperationId('getAudience')
  @SuccessResponse(200, 'The audience')
  @Response<ErrorEnvelope>(404, 'No such audience')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<Audience>({
    object: 'audience',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    name: 'Customers',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Audience> {
    return present(await this.verbs.segments.find(callerOf(request).tenantId, checkId(id)));
  }

  /** Renames an audience. */
  @Patch('{id}')
  @OperationId('updateAudience')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such audience')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<AudienceChanged>({ object: 'audience', id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateSegmentRequest,
  ): Promise<AudienceChanged> {
    const segmentId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.segments.update(tenantId, segmentId, body))) throw notFound();
    return { object: 'audience', id: segmentId };
  }

  /** Deletes an audience. Its contacts stay, in no segment or in others. */
  @Delete('{id}')
  @OperationId('deleteAudience')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such audience')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<AudienceDeleted>({
    object: 'audience',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<AudienceDeleted> {
    const segmentId = checkId(id);
    if (!(await this.verbs.segments.remove(callerOf(request).tenantId, segmentId))) {
      throw notFound();
    }
    return { object: 'audience', id: segmentId, deleted: true };
  }

  /**
   * Lists the contacts of an audience, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/contacts')
  @OperationId('listAudienceContacts')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such audience')
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

  /** Creates a contact in an audience; where the address has one already, that one is changed and comes into it. */
  @Post('{id}/contacts')
  @OperationId('createAudienceContact')
  @SuccessResponse(201, 'Created, or changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such audience')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is missing or wrong')
  @Example<Contact>({
    object: 'contact',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    email: 'ada@example.org',
    first_name: 'Ada',
    last_name: 'Lovelace',
    unsubscribed: false,
    properties: { company: 'Analytical Engines', seats: 7 },
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async createContact(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: CreateContactRequest,
  ): Promise<Contact> {
    const { tenantId } = callerOf(request);
    const contact = await this.verbs.contacts.create(tenantId, body, checkId(id));
    this.setStatus(201);
    return presentContact(contact);
  }

  /**
   * Retrieves a contact of an audience.
   * @param contact_id The id or the address.
   */
  @Get('{id}/contacts/{contact_id}')
  @OperationId('getAudienceContact')
  @SuccessResponse(200, 'The contact')
  @Response<ErrorEnvelope>(404, 'No such contact in this audience')
  @Response<ErrorEnvelope>(422, 'The id of the audience is not a UUID')
  @Example<Contact>({
    object: 'contact',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    email: 'ada@example.org',
    first_name: 'Ada',
    last_name: 'Lovelace',
    unsubscribed: false,
    properties: { company: { type: 'string', value: 'Analytical Engines' } },
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async getContact(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() contact_id: string,
  ): Promise<Contact> {
    const { tenantId } = callerOf(request);
    const contact = await this.verbs.contacts.find(tenantId, contact_id, checkId(id));
    return presentOne(request, contact);
  }

  /**
   * Changes a contact of an audience, in all others too.
   * @param contact_id The id or the address.
   */
  @Patch('{id}/contacts/{contact_id}')
  @OperationId('updateAudienceContact')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such contact in this audience')
  @Response<ErrorEnvelope>(422, 'The id of the audience is not a UUID, or a field is wrong')
  @Example<ContactChanged>({ object: 'contact', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async updateContact(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() contact_id: string,
    @Body() body: UpdateContactRequest,
  ): Promise<ContactChanged> {
    const { tenantId } = callerOf(request);
    const changed = await this.verbs.contacts.update(tenantId, contact_id, body, checkId(id));
    return { object: 'contact', id: changed };
  }

  /**
   * Takes a contact out of an audience, and deletes it for good when it is in no other one.
   * @param contact_id The id or the address.
   */
  @Delete('{id}/contacts/{contact_id}')
  @OperationId('deleteAudienceContact')
  @SuccessResponse(200, 'It is in the audience no more')
  @Response<ErrorEnvelope>(404, 'No such contact in this audience')
  @Response<ErrorEnvelope>(422, 'The id of the audience is not a UUID')
  @Example<ContactDeleted>({
    object: 'contact',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    contact: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async removeContact(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() contact_id: string,
  ): Promise<ContactDeleted> {
    const { tenantId } = callerOf(request);
    const removed = await this.verbs.contacts.remove(tenantId, contact_id, checkId(id));
    return { object: 'contact', id: removed, contact: removed, deleted: true };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Audience not found');

function present(segment: SegmentRecord | null): Audience {
  if (segment === null) throw notFound();
  const { id, name, createdAt } = segment;
  return { object: 'audience', id, name, created_at: createdAt };
}
