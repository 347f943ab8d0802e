// The body of a request: JSON in UTF-8 (RFC 8259 §8.1), plain or compressed, whatever its content type says.
// Refuses what is too large (413), not UTF-8 or not JSON (400), and what is nested or split so far that it
// would cost more to look at than to send (400 when the bytes show it, before anything is built of them; else 422).
import { isUtf8 } from 'node:buffer';
import express, {
  type NextFunction,
  type Request,
  type RequestHandler,
  type Response,
} from 'express';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';

/** 40 MB of attachments after base64, and room for the rest of the message. */
export const BODY_MAX_BYTES = 48 * 1024 * 1024;
/** Far above every field of the API; what checks fields goes one call deeper for each level. */
const DEPTH_MAX = 64;
/** Far above a batch of 100 emails with all their lists full. */
const VALUES_MAX = 250_000;
/** Of one list or object; above every list of the API. The check of n wrong items takes n² steps. */
const ITEMS_MAX = 1_000;

/** Leaves the value in `request.body`: undefined without a body, an empty object for an empty one. */
export function createBodyReader(): readonly RequestHandler[] {
  return [express.raw({ limit: BODY_MAX_BYTES, type: () => true }), parseBody];
}

function parseBody(request: Request, _response: Response, next: NextFunction): void {
  const bytes: unknown = request.body;
  if (Buffer.isBuffer(bytes)) request.body = bytes.length === 0 ? {} : parseJson(bytes);
  next();
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
