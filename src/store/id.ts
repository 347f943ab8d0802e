// Ids and opaque tokens. Every id in the database is a UUIDv7 (RFC 9562 §5.7) made here, nearly always before the
// insert, so that ids sort by creation and a page of a list is a range of the primary key.
// Within one process ids are strictly increasing: the 12 bits after the version are a counter.
import { createHash, randomBytes, randomFillSync } from 'node:crypto';

const COUNTER_MAX = 0xfff;
const POOL_BYTES = 8 * 1024;

const pool = Buffer.alloc(POOL_BYTES);
let poolOffset = POOL_BYTES;
let lastMs = 0;
let counter = 0;

/** A new UUIDv7, larger than every id this process made before. */
export function newId(nowMs: number = Date.now()): string {
  if (nowMs > lastMs) {
    lastMs = nowMs;
    counter = 0;
  } else if (counter === COUNTER_MAX) {
    lastMs += 1; // RFC 9562 §6.2: run ahead of the clock rather than repeat
    counter = 0;
  } else {
    counter += 1;
  }
  if (poolOffset + 8 > POOL_BYTES) {
    randomFillSync(pool);
    poolOffset = 0;
  }
  const time = lastMs.toString(16).padStart(12, '0');
  const random = pool.toString('hex', poolOffset, poolOffset + 8);
  poolOffset += 8;
  const variant = ((Number.parseInt(random[0]!, 16) & 0x3) | 0x8).toString(16);
  return `${time.slice(0, 8)}-${time.slice(8)}-7${counter.toString(16).padStart(3, '0')}-${variant}${random.slice(1, 4)}-${random.slice(4)}`;
}

/**
 * SQL: a new UUIDv7 made by the database, for rows that follow from others in the same statement. The first half is the
 * time to a quarter of a microsecond, the same for all of a statement (RFC 9562 §6.2, method 3), the second half random.
 */
export const NEW_ID = `encode(overlay(uuid_send(gen_random_uuid()) placing (
  select int8send(((us / 1000) << 16) | 28672 | (us % 1000) * 4096 / 1000)
  from (select (extract(epoch from clock_timestamp()) * 1000000)::bigint as us) t) from 1 for 8), 'hex')::uuid`;

/**
 * Always the same id for the same name and time, shaped as a UUIDv7 of that time: what is written again under it is
 * written once.
 */
export function idNamed(name: string, ms: number): string {
  const time = ms.toString(16).padStart(12, '0');
  const hash = createHash('sha256').update(name).digest('hex');
  const variant = ((Number.parseInt(hash[3]!, 16) & 0x3) | 0x8).toString(16);
  return `${time.slice(0, 8)}-${time.slice(8)}-7${hash.slice(0, 3)}-${variant}${hash.slice(4, 7)}-${hash.slice(7, 19)}`;
}

/** The nil UUID (RFC 9562 §5.9): no id is below it, so walks begin here. */
export const LOWEST_ID = '00000000-0000-0000-0000-000000000000';

const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

/** Whether the text has the form of a UUID of any version. */
export function isUuid(text: string): boolean {
  return UUID.test(text);
}

const ALPHABET = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789';

/** Random letters and digits: `length` characters of log2(62) ≈ 5.95 bits each. */
export function randomText(length: number): string {
  let text = '';
  while (text.length < length) {
    for (const byte of randomBytes(length * 2)) {
      // 248 = 4 × 62: the bytes above would make some characters likelier than others.
      if (byte < 248 && text.length < length) text += ALPHABET[byte % ALPHABET.length];
    }
  }
  return text;
}
