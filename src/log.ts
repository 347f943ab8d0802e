/**
 * The program's one logger.
 *
 * In: a constant phrase plus fields (`log.info({ email_id, tenant_id, attempt }, 'attempt broke')`). Out: one
 * line a fact on stdout, as JSON in production and as `HH:MM:SS level message key=value` in
 * development. Refuses to print credentials and bodies: the value of every key in REDACTED, at any
 * depth and in any case, is replaced before the line leaves this file.
 */
import { pino } from 'pino';
import type { DestinationStream, Logger } from 'pino';

export type { Logger };

const REDACTED = 'authorization|password|token|secret|api_?key|html|text|raw';
const REDACTED_KEY = new RegExp(`^(?:${REDACTED})$`, 'i');
// Looked for in the finished JSON, so that only lines that hold such a key pay for a parse. pino's
// own `redact` needs one path per depth and key, misses lists and cost 15 µs a line at three levels.
const HOLDS_REDACTED = new RegExp(`"(?:${REDACTED})":`, 'i');

/** Fields that every line has and that only a machine wants: left out of the development format. */
const MACHINE_FIELDS: ReadonlySet<string> = new Set([
  'level',
  'time',
  'pid',
  'hostname',
  'name',
  'msg',
]);

/**
 * A pino logger at `level` (a pino level name) that calls itself `name`.
 *
 * Without `mode` the lines are JSON, as in production. Without `write` they go to stdout, at once:
 * nothing is lost when the process exits right after.
 */
export function createLogger(options: {
  readonly level: string;
  readonly name: string;
  readonly mode?: 'development' | 'production';
  readonly write?: (line: string) => void;
  /** What every line has beside its own, such as the trace that it belongs to. */
  readonly fields?: () => Readonly<Record<string, string>>;
}): Logger {
  const write = options.write ?? null;
  const human = options.mode === 'development';
  return pino(
    {
      level: options.level,
      name: options.name,
      timestamp: pino.stdTimeFunctions.isoTime,
      ...(options.fields === undefined ? {} : { mixin: options.fields }),
      formatters: { level: (label) => ({ level: label }) },
      serializers: { err: (error: unknown) => describeError(error, 0) },
      hooks: { streamWrite: (line) => (HOLDS_REDACTED.test(line) ? redact(line) : line) },
    },
    destination(human, write),
  );
}

function destination(human: boolean, write: ((line: string) => void) | null): DestinationStream {
  if (!human && write === null) return pino.destination({ fd: 1, sync: true });
  const out = write ?? ((line: string) => void process.stdout.write(line));
  return { write: (line) => out(human ? formatForHumans(line) : line) };
}

const CAUSES_MAX = 5;

/**
 * What an error says of itself, and no other property: drivers hang themselves onto their errors, with sockets
 * and secret keys.
 */
function describeError(error: unknown, depth: number): unknown {
  if (!(error instanceof Error)) return error;
  const { name, message, stack, cause } = error;
  const { code } = error as { code?: unknown };
  const hasCode = typeof code === 'string' || typeof code === 'number';
  return {
    type: error.constructor.name || name,
    message,
    ...(hasCode ? { code } : {}),
    ...(stack === undefined ? {} : { stack }),
    ...(cause instanceof Error && depth < CAUSES_MAX
      ? { cause: describeError(cause, depth + 1) }
      : {}),
  };
}

function redact(line: string): string {
  const redacted = JSON.stringify(JSON.parse(line), (key, value: unknown) =>
    REDACTED_KEY.test(key) ? '[redacted]' : value,
  );
  return `${redacted}\n`;
}

function formatForHumans(line: string): string {
  const entry = JSON.parse(line) as Readonly<Record<string, unknown>>;
  const clock = new Date(String(entry['time'])).toTimeString().slice(0, 8);
  const fields = Object.entries(entry)
    .filter(([key]) => !MACHINE_FIELDS.has(key))
    .map(([key, value]) => ` ${key}=${formatValue(value)}`);
  const message = escapeControls(String(entry['msg'] ?? ''));
  return `${clock} ${String(entry['level']).padEnd(5)} ${message}${fields.join('')}\n`;
}

function formatValue(value: unknown): string {
  const plain = typeof value === 'string' && /^[^\s"=]+$/.test(value);
  return escapeControls(plain ? value : JSON.stringify(value));
}

/** What peers say ends up in these lines; it must not be able to steer a terminal or add a line. */
function escapeControls(text: string): string {
  return text.replace(
    /[\p{Cc}\u2028\u2029]/gu,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
}
