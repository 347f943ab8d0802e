// Blobs in a bucket that speaks S3, in the same order as on disk (two characters, then the key), so that one can be
// copied into the other. Large ones are written in parts and read in pieces: a peer that reads slowly never keeps a
// connection to the bucket waiting, and a piece that arrives cut short is asked for again. The library is loaded when
// the first blob is touched, so that nobody else pays for it.
import { Readable } from 'node:stream';
import type * as Sdk from '@aws-sdk/client-s3';
import { BlobsUnavailable } from './blobs-unavailable.ts';
import { BLOB_KEY, MARK_NAME, type BlobStore, type MarkedBlobStore } from './blob.ts';

/** S3 takes no part below 5 MiB but the last. With what is being sent, a write holds twice this. */
const PART_BYTES = 8 * 1024 * 1024;
/** Held by each that is being read. */
const PIECE_BYTES = 1024 * 1024;
const CONNECT_MS = 3_000;
/** Of one try, to the beginning of the answer; and of a connection on which nothing moves. */
const ANSWER_MS = 10_000;
/** Of one operation, with all of its tries. */
const OPERATION_MS = 25_000;
/** The same for a part on its way there: 8 MiB at 150 KB/s. */
const UPLOAD_MS = 60_000;
/** Tries of one request, and of one body that arrives cut short. */
const TRIES_MAX = 3;
const RETRY_MS = 200;
const SOCKETS_MAX = 64;
const LISTED = 1_000;
const MARK_MAX_BYTES = 1_024;

type Library = typeof Sdk;

interface Bucket {
  readonly sdk: Library;
  readonly client: Sdk.S3Client;
}

/** One request with its time limit. */
type Ask = <T>(
  work: (bucket: Bucket, options: Limits) => Promise<T>,
  about?: { readonly isUpload: boolean },
) => Promise<T>;

interface Limits {
  readonly abortSignal: AbortSignal;
  readonly requestTimeout: number;
}

/**
 * `url` as in MAILSTEAD_BLOB_STORE: `s3://[user:password@]bucket[/prefix][?endpoint=…&region=…]`. Asks nobody yet. What
 * is thrown later is a BlobsUnavailable where another try may help. `answerMs`: 10 s unless a test is in a hurry.
 */
