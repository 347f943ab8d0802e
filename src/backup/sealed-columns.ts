// Values of a tenant that are sealed with the master secret. They go to another appliance sealed with a passphrase, and are
// sealed there with its own secret.
import { randomBytes, scrypt } from 'node:crypto';
import { promisify } from 'node:util';
import { sealContext } from '../domains/create.ts';
import { deriveKey, seal, unseal } from '../store/seal.ts';
import { sealSecret, unsealSecret } from '../webhooks/secrets.ts';
import { BackupFailed } from './container.ts';

const KEY_BYTES = 32;
const SALT_BYTES = 16;
/** 64 MiB and some tenths of a second for each guess. */
const SCRYPT = { N: 2 ** 16, r: 8, p: 1, maxmem: 128 * 1024 * 1024 };
export const PASSPHRASE_MIN_CHARACTERS = 12;

type Row = Readonly<Record<string, unknown>>;

export interface SealedColumn {
  readonly table: string;
  readonly column: string;
  /** Of the row, the tenant's id left out. */
  readonly key: readonly string[];
  /** What the column holds; `secret` is the master secret. */
  open(secret: string, tenantId: string, row: Row, sealed: Buffer): Buffer;
  close(secret: string, tenantId: string, row: Row, plain: Buffer): Buffer;
}

const dkimKey = (secret: string): Buffer => deriveKey(secret, 'dkim keys at rest');
const webhookKey = (secret: string): Buffer => deriveKey(secret, 'webhook secrets at rest');
const text = (row: Row, column: string): string => String(row[column]);

const webhookColumn = (column: string): SealedColumn => ({
  table: 'webhook',
  column,
  key: ['id'],
  open: (secret, tenantId, row, sealed) =>
    Buffer.from(unsealSecret(webhookKey(secret), { tenantId, webhookId: text(row, 'id') }, sealed)),
  close: (secret, tenantId, row, plain) =>
    sealSecret(webhookKey(secret), { tenantId, webhookId: text(row, 'id') }, plain.toString()),
});

export const SEALED: readonly SealedColumn[] = [
  {
    table: 'dkim_key',
    column: 'private_key_sealed',
    key: ['domain_id', 'selector'],
    open: (secret, _tenantId, row, sealed) =>
      unseal(dkimKey(secret), sealContext(text(row, 'domain_id'), text(row, 'selector')), sealed),
    close: (secret, _tenantId, row, plain) =>
      seal(dkimKey(secret), sealContext(text(row, 'domain_id'), text(row, 'selector')), plain),
  },
  webhookColumn('secret_sealed'),
  webhookColumn('secret_previous_sealed'),
];

export const sealedOf = (table: string): readonly SealedColumn[] =>
  SEALED.filter((one) => one.table === table);

/** A column that is sealed by its name and of which the list above knows nothing would arrive unreadable. */
export function refuseUnknownSealed(table: string, columns: readonly string[]): void {
  const known = sealedOf(table).map(({ column }) => column);
  const unknown = columns.filter((one) => /(?:^|_)sealed(?:_|$)/.test(one) && !known.includes(one));
  if (unknown.length > 0) throw new Error(`nobody knows how ${table}.${unknown[0]} is sealed`);
}

/** A sealed value on its way: JSON in the file. */
export interface CarriedValue {
  readonly table: string;
  readonly column: string;
  readonly key: Readonly<Record<string, string>>;
  /** Base64, sealed with the key of the passphrase. */
  readonly value: string;
}

export const contextOf = ({ table, column, key }: Omit<CarriedValue, 'value'>): string =>
  `tenant file ${table} ${column} ${JSON.stringify(key)}`;

export const newSalt = (): string => randomBytes(SALT_BYTES).toString('base64');

/** Throws BackupFailed when the passphrase is too short to protect anything. */
export async function keyOf(passphrase: string, salt: string): Promise<Buffer> {
  if ([...passphrase].length < PASSPHRASE_MIN_CHARACTERS) {
    throw new BackupFailed(
      `The passphrase protects the tenant's DKIM keys and webhook secrets: it must have at least ${PASSPHRASE_MIN_CHARACTERS} characters.`,
    );
  }
  const derive = promisify<string, Buffer, number, typeof SCRYPT, Buffer>(scrypt);
  return derive(passphrase, Buffer.from(salt, 'base64'), KEY_BYTES, SCRYPT);
}
