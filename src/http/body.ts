// The body of a request: JSON in UTF-8 (RFC 8259 §8.1), plain or compressed, whatever its content type says.
// Refuses what is too large (413), not UTF-8 or not JSON (400), and what is nested or split so far that it
// would cost more to look at than to send (400 when the bytes show it, before anything is built of them; else 422).
// All bodies of this process together have a budget; beyond it, and only for large ones, the answer is 503.
import { isUtf8 } from 'node:buffer';
import type { Readable } from 'node:stream';
import { createBrotliDecompress, createGunzip, createInflate } from 'node:zlib';
import type { NextFunction, Request, RequestHandler, Response } from 'express';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';

/** 40 MB of attachments after base64, and room for the rest of the message. */
export const BODY_MAX_BYTES = 48 * 1024 * 1024;
/** Of all requests that are being read or answered: four of the largest. */
export const BODIES_MAX_BYTES = 4 * BODY_MAX_BYTES;
/** Such a body costs no more than its connection and is not counted. */
const FREE_BYTES = 256 * 1024;
const RETRY_AFTER_SECONDS = 2;
/** Far above every field of the API; what checks fields goes one call deeper for each level. */
const DEPTH_MAX = 64;
/** Far above a batch of 100 emails with all their lists full. */
const VALUES_MAX = 250_000;
/** Of one list or object; above every list of the API. The check of n wrong items takes n² steps. */
const ITEMS_MAX = 1_000;

/** The bytes that all requests of a process hold together. */
export interface BodyBudget {
  /** Takes so many; false, and nothing taken, when there are not as many left. */
  take(bytes: number): boolean;
  give(bytes: number): void;
}

export function createBodyBudget(maxBytes: number): BodyBudget {
  let taken = 0;
  return {
    take(bytes) {
      if (taken + bytes > maxBytes) return false;
      taken += bytes;
      return true;
    },
    give(bytes) {
      taken -= bytes;
    },
  };
}

/** Leaves the value in `request.body`: undefined without a body, an empty object for an empty one. */
export function createBodyReader(budget: BodyBudget): RequestHandler {
  return async (request: Request, response: Response, next: NextFunction): Promise<void> => {
    const length = request.headers['content-length'];
    if (request.headers['transfer-encoding'] === undefined && length === undefined) {
      next();
      return;
    }
    let held = 0;
    const hold = (sizeBytes: number): void => {
      if (sizeBytes <= Math.max(held, FREE_BYTES)) return;
      if (!budget.take(sizeBytes - held)) throw tooMuchAtOnce();
      held = sizeBytes;
    };
    response.once('close', () => {
      budget.give(held);
      held = 0;
    });
    let bytes: Buffer;
    try {
      bytes = await readBytes(request, { announced: Number(length ?? 0), hold });
    } catch (error) {
      // Who sends first and listens then gets to hear this answer.
      await readPast(request);
      throw error;
    }
    request.body = bytes.length === 0 ? {} : parseJson(bytes);
    next();
  };
}

const tooMuchAtOnce = (): Refusal =>
  new Refusal(
    'service_unavailable',
    'Too many large requests are arriving at once; try again in a few seconds.',
    { retryAfterSeconds: RETRY_AFTER_SECONDS },
  );

async function readBytes(
  request: Request,
  d: { readonly announced: number; readonly hold: (sizeBytes: number) => void },
): Promise<Buffer> {
  const source = decoded(request);
  const isPlain = source === request;
  if (isPlain && d.announced > BODY_MAX_BYTES) throw tooLarge();
  if (isPlain) d.hold(d.announced); // all of it before the first byte, so that nobody starves half-way
  const chunks: Buffer[] = [];
  let sizeBytes = 0;
  try {
    for await (const chunk of source.iterator({ destroyOnReturn: false })) {
      const bytes = chunk as Buffer;
      sizeBytes += bytes.length;
      if (sizeBytes > BODY_MAX_BYTES) throw tooLarge();
      d.hold(sizeBytes);
      chunks.push(bytes);
    }
  } catch (error) {
    if (!isPlain) source.destroy();
    if (error instanceof Refusal) throw error;
    if (isPlain || !request.complete) {
      throw new Refusal('invalid_request', 'The request body ended early or has the wrong length.');
    }
    throw new Refusal('invalid_request', 'The request body is not what its content encoding says.');
  }
  return Buffer.concat(chunks, sizeBytes);
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
  refuseLabyrinth(bytes);
  let value: unknown;
  try {
    // RFC 8259 §8.1: a byte order mark may be ignored.
    value = JSON.parse(bytes.toString('utf8').replace(/^\ufeff/, ''));
  } catch {
    throw new Refusal('invalid_json', 'The request body is not valid JSON.');
  }
  const issue = findUnbearable(value, '');
  if (issue !== null) throw refuseFields([issue]);
  return value;
}

const QUOTE = 0x22;
const BACKSLASH = 0x5c;

/** Counts brackets and commas outside strings. What is not JSON may be counted wrong: it is refused anyway. */
function refuseLabyrinth(json: Buffer): void {
  let depth = 0;
  let values = 1;
  for (let at = 0; at < json.length; at += 1) {
    const byte = json[at];
    if (byte === QUOTE) at = endOfString(json, at);
    else if (byte === 0x2c) values += 1;
    else if (byte === 0x5b || byte === 0x7b) {
      depth += 1;
      values += 1;
    } else if (byte === 0x5d || byte === 0x7d) depth -= 1;
    if (depth > DEPTH_MAX) {
      throw new Refusal(
        'invalid_request',
        `The request body is nested too deeply; at most ${DEPTH_MAX} levels are allowed.`,
      );
    }
    if (values > VALUES_MAX) {
      throw new Refusal(
        'invalid_request',
        `The request body has too many values; at most ${VALUES_MAX} are allowed.`,
      );
    }
  }
}

/** The index of the quote that ends the string which starts at `start`; the end when there is none. */
function endOfString(json: Buffer, start: number): number {
  for (let end = json.indexOf(QUOTE, start + 1); end !== -1; end = json.indexOf(QUOTE, end + 1)) {
    let before = end;
    while (json[before - 1] === BACKSLASH) before -= 1;
    if ((end - before) % 2 === 0) return end;
  }
  return json.length;
}

/** The first thing that what checks the fields cannot take, or null. */
function findUnbearable(value: unknown, path: string): Issue | null {
  if (value === null || typeof value !== 'object') return null;
  const entries = Object.entries(value);
  if (entries.length > ITEMS_MAX) {
    const message = `\`${path || 'body'}\` has ${entries.length} items; at most ${ITEMS_MAX} are allowed.`;
    return { path: path || 'body', message };
  }
  for (const [key, inner] of entries) {
    const at = path === '' ? key : `${path}.${key}`;
    // Such an object cannot be made a string, which the check does without asking.
    if (key === 'toString' && !Array.isArray(value)) {
      return { path: at, message: `\`${at}\`: no key may be called \`toString\`.` };
    }
    const found = findUnbearable(inner, at);
    if (found !== null) return found;
  }
  return null;
}
