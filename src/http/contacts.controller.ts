// Contacts: the people that a tenant writes to, the segments they are in and the topics they chose.
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
import type { CreateContactRequest, UpdateContactRequest } from '../audience/contacts.ts';
import type { TopicChoiceRequest } from '../audience/contact-topics.ts';
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

/** A segment that the contact is in. */
export interface SegmentOfContact {
  id: string;
  name: string;
  created_at: Date;
}

export interface SegmentOfContactList {
  object: 'list';
  data: SegmentOfContact[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The contact is in the segment. */
export interface ContactSegmentAdded {
  object: 'contact_segment';
  /** Of the segment. */
  id: string;
  contact_id: string;
  segment_id: string;
}

/** The contact is in the segment no more. */
export interface ContactSegmentRemoved extends ContactSegmentAdded {
  /** Of the segment. */
  audienceId: string;
  deleted: boolean;
}

/** A topic as it stands for this contact. */
export interface TopicOfContact {
  id: string;
  name: string;
  description: string | null;
  /** What the contact chose, else the default of the topic. */
  subscription: 'opt_in' | 'opt_out';
}

export interface TopicOfContactList {
  object: 'list';
  data: TopicOfContact[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** Choices about topics. */
export interface UpdateContactTopicsRequest {
  /** Up to 100; the others stay as they are. */
  topics: TopicChoiceRequest[];
}

export interface ContactTopicsChanged {
  object: 'contact_topics';
  /** Of the contact. */
  id: string;
  contact_id: string;
  topics: TopicChoiceRequest[];
}

@Route('contacts')
@Tags('Contacts')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class ContactsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Creates a contact. Where the address has one already, that one is changed by what is given, comes into the segments as
   * well, and is the answer.
   */
  @Post()
  @OperationId('createContact')
  @SuccessResponse(201, 'Created, or changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or there is no such segment or topic')
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
  async create(
    @Request() request: express.Request,
    @Body() body: CreateContactRequest,
  ): Promise<Contact> {
    const contact = await this.verbs.contacts.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return presentContact(contact);
  }

  /**
   * Lists contacts, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param segment_id Only those in this segment.
   */
  @Get()
  @OperationId('listContacts')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such segment')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or segment id')
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
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
    @Query() segment_id?: string,
  ): Promise<ContactList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.contacts.list(
      callerOf(request).tenantId,
      { limit, after, before },
      segment_id === undefined ? null : checkId(segment_id, 'segment_id'),
    );
    return presentContacts(page);
  }

