// HTTP as bytes, for what fetch refuses to send: the request goes out as it stands, the answers come back parsed.
import { once } from 'node:events';
import { connect } from 'node:net';
import type { Answer } from '../support/app.ts';

export interface WireAnswer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  /** As the API's tests compare it; fails when the text is not JSON. */
  answer(): Answer;
}

const ANSWER_MAX_MS = 15_000;

/** Sends the parts one after the other and reads until the server closes; fails when it does not. */
export async function exchange(
  base: string,
  parts: Iterable<string | Uint8Array>,
): Promise<readonly WireAnswer[]> {
  const { hostname, port } = new URL(base);
  const socket = connect(Number(port), hostname);
  const received: Buffer[] = [];
  socket.on('data', (chunk: Buffer) => received.push(chunk));
  // A server that has heard enough may close while we still write.
  socket.on('error', () => undefined);
  const closed = once(socket, 'close');
  const timer = setTimeout(() => socket.destroy(), ANSWER_MAX_MS);
  for (const part of parts) {
    if (socket.destroyed) break;
    if (!socket.write(part)) await Promise.race([once(socket, 'drain'), closed]);
  }
  await closed;
  clearTimeout(timer);
  return parse(Buffer.concat(received));
}

/** One request that ends its connection. */
export async function ask(
  base: string,
  request: {
    readonly line: string;
    readonly headers?: readonly string[];
    readonly body?: Iterable<string | Uint8Array>;
  },
): Promise<WireAnswer> {
  const head = [request.line, 'Host: test', 'Connection: close', ...(request.headers ?? [])];
  function* parts(): Generator<string | Uint8Array> {
    yield `${head.join('\r\n')}\r\n\r\n`;
    yield* request.body ?? [];
  }
  const [answer, ...more] = await exchange(base, parts());
  if (answer === undefined || more.length > 0) {
    throw new Error(`${more.length + Number(answer !== undefined)} answers to one request`);
  }
  return answer;
}

/** Answers with a content-length, or with nothing after their head. */
function parse(bytes: Buffer): readonly WireAnswer[] {
  const answers: WireAnswer[] = [];
  let at = 0;
  while (at < bytes.length) {
    const end = bytes.indexOf('\r\n\r\n', at);
    if (end === -1) throw new Error(`half an answer: ${bytes.toString('latin1', at, at + 200)}`);
    const [line = '', ...fields] = bytes.toString('latin1', at, end).split('\r\n');
    const headers = new Headers(
      fields.map((field): [string, string] => {
        const colon = field.indexOf(':');
        return [field.slice(0, colon), field.slice(colon + 1).trim()];
      }),
    );
    const start = end + 4;
    at = start + Number(headers.get('content-length') ?? 0);
    const status = Number(/^HTTP\/1\.1 (\d{3})/.exec(line)?.[1] ?? 0);
    const text = bytes.toString('utf8', start, at);
    answers.push({
      status,
      headers,
      text,
      answer: () => ({ status, headers, body: JSON.parse(text) as Answer['body'] }),
    });
  }
  return answers;
}
