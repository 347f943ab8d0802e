// The load generator, a process of its own: POSTs the same bytes, or a few in turn, over keep-alive connections, as fast as
// answers come (closed loop) or at a given rate (latency then counts from the moment a request was due, so
// that waiting for a free connection is not left out). Reads no more of an answer than its status and its
// end. Gets orders and gives results over IPC; ends when the parent is gone.
import { connect, type Socket } from 'node:net';

export interface Order {
  readonly port: number;
  /** Whole HTTP requests, sent in turn. */
  readonly requests: readonly string[];
  readonly count: number;
  readonly connections: number;
  /** Null: closed loop. */
  readonly ratePerS: number | null;
}

export interface Load {
  readonly accepted: number;
  readonly refused: number;
  readonly firstRefusal: string | null;
  /** Date.now() at the first request. */
  readonly startedAtMs: number;
  readonly seconds: number;
  readonly p50Ms: number;
  readonly p95Ms: number;
  readonly p99Ms: number;
  readonly maxMs: number;
  /** Of this process. */
  readonly cpuS: number;
}

const TICK_MS = 1;
const REFUSAL_CHARS_MAX = 500;

process.on('disconnect', () => process.exit(0));
process.on('SIGINT', () => undefined); // The parent decides.
process.on('message', (order: Order) => {
  send(order).then(
    (load) => process.send?.({ load }),
    (error: unknown) => process.send?.({ failed: String(error) }),
  );
});

async function send(order: Order): Promise<Load> {
  const requests = order.requests.map((request) => Buffer.from(request, 'latin1'));
  const lines = await Promise.all(
    Array.from({ length: order.connections }, () => openLine(order.port)),
  );
  const cpuBefore = process.cpuUsage();
  const startedAtMs = Date.now();
  const startedAt = performance.now();
  const latencies = new Float64Array(order.count);
  let next = 0;
  let answered = 0;
  let refused = 0;
  let firstRefusal: string | null = null;

  await new Promise<void>((resolve, reject) => {
    const idle = [...lines];
    const dueAt = (index: number): number =>
      order.ratePerS === null ? 0 : startedAt + (index / order.ratePerS) * 1000;
    const pump = (): void => {
      const now = performance.now();
      while (next < order.count && idle.length > 0 && dueAt(next) <= now) {
        // In turn: one that is left alone for long is closed by the server.
        const line = idle.shift()!;
        const since = order.ratePerS === null ? now : dueAt(next);
        const request = requests[next % requests.length]!;
        next += 1;
        line.ask(request, (refusal) => {
          latencies[answered] = performance.now() - since;
          answered += 1;
          if (refusal !== null) {
            refused += 1;
            firstRefusal ??= refusal;
          }
          idle.push(line);
          if (answered === order.count) resolve();
          else pump();
        });
      }
    };
    for (const line of lines)
      line.onLost(() => reject(new Error('the server closed a connection')));
    const tick = (): void => {
      pump();
      if (next < order.count) setTimeout(tick, TICK_MS);
    };
    if (order.ratePerS === null) pump();
    else tick();
  });

  const seconds = (performance.now() - startedAt) / 1000;
  const cpu = process.cpuUsage(cpuBefore);
  for (const line of lines) line.close();
  latencies.sort();
  const at = (part: number): number => latencies[Math.ceil(part * order.count) - 1] ?? 0;
  return {
    accepted: order.count - refused,
    refused,
    firstRefusal,
    startedAtMs,
    seconds,
    p50Ms: at(0.5),
    p95Ms: at(0.95),
    p99Ms: at(0.99),
    maxMs: at(1),
    cpuS: (cpu.user + cpu.system) / 1e6,
  };
}

interface Line {
  /** `done` gets null for a 200, else the beginning of the answer. */
  ask(request: Buffer, done: (refusal: string | null) => void): void;
  onLost(lost: () => void): void;
  close(): void;
}

function openLine(port: number): Promise<Line> {
  return new Promise((resolve, reject) => {
    const socket: Socket = connect({ port, host: '127.0.0.1', noDelay: true });
    let text = '';
    let waiting: ((refusal: string | null) => void) | null = null;
    let lost = (): void => undefined;
    let isClosed = false;
    socket.setEncoding('latin1');
    socket.on('error', reject);
    socket.on('close', () => {
      if (!isClosed) lost();
    });
    socket.on('data', (chunk: string) => {
      text += chunk;
      const headEnd = text.indexOf('\r\n\r\n');
      if (headEnd < 0) return;
      const length = /\r\ncontent-length: *(\d+)/i.exec(text)?.[1];
      if (text.length < headEnd + 4 + Number(length ?? 0)) return;
      const refusal = text.startsWith('HTTP/1.1 200') ? null : text.slice(0, REFUSAL_CHARS_MAX);
      text = '';
      const done = waiting;
      waiting = null;
      done?.(refusal);
    });
    socket.once('connect', () =>
      resolve({
        ask(request, done) {
          waiting = done;
          socket.write(request);
        },
        onLost(callback) {
          lost = callback;
        },
        close() {
          isClosed = true;
          socket.destroy();
        },
      }),
    );
  });
}
