// The attachments of sent emails, read back: what they are, and their bytes, which lie as base64 lines in the stored
// message, or staged until that is composed.
import { Readable } from 'node:stream';
import type { OpenLink } from '../access/linked.ts';
import { pageOf, type PageRequest } from '../access/page.ts';
import { Base64Reader } from '../mail/base64.ts';
import { decodeShownFile } from '../mail/shown-parts.ts';
import { AttachmentRow } from '../store/attachment.ts';
import type { BlobStore } from '../store/blob.ts';
import { Email } from '../store/email.ts';
import type { Store } from '../store/orm.ts';

export interface AttachmentRecord {
  readonly id: string;
  readonly filename: string | null;
  readonly contentType: string;
  readonly contentId: string | null;
  readonly disposition: 'attachment' | 'inline';
  /** Null until it is fetched from its URL. */
  readonly sizeBytes: number | null;
}

export interface AttachmentPage {
  readonly items: readonly AttachmentRecord[];
  readonly hasMore: boolean;
}

export interface AttachmentReading {
  readonly store: Store;
  readonly blobs: BlobStore;
}

/** What the API can do with the attachments of sent emails. */
export interface AttachmentVerbs {
  /** In the order of the email; null: no such email. */
  list(tenantId: string, emailId: string, page: PageRequest): Promise<AttachmentPage | null>;
  find(tenantId: string, emailId: string, id: string): Promise<AttachmentRecord | null>;
}

type Row = InstanceType<typeof AttachmentRow.class>;

export function createAttachmentVerbs({
  store,
}: Pick<AttachmentReading, 'store'>): AttachmentVerbs {
  return {
    async list(tenantId, emailId, page) {
      const em = store.em();
      if ((await em.count(Email, { tenantId, id: emailId })) === 0) return null;
      const rows = await em.find(
        AttachmentRow,
        { tenantId, emailId },
        { orderBy: { position: 'asc' } },
      );
      return pageOf(rows.map(present), page);
    },
    async find(tenantId, emailId, id) {
      const row = await store.em().findOne(AttachmentRow, { tenantId, emailId, id });
      return row === null ? null : present(row);
    },
  };
}

const present = (row: Row): AttachmentRecord => ({
  id: row.id,
  filename: row.filename ?? null,
  contentType: row.contentType,
  contentId: row.contentId ?? null,
  disposition: row.disposition,
  sizeBytes: row.sizeBytes ?? null,
});

/** Opens the links of kind `attachment`. */
export function openAttachment(d: AttachmentReading): OpenLink {
  return async ({ tenantId, id: emailId, partId }) => {
    if (partId === null) return null;
    const row = await d.store.em().findOne(AttachmentRow, { tenantId, emailId, id: partId });
    if (row === null || row.sizeBytes === null || row.sizeBytes === undefined) return null;
    const content = await readContent(d, row);
    if (content === null) return null;
    return {
      kind: 'file',
      filename: row.filename ?? 'attachment',
      contentType: row.contentType,
      sizeBytes: row.sizeBytes,
      content,
    };
  };
}

async function readContent(d: AttachmentReading, row: Row): Promise<Readable | null> {
  const { rows } = await d.store.pool.query<{ blob_key: string | null; lines: Buffer | null }>(
    `select blob_key, substring(raw from $3::integer for $4::integer) as lines
     from email_content where tenant_id = $1 and email_id = $2`,
    [row.tenantId, row.emailId, (row.rawOffset ?? 0) + 1, row.rawLength ?? 0],
  );
  const [stored] = rows;
  const hasPlace = typeof row.rawOffset === 'number' && typeof row.rawLength === 'number';
  if (stored === undefined) return null;
  if (stored.blob_key === null && stored.lines === null) {
    // No message yet: what the request held is staged.
    return row.blobKey ? d.blobs.read(row.blobKey) : null;
  }
  if (!hasPlace) return readSubmitted(d, row);
  if (stored.blob_key === null) return decode(Readable.from([stored.lines!]));
  const range = { offset: row.rawOffset!, length: row.rawLength! };
  const lines = await d.blobs.read(stored.blob_key, range);
  return lines === null ? null : decode(lines);
}

/** A message that was submitted as a whole has its files wherever its author put them. */
async function readSubmitted(d: AttachmentReading, row: Row): Promise<Readable | null> {
  const { rows } = await d.store.pool.query<{ blob_key: string | null; raw: Buffer | null }>(
    'select blob_key, raw from email_content where tenant_id = $1 and email_id = $2',
    [row.tenantId, row.emailId],
  );
  const key = rows[0]?.blob_key ?? null;
  const raw = rows[0]?.raw ?? (key === null ? null : await d.blobs.get(key));
  const content = raw === null ? null : decodeShownFile(raw, row.position);
  return content === null ? null : Readable.from([content], { objectMode: false });
}

function decode(lines: Readable): Readable {
  async function* octets(): AsyncGenerator<Buffer> {
    const reader = new Base64Reader();
    for await (const chunk of lines) yield reader.push((chunk as Buffer).toString('latin1'));
    yield reader.end();
    if (reader.problem !== null) throw new Error('a stored attachment is damaged');
  }
  return Readable.from(octets(), { objectMode: false });
}
