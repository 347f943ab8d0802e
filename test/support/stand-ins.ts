// What stands in documents for values that are other ones in every run: the same value gets the same stand-in, and the same
// run gets the same stand-ins.
import { createHash } from 'node:crypto';

export interface StandIns {
  /** A copy of a JSON value. `seed`: what the stand-ins of values that were not seen before are made from. */
  replaceIn<T>(seed: string, value: T): T;
}

/** When the documents say that everything happened. */
const STAGE_START = Date.parse('2026-05-06T09:00:00.000Z');
const SECOND_MS = 1_000;
const GAP_MS = 4;
const MINUTE_MS = 60_000;
const DAY_MS = 24 * 60 * MINUTE_MS;
/** Times further from now than this were meant: they keep their distance. */
const NEAR_MS = 10 * MINUTE_MS;

const UUID = /[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/gi;
const HEX_ID = /(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])/g;
const INSTANT = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)/g;
const MAIL_DATE =
  /\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d [+-]\d{4}/g;
const LOOPBACK_PORT = /(127\.0\.0\.1|\[::1\]|localhost):\d{2,5}/g;
/** Keys and signatures of DKIM, also folded; the time of a signature. */
const DKIM_VALUE = /\b(p|b|bh)=([A-Za-z0-9+/]{30,}=*)(?:\r\n\s+[A-Za-z0-9+/]+=*)*/g;
const DKIM_TIME = /\bt=\d{10}\b/g;
const TRACE_ID = /\bESMTP id [\w.]+/g;
const WEBHOOK_SECRET = /\b(whsec_)([A-Za-z0-9+/]{20,}=*)/g;
/** Of links, return paths, claims. */
const TOKEN = /(?<![\w-])(re_)?([\w-]{28,})(?![\w-])/g;
/** Of API keys: `prefix` shows it in lists. */
const KEY_START = 're_9fWkHq2L';
/** Ids that are no UUIDs. */
const SHORT_ID = /^[\w-]{22}$/;
const RSA_KEY_START = 'MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEA';
/** What numbers say that are other ones in every run. */
const NUMBERS: Readonly<Record<string, number>> = { duration_ms: 12, port: 2525 };

