// The body of a request: JSON in UTF-8 (RFC 8259 §8.1), plain or compressed, whatever its content type says.
// Refuses what is too large (413), not UTF-8 or not JSON (400), and what is nested or split so far that it
// would cost more to look at than to send (400 when the bytes show it, before anything is built of them; else 422).
// Large attachments go to disk while they arrive (spool.ts) and are never held. All bodies of this process together have a budget; beyond it, and only for large ones, the answer is 503.
// A form with a file is not read here (upload.ts).
import { isUtf8 } from 'node:buffer';
import type { Readable } from 'node:stream';
import { createBrotliDecompress, createGunzip, createInflate } from 'node:zlib';
import type { NextFunction, Request, RequestHandler, Response } from 'express';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import { tenantOf } from './authenticate.ts';
import { emptyItems } from './batch-items.ts';
import { tooMuchAtOnce, type BodyBudget } from './body-budget.ts';
import { createJsonScanner, type JsonScanner } from './json-scanner.ts';
import { isAttachmentContent, setSpool, type RequestSpool, type Spool } from './spool.ts';
import { isUpload } from './upload.ts';

/** 40 MB of attachments after base64, and room for the rest of the message. */
export const BODY_MAX_BYTES = 48 * 1024 * 1024;
/** Of all requests that are being read or answered: four of the largest. */
export const BODIES_MAX_BYTES = 4 * BODY_MAX_BYTES;
/** Such a body costs no more than its connection and is not counted. */
const FREE_BYTES = 256 * 1024;
/** Of one object, and of a list in a value that is free. */
const ITEMS_MAX = 1_000;
/** Of every other list; above every list of the API but `ids`. The check of n wrong items takes n² steps. */
const LIST_MAX = 128;

/** What takes attachments: with and without `/api`, which the router has taken off already. */
const SPOOLING_PATHS = /^\/emails(?:\/batch)?\/?$/;
/** After a caller hung up: what is being made of the body may still need its files. */
const SPOOL_GRACE_MS = 60_000;

/** Leaves the value in `request.body`: undefined without a body, an empty object for an empty one. */
export function createBodyReader(budget: BodyBudget, spool: Spool | null = null): RequestHandler {
  return async (request: Request, response: Response, next: NextFunction): Promise<void> => {
    const length = request.headers['content-length'];
    const isBodiless = request.headers['transfer-encoding'] === undefined && length === undefined;
    if (isBodiless || isUpload(request)) {
      next();
      return;
    }
    const owner = tenantOf(request);
    let held = 0;
    const hold = (sizeBytes: number): void => {
      if (sizeBytes <= Math.max(held, FREE_BYTES)) return;
      if (response.closed) throw endedEarly(); // nobody would give it back
      if (!budget.take(sizeBytes - held, owner)) throw tooMuchAtOnce();
      held = sizeBytes;
    };
    response.once('close', () => {
      budget.give(held, owner);
      held = 0;
    });
    const isSpooling = spool !== null && SPOOLING_PATHS.test(request.path);
    const files = isSpooling ? spool.open(owner) : null;
    const scanner = createJsonScanner(
      files === null ? null : { isWanted: isAttachmentContent, take: () => files.take() },
    );
    try {
      const sizeBytes = await readBytes(request, {
        announced: Number(length ?? 0),
        isSpooling,
        hold,
        scanner,
      });
      request.body = sizeBytes === 0 ? {} : bearable(request, parseJson(scanner.end()));
    } catch (error) {
      await files?.empty();
      // Who sends first and listens then gets to hear this answer.
      await readPast(request);
      throw error;
    }
    if (files !== null && files.spooled.size > 0) keepWhileNeeded(files, { request, response });
    next();
  };
}

/** The files of a request stay until it is answered. */
function keepWhileNeeded(
  files: RequestSpool,
  { request, response }: { readonly request: Request; readonly response: Response },
): void {
  setSpool(request, files);
  const empty = (): void => void files.empty().catch(() => undefined); // the next start empties the folder
  const onClose = (): void => {
    if (response.writableFinished) empty();
    else setTimeout(empty, SPOOL_GRACE_MS).unref();
  };
  if (response.closed) onClose();
  else response.once('close', onClose);
}

const endedEarly = (): Refusal =>
  new Refusal('invalid_request', 'The request body ended early or has the wrong length.');

