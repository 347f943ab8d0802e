// The listening socket. It is bound before anything else starts, so that a port in use is all that happens, and
// answers 503 until the app is there. What is no request that the app could answer gets its envelope here: bad
// bytes, headers too long, a missing Host, an expectation. On stop it is the first to let nobody in.
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { createServer as createTlsServer, type Server as SecureServer } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { SecureContext } from 'node:tls';
import { Refusal } from '../access/refusal.ts';
import { headersWithoutRequest, setCommonHeaders } from './common-headers.ts';
import { envelopeOf, ENVELOPE_TYPE, sendRefusal } from './envelope.ts';

export type Answerer = (request: IncomingMessage, response: ServerResponse) => void;

export interface FrontDoor {
  readonly port: number;
  /** Where a program on this machine reaches it, without a slash at the end. */
  readonly localUrl: string;
  /** From now on the app answers. */
  open(answer: Answerer): void;
  /** Lets nobody in any more, resolves when what was being answered is; repeated calls wait for the first. */
  close(): Promise<void>;
}

/** The address cannot be listened on; the message is one sentence for the operator. */
export class PortUnusable extends Error {
  override name = 'PortUnusable';
}

const STOP_MAX_MS = 5_000;
const IDLE_SWEEP_MS = 50;
/** For a peer to read the last answer before its connection is cut. */
const LINGER_MS = 1_000;
const RETRY_AFTER_SECONDS = 2;

/** PEM pairs that an HTTPS door shows. */
export interface DoorCertificates {
  /** For who names no host, or one that is not known. */
  current(): { readonly cert: string; readonly key: string };
  onChange(listener: (pair: { readonly cert: string; readonly key: string }) => void): void;
  /** Of a name in lower case; null: the one above. */
  contextOf(name: string): SecureContext | null;
}

const HANDSHAKE_MAX_MS = 10_000;

/** Resolves when the port is bound. Throws PortUnusable. */
export async function openFrontDoor(options: {
  readonly port: number;
  /** Null: every address of this machine. */
  readonly host: string | null;
  /** Absent: plain HTTP. */
  readonly tls?: DoorCertificates;
  /** Where the port is set. */
  readonly setting?: string;
}): Promise<FrontDoor> {
  let answer: Answerer = answerNotYet;
  let closing: Promise<void> | null = null;
  const current = new WeakMap<Duplex, ServerResponse>();
  const { tls } = options;
  const secure = tls === undefined ? null : createSecureServer(tls);
  // RFC 9112 §3.2 is obeyed below, with an envelope.
  const server = secure ?? createServer({ requireHostHeader: false });
  const cutHandshakes = secure === null ? () => undefined : guardHandshakes(secure);
  server.on('request', (request: IncomingMessage, response: ServerResponse) => {
    current.set(request.socket, response);
    if (closing !== null) response.setHeader('connection', 'close');
    if (request.httpVersion === '1.1' && request.headers.host === undefined) {
      refuse(request, response, new Refusal('invalid_request', 'The request has no Host header.'));
    } else answer(request, response);
  });
  server.on('checkExpectation', (request: IncomingMessage, response: ServerResponse) => {
    const message = 'The only expectation that is met here is `100-continue`.';
    refuse(request, response, new Refusal('expectation_failed', message));
  });
  const answered = new WeakSet<Duplex>();
  server.on('clientError', (error: NodeJS.ErrnoException, socket: Duplex) => {
    if (answered.has(socket)) return; // every further piece of it fails, too
    answered.add(socket);
    const response = current.get(socket);
    const isMidAnswer = response?.headersSent === true && !response.writableEnded;
    if (error.code === 'ECONNRESET' || !socket.writable || isMidAnswer) {
      socket.destroy();
      return;
    }
    socket.end(writeRefusal(refusalOf(error)));
    setTimeout(() => socket.destroy(), LINGER_MS).unref();
  });
  await new Promise<void>((resolve, reject) => {
    server.once('error', (error) => reject(explain(error, options)));
    const { port, host } = options;
    server.listen(host === null ? { port } : { port, host }, () => resolve());
  });

  const close = async (): Promise<void> => {
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    cutHandshakes();
    // A connection becomes idle when its last answer is out, which may be after this.
    const sweeper = setInterval(() => server.closeIdleConnections(), IDLE_SWEEP_MS);
    const timer = setTimeout(() => server.closeAllConnections(), STOP_MAX_MS);
    await closed;
    clearInterval(sweeper);
    clearTimeout(timer);
  };
  const address = server.address() as AddressInfo;
  return {
    port: address.port,
    localUrl: `${tls === undefined ? 'http' : 'https'}://${localHost(address)}:${address.port}`,
    open(app) {
      answer = app;
    },
    close: () => (closing ??= close()),
  };
}

