// One tenant's file into an appliance that has others. The file is not believed: every row must be that tenant's, nothing that
// is there is replaced, a domain comes in unverified and proves itself again, a blob is taken only when no other one has its
// name. All rows become visible at once.
import { createHash } from 'node:crypto';
import type { ClientBase } from 'pg';
import type { BlobStore } from '../store/blob.ts';
import { isUuid } from '../store/id.ts';
import { unseal } from '../store/seal.ts';
import { withBackupLock } from './backup.ts';
import { connect, isBlobColumn, quote, quoteAll, readSchema, type Table } from './catalog.ts';
import { BackupDamaged, BackupFailed, readEntries } from './container.ts';
import { copyIn } from './copy.ts';
import { verifyFile, type TenantFacts, type Verified } from './manifest.ts';
import {
  groupEntries,
  matchTables,
  refuseNewer,
  refuseOther,
  type RestoreOptions,
} from './restore.ts';
import { contextOf, keyOf, sealedOf, type CarriedValue } from './sealed-columns.ts';
import { tenantTables } from './tenant-export.ts';

/** The row that the file ends with a `\n`; COPY escapes those inside of values. */
const LINE_END = 10;
/** Never in a copy as Postgres writes it, where it is `\\r`; read, it would end rows, so that others could hide behind it. */
const CARRIAGE_RETURN = 13;
const LISTED_MAX = 10;
const DUPLICATE = '23505';

export interface TenantImportOptions extends Pick<
  RestoreOptions,
  'file' | 'databaseUrl' | 'blobs' | 'onProgress' | 'signal'
> {
  /** The master secret of this appliance. */
  readonly secret: string;
  readonly passphrase: string;
  /** When all rows are there and nobody sees them yet. With its queue, mail would fail at once: no domain is verified here. */
  readonly beforeCommit?: (tenant: TenantFacts) => Promise<void>;
}

export interface TenantImportReport {
  readonly tenantId: string;
  readonly name: string;
  readonly takenAt: string;
  readonly rows: number;
  readonly blobs: number;
  /** Names; each must be verified again before it sends or receives. */
  readonly domains: readonly string[];
  readonly withQueue: boolean;
}

/**
 * Throws BackupFailed with a sentence that says what to do; then nothing has changed. Under the lock of backups: no row names
 * the blobs until the end, and they may lie here for longer than a day.
 */
export async function importTenant(options: TenantImportOptions): Promise<TenantImportReport> {
  return withBackupLock(options.databaseUrl, () => importLocked(options));
}

async function importLocked(options: TenantImportOptions): Promise<TenantImportReport> {
  const onBytes = (step: 'verify' | 'blobs' | 'rows') => (done: number) =>
    options.onProgress?.(step, done);
  const verified = await verifyFile(options.file, 'tenant', {
    onBytes: onBytes('verify'),
    ...(options.signal === undefined ? {} : { signal: options.signal }),
  });
  const { manifest } = verified;
  const { tenant } = manifest;
  // As Postgres spells it, since rows are compared with it.
  if (tenant === null || !isUuid(tenant.id) || tenant.id !== tenant.id.toLowerCase()) {
    throw new BackupDamaged(`${options.file} does not say whose it is.`);
  }
  refuseNewer(manifest);
  const values = await readValues(options, verified, tenant.salt);
  const client = await connect(options.databaseUrl);
  try {
    await refuseOtherSchema(client, verified);
    await refuseThere(client, tenant.id);
    const blobs = await importBlobs(options, onBytes('blobs'));
    await client.query('begin');
    await client.query(
      'insert into tenant (id, name, created_at, imported_at) values ($1, $2, $3, now())',
      [tenant.id, tenant.name, tenant.createdAt],
    );
    await importRows(client, options, { verified, values, onBytes: onBytes('rows') });
    const domains = await readDomains(client, tenant.id);
    await refuseOthersBlobs(client, tenant.id, blobs);
    // Mail of this tenant is signed as its own only.
    await client.query(
      `update email_content set signing_tenant_id = null, signing_domain_id = null
       where tenant_id = $1 and signing_tenant_id <> $1`,
      [tenant.id],
    );
    await options.beforeCommit?.(tenant);
    await client.query('commit');
    return {
      tenantId: tenant.id,
      name: tenant.name,
      takenAt: manifest.takenAt,
      rows: Object.values(verified.trailer.tables).reduce((sum, { rows }) => sum + rows, 0),
      blobs: blobs.size,
      domains,
      withQueue: tenant.withQueue,
    };
  } catch (error) {
    throw explain(error);
  } finally {
    await client.end().catch(() => undefined);
  }
}