/** How many bytes the body had; the scanner has them. */
async function readBytes(
  request: Request,
  d: {
    readonly announced: number;
    /** What goes to disk is not held. */
    readonly isSpooling: boolean;
    readonly hold: (sizeBytes: number) => void;
    readonly scanner: JsonScanner;
  },
): Promise<number> {
  if (request.destroyed) throw endedEarly(); // by a caller who hung up before
  const source = decoded(request);
  const isPlain = source === request;
  if (isPlain && d.announced > BODY_MAX_BYTES) throw tooLarge();
  if (isPlain && !d.isSpooling) d.hold(d.announced); // all of it before the first byte, so that nobody starves half-way
  let sizeBytes = 0;
  try {
    for await (const chunk of source.iterator({ destroyOnReturn: false })) {
      const bytes = chunk as Buffer;
      sizeBytes += bytes.length;
      if (sizeBytes > BODY_MAX_BYTES) throw tooLarge();
      if (!d.isSpooling) d.hold(sizeBytes);
      await d.scanner.write(bytes);
      if (d.isSpooling) d.hold(d.scanner.keptBytes());
    }
  } catch (error) {
    if (!isPlain) source.destroy();
    if (error instanceof Refusal) throw error;
    if (isPlain || !request.complete) {
      throw endedEarly();
    }
    throw new Refusal('invalid_request', 'The request body is not what its content encoding says.');
  }
  return sizeBytes;
}

/** Reads what is left of a body and keeps nothing of it. */
async function readPast(request: Request): Promise<void> {
  if (request.readableEnded || request.destroyed) return;
  await new Promise<void>((resolve) => {
    request.once('end', resolve).once('close', resolve);
    request.unpipe();
    request.resume();
  });
}

const tooLarge = (): Refusal =>
  new Refusal(
    'request_too_large',
    `The request body is too large; at most ${BODY_MAX_BYTES} bytes are allowed.`,
  );

/** The body without its content encoding; the request itself where it has none. */
function decoded(request: Request): Readable {
  const encoding = (request.headers['content-encoding'] ?? 'identity').toLowerCase();
  if (encoding === 'identity') return request;
  const unpacked =
    encoding === 'gzip'
      ? createGunzip()
      : encoding === 'deflate'
        ? createInflate()
        : encoding === 'br'
          ? createBrotliDecompress()
          : null;
  if (unpacked === null) {
    throw new Refusal(
      'invalid_request',
      'The content encoding is not known; send the request body plain, or as gzip, deflate or br.',
    );
  }
  request.once('close', () => {
    if (!request.complete) unpacked.destroy(new Error('aborted'));
  });
  return request.pipe(unpacked);
}

function parseJson(bytes: Buffer): unknown {
  if (!isUtf8(bytes)) throw new Refusal('invalid_json', 'The request body is not valid UTF-8.');
  let value: unknown;
  try {
    // RFC 8259 §8.1: a byte order mark may be ignored.
    value = JSON.parse(bytes.toString('utf8').replace(/^\ufeff/, ''));
  } catch {
    throw new Refusal('invalid_json', 'The request body is not valid JSON.');
  }
  return value;
}

/** The value, or a refusal of it; of a permissive batch only the items that are to blame are refused. */
function bearable(request: Request, value: unknown): unknown {
  const isShort = Array.isArray(value) && value.length <= LIST_MAX;
  const body = isShort
    ? emptyItems(request, value, (item) => findUnbearable(item, '', false))
    : value;
  const issue = findUnbearable(body, '', false);
  if (issue !== null) throw refuseFields([issue]);
  return body;
}

/** The values of template variables: nobody checks what is inside them. */
const isFreeAt = (key: string, value: unknown): boolean =>
  key === 'fallback_value' || (key === 'variables' && !Array.isArray(value));

/** What a replay takes; of strings alone the check finds none wrong. */
const isListOfIds = (path: string, list: readonly unknown[]): boolean =>
  path === 'ids' && list.every((item) => typeof item === 'string');

/** The first thing that what checks the fields cannot take, or null. */
function findUnbearable(value: unknown, path: string, isFree: boolean): Issue | null {
  if (value === null || typeof value !== 'object') return null;
  const entries = Object.entries(value);
  const isLong = isFree || !Array.isArray(value) || isListOfIds(path, value);
  const max = isLong ? ITEMS_MAX : LIST_MAX;
  if (entries.length > max) {
    const at = path || 'body';
    const message = `\`${at}\` has ${entries.length} items; nothing here takes more than ${max}.`;
    return { path: at, message };
  }
  for (const [key, inner] of entries) {
    const at = path === '' ? key : `${path}.${key}`;
    // Such an object cannot be made a string, which the check does without asking.
    if (key === 'toString' && !Array.isArray(value)) {
      return { path: at, message: `\`${at}\`: no key may be called \`toString\`.` };
    }
    const found = findUnbearable(inner, at, isFree || isFreeAt(key, inner));
    if (found !== null) return found;
  }
  return null;
}
