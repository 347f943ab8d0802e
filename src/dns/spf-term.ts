// The terms of an SPF record (RFC 7208 §5, §6, §12), one by one. Pure.
import { isIP } from 'node:net';

const KINDS = ['all', 'include', 'a', 'mx', 'ptr', 'ip4', 'ip6', 'exists'] as const;
type Kind = (typeof KINDS)[number];

export type SpfTerm =
  | {
      readonly kind: Kind;
      /** `+` where none is written. */
      readonly qualifier: string;
      /** A domain or an address; '' where none is written. */
      readonly value: string;
      readonly bits4: number;
      readonly bits6: number;
    }
  | { readonly kind: 'modifier'; readonly name: string; readonly value: string };

const MECHANISM = new RegExp(
  String.raw`^([-+~?]?)(${KINDS.join('|')})(?::([!-~]+?))?(?:/(\d{1,3}))?(?://(\d{1,3}))?$`,
  'i',
);
const MODIFIER = /^([a-z][a-z0-9._-]*)=([!-~]*)$/i;

/** Null: no term, which makes the whole record an error for every receiver (§4.6). */
export function parseSpfTerm(text: string): SpfTerm | null {
  const modifier = MODIFIER.exec(text);
  if (modifier !== null) {
    const [, name = '', value = ''] = modifier;
    return { kind: 'modifier', name: name.toLowerCase(), value };
  }
  const mechanism = MECHANISM.exec(text);
  if (mechanism === null) return null;
  const [, sign = '', word = '', value = '', first, second] = mechanism;
  const kind = KINDS.find((one) => one === word.toLowerCase())!;
  const given = { value, first, second };
  if (!fits(kind, given)) return null;
  const bits6 = kind === 'ip6' ? first : second;
  return {
    kind,
    qualifier: sign === '' ? '+' : sign,
    value,
    bits4: Number(first ?? 32),
    bits6: Number(bits6 ?? 128),
  };
}

function fits(
  kind: Kind,
  d: {
    readonly value: string;
    readonly first: string | undefined;
    readonly second: string | undefined;
  },
): boolean {
  const isBare = d.first === undefined && d.second === undefined;
  switch (kind) {
    case 'all':
      return d.value === '' && isBare;
    case 'include':
    case 'exists':
      return d.value !== '' && isBare;
    case 'ptr':
      return isBare;
    case 'ip4':
      return isIP(d.value) === 4 && Number(d.first ?? 0) <= 32 && d.second === undefined;
    case 'ip6':
      return isIP(d.value) === 6 && Number(d.first ?? 0) <= 128 && d.second === undefined;
    default:
      return Number(d.first ?? 0) <= 32 && Number(d.second ?? 0) <= 128;
  }
}
