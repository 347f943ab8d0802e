// A crowd of mail servers that hand messages in, each over a connection that it keeps, and that come again with what was not
// acknowledged, as mail servers do.
import { createHash } from 'node:crypto';
import { dialBare, type BareClient } from './sink.ts';

export interface InboundMessage {
  /** Unlike that of any other. */
  readonly subject: string;
  readonly bytes: Buffer;
  readonly sha256: string;
}

/** Every tenth is too large for a row. */
export function inboundMessage(subject: string, number: number): InboundMessage {
  const lines = number % 10 === 0 ? 4_000 : 20;
  const bytes = Buffer.from(
    `From: a@outside.test\r\nSubject: ${subject}\r\nMessage-ID: <${number}@outside.test>\r\n\r\n${`${'x'.repeat(70)}\r\n`.repeat(lines)}`,
  );
  return { subject, bytes, sha256: createHash('sha256').update(bytes).digest('hex') };
}

export interface InboundLoad {
  /** Of the messages that were answered with a 250: subject and the id that was said. */
  readonly acknowledged: ReadonlyMap<string, string>;
  /** Resolves when all are acknowledged, or when `giveUp` was called and every connection has ended. */
  readonly ended: Promise<void>;
  /** Whoever loses its connection does not come again. */
  giveUp(): void;
}

const PAUSE_MS = 100;
const RECIPIENT = 'crowd@mailstead.test';

/** Starts to hand the messages in. What is refused or lost is tried again, on a new connection. */
export function startInboundLoad(
  port: number,
  messages: readonly InboundMessage[],
  connections: number,
): InboundLoad {
  const acknowledged = new Map<string, string>();
  const waiting = [...messages];
  let isGivenUp = false;

  const connection = async (): Promise<void> => {
    let wire: BareClient | null = null;
    while (waiting.length > 0) {
      wire ??= await greeted(port);
      const message = waiting.shift()!;
      const id: string | null = wire === null ? null : await handIn(wire, message.bytes);
      if (id !== null) {
        acknowledged.set(message.subject, id);
        continue;
      }
      waiting.push(message);
      wire?.socket.destroy();
      wire = null;
      if (isGivenUp) return;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
    wire?.socket.destroy();
  };
  const ended = Promise.all(Array.from({ length: connections }, connection)).then(() => undefined);
  return { acknowledged, ended, giveUp: () => (isGivenUp = true) };
}

/** Resolves when this many are. */
export async function untilAcknowledged(load: InboundLoad, count: number): Promise<void> {
  while (load.acknowledged.size < count) await new Promise((resolve) => setTimeout(resolve, 1));
}

async function greeted(port: number): Promise<BareClient | null> {
  const wire = await dialBare(port);
  if ((await wire.say('EHLO crowd.test')).startsWith('250')) return wire;
  wire.socket.destroy();
  return null;
}

/** The id that the 250 says, or null. */
async function handIn(wire: BareClient, bytes: Buffer): Promise<string | null> {
  for (const [line, code] of [
    ['MAIL FROM:<a@outside.test>', '250'],
    [`RCPT TO:<${RECIPIENT}>`, '250'],
    ['DATA', '354'],
  ] as const) {
    if (!(await wire.say(line)).startsWith(code)) return null;
  }
  wire.socket.write(bytes);
  const reply = await wire.say('.');
  return reply.startsWith('250 ') ? reply.split(' ').at(-1)! : null;
}
