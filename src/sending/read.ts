// Reads a tenant's emails: one of them, or a page of the list, newest first, filtered or not.
import { checkPage, refuseCursor, toPage, type Cursor, type PageRequest } from '../access/page.ts';
import type { DeliveryState } from '../store/delivery.ts';
import { Email, EmailContent, type EmailEvent } from '../store/email.ts';
import type { Store } from '../store/orm.ts';
import { checkEmailFilters, type CheckedFilters, type EmailFilters } from './search.ts';

export type EmailRecord = InstanceType<typeof Email.class> & {
  readonly content: Pick<InstanceType<typeof EmailContent.class>, 'html' | 'text' | 'headers'>;
};
export interface EmailPage {
  readonly items: readonly InstanceType<typeof Email.class>[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/**
 * Matches are looked for among this many emails next to the cursor first: what is frequent fills a page from
 * them, what is left for the indexes is rare, and so is their answer.
 */
const WINDOW = 10_000;
/** Then, where trails lead to the status, among this many rows of each. */
const TRAIL_WINDOW = 20_000;

/** Rows in which an email is found apart from its own: an index has them in order of their emails. */
interface Trail {
  readonly table: 'delivery' | 'timeline';
  readonly is: string;
}

const inState = (...states: readonly DeliveryState[]): readonly Trail[] =>
  states.map((state) => ({ table: 'delivery', is: `t.state = '${state}'` }));
const ofKind = (kind: 'complained' | 'opened' | 'clicked'): readonly Trail[] => [
  { table: 'timeline', is: `t.kind = '${kind}'` },
];

/** What an email that shows this has; none: most emails show it sooner or later. */
const TRAILS_OF: Readonly<Record<EmailEvent, readonly Trail[]>> = {
  queued: inState('preparing', 'ready'),
  scheduled: inState('scheduled'),
  sent: inState('ready', 'in_flight', 'unknown'),
  delivery_delayed: inState('deferred', 'unknown', 'ready', 'in_flight'),
  delivered: [],
  bounced: inState('bounced'),
  failed: inState('failed'),
  suppressed: inState('suppressed'),
  canceled: inState('canceled'),
  complained: ofKind('complained'),
  opened: ofKind('opened'),
  clicked: ofKind('clicked'),
};

/** A page of the tenant's emails. Throws a Refusal for a bad filter or cursor. */
export async function listEmails(
  store: Store,
  tenantId: string,
  page: PageRequest,
  filters: EmailFilters,
): Promise<EmailPage> {
  const cursor = checkPage(page);
  const checked = checkEmailFilters(tenantId, filters);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  if (at !== null && (await em.count(Email, { tenantId, id: at })) === 0) refuseCursor(cursor);
  const ids = await findIds(store, { tenantId, cursor, checked });
  if (ids.length === 0) return { items: [], hasMore: false };
  const rows = await em.find(
    Email,
    { tenantId, id: { $in: [...ids] } },
    { orderBy: { id: cursor.before === null ? 'desc' : 'asc' } },
  );
  return toPage(rows, cursor);
}

interface Wanted {
  readonly tenantId: string;
  readonly cursor: Cursor;
  readonly checked: CheckedFilters;
}

/** The ids of a page in the direction of travel, with one more than asked for where there is more. */
async function findIds(store: Store, wanted: Wanted): Promise<readonly string[]> {
  const { statuses, terms } = wanted.checked;
  const all = async (statement: Statement): Promise<readonly string[]> => {
    const { rows } = await store.pool.query<{ id: string }>(statement);
    return rows.map(({ id }) => id);
  };
  if (statuses === null && terms === null) return all(walk(wanted));
  const windows = [near(wanted), ...(statuses === null ? [] : alongTrails(wanted, statuses))];
  for (const window of windows) {
    const { rows } = await store.pool.query<{ ids: string[]; is_all: boolean }>(window);
    const { ids, is_all: isAll } = rows[0]!;
    if (isAll || ids.length > wanted.cursor.limit) return ids;
  }
  return all(terms === null ? walk(wanted) : matching(wanted));
}

/** One statement: its text and its values, which grow together. */
interface Statement {
  readonly text: string;
  readonly values: unknown[];
}

/** The parts that all statements share. */
interface Parts {
  readonly values: unknown[];
  readonly value: (given: unknown) => string;
  /** The range of `column`, which holds ids of emails. */
  readonly range: (table: string, column: string) => string;
  readonly order: 'asc' | 'desc';
  readonly limit: string;
}

function partsOf({ tenantId, cursor, checked }: Wanted): Parts {
  const values: unknown[] = [];
  const value = (given: unknown): string => `$${values.push(given)}`;
  const tenant = value(tenantId);
  const bounds = [
    ['<', cursor.after],
    ['>', cursor.before],
    ['>=', checked.fromId],
    ['<', checked.toId],
  ].flatMap(([operator, id]) =>
    typeof id === 'string' ? [`${operator!} ${value(id.toLowerCase())}::uuid`] : [],
  );
  return {
    values,
    value,
    range: (table, column) =>
      [
        `${table}.tenant_id = ${tenant}::uuid`,
        ...bounds.map((bound) => `${table}.${column} ${bound}`),
      ].join(' and '),
    order: cursor.before === null ? 'desc' : 'asc',
    limit: value(cursor.limit + 1),
  };
}

const ofTerms = (terms: string | null, value: Parts['value']): string =>
  terms === null
    ? ''
    : `join email_search s on s.tenant_id = e.tenant_id and s.email_id = e.id
        and s.terms @@ ${value(terms)}::tsquery`;
const ofStatus = (statuses: readonly EmailEvent[] | null, value: Parts['value']): string =>
  statuses === null ? '' : `and e.last_event = any (${value(statuses)}::text[])`;

/** By id as far as it takes. */
function walk(wanted: Wanted): Statement {
  const { values, value, range, order, limit } = partsOf(wanted);
  const text = `
    select e.id from email e
    where ${range('e', 'id')} ${ofStatus(wanted.checked.statuses, value)}
    order by e.id ${order} limit ${limit}`;
  return { text, values };
}

/** What matches among the emails next to the cursor; `is_all`: there are no more than those. */
function near(wanted: Wanted): Statement {
  const { values, value, range, order, limit } = partsOf(wanted);
  const { terms, statuses } = wanted.checked;
  const text =
    terms === null
      ? `
    with near as materialized (
      select e.id, e.last_event from email e
      where ${range('e', 'id')} order by e.id ${order} limit ${WINDOW}
    ), hit as (
      select e.id from near e where true ${ofStatus(statuses, value)}
      order by e.id ${order} limit ${limit}
    )`
      : `
    with near as materialized (
      select s.tenant_id, s.email_id, s.terms from email_search s
      where ${range('s', 'email_id')} order by s.email_id ${order} limit ${WINDOW}
    ), hit as (
      select s.email_id as id from near s
      ${statuses === null ? '' : `join email e on e.tenant_id = s.tenant_id and e.id = s.email_id ${ofStatus(statuses, value)}`}
      where s.terms @@ ${value(terms)}::tsquery order by s.email_id ${order} limit ${limit}
    )`;
  return {
    text: `${text}
    select array(select id::text from hit) as ids, (select count(*) from near) < ${WINDOW} as is_all`,
    values,
  };
}

/**
 * What matches along the trails next to the cursor. Where a trail goes on beyond its window, hits behind the
 * window's end may have others between them and do not count. Nothing for a status without trails.
 */
function alongTrails(wanted: Wanted, statuses: readonly EmailEvent[]): Statement[] {
  if (statuses.some((status) => TRAILS_OF[status].length === 0)) return [];
  const { values, value, range, order, limit } = partsOf(wanted);
  const trails = [
    ...new Map(
      statuses.flatMap((status) => TRAILS_OF[status]).map((one) => [one.is, one]),
    ).values(),
  ];
  // The conditions are literals: Postgres must see that the partial indexes fit.
  const windows = trails.map(
    ({ table, is }, index) => `trail${index} as materialized (
      select t.email_id as id from ${table} t where ${range('t', 'email_id')} and ${is}
      order by t.email_id ${order} limit ${TRAIL_WINDOW}
    )`,
  );
  const ends = trails.map(
    (_, index) =>
      `select (select id from trail${index} order by id ${order} offset ${TRAIL_WINDOW - 1}) as id`,
  );
  const text = `
    with ${windows.join(', ')}, ending as (
      select id from (${ends.join(' union all ')}) x where id is not null
    ), candidate as (
      ${trails.map((_, index) => `select id from trail${index}`).join(' union ')}
    ), hit as (
      select e.id from candidate c
      join email e on ${range('e', 'id')} and e.id = c.id ${ofStatus(statuses, value)}
      ${ofTerms(wanted.checked.terms, value)}
      where not exists (select 1 from ending where ending.id ${order === 'desc' ? '>' : '<'} e.id)
      order by e.id ${order} limit ${limit}
    )
    select array(select id::text from hit) as ids, not exists (select 1 from ending) as is_all`;
  return [{ text, values }];
}

/**
 * Everything that matches, then its newest. The matches come first and apart, so that Postgres does not walk
 * the table by id in the hope of meeting a page of them soon.
 */
function matching(wanted: Wanted): Statement {
  const { values, value, range, order, limit } = partsOf(wanted);
  const { terms, statuses } = wanted.checked;
  const text = `
    with hit as materialized (
      select s.email_id as id from email_search s
      ${statuses === null ? '' : `join email e on e.tenant_id = s.tenant_id and e.id = s.email_id ${ofStatus(statuses, value)}`}
      where ${range('s', 'email_id')} and s.terms @@ ${value(terms)}::tsquery
    )
    select id from hit order by id ${order} limit ${limit}`;
  return { text, values };
}

const REMOVED: EmailRecord['content'] = { html: null, text: null, headers: null };

/** The tenant's email with its content, or null: missing and foreign are the same. */
export async function findEmail(
  store: Store,
  tenantId: string,
  id: string,
): Promise<EmailRecord | null> {
  const em = store.em();
  const email = await em.findOne(Email, { tenantId, id });
  if (email === null) return null;
  const content = await em.findOne(
    EmailContent,
    { tenantId, emailId: id },
    { fields: ['html', 'text', 'headers'] },
  );
  // Retention may have taken it away since the email was read.
  return Object.assign(email, { content: content ?? REMOVED });
}
