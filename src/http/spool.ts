// Large base64 strings of a request's body, decoded into files of their own while the body arrives, so that no
// attachment is ever in memory as a whole. In the parsed body a placeholder stands for each; it has 128 random bits of
// its request, so a caller who writes one down means nothing by it. The files live as long as their request.
import { createHash, randomBytes } from 'node:crypto';
import { mkdirSync, readdirSync, rmSync } from 'node:fs';
import { open, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Request } from 'express';
import { Refusal } from '../access/refusal.ts';
import { Base64Reader } from '../mail/base64.ts';
import { createBodyBudget, tooMuchAtOnce } from './body-budget.ts';
import type { Spooled, SpooledContent } from '../sending/attachments.ts';
import type { JsonPath, StringTaker } from './json-scanner.ts';

/** Of all requests: four dozen of the largest. */
const SPOOLED_MAX_BYTES = 2 * 1024 * 1024 * 1024;
const BACKSLASH = 0x5c;
/** The longest escape, `\u002b`, but for its last character. */
const HALF_ESCAPE_MAX = 5;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f]/;

export interface Spool {
  /** For one request of this tenant. */
  open(tenantId: string | null): RequestSpool;
}

export interface RequestSpool {
  readonly spooled: Spooled;
  take(): Promise<StringTaker>;
  /** Removes the files. */
  empty(): Promise<void>;
}

/** Takes over the folder: what a crash left there goes. */
export function openSpool(folder: string): Spool {
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  for (const name of readdirSync(folder)) rmSync(join(folder, name), { force: true });
  const room = createBodyBudget(SPOOLED_MAX_BYTES);
  return {
    open: (tenantId) =>
      openRequest(folder, {
        take(bytes) {
          if (!room.take(bytes, tenantId)) throw tooMuchAtOnce();
        },
        give: (bytes) => room.give(bytes, tenantId),
      }),
  };
}

/** Room on the disk. */
interface Room {
  /** Throws a Refusal (503) when there is not as much. */
  take(bytes: number): void;
  give(bytes: number): void;
}

function openRequest(folder: string, room: Room): RequestSpool {
  const name = randomBytes(16).toString('hex');
  const spooled = new Map<string, SpooledContent>();
  const files: (() => Promise<void>)[] = [];
  return {
    spooled,
    async take() {
      const number = files.length;
      const path = join(folder, `${name}.${number}`);
      const taker = await spoolTo(path, room, (content) => {
        const placeholder = `spooled:${name}:${number}`;
        spooled.set(placeholder, content);
        return placeholder;
      });
      files.push(taker.remove);
      return taker;
    },
    async empty() {
      await Promise.all(files.splice(0).map((remove) => remove()));
    },
  };
}

async function spoolTo(
  path: string,
  room: Room,
  onEnd: (content: SpooledContent) => string,
): Promise<StringTaker & { readonly remove: () => Promise<void> }> {
  const file = await open(path, 'wx', 0o600);
  const base64 = new Base64Reader();
  const digest = createHash('sha256');
  let carried = '';
  let sizeBytes = 0;
  let takenBytes = 0;
  let isOpen = true;
  const close = async (): Promise<void> => {
    if (isOpen) {
      isOpen = false;
      await file.close();
    }
  };
  const remove = async (): Promise<void> => {
    await close();
    await rm(path, { force: true });
    room.give(takenBytes);
    takenBytes = 0;
  };
  const append = async (octets: Buffer): Promise<void> => {
    if (!isOpen) return;
    room.take(octets.length);
    takenBytes += octets.length;
    digest.update(octets);
    for (let at = 0; at < octets.length;) {
      const { bytesWritten } = await file.write(octets, at, octets.length - at, sizeBytes + at);
      at += bytesWritten;
    }
    sizeBytes += octets.length;
  };
  return {
    remove,
    async write(piece) {
      const text = carried + piece.toString('latin1');
      const cut = piece.includes(BACKSLASH) || carried !== '' ? endOfWhole(text) : text.length;
      carried = text.slice(cut);
      await append(base64.push(unescape(text.slice(0, cut))));
      if (base64.problem !== null) await remove(); // what comes is read over
    },
    async end() {
      await append(base64.push(unescape(carried)));
      await append(base64.end());
      const { problem } = base64;
      if (problem === null) await close();
      else await remove();
      return onEnd({ path, sizeBytes, sha256: digest.digest('hex'), problem });
    },
  };
}

/** Where an escape begins that does not end in this text; the end of the text where there is none. */
function endOfWhole(text: string): number {
  const last = text.lastIndexOf('\\');
  if (last === -1 || text.length - last > HALF_ESCAPE_MAX) return text.length;
  let first = last;
  while (text[first - 1] === '\\') first -= 1;
  const isEscape = (last - first) % 2 === 0;
  const isHalf = last === text.length - 1 || text[last + 1] === 'u';
  return isEscape && isHalf ? last : text.length;
}

/** What the inside of a JSON string says. Throws a Refusal where it is none. */
function unescape(written: string): string {
  try {
    if (written.includes('\\')) return String(JSON.parse(`"${written}"`));
  } catch {
    throw notJson();
  }
  if (CONTROLS.test(written)) throw notJson();
  return written;
}

const notJson = (): Refusal => new Refusal('invalid_json', 'The request body is not valid JSON.');

const spoolOf = new WeakMap<Request, RequestSpool>();

export const setSpool = (request: Request, spool: RequestSpool): void => {
  spoolOf.set(request, spool);
};

/** What was spooled of the request's body, for whoever looks at its attachments. */
export const spooledOf = (request: Request): Spooled =>
  spoolOf.get(request)?.spooled ?? new Map<string, SpooledContent>();

/** `attachments[].content` of an email, or of an email in a batch. */
export function isAttachmentContent(path: JsonPath): boolean {
  const [list, item, field, ...deeper] = path[0] === null ? path.slice(1) : path;
  return list === 'attachments' && item === null && field === 'content' && deeper.length === 0;
}
