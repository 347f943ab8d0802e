// Reads the log of API requests back: a page of a tenant's entries, filtered, or one entry with its bodies.
// Dates are ranges of ids, tags ranges of `request_log_tag`; a rare `search` has to look at every entry.
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { RequestLog, RequestLogBody } from '../store/request-log.ts';
import { checkTag, parseTime, type Refuse, type TagFilter } from './filters.ts';
import type { Caller } from './keys.ts';
import { checkPage, refuseCursor, toPage, type PageRequest } from './page.ts';
import { refuseFields, type Issue } from './refusal.ts';
import { firstIdAt, type RequestLogWriter } from './request-log.ts';

/** As the query has them; an undefined one is not there. */
export interface LogFilters extends TagFilter {
  /** `404`, `4xx`, or several with commas. */
  readonly status: string | undefined;
  readonly method: string | undefined;
  readonly apiKeyId: string | undefined;
  readonly startDate: string | undefined;
  readonly endDate: string | undefined;
  readonly search: string | undefined;
}

export interface LogSummary {
  readonly id: string;
  readonly createdAt: Date;
  readonly endpoint: string;
  readonly method: string;
  readonly responseStatus: number;
  readonly userAgent: string | null;
  readonly apiKeyId: string;
  readonly requestId: string;
  readonly durationMs: number;
}

export interface LogEntry extends LogSummary {
  readonly requestBody: unknown;
  readonly responseBody: unknown;
  readonly emailIds: readonly string[];
}

