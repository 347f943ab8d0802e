// Custom events: their definitions, and sending them.
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
import { checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { SendEventRequest } from '../audience/automation-start.ts';
import type { CreateEventRequest, EventRecord, UpdateEventRequest } from '../audience/events.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A custom event: what a tenant's own program can say has happened to a contact. */
export interface CustomEvent {
  object: 'event';
  id: string;
  name: string;
  /** The types of its payload's fields; null: anything. */
  schema: { [field: string]: 'string' | 'number' | 'boolean' | 'date' } | null;
  created_at: Date;
  updated_at: Date;
}

export interface CustomEventList {
  object: 'list';
  data: CustomEvent[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The event that was made or changed. */
export interface CustomEventChanged {
  object: 'event';
  id: string;
}

export interface CustomEventDeleted {
  object: 'event';
  id: string;
  deleted: boolean;
}

export interface CustomEventSent {
  object: 'event';
  /** Its name. */
  event: string;
}

@Route('events')
@Tags('Events')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class EventsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Defines an event, so that what is sent under its name has to fit a schema. */
  @Post()
  @OperationId('createEvent')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or the name is taken')
  @Example<CustomEventChanged>({ object: 'event', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateEventRequest,
  ): Promise<CustomEventChanged> {
    const id = await this.verbs.events.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return { object: 'event', id };
  }

  /**
   * Says that an event has happened to a contact: starts the automations that it triggers, and lets those go on that wait
   * for it. An event needs no definition.
   */
  @Post('send')
  @OperationId('sendEvent')
  @SuccessResponse(202, 'Stored; what it leads to begins now')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(
    422,
    "A field is missing or wrong, or the payload does not fit the event's schema",
  )
  @Example<CustomEventSent>({ object: 'event', event: 'user.joined' })
  async send(
    @Request() request: express.Request,
    @Body() body: SendEventRequest,
  ): Promise<CustomEventSent> {
    await this.verbs.events.send(callerOf(request).tenantId, body);
    this.setStatus(202);
    return { object: 'event', event: body.event };
  }

  /**
   * Lists event definitions, newest first.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listEvents')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<CustomEventList>({
    object: 'list',
    data: [
      {
        object: 'event',
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        name: 'user.joined',
        schema: { plan: 'string', seats: 'number' },
        created_at: new Date('2026-05-28T14:03:11.210Z'),
        updated_at: new Date('2026-05-28T14:03:11.210Z'),
      },
    ],
    has_more: false,
  })
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<CustomEventList> {
    checkLimitText(request.query['limit']);
    const page = { limit, after, before };
    const { items, hasMore } = await this.verbs.events.list(callerOf(request).tenantId, page);
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /**
   * Retrieves an event definition.
   * @param identifier Its id, or its exact name, percent-encoded. What looks like an id is first taken for one.
   */
  @Get('{identifier}')
  @OperationId('getEvent')
  @SuccessResponse(200, 'The event')
  @Response<ErrorEnvelope>(404, 'No such event')
  @Example<CustomEvent>({
    object: 'event',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'user.joined',
    schema: { plan: 'string', seats: 'number' },
    created_at: new Date('2026-05-28T14:03:11.210Z'),
    updated_at: new Date('2026-05-28T14:03:11.210Z'),
  })
  async get(@Request() request: express.Request, @Path() identifier: string): Promise<CustomEvent> {
    const event = await this.verbs.events.find(callerOf(request).tenantId, identifier);
    if (event === null) throw notFound();
    return present(event);
  }

  /**
   * Replaces the schema of an event; null lets any payload through.
   * @param identifier Its id, or its exact name, percent-encoded.
   */
  @Patch('{identifier}')
  @OperationId('updateEvent')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such event')
  @Response<ErrorEnvelope>(422, 'The schema is missing or wrong')
  @Example<CustomEventChanged>({ object: 'event', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() identifier: string,
    @Body() body: UpdateEventRequest,
  ): Promise<CustomEventChanged> {
    const id = await this.verbs.events.update(callerOf(request).tenantId, identifier, body);
    if (id === null) throw notFound();
    return { object: 'event', id };
  }

  /**
   * Deletes an event definition. Automations that it triggers stay.
   * @param identifier Its id, or its exact name, percent-encoded.
   */
  @Delete('{identifier}')
  @OperationId('deleteEvent')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such event')
  @Example<CustomEventDeleted>({
    object: 'event',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(
    @Request() request: express.Request,
    @Path() identifier: string,
  ): Promise<CustomEventDeleted> {
    const id = await this.verbs.events.remove(callerOf(request).tenantId, identifier);
    if (id === null) throw notFound();
    return { object: 'event', id, deleted: true };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Event not found');

const present = (event: EventRecord): CustomEvent => ({
  object: 'event',
  id: event.id,
  name: event.name,
  schema: event.schema,
  created_at: event.createdAt,
  updated_at: event.updatedAt,
});
