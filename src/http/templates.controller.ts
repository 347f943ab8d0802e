// Templates: mail written ahead, found by id or alias.
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
import type { CreateTemplateRequest, UpdateTemplateRequest } from '../templates/content.ts';
import type { TemplateRecord } from '../templates/templates.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** One that is filled in at the time of sending. */
export interface TemplateVariable {
  /** Stays the same for a key. */
  id: string;
  key: string;
  /** For people; the key where none was given. */
  name: string;
  type: 'string' | 'number' | 'boolean' | 'object' | 'list';
  /** Whether an email must bring a value. */
  required: boolean;
  /** Of the variable's type; null: none. */
  fallback_value: unknown;
  created_at: Date;
  updated_at: Date;
}

/** A template with its newest content. */
export interface Template {
  object: 'template';
  id: string;
  name: string;
  alias: string | null;
  status: 'draft' | 'published';
  from: string | null;
  subject: string | null;
  /** Empty when answers go to the author. */
  reply_to: string[];
  preview_text: string | null;
  html: string;
  text: string | null;
  variables: TemplateVariable[];
  current_version_id: string;
  /** Null for a draft. */
  published_at: Date | null;
  /** Whether this content differs from what is sent; always so for a draft. */
  has_unpublished_versions: boolean;
  created_at: Date;
  updated_at: Date;
}

export interface TemplateList {
  object: 'list';
  data: Template[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The template that was made or changed. */
export interface TemplateChanged {
  object: 'template';
  id: string;
}

export interface TemplateDeleted {
  object: 'template';
  id: string;
  deleted: boolean;
}

@Route('templates')
@Tags('Templates')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class TemplatesController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates a draft. It can be sent once it is published. */
  @Post()
  @OperationId('createTemplate')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(413, 'The body is too large')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong, or the alias is taken')
  @Example<TemplateChanged>({ object: 'template', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateTemplateRequest,
  ): Promise<TemplateChanged> {
    const id = await this.verbs.templates.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return { object: 'template', id };
  }

  /**
   * Lists templates, newest first. A page of very large templates may end before the limit.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listTemplates')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<TemplateList> {
    checkLimitText(request.query['limit']);
    const page = { limit, after, before };
    const { items, hasMore } = await this.verbs.templates.list(callerOf(request).tenantId, page);
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /**
   * Retrieves a template with its newest content, published or not.
   * @param id The id or the alias.
   */
  @Get('{id}')
  @OperationId('getTemplate')
  @SuccessResponse(200, 'The template')
  @Response<ErrorEnvelope>(404, 'No such template')
  async get(@Request() request: express.Request, @Path() id: string): Promise<Template> {
    return present(await this.verbs.templates.find(callerOf(request).tenantId, id));
  }

  /**
   * Changes what the body names. What is published goes on being sent until the next publication.
   * @param id The id or the alias.
   */
  @Patch('{id}')
  @OperationId('updateTemplate')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such template')
  @Response<ErrorEnvelope>(413, 'The body is too large')
  @Response<ErrorEnvelope>(422, 'A field is wrong, or the alias is taken')
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateTemplateRequest,
  ): Promise<TemplateChanged> {
    const changed = await this.verbs.templates.update(callerOf(request).tenantId, id, body);
    return { object: 'template', id: changed };
  }

  /**
   * Deletes a template for good. Emails that were accepted with it are sent.
   * @param id The id or the alias.
   */
  @Delete('{id}')
  @OperationId('deleteTemplate')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such template')
  async remove(@Request() request: express.Request, @Path() id: string): Promise<TemplateDeleted> {
    const removed = await this.verbs.templates.remove(callerOf(request).tenantId, id);
    return { object: 'template', id: removed, deleted: true };
  }

  /**
   * Makes the newest content the one that is sent.
   * @param id The id or the alias.
   */
  @Post('{id}/publish')
  @OperationId('publishTemplate')
  @SuccessResponse(200, 'Published')
  @Response<ErrorEnvelope>(404, 'No such template')
  @Response<ErrorEnvelope>(422, 'The template has no html')
  async publish(@Request() request: express.Request, @Path() id: string): Promise<TemplateChanged> {
    const published = await this.verbs.templates.publish(callerOf(request).tenantId, id);
    return { object: 'template', id: published };
  }

  /**
   * Makes a draft with the newest content of another template, without its alias.
   * @param id The id or the alias of the other template.
   */
  @Post('{id}/duplicate')
  @OperationId('duplicateTemplate')
  @SuccessResponse(200, 'Duplicated')
  @Response<ErrorEnvelope>(404, 'No such template')
  async duplicate(
    @Request() request: express.Request,
    @Path() id: string,
  ): Promise<TemplateChanged> {
    const copy = await this.verbs.templates.duplicate(callerOf(request).tenantId, id);
    return { object: 'template', id: copy };
  }
}

function present(template: TemplateRecord): Template {
  const { content } = template;
  return {
    object: 'template',
    id: template.id,
    name: template.name,
    alias: template.alias,
    status: template.status,
    from: content.fromGiven,
    subject: content.subject,
    reply_to: [...content.replyToGiven],
    preview_text: content.previewText,
    html: content.html,
    text: content.text,
    variables: content.variables.map((variable) => ({
      id: variable.id,
      key: variable.key,
      name: variable.name ?? variable.key,
      type: variable.type,
      required: variable.fallback === null && !variable.isOptional,
      fallback_value: variable.fallback,
      created_at: new Date(variable.createdAt),
      updated_at: new Date(variable.updatedAt),
    })),
    current_version_id: template.currentVersionId,
    published_at: template.publishedAt,
    has_unpublished_versions: template.publishedVersionId !== template.currentVersionId,
    created_at: template.createdAt,
    updated_at: template.updatedAt,
  };
}