export function openS3Blobs(url: string, { answerMs = ANSWER_MS } = {}): MarkedBlobStore {
  const place = readPlace(url);
  let opening: Promise<Bucket> | null = null;
  const open = (): Promise<Bucket> => (opening ??= connect(place, answerMs));
  const ask: Ask = async (work, { isUpload } = { isUpload: false }) => {
    const bucket = await open();
    try {
      return await work(bucket, {
        abortSignal: AbortSignal.timeout(isUpload ? UPLOAD_MS : OPERATION_MS),
        requestTimeout: isUpload ? UPLOAD_MS : answerMs,
      });
    } catch (error) {
      throw isOutage(error)
        ? new BlobsUnavailable(`the bucket ${place.bucket} cannot be used: ${reasonOf(error)}`, {
            cause: error,
          })
        : error;
    }
  };
  const at = (key: string): { readonly Bucket: string; readonly Key: string } => {
    if (!BLOB_KEY.test(key)) throw new Error('a blob key is a UUID');
    return { Bucket: place.bucket, Key: `${place.prefix}${key.slice(-2)}/${key}` };
  };
  const markAt = { Bucket: place.bucket, Key: `${place.prefix}${MARK_NAME}` };
  const keyOf = (name: string): string | null => {
    const [folder, key, ...more] = name.slice(place.prefix.length).split('/');
    const isOurs = key !== undefined && more.length === 0 && BLOB_KEY.test(key);
    return isOurs && folder === key.slice(-2) ? key : null;
  };

  const putObject = (where: ReturnType<typeof at>, bytes: Uint8Array): Promise<unknown> =>
    ask(
      ({ sdk, client }, options) =>
        client.send(
          new sdk.PutObjectCommand({ ...where, Body: bytes, ContentLength: bytes.length }),
          options,
        ),
      { isUpload: true },
    );
  /** The bytes from `range` on, whole, or null when there is nothing. */
  const fetchObject = async (
    where: ReturnType<typeof at>,
    range: string | null,
  ): Promise<{ readonly bytes: Buffer; readonly sizeBytes: number } | null> => {
    for (let tries = 1; ; tries++) {
      try {
        return await ask(async ({ sdk, client }, options) => {
          const command = new sdk.GetObjectCommand(
            range === null ? where : { ...where, Range: range },
          );
          const { Body, ContentLength, ContentRange } = await client.send(command, options);
          const bytes = await collect(Body as Readable, options.abortSignal);
          if (ContentLength !== undefined && bytes.length !== ContentLength) {
            throw cutShort(`${bytes.length} of ${ContentLength} bytes arrived`);
          }
          const total = /\/(\d+)$/.exec(ContentRange ?? '')?.[1];
          return { bytes, sizeBytes: total === undefined ? bytes.length : Number(total) };
        });
      } catch (error) {
        const name = nameOf(error);
        if (name === 'NoSuchKey') return null;
        // Nothing from there on: the blob is empty, or shorter than that.
        if (name === 'InvalidRange') return { bytes: Buffer.alloc(0), sizeBytes: 0 };
        if (tries >= TRIES_MAX || !isCutShort(error)) throw error;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS * tries));
      }
    }
  };
  const removeObject = (where: ReturnType<typeof at>): Promise<unknown> =>
    ask(({ sdk, client }, options) =>
      client.send(new sdk.DeleteObjectCommand(where), options),
    ).catch((error: unknown) => {
      // Not every server takes it for done when there is nothing.
      if (nameOf(error) !== 'NoSuchKey') throw error;
    });

  /** In parts, begun with the first one. */
  const writeParts = async (
    where: ReturnType<typeof at>,
    parts: AsyncIterable<Buffer>,
  ): Promise<void> => {
    const { UploadId } = await ask(({ sdk, client }, options) =>
      client.send(new sdk.CreateMultipartUploadCommand(where), options),
    );
    const upload = { ...where, UploadId };
    try {
      const done: { ETag: string | undefined; PartNumber: number }[] = [];
      for await (const Body of parts) {
        const PartNumber = done.length + 1;
        const { ETag } = await ask(
          ({ sdk, client }, options) =>
            client.send(
              new sdk.UploadPartCommand({
                ...upload,
                PartNumber,
                Body,
                ContentLength: Body.length,
              }),
              options,
            ),
          { isUpload: true },
        );
        done.push({ ETag, PartNumber });
      }
      const MultipartUpload = { Parts: done };
      await ask(({ sdk, client }, options) =>
        client.send(
          new sdk.CompleteMultipartUploadCommand({ ...upload, MultipartUpload }),
          options,
        ),
      );
    } catch (error) {
      // What cannot be removed now is found by its age (list).
      await ask(({ sdk, client }, options) =>
        client.send(new sdk.AbortMultipartUploadCommand(upload), options),
      ).catch(() => undefined);
      throw error;
    }
  };

  const write: BlobStore['write'] = async (key, chunks) => {
    const where = at(key);
    const parts = inParts(chunks)[Symbol.asyncIterator]();
    let isBegun = false;
    try {
      const first = await parts.next();
      const bytes = first.done === true ? Buffer.alloc(0) : first.value;
      isBegun = true;
      if (bytes.length < PART_BYTES) await putObject(where, bytes);
      else await writeParts(where, after(bytes, parts));
    } catch (error) {
      await parts.return?.(undefined);
      // Its answer may have been lost rather than the bytes.
      if (isBegun) await removeObject(where).catch(() => undefined);
      throw error;
    }
  };

  return {
    write,
    put: (key, bytes) => write(key, one(bytes)),
    async get(key) {
      return (await fetchObject(at(key), null))?.bytes ?? null;
    },
    async read(key, range) {
      const where = at(key);
      const offset = range?.offset ?? 0;
      const wanted = range?.length ?? Infinity;
      const piece = (from: number, left: number): ReturnType<typeof fetchObject> =>
        fetchObject(where, `bytes=${from}-${from + Math.min(left, PIECE_BYTES) - 1}`);
      // Asked for here, so that a blob that is not there is null and not an error of the stream.
      const first = await piece(offset, Math.max(1, wanted));
      if (first === null) return null;
      const end = Math.min(first.sizeBytes, offset + wanted);
      const pieces = async function* (): AsyncGenerator<Buffer> {
        let { bytes } = first;
        for (let from = offset; from < end;) {
          yield bytes;
          from += bytes.length;
          if (from >= end) return;
          const next = await piece(from, end - from);
          if (next === null || next.bytes.length === 0) {
            throw new Error('the blob was removed while it was read');
          }
          ({ bytes } = next);
        }
      };
      return Readable.from(pieces(), { objectMode: false });
    },
    async remove(key) {
      await removeObject(at(key));
    },
    async *list(writtenBefore) {
      let token: string | undefined;
      do {
        const page = await ask(({ sdk, client }, options) =>
          client.send(
            new sdk.ListObjectsV2Command({
              Bucket: place.bucket,
              Prefix: place.prefix,
              MaxKeys: LISTED,
              ...(token === undefined ? {} : { ContinuationToken: token }),
            }),
            options,
          ),
        );
        for (const { Key = '', LastModified } of page.Contents ?? []) {
          const key = keyOf(Key);
          if (key !== null && LastModified !== undefined && LastModified < writtenBefore) yield key;
        }
        token = page.NextContinuationToken;
      } while (token !== undefined);
      await abortOldUploads(ask, { place, isOurs: (name) => keyOf(name) !== null, writtenBefore });
    },
    async readMark() {
      const found = await fetchObject(markAt, `bytes=0-${MARK_MAX_BYTES - 1}`);
      return found === null ? null : found.bytes.toString('utf8').trim();
    },
    async writeMark(text) {
      // No condition that only some servers know: whoever writes looks at it again (blob-identity.ts).
      await putObject(markAt, Buffer.from(`${text}\n`));
    },
  };
}

