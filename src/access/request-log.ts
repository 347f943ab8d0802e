// Writes the log of API requests: beside the requests, in batches, from a bounded buffer. While the database
// is away entries wait; when there are too many the oldest are lost and the operator's log says how many.
import type { Pool } from 'pg';
import type { Logger } from '../log.ts';
import { isUuid, newId } from '../store/id.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import type { Caller } from './keys.ts';
import { describeBody, withoutSecrets, type SizeOf } from './redact.ts';

/** A request of a known tenant, and what was answered. */
export interface AnsweredRequest {
  readonly caller: Caller;
  /** From `newId` when the request arrived. */
  readonly id: string;
  readonly method: string;
  /** Without `/api` and query. */
  readonly path: string;
  readonly userAgent: string | null;
  readonly requestId: string;
  readonly durationMs: number;
  /** Undefined where there is none. */
  readonly requestBody: unknown;
  readonly responseStatus: number;
  readonly responseBody: unknown;
  /** The sizes of attachments that are not in `requestBody` itself. */
  readonly sizeOf?: SizeOf;
}

export interface RequestLogWriter {
  record(request: AnsweredRequest): void;
  /** Resolves when what was recorded before is written, or a second has passed. Never rejects. */
  catchUp(): Promise<void>;
  /** Writes what is left, as far as the database lets it. */
  stop(): Promise<void>;
}

const FLUSH_MS = 250;
/** So many do not wait for that: what lies for long becomes old garbage, and memory grows. */
const FLUSH_ROWS = 100;
const BATCH_MAX = 500;
const BATCH_MAX_BYTES = 4 * 1024 * 1024;
const WAITING_MAX = 10_000;
const WAITING_MAX_BYTES = 16 * 1024 * 1024;
/** Between two tries while the database is away. */
const AWAY_MS = 1_000;
/** Of a stop. */
const STOP_MAX_MS = 3_000;
/** Of a reader's wait. */
const CATCH_UP_MAX_MS = 1_000;
const ENDPOINT_MAX = 300;
const USER_AGENT_MAX = 500;
/** A batch has so many emails at most. */
const EMAILS_MAX = 100;
const ROW_BYTES = 500;

interface Row {
  readonly tenantId: string;
  readonly id: string;
  readonly createdAt: Date;
  readonly apiKeyId: string;
  readonly method: string;
  readonly endpoint: string;
  readonly responseStatus: number;
  readonly userAgent: string | null;
  readonly requestId: string;
  readonly durationMs: number;
  readonly requestBody: string | null;
  readonly responseBody: string | null;
  readonly emailIds: readonly string[];
  readonly sizeBytes: number;
}