function createSecureServer(tls: DoorCertificates): SecureServer {
  const server = createTlsServer({
    requireHostHeader: false,
    ...tls.current(),
    minVersion: 'TLSv1.2',
    handshakeTimeout: HANDSHAKE_MAX_MS,
    ALPNProtocols: ['http/1.1'],
    // RFC 6066 §3. Undefined: the pair above.
    SNICallback: (name, done) => done(null, tls.contextOf(name.toLowerCase()) ?? undefined),
  });
  tls.onChange((pair) => server.setSecureContext({ ...pair, minVersion: 'TLSv1.2' }));
  return server;
}

/** Until its handshake is over, a connection is none that the server could cut; what this returns cuts those. */
function guardHandshakes(server: SecureServer): () => void {
  const open = new Map<string, Socket>();
  const key = ({ remoteAddress, remotePort }: Socket): string => `${remoteAddress} ${remotePort}`;
  server.on('connection', (socket: Socket) => {
    const own = key(socket);
    open.set(own, socket);
    socket.once('close', () => open.delete(own));
  });
  server.on('secureConnection', (socket: Socket) => open.delete(key(socket)));
  return () => {
    for (const socket of open.values()) socket.destroy();
  };
}

/** The address to connect to: the one bound, or loopback where it is all of them. */
function localHost({ address, family }: AddressInfo): string {
  if (address === '0.0.0.0' || address === '::') return '127.0.0.1';
  return family === 'IPv6' ? `[${address}]` : address;
}

function explain(
  error: NodeJS.ErrnoException,
  at: { port: number; host: string | null; setting?: string },
): Error {
  const setting = at.setting ?? 'MAILSTEAD_HTTP_PORT';
  const why =
    error.code === 'EADDRINUSE'
      ? `port ${at.port} is in use by another program; stop it or set ${setting}`
      : error.code === 'EACCES'
        ? `port ${at.port} needs rights that this user does not have; set ${setting}`
        : `${at.host ?? 'any address'}, port ${at.port}, cannot be listened on (${error.code ?? error.message}); ` +
          `set MAILSTEAD_HTTP_HOST or ${setting}`;
  return new PortUnusable(why, { cause: error });
}

function answerNotYet(request: IncomingMessage, response: ServerResponse): void {
  const path = request.url?.split('?')[0];
  const isAsking = request.method === 'GET' || request.method === 'HEAD';
  if (isAsking && path === '/health/live') sendJson(request, response, 200, { status: 'live' });
  else if (isAsking && path === '/health/ready') {
    const missing = [{ what: 'start', why: 'The appliance is starting.' }];
    sendJson(request, response, 503, { status: 'not_ready', missing });
  } else {
    const refusal = new Refusal('service_unavailable', 'The appliance is starting; try again.', {
      retryAfterSeconds: RETRY_AFTER_SECONDS,
    });
    refuse(request, response, refusal);
  }
}

function sendJson(
  request: IncomingMessage,
  response: ServerResponse,
  ...[status, body]: [number, unknown]
): void {
  setCommonHeaders(request, response);
  response.statusCode = status;
  response.setHeader('content-type', ENVELOPE_TYPE);
  response.end(JSON.stringify(body));
}

/** Ends the connection, too: nobody has read what else is on it. */
function refuse(request: IncomingMessage, response: ServerResponse, refusal: Refusal): void {
  setCommonHeaders(request, response);
  response.setHeader('connection', 'close');
  sendRefusal(response, refusal);
}

/** What node's parser raised. */
function refusalOf({ code }: NodeJS.ErrnoException): Refusal {
  switch (code) {
    case 'HPE_HEADER_OVERFLOW':
      return new Refusal('headers_too_large', 'The headers of the request are too large.');
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return new Refusal('request_too_large', 'The chunk extensions of the body are too large.');
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return new Refusal('request_timeout', 'The request did not arrive in time.');
    default:
      return new Refusal('invalid_request', 'The request is not valid HTTP.');
  }
}

function writeRefusal(refusal: Refusal): string {
  const body = JSON.stringify(envelopeOf(refusal));
  const fields = [
    ...headersWithoutRequest(),
    ['content-type', ENVELOPE_TYPE],
    ['content-length', String(Buffer.byteLength(body))],
    ['connection', 'close'],
  ];
  const head = fields.map(([name, value]) => `${name}: ${value}\r\n`).join('');
  return `HTTP/1.1 ${refusal.status} Refused\r\n${head}\r\n${body}`;
}
