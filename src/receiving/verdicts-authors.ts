// Whom a mail program may show as the author, where programs read the same From field in different ways (RFC 5322 §4.4,
// RFC 2047 §5, UTS 46): each reading is an author like any other, so that a forged one is not overlooked. Imports only
// what needs no loader: it runs in a thread, too.
import { Buffer } from 'node:buffer';
import { domainToASCII, domainToUnicode } from 'node:url';

/** What a From field says without comments, and white space around dots and `@`; null: the same as it says with them. */
export function plainField(field: string): string | null {
  const colon = field.indexOf(':');
  const value = withoutComments(field.slice(colon + 1).replace(/\r?\n/g, ''));
  // Outside quotes only: every second piece is a quoted string, or a character that is none for its backslash.
  const pieces = value?.split(/(\\.|"(?:[^"\\]|\\.)*")/su) ?? [];
  const plain = pieces
    .map((piece, at) =>
      at % 2 === 1 ? piece : piece.replace(/(?<![ \t])[ \t]*([.@])[ \t]*/g, '$1'),
    )
    .join('');
  return value === null || plain === field.slice(colon + 1) ? null : `From:${plain}`;
}

/** Null: they do not end, or there are none and nothing stands around. */
function withoutComments(value: string): string | null {
  let plain = '';
  let depth = 0;
  let isQuoted = false;
  for (let at = 0; at < value.length; at += 1) {
    const one = value[at]!;
    if (one === '\\') {
      if (depth === 0) plain += value.slice(at, at + 2);
      at += 1;
    } else if (depth === 0 && one === '"') {
      isQuoted = !isQuoted;
      plain += one;
    } else if (!isQuoted && one === '(') depth += 1;
    else if (!isQuoted && one === ')' && depth > 0) depth -= 1;
    else if (depth === 0) plain += one;
  }
  return depth > 0 || isQuoted ? null : plain;
}

/** The address, and with the domain that a reader may make of it: decoded (RFC 2047), mapped and from A-labels (UTS 46). */
export function readingsOf(address: string): readonly string[] {
  const at = address.lastIndexOf('@');
  const domain = address.slice(at + 1).trim();
  if (at === -1 || !/[^\0-\x7f]|=\?|xn--/i.test(domain)) return [address];
  const decoded = domain.replace(
    /=\?[^?]*\?([bq])\?([^?]*)\?=/gi,
    (_, kind: string, text: string) =>
      kind.toLowerCase() === 'b'
        ? Buffer.from(text, 'base64').toString()
        : text
            .replaceAll('_', ' ')
            .replace(/=([0-9a-f]{2})/gi, (__, hex: string) =>
              String.fromCharCode(Number.parseInt(hex, 16)),
            ),
  );
  const mapped = domainToUnicode(decoded.slice(decoded.lastIndexOf('@') + 1).trim());
  // An A-label that is none: its ASCII characters, the others cannot be seen (RFC 3492 §3.1).
  const shown = domainToASCII(mapped.replace(/(?<=^|\.)xn--([^.]+)-[^.-]*(?=\.|$)/gi, '$1'));
  return shown === '' || shown === domain.toLowerCase() ? [address] : [address, `author@${shown}`];
}
