// One call of an endpoint: a POST to an address that the guard let through, without redirects, and the beginning of the
// answer. Connections are kept for the next call to the same URL, for a minute at most and only so many; before one is
// used again, its address passes the guard again.
import type { Socket } from 'node:net';
import type { Client, Dispatcher } from 'undici';
import { faultOf, openWeb } from '../dns/guarded-http.ts';
import type { WebTarget } from '../dns/url-guard.ts';
import { readEndpoint, type EndpointRules } from './endpoint.ts';

export interface Call {
  readonly webhookId: string;
  readonly endpoint: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string;
  /** Ends it, whoever wants that. */
  readonly signal: AbortSignal;
}

export interface Answer {
  /** Null: there was none. */
  readonly httpStatus: number | null;
  /** The beginning of its body. */
  readonly response: string | null;
  /** What happened instead of an acknowledgement; null for a plain status. */
  readonly error: string | null;
}

export interface Caller {
  /** Resolves with whatever came of it. Throws for a fault of this machine, such as too many open files. */
  call(order: Call): Promise<Answer>;
  close(): Promise<void>;
}

/** From the DNS question to the end of the answer. */
export const CALL_MAX_MS = 15_000;
/** An answer is read so far, since an endpoint expects that somebody reads it. */
const BODY_READ_MAX_BYTES = 8 * 1024;
const RESPONSE_KEPT_CHARS = 1_000;
/** Of what comes that is no body: else it is a flood of 1xx. */
const OVERHEAD_MAX_BYTES = 256 * 1024;
const OVERHEAD_LOOK_MS = 250;
/** After a 2xx its body has so much time; it is acknowledged already. */
const BODY_MAX_MS = 2_000;
const KEPT_MAX = 200;
const KEPT_MAX_MS = 60_000;

interface Connection {
  readonly client: Client;
  readonly socket: Socket;
  readonly openedAt: number;
  isLost: boolean;
}

export function createCaller(
  rules: EndpointRules,
  options: { readonly callMaxMs?: number } = {},
): Caller {
  const callMaxMs = options.callMaxMs ?? CALL_MAX_MS;
  /** Those not in use, by endpoint; the newest last. */
  const kept = new Map<string, Connection[]>();
  let keptCount = 0;

  const drop = ({ client, socket }: Connection): void => {
    socket.destroy();
    void client.destroy().catch(() => undefined);
  };
  const takeKept = (key: string): Connection | null => {
    for (;;) {
      const connections = kept.get(key);
      const connection = connections?.pop();
      if (connection === undefined) return null;
      if (connections?.length === 0) kept.delete(key);
      keptCount -= 1;
      const isGood =
        !connection.isLost &&
        performance.now() - connection.openedAt < KEPT_MAX_MS &&
        rules.web.guard.check(connection.socket.remoteAddress ?? '').ok;
      if (isGood) return connection;
      drop(connection);
    }
  };
  const keep = (key: string, connection: Connection): void => {
    if (connection.isLost) {
      drop(connection);
      return;
    }
    const [oldest] = kept.keys();
    if (keptCount >= KEPT_MAX && oldest !== undefined) {
      const connections = kept.get(oldest) ?? [];
      keptCount -= connections.length;
      kept.delete(oldest);
      for (const one of connections) drop(one);
    }
    const connections = kept.get(key);
    if (connections === undefined) kept.set(key, [connection]);
    else connections.push(connection);
    keptCount += 1;
  };
  const open = async (target: WebTarget, signal: AbortSignal): Promise<Connection> => {
    const connection: Connection = {
      ...(await openWeb(rules.web, target, signal)),
      openedAt: performance.now(),
      isLost: false,
    };
    connection.client.on('disconnect', () => {
      connection.isLost = true;
    });
    connection.socket.on('error', () => undefined);
    return connection;
  };

  const post = async (
    connection: Connection,
    about: { readonly key: string; readonly path: string; readonly order: Call },
  ): Promise<Answer | Error> => {
    const { socket, client } = connection;
    const before = socket.bytesRead;
    const overhead = setInterval(() => {
      if (socket.bytesRead - before > OVERHEAD_MAX_BYTES) socket.destroy();
    }, OVERHEAD_LOOK_MS);
    try {
      const response = await client.request({
        method: 'POST',
        path: about.path,
        headers: about.order.headers,
        body: about.order.body,
        signal: about.order.signal,
      });
      const body = await readBeginning(response);
      if (body.isWhole) keep(about.key, connection);
      else drop(connection);
      return { httpStatus: response.statusCode, response: body.text, error: null };
    } catch (error) {
      drop(connection);
      return error as Error;
    } finally {
      clearInterval(overhead);
    }
  };

  const attempt = async (order: Call): Promise<Answer | Error> => {
    const read = readEndpoint(rules, order.endpoint);
    if (!read.ok) return { httpStatus: null, response: null, error: `its URL ${read.problem}` };
    const { url } = read.target;
    const about = {
      key: `${order.webhookId} ${url.origin}`,
      path: `${url.pathname}${url.search}`,
      order,
    };
    const used = takeKept(about.key);
    if (used !== null) {
      const answer = await post(used, about);
      // The other side may have closed it just now; the same id makes a second copy harmless.
      if (!(answer instanceof Error) || order.signal.aborted) return answer;
    }
    return post(await open(read.target, order.signal), about);
  };

  return {
    async call(order) {
      const timeout = AbortSignal.timeout(callMaxMs);
      const signal = AbortSignal.any([order.signal, timeout]);
      const answer = await attempt({ ...order, signal }).catch((error: unknown) => error as Error);
      if (!(answer instanceof Error)) return answer;
      const error = timeout.aborted
        ? `it took longer than ${callMaxMs / 1_000} seconds`
        : faultOf(answer).reason;
      return { httpStatus: null, response: null, error };
    },
    async close() {
      const all = [...kept.values()].flat();
      kept.clear();
      keptCount = 0;
      await Promise.all(
        all.map(async ({ client, socket }) => {
          socket.destroy();
          await client.destroy().catch(() => undefined);
        }),
      );
    },
  };
}

/** Never rejects: an acknowledgement counts, whatever becomes of its body. */
async function readBeginning({
  body,
}: Dispatcher.ResponseData): Promise<{ readonly text: string; readonly isWhole: boolean }> {
  const pieces: Buffer[] = [];
  let size = 0;
  let isWhole = false;
  body.on('error', () => undefined); // told to whoever reads it; without a reader it ends the process
  const timer = setTimeout(() => body.destroy(), BODY_MAX_MS);
  try {
    for await (const piece of body as AsyncIterable<Buffer>) {
      pieces.push(piece);
      size += piece.length;
      if (size > BODY_READ_MAX_BYTES) break;
    }
    isWhole = size <= BODY_READ_MAX_BYTES;
  } catch {
    // what came is kept
  } finally {
    clearTimeout(timer);
  }
  const text = Buffer.concat(pieces).toString('utf8').slice(0, RESPONSE_KEPT_CHARS);
  return { text: text.replaceAll('\0', '\ufffd').toWellFormed(), isWhole };
}
