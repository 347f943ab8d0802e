// The port that Prometheus scrapes: `GET /metrics` and nothing else. It asks for no key, so it belongs on a network that
// only the operator reaches.
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { CONTENT_TYPES, type Gathering, type MetricsType } from './gathering.ts';

export interface MetricsEndpoint {
  readonly port: number;
  stop(): Promise<void>;
}

/** Scrapers are few. */
const CONNECTIONS_MAX = 50;
const REQUEST_MAX_MS = 10_000;
const HEADERS_MAX_BYTES = 8 * 1024;
const CHECK_EVERY_MS = 5_000;
/** Nothing was read or written for so long: whoever asks and does not read would keep its place for ever. */
const IDLE_MAX_MS = 30_000;

/** Resolves when it listens; rejects with Node's error when it cannot. `host` null: all interfaces. */
export async function openMetricsEndpoint(d: {
  readonly port: number;
  readonly host: string | null;
  readonly gathering: Pick<Gathering, 'metrics'>;
  readonly onError: (error: unknown) => void;
}): Promise<MetricsEndpoint> {
  const answer = async (request: IncomingMessage, response: ServerResponse): Promise<void> => {
    request.resume();
    if (request.url?.split('?', 1)[0] !== '/metrics') {
      return say(response, 404, 'Metrics are at /metrics.\n');
    }
    if (request.method !== 'GET' && request.method !== 'HEAD') {
      response.setHeader('allow', 'GET, HEAD');
      return say(response, 405, 'Use GET.\n');
    }
    const type = wanted(request.headers.accept);
    const text = await d.gathering.metrics(type);
    response.setHeader('content-type', CONTENT_TYPES[type]);
    response.end(text);
  };
  const server = createServer(
    {
      requestTimeout: REQUEST_MAX_MS,
      headersTimeout: REQUEST_MAX_MS,
      connectionsCheckingInterval: CHECK_EVERY_MS,
      maxHeaderSize: HEADERS_MAX_BYTES,
    },
    (request, response) => {
      response.setHeader('cache-control', 'no-store');
      response.setHeader('x-content-type-options', 'nosniff');
      answer(request, response).catch((error: unknown) => {
        d.onError(error);
        if (response.headersSent) response.destroy();
        else say(response, 500, 'The metrics cannot be gathered now.\n');
      });
    },
  );
  server.maxConnections = CONNECTIONS_MAX;
  server.timeout = IDLE_MAX_MS;
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject);
    server.listen({ port: d.port, ...(d.host === null ? {} : { host: d.host }) }, () => {
      server.removeListener('error', reject);
      resolve();
    });
  });
  server.on('error', d.onError);
  return {
    port: (server.address() as AddressInfo).port,
    async stop() {
      const closed = new Promise<void>((resolve) => void server.close(() => resolve()));
      server.closeAllConnections();
      await closed;
    },
  };
}

function say(response: ServerResponse, status: number, text: string): void {
  response.statusCode = status;
  response.setHeader('content-type', 'text/plain; charset=utf-8');
  response.end(text);
}

/** Whoever names OpenMetrics and does not refuse it gets that. */
function wanted(accept: string | undefined): MetricsType {
  const named = /application\/openmetrics-text\s*((?:;[^,]*)?)/i.exec(accept ?? '');
  return named === null || /;\s*q=0(?:\.0*)?\s*(?:;|$)/i.test(named[1] ?? '')
    ? 'prometheus'
    : 'openmetrics';
}
