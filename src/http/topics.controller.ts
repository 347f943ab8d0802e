// Topics: subjects that contacts opt in to or out of.
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
import type { CreateTopicRequest, TopicRecord, UpdateTopicRequest } from '../audience/topics.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A subject that contacts opt in to or out of. */
export interface Topic {
  object: 'topic';
  id: string;
  name: string;
  description: string | null;
  /** What holds for a contact that has not chosen. */
  default_subscription: 'opt_in' | 'opt_out';
  visibility: 'public' | 'private';
  created_at: Date;
}

export interface TopicList {
  object: 'list';
  data: Topic[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The topic that was made or changed. */
export interface TopicChanged {
  object: 'topic';
  id: string;
}

export interface TopicDeleted {
  object: 'topic';
  id: string;
  deleted: boolean;
}

@Route('topics')
@Tags('Topics')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away; nothing was changed')
export class TopicsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Creates a topic. */
  @Post()
  @OperationId('createTopic')
  @SuccessResponse(201, 'Created')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(422, 'A field is missing or wrong')
  @Example<TopicChanged>({ object: 'topic', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateTopicRequest,
  ): Promise<TopicChanged> {
    const id = await this.verbs.topics.create(callerOf(request).tenantId, body);
    this.setStatus(201);
    return { object: 'topic', id };
  }

  /**
   * Lists topics, newest first.
   * @param limit 1 to 100; absent: 100.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   * @param search A part of the name or the description, in any case; at most 200 characters.
   */
  @Get()
  @OperationId('listTopics')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit, cursor or search')
  @Example<TopicList>({
    object: 'list',
    data: [
      {
        object: 'topic',
        id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
        name: 'Product news',
        description: 'What is new, once a month',
        default_subscription: 'opt_in',
        visibility: 'public',
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
    @Query() search?: string,
  ): Promise<TopicList> {
    checkLimitText(request.query['limit']);
    const { items, hasMore } = await this.verbs.topics.list(
      callerOf(request).tenantId,
      { limit, after, before },
      search ?? null,
    );
    return { object: 'list', data: items.map(present), has_more: hasMore };
  }

  /** Retrieves a topic. */
  @Get('{id}')
  @OperationId('getTopic')
  @SuccessResponse(200, 'The topic')
  @Response<ErrorEnvelope>(404, 'No such topic')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<Topic>({
    object: 'topic',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'Product news',
    description: 'What is new, once a month',
    default_subscription: 'opt_in',
    visibility: 'public',
    created_at: new Date('2026-05-06T12:00:00.000Z'),
  })
  async get(@Request() request: express.Request, @Path() id: string): Promise<Topic> {
    const topic = await this.verbs.topics.find(callerOf(request).tenantId, checkId(id));
    if (topic === null) throw notFound();
    return present(topic);
  }

  /** Changes what the body names. */
  @Patch('{id}')
  @OperationId('updateTopic')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such topic')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID, or a field is wrong')
  @Example<TopicChanged>({ object: 'topic', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateTopicRequest,
  ): Promise<TopicChanged> {
    const topicId = checkId(id);
    const isThere = await this.verbs.topics.update(callerOf(request).tenantId, topicId, body);
    if (!isThere) throw notFound();
    return { object: 'topic', id: topicId };
  }

  /** Deletes a topic for good, with what contacts chose about it. */
  @Delete('{id}')
  @OperationId('deleteTopic')
  @SuccessResponse(200, 'Deleted')
  @Response<ErrorEnvelope>(404, 'No such topic')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<TopicDeleted>({
    object: 'topic',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<TopicDeleted> {
    const topicId = checkId(id);
    if (!(await this.verbs.topics.remove(callerOf(request).tenantId, topicId))) throw notFound();
    return { object: 'topic', id: topicId, deleted: true };
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Topic not found');

const present = (topic: TopicRecord): Topic => ({
  object: 'topic',
  id: topic.id,
  name: topic.name,
  description: topic.description,
  default_subscription: topic.defaultSubscription,
  visibility: topic.visibility,
  created_at: topic.createdAt,
});