export interface LogPage {
  readonly items: readonly LogSummary[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

export interface LogVerbs {
  /** Throws a Refusal for a filter, limit or cursor that is wrong. */
  list(caller: Caller, page: PageRequest, filters: LogFilters): Promise<LogPage>;
  /** Null: missing, or of another tenant. */
  find(caller: Caller, id: string): Promise<LogEntry | null>;
}

const STATUSES_MAX = 20;
const SEARCH_MAX_CHARACTERS = 200;
const METHODS = ['GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE'];
const STATUS = /^(?:[1-5]\d\d|[1-5]xx)$/i;
const DAY_MS = 86_400_000;

/** `writer` is this process's: its own requests are seen as soon as they are answered. */
export function createLogVerbs(store: Store, writer: Pick<RequestLogWriter, 'catchUp'>): LogVerbs {
  return {
    async list({ tenantId }, page, filters) {
      const cursor = checkPage(page);
      const checked = checkFilters(filters);
      await writer.catchUp();
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(RequestLog, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const values: unknown[] = [];
      const value = (given: unknown): string => `$${values.push(given)}`;
      const tenant = value(tenantId);
      const conditions = [
        `r.tenant_id = ${tenant}`,
        ...(cursor.after === null ? [] : [`r.id < ${value(cursor.after)}`]),
        ...(cursor.before === null ? [] : [`r.id > ${value(cursor.before)}`]),
        ...conditionsOf(checked, value, tenant),
      ];
      const { rows } = await store.pool.query<LogSummary>(
        `select r.id, r.created_at as "createdAt", r.endpoint, r.method,
           r.response_status as "responseStatus", r.user_agent as "userAgent",
           r.api_key_id as "apiKeyId", r.request_id as "requestId", r.duration_ms as "durationMs"
         from request_log r where ${conditions.join(' and ')}
         order by r.id ${cursor.before === null ? 'desc' : 'asc'} limit ${value(cursor.limit + 1)}`,
        values,
      );
      return toPage(
        rows.map((row) => ({ ...row, createdAt: new Date(row.createdAt) })),
        cursor,
      );
    },

    async find({ tenantId }, id) {
      const em = store.em();
      const log = await em.findOne(RequestLog, { tenantId, id });
      if (log === null) return null;
      const body = await em.findOne(RequestLogBody, { tenantId, logId: id });
      return {
        id: log.id,
        createdAt: log.createdAt,
        endpoint: log.endpoint,
        method: log.method,
        responseStatus: log.responseStatus,
        userAgent: log.userAgent ?? null,
        apiKeyId: log.apiKeyId,
        requestId: log.requestId,
        durationMs: log.durationMs,
        requestBody: parsed(body?.requestBody),
        responseBody: parsed(body?.responseBody),
        emailIds: log.emailIds ?? [],
      };
    },
  };
}

const parsed = (json: string | null | undefined): unknown =>
  json === null || json === undefined ? null : JSON.parse(json);

interface Checked {
  /** First and last status of each range. */
  readonly statuses: readonly (readonly [number, number])[] | null;
  readonly method: string | null;
  readonly apiKeyId: string | null;
  readonly startMs: number | null;
  /** Exclusive. */
  readonly endMs: number | null;
  readonly search: string | null;
  /** `name` or `name=value`. */
  readonly tag: string | null;
}

function checkFilters(given: LogFilters): Checked {
  const issues: Issue[] = [];
  const refuse = (path: string, message: string): null => {
    issues.push({ path, message });
    return null;
  };
  const start = given.startDate === undefined ? null : parseTime(given.startDate);
  const end = given.endDate === undefined ? null : parseTime(given.endDate);
  const when = 'must be a date like `2026-05-06` or an ISO 8601 time.';
  if (given.startDate !== undefined && start === null) {
    refuse('start_date', `\`start_date\` ${when}`);
  }
  if (given.endDate !== undefined && end === null) refuse('end_date', `\`end_date\` ${when}`);
  // Both ends are inside: a whole day, or the millisecond that is named.
  const endMs = end === null ? null : end.ms + (end.isDay ? DAY_MS : 1);
  if (start !== null && endMs !== null && start.ms >= endMs) {
    refuse('end_date', '`end_date` must not be before `start_date`.');
  }
  const checked: Checked = {
    statuses: given.status === undefined ? null : checkStatus(given.status, refuse),
    method: given.method === undefined ? null : checkMethod(given.method, refuse),
    apiKeyId:
      given.apiKeyId === undefined || isUuid(given.apiKeyId)
        ? (given.apiKeyId ?? null)
        : refuse('api_key_id', '`api_key_id` must be a valid UUID.'),
    startMs: start?.ms ?? null,
    endMs,
    search: given.search === undefined ? null : checkSearch(given.search, refuse),
    tag: checkTag(given, refuse),
  };
  if (issues.length > 0) throw refuseFields(issues);
  return checked;
}

function checkStatus(given: string, refuse: Refuse): Checked['statuses'] {
  const parts = given.split(',', STATUSES_MAX + 1).map((part) => part.trim());
  if (parts.length > STATUSES_MAX || !parts.every((part) => STATUS.test(part))) {
    return refuse(
      'status',
      `\`status\` must be a status like \`404\` or a class like \`4xx\`, or up to ${STATUSES_MAX} with commas.`,
    );
  }
  return parts.map((part): [number, number] => {
    const first = Number(part.replace(/xx/i, '00'));
    return [first, /xx/i.test(part) ? first + 99 : first];
  });
}

function checkMethod(given: string, refuse: Refuse): string | null {
  const method = given.toUpperCase();
  if (METHODS.includes(method)) return method;
  return refuse('method', `\`method\` must be one of ${METHODS.join(', ')}.`);
}

function checkSearch(given: string, refuse: Refuse): string | null {
  const length = [...given].length;
  if (length >= 1 && length <= SEARCH_MAX_CHARACTERS && !given.includes('\0')) return given;
  return refuse('search', `\`search\` must be 1 to ${SEARCH_MAX_CHARACTERS} characters long.`);
}

function conditionsOf(
  checked: Checked,
  value: (given: unknown) => string,
  tenant: string,
): readonly string[] {
  const conditions: string[] = [];
  if (checked.statuses !== null) {
    const ranges = checked.statuses.map(
      ([from, to]) =>
        `r.response_status ${from === to ? `= ${value(from)}` : `between ${value(from)} and ${value(to)}`}`,
    );
    conditions.push(`(${ranges.join(' or ')})`);
  }
  if (checked.method !== null) conditions.push(`r.method = ${value(checked.method)}`);
  if (checked.apiKeyId !== null) conditions.push(`r.api_key_id = ${value(checked.apiKeyId)}`);
  if (checked.startMs !== null) conditions.push(`r.id >= ${value(firstIdAt(checked.startMs))}`);
  if (checked.endMs !== null) conditions.push(`r.id < ${value(firstIdAt(checked.endMs))}`);
  if (checked.search !== null) {
    const pattern = value(`%${checked.search.replace(/[\\%_]/g, '\\$&')}%`);
    conditions.push(`(r.endpoint ilike ${pattern} or r.user_agent ilike ${pattern})`);
  }
  if (checked.tag !== null) {
    conditions.push(
      `r.id in (select t.log_id from request_log_tag t
         where t.tenant_id = ${tenant} and t.tag = ${value(checked.tag)})`,
    );
  }
  return conditions;
}
