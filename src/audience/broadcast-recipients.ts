// What became of a broadcast for each of its recipients, and which links they clicked. Both are pages of lists that grow
// while they are read; the ids of their items say where a page goes on and name nothing else.
import type { Pool, PoolClient } from 'pg';
import { PAGE_MAX, type PageRequest } from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress } from '../mail/address.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

export const recipientTypes = [
  'sent',
  'delivered',
  'opened',
  'clicked',
  'bounced',
  'complained',
  'unsubscribed',
  'suppressed',
] as const;
export type RecipientType = (typeof recipientTypes)[number];
export const bounceTypes = ['permanent', 'transient', 'undetermined'] as const;
export type BounceType = (typeof bounceTypes)[number];

/** As the query has it. */
export interface RecipientQuery {
  readonly type: string | undefined;
  readonly email: string | undefined;
  readonly bounceType: string | undefined;
  readonly page: PageRequest;
}

export interface RecipientRecord {
  /** Where a page goes on. */
  readonly id: string;
  /** Null: it was deleted. */
  readonly contactId: string | null;
  readonly email: string;
  /** Of opens or clicks; null for every other type. */
  readonly count: number | null;
  /** The most clicked first; null for every other type. */
  readonly clickedLinks: readonly { readonly url: string; readonly clicks: number }[] | null;
  /** Null for every other type. */
  readonly bounceType: BounceType | null;
}