export function createStandIns(aliases: Readonly<Record<string, string>>): StandIns {
  const startedAt = Date.now();
  const ids = new Map<string, string>();
  const secrets = new Map<string, string>();
  /** In order of the real ones. */
  const instants: { readonly real: number; readonly staged: number }[] = [];
  const counts = new Map<string, number>();
  let step = 0;

  /** Different each time, and the same in every run. */
  function next(seed: string): string {
    const count = (counts.get(seed) ?? 0) + 1;
    counts.set(seed, count);
    return `${seed} ${count}`;
  }

  function idFor(seed: string, real: string): string {
    const plain = real.replaceAll('-', '').toLowerCase();
    const known = ids.get(plain) ?? uuidFrom(next(seed));
    ids.set(plain, known);
    return real.includes('-') ? known : known.replaceAll('-', '');
  }

  function secretFor(seed: string, real: string): string {
    const known = secrets.get(real) ?? textLike(next(seed), real);
    secrets.set(real, known);
    return known;
  }

  /** Those that are new are set between those that are known, in the order in which they happened. */
  function seeInstants(text: string): void {
    const found = [...text.matchAll(INSTANT)].map(([real]) => Date.parse(real));
    for (const real of found.toSorted((a, b) => a - b)) {
      if (farTime(real, startedAt) !== null) continue;
      const at = instants.findIndex((one) => one.real >= real);
      if (instants[at]?.real === real) continue;
      const before = (at < 0 ? instants.at(-1) : instants[at - 1])?.staged ?? STAGE_START;
      const after = instants[at]?.staged;
      const staged =
        after === undefined
          ? Math.max(STAGE_START + step * SECOND_MS, before + GAP_MS)
          : Math.round((before + after) / 2);
      instants.splice(at < 0 ? instants.length : at, 0, { real, staged });
    }
  }

  const stagedFor = (real: number): number =>
    farTime(real, startedAt) ?? instants.find((one) => one.real === real)?.staged ?? STAGE_START;

  function replaceText(seed: string, text: string): string {
    let result = text;
    for (const [real, alias] of Object.entries(aliases)) result = result.replaceAll(real, alias);
    const tokens = (found: string, start: string | undefined, token: string): string => {
      if (isStandIn(found) || !/\d/.test(token)) return found;
      const secret = secretFor(seed, token);
      return start === undefined ? secret : KEY_START + secret.slice(KEY_START.length);
    };
    return result
      .replace(DKIM_VALUE, (_, name: string, value: string) => `${name}=${secretFor(seed, value)}`)
      .replace(DKIM_TIME, `t=${STAGE_START / SECOND_MS}`)
      .replace(TRACE_ID, 'ESMTP id ag3p42ae6han29c4.1')
      .replace(UUID, (real) => idFor(seed, real))
      .replace(HEX_ID, (real) => idFor(seed, real))
      .replace(INSTANT, (real) => {
        const staged = new Date(stagedFor(Date.parse(real))).toISOString();
        return /\.\d/.test(real) ? staged : staged.replace(/\.\d+/, '');
      })
      .replace(MAIL_DATE, 'Wed, 06 May 2026 09:00:00 +0000')
      .replace(LOOPBACK_PORT, (_, host: string) => (host === 'localhost' ? `${host}:3000` : host))
      .replace(
        WEBHOOK_SECRET,
        (_, start: string, secret: string) => start + secretFor(seed, secret),
      )
      .replace(TOKEN, tokens);
  }

  /** A stand-in of the first steps must not be replaced again. */
  const isStandIn = (text: string): boolean =>
    [...ids.values(), ...secrets.values()].some(
      (known) => text.includes(known) || text.includes(known.replaceAll('-', '')),
    );

  function replace(seed: string, key: string, value: unknown): unknown {
    if (typeof value === 'string') {
      if (key === 'prefix') return KEY_START;
      if (key === 'id' && SHORT_ID.test(value)) return secretFor(seed, value);
      return replaceText(seed, value);
    }
    if (typeof value === 'number') return NUMBERS[key] ?? value;
    if (Array.isArray(value)) return value.map((item) => replace(seed, key, item));
    if (typeof value !== 'object' || value === null) return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, item]) => [name, replace(seed, name, item)]),
    );
  }

  return {
    replaceIn(seed, value) {
      step += 1;
      // As JSON has it: without what is undefined.
      const text = JSON.stringify(value);
      seeInstants(text);
      return replace(seed, '', JSON.parse(text)) as typeof value;
    },
  };
}

/** Null for what is near now. */
function farTime(real: number, startedAt: number): number | null {
  const date = new Date(real);
  if (real % DAY_MS === 0) {
    if (date.getUTCDate() === 1) return Date.parse('2026-06-01T00:00:00.000Z');
    return (
      Math.floor(STAGE_START / DAY_MS) * DAY_MS + real - Math.floor(startedAt / DAY_MS) * DAY_MS
    );
  }
  const distance = real - startedAt;
  if (Math.abs(distance) < NEAR_MS) return null;
  return STAGE_START + Math.round(distance / MINUTE_MS) * MINUTE_MS;
}

function uuidFrom(seed: string): string {
  const hex = createHash('sha256').update(seed).digest('hex');
  const variant = '89ab'[Number.parseInt(hex[16]!, 16) % 4]!;
  return `019e6f0a-${hex.slice(0, 4)}-7${hex.slice(5, 8)}-${variant}${hex.slice(9, 12)}-${hex.slice(20, 32)}`;
}

/** As long, of the same letters; what is the same in every public key stays. */
function textLike(seed: string, real: string): string {
  const start = real.startsWith(RSA_KEY_START) ? RSA_KEY_START : '';
  const end = /=*$/.exec(real)?.[0] ?? '';
  const count = real.length - start.length - end.length;
  let text = '';
  for (let i = 0; text.length < count; i += 1) {
    text += createHash('sha256').update(`${seed} ${i}`).digest('base64').replace(/[+/=]/g, '');
  }
  return start + text.slice(0, count) + end;
}