export function createRequestLogWriter(d: {
  readonly pool: Pool;
  readonly log: Logger;
}): RequestLogWriter {
  const waiting: Row[] = [];
  let waitingBytes = 0;
  let lost = 0;
  let awayUntil = 0;
  let isStopping = false;

  const dropOldest = (): void => {
    while (waiting.length > WAITING_MAX || waitingBytes > WAITING_MAX_BYTES) {
      // A tenth at a time: removing the first of a list moves all the others.
      const dropped = waiting.splice(0, Math.max(1, Math.floor(waiting.length / 10)));
      for (const { sizeBytes } of dropped) waitingBytes -= sizeBytes;
      lost += dropped.length;
    }
  };

  const nextBatch = (): Row[] => {
    let count = 0;
    let sizeBytes = 0;
    while (count < Math.min(BATCH_MAX, waiting.length)) {
      sizeBytes += waiting[count]!.sizeBytes;
      if (count > 0 && sizeBytes > BATCH_MAX_BYTES) break;
      count += 1;
    }
    const batch = waiting.splice(0, count);
    for (const row of batch) waitingBytes -= row.sizeBytes;
    return batch;
  };

  /** False: the database is away, and the batch waits again. */
  const write = async (batch: readonly Row[]): Promise<boolean> => {
    try {
      await insert(d.pool, batch);
    } catch (error) {
      if (isDatabaseUnavailable(error)) {
        waiting.unshift(...batch);
        for (const { sizeBytes } of batch) waitingBytes += sizeBytes;
        dropOldest();
        return false;
      }
      if (batch.length > 1 && isAboutData(error)) {
        // One that the database refuses must not take the others with it.
        const half = Math.ceil(batch.length / 2);
        const isLaterIn = await write(batch.slice(half));
        return (await write(batch.slice(0, half))) && isLaterIn;
      }
      lost += batch.length;
      d.log.error({ err: error }, 'the request log cannot be written');
    }
    if (lost > 0) d.log.warn({ requests: lost }, 'entries of the request log were lost');
    lost = 0;
    return true;
  };

  let flushing: Promise<void> | null = null;
  const flush = async (): Promise<void> => {
    while (waiting.length > 0) {
      if (await write(nextBatch())) continue;
      awayUntil = Date.now() + AWAY_MS;
      break;
    }
    flushing = null; // in the same turn as the last look
  };
  const tick = (): void => {
    if (waiting.length === 0 || Date.now() < awayUntil) return;
    flushing ??= flush();
  };
  const timer = setInterval(tick, FLUSH_MS);
  timer.unref();

  return {
    record(request) {
      if (isStopping) return;
      const row = toRow(request);
      waiting.push(row);
      waitingBytes += row.sizeBytes;
      if (waiting.length >= FLUSH_ROWS) tick();
      dropOldest();
    },
    async catchUp() {
      tick();
      if (flushing !== null) await within(CATCH_UP_MAX_MS, flushing);
    },
    async stop() {
      isStopping = true;
      clearInterval(timer);
      await within(STOP_MAX_MS, (flushing ?? Promise.resolve()).then(flush));
      lost += waiting.length;
      if (lost > 0) d.log.warn({ requests: lost }, 'entries of the request log were lost');
    },
  };
}

async function within(maxMs: number, work: Promise<void>): Promise<void> {
  let late: NodeJS.Timeout | undefined;
  const timeout = new Promise<void>((resolve) => {
    late = setTimeout(resolve, maxMs);
  });
  await Promise.race([work, timeout]);
  clearTimeout(late);
}

/** SQLSTATE classes 22 and 23: some value does not fit. */
const isAboutData = (error: unknown): boolean =>
  /^2[23]/.test(String((error as { code?: unknown }).code));

function toRow(request: AnsweredRequest): Row {
  const requestBody = describeBody(request.requestBody, request.sizeOf);
  const responseBody = describeBody(request.responseBody);
  const endpoint = request.path.replace(/(?<=.)\/$/, '');
  return {
    tenantId: request.caller.tenantId,
    id: request.id,
    createdAt: new Date(timeOf(request.id)),
    apiKeyId: request.caller.keyId,
    method: request.method,
    endpoint: withoutSecrets(endpoint).slice(0, ENDPOINT_MAX),
    responseStatus: request.responseStatus,
    userAgent:
      request.userAgent === null
        ? null
        : withoutSecrets(request.userAgent).slice(0, USER_AGENT_MAX),
    requestId: request.requestId,
    durationMs: request.durationMs,
    requestBody,
    responseBody,
    emailIds: emailIdsOf(request, endpoint),
    // Two bytes a character at worst.
    sizeBytes: ROW_BYTES + 2 * ((requestBody?.length ?? 0) + (responseBody?.length ?? 0)),
  };
}

/** The id for the log entry of a request that arrives now. */
export const newLogId = (): string => newId();

/** RFC 9562 §5.7: the first 48 bits are milliseconds. */
const timeOf = (id: string): number => Number.parseInt(id.slice(0, 8) + id.slice(9, 13), 16);

