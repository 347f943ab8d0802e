// What the bytes of an arriving message may be like, whatever it says: refused is where mail servers disagree about the
// end of a line or of a message (SMTP smuggling), and what no honest message has.
import type { Survey } from '../mail/wire-survey.ts';
import { surveyWire } from '../mail/wire-survey.ts';
import type { ReceivingPolicy } from '../receiving/policy.ts';
import type { Reply } from './listener.ts';
import {
  BARE,
  HEADER_BYTES_MAX,
  HEADER_TOO_LARGE,
  longLine,
  LOOP,
  NUL,
  ODD_FROM,
} from './mx-replies.ts';

export type Examined =
  | { readonly refused: Reply }
  /** What is stored: `message`, or its lines with the ends that they should have had, and what is no header below one. */
  | { readonly message: Buffer };

export function examine(
  message: Buffer,
  found: Survey,
  policy: Pick<ReceivingPolicy, 'bareNewlines' | 'lineBytesMax' | 'receivedMax'>,
): Examined {
  if (found.hasNul) return { refused: NUL };
  if (found.hasBareLineEnd && policy.bareNewlines === 'reject') return { refused: BARE };
  const ended = found.hasBareLineEnd ? withCrlf(message) : message;
  const mended = beginsHeader(ended) ? ended : Buffer.concat([EMPTY_LINE, ended]);
  const survey = found.hasBareLineEnd ? surveyWire(ended) : found;
  if (survey.longestLineOctets > policy.lineBytesMax) {
    return { refused: longLine(policy.lineBytesMax) };
  }
  const headerBytes = headerLength(mended);
  if (headerBytes > HEADER_BYTES_MAX) return { refused: HEADER_TOO_LARGE };
  const header = mended.toString('latin1', 0, headerBytes);
  if (hasOddFrom(header)) return { refused: ODD_FROM };
  const hops = header.match(/^received[ \t]*:/gim)?.length ?? 0;
  // RFC 5321 §6.3: a message with this many trace fields goes round in a circle.
  return hops > policy.receivedMax ? { refused: LOOP } : { message: mended };
}

const EMPTY_LINE = Buffer.from('\r\n');
const FIRST_LINE_LOOK_BYTES = 1_024;
/** A field (RFC 5322 §2.2, §4.5), no header at all, or the line that mbox files have above it. */
const FIRST_LINE = /^(?:[!-9;-~]+(?:[ \t]|\r\n[ \t])*:|\r\n|>*From )/;

/**
 * False: its first lines would be read as a part of the field that we write above them, or be lost. They are text, as
 * every reader has it that meets such a line.
 */
const beginsHeader = (message: Buffer): boolean =>
  message.length === 0 || FIRST_LINE.test(message.toString('latin1', 0, FIRST_LINE_LOOK_BYTES));

/** A field that some readers take for From and others do not: who checks it and who shows it must see the same. */
function hasOddFrom(header: string): boolean {
  // Some take every line that begins with white space of any kind for a continuation.
  const unfolded = [/\r\n(?=[ \t])/g, /\r\n(?=[^!-~\r\n])/g].map((fold) =>
    header.replace(fold, ''),
  );
  const names = unfolded.flatMap((lines) => lines.match(/^[^:\r\n]+(?=:)/gm) ?? []);
  return names.some(
    (name) => /^from$/i.test(name.replace(/[^!-~]+/g, '')) && !/^from[ \t]*$/i.test(name),
  );
}

/** Up to the empty line; all of it where there is none. */
function headerLength(message: Buffer): number {
  if (message[0] === CR && message[1] === LF) return 0;
  const end = message.indexOf('\r\n\r\n');
  return end === -1 ? message.length : end + 2;
}

const CR = 0x0d;
const LF = 0x0a;

/** Each bare CR and each bare LF ends a line, as everybody would read it who takes them for one. */
function withCrlf(message: Buffer): Buffer {
  const mended = Buffer.allocUnsafe(message.length * 2);
  let length = 0;
  for (let at = 0; at < message.length; at += 1) {
    const octet = message[at]!;
    if (octet === LF || octet === CR) {
      mended[length++] = CR;
      mended[length++] = LF;
      if (octet === CR && message[at + 1] === LF) at += 1;
    } else mended[length++] = octet;
  }
  return mended.subarray(0, length);
}
