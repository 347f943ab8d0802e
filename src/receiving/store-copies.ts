// Writes what arrived: the copies of messages that come at the same time in one statement, so that they share one commit
// and one fsync. All copies of one message are committed together, and a second arrival is told apart from the first by
// the database, whichever process takes it.
import { DatabaseError, type Pool } from 'pg';
import type { ParsedMessage } from '../mail/parse.ts';
import { createGroupWriter } from '../store/group-writer.ts';
import { NEW_ID, newId } from '../store/id.ts';
import type { Authentication, RouteDecision } from '../store/received-email.ts';
import { isHooked } from '../timeline/outbox.ts';
import { SECOND_ARRIVAL_WITHIN_MS } from './digest.ts';
import { contentColumns, shownColumns } from './shown.ts';

/** What one tenant gets of a message. */
export interface Copy {
  readonly tenantId: string;
  readonly id: string;
  readonly digest: Buffer;
  readonly mailFrom: string;
  /** As the client wrote them, without repeats. */
  readonly receivedFor: readonly string[];
  readonly decisions: readonly RouteDecision[];
  readonly authentication: Authentication | null;
  readonly client: { readonly address: string; readonly helo: string };
  readonly receivedAt: Date;
  /** The bytes, or the key of the blob that holds them: exactly one of the two. */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  readonly traceSizeBytes: number;
  /** Null: not read yet. */
  readonly parsed: ParsedMessage | null;
  readonly forwards: readonly { readonly ruleId: string; readonly recipient: string }[];
  /** The sent email that it answers. */
  readonly answers: { readonly emailId: string; readonly isAutomatic: boolean } | null;
}

/**
 * Stores the copies of one message; resolves after the commit, with the id of each in their order: its own, or that of the
 * first arrival, and then nothing of this one was stored.
 */
export type CopyWriter = (copies: readonly Copy[]) => Promise<readonly string[]>;

/** More at a time would not be faster: the statement's cost is per row by then. */
const GROUP_MAX = 32;
const GROUP_MAX_BYTES = 4 * 1024 * 1024;
const WAITING_MAX_MS = 20_000;
/** Replies that the timeline of one sent email tells; a thread may go on for ever. */
export const REPLIES_TOLD_MAX = 100;

/** The database could not be asked at all. */
export class NotAsked extends Error {
  override name = 'NotAsked';

  constructor(cause: unknown) {
    super('the database could not be asked', { cause });
  }
}

export const createCopyWriter = (pool: Pick<Pool, 'connect'>): CopyWriter =>
  createGroupWriter<readonly Copy[], readonly string[]>({
    waitingMaxMs: WAITING_MAX_MS,
    async write(messages) {
      const ids = await write(pool, messages.flat());
      return messages.map((copies) => copies.map(({ id }) => ids.get(id) ?? id));
    },
    // None twice, since a statement cannot tell a second arrival from itself.
    countFirst(waiting) {
      const keys = new Set<string>();
      let count = 0;
      let rows = 0;
      let sizeBytes = 0;
      for (const copies of waiting) {
        const own = copies.map(({ tenantId, digest }) => tenantId + digest.toString('latin1'));
        rows += copies.length;
        for (const { raw, rawSizeBytes } of copies) sizeBytes += raw === null ? 0 : rawSizeBytes;
        const isFull = rows > GROUP_MAX || sizeBytes > GROUP_MAX_BYTES;
        if (count > 0 && (isFull || own.some((key) => keys.has(key)))) break;
        for (const key of own) keys.add(key);
        count += 1;
      }
      return count;
    },
  });

const COPY_TYPES = (
  'uuid uuid timestamptz text jsonb jsonb boolean boolean text jsonb jsonb jsonb jsonb text text ' +
  'jsonb jsonb uuid text text'
).split(' ');
const CONTENT_TYPES = ['uuid', 'uuid', 'text', 'text', 'jsonb', 'bytea', 'text', 'int', 'int'];
/** Groups of this many copies have a prepared statement each. */
const PREPARED_MAX = 8;