interface Place {
  readonly bucket: string;
  /** Empty, or with a slash at its end. */
  readonly prefix: string;
  readonly endpoint: string | null;
  readonly region: string | null;
  readonly user: string;
  readonly password: string;
}

function readPlace(text: string): Place {
  const url = new URL(text);
  const path = url.pathname.replace(/^\/+|\/+$/g, '');
  return {
    bucket: url.hostname,
    prefix: path === '' ? '' : `${path}/`,
    endpoint: url.searchParams.get('endpoint'),
    region: url.searchParams.get('region'),
    user: decodeURIComponent(url.username),
    password: decodeURIComponent(url.password),
  };
}

async function connect(place: Place, answerMs: number): Promise<Bucket> {
  // Read only where it is used: it brings hundreds of files.
  const sdk = await import('@aws-sdk/client-s3');
  const client = new sdk.S3Client({
    // A name of a bucket is no name in the DNS of who runs the server next door.
    ...(place.endpoint === null ? {} : { endpoint: place.endpoint, forcePathStyle: true }),
    ...(place.region === null
      ? place.endpoint === null
        ? {}
        : { region: 'us-east-1' }
      : { region: place.region }),
    // Without them the library looks where it always does: environment, files, the machine's role.
    ...(place.user === ''
      ? {}
      : { credentials: { accessKeyId: place.user, secretAccessKey: place.password } }),
    maxAttempts: TRIES_MAX,
    // What other servers than Amazon's do not know either way.
    requestChecksumCalculation: 'WHEN_REQUIRED',
    responseChecksumValidation: 'WHEN_REQUIRED',
    requestHandler: {
      connectionTimeout: CONNECT_MS,
      requestTimeout: answerMs,
      throwOnRequestTimeout: true,
      socketTimeout: answerMs,
      httpAgent: { maxSockets: SOCKETS_MAX, keepAlive: true },
      httpsAgent: { maxSockets: SOCKETS_MAX, keepAlive: true },
    },
  });
  return { sdk, client };
}