export interface RecipientPage {
  readonly items: readonly RecipientRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

export interface ClickedLinkRecord {
  /** Where a page goes on. */
  readonly id: string;
  readonly url: string;
  readonly clicks: number;
  /** Recipients who clicked it. */
  readonly uniqueClicks: number;
}

export interface ClickedLinkPage {
  readonly items: readonly ClickedLinkRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

interface Which {
  readonly tenantId: string;
  readonly broadcastId: string;
}

/** Of one recipient. */
const LINKS_MAX = 100;

const CODE = `e.provider_last_error ->> 'code'`;
/** The same as the metrics count (sending/metrics.ts). */
const BOUNCE_TYPE = `case when ${CODE} like '5.%' then 'permanent'
  when ${CODE} = 'expired' or ${CODE} like '4.%' then 'transient' else 'undetermined' end`;

/** Machines that look at mail before its reader do not count; the proxy of a reader's mail program stands for him. */
const BY_PERSON = `coalesce(suspect, 'proxy') = 'proxy'`;

const didOf = (kind: 'opened' | 'clicked'): string => `r.email_id in (
  select g.email_id from engagement g
  where g.tenant_id = $1 and g.broadcast_id = $2 and g.kind = '${kind}' and ${BY_PERSON})`;

/** `d`: the delivery, `e`: the email; both are missing where none was made. */
const CONDITIONS: Readonly<Record<RecipientType, string>> = {
  sent: 'd.attempts > 0',
  delivered: `d.state = 'delivered'`,
  opened: didOf('opened'),
  clicked: didOf('clicked'),
  bounced: `d.state = 'bounced'`,
  complained: `e.last_event = 'complained'`,
  unsubscribed: 'r.unsubscribed_at is not null',
  suppressed: `(r.left_out = 'suppressed' or d.state = 'suppressed')`,
};

/** Those that `type` says, newest contacts first. Throws a Refusal for a bad query. */
export async function listRecipients(
  db: Queryable,
  which: Which,
  query: RecipientQuery,
): Promise<RecipientPage> {
  const { type, bounceType, address, cursor } = checkQuery(query);
  const back = cursor.before !== null;
  const { rows } = await db.query<{
    contact_id: string;
    live_id: string | null;
    email_id: string | null;
    email: string;
    bounce_type: BounceType;
  }>({
    text: `
      select r.contact_id, c.id as live_id, r.email_id, coalesce(c.email, r.address) as email,
        ${BOUNCE_TYPE} as bounce_type
      from broadcast_recipient r
      left join contact c on c.tenant_id = r.tenant_id and c.id = r.contact_id
      left join email e on e.tenant_id = r.tenant_id and e.id = r.email_id
      left join delivery d on d.tenant_id = r.tenant_id and d.email_id = r.email_id and d.position = 0
      where r.tenant_id = $1 and r.broadcast_id = $2 and ${CONDITIONS[type]}
        and ($3::uuid is null or r.contact_id ${back ? '>' : '<'} $3)
        and ($4::text is null or r.address = $4) and ($5::text is null or ${BOUNCE_TYPE} = $5)
      order by r.contact_id ${back ? 'asc' : 'desc'} limit $6`,
    values: [
      which.tenantId,
      which.broadcastId,
      await findCursor(db, which, cursor),
      address,
      bounceType,
      cursor.limit + 1,
    ],
  });
  const shown = rows.slice(0, cursor.limit);
  const done =
    type === 'opened' || type === 'clicked'
      ? await readEngagement(db, which, {
          kind: type,
          emailIds: shown.flatMap((row) => row.email_id ?? []),
        })
      : null;
  const items = shown.map((row): RecipientRecord => {
    const links = done?.get(row.email_id ?? '') ?? [];
    return {
      id: writeCursor(row.contact_id),
      contactId: row.live_id,
      email: row.email,
      count: done === null ? null : links.reduce((sum, { clicks }) => sum + clicks, 0),
      clickedLinks:
        type === 'clicked'
          ? links.flatMap(({ url, clicks }) => (url === null ? [] : [{ url, clicks }]))
          : null,
      bounceType: type === 'bounced' ? row.bounce_type : null,
    };
  });
  return { items: back ? items.toReversed() : items, hasMore: rows.length > cursor.limit };
}

interface Engaged {
  /** Null of opens. */
  readonly url: string | null;
  readonly clicks: number;
}

/** By email: what was opened or clicked, how often; the most first. */
async function readEngagement(
  db: Queryable,
  { tenantId }: Which,
  asked: { readonly kind: 'opened' | 'clicked'; readonly emailIds: readonly string[] },
): Promise<ReadonlyMap<string, readonly Engaged[]>> {
  const { rows } = await db.query<{ email_id: string; link: string | null; clicks: string }>({
    text: `
      select email_id, link, clicks from (
        select email_id, link, count(*) as clicks,
          row_number() over (partition by email_id order by count(*) desc, min(id::text)) as place
        from engagement
        where tenant_id = $1 and email_id = any ($2::uuid[]) and kind = $3 and ${BY_PERSON}
        group by email_id, link) g
      where place <= ${LINKS_MAX} order by email_id, place`,
    values: [tenantId, asked.emailIds, asked.kind],
  });
  const byEmail = new Map<string, Engaged[]>();
  for (const { email_id: emailId, link, clicks } of rows) {
    const list = byEmail.get(emailId) ?? [];
    byEmail.set(emailId, list);
    list.push({ url: link, clicks: Number(clicks) });
  }
  return byEmail;
}

/** By the time of their first click, the latest first. Throws a Refusal for a bad page. */
export async function listClickedLinks(
  db: Queryable,
  { tenantId, broadcastId }: Which,
  page: PageRequest,
): Promise<ClickedLinkPage> {
  const cursor = checkCursor(page, []);
  const at = cursor.after ?? cursor.before;
  const back = cursor.before !== null;
  const first = at === null ? null : readCursor(at);
  if (first !== null) {
    const { rowCount } = await db.query({
      text: `select 1 from engagement
        where tenant_id = $1 and broadcast_id = $2 and kind = 'clicked' and id = $3 limit 1`,
      values: [tenantId, broadcastId, first],
    });
    if (rowCount === 0) throw refuseFields([badCursor(cursor.after === null ? 'before' : 'after')]);
  }
  // The first click of a link stays its first, so the link keeps its place.
  const { rows } = await db.query<{
    first: string;
    link: string;
    clicks: string;
    unique_clicks: string;
  }>({
    text: `
      with links as (
        select min(id::text) as first, link, count(*) as clicks, count(distinct email_id) as unique_clicks
        from engagement
        where tenant_id = $1 and broadcast_id = $2 and kind = 'clicked' and ${BY_PERSON}
          and link is not null
        group by link
      )
      select first, link, clicks, unique_clicks from links
      where $3::text is null or first ${back ? '>' : '<'} $3
      order by first ${back ? 'asc' : 'desc'} limit $4`,
    values: [tenantId, broadcastId, first, cursor.limit + 1],
  });
  const items = rows.slice(0, cursor.limit).map((row) => ({
    id: writeCursor(row.first),
    url: row.link,
    clicks: Number(row.clicks),
    uniqueClicks: Number(row.unique_clicks),
  }));
  return { items: back ? items.toReversed() : items, hasMore: rows.length > cursor.limit };
}

interface Cursor {
  readonly limit: number;
  readonly after: string | null;
  readonly before: string | null;
}

const CURSOR = /^[A-Za-z0-9_-]{22}$/;

/** A UUID in 22 characters. */
const writeCursor = (id: string): string =>
  Buffer.from(id.replaceAll('-', ''), 'hex').toString('base64url');

const readCursor = (cursor: string): string =>
  Buffer.from(cursor, 'base64url')
    .toString('hex')
    .replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');

/** The page with its defaults. Throws a Refusal that lists these issues and what is wrong with the page. */
function checkCursor(page: PageRequest, issues: readonly Issue[]): Cursor {
  const { limit = PAGE_MAX, after = null, before = null } = page;
  const all = [
    ...issues,
    ...(Number.isInteger(limit) && limit >= 1 && limit <= PAGE_MAX
      ? []
      : [{ path: 'limit', message: `\`limit\` must be a whole number from 1 to ${PAGE_MAX}.` }]),
    ...(after === null || CURSOR.test(after) ? [] : [badCursor('after')]),
    ...(before === null || CURSOR.test(before) ? [] : [badCursor('before')]),
    ...(after === null || before === null
      ? []
      : [{ path: 'before', message: 'Give `after` or `before`, not both.' }]),
  ];
  if (all.length > 0) throw refuseFields(all);
  return { limit, after, before };
}

const badCursor = (path: 'after' | 'before'): Issue => ({
  path,
  message: `\`${path}\` is not the id of an item of this list.`,
});

/** The contact that the cursor names; null: the list's beginning. Throws a Refusal when it names none. */
async function findCursor(
  db: Queryable,
  { tenantId, broadcastId }: Which,
  cursor: Cursor,
): Promise<string | null> {
  const at = cursor.after ?? cursor.before;
  if (at === null) return null;
  const { rowCount } = await db.query({
    text: 'select 1 from broadcast_recipient where tenant_id = $1 and broadcast_id = $2 and contact_id = $3',
    values: [tenantId, broadcastId, readCursor(at)],
  });
  if (rowCount === 0) throw refuseFields([badCursor(cursor.after === null ? 'before' : 'after')]);
  return readCursor(at);
}

function checkQuery({ type, email, bounceType, page }: RecipientQuery): {
  readonly type: RecipientType;
  readonly bounceType: BounceType | null;
  readonly address: string | null;
  readonly cursor: Cursor;
} {
  const known = recipientTypes.find((one) => one === type);
  const bounce = bounceTypes.find((one) => one === bounceType) ?? null;
  const issues: Issue[] = [
    ...(known === undefined
      ? [{ path: 'type', message: `\`type\` must be one of ${recipientTypes.join(', ')}.` }]
      : []),
    ...(bounceType !== undefined && bounce === null
      ? [
          {
            path: 'bounce_type',
            message: `\`bounce_type\` must be one of ${bounceTypes.join(', ')}.`,
          },
        ]
      : []),
    ...(bounceType !== undefined && known !== undefined && known !== 'bounced'
      ? [{ path: 'bounce_type', message: '`bounce_type` can only be asked with `type=bounced`.' }]
      : []),
    ...(email === undefined || isAddressLike(email)
      ? []
      : [{ path: 'email', message: '`email` must be an address.' }]),
  ];
  const cursor = checkCursor(page, issues);
  return {
    type: known!,
    bounceType: bounce,
    address: email === undefined ? null : normalizedAddress(email),
    cursor,
  };
}

const isAddressLike = (text: string): boolean =>
  text.length > 0 && text.length <= 320 && !text.includes('\0') && text.isWellFormed();
