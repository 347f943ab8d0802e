// Contacts: the people that a tenant writes to. Reading them, and what the API asks of them; contact-changes.ts writes.
import type { Pool, PoolClient } from 'pg';
import { checkPage, PAGE_MAX, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import { parseMailbox } from '../mail/address.ts';
import type { PropertyValue } from '../store/contact.ts';
import { isUuid } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import {
  addToSegment,
  changeContact,
  removeContact,
  removeFromSegment,
  setSubscriptions,
  upsertContact,
} from './contact-changes.ts';
import { addressOf, type ContactFields } from './contact-fields.ts';
import {
  checkChoices,
  listContactTopics,
  type ContactTopicPage,
  type TopicChoiceRequest,
} from './contact-topics.ts';
import { propertiesByKey } from './properties.ts';
import { segmentsAmong, type SegmentPage, type SegmentRecord } from './segments.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

export interface ContactRecord {
  readonly id: string;
  /** As it was given. */
  readonly email: string;
  /** As mail/address.ts normalizes it; unique in the tenant. */
  readonly address: string;
  readonly firstName: string | null;
  readonly lastName: string | null;
  /** Wants no broadcast at all. */
  readonly unsubscribed: boolean;
  /** By key, without fallbacks. */
  readonly properties: Readonly<Record<string, PropertyValue>>;
  readonly createdAt: Date;
  readonly updatedAt: Date;
}

export interface ContactPage {
  readonly items: readonly ContactRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A segment by its id. */
export interface SegmentReference {
  id: string;
}

/** What a contact can be given: what is absent stays, null removes. */
export interface UpdateContactRequest {
  /** One line of at most 255 characters. */
  first_name?: string | null;
  /** One line of at most 255 characters. */
  last_name?: string | null;
  /** Whether it wants no broadcast at all. */
  unsubscribed?: boolean;
  /**
   * Values by key: strings of at most 2,000 characters, numbers, true or false, of the type of the contact property with
   * this key. A key without a property makes one of the value's type; null removes the value.
   */
  properties?: { [key: string]: unknown };
}

/** A new contact; the changes of the one that is there where the address has one. */
export interface CreateContactRequest extends UpdateContactRequest {
  /** One address without a name. */
  email: string;
  /** Up to 100 segments that it comes into as well, by id. */
  segments?: (string | SegmentReference)[];
  /** Up to 100 choices about topics. */
  topics?: TopicChoiceRequest[];
}

/**
 * `who` is the id of a contact or its address in any spelling; `audienceId`, where it is given, a segment that the
 * contact has to be in to be found.
 */
export interface ContactVerbs {
  /** Makes or changes the contact of this address. Throws a Refusal for wrong fields and when there is no such audience. */
  create(
    tenantId: string,
    request: CreateContactRequest,
    audienceId?: string,
  ): Promise<ContactRecord>;
  /** Newest first, up to 100 where no limit is given. Throws a Refusal when there is no such segment. */
  list(tenantId: string, page: PageRequest, segmentId: string | null): Promise<ContactPage>;
  find(tenantId: string, who: string, audienceId?: string): Promise<ContactRecord>;
  /** The id. */
  update(
    tenantId: string,
    who: string,
    request: UpdateContactRequest,
    audienceId?: string,
  ): Promise<string>;
  /**
   * The id of the removed contact. With `audienceId` it leaves this segment, and is removed when it is in no other: what
   * is left of it is in the other audiences of the caller.
   */
  remove(tenantId: string, who: string, audienceId?: string): Promise<string>;
  listSegments(tenantId: string, who: string, page: PageRequest): Promise<SegmentPage>;
  /** The id of the contact. Throws a Refusal when there is no such contact or segment. */
  addToSegment(tenantId: string, who: string, segmentId: string): Promise<string>;
  /** The same, and when the contact is not in it. */
  removeFromSegment(tenantId: string, who: string, segmentId: string): Promise<string>;
  listTopics(tenantId: string, who: string, page: PageRequest): Promise<ContactTopicPage>;
  /** The id of the contact. Throws a Refusal for topics that are not there. */
  setTopics(tenantId: string, who: string, choices: readonly TopicChoiceRequest[]): Promise<string>;
}

/** Of one request. */
const SEGMENTS_PER_REQUEST_MAX = 100;

const COLUMNS = `c.id, c.email, c.address, c.first_name as "firstName", c.last_name as "lastName",
  c.unsubscribed, ${propertiesByKey('c')} as properties, c.created_at as "createdAt",
  c.updated_at as "updatedAt"`;

/** By id, or by address in any spelling. Null for what is missing, foreign or neither of them. */
export async function findContact(
  db: Queryable,
  tenantId: string,
  idOrEmail: string,
): Promise<ContactRecord | null> {
  const byId = isUuid(idOrEmail);
  if (!byId && !parseMailbox(idOrEmail).ok) return null;
  const { rows } = await db.query<ContactRecord>({
    name: byId ? 'contact-by-id' : 'contact-by-address',
    text: `select ${COLUMNS} from contact c
      where c.tenant_id = $1 and ${byId ? 'c.id = $2::uuid' : 'c.address = $2'}`,
    values: [tenantId, byId ? idOrEmail : addressOf(idOrEmail)],
  });
  return rows[0] === undefined ? null : toRecord(rows[0]);
}

export function createContactVerbs(store: Store, now: () => Date): ContactVerbs {
  /** Refuses what is not there. */
  const find: ContactVerbs['find'] = async (tenantId, who, audienceId) => {
    const contact = await findContact(store.pool, tenantId, who);
    if (contact === null) throw notFound();
    if (audienceId !== undefined) {
      const segments = await segmentIdsOf(store.pool, tenantId, contact.id, audienceId);
      if (segments.length === 0) throw notFound();
    }
    return contact;
  };
  return {
    find,

    async create(tenantId, request, audienceId) {
      const given = checkSegments(request.segments ?? []);
      return store.transact(async (client) => {
        const there = await segmentsAmong(client, tenantId, [...given, audienceId ?? []].flat());
        if (audienceId !== undefined && !there.has(audienceId)) throw segmentNotFound();
        const issues = given.flatMap((id, index): Issue[] => {
          const message = `\`segments.${index}\` is not the id of a segment.`;
          return there.has(id) ? [] : [{ path: `segments.${index}`, message }];
        });
        if (issues.length > 0) throw refuseFields(issues);
        const topics = await checkChoices(client, tenantId, 'topics', request.topics ?? []);
        const { id } = await upsertContact(
          client,
          tenantId,
          { ...toFields(request), email: request.email, segmentIds: [...there], topics },
          { at: now(), tells: true },
        );
        return (await findContact(client, tenantId, id))!;
      });
    },

    async list(tenantId, page, segmentId) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      if (segmentId !== null) await findSegment(store.pool, tenantId, segmentId);
      const [from, id] =
        segmentId === null
          ? ['contact c where c.tenant_id = $1 and $2::uuid is null', 'c.id']
          : [
              `segment_contact m join contact c on c.tenant_id = m.tenant_id and c.id = m.contact_id
               where m.tenant_id = $1 and m.segment_id = $2`,
              'm.contact_id',
            ];
      const at = cursor.after ?? cursor.before;
      if (at !== null) {
        const text = `select 1 from ${from} and ${id} = $3`;
        const { rows } = await store.pool.query(text, [tenantId, segmentId, at]);
        if (rows.length === 0) refuseCursor(cursor);
      }
      const [beyond, order] = cursor.before === null ? ['<', 'desc'] : ['>', 'asc'];
      const { rows } = await store.pool.query<ContactRecord>(
        `select ${COLUMNS} from ${from} and ($3::uuid is null or ${id} ${beyond} $3)
         order by ${id} ${order} limit $4`,
        [tenantId, segmentId, at, cursor.limit + 1],
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async update(tenantId, who, request, audienceId) {
      const { id } = await find(tenantId, who, audienceId);
      const isThere = await store.transact((client) =>
        changeContact(client, tenantId, id, toFields(request), now()),
      );
      if (!isThere) throw notFound();
      return id;
    },

    async remove(tenantId, who, audienceId) {
      const { id } = await find(tenantId, who, audienceId);
      const isRemoved = await store.transact(async (client) => {
        const at = now();
        if (audienceId !== undefined) {
          const member = { contactId: id, segmentId: audienceId };
          if (!(await removeFromSegment(client, tenantId, member, at))) return false;
          if ((await segmentIdsOf(client, tenantId, id, null)).length > 0) return true;
        }
        return removeContact(client, tenantId, id, at);
      });
      if (!isRemoved) throw notFound();
      return id;
    },

    async listSegments(tenantId, who, page) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const { id } = await find(tenantId, who);
      const at = cursor.after ?? cursor.before;
      if (at !== null && (await segmentIdsOf(store.pool, tenantId, id, at)).length === 0) {
        refuseCursor(cursor);
      }
      const { rows } = await store.pool.query<SegmentRecord>(
        `select s.id, s.name, s.created_at as "createdAt"
         from segment_contact m join segment s on s.tenant_id = m.tenant_id and s.id = m.segment_id
         where m.tenant_id = $1 and m.contact_id = $2
           and ($3::uuid is null or s.id < $3) and ($4::uuid is null or s.id > $4)
         order by s.id ${cursor.before === null ? 'desc' : 'asc'} limit $5`,
        [tenantId, id, cursor.after, cursor.before, cursor.limit + 1],
      );
      const { items, hasMore } = toPage(rows, cursor);
      const dated = items.map((row) => ({ ...row, createdAt: new Date(row.createdAt) }));
      return { items: dated, hasMore };
    },

    async addToSegment(tenantId, who, segmentId) {
      const { id } = await find(tenantId, who);
      await findSegment(store.pool, tenantId, segmentId);
      const outcome = await store.transact((client) =>
        addToSegment(client, tenantId, { contactId: id, segmentId }, now()),
      );
      if (outcome === 'missing') throw notFound();
      return id;
    },

    async removeFromSegment(tenantId, who, segmentId) {
      const { id } = await find(tenantId, who);
      await findSegment(store.pool, tenantId, segmentId);
      const wasIn = await store.transact((client) =>
        removeFromSegment(client, tenantId, { contactId: id, segmentId }, now()),
      );
      if (!wasIn) throw new Refusal('not_found', 'The contact is not in this segment');
      return id;
    },

    async listTopics(tenantId, who, page) {
      const { id } = await find(tenantId, who);
      return listContactTopics(store, tenantId, id, page);
    },

    async setTopics(tenantId, who, given) {
      const { id } = await find(tenantId, who);
      await store.transact(async (client) => {
        const choices = await checkChoices(client, tenantId, 'topics', given);
        await setSubscriptions(client, tenantId, id, choices, now());
      });
      return id;
    },
  };
}

const notFound = (): Refusal => new Refusal('not_found', 'Contact not found');
const segmentNotFound = (): Refusal => new Refusal('not_found', 'Segment not found');

/** Refuses a segment that is not there. */
async function findSegment(db: Queryable, tenantId: string, id: string): Promise<void> {
  if ((await segmentsAmong(db, tenantId, [id])).size === 0) throw segmentNotFound();
}

/** The segments that a contact is in, at most two; or this one, where it is in it. */
async function segmentIdsOf(
  db: Queryable,
  tenantId: string,
  contactId: string,
  segmentId: string | null,
): Promise<readonly string[]> {
  const { rows } = await db.query<{ id: string }>(
    `select segment_id as id from segment_contact
     where tenant_id = $1 and contact_id = $2 and ($3::uuid is null or segment_id = $3) limit 2`,
    [tenantId, contactId, segmentId],
  );
  return rows.map(({ id }) => id);
}

/** The ids in lower case. Throws a Refusal for what is no UUID, and for too many. */
function checkSegments(given: readonly (string | SegmentReference)[]): readonly string[] {
  if (given.length > SEGMENTS_PER_REQUEST_MAX) {
    const message = `\`segments\` has ${given.length} items; at most ${SEGMENTS_PER_REQUEST_MAX} are allowed.`;
    throw refuseFields([{ path: 'segments', message }]);
  }
  const ids = given.map((one) => (typeof one === 'string' ? one : one.id).toLowerCase());
  const issues = ids.flatMap((id, index): Issue[] =>
    isUuid(id)
      ? []
      : [{ path: `segments.${index}`, message: `\`segments.${index}\` must be a valid UUID.` }],
  );
  if (issues.length > 0) throw refuseFields(issues);
  return ids;
}

const toFields = (request: UpdateContactRequest): ContactFields => ({
  firstName: request.first_name,
  lastName: request.last_name,
  unsubscribed: request.unsubscribed,
  // Of any kind yet: contact-fields.ts looks at each.
  properties: request.properties as ContactFields['properties'],
});

const toRecord = (row: ContactRecord): ContactRecord => ({
  ...row,
  properties: fromJson(row.properties),
  createdAt: new Date(row.createdAt),
  updatedAt: new Date(row.updatedAt),
});
