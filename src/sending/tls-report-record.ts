// Reads the record by which a domain asks for TLS reports (RFC 8460 §3).
//
// In: the TXT records of `_smtp._tls.<domain>`. Out: where reports go, or why there is nowhere, as a sentence. What a
// record says beyond that is read over; a record that breaks the grammar counts as none.
import { parseMailbox, type Mailbox } from '../mail/address.ts';

export type ReportTarget =
  | { readonly kind: 'mail'; readonly uri: string; readonly to: Mailbox }
  | { readonly kind: 'web'; readonly uri: string };

export type ReadRecord =
  | { readonly ok: true; readonly targets: readonly ReportTarget[] }
  | { readonly ok: false; readonly problem: string };

/** Of the addresses of one record; who lists more gets no report at the others. */
export const TARGETS_MAX = 4;
const RECORD_CHARS_MAX = 8_192;
const VERSION = /^v=TLSRPTv1[ \t]*;/;
const NAME = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$/;
/** RFC 8460 §3: printable, without `=`, `;` and space. */
const EXTENSION_VALUE = /^[!-:<>-~]+$/;
/** RFC 3986 §2; `!` and `,` have to be encoded (RFC 8460 §3). */
const URI = /^[a-z][a-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#[\]@$&'()*+;=-]|%[0-9A-Fa-f]{2})+$/i;

export function readTlsReportRecord(records: readonly string[]): ReadRecord {
  const ours = records.filter((record) => VERSION.test(record));
  const [record] = ours;
  if (record === undefined) return refuse('no TXT record begins with v=TLSRPTv1;');
  if (ours.length > 1) return refuse(`${ours.length} TXT records begin with v=TLSRPTv1;`);
  if (record.length > RECORD_CHARS_MAX) return refuse('the record is too long');
  const uris = urisOf(record.replace(VERSION, ''));
  if (uris === null) return refuse('the record is malformed');
  const targets = [...new Set(uris)].flatMap(targetOf).slice(0, TARGETS_MAX);
  if (targets.length === 0) return refuse('the record names no mailto: or https: address');
  return { ok: true, targets };
}

const refuse = (problem: string): ReadRecord => ({ ok: false, problem });

/** Null: malformed. */
function urisOf(text: string): readonly string[] | null {
  const fields = text.split(';').map((field) => field.replace(/^[ \t]+|[ \t]+$/g, ''));
  if (fields.at(-1) === '') fields.pop();
  const uris: string[] = [];
  for (const field of fields) {
    const equals = field.indexOf('=');
    const [name, value] = [field.slice(0, Math.max(equals, 0)), field.slice(equals + 1)];
    if (name === 'rua') {
      const given = value.split(/[ \t]*,[ \t]*/);
      if (!given.every((uri) => URI.test(uri))) return null;
      uris.push(...given);
    } else if (!NAME.test(name) || !EXTENSION_VALUE.test(value)) return null;
  }
  return uris.length === 0 ? null : uris;
}

/** None for a scheme that is not one of the two, and for an address that cannot be one. */
function targetOf(uri: string): readonly ReportTarget[] {
  if (/^https:\/\//i.test(uri)) return [{ kind: 'web', uri }];
  if (!/^mailto:/i.test(uri)) return [];
  // RFC 6068: what follows the question mark would be header fields, which are ours.
  const encoded = uri.slice('mailto:'.length).replace(/[?#].*$/s, '');
  const address = decoded(encoded);
  if (address === null) return [];
  const parsed = parseMailbox(address);
  const isBare = parsed.ok && parsed.mailbox.name === null && !/[<>\s]/.test(address);
  return isBare ? [{ kind: 'mail', uri, to: parsed.mailbox }] : [];
}

function decoded(text: string): string | null {
  try {
    return decodeURIComponent(text);
  } catch {
    return null; // octets that are no UTF-8
  }
}
