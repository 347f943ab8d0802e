/**
 * What people read of a message that came as a whole: its texts and its files.
 *
 * In: a complete message whose lines end in CRLF. Out: texts, what the files are and where their bytes lie. It never fails:
 * a message whose parts cannot be read is still a message, and shows nothing.
 */
import { Buffer } from 'node:buffer';
import { createHash } from 'node:crypto';
import charset from 'libmime/lib/charset.js';
import { parseStructured, readMimeTree, textOf, UnfitMessage, type MimePart } from './mime-tree.ts';
import { decodeBody } from './seven-bit.ts';
import { shown } from './submitted-header.ts';

export interface ShownFile {
  readonly filename: string | null;
  readonly contentType: string;
  /** Without angle brackets. */
  readonly contentId: string | null;
  readonly disposition: 'attachment' | 'inline';
  /** Decoded. */
  readonly sizeBytes: number;
  /** The base64 lines in the message; null for a file in another encoding (decodeShownFile reads that). */
  readonly place: { readonly offset: number; readonly length: number } | null;
}

export interface ShownParts {
  readonly html: string | null;
  readonly text: string | null;
  readonly files: readonly ShownFile[];
}

const CONTENT_CHARACTERS_MAX = 5 * 1024 * 1024;
/** Encoded text is at most three times as long as what it stands for, plus soft line breaks. */
const ENCODED_OCTETS_MAX = 4 * CONTENT_CHARACTERS_MAX;
/** Decoding these is slow (UTF-7: a second for a megabyte), and nobody writes books in them. */
const RARE_OCTETS_MAX = 512 * 1024;
const COMMON_CHARSET = /^(?:utf-?8|us-ascii|ascii|iso-8859-1|latin1|windows-1252)$/i;
const FILES_MAX = 500;
const NAME_MAX = 255;
/** Of a loop over octets, between two turns of the event loop. */
const SLICE_OCTETS = 2 * 1024 * 1024;

export async function readShownParts(message: Buffer): Promise<ShownParts> {
  const { plain, html, files } = sortLeaves(message);
  const described: ShownFile[] = [];
  for (const part of files) described.push(await describe(message, part));
  const budget = { rareOctets: RARE_OCTETS_MAX };
  return {
    html: await readTexts(message, html, budget),
    text: await readTexts(message, plain, budget),
    files: described,
  };
}

interface TextBudget {
  /** Of all texts in rare charsets. */
  rareOctets: number;
}

/** One below the other, as far as there is room; null when there is none. */
async function readTexts(
  message: Buffer,
  parts: readonly MimePart[],
  budget: TextBudget,
): Promise<string | null> {
  if (parts.length === 0) return null;
  const texts: string[] = [];
  let characters = 0;
  let octets = ENCODED_OCTETS_MAX;
  for (const part of parts) {
    if (characters >= CONTENT_CHARACTERS_MAX || octets <= 0) break;
    const end = Math.min(part.end, part.bodyStart + octets);
    octets -= end - part.bodyStart;
    const text = readText(message.subarray(part.bodyStart, end), part, budget);
    characters += text.length + 1;
    texts.push(text);
    if (message.length > SLICE_OCTETS) await new Promise((resolve) => setImmediate(resolve));
  }
  return texts.join('\n').slice(0, CONTENT_CHARACTERS_MAX).toWellFormed();
}

/** The octets of the file at this place among `files`, or null when there is none. */
export function decodeShownFile(message: Buffer, position: number): Buffer | null {
  const part = sortLeaves(message).files[position];
  return part === undefined ? null : decodePart(message, part);
}

/** The octets of all `files`, in their order. */
export function decodeShownFiles(message: Buffer): readonly Buffer[] {
  return sortLeaves(message).files.map((part) => decodePart(message, part));
}

function decodePart(message: Buffer, part: MimePart): Buffer {
  const body = message.subarray(part.bodyStart, part.end);
  return decodeBody(body, part.encoding) ?? body;
}

/**
 * The same for two messages with the same parts in the same encodings, whatever their boundaries: programs draw new
 * ones each time they write the same message.
 */
export function fingerprintParts(message: Buffer): string {
  const { all } = sortLeaves(message);
  const hash = createHash('sha256');
  // Parts that cannot be told apart are one; the header has a trace that is new each time.
  if (all.length === 0) hash.update(message.subarray(Math.max(0, message.indexOf('\r\n\r\n'))));
  for (const part of all) {
    const about = ['content-type', 'content-disposition', 'content-id'].map((name) =>
      textOf(part.fields, name),
    );
    hash.update(JSON.stringify([...about, part.encoding, part.end - part.bodyStart]));
    hash.update(message.subarray(part.bodyStart, part.end));
  }
  return hash.digest('hex');
}