/** What was begun before, and never completed. A server that cannot list them has rules of its own for that. */
async function abortOldUploads(
  ask: Ask,
  about: {
    readonly place: Place;
    readonly isOurs: (name: string) => boolean;
    readonly writtenBefore: Date;
  },
): Promise<void> {
  const { place, isOurs, writtenBefore } = about;
  let from: { KeyMarker?: string; UploadIdMarker?: string } = {};
  for (;;) {
    const page = await ask(({ sdk, client }, options) =>
      client.send(
        new sdk.ListMultipartUploadsCommand({
          Bucket: place.bucket,
          Prefix: place.prefix,
          MaxUploads: LISTED,
          ...from,
        }),
        options,
      ),
    ).catch((error: unknown) => {
      if (nameOf(causeOf(error)) === 'NotImplemented') return null;
      throw error;
    });
    if (page === null) return;
    for (const { Key = '', UploadId, Initiated } of page.Uploads ?? []) {
      if (!isOurs(Key) || Initiated === undefined || Initiated >= writtenBefore) continue;
      await ask(({ sdk, client }, options) =>
        client.send(
          new sdk.AbortMultipartUploadCommand({ Bucket: place.bucket, Key, UploadId }),
          options,
        ),
      ).catch((error: unknown) => {
        if (nameOf(causeOf(error)) !== 'NoSuchUpload') throw error;
      });
    }
    if (page.IsTruncated !== true || page.NextKeyMarker === undefined) return;
    from = {
      KeyMarker: page.NextKeyMarker,
      ...(page.NextUploadIdMarker === undefined ? {} : { UploadIdMarker: page.NextUploadIdMarker }),
    };
  }
}

// oxlint-disable-next-line typescript/require-await -- an async iterable of one
async function* one(bytes: Uint8Array): AsyncGenerator<Uint8Array> {
  yield bytes;
}

/** The same bytes in parts of PART_BYTES; the last is shorter, or there is none. Copies: a chunk may be overwritten. */
async function* inParts(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Buffer> {
  let pieces: Buffer[] = [];
  let sizeBytes = 0;
  for await (const chunk of chunks) {
    for (let from = 0; from < chunk.length;) {
      const piece = Buffer.from(chunk.subarray(from, from + PART_BYTES - sizeBytes));
      pieces.push(piece);
      sizeBytes += piece.length;
      from += piece.length;
      if (sizeBytes < PART_BYTES) continue;
      const part = Buffer.concat(pieces);
      pieces = [];
      sizeBytes = 0;
      yield part;
    }
  }
  if (sizeBytes > 0) yield Buffer.concat(pieces);
}

async function* after(first: Buffer, rest: AsyncIterator<Buffer>): AsyncGenerator<Buffer> {
  yield first;
  for (let next = await rest.next(); next.done !== true; next = await rest.next()) yield next.value;
}

/** Rejects when the time is over, too: a server that sends a byte now and then keeps nobody. */
async function collect(body: Readable, signal: AbortSignal): Promise<Buffer> {
  const stop = (): void => void body.destroy(cutShort('it took too long'));
  if (signal.aborted) stop();
  signal.addEventListener('abort', stop, { once: true });
  try {
    const parts: Buffer[] = [];
    for await (const part of body as AsyncIterable<Buffer>) parts.push(part);
    return Buffer.concat(parts);
  } catch (error) {
    throw error instanceof Error && nameOf(error) === CUT_SHORT ? error : cutShort(error);
  } finally {
    signal.removeEventListener('abort', stop);
  }
}

const CUT_SHORT = 'CutShort';

function cutShort(why: unknown): Error {
  const message = 'the bytes of a blob arrived cut short';
  const error =
    typeof why === 'string' ? new Error(`${message}: ${why}`) : new Error(message, { cause: why });
  error.name = CUT_SHORT;
  return error;
}

const isCutShort = (error: unknown): boolean => nameOf(causeOf(error)) === CUT_SHORT;

/** What the bucket said, or what became of the question. */
const causeOf = (error: unknown): unknown =>
  error instanceof BlobsUnavailable ? error.cause : error;

const nameOf = (error: unknown): string => (error instanceof Error ? error.name : '');

/**
 * Answers about one object. All else may be better later, a wrong key or a missing bucket too: mail waits for the operator.
 * Not the library's `NotFound`, which is any 404 that does not say of what: a proxy's, before a bucket that is away.
 */
const ANSWERS = new Set(['NoSuchKey', 'InvalidRange']);

const reasonOf = (error: unknown): string => {
  const { name, message, code } = error as Error & { readonly code?: string };
  return [name, code ?? message].filter((part) => part && part !== 'Error').join(', ');
};

const isOutage = (error: unknown): boolean => !ANSWERS.has(nameOf(error));