/** What the request says it is about; the statement keeps those that are emails of the tenant. */
function emailIdsOf(request: AnsweredRequest, endpoint: string): readonly string[] {
  const [, resource, id] = endpoint.split('/');
  if (resource !== 'emails') return [];
  if (id !== undefined && isUuid(id)) return [id.toLowerCase()];
  const isSend = request.method === 'POST' && (id === undefined || id === 'batch');
  if (!isSend || request.responseStatus >= 300) return [];
  const body = request.responseBody as { id?: unknown; data?: unknown } | null | undefined;
  const items: readonly unknown[] = Array.isArray(body?.data) ? body.data : [body];
  return items.slice(0, EMAILS_MAX).flatMap((item) => {
    const found = (item as { id?: unknown } | null | undefined)?.id;
    return typeof found === 'string' && isUuid(found) ? [found.toLowerCase()] : [];
  });
}

/** Twice the same rows is once: after a lost connection nobody knows what was committed. */
async function insert(pool: Pool, rows: readonly Row[]): Promise<void> {
  const links = rows.flatMap((row) => row.emailIds.map((emailId) => ({ row, emailId })));
  await pool.query({
    name: 'write-request-log',
    text: `
      with given as (
        select * from unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::uuid[], $5::text[], $6::text[],
          $7::smallint[], $8::text[], $9::text[], $10::integer[], $11::text[], $12::text[])
          as g (tenant_id, id, created_at, api_key_id, method, endpoint, response_status, user_agent,
            request_id, duration_ms, request_body, response_body)
      ), link as materialized (
        select l.tenant_id, l.log_id, e.id as email_id, e.tags
        from unnest($13::uuid[], $14::uuid[], $15::uuid[]) as l (tenant_id, log_id, email_id)
        join email e on e.tenant_id = l.tenant_id and e.id = l.email_id
      ), tag as materialized (
        select distinct link.tenant_id, link.log_id, term.text as tag
        from link, jsonb_to_recordset(link.tags) as t (name text, value text),
          lateral (values (t.name), (t.name || '=' || t.value)) as term (text)
      ), tags as (
        select log_id, array_agg(tag order by tag) as tags from tag group by log_id
      ), emails as (
        select log_id, array_agg(email_id order by email_id) as email_ids from link group by log_id
      ), tagged as (
        insert into request_log_tag (tenant_id, tag, log_id) select tenant_id, tag, log_id from tag
        on conflict do nothing
      ), body as (
        insert into request_log_body (tenant_id, log_id, request_body, response_body)
        select tenant_id, id, request_body, response_body from given
        where request_body is not null or response_body is not null
        on conflict do nothing
      )
      insert into request_log (tenant_id, id, created_at, api_key_id, method, endpoint, response_status,
        user_agent, request_id, duration_ms, email_ids, tags)
      select g.tenant_id, g.id, g.created_at, g.api_key_id, g.method, g.endpoint, g.response_status,
        g.user_agent, g.request_id, g.duration_ms, emails.email_ids, tags.tags
      from given g left join emails on emails.log_id = g.id left join tags on tags.log_id = g.id
      on conflict do nothing`,
    values: [
      rows.map(({ tenantId }) => tenantId),
      rows.map(({ id }) => id),
      rows.map(({ createdAt }) => createdAt),
      rows.map(({ apiKeyId }) => apiKeyId),
      rows.map(({ method }) => method),
      rows.map(({ endpoint }) => endpoint),
      rows.map(({ responseStatus }) => responseStatus),
      rows.map(({ userAgent }) => userAgent),
      rows.map(({ requestId }) => requestId),
      rows.map(({ durationMs }) => durationMs),
      rows.map(({ requestBody }) => requestBody),
      rows.map(({ responseBody }) => responseBody),
      links.map(({ row }) => row.tenantId),
      links.map(({ row }) => row.id),
      links.map(({ emailId }) => emailId),
    ],
  });
}

/** The smallest UUIDv7 of this millisecond. */
export function firstIdAt(ms: number): string {
  const time = Math.max(0, Math.floor(ms)).toString(16).padStart(12, '0');
  return `${time.slice(0, 8)}-${time.slice(8)}-7000-8000-000000000000`;
}
