// The inbound listener with parts that a test can see into, and sessions with it, from any loopback address, in front of
// or behind the greeting.
import { mkdtemp, rm } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createLogger } from '../../src/log.ts';
import type { Arrival, Receiver } from '../../src/receiving/arrival.ts';
import { readReceivingPolicy } from '../../src/receiving/policy.ts';
import { startMx, type MxListener, type MxOptions } from '../../src/smtp/mx.ts';
import { receiver } from './arrival.ts';
import { closeClients, smtpClient, type SmtpClient } from './smtp-client.ts';

export interface TestMx extends MxListener {
  readonly got: Arrival[];
  /** Of what was said at warn and above. */
  readonly complaints: string[];
  readonly spoolFolder: string;
  /** Read anew for each question, as after an edit of the operator's. */
  file: Record<string, unknown>;
}

export const receiverOf = (recipient: string, about: Partial<Receiver> = {}): Receiver => ({
  ...receiver('tenant', recipient, { domain_id: 'domain' }),
  ...about,
});

const running: TestMx[] = [];

/** Takes mail for `@here.test`, except for `nobody@`; `@tag.test` has another DMARC policy. */
export async function startTestMx(
  file: Record<string, unknown> = {},
  options: Partial<MxOptions> = {},
): Promise<TestMx> {
  const got: Arrival[] = [];
  const complaints: string[] = [];
  const spoolFolder = await mkdtemp(join(tmpdir(), 'mailstead-mx-'));
  const one = { got, complaints, spoolFolder, file };
  const listener = await startMx({
    host: '127.0.0.1',
    port: 0,
    hostname: 'mail.example.com',
    tls: null,
    policy: () => readReceivingPolicy(one.file),
    findListing: () => Promise.resolve(null),
    verify: null,
    isKnown: () => Promise.resolve(true),
    resolve: (address) => {
      const domain = address.slice(address.lastIndexOf('@') + 1).toLowerCase();
      if (domain === 'tag.test') {
        const receiver = receiverOf(address, { inboundDmarc: 'tag' });
        return Promise.resolve({ kind: 'taken', receiver });
      }
      if (domain !== 'here.test') return Promise.resolve({ kind: 'not_ours', isAwaited: false });
      const kind = address.startsWith('nobody') ? 'unrouteable' : 'taken';
      return Promise.resolve({ kind, receiver: receiverOf(address) });
    },
    findPostmaster: () => Promise.resolve(null),
    readReturnPath: () => null,
    isReturnPathDomain: () => Promise.resolve(false),
    readForwardReturn: () => Promise.resolve(null),
    takeForwardReturn: () => Promise.resolve({ kind: 'taken' }),
    takeReport: () => Promise.resolve(true),
    receive: (arrival) => {
      got.push(arrival);
      return Promise.resolve([`id-${got.length}`]);
    },
    spoolFolder,
    log: createLogger({
      level: 'warn',
      name: 'test',
      mode: 'development',
      write: (line) => complaints.push(line),
    }),
    now: () => new Date(),
    ...options,
    limits: { greetingDelayMs: 1, tarpitMs: 1, watchMs: 20, ...options.limits },
  });
  const started = Object.assign(one, listener);
  running.push(started);
  return started;
}

/** After each test: closes and stops what was started here. */
export async function endMxSessions(): Promise<void> {
  closeClients();
  for (const one of running.splice(0)) {
    await one.stop();
    await rm(one.spoolFolder, { recursive: true, force: true });
  }
}

export interface MxClient extends SmtpClient {
  /** Everything from EHLO to the reply to the dot; `message` with its final dot line where it is bytes. */
  send(message?: string | Buffer, to?: string, from?: string): Promise<string>;
}

/** Connected; nothing was read or said. `first` is sent in front of everything. */
export function dialMx(
  port: number,
  about: { readonly from?: string; readonly first?: string; readonly host?: string } = {},
): MxClient {
  const { from, host = '127.0.0.1', first } = about;
  const opened = connect({ port, host, ...(from === undefined ? {} : { localAddress: from }) });
  if (first !== undefined) opened.write(first);
  const client = smtpClient(opened);
  return Object.assign(client, {
    async send(message: string | Buffer = MESSAGE, to = 'a@here.test', sender = 'b@else.test') {
      for (const line of [`MAIL FROM:<${sender}>`, `RCPT TO:<${to}>`, 'DATA']) {
        const reply = await client.say(line);
        if (!/^[23]/.test(reply)) return reply;
      }
      return client.say(typeof message === 'string' ? `${message}\r\n.` : message);
    },
  });
}

/** Greeted, and has said EHLO. */
export async function enterMx(
  port: number,
  about: Parameters<typeof dialMx>[1] = {},
): Promise<MxClient> {
  const client = dialMx(port, about);
  const greeting = await client.reply();
  if (!greeting.startsWith('220')) throw new Error(`not greeted: ${greeting}`);
  await client.say('EHLO client.test');
  return client;
}

export const MESSAGE = 'From: b@else.test\r\nTo: a@here.test\r\nSubject: x\r\n\r\nhello';
