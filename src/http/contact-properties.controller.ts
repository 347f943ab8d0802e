// Contact properties: what a tenant may know of each contact beyond its names.
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
  CreatePropertyRequest,
  PropertyRecord,
  UpdatePropertyRequest,
} from '../audience/properties.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** What a contact may have a value of. */
export interface ContactProperty {
  object: 'contact_property';
  id: string;
  key: string;
  type: 'string' | 'number' | 'boolean';
  /** For contacts without a value. */
  fallback_value: string | number | boolean | null;
  created_at: Date;
}

export interface ContactPropertyList {
  object: 'list';
  data: ContactProperty[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The property that was changed. */
export interface ContactPropertyChanged {
  object: 'contact_property';
  id: string;
}

export interface ContactPropertyDeleted {
  object: 'contact_property';
  id: string;
  deleted: boolean;
}

@Route('contact-properties')
@Tags('Contact properties')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class ContactPropertiesController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates a property that contacts can have a value of. All these paths also begin with `/api/properties`. */
  @Post()
  @OperationId('createContactProperty')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or the key is taken')
  @Example<ContactProperty>({
    object: 'contact_property',
    id: '019e6f0a-5a1c-7003-a0b4-1d9e707f3e2b',
    key: 'company',
    type: 'string',
    fallback_value: 'your company',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreatePropertyRequest,
  ): Promise<ContactProperty> {
    const { tenantId } = callerOf(request);
    const id = await this.verbs.contactProperties.create(tenantId, body);
    this.setStatus(201);
    return present(await this.verbs.contactProperties.find(tenantId, id));
  }

  /**
   * Lists contact properties, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listContactProperties')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  @Example<ContactPropertyList>({
    object: 'list',
    data: [
      {
        object: 'contact_property',
        id: '019e6f0a-5a1c-7003-a0b4-1d9e707f3e2b',
        key: 'company',
        type: 'string',
        fallback_value: 'your company',
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
  ): Promise<ContactPropertyList> {
    checkLimitText(request.query['limit']);
    const { tenantId } = callerOf(request);
    const page = await this.verbs.contactProperties.list(tenantId, { limit, after, before });
    return { object: 'list', data: page.items.map(present), has_more: page.hasMore };
  }

  /** Retrieves a contact property. */
  @Get('{id}')
  @OperationId('getContactProperty')
  @SuccessResponse(200, 'The property')
  @Response<ErrorEnvelope>(404, 'No such property')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ContactProperty>({
    object: 'contact_property',
    id: '019e6f0a-5a1c-7003-a0b4-1d9e707f3e2b',
    key: 'company',
    type: 'string',
    fallback_value: 'your company',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<ContactProperty> {
    const { tenantId } = callerOf(request);
    return present(await this.verbs.contactProperties.find(tenantId, checkId(id)));
  }

  /** Changes the fallback; key and type never change. */
  @Patch('{id}')
  @OperationId('updateContactProperty')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such property')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<ContactPropertyChanged>({
    object: 'contact_property',
    id: '019e6f0a-5a1c-7003-a0b4-1d9e707f3e2b',
  })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdatePropertyRequest,
  ): Promise<ContactPropertyChanged> {
    const propertyId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.contactProperties.update(tenantId, propertyId, body))) throw notFound();
    return { object: 'contact_property', id: propertyId };
  }

  /** Deletes a property, with the values that contacts have of it. */
  @Delete('{id}')
  @OperationId('deleteContactProperty')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such property')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<ContactPropertyDeleted>({
    object: 'contact_property',
    id: '019e6f0a-5a1c-7003-a0b4-1d9e707f3e2b',
    deleted: true,
  })
  async remove(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<ContactPropertyDeleted> {
    const propertyId = checkId(id);
    const { tenantId } = callerOf(request);
    if (!(await this.verbs.contactProperties.remove(tenantId, propertyId))) throw notFound();
    return { object: 'contact_property', id: propertyId, deleted: true };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Contact property not found');

function present(property: PropertyRecord | null): ContactProperty {
  if (property === null) throw notFound();
  return {
    object: 'contact_property',
    id: property.id,
    key: property.key,
    type: property.type,
    fallback_value: property.fallbackValue,
    created_at: property.createdAt,
  };
}
