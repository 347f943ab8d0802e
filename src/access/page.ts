// Pages of a list, newest first. A page is a range of ids, which sort by creation, so a walk never repeats
// or skips an item that was there when it began, however many are added meanwhile, and costs the
// same at any depth.
import { isUuid } from '../store/id.ts';
import { refuseFields } from './refusal.ts';

/** `after` and `before` are ids of an item of the list, exclusive; never both. */
export interface PageRequest {
  readonly limit: number | undefined;
  readonly after: string | undefined;
  readonly before: string | undefined;
}

const PAGE_DEFAULT = 20;
export const PAGE_MAX = 100;
const LIMIT_TEXT = /^[1-9]\d{0,2}$/;
const limitIssue = {
  path: 'limit',
  message: `\`limit\` must be a whole number from 1 to ${PAGE_MAX}.`,
};

/** The limit as the query wrote it: `1e1`, `+5` and `5.0` are numbers and still no limit. Throws a Refusal. */
export function checkLimitText(given: unknown): void {
  if (typeof given === 'string' && !LIMIT_TEXT.test(given)) throw refuseFields([limitIssue]);
}

export interface Cursor {
  readonly limit: number;
  readonly after: string | null;
  readonly before: string | null;
}

/** The page request with its defaults. Throws a Refusal for a bad limit or cursor. */
export function checkPage(page: PageRequest): Cursor {
  const { limit = PAGE_DEFAULT, after = null, before = null } = page;
  const issues = [
    ...(Number.isInteger(limit) && limit >= 1 && limit <= PAGE_MAX ? [] : [limitIssue]),
    ...(after === null || isUuid(after)
      ? []
      : [{ path: 'after', message: '`after` must be the id of an item of this list.' }]),
    ...(before === null || isUuid(before)
      ? []
      : [{ path: 'before', message: '`before` must be the id of an item of this list.' }]),
    ...(after === null || before === null
      ? []
      : [{ path: 'before', message: 'Give `after` or `before`, not both.' }]),
  ];
  if (issues.length > 0) throw refuseFields(issues);
  return { limit, after, before };
}

/** A cursor that names nothing in the list is a mistake of the caller, not an empty page. */
export function refuseCursor(cursor: Cursor): never {
  const path = cursor.after === null ? 'before' : 'after';
  throw refuseFields([{ path, message: `\`${path}\` is not the id of an item of this list.` }]);
}

/** Which rows of a list by id a page is read from. */
export const rangeOf = (cursor: Cursor) => ({
  ...(cursor.after === null ? {} : { id: { $lt: cursor.after } }),
  ...(cursor.before === null ? {} : { id: { $gt: cursor.before } }),
});

/** In which order they are read, from the cursor on, and how many: one more than asked for. */
export const orderOf = (cursor: Cursor) => ({
  orderBy: { id: cursor.before === null ? ('desc' as const) : ('asc' as const) },
  limit: cursor.limit + 1,
});

/** Cuts what was read with one more than asked for into a page, newest first. */
export function toPage<T>(rows: readonly T[], cursor: Cursor): { items: T[]; hasMore: boolean } {
  const items = rows.slice(0, cursor.limit);
  return {
    items: cursor.before === null ? items : items.toReversed(),
    hasMore: rows.length > cursor.limit,
  };
}

/** An id from a path, where it is called `path`, in lower case. Throws a Refusal when it is not a UUID. */
export function checkId(id: string, path = 'id'): string {
  if (isUuid(id)) return id.toLowerCase();
  const message = `The \`${path}\` must be a valid UUID.`;
  throw refuseFields([{ path, message }], 'invalid_parameter');
}

/** A page of a short list that is all in memory, in its own order. Throws a Refusal for a bad limit or cursor. */
export function pageOf<T extends { readonly id: string }>(
  items: readonly T[],
  request: PageRequest,
): { items: readonly T[]; hasMore: boolean } {
  const cursor = checkPage(request);
  const at = cursor.after ?? cursor.before;
  const position = items.findIndex(({ id }) => id === at?.toLowerCase());
  if (at !== null && position === -1) refuseCursor(cursor);
  if (cursor.before !== null) {
    const start = Math.max(0, position - cursor.limit);
    return { items: items.slice(start, position), hasMore: start > 0 };
  }
  const end = position + 1 + cursor.limit;
  return { items: items.slice(position + 1, end), hasMore: end < items.length };
}