/** One statement: all of them or none. The ids under which they are stored, by their own. */
async function write(
  pool: Pick<Pool, 'connect'>,
  copies: readonly Copy[],
): Promise<ReadonlyMap<string, string>> {
  const values: unknown[] = [];
  const one = (value: unknown, type: string): string => `$${values.push(value)}::${type}`;
  const table = (types: readonly string[], rows: readonly (readonly unknown[])[]): string =>
    rows.map((row) => `(${row.map((value, at) => one(value, types[at]!)).join(', ')})`).join(', ');
  const lists = (types: readonly string[], rows: readonly (readonly unknown[])[]): string =>
    types
      .map((type, at) =>
        one(
          rows.map((row) => row[at]),
          `${type}[]`,
        ),
      )
      .join(', ');

  const digests = copies.map(({ tenantId, digest, id, receivedAt }) => [
    tenantId,
    digest,
    id,
    receivedAt,
  ]);
  const forwards = copies.flatMap(({ tenantId, id, forwards: all }) =>
    all.map(({ ruleId, recipient }) => [tenantId, newId(), id, ruleId, recipient]),
  );
  const read = copies.flatMap(({ tenantId, id, parsed }) =>
    parsed === null ? [] : [[tenantId, id]],
  );
  const replies = copies.flatMap(({ tenantId, id, answers, receivedAt }) => {
    if (answers === null) return [];
    const detail = { received_email_id: id, automatic: answers.isAutomatic };
    return [[tenantId, answers.emailId, newId(), receivedAt, JSON.stringify(detail), id]];
  });
  // Who takes several keys takes them in one order, or two groups could wait for each other.
  const text = `
    with asked (tenant_id, digest, email_id, received_at) as (
      select * from unnest(${lists(['uuid', 'bytea', 'uuid', 'timestamptz'], digests)})
    ), taken as (
      insert into received_digest as d (tenant_id, digest, email_id, received_at)
      select * from asked order by tenant_id, digest
      on conflict (tenant_id, digest) do update set
        email_id = case when ${isOver} then excluded.email_id else d.email_id end,
        received_at = case when ${isOver} then excluded.received_at else d.received_at end
      returning tenant_id, digest, email_id
    ), copy as (
      insert into received_email (tenant_id, id, created_at, mail_from, received_for,
        route_decisions, is_read, is_partial, from_shown, to_shown, cc_shown, bcc_shown,
        reply_to_shown, subject, message_id, attachments, authentication, answers_email_id,
        remote_address, helo)
      select v.* from (values ${table(COPY_TYPES, copies.map(copyRow))}) as v (tenant_id, email_id)
      join taken using (tenant_id, email_id)
    ), content as (
      insert into received_content (tenant_id, email_id, html, text, headers, raw, blob_key,
        raw_size_bytes, trace_size_bytes)
      select v.* from (values ${table(CONTENT_TYPES, copies.map(contentRow))})
        as v (tenant_id, email_id)
      join taken using (tenant_id, email_id)
    ), task as (
      insert into forwarding_task (tenant_id, id, received_email_id, rule_id, recipient, created_at,
        due_at)
      select v.*, now(), now()
      from unnest(${lists(['uuid', 'uuid', 'uuid', 'uuid', 'text'], forwards)})
        as v (tenant_id, id, email_id, rule_id, recipient)
      join taken using (tenant_id, email_id)
    ), told as (
      insert into timeline (tenant_id, email_id, id, at, kind, detail)
      select v.tenant_id, v.answered_id, v.id, v.at, 'replied', v.detail
      from unnest(${lists(['uuid', 'uuid', 'uuid', 'timestamptz', 'jsonb', 'uuid'], replies)})
        as v (tenant_id, answered_id, id, at, detail, email_id)
      join taken using (tenant_id, email_id)
      where (select count(*) from (
        select 1 from timeline t where t.tenant_id = v.tenant_id and t.email_id = v.answered_id
          and t.kind = 'replied' limit ${REPLIES_TOLD_MAX}) as before) < ${REPLIES_TOLD_MAX}
    ), heard as (
      -- What is not read yet is told when it is: until then there is nothing to say.
      insert into outbox (tenant_id, id, type, subject_id, detail, at)
      select tenant_id, ${NEW_ID}, 'email.received', email_id, '{}', now()
      from unnest(${lists(['uuid', 'uuid'], read)}) as v (tenant_id, email_id)
      join taken using (tenant_id, email_id)
      where ${isHooked('taken.tenant_id', `'email.received'`)}
    )
    select asked.email_id as own, taken.email_id as stored
    from asked join taken using (tenant_id, digest)`;
  const name = copies.length <= PREPARED_MAX ? { name: `store-copies-${copies.length}` } : {};
  const client = await pool.connect().catch((error: unknown) => {
    throw new NotAsked(error);
  });
  let broken: Error | undefined;
  try {
    const { rows } = await client.query<{ own: string; stored: string }>({ ...name, text, values });
    return new Map(rows.map(({ own, stored }) => [own, stored]));
  } catch (error) {
    broken = error instanceof DatabaseError ? undefined : (error as Error);
    throw error;
  } finally {
    client.release(broken); // what was asked without an answer must not go back to the pool
  }
}

const isOver = `d.received_at <= excluded.received_at - interval '${SECOND_ARRIVAL_WITHIN_MS} ms'`;

const copyRow = (copy: Copy): readonly unknown[] => [
  copy.tenantId,
  copy.id,
  copy.receivedAt,
  copy.mailFrom,
  JSON.stringify(copy.receivedFor),
  JSON.stringify(copy.decisions),
  copy.parsed !== null,
  copy.parsed?.isPartial ?? false,
  ...shownColumns(copy.parsed),
  copy.authentication === null ? null : JSON.stringify(copy.authentication),
  copy.answers?.emailId ?? null,
  copy.client.address,
  copy.client.helo,
];

const contentRow = (copy: Copy): readonly unknown[] => [
  copy.tenantId,
  copy.id,
  ...contentColumns(copy.parsed),
  copy.raw,
  copy.blobKey,
  copy.rawSizeBytes,
  copy.traceSizeBytes,
];
