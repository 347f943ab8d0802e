/**
 * Where traces go, as an operator says it (config/telemetry.json).
 *
 * In: the parsed file. Out: the receiver, or null: nothing is traced. Refuses with a sentence what it does not know.
 */

export interface TracePolicy {
  /** The whole URL that OTLP over HTTP is posted to, as JSON. */
  readonly url: string;
  /** Sent along, such as a token; never logged. */
  readonly headers: Readonly<Record<string, string>>;
  /** Of requests and emails, the part that is traced: above 0, up to 1. */
  readonly ratio: number;
}

const HEADERS_MAX = 20;
const HEADER_NAME = /^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}$/;
const HEADER_VALUE = /^[\t\x20-\x7e]{0,2000}$/;

/** Null: off. Throws an Error that says what to fix. */
export function readTelemetryPolicy(file: unknown): TracePolicy | null {
  const { otlp } = known('the file', file, ['otlp']);
  const {
    url = null,
    headers = {},
    ratio = 1,
  } = known('`otlp`', otlp, ['url', 'headers', 'ratio']);
  const sent = readHeaders(headers);
  if (typeof ratio !== 'number' || !(ratio > 0 && ratio <= 1)) {
    throw new Error('`otlp.ratio` must be a number above 0, up to 1');
  }
  if (url === null) return null;
  const parsed = typeof url === 'string' ? URL.parse(url) : null;
  if (parsed === null || !/^https?:$/.test(parsed.protocol) || parsed.username !== '') {
    throw new Error(
      '`otlp.url` must be null or an http or https URL without a user, such as http://127.0.0.1:4318/v1/traces',
    );
  }
  return { url: parsed.href, headers: sent, ratio };
}

function readHeaders(headers: unknown): Readonly<Record<string, string>> {
  const entries = isObject(headers) ? Object.entries(headers) : null;
  const isGood = (entry: readonly [string, unknown]): entry is [string, string] =>
    HEADER_NAME.test(entry[0]) && typeof entry[1] === 'string' && HEADER_VALUE.test(entry[1]);
  if (entries === null || entries.length > HEADERS_MAX || !entries.every(isGood)) {
    throw new Error(
      `\`otlp.headers\` must be an object of at most ${HEADERS_MAX} HTTP headers with texts of printable ASCII`,
    );
  }
  return Object.fromEntries(entries);
}

function known(
  what: string,
  value: unknown,
  names: readonly string[],
): Readonly<Record<string, unknown>> {
  if (!isObject(value)) throw new Error(`${what} must be an object`);
  const unknown = Object.keys(value).find((name) => !names.includes(name));
  if (unknown === undefined) return value;
  throw new Error(`${what} has \`${unknown}\`, but only ${names.join(', ')} can be set`);
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);
