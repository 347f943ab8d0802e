// Imports of contacts as the API sees them: a file is stored first, then the row that names it; importer.ts reads it.
import {
  checkPage,
  orderOf,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import type { BlobStore } from '../store/blob.ts';
import { ContactImport, importStatuses } from '../store/contact.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { HEAD_MAX_BYTES, readHeader, UnusableFile } from './import-file.ts';
import { checkImportRequest, type ImportRequest } from './import-request.ts';
import { mappedProperties, planColumns } from './import-rows.ts';
import { ensureProperties } from './properties.ts';

export type ImportStatus = (typeof importStatuses)[number];

export interface ImportRecord {
  readonly id: string;
  readonly status: ImportStatus;
  readonly createdAt: Date;
  readonly completedAt: Date | null;
  readonly counts: {
    /** Rows that were read, empty ones not among them. */
    readonly total: number;
    readonly created: number;
    readonly updated: number;
    readonly skipped: number;
    readonly failed: number;
  };
  /** Of the file, and how much of it was read. */
  readonly sizeBytes: number;
  readonly readBytes: number;
  /** Why it failed as a whole. */
  readonly failure: string | null;
}

export interface RowError {
  /** As a spreadsheet counts: the first line is 1. */
  readonly row: number;
  readonly message: string;
}

export interface ImportPage {
  readonly items: readonly ImportRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A file that arrived and is durable, but is nobody's yet. */
export interface ImportFile {
  readonly blobKey: string;
  readonly sizeBytes: number;
  /** Its beginning. */
  readonly head: Buffer;
}

export interface ImportVerbs {
  /** Stores a file while it arrives. When `bytes` fails, nothing is left of it. */
  receive(bytes: AsyncIterable<Uint8Array>): Promise<ImportFile>;
  /** Removes a file that will not be imported. */
  discard(file: ImportFile): Promise<void>;
  /** The id. `fields` are the texts of the form. Throws a Refusal for wrong fields, and the file is gone then. */
  create(tenantId: string, file: ImportFile, fields: ReadonlyMap<string, string>): Promise<string>;
  /** Newest first. Throws a Refusal for a status that there is not. */
  list(tenantId: string, page: PageRequest, status: string | null): Promise<ImportPage>;
  /** With the first rows that failed, at most SHOWN_ERRORS_MAX. */
  find(
    tenantId: string,
    id: string,
  ): Promise<{ readonly record: ImportRecord; readonly errors: readonly RowError[] } | null>;
}

/** Of one tenant: what is not done yet has a file on the disk. */
export const OPEN_IMPORTS_MAX = 20;
const SHOWN_ERRORS_MAX = 100;

export function createImportVerbs(d: {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly now: () => Date;
  /** An import was stored. */
  readonly onImport: () => void;
}): ImportVerbs {
  const { store, blobs } = d;
  const discard: ImportVerbs['discard'] = ({ blobKey }) => blobs.remove(blobKey);
  return {
    discard,

    async receive(bytes) {
      const blobKey = newId();
      const seen = watch(bytes);
      await blobs.write(blobKey, seen.bytes);
      return { blobKey, sizeBytes: seen.sizeBytes(), head: seen.head() };
    },

    async create(tenantId, file, fields) {
      try {
        const id = await storeImport(d, { tenantId, file, request: checkImportRequest(fields) });
        d.onImport();
        return id;
      } catch (error) {
        // After any other error nobody knows whether the row is there; without one the file is collected.
        if (error instanceof Refusal) await discard(file);
        throw error;
      }
    },

    async list(tenantId, page, status) {
      const cursor = checkPage(page);
      const wanted = importStatuses.find((one) => one === status);
      if (status !== null && wanted === undefined) {
        const message = `\`status\` must be one of ${importStatuses.join(', ')}.`;
        throw refuseFields([{ path: 'status', message }]);
      }
      const em = store.em();
      const at = cursor.after ?? cursor.before;
      if (at !== null && (await em.count(ContactImport, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        ContactImport,
        { tenantId, ...(wanted === undefined ? {} : { status: wanted }), ...rangeOf(cursor) },
        orderOf(cursor),
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async find(tenantId, id) {
      const row = await store.em().findOne(ContactImport, { tenantId, id });
      if (row === null) return null;
      const { rows: errors } = await store.pool.query<RowError>({
        name: 'import-errors',
        text: `select row, message from contact_import_error
          where tenant_id = $1 and import_id = $2 order by row limit ${SHOWN_ERRORS_MAX}`,
        values: [tenantId, id],
      });
      return { record: toRecord(row), errors };
    },
  };
}

/** Keeps the beginning of what goes by, and counts. */
function watch(bytes: AsyncIterable<Uint8Array>) {
  const pieces: Uint8Array[] = [];
  let [sizeBytes, keptBytes] = [0, 0];
  async function* passing(): AsyncGenerator<Uint8Array> {
    for await (const chunk of bytes) {
      sizeBytes += chunk.length;
      if (keptBytes < HEAD_MAX_BYTES) {
        const piece = Buffer.from(chunk.subarray(0, HEAD_MAX_BYTES - keptBytes));
        keptBytes += piece.length;
        pieces.push(piece);
      }
      yield chunk;
    }
  }
  return { bytes: passing(), sizeBytes: () => sizeBytes, head: () => Buffer.concat(pieces) };
}

interface NewImport {
  readonly tenantId: string;
  readonly file: ImportFile;
  readonly request: ImportRequest;
}

/** Properties that are new are made with the row. */
async function storeImport(
  { store, now }: { readonly store: Store; readonly now: () => Date },
  { tenantId, file, request }: NewImport,
): Promise<string> {
  const { columnMap, onConflict, segmentIds, topics } = request;
  const header = usable(() => readHeader(file.head));
  const id = newId();
  const at = now();
  await store.transact(async (client) => {
    const { rows } = await client.query<{
      open: number;
      segments: readonly string[] | null;
      topics: readonly string[] | null;
    }>({
      name: 'about-new-import',
      text: `select
          (select count(*)::integer from contact_import
            where tenant_id = $1 and status in ('queued', 'in_progress')) as open,
          (select array_agg(id::text) from segment
            where tenant_id = $1 and id = any ($2::uuid[])) as segments,
          (select array_agg(id::text) from topic
            where tenant_id = $1 and id = any ($3::uuid[])) as topics`,
      values: [tenantId, segmentIds, topics.map((topic) => topic.id)],
    });
    const found = rows[0]!;
    const issues: Issue[] = [
      ...(found.open < OPEN_IMPORTS_MAX
        ? []
        : [
            {
              path: 'file',
              message: `There are ${found.open} imports that are not done; wait until one is.`,
            },
          ]),
      ...absent('segments', segmentIds, found.segments),
      ...absent(
        'topics',
        topics.map((topic) => topic.id),
        found.topics,
      ),
    ];
    if (issues.length > 0) throw refuseFields(issues);
    const known = await ensureProperties(client, tenantId, mappedProperties(columnMap), at);
    usable(() => planColumns(header, columnMap, known));
    await client.query({
      name: 'insert-import',
      text: `insert into contact_import (tenant_id, id, status, on_conflict, column_map, segment_ids,
          topics, blob_key, size_bytes, read_bytes, read_rows, created_at)
        values ($1, $2, 'queued', $3, $4, $5, $6, $7, $8, $9, $10, $11)`,
      values: [
        tenantId,
        id,
        onConflict,
        columnMap === null ? null : JSON.stringify(columnMap),
        JSON.stringify(segmentIds),
        JSON.stringify(topics),
        file.blobKey,
        file.sizeBytes,
        header.endBytes,
        header.row,
        at,
      ],
    });
  });
  return id;
}

function absent(
  path: 'segments' | 'topics',
  wanted: readonly string[],
  found: readonly string[] | null,
): readonly Issue[] {
  return wanted.flatMap((id, index) =>
    found?.includes(id) === true
      ? []
      : [{ path: `${path}.${index}.id`, message: `There is no ${path.slice(0, -1)} \`${id}\`.` }],
  );
}

/** Throws a Refusal about the file where it cannot be used. */
function usable<T>(read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof UnusableFile)) throw error;
    const message = error.message.replace(/^The file\b/, 'The `file`');
    const isNamed = message !== error.message;
    throw refuseFields([
      { path: 'file', message: isNamed ? message : `\`file\` cannot be imported: ${message}` },
    ]);
  }
}

const toRecord = (row: InstanceType<typeof ContactImport.class>): ImportRecord => ({
  id: row.id,
  status: row.status,
  createdAt: row.createdAt,
  completedAt: row.completedAt ?? null,
  counts: {
    total: row.created + row.updated + row.skipped + row.failed,
    created: row.created,
    updated: row.updated,
    skipped: row.skipped,
    failed: row.failed,
  },
  sizeBytes: row.sizeBytes,
  readBytes: row.readBytes,
  failure: row.failure ?? null,
});
