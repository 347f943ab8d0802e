/**
 * The kinds of values that a setting can have: how each is written, and what it is read as.
 *
 * In: the text of one setting. Out: a value, or undefined for what the kind does not allow, together with the words
 * that say what it does. Pure: nothing is read or resolved here, and it knows no setting by name.
 */
import { isIP } from 'node:net';

export const RATE_LIMIT_REQUESTS_MAX = 1_000_000;
const SECOND_MS = 1000;
const DAY_MS = 86_400 * SECOND_MS;
const UNIT_MS = { ms: 1, s: SECOND_MS, m: 60 * SECOND_MS, h: 3600 * SECOND_MS, d: DAY_MS } as const;

/** How one kind of value is written. `parse` gives undefined for what is not `allowed`. */
export interface Kind<T> {
  readonly allowed: string;
  readonly parse: (text: string) => T | undefined;
}

export function matching(allowed: string, accepts: (value: string) => boolean): Kind<string> {
  return { allowed, parse: (value) => (accepts(value) ? value : undefined) };
}

export function oneOf<const T extends string>(values: readonly T[]): Kind<T> {
  const allowed = `one of ${values.map((value) => `\`${value}\``).join(', ')}`;
  return { allowed, parse: (value) => values.find((candidate) => candidate === value) };
}

export function wholeNumber(min: number, max: number): Kind<number> {
  return {
    allowed: `a whole number from ${min} to ${max}`,
    parse: (value) => {
      const number = /^\d{1,9}$/.test(value) ? Number(value) : NaN;
      return number >= min && number <= max ? number : undefined;
    },
  };
}

/** Milliseconds. */
export function duration(minMs: number, maxDays: number): Kind<number> {
  const min = minMs % SECOND_MS === 0 ? `${minMs / SECOND_MS}s` : `${minMs}ms`;
  return {
    allowed: `a duration from \`${min}\` to \`${maxDays}d\`, written like \`500ms\`, \`90s\`, \`1m\`, \`2h\` or \`4d\``,
    parse: (value) => {
      const [, count, unit] = /^(\d{1,9})(ms|s|m|h|d)$/.exec(value) ?? [];
      const ms = Number(count) * UNIT_MS[unit as keyof typeof UNIT_MS];
      return ms >= minMs && ms <= maxDays * DAY_MS ? ms : undefined;
    },
  };
}

export function listOf<T>(item: Kind<T>, max: number): Kind<readonly T[]> {
  return {
    allowed: `a comma list of 1 to ${max}, each ${item.allowed}`,
    parse: (value) => {
      const parsed = value.split(',', max + 1).map((part) => item.parse(part.trim()));
      const known = parsed.filter((one) => one !== undefined);
      return known.length === parsed.length && known.length <= max
        ? Object.freeze(known)
        : undefined;
    },
  };
}

export const port = wholeNumber(1, 65_535);

export function isDnsName(value: string): boolean {
  // RFC 1035 §2.3.4: 63 octets a label, 253 characters a name; RFC 1123 §2.1: a label may begin with a
  // digit, but the last one is not a number, which keeps names apart from IPv4 addresses.
  const labels = value.split('.');
  return (
    value.length <= 253 &&
    labels.every((label) => /^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$/i.test(label)) &&
    !/^\d+$/.test(labels.at(-1) ?? '')
  );
}

export function parseUrl(value: string, scheme: RegExp): URL | undefined {
  // The URL parser drops tabs and line breaks and repairs `http:host`; a setting is not repaired.
  return scheme.test(value) && !/\s/.test(value) ? (URL.parse(value) ?? undefined) : undefined;
}

function isPercentEncoded(value: string): boolean {
  try {
    decodeURIComponent(value);
    return true;
  } catch {
    return false; // A lone `%`, or bytes that are not UTF-8.
  }
}

export function parsePublicUrl(value: string): string | undefined {
  const url = parseUrl(value, /^https?:\/\//i);
  if (url === undefined || url.username !== '' || url.password !== '' || /[?#]/.test(value)) {
    return undefined;
  }
  return `${url.origin}${url.pathname}`.replace(/\/+$/, '');
}

export function parseSmarthostUrl(value: string): URL | undefined {
  const url = parseUrl(value, /^smtps?:\/\//i);
  if (url === undefined || /[?#]/.test(value) || !/^\/?$/.test(url.pathname)) return undefined;
  const host = url.hostname.replace(/^\[(.*)\]$/, '$1');
  const credentials = [url.username, url.password];
  const whole =
    credentials.every((part) => part === '') || credentials.every((part) => part !== '');
  const sound = (isIP(host) !== 0 || isDnsName(host)) && url.port !== '0';
  return sound && whole && credentials.every(isPercentEncoded) ? url : undefined;
}

/** `s3://[user:password@]bucket[/prefix][?endpoint=...&region=...]`, user and password percent-encoded. */
function isBucketUrl(value: string): boolean {
  const url = parseUrl(value, /^s3:\/\//);
  if (url === undefined || url.hash !== '' || url.port !== '') return false;
  const { hostname, pathname, searchParams, username, password } = url;
  const isWhole = (username === '') === (password === '');
  const isPlace =
    /^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$/.test(hostname) &&
    /^\/?$|^(\/[A-Za-z0-9_.-]{1,64}){1,8}\/?$/.test(pathname);
  const names = [...searchParams.keys()];
  const isKnown = names.every((name) => name === 'endpoint' || name === 'region');
  const endpoint = searchParams.get('endpoint');
  return (
    isPlace &&
    isWhole &&
    [username, password].every(isPercentEncoded) &&
    isKnown &&
    new Set(names).size === names.length &&
    (endpoint === null || parsePublicUrl(endpoint) !== undefined) &&
    /^[a-z0-9-]{1,64}$/.test(searchParams.get('region') ?? 'none')
  );
}

/** Where blobs are kept. */
export const blobStore = matching(
  '`disk`, or `s3://bucket?endpoint=...&region=...` (before the bucket perhaps `user:password@`, percent-encoded; after it perhaps `/prefix`)',
  (value) => value === 'disk' || isBucketUrl(value),
);

export function isDnsServer(value: string): boolean {
  const [, bracketed, bare, portText] =
    /^(?:\[([0-9a-f:.]+)\]|([0-9.]+))(?::(\d+))?$/i.exec(value) ?? [];
  const address = bracketed === undefined ? isIP(bare ?? '') === 4 : isIP(bracketed) === 6;
  return address && (portText === undefined || port.parse(portText) !== undefined);
}

export function isCidr(value: string): boolean {
  const [, address, prefix] = /^([0-9a-f:.]+)\/(\d{1,3})$/i.exec(value) ?? [];
  const family = isIP(address ?? '');
  return family !== 0 && Number(prefix) <= (family === 4 ? 32 : 128);
}

export function parseRateLimit(
  value: string,
): { readonly requests: number; readonly windowMs: number } | undefined {
  const [count = '', window = '', ...rest] = value.split('/', 3);
  const requests = wholeNumber(1, RATE_LIMIT_REQUESTS_MAX).parse(count);
  const windowMs = duration(SECOND_MS, 1).parse(window);
  if (requests === undefined || windowMs === undefined || rest.length > 0) return undefined;
  return Object.freeze({ requests, windowMs });
}
