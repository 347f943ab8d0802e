// What reading a file of rules (config/*.json) takes everywhere.
import { BlockList, isIP } from 'node:net';

export const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** The file as JSON. Throws an Error that repeats none of it: an operator's files may hold passwords. */
export function parseFile(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    // Node shows what stands around the fault.
    const why = (error as Error).message.replace(/, (?:\.{3})?"[\s\S]* is not valid JSON$/, '');
    // oxlint-disable-next-line preserve-caught-error -- a log shows causes, too
    throw new Error(`it is not valid JSON: ${why}`);
  }
}

/** A pattern without regard to case; null when it is no regular expression. */
export function compile(text: string): RegExp | null {
  try {
    return new RegExp(text, 'i');
  } catch {
    return null;
  }
}

export function oneOf<T extends string>(value: unknown, at: string, allowed: readonly T[]): T {
  const found = allowed.find((one) => one === value);
  if (found !== undefined) return found;
  throw wrong(at, `one of ${allowed.join(', ')}`);
}

export function list(value: unknown, at: string, max: number): readonly unknown[] {
  if (!Array.isArray(value)) throw wrong(at, 'a list');
  if (value.length > max) throw new Error(`${at}: has more than ${max} entries`);
  return value;
}

/** Addresses and networks: whether an address is in one of them. */
export function networks(value: unknown, at: string, max: number): (address: string) => boolean {
  const found = new BlockList();
  const entries = list(value, at, max);
  for (const [index, one] of entries.entries()) {
    const [address = '', prefix, ...rest] = typeof one === 'string' ? one.split('/') : [];
    const bits = isIP(address) === 4 ? 32 : 128;
    const isWhole = prefix === undefined || (/^\d{1,3}$/.test(prefix) && Number(prefix) <= bits);
    if (isIP(address) === 0 || !isWhole || rest.length > 0) {
      throw wrong(`${at}[${index}]`, 'an address or a network such as 10.0.0.0/8');
    }
    found.addSubnet(address, Number(prefix ?? bits), familyOf(address));
  }
  if (entries.length === 0) return () => false;
  return (address) => isIP(address) !== 0 && found.check(address, familyOf(address));
}

const familyOf = (address: string): 'ipv4' | 'ipv6' => (isIP(address) === 4 ? 'ipv4' : 'ipv6');

/** The object with what it leaves out filled in; a key that `defaults` does not have is refused. */
export function fields<K extends string>(
  value: unknown,
  at: string,
  defaults: Readonly<Record<K, unknown>>,
): Readonly<Record<K, unknown>> {
  if (!isObject(value)) throw wrong(at, 'an object');
  const strange = Object.keys(value).find((key) => !Object.hasOwn(defaults, key));
  if (strange !== undefined) {
    const known = Object.keys(defaults).join(', ');
    throw new Error(`${at}: ${JSON.stringify(strange)} is not known; it may hold ${known}`);
  }
  return { ...defaults, ...value };
}

const UNITS_MS: Readonly<Record<string, number>> = {
  ms: 1,
  s: 1_000,
  m: 60_000,
  h: 3_600_000,
  d: 86_400_000,
};

/** Above 0, in ms. */
export function duration(
  value: unknown,
  at: string,
  max: { readonly ms: number; readonly words: string },
): number {
  const match = typeof value === 'string' ? /^(\d{1,9})(ms|s|m|h|d)$/.exec(value) : null;
  const ms = Number(match?.[1]) * (UNITS_MS[match?.[2] ?? ''] ?? Number.NaN);
  if (ms > 0 && ms <= max.ms) return ms;
  throw wrong(
    at,
    `a duration up to \`${max.words}\`, written like \`90s\`, \`30m\`, \`4h\` or \`1d\``,
  );
}

export const wrong = (at: string, expected: string): Error =>
  new Error(`${at}: must be ${expected}`);