/** Two of a kind: what the rules before did not find, somebody else has just made. */
function explain(error: unknown): unknown {
  const { code, table } = error as { code?: string; table?: string };
  if (code !== DUPLICATE) return error;
  return new BackupFailed(
    table === 'api_key'
      ? 'An API key of the file is the key of another tenant here. Revoke one of them, and export again.'
      : `A row of ${table ?? 'the file'} is here already, so the tenant cannot be imported. Nothing was changed.`,
    { cause: error },
  );
}

async function readValues(
  options: TenantImportOptions,
  { files }: Verified,
  salt: string,
): Promise<readonly (CarriedValue & { readonly plain: Buffer })[]> {
  const key = await keyOf(options.passphrase, salt);
  return [...files]
    .filter(([name]) => name.startsWith('sealed/'))
    .flatMap(([, bytes]) => JSON.parse(bytes.toString()) as CarriedValue[])
    .map((value) => {
      try {
        const plain = unseal(key, contextOf(value), Buffer.from(value.value, 'base64'));
        return { ...value, plain };
      } catch (error) {
        throw new BackupFailed('The passphrase is not the one that the file was exported with.', {
          cause: error,
        });
      }
    });
}

async function refuseOtherSchema(client: ClientBase, { manifest }: Verified): Promise<void> {
  const schema = await readSchema(client);
  if (schema.join() === manifest.schema.join()) return;
  throw new BackupFailed(
    `The tenant was exported by a Mailstead of another version (${manifest.schema.at(-1)}, here ${schema.at(-1) ?? 'no tables'}). ` +
      'Bring both appliances to the same version and export again.',
  );
}

async function refuseThere(client: ClientBase, tenantId: string): Promise<void> {
  const { rowCount } = await client.query('select from tenant where id = $1', [tenantId]);
  if (rowCount === 0) return;
  throw new BackupFailed(`The tenant ${tenantId} is here already; nothing was changed.`);
}

/** The blobs of the file, each on the disk or in the bucket. One that is there is either the same or somebody else's. */
async function importBlobs(
  options: TenantImportOptions,
  onBytes: (done: number) => void,
): Promise<ReadonlySet<string>> {
  const keys = new Set<string>();
  const entries = readEntries(options.file, { onBytes });
  for await (const { item, parts } of groupEntries(entries, 'blobs', options.signal)) {
    keys.add(item);
    const there = await hashOfBlob(options.blobs, item);
    if (there === null) {
      await options.blobs.write(item, parts);
      continue;
    }
    // Left by an import that was cut off.
    const hash = createHash('sha256');
    for await (const part of parts) hash.update(part);
    if (hash.digest('hex') === there) continue;
    throw new BackupFailed(`The stored message ${item} is here already and is another one.`);
  }
  return keys;
}

async function hashOfBlob(blobs: BlobStore, key: string): Promise<string | null> {
  const stream = await blobs.read(key);
  if (stream === null) return null;
  const hash = createHash('sha256');
  for await (const chunk of stream as AsyncIterable<Buffer>) hash.update(chunk);
  return hash.digest('hex');
}

interface Rows {
  readonly verified: Verified;
  readonly values: readonly (CarriedValue & { readonly plain: Buffer })[];
  readonly onBytes: (done: number) => void;
}

async function importRows(
  client: ClientBase,
  options: TenantImportOptions,
  d: Rows,
): Promise<void> {
  const { manifest, trailer } = d.verified;
  const { id } = manifest.tenant!;
  const tables = matchTables(manifest.tables, await tenantTables(client));
  const strange = manifest.tables.find(({ name }) => !tables.some((one) => one.name === name));
  if (strange !== undefined) throw new BackupDamaged(`${strange.name} is not a table of a tenant.`);
  const entries = readEntries(options.file, { onBytes: d.onBytes });
  const loaded = new Set<string>();
  for await (const { item, parts } of groupEntries(entries, 'tables', options.signal)) {
    const table = tables.find(({ name }) => name === item);
    if (table === undefined || table.columns[0] !== 'tenant_id' || loaded.has(item)) {
      throw new BackupDamaged(`The rows of ${item} are not in order.`);
    }
    loaded.add(item);
    const columns = quoteAll(table.columns);
    const own = ownRows(parts, id, item);
    const isStaged = OVERRIDES[item] !== undefined || sealedOf(item).length > 0;
    if (isStaged)
      await client.query(`create temp table staged (like ${quote(item)}) on commit drop`);
    const into = isStaged ? 'staged' : quote(item);
    const sum = await copyIn(client, `${into} (${columns})`, own);
    refuseOther(item, sum, trailer);
    if (!isStaged) continue;
    await reseal(client, table, { options, values: d.values, tenantId: id });
    if (item === 'sending_domain') await refuseTaken(client);
    await client.query(
      `insert into ${quote(item)} (${columns}) select ${expressionsOf(table)} from staged`,
    );
    await client.query('drop table staged');
  }
  for (const { name } of tables) {
    if (!loaded.has(name)) refuseOther(name, { rows: 0, bytes: 0 }, trailer);
  }
}

