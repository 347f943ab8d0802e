// One tenant as one file: its rows of one moment, the blobs that they name, its sealed values under a passphrase.
//
// Mail that is still under way, and everything else that would go on by itself (a broadcast that is not through, runs of
// automations, calls of webhooks), stays with the appliance that has it: else both would do it. With the queue it comes
// along, and the appliance that had it does not deliver for this tenant any more.
import { resolve } from 'node:path';
import type { ClientBase } from 'pg';
import { unlinkIfThere } from '../store/files.ts';
import { seal } from '../store/seal.ts';
import {
  blobKeyQuery,
  inSnapshot,
  refuseMigrated,
  snapshotTime,
  withBackupLock,
  writeBlobs,
  writeKeys,
  writeTables,
  type BackupOptions,
} from './backup.ts';
import { quote, quoteAll, readSchema, readTables, type Table } from './catalog.ts';
import { BackupFailed, createBackupFile, PART_BYTES, refuseExisting } from './container.ts';
import type { BackupWriter } from './container.ts';
import { MANIFEST, manifestOf, type TenantFacts } from './manifest.ts';
import {
  contextOf,
  keyOf,
  newSalt,
  refuseUnknownSealed,
  sealedOf,
  type CarriedValue,
} from './sealed-columns.ts';

/** What proves a domain proves it here and not there. */
const NOT_CARRIED: ReadonlySet<string> = new Set(['domain_claim']);
/** Sealed values that go into one entry: each is some kilobytes. */
const VALUES_PER_ENTRY = 1_000;

export interface TenantExportOptions extends Pick<
  BackupOptions,
  'file' | 'databaseUrl' | 'blobs' | 'secret' | 'onProgress' | 'signal'
> {
  /** Of the tenant, and that it exists is for the caller to say. */
  readonly tenantId: string;
  readonly passphrase: string;
  readonly withQueue: boolean;
}

export interface TenantExportReport {
  readonly file: string;
  readonly bytes: number;
  readonly takenAt: string;
  readonly rows: number;
  readonly blobs: number;
  /** Emails that stayed where they are since they are under way. */
  readonly leftEmails: number;
  /** Blobs that rows name and that the store did not have, at most 20: with them the file cannot be imported. */
  readonly missingBlobs: readonly string[];
}

/** Throws BackupFailed; whatever it throws, no file is left. With the queue, the caller has paused the tenant. */
export async function exportTenant(options: TenantExportOptions): Promise<TenantExportReport> {
  await refuseExisting(options.file);
  const salt = newSalt();
  const key = await keyOf(options.passphrase, salt);
  return withBackupLock(options.databaseUrl, async (guard) => {
    const writer = await createBackupFile(options.file);
    const keyFile = `${resolve(options.file)}.blobs.part`;
    try {
      const snapshot = await inSnapshot(options.databaseUrl, async (client) => {
        const tables = await tenantTables(client);
        const tenant = await readTenant(client, options, salt);
        const takenAt = await snapshotTime(client);
        const tries = options.withQueue ? await countTries(client, options.tenantId) : null;
        const schema = await readSchema(client);
        const manifest = manifestOf({
          kind: 'tenant',
          takenAt,
          schema,
          tables,
          secretCheck: '',
          tenant,
        });
        await writer.add({ name: MANIFEST, bytes: Buffer.from(JSON.stringify(manifest)) });
        await writeSealed(client, { ...options, writer, tables, key });
        const where = (table: Table): string => whereOf(table, options);
        const sums = await writeTables(client, {
          writer,
          guard,
          tables,
          queryOf: (table) =>
            `select ${expressionsOf(table)} from ${quote(table.name)} t where ${where(table)}`,
          onBytes: (bytes) => options.onProgress?.({ step: 'rows', bytes }),
          signal: options.signal,
        });
        await writeKeys(client, keyFile, blobKeyQuery(tables, where));
        await refuseMigrated(options.databaseUrl, schema);
        const { rows } = await client.query<{ count: string }>(
          'select count(*) from email where tenant_id = $1',
          [options.tenantId],
        );
        return { sums, takenAt, tries, emails: Number(rows[0]!.count) };
      });
      const blobs = await writeBlobs(options, { writer, keyFile, guard });
      guard();
      if (snapshot.tries !== null) await refuseTried(options, snapshot.tries);
      const bytes = await writer.finish({
        tables: snapshot.sums,
        blobs: { count: blobs.count, bytes: blobs.bytes },
      });
      return {
        file: resolve(options.file),
        bytes,
        takenAt: snapshot.takenAt,
        rows: Object.values(snapshot.sums).reduce((sum, { rows }) => sum + rows, 0),
        blobs: blobs.count,
        leftEmails: snapshot.emails - (snapshot.sums['email']?.rows ?? 0),
        missingBlobs: blobs.missing,
      };
    } catch (error) {
      await writer.abandon();
      throw error;
    } finally {
      await unlinkIfThere(keyFile);
    }
  });
}

/** How often all mail of the tenant has been tried. Throws BackupFailed while any of it is being delivered. */
async function countTries(client: ClientBase, tenantId: string): Promise<string> {
  const { rows } = await client.query<{ tries: string; open: string }>(
    `select coalesce(sum(attempts), 0)::text as tries, count(*) filter (where state = 'in_flight') as open
     from delivery where tenant_id = $1`,
    [tenantId],
  );
  if (rows[0]!.open !== '0') throw stillSending();
  return rows[0]!.tries;
}

/** What a worker claimed after the snapshot, before it had seen the pause, would be sent here and there. */
async function refuseTried(
  { databaseUrl, tenantId }: Pick<TenantExportOptions, 'databaseUrl' | 'tenantId'>,
  tries: string,
): Promise<void> {
  await inSnapshot(databaseUrl, async (client) => {
    if ((await countTries(client, tenantId)) !== tries) throw stillSending();
  });
}

