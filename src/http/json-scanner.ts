// Reads the bytes of a JSON text as they arrive: counts what a parser would build of them, and hands out long strings
// at chosen places instead of keeping them. It does not judge the text: JSON.parse does, on what is kept, in which a
// short string stands for each that was handed out. Both agree on where strings begin and end in all that is JSON;
// what is none is refused by JSON.parse, since everything but those strings reaches it as it came.
import { Refusal } from '../access/refusal.ts';

/** Far above every field of the API; what checks fields goes one call deeper for each level. */
const DEPTH_MAX = 64;
/** Far above a batch of 100 emails with all their lists full. */
const VALUES_MAX = 250_000;
/** A longer key is none that anybody asks for. */
const KEY_MAX_BYTES = 256;
/** A string is handed out once it is longer than this: shorter ones cost less in memory than in files. */
const HAND_OUT_BYTES = 64 * 1024;
/** The same once so many bytes are kept: many small ones are a large one too. */
const HAND_OUT_EARLY_BYTES = 16 * 1024;
const KEPT_CALM_BYTES = 4 * 1024 * 1024;
/** A slice this many times smaller than its chunk is copied, so that it does not keep the chunk. */
const COPY_FRACTION = 4;

const QUOTE = 0x22;
const COMMA = 0x2c;
const COLON = 0x3a;
const BACKSLASH = 0x5c;

/** Takes one long string: what stands between its quotes, as it is written, in any number of pieces. */
export interface StringTaker {
  write(piece: Buffer): Promise<void>;
  /** All of it was written. Returns what is to stand between the quotes instead. */
  end(): Promise<string>;
}

/** Where a string stands: the keys from the root on, null for an item of a list. */
export type JsonPath = readonly (string | null)[];

export interface Handing {
  readonly isWanted: (path: JsonPath) => boolean;
  /** Called for a long string at a wanted place. */
  readonly take: () => Promise<StringTaker>;
}

export interface JsonScanner {
  /** Throws a Refusal (400) for a text that is nested or split too far, and what a taker throws. */
  write(chunk: Buffer): Promise<void>;
  /** How much of what was written is kept in memory. */
  keptBytes(): number;
  /** What JSON.parse is to read. */
  end(): Buffer;
}

interface Frame {
  readonly isObject: boolean;
  /** Of the value that is next or under way. */
  key: string | null;
  expectsKey: boolean;
}

type OpenString =
  | { readonly kind: 'plain' }
  | { readonly kind: 'key' | 'held'; readonly pieces: Buffer[]; sizeBytes: number }
  | { readonly kind: 'taken'; readonly taker: StringTaker };

