/**
 * What a report returns of the message that it is about.
 *
 * In: a report as it came, hostile or not. Out: fields of the returned header. Never throws; only the beginning is read:
 * reports stand before the message that they return.
 */
import { Buffer } from 'node:buffer';
import { readMimeTree, type MimePart } from './mime-tree.ts';
import { decodeBody } from './seven-bit.ts';

const READ_BYTES_MAX = 512 * 1024;
const PART_BYTES_MAX = 128 * 1024;
const VALUES_MAX = 20;
const VALUE_CHARS_MAX = 500;
/** Where a report returns the message or its header; programs that write in words put it into the text. */
const RETURNED_TYPES: ReadonlySet<string> = new Set([
  'message/rfc822',
  'message/global',
  'text/rfc822-headers',
  'message/global-headers',
  'text/plain',
]);

/** The values of a field of the message that this report returns, the newest first. Not of the report's own header. */
export function returnedFields(raw: Buffer, name: string): readonly string[] {
  try {
    const message = withCrlf(raw.subarray(0, READ_BYTES_MAX));
    const field = new RegExp(`^${name}:[ \\t]*(?:\\r\\n[ \\t]+)?(\\S[^\\r\\n]*)`, 'gim');
    return leavesOf(readMimeTree(message))
      .filter(({ type }) => RETURNED_TYPES.has(type))
      .flatMap((part) => [...decoded(message, part).matchAll(field)])
      .map(([, value = '']) => value.trim().slice(0, VALUE_CHARS_MAX))
      .slice(0, VALUES_MAX);
  } catch {
    return []; // no message that can be read
  }
}

function leavesOf(part: MimePart): readonly MimePart[] {
  return part.children === null ? [part] : part.children.flatMap(leavesOf);
}

function decoded(message: Buffer, part: MimePart): string {
  const body = message.subarray(part.bodyStart, part.end);
  const bytes = decodeBody(body, part.encoding) ?? body;
  return withCrlf(bytes.subarray(0, PART_BYTES_MAX)).toString('latin1');
}

function withCrlf(bytes: Buffer): Buffer {
  const text = bytes.toString('latin1');
  return /(?<!\r)\n/.test(text) ? Buffer.from(text.replace(/\r?\n/g, '\r\n'), 'latin1') : bytes;
}