const stillSending = (): BackupFailed =>
  new BackupFailed(
    'Mail of the tenant was being delivered here while it was exported with its queue; export again.',
  );

/** Tables whose rows are a tenant's, its id first. */
export async function tenantTables(client: ClientBase): Promise<readonly Table[]> {
  const tables = (await readTables(client))
    .filter(({ name, columns }) => columns.includes('tenant_id') && !NOT_CARRIED.has(name))
    .map(({ name, columns }) => ({
      name,
      columns: ['tenant_id', ...columns.filter((one) => one !== 'tenant_id')],
    }));
  for (const { name, columns } of tables) refuseUnknownSealed(name, columns);
  return tables;
}

async function readTenant(
  client: ClientBase,
  options: TenantExportOptions,
  salt: string,
): Promise<TenantFacts> {
  const { rows } = await client.query<{ name: string; at: number }>(
    'select name, (extract(epoch from created_at) * 1000)::float8 as at from tenant where id = $1',
    [options.tenantId],
  );
  const [found] = rows;
  if (found === undefined) throw new BackupFailed(`There is no tenant ${options.tenantId}.`);
  return {
    id: options.tenantId,
    name: found.name,
    createdAt: new Date(found.at).toISOString(),
    withQueue: options.withQueue,
    salt,
  };
}

/** The columns; what is sealed travels elsewhere, and would be of no use under another secret. */
function expressionsOf({ name, columns }: Table): string {
  const sealed = sealedOf(name).map(({ column }) => column);
  return columns
    .map((column) =>
      sealed.includes(column)
        ? `case when t.${quote(column)} is not null then '\\x'::bytea end`
        : `t.${quote(column)}`,
    )
    .join(', ');
}

/** Deliveries that may still go out. */
const OPEN = `(q.state in ('scheduled', 'preparing', 'ready', 'in_flight', 'deferred')
  or (q.state = 'unknown' and q.unknowns < 2))`;

/** What would go on by itself stays, table by table; `t` is the row. */
const STAYS: Readonly<Record<string, string>> = {
  outbox: 'true',
  forwarding_task: 'true',
  attachment_fetch: 'true',
  webhook_event: `t.status in ('pending', 'attempting')`,
  automation_run: `t.status = 'running'`,
  automation_run_step: `exists (select from automation_run r
    where r.tenant_id = t.tenant_id and r.id = t.run_id and r.status = 'running')`,
  receiving_replay: `t.status = 'running'`,
  contact_import: `t.status in ('queued', 'in_progress')`,
  contact_import_error: `exists (select from contact_import i
    where i.tenant_id = t.tenant_id and i.id = t.import_id and i.status in ('queued', 'in_progress'))`,
  broadcast: `t.status in ('scheduled', 'queued')`,
  broadcast_recipient: `exists (select from broadcast b
    where b.tenant_id = t.tenant_id and b.id = t.broadcast_id and b.status in ('scheduled', 'queued'))`,
};

function whereOf(
  { name, columns }: Table,
  { tenantId, withQueue }: Pick<TenantExportOptions, 'tenantId' | 'withQueue'>,
): string {
  if (!/^[0-9a-f-]{36}$/.test(tenantId)) throw new Error('a tenant is named by its id');
  const conditions = [`t.tenant_id = '${tenantId}'`];
  if (withQueue) return conditions[0]!;
  const stays = STAYS[name];
  if (stays !== undefined) conditions.push(`not (${stays})`);
  const email = name === 'email' ? 'id' : columns.includes('email_id') ? 'email_id' : null;
  if (email !== null) {
    conditions.push(
      `not exists (select from delivery q where q.tenant_id = t.tenant_id and q.email_id = t.${email} and ${OPEN})`,
    );
  }
  return conditions.join(' and ');
}

async function writeSealed(
  client: ClientBase,
  d: Pick<TenantExportOptions, 'tenantId' | 'secret'> & {
    readonly writer: BackupWriter;
    readonly tables: readonly Table[];
    readonly key: Buffer;
  },
): Promise<void> {
  const values: CarriedValue[] = [];
  for (const column of d.tables.flatMap(({ name }) => sealedOf(name))) {
    const { rows } = await client.query<Record<string, unknown>>(
      `select ${quoteAll([...column.key, column.column])} from ${quote(column.table)}
       where tenant_id = $1 and ${quote(column.column)} is not null`,
      [d.tenantId],
    );
    for (const row of rows) {
      const about = {
        table: column.table,
        column: column.column,
        key: Object.fromEntries(column.key.map((one) => [one, String(row[one])])),
      };
      const plain = openValue(() =>
        column.open(d.secret, d.tenantId, row, row[column.column] as Buffer),
      );
      values.push({ ...about, value: seal(d.key, contextOf(about), plain).toString('base64') });
    }
  }
  for (let at = 0, number = 0; at < values.length; at += VALUES_PER_ENTRY, number += 1) {
    const bytes = Buffer.from(JSON.stringify(values.slice(at, at + VALUES_PER_ENTRY)));
    if (bytes.length > PART_BYTES) throw new Error('sealed values are larger than a part');
    await d.writer.add({ name: `sealed/${String(number).padStart(6, '0')}`, bytes });
  }
}

function openValue(open: () => Buffer): Buffer {
  try {
    return open();
  } catch (error) {
    throw new BackupFailed(
      'What is sealed in the database cannot be read with the master secret of this command; set MAILSTEAD_SECRET or ' +
        "MAILSTEAD_DATA_DIR as the appliance's are.",
      { cause: error },
    );
  }
}
