// Fetches one file from a URL that a tenant named, without being led into the operator's network.
//
// In: a URL, a path to write to, a budget of bytes, a signal that ends it. Out: a value: fetched, or a fault in words
// for the tenant. Per hop: the URL is read strictly (dns/url-guard.ts) and opened by dns/guarded-http.ts. Redirects are
// followed by hand, at most five; nothing is decompressed. It throws only for faults of our own disk.
import { createWriteStream } from 'node:fs';
import { pipeline } from 'node:stream/promises';
import type { Dispatcher } from 'undici';
import {
  FaultError,
  faultOf,
  openWeb,
  TRANSIENT_STATUSES,
  type Fault,
  type GuardedDependencies,
} from '../dns/guarded-http.ts';
import { readUrl, type WebTarget } from '../dns/url-guard.ts';

/** How many more bytes may come, over all files that share it. */
export interface ByteBudget {
  left: number;
}

export interface Fetched {
  readonly kind: 'fetched';
  readonly sizeBytes: number;
  /** Of the response, as it came; null: it had none. */
  readonly contentType: string | null;
}

/** For all files of one email together; what the signal of an order is to be made of. */
export const FETCH_MAX_MS = 30_000;
const REDIRECTS_MAX = 5;
/** Of what came, as much again as the file and this: else it is a flood of 1xx, tiny chunks or their extensions. */
const OVERHEAD_BYTES_MAX = 1024 * 1024;
const OVERHEAD_LOOK_MS = 50;
const REDIRECTS: ReadonlySet<number> = new Set([301, 302, 303, 307, 308]);
const BODY_ENDS = ['content-length', 'transfer-encoding'] as const;
const PLAIN_CODINGS = [
  ['content-encoding', 'identity'],
  ['transfer-encoding', 'chunked'],
] as const;

/** What to fetch, and until when. `path` must not exist; after a fault it may, half written. */
export interface FetchOrder {
  readonly url: string;
  readonly path: string;
  readonly budget: ByteBudget;
  readonly signal: AbortSignal;
}

export async function fetchToFile(
  d: GuardedDependencies,
  order: FetchOrder,
): Promise<Fetched | Fault> {
  try {
    return await follow(d, order);
  } catch (error) {
    if (order.signal.aborted && !(error instanceof FaultError))
      return { kind: 'transient', reason: `it took longer than ${FETCH_MAX_MS / 1_000} seconds` };
    return faultOf(error);
  }
}

async function follow(d: GuardedDependencies, order: FetchOrder): Promise<Fetched> {
  const seen = new Set<string>();
  let text = order.url;
  for (;;) {
    const read = readUrl(text);
    const isFirst = seen.size === 0;
    if (!read.ok) {
      const whose = isFirst ? 'its URL' : 'it redirects to another URL, which';
      throw new FaultError('refused', `${whose} ${read.problem}`);
    }
    const { target } = read;
    target.url.hash = '';
    if (seen.has(target.url.href)) throw new FaultError('permanent', 'it redirects in a circle');
    if (seen.size > REDIRECTS_MAX) {
      throw new FaultError('permanent', `it redirects more than ${REDIRECTS_MAX} times`);
    }
    seen.add(target.url.href);
    const came = await visit(d, target, order);
    if ('kind' in came) return came;
    if (!URL.canParse(came.location, target.url.href)) {
      throw new FaultError('permanent', 'it redirects to something that is no URL');
    }
    text = new URL(came.location, target.url.href).href;
  }
}

async function visit(
  d: GuardedDependencies,
  target: WebTarget,
  order: FetchOrder,
): Promise<Fetched | { readonly location: string }> {
  const { signal } = order;
  const { client, socket } = await openWeb(d, target, signal);
  const progress = { bytes: 0, isBroken: false };
  socket.on('error', (error: NodeJS.ErrnoException) => {
    progress.isBroken ||= error.code === 'ECONNRESET';
  });
  const overhead = setInterval(() => {
    if (socket.bytesRead - 2 * progress.bytes <= OVERHEAD_BYTES_MAX) return;
    socket.destroy(new FaultError('permanent', 'the server sends much that is not the file'));
  }, OVERHEAD_LOOK_MS);
  try {
    const response = await client.request({
      method: 'GET',
      path: `${target.url.pathname}${target.url.search}`,
      headers: { accept: '*/*', 'accept-encoding': 'identity', 'user-agent': 'Mailstead' },
      signal,
    });
    response.body.on('error', () => undefined); // told to whoever reads it; without a reader it ends the process
    const location = readStatus(response);
    if (location !== null) return { location };
    const fetched = await save(response, order, progress);
    // The engine takes a reset for the end of a body that does not say where it ends.
    const saysItsEnd = BODY_ENDS.some((name) => response.headers[name] !== undefined);
    if (progress.isBroken && !saysItsEnd) throw new Error('the connection was lost');
    return fetched;
  } finally {
    clearInterval(overhead);
    socket.destroy();
    await client.destroy().catch(() => undefined);
  }
}

/** Where a redirect leads, or null for a response whose body is the file. */
function readStatus({ statusCode, headers }: Dispatcher.ResponseData): string | null {
  if (REDIRECTS.has(statusCode)) {
    const { location } = headers;
    if (typeof location === 'string') return location;
    throw new FaultError('permanent', `the server answered ${statusCode} without a Location`);
  }
  const isTransient = statusCode >= 500 || TRANSIENT_STATUSES.has(statusCode);
  if (statusCode !== 200 && statusCode !== 203) {
    throw new FaultError(
      isTransient ? 'transient' : 'permanent',
      `the server answered with status ${statusCode}`,
    );
  }
  // Unpacking would let a few kilobytes become gigabytes.
  for (const [name, plain] of PLAIN_CODINGS) {
    const coding = String(headers[name] ?? '').trim();
    if (coding !== '' && coding.toLowerCase() !== plain) {
      throw new FaultError(
        'permanent',
        `the server sends it compressed (${name}) although asked not to`,
      );
    }
  }
  return null;
}

async function save(
  response: Dispatcher.ResponseData,
  order: FetchOrder,
  progress: { bytes: number },
): Promise<Fetched> {
  const { budget } = order;
  const tooLarge = (): FaultError =>
    new FaultError(
      'permanent',
      'with it, the attachments of the email have more than 40 MB in base64',
    );
  const announced = Number(response.headers['content-length'] ?? 0);
  if (announced > budget.left) throw tooLarge();
  let sizeBytes = 0;
  await pipeline(
    response.body,
    async function* (source: AsyncIterable<Buffer>) {
      for await (const chunk of source) {
        sizeBytes += chunk.length;
        progress.bytes = sizeBytes;
        budget.left -= chunk.length;
        if (budget.left < 0) throw tooLarge();
        yield chunk;
      }
    },
    createWriteStream(order.path, { flags: 'wx', mode: 0o600 }),
    { signal: order.signal },
  );
  const { 'content-type': contentType } = response.headers;
  return {
    kind: 'fetched',
    sizeBytes,
    contentType: typeof contentType === 'string' ? contentType : null,
  };
}
