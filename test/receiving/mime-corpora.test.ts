// Messages that others have collected to break mail programs, and hostile strings in every place of a header, each over real
// SMTP: accepted or refused by rule, stored to the byte, read or marked, quickly, and without keeping memory. Prints
// what became of them.
import { createHash } from 'node:crypto';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { closeAll, dial } from '../support/sink-session.ts';
import type { BareClient } from '../support/sink.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

/** Of a client's patience RFC 5321 §4.5.3.2.6 asks for ten minutes; nobody here needs more than this. */
const HANG_MS = 2_000;
const ROUNDS = 4;
/** What the last rounds may leave behind, when the first have filled every cache. */
const LEFT_BYTES_MAX = 24 * 1024 * 1024;
/** Refused by rule: these words, and a permanent code. */
const RULES = /^55[0-4] 5\.\d+\.\d+ \S/;

interface Sample {
  readonly name: string;
  readonly bytes: Buffer;
}

interface Shown {
  readonly id: string;
  readonly parsing: 'complete' | 'partial' | 'pending';
  readonly raw: { readonly download_url: string };
}

const test = suite<{ app: App; samples: readonly Sample[] }>('mime corpora');

test.before(async (context) => {
  context.app = await startApp();
  context.samples = findSamples();
});
test.after.each(closeAll);
test.after(async ({ app }) => {
  await app.stop();
});

function findSamples(): readonly Sample[] {
  if (!existsSync(corpora)) return [];
  return readdirSync(corpora)
    .filter((name) => name.startsWith('mime-'))
    .flatMap((name) =>
      readdirSync(join(corpora, name), { recursive: true, withFileTypes: true })
        .filter((entry) => entry.isFile())
        .map((entry) => join(entry.parentPath, entry.name)),
    )
    .toSorted()
    .map((path) => ({ name: relative(corpora, path), bytes: readFileSync(path) }));
}

/** As a client would have to send it. */
const withCrlf = (bytes: Buffer): Buffer =>
  Buffer.from(
    bytes
      .toString('latin1')
      .replace(/\r\n|\r|\n/g, '\r\n')
      .replace(/(?<!\r\n)$/, '\r\n'),
    'latin1',
  );

/** Dots doubled where a line begins with one (RFC 5321 §4.5.2), and the end. */
const onTheWire = (bytes: Buffer): Buffer =>
  Buffer.from(
    `${bytes.toString('latin1').replace(/(^|\r\n)\./g, '$1..')}${bytes.subarray(-2).equals(Buffer.from('\r\n')) ? '' : '\r\n'}.\r\n`,
    'latin1',
  );

/** With the CRLF that the end of a message needs. */
const asReceived = (bytes: Buffer): Buffer =>
  bytes.subarray(-2).equals(Buffer.from('\r\n'))
    ? bytes
    : Buffer.concat([bytes, Buffer.from('\r\n')]);

let recipients = 0;
/** A recipient of its own, so that nothing is a second arrival. */
async function handOver(wire: BareClient, bytes: Buffer): Promise<{ reply: string; ms: number }> {
  recipients += 1;
  await wire.say('MAIL FROM:<from@outside.test>');
  assert.match(await wire.say(`RCPT TO:<r${recipients}@mailstead.test>`), /^250 /);
  assert.match(await wire.say('DATA'), /^354 /);
  const startedAt = performance.now();
  const reply = await wire.say(onTheWire(bytes));
  return { reply, ms: performance.now() - startedAt };
}

/** A machine that does other things may be slow once; a message that hangs, hangs again. */
async function handOverTwiceIfSlow(
  app: App,
  wire: BareClient,
  bytes: Buffer,
): Promise<{ reply: string; ms: number; wire: BareClient }> {
  const first = await handOver(wire, bytes);
  const next = wire.socket.destroyed ? await dial(app.appliance.mxPort!) : wire;
  if (first.ms <= HANG_MS) return { ...first, wire: next };
  return { ...(await handOver(next, bytes)), wire: next };
}

const hashOf = (bytes: Buffer): string => createHash('sha256').update(bytes).digest('hex');
const TRACE =
  /^(?:(?:Return-Path|Authentication-Results|Received):[^\r\n]*\r\n(?:[ \t][^\r\n]*\r\n)*)+(?:\r\n)?$/;

/** Once it was read; fails unless its bytes below our trace are those that were sent. */
async function checkStored(app: App, reply: string, sample: Sample): Promise<Shown['parsing']> {
  const id = reply.split(' ').at(-1)!;
  const { body } = await until(
    () => app.call<Shown>('GET', `/emails/receiving/${id}`),
    (answer) => answer.status === 200 && answer.body.parsing !== 'pending',
  );
  const raw = await fetch(app.base + new URL(body.raw.download_url).pathname);
  assert.is(raw.status, 200, sample.name);
  const stored = Buffer.from(await raw.arrayBuffer());
  const sent = asReceived(sample.bytes);
  const trace = stored.subarray(0, stored.length - sent.length);
  assert.match(trace.toString('latin1'), TRACE, sample.name);
  assert.is(
    hashOf(stored.subarray(trace.length)),
    hashOf(sent),
    `${sample.name} is not as it came`,
  );
  return body.parsing;
}