interface Leaves {
  readonly all: readonly MimePart[];
  readonly plain: readonly MimePart[];
  readonly html: readonly MimePart[];
  readonly files: readonly MimePart[];
}

function sortLeaves(message: Buffer): Leaves {
  const all: MimePart[] = [];
  const visit = (part: MimePart): void => {
    if (part.children === null) all.push(part);
    else for (const child of part.children) visit(child);
  };
  try {
    visit(readMimeTree(message));
  } catch (error) {
    if (!(error instanceof UnfitMessage)) throw error;
  }
  const bodies = all.filter(isBody);
  return {
    all,
    plain: bodies.filter(({ type }) => type === 'text/plain'),
    html: bodies.filter(({ type }) => type === 'text/html'),
    files: all.filter((part) => !bodies.includes(part)).slice(0, FILES_MAX),
  };
}

/** Text that is read where it stands, not a file with text in it. */
function isBody(part: MimePart): boolean {
  if (part.type !== 'text/plain' && part.type !== 'text/html') return false;
  const { value, params } = parseStructured(textOf(part.fields, 'content-disposition'));
  const filename = params['filename'] ?? part.typeParams['name'];
  return filename === undefined && value.toLowerCase() !== 'attachment';
}

async function describe(message: Buffer, part: MimePart): Promise<ShownFile> {
  const { value, params } = parseStructured(textOf(part.fields, 'content-disposition'));
  const filename = shown(params['filename'] ?? part.typeParams['name'] ?? '', NAME_MAX);
  const contentId = shown(textOf(part.fields, 'content-id').replace(/^<|>$/g, ''), NAME_MAX);
  const body = message.subarray(part.bodyStart, part.end);
  const sizeBytes = part.encoding === 'base64' ? await sizeOfBase64(body) : null;
  return {
    filename: filename === '' ? null : filename,
    contentType: shown(part.type, NAME_MAX),
    contentId: contentId === '' ? null : contentId,
    disposition: value.toLowerCase() === 'inline' ? 'inline' : 'attachment',
    sizeBytes: sizeBytes ?? (decodeBody(body, part.encoding) ?? body).length,
    place: sizeBytes === null ? null : { offset: part.bodyStart, length: body.length },
  };
}

function readText(body: Buffer, part: MimePart, budget: TextBudget): string {
  const name = part.typeParams['charset'] ?? 'utf-8';
  let bytes = decodeBody(body, part.encoding) ?? Buffer.alloc(0);
  if (!COMMON_CHARSET.test(name)) {
    bytes = bytes.subarray(0, budget.rareOctets);
    budget.rareOctets -= bytes.length;
  }
  let text: string;
  try {
    text = charset.decode(bytes, name);
  } catch {
    text = bytes.toString('utf8');
  }
  return text.replaceAll('\r\n', '\n').replaceAll('\0', '\uFFFD').slice(0, CONTENT_CHARACTERS_MAX);
}

/** Octets that the lines stand for; null when they are not base64 to the letter. */
async function sizeOfBase64(body: Buffer): Promise<number | null> {
  let symbols = 0;
  let padding = 0;
  for (let at = 0; at < body.length; at += SLICE_OCTETS) {
    for (const octet of body.subarray(at, at + SLICE_OCTETS)) {
      if (octet === 0x3d) padding += 1;
      else if (isSymbol(octet)) {
        if (padding > 0) return null;
        symbols += 1;
      } else if (octet !== 0x0d && octet !== 0x0a && octet !== 0x20 && octet !== 0x09) return null;
    }
    if (body.length > SLICE_OCTETS) await new Promise((resolve) => setImmediate(resolve));
  }
  const isWhole = padding === 0 ? symbols % 4 !== 1 : padding <= 2 && (symbols + padding) % 4 === 0;
  return isWhole ? Math.floor((symbols * 3) / 4) : null;
}

/** RFC 2045 §6.8. */
function isSymbol(octet: number): boolean {
  const letter = octet | 0x20;
  return (
    (letter >= 0x61 && letter <= 0x7a) ||
    (octet >= 0x30 && octet <= 0x39) ||
    octet === 0x2b ||
    octet === 0x2f
  );
}