/** A domain has proven nothing to this appliance. */
const OVERRIDES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  sending_domain: {
    status: `'not_started'`,
    sending_verified: 'false',
    receiving_verified: 'false',
    record_checks: `'{}'`,
    verifying_since: 'null',
    check_count: '0',
    checked_at: 'null',
    next_check_at: 'null',
  },
};

const expressionsOf = ({ name, columns }: Table): string =>
  columns.map((column) => OVERRIDES[name]?.[column] ?? quote(column)).join(', ');

/** The rows as they come; throws at the first that is another tenant's. */
async function* ownRows(
  parts: AsyncIterable<Buffer>,
  tenantId: string,
  table: string,
): AsyncGenerator<Buffer> {
  const wanted = Buffer.from(tenantId);
  const refuse = (): never => {
    throw new BackupDamaged(`${table} holds rows of another tenant; nothing was changed.`);
  };
  // Bytes of the row that have been compared; from `wanted.length` on the rest of the row is free.
  let at = 0;
  for await (const part of parts) {
    if (part.includes(CARRIAGE_RETURN)) refuse();
    for (let read = 0; read < part.length;) {
      if (at < wanted.length) {
        const length = Math.min(wanted.length - at, part.length - read);
        if (part.compare(wanted, at, at + length, read, read + length) !== 0) refuse();
        at += length;
        read += length;
        continue;
      }
      const end = part.indexOf(LINE_END, read);
      read = end < 0 ? part.length : end + 1;
      if (end >= 0) at = 0;
    }
    yield part;
  }
  if (at !== 0) refuse();
}

/** Puts what the passphrase opened under the secret of this appliance. */
async function reseal(
  client: ClientBase,
  { name }: Table,
  d: Pick<Rows, 'values'> & {
    readonly options: TenantImportOptions;
    readonly tenantId: string;
  },
): Promise<void> {
  for (const column of sealedOf(name)) {
    const set = column.key.map((one, at) => `${quote(one)}::text = $${at + 2}`).join(' and ');
    const carried = d.values.filter((one) => one.table === name && one.column === column.column);
    for (const { key, plain } of carried) {
      const sealed = column.close(d.options.secret, d.tenantId, key, plain);
      await client.query(`update staged set ${quote(column.column)} = $1 where ${set}`, [
        sealed,
        ...column.key.map((one) => key[one]),
      ]);
    }
    const { rowCount } = await client.query(
      `select from staged where ${quote(column.column)} = '\\x'::bytea limit 1`,
    );
    if (rowCount !== 0)
      throw new BackupDamaged(`A sealed value of ${name} is missing in the file.`);
  }
}

/** Who has verified a domain here has it. */
async function refuseTaken(client: ClientBase): Promise<void> {
  const { rows } = await client.query<{ name: string }>(
    `select d.name from sending_domain d
     where (d.sending_verified or d.receiving_verified) and exists (select from staged s where s.name = d.name)
     order by d.name limit ${LISTED_MAX}`,
  );
  if (rows.length === 0) return;
  throw new BackupFailed(
    `Another tenant has verified ${rows.map(({ name }) => name).join(', ')} here. Delete the domain there or in the exported ` +
      'tenant first.',
  );
}

async function readDomains(client: ClientBase, tenantId: string): Promise<readonly string[]> {
  const { rows } = await client.query<{ name: string }>(
    'select name from sending_domain where tenant_id = $1 order by name',
    [tenantId],
  );
  return rows.map(({ name }) => name);
}

/** A row that names a blob which did not come with it would show somebody else's mail. */
async function refuseOthersBlobs(
  client: ClientBase,
  tenantId: string,
  keys: ReadonlySet<string>,
): Promise<void> {
  for (const { name, columns } of await tenantTables(client)) {
    for (const column of columns.filter(isBlobColumn)) {
      const { rows } = await client.query<{ key: string }>(
        `select distinct ${quote(column)} as key from ${quote(name)}
         where tenant_id = $1 and ${quote(column)} is not null and ${quote(column)} <> all ($2::text[]) limit 1`,
        [tenantId, [...keys]],
      );
      if (rows[0] === undefined) continue;
      throw new BackupFailed(
        `A row of ${name} names the stored message ${rows[0].key}, which is not in the file; nothing was changed.`,
      );
    }
  }
}
