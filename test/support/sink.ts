// The built-in sink for tests, with its messages in memory, and a bare client for talking to any server.
//
// The sink is the real thing behind a real socket: the local part of a recipient chooses the reply
// (src/smtp/sink.ts), only `store` is ours. A test can hold `store` back or let it fail, and waits for
// messages by count, never by time.
import { connect } from 'node:net';
import type { Socket } from 'node:net';
import { createLogger } from '../../src/log.ts';
import { sinkCertificate, startSink } from '../../src/smtp/sink.ts';
import type { SinkMessageInput, SinkOptions } from '../../src/smtp/sink.ts';

export interface TestSink {
  readonly port: number;
  /** What was stored, in order; a test may empty it. */
  readonly messages: SinkMessageInput[];
  /** What the sink logged at warn and above. */
  readonly complaints: readonly string[];
  /** Resolves when `count` messages are in `messages`. */
  received(count: number): Promise<readonly SinkMessageInput[]>;
  /** From now on `store` waits. `reached` resolves when a message does; `release` lets all of them go. */
  hold(): { readonly reached: Promise<void>; readonly release: () => void };
  /** From now on `store` rejects with `error`; null: it works again. */
  failWith(error: Error | null): void;
  stop(): Promise<void>;
}

export interface BareClient {
  readonly socket: Socket;
  /** Writes the text and CRLF, or the bytes as they are; answers the next reply. */
  say(words: string | Buffer): Promise<string>;
  /** The next reply, its lines joined by `|`; '' when the connection ends before one. */
  reply(): Promise<string>;
  /** Replies that came and were not asked for. */
  waiting(): number;
}

/** The caller must `stop()` it or the process does not exit. `tls`: offer STARTTLS, default false. */
export async function startTestSink(
  options: Partial<
    Pick<SinkOptions, 'slowMs' | 'maxMessageBytes' | 'maxBufferedBytes'> & { readonly tls: boolean }
  > = {},
): Promise<TestSink> {
  const { tls = false, ...limits } = options;
  const messages: SinkMessageInput[] = [];
  const complaints: string[] = [];
  const waiting = new Set<() => void>();
  let failure: Error | null = null;
  let held: { readonly gate: Promise<void>; readonly reach: () => void } | null = null;

  async function store(message: SinkMessageInput): Promise<void> {
    held?.reach();
    await held?.gate;
    if (failure !== null) throw failure;
    messages.push(message);
    for (const check of waiting) check();
  }

  function hold(): ReturnType<TestSink['hold']> {
    const gate = Promise.withResolvers<void>();
    const reached = Promise.withResolvers<void>();
    held = { gate: gate.promise, reach: reached.resolve };
    const release = (): void => {
      held = null;
      gate.resolve();
    };
    return { reached: reached.promise, release };
  }

  const received: TestSink['received'] = (count) =>
    new Promise((resolve) => {
      const check = (): void => {
        if (messages.length < count) return;
        waiting.delete(check);
        resolve(messages);
      };
      waiting.add(check);
      check();
    });

  const sink = await startSink({
    port: 0,
    hostname: 'sink.test',
    store,
    tls: tls ? sinkCertificate() : null,
    log: createLogger({ level: 'warn', name: 'sink', write: (line) => complaints.push(line) }),
    ...limits,
  });
  return {
    port: sink.port,
    messages,
    complaints,
    received,
    hold,
    failWith: (error) => {
      failure = error;
    },
    stop: () => sink.stop(),
  };
}

/** Connects and reads the greeting. The caller destroys the socket. */
export async function dialBare(port: number): Promise<BareClient> {
  const socket = connect({ port, host: '127.0.0.1', noDelay: true });
  const replies: string[] = [];
  let text = '';
  let ended = false;
  let wake = (): void => undefined;
  socket.on('data', (chunk: Buffer) => {
    text += chunk.toString();
    for (let reply = firstReply(text); reply !== null; reply = firstReply(text)) {
      replies.push(reply.trimEnd().replaceAll('\r\n', '|'));
      text = text.slice(reply.length);
    }
    wake();
  });
  socket.on('error', () => undefined); // 'close' follows.
  socket.on('close', () => {
    ended = true;
    wake();
  });
  const reply = async (): Promise<string> => {
    while (replies.length === 0 && !ended) {
      await new Promise<void>((resolve) => (wake = resolve));
    }
    return replies.shift() ?? '';
  };
  await reply();
  return {
    socket,
    reply,
    waiting: () => replies.length,
    say: (words) => {
      socket.write(typeof words === 'string' ? `${words}\r\n` : words);
      return reply();
    },
  };
}

function firstReply(text: string): string | null {
  return /^(?:\d{3}-[^\n]*\n)*\d{3} [^\n]*\n/.exec(text)?.[0] ?? null;
}
