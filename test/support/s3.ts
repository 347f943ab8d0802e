// An S3 server on loopback, and a door before it that can be shut, fall silent or cut answers short.
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, request as ask, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
// @ts-expect-error -- it has no types of its own
import S3rver from '@20minutes/s3rver';

interface Rover {
  run(): Promise<AddressInfo>;
  close(): Promise<void>;
}
const Server = S3rver as new (options: object) => Rover;

export type Fault =
  | 'none'
  /** Every connection is closed. */
  | 'away'
  /** What is asked for is not given; what is brought is taken. */
  | 'unreadable'
  /** Requests are taken, and never answered. */
  | 'silent'
  /** Of every answer with more than a few bytes, half arrives. */
  | 'cut';

export interface S3Bench {
  /** For MAILSTEAD_BLOB_STORE, with user and password. */
  readonly url: string;
  fault: Fault;
  /** Answers in place of the server where it returns one. */
  answer: (request: IncomingMessage) => string | null;
  /** Method and path of what was asked, oldest first. */
  readonly asked: string[];
  stop(): Promise<void>;
}

export const BUCKET = 'mail';
const SMALL_BYTES = 512;

export async function startS3(prefix = ''): Promise<S3Bench> {
  const directory = mkdtempSync(join(tmpdir(), 'mailstead-s3-'));
  const server = new Server({
    address: '127.0.0.1',
    port: 0,
    silent: true,
    // It reads the path of a listing otherwise than Amazon's does, so it would refuse one; unknown users it refuses.
    allowMismatchedSignatures: true,
    directory,
    configureBuckets: [{ name: BUCKET }],
  });
  const inside = (await server.run()).port;
  const sockets = new Set<Socket>();
  const bench: Omit<S3Bench, 'url' | 'stop'> = { fault: 'none', answer: () => null, asked: [] };
  const door = createServer((request, response) => {
    bench.asked.push(`${request.method} ${request.url}`);
    const own = bench.answer(request);
    if (own !== null) return void response.setHeader('content-type', 'application/xml').end(own);
    const isAway = bench.fault === 'unreadable' && request.method === 'GET';
    if (isAway || bench.fault === 'away') return void request.socket.destroy();
    if (bench.fault === 'silent') return void request.resume();
    pass(request, response);
  });
  const pass = (request: IncomingMessage, response: ServerResponse): void => {
    const { method, url, headers } = request;
    const onward = ask({ host: '127.0.0.1', port: inside, method, path: url, headers }, (reply) => {
      response.writeHead(reply.statusCode ?? 500, reply.headers);
      const lengthBytes = Number(reply.headers['content-length'] ?? 0);
      if (bench.fault !== 'cut' || lengthBytes < SMALL_BYTES) return void reply.pipe(response);
      let left = Math.floor(lengthBytes / 2);
      reply.on('data', (chunk: Buffer) => {
        response.write(chunk.subarray(0, left));
        left = Math.max(0, left - chunk.length);
        if (left === 0) setImmediate(() => request.socket.destroy());
      });
    });
    onward.on('error', () => request.socket.destroy());
    request.pipe(onward);
  };
  door.on('connection', (socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket));
    if (bench.fault === 'away') socket.destroy();
  });
  await new Promise<void>((resolve) => door.listen(0, '127.0.0.1', () => resolve()));
  const { port } = door.address() as AddressInfo;
  const url = `s3://S3RVER:S3RVER@${BUCKET}${prefix}?endpoint=http://127.0.0.1:${port}&region=us-east-1`;
  return Object.assign(bench, {
    url,
    async stop() {
      for (const socket of sockets) socket.destroy();
      await new Promise((resolve) => door.close(resolve));
      await server.close();
      rmSync(directory, { recursive: true, force: true });
    },
  });
}
