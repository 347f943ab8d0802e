// Rows out of a table and into one, as COPY writes them in text: what one Postgres wrote every other reads.
import { createHash } from 'node:crypto';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import type { ClientBase } from 'pg';
import { from as copyFrom, to as copyTo } from 'pg-copy-streams';
import { PART_BYTES, type Sum } from './container.ts';

/** Runs `copy (<query>) to stdout` and gives the bytes in parts; what they were. */
export async function copyOut(
  client: ClientBase,
  query: string,
  onPart: (bytes: Buffer) => Promise<void>,
): Promise<Sum> {
  const source = client.query(copyTo(`copy (${query}) to stdout`));
  const hash = createHash('sha256');
  let bytes = 0;
  for await (const part of inParts(source)) {
    hash.update(part);
    bytes += part.length;
    await onPart(part);
  }
  return { rows: source.rowCount, bytes, sha256: hash.digest('hex') };
}

/** Runs `copy <into> from stdin` with these bytes; what they were. */
export async function copyIn(
  client: ClientBase,
  into: string,
  parts: AsyncIterable<Buffer>,
): Promise<Sum> {
  const target = client.query(copyFrom(`copy ${into} from stdin`));
  const hash = createHash('sha256');
  let bytes = 0;
  const counted = async function* (): AsyncGenerator<Buffer> {
    for await (const part of parts) {
      hash.update(part);
      bytes += part.length;
      yield part;
    }
  };
  await pipeline(Readable.from(counted(), { objectMode: true, highWaterMark: 1 }), target);
  return { rows: target.rowCount, bytes, sha256: hash.digest('hex') };
}

/** The same bytes in pieces of PART_BYTES; the last is what is left, and none is empty. */
export async function* inParts(source: AsyncIterable<Uint8Array>): AsyncGenerator<Buffer> {
  let chunks: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of source) {
    for (let rest = chunk; rest.length > 0;) {
      const taken = rest.subarray(0, PART_BYTES - size);
      chunks.push(taken);
      size += taken.length;
      rest = rest.subarray(taken.length);
      if (size < PART_BYTES) continue;
      yield Buffer.concat(chunks);
      chunks = [];
      size = 0;
    }
  }
  if (size > 0) yield Buffer.concat(chunks);
}
