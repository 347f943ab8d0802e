// Posts a TLS report to an `https:` address (RFC 8460 §5.4): one request to a checked public address, without
// redirects, credentials or anything of the answer but its status.
import {
  faultOf,
  openWeb,
  TRANSIENT_STATUSES,
  type Fault,
  type GuardedDependencies,
} from '../dns/guarded-http.ts';
import { readUrl } from '../dns/url-guard.ts';
import { GZIP_TYPE } from './tls-report-document.ts';

/** From the DNS question to the status line. */
export const POST_MAX_MS = 30_000;

/** Resolves when the far end took it (null), or with what stood in the way. */
export async function postReport(
  d: GuardedDependencies,
  order: { readonly url: string; readonly gzipped: Buffer; readonly signal: AbortSignal },
): Promise<Fault | null> {
  const read = readUrl(order.url);
  if (!read.ok) return { kind: 'refused', reason: `its URL ${read.problem}` };
  const { target } = read;
  if (target.url.protocol !== 'https:') return { kind: 'refused', reason: 'it is not https' };
  const signal = AbortSignal.any([order.signal, AbortSignal.timeout(POST_MAX_MS)]);
  try {
    const { client, socket } = await openWeb(d, target, signal);
    try {
      const response = await client.request({
        method: 'POST',
        path: `${target.url.pathname}${target.url.search}`,
        headers: { 'content-type': GZIP_TYPE, accept: '*/*', 'user-agent': 'Mailstead' },
        body: order.gzipped,
        signal,
      });
      response.body.on('error', () => undefined); // without a reader it ends the process
      return faultOfStatus(response.statusCode);
    } finally {
      socket.destroy();
      await client.destroy().catch(() => undefined);
    }
  } catch (error) {
    if (signal.aborted) {
      return { kind: 'transient', reason: `it took longer than ${POST_MAX_MS / 1_000} seconds` };
    }
    return faultOf(error);
  }
}

function faultOfStatus(status: number): Fault | null {
  if (status >= 200 && status < 300) return null;
  const isTransient = status >= 500 || TRANSIENT_STATUSES.has(status);
  return {
    kind: isTransient ? 'transient' : 'permanent',
    reason: `the server answered with status ${status}`,
  };
}