/** What the others have left on the heap, collected. */
function heapBytes(): number {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  collect();
  const { heapUsed, arrayBuffers } = process.memoryUsage();
  return heapUsed + arrayBuffers;
}

const tell = (about: string, counts: ReadonlyMap<string, number>): void =>
  console.log(
    `${about}: ${[...counts]
      .toSorted(([, a], [, b]) => b - a)
      .map(([what, count]) => `${count} ${what}`)
      .join('; ')}`,
  );

/** `250` or what was refused and why, without what differs each time. */
const ruleOf = (reply: string): string =>
  reply.startsWith('250 ') ? 'accepted' : reply.split('|')[0]!;

test('every message is accepted or refused by rule, stored to the byte, and read or marked', async ({
  app,
  samples,
}) => {
  if (samples.length === 0) return console.log(`skipped: no corpora in ${corpora}`);
  for (const [how, prepare] of [
    ['as they lie there', (bytes: Buffer) => bytes],
    ['with CRLF', withCrlf],
  ] as const) {
    const counts = new Map<string, number>();
    const count = (what: string) => counts.set(what, (counts.get(what) ?? 0) + 1);
    let slowest = { name: '', ms: 0 };
    let wire = await dial(app.appliance.mxPort!);
    for (const { name, bytes } of samples) {
      const sample = { name, bytes: prepare(bytes) };
      const done = await handOverTwiceIfSlow(app, wire, sample.bytes);
      wire = done.wire;
      count(ruleOf(done.reply));
      if (done.ms > slowest.ms) slowest = { name, ms: done.ms };
      if (!done.reply.startsWith('250 ')) assert.match(done.reply, RULES, name);
      else count(await checkStored(app, done.reply, sample));
    }
    tell(`${samples.length} messages ${how}`, counts);
    console.log(`  the slowest was ${slowest.name} with ${Math.round(slowest.ms)} ms`);
    assert.ok(slowest.ms <= HANG_MS, `${slowest.name} hung for ${slowest.ms} ms`);
  }
  assert.equal(app.complaints, [], 'nothing went wrong inside');
});

test('again and again they leave no memory behind', async ({ app, samples }) => {
  if (samples.length === 0) return;
  const heaps: number[] = [];
  let wire = await dial(app.appliance.mxPort!);
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const { bytes } of samples) {
      ({ wire } = await handOverTwiceIfSlow(app, wire, withCrlf(bytes)));
    }
    heaps.push(heapBytes());
  }
  const shown = heaps.map((bytes) => (bytes / 1e6).toFixed(1)).join(', ');
  console.log(`heap after each round of ${samples.length}: ${shown} MB`);
  const left = heaps.at(-1)! - Math.min(...heaps.slice(0, 2));
  assert.ok(left < LEFT_BYTES_MAX, `${left} bytes are left behind`);
});

/** Everywhere that a header has text of its writer's. */
const naughty = (text: string): Buffer => {
  const line = text.replace(/[\r\n]+/g, ' ');
  const encoded = `=?utf-8?B?${Buffer.from(line).toString('base64')}?=`;
  const percent = [...Buffer.from(line)].map((octet) => `%${octet.toString(16)}`).join('');
  return Buffer.from(
    [
      `From: ${line} <from@outside.test>`,
      `To: "${line.replace(/["\\]/g, '\\$&')}" <a@mailstead.test>, ${encoded} <b@mailstead.test>`,
      `Cc: ${line}`,
      `Reply-To: ${encoded}`,
      `Subject: ${line}`,
      `Message-ID: <${line}@outside.test>`,
      `In-Reply-To: <${line}>`,
      `References: ${line}`,
      `X-${line.slice(0, 40)}: ${line}`,
      `Content-Type: multipart/mixed; boundary=b; x="${line}"`,
      '',
      '--b',
      `Content-Type: text/plain; charset="${line}"`,
      '',
      text.replace(/\r?\n|\r/g, '\r\n'),
      '--b',
      `Content-Type: ${line}; name="${line}"`,
      `Content-Disposition: attachment; filename="${line}"; filename*=utf-8''${percent}`,
      `Content-ID: <${line}>`,
      `Content-Transfer-Encoding: ${line}`,
      '',
      'file',
      '--b--',
      '',
    ].join('\r\n'),
  );
};

test('hostile strings in every place of a header', async ({ app }) => {
  const path = join(corpora, 'strings-blns', 'blns.json');
  if (!existsSync(path)) return console.log(`skipped: no ${path}`);
  const strings = JSON.parse(readFileSync(path, 'utf8')) as readonly string[];
  const counts = new Map<string, number>();
  const count = (what: string) => counts.set(what, (counts.get(what) ?? 0) + 1);
  let wire = await dial(app.appliance.mxPort!);
  for (const text of strings) {
    const sample = { name: JSON.stringify(text), bytes: naughty(text) };
    const done = await handOverTwiceIfSlow(app, wire, sample.bytes);
    wire = done.wire;
    count(ruleOf(done.reply));
    if (!done.reply.startsWith('250 ')) assert.match(done.reply, RULES, sample.name);
    else count(await checkStored(app, done.reply, sample));
    assert.ok(done.ms <= HANG_MS, `${sample.name} hung for ${done.ms} ms`);
  }
  tell(`${strings.length} hostile strings`, counts);
  assert.equal(app.complaints, [], 'nothing went wrong inside');
});

test.run();
