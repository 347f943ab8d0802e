// Segments: named sets of contacts that a broadcast can be sent to. Resend calls them audiences in its older paths.
import type { Pool, PoolClient } from 'pg';
import {
  checkPage,
  orderOf,
  PAGE_MAX,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { refuseFields } from '../access/refusal.ts';
import { Segment } from '../store/contact.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { nameIssues } from './texts.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

export interface SegmentRecord {
  readonly id: string;
  readonly name: string;
  readonly createdAt: Date;
}

export interface SegmentPage {
  readonly items: readonly SegmentRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A new segment. */
export interface CreateSegmentRequest {
  /** 1 to 255 characters. */
  name: string;
  /** Not supported: a segment holds the contacts that are added to it. */
  filter?: unknown;
}

/** A change of a segment. */
export interface UpdateSegmentRequest {
  /** 1 to 255 characters. */
  name: string;
}

export interface SegmentVerbs {
  /** The id. Throws a Refusal when a field is wrong. */
  create(tenantId: string, request: CreateSegmentRequest): Promise<string>;
  /** Newest first, up to 100 where no limit is given. */
  list(tenantId: string, page: PageRequest): Promise<SegmentPage>;
  find(tenantId: string, id: string): Promise<SegmentRecord | null>;
  /** False when there is no such segment. Throws a Refusal when a field is wrong. */
  update(tenantId: string, id: string, request: UpdateSegmentRequest): Promise<boolean>;
  /** Its contacts stay. False when there is no such segment. */
  remove(tenantId: string, id: string): Promise<boolean>;
}

/** Of one tenant. */
export const SEGMENTS_MAX = 10_000;
const NAME_MAX_CHARACTERS = 255;

/** Which of the ids are segments of the tenant; in a transaction they stay until its end. */
export async function segmentsAmong(
  db: Queryable,
  tenantId: string,
  ids: readonly string[],
): Promise<ReadonlySet<string>> {
  if (ids.length === 0) return new Set();
  const { rows } = await db.query<{ id: string }>(
    `select id from segment where tenant_id = $1 and id = any ($2::uuid[]) order by id for key share`,
    [tenantId, ids],
  );
  return new Set(rows.map(({ id }) => id));
}

export function createSegmentVerbs(store: Store, now: () => Date): SegmentVerbs {
  const find: SegmentVerbs['find'] = async (tenantId, id) => {
    const found = await store.em().findOne(Segment, { tenantId, id });
    return found === null ? null : toRecord(found);
  };
  return {
    async create(tenantId, request) {
      const { filter = null } = request;
      const issues = [
        ...nameIssues('name', request.name, NAME_MAX_CHARACTERS),
        ...(filter === null
          ? []
          : [
              {
                path: 'filter',
                message: '`filter` is not supported; add contacts to the segment instead.',
              },
            ]),
      ];
      if (issues.length > 0) throw refuseFields(issues);
      const id = newId();
      const { rowCount } = await store.pool.query(
        `insert into segment (tenant_id, id, name, created_at, updated_at) select $1, $2, $3, $4, $4
         where (select count(*) from segment where tenant_id = $1) < ${SEGMENTS_MAX}`,
        [tenantId, id, request.name, now()],
      );
      if (rowCount === 1) return id;
      const message = `There can be at most ${SEGMENTS_MAX} segments; delete some first.`;
      throw refuseFields([{ path: 'name', message }]);
    },

    async list(tenantId, page) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const at = cursor.after ?? cursor.before;
      if (at !== null && (await find(tenantId, at)) === null) refuseCursor(cursor);
      const where = { tenantId, ...rangeOf(cursor) };
      const rows = await store.em().find(Segment, where, orderOf(cursor));
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    find,

    async update(tenantId, id, request) {
      const issues = nameIssues('name', request.name, NAME_MAX_CHARACTERS);
      if (issues.length > 0) throw refuseFields(issues);
      const change = { name: request.name, updatedAt: now() };
      return (await store.em().nativeUpdate(Segment, { tenantId, id }, change)) > 0;
    },

    async remove(tenantId, id) {
      // Its memberships go with it, in its statement: a broadcast must not find it half empty.
      return (await store.em().nativeDelete(Segment, { tenantId, id })) > 0;
    },
  };
}

const toRecord = (segment: InstanceType<typeof Segment.class>): SegmentRecord => ({
  id: segment.id,
  name: segment.name,
  createdAt: segment.createdAt,
});