  /**
   * Retrieves a contact. At `/contacts` each property comes with its type, at `/api/contacts` as its value.
   * @param id The id or the address.
   */
  @Get('{id}')
  @OperationId('getContact')
  @SuccessResponse(200, 'The contact')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Example<Contact>({
    object: 'contact',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    email: 'ada@example.org',
    first_name: 'Ada',
    last_name: 'Lovelace',
    unsubscribed: false,
    properties: {
      company: { type: 'string', value: 'Analytical Engines' },
      seats: { type: 'number', value: 7 },
    },
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Contact> {
    const contact = await this.verbs.contacts.find(callerOf(request).tenantId, id);
    return presentOne(request, contact);
  }

  /**
   * Changes what the body names.
   * @param id The id or the address.
   */
  @Patch('{id}')
  @OperationId('updateContact')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Response<ErrorEnvelope>(422, 'A field is wrong')
  @Example<ContactChanged>({ object: 'contact', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateContactRequest,
  ): Promise<ContactChanged> {
    const changed = await this.verbs.contacts.update(callerOf(request).tenantId, id, body);
    return { object: 'contact', id: changed };
  }

  /**
   * Deletes a contact for good, with its memberships and choices. Emails that were sent to it stay.
   * @param id The id or the address.
   */
  @Delete('{id}')
  @OperationId('deleteContact')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Example<ContactDeleted>({
    object: 'contact',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    contact: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<ContactDeleted> {
    const removed = await this.verbs.contacts.remove(callerOf(request).tenantId, id);
    return { object: 'contact', id: removed, contact: removed, deleted: true };
  }

  /**
   * Lists the segments that a contact is in, newest first.
   * @param id The id or the address.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/segments')
  @OperationId('listContactSegments')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<SegmentOfContactList>({
    object: 'list',
    data: [
      {
        id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
        name: 'Customers',
        created_at: new Date('2026-05-06T12:00:00.000Z'),
      },
    ],
    has_more: false,
  })
  async listSegments(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<SegmentOfContactList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = await this.verbs.contacts.listSegments(tenantId, id, { limit, after, before });
    return {
      object: 'list',
      data: page.items.map((one) => ({ id: one.id, name: one.name, created_at: one.createdAt })),
      has_more: page.hasMore,
    };
  }

  /**
   * Puts a contact into a segment; one that is in it stays.
   * @param id The id or the address.
   */
  @Post('{id}/segments/{segment_id}')
  @OperationId('addContactToSegment')
  @SuccessResponse(200, 'It is in the segment')
  @Response<ErrorEnvelope>(404, 'No such contact or segment')
  @Response<ErrorEnvelope>(422, 'The segment id is not a UUID')
  @Example<ContactSegmentAdded>({
    object: 'contact_segment',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    contact_id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    segment_id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
  })
  async addToSegment(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() segment_id: string,
  ): Promise<ContactSegmentAdded> {
    const segmentId = checkId(segment_id, 'segment_id');
    const { tenantId } = callerOf(request);
    const contactId = await this.verbs.contacts.addToSegment(tenantId, id, segmentId);
    return {
      object: 'contact_segment',
      id: segmentId,
      contact_id: contactId,
      segment_id: segmentId,
    };
  }

  /**
   * Takes a contact out of a segment.
   * @param id The id or the address.
   */
  @Delete('{id}/segments/{segment_id}')
  @OperationId('removeContactFromSegment')
  @SuccessResponse(200, 'It is in the segment no more')
  @Response<ErrorEnvelope>(404, 'No such contact or segment, or it is not in it')
  @Response<ErrorEnvelope>(422, 'The segment id is not a UUID')
  @Example<ContactSegmentRemoved>({
    object: 'contact_segment',
    id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    contact_id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    segment_id: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    audienceId: '019e6f0a-5a1c-7001-9c1d-7f3e2b6a4c10',
    deleted: true,
  })
  async removeFromSegment(
    @Request() request: express.Request,
    @Path() id: string,
    @Path() segment_id: string,
  ): Promise<ContactSegmentRemoved> {
    const segmentId = checkId(segment_id, 'segment_id');
    const { tenantId } = callerOf(request);
    const contactId = await this.verbs.contacts.removeFromSegment(tenantId, id, segmentId);
    return {
      object: 'contact_segment',
      id: segmentId,
      contact_id: contactId,
      segment_id: segmentId,
      audienceId: segmentId,
      deleted: true,
    };
  }

  /**
   * Lists all topics, newest first, as they stand for a contact.
   * @param id The id or the address.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get('{id}/topics')
  @OperationId('listContactTopics')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<TopicOfContactList>({
    object: 'list',
    data: [
      {
        id: '019e6f0a-5a1c-7002-8b2e-4c1d9e707f3e',
        name: 'Product news',
        description: 'What is new, once a month',
        subscription: 'opt_in',
      },
    ],
    has_more: false,
  })
  async listTopics(
    @Request() request: express.Request,
    @Path() id: string,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<TopicOfContactList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = await this.verbs.contacts.listTopics(tenantId, id, { limit, after, before });
    return { object: 'list', data: [...page.items], has_more: page.hasMore };
  }

  /**
   * Stores choices of a contact about topics; topics that are not named stay as they are. The body is an object with
   * `topics`, or that array itself.
   * @param id The id or the address.
   */
  @Patch('{id}/topics')
  @OperationId('updateContactTopics')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such contact')
  @Response<ErrorEnvelope>(422, 'A choice is wrong, or there is no such topic')
  @Example<ContactTopicsChanged>({
    object: 'contact_topics',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    contact_id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    topics: [{ id: '019e6f0a-5a1c-7002-8b2e-4c1d9e707f3e', subscription: 'opt_out' }],
  })
  async updateTopics(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateContactTopicsRequest | TopicChoiceRequest[],
  ): Promise<ContactTopicsChanged> {
    const topics = Array.isArray(body) ? body : body.topics;
    const contactId = await this.verbs.contacts.setTopics(callerOf(request).tenantId, id, topics);
    return { object: 'contact_topics', id: contactId, contact_id: contactId, topics };
  }
}
