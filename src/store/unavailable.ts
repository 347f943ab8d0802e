// Tells "the database, or the blob store, is away" from every other error, for the edges: 503 or 451 and later again,
// instead of a fault of ours.
import { BlobsUnavailable } from './blobs-unavailable.ts';

const UNREACHABLE = new Set([
  'ECONNREFUSED',
  'ECONNRESET',
  'ENOENT', // the socket file of an embedded Postgres that is down
  'EPIPE',
  'ETIMEDOUT',
  'EHOSTUNREACH',
  'ENETUNREACH',
  'ENOTFOUND',
  'EAI_AGAIN',
]);
// Classes 08 (connection), 53 (out of resources: connections, memory, disk) and 57P (shutdown, crash).
const SQLSTATE = /^(08...|53...|57P0[1-5])$/;
const DRIVER_MESSAGE =
  /^(Connection terminated|timeout exceeded when trying to connect|Query read timeout|Client has encountered a connection error|terminating connection|the database system is)/;

/** The database answers, but not as fast as it is asked. */
export class DatabaseBusy extends Error {
  override name = 'DatabaseBusy';
  /** Class 53: insufficient resources. */
  readonly code = '53000';

  constructor() {
    super('the database does not keep up');
  }
}

/** Whether the error says that what we store in cannot be asked right now, rows or blobs. Looks through causes. */
export function isDatabaseUnavailable(error: unknown): boolean {
  for (let at: unknown = error, depth = 0; at instanceof Error && depth < 5; depth++) {
    if (at instanceof BlobsUnavailable) return true;
    const code = (at as { code?: unknown }).code;
    if (typeof code === 'string' && (UNREACHABLE.has(code) || SQLSTATE.test(code))) return true;
    if (DRIVER_MESSAGE.test(at.message)) return true;
    at = at.cause;
  }
  return false;
}