/** `handing` null: everything is kept. */
export function createJsonScanner(handing: Handing | null): JsonScanner {
  const kept: Buffer[] = [];
  const frames: Frame[] = [];
  let keptBytes = 0;
  let values = 1;
  let open: OpenString | null = null;
  /** What was read of the open string ends in an odd number of backslashes. */
  let isEscaped = false;

  const keep = (bytes: Buffer, chunkLength: number): void => {
    if (bytes.length === 0) return;
    keptBytes += bytes.length;
    kept.push(bytes.length * COPY_FRACTION < chunkLength ? Buffer.from(bytes) : bytes);
  };

  /** Brackets, braces, commas and colons outside strings. What is not JSON may be counted wrong. */
  const count = (byte: number | undefined): void => {
    const top = frames.at(-1);
    if (byte === COLON) {
      if (top !== undefined) top.expectsKey = false;
    } else if (byte === COMMA) {
      values += 1;
      if (top !== undefined) top.expectsKey = top.isObject;
    } else if (byte === 0x5b || byte === 0x7b) {
      values += 1;
      frames.push({ isObject: byte === 0x7b, key: null, expectsKey: byte === 0x7b });
      if (frames.length > DEPTH_MAX) throw tooDeep();
    } else if (byte === 0x5d || byte === 0x7d) frames.pop();
    if (values > VALUES_MAX) throw tooMany();
  };

  const begin = (): OpenString => {
    isEscaped = false;
    if (frames.at(-1)?.expectsKey === true) return { kind: 'key', pieces: [], sizeBytes: 0 };
    const isWanted = handing?.isWanted(frames.map(({ key }) => key)) === true;
    return isWanted ? { kind: 'held', pieces: [], sizeBytes: 0 } : { kind: 'plain' };
  };

  /** The index of the quote that ends the open string, which goes on at `start`; -1 when it is not here. */
  const findEnd = (chunk: Buffer, start: number): number => {
    const isEven = (end: number): boolean => {
      let before = end;
      while (before > start && chunk[before - 1] === BACKSLASH) before -= 1;
      const carried = before === start && isEscaped ? 1 : 0;
      return (end - before + carried) % 2 === 0;
    };
    let end = chunk.indexOf(QUOTE, start);
    while (end !== -1 && !isEven(end)) end = chunk.indexOf(QUOTE, end + 1);
    if (end === -1) isEscaped = !isEven(chunk.length);
    return end;
  };

  const goOn = async (string: OpenString, piece: Buffer): Promise<OpenString> => {
    if (string.kind === 'taken') await string.taker.write(piece);
    if (string.kind !== 'key' && string.kind !== 'held') return string;
    string.sizeBytes += piece.length;
    if (string.kind === 'held' || string.sizeBytes <= KEY_MAX_BYTES) string.pieces.push(piece);
    const keepMax = keptBytes > KEPT_CALM_BYTES ? HAND_OUT_EARLY_BYTES : HAND_OUT_BYTES;
    if (string.kind === 'key' || string.sizeBytes <= keepMax) return string;
    const taker = await handing!.take();
    for (const held of string.pieces) await taker.write(held);
    return { kind: 'taken', taker };
  };

  const close = async (string: OpenString): Promise<void> => {
    if (string.kind === 'taken') kept.push(Buffer.from(await string.taker.end()));
    if (string.kind === 'held') {
      kept.push(...string.pieces);
      keptBytes += string.sizeBytes;
    }
    const top = frames.at(-1);
    if (string.kind === 'key' && top !== undefined) top.key = keyOf(string);
  };

  return {
    keptBytes: () => keptBytes,
    async write(chunk) {
      /** What lies before it is kept, handed out or held. */
      let done = 0;
      let at = 0;
      while (at < chunk.length) {
        if (open === null) {
          while (at < chunk.length && chunk[at] !== QUOTE) count(chunk[at++]);
          if (at === chunk.length) break;
          open = begin();
          at += 1;
          if (open.kind !== 'held') continue;
          keep(chunk.subarray(done, at), chunk.length);
          done = at;
          continue;
        }
        const end = findEnd(chunk, at);
        const stop = end === -1 ? chunk.length : end;
        open = await goOn(open, chunk.subarray(at, stop));
        if (open.kind === 'held' || open.kind === 'taken') done = stop;
        at = stop;
        if (end === -1) break;
        await close(open);
        open = null;
        at += 1;
      }
      keep(chunk.subarray(done), chunk.length);
    },
    end() {
      // A text that ends inside a string is no JSON, whatever was in it.
      return kept.length === 1 ? kept[0]! : Buffer.concat(kept);
    },
  };
}

/** The key as JSON.parse reads it; no key at all when it is too long. */
function keyOf(string: { readonly pieces: readonly Buffer[]; readonly sizeBytes: number }): string {
  if (string.sizeBytes > KEY_MAX_BYTES) return '';
  const written = Buffer.concat(string.pieces).toString('utf8');
  if (!written.includes('\\')) return written;
  try {
    return String(JSON.parse(`"${written}"`));
  } catch {
    return '';
  }
}

const tooDeep = (): Refusal =>
  new Refusal(
    'invalid_request',
    `The request body is nested too deeply; at most ${DEPTH_MAX} levels are allowed.`,
  );

const tooMany = (): Refusal =>
  new Refusal(
    'invalid_request',
    `The request body has too many values; at most ${VALUES_MAX} are allowed.`,
  );
