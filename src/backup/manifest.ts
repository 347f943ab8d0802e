// What a file says about itself before anything else, and how it is read: by whoever wants to know whether it fits.
import { createHash } from 'node:crypto';
import { deriveKey } from '../store/seal.ts';
import type { Table } from './catalog.ts';
import { BackupDamaged, BackupFailed, readEntries, type Trailer } from './container.ts';

const FORMAT = 'mailstead';
/** Of the container and its names; a newer one is refused. */
const FORMAT_VERSION = 1;
export const MANIFEST = 'manifest.json';
/** Of the entries that are held in memory: secrets, files of the operator, sealed values of a tenant. */
const FILES_MAX_BYTES = 64 * 1024 * 1024;

export interface TenantFacts {
  readonly id: string;
  readonly name: string;
  readonly createdAt: string;
  /** What is under way came along. */
  readonly withQueue: boolean;
  /** Base64; of the key that sealed values are under. */
  readonly salt: string;
}

export interface Manifest {
  readonly format: string;
  readonly formatVersion: number;
  readonly kind: 'appliance' | 'tenant';
  /** ISO; when the snapshot was taken. */
  readonly takenAt: string;
  /** Migrations, in their order. */
  readonly schema: readonly string[];
  /** Who is referred to comes first. */
  readonly tables: readonly Table[];
  /** Hex; tells whether a master secret is the same without telling it. Empty in a tenant's file. */
  readonly secretCheck: string;
  readonly tenant: TenantFacts | null;
}

export const manifestOf = (about: Omit<Manifest, 'format' | 'formatVersion'>): Manifest => ({
  format: FORMAT,
  formatVersion: FORMAT_VERSION,
  ...about,
});

export const checkOf = (secret: string): string =>
  createHash('sha256').update(deriveKey(secret, 'backup check')).digest('hex');

/** Names of entries; parts are numbered so that people can look at them with tar. */
export const tablePart = (table: string, number: number): string =>
  `tables/${table}/${String(number).padStart(6, '0')}`;
export const blobPart = (key: string, number: number): string =>
  `blobs/${key}/${String(number).padStart(6, '0')}`;

/** What `name` is a part of: `tables/email/000000` of `email`. */
export function readName(name: string): { readonly group: string; readonly item: string } {
  const [group = '', item = ''] = name.split('/');
  return { group, item };
}

export interface Verified {
  readonly manifest: Manifest;
  readonly trailer: Trailer;
  /** Of the file's entries below `files/`: secrets and the operator's own, all small. */
  readonly files: ReadonlyMap<string, Buffer>;
}

/** Reads the whole file, and says what is in it when every byte is what was written. */
export async function verifyFile(
  file: string,
  kind: Manifest['kind'],
  about: { readonly onBytes?: (done: number) => void; readonly signal?: AbortSignal } = {},
): Promise<Verified> {
  let manifest: Manifest | null = null;
  let trailer: Trailer | null = null;
  const files = new Map<string, Buffer>();
  let filesBytes = 0;
  const entries = readEntries(file, {
    onTrailer: (read) => (trailer = read),
    ...(about.onBytes === undefined ? {} : { onBytes: about.onBytes }),
  });
  for await (const { name, bytes } of entries) {
    about.signal?.throwIfAborted();
    if (manifest === null) {
      if (name !== MANIFEST) throw new BackupDamaged(`${file} is not a backup of Mailstead.`);
      manifest = readManifest(file, bytes);
      refuseForeign(file, manifest, kind);
    }
    const { group } = readName(name);
    if (group !== 'files' && group !== 'sealed') continue;
    filesBytes += bytes.length;
    if (filesBytes > FILES_MAX_BYTES) throw new BackupDamaged(`${file} holds too much in files/.`);
    files.set(name, bytes);
  }
  if (manifest === null || trailer === null) throw new BackupDamaged(`${file} is empty.`);
  return { manifest, trailer, files };
}

function readManifest(file: string, bytes: Buffer): Manifest {
  const isList = (value: unknown): boolean =>
    Array.isArray(value) && value.every((one) => typeof one === 'string');
  try {
    const read = JSON.parse(bytes.toString()) as Manifest;
    const areTables = read.tables.every(
      ({ name, columns }) => typeof name === 'string' && isList(columns),
    );
    if (areTables && isList(read.schema)) return read;
  } catch {
    // Not one of ours.
  }
  throw new BackupDamaged(`${file} is not a backup of Mailstead.`);
}

function refuseForeign(file: string, manifest: Manifest, kind: Manifest['kind']): void {
  if (manifest.format !== FORMAT) throw new BackupDamaged(`${file} is not a backup of Mailstead.`);
  if (manifest.formatVersion > FORMAT_VERSION) {
    throw new BackupFailed(`${file} was written by a newer Mailstead; use that version.`);
  }
  if (manifest.kind === kind) return;
  throw new BackupFailed(
    kind === 'appliance'
      ? `${file} holds one tenant and not an appliance; use \`tenant import\`.`
      : `${file} holds a whole appliance and not one tenant; use \`restore\`.`,
  );
}
