// What one large attachment costs in memory: the most that the main process and the delivery worker hold while an
// email with 40 MB in base64 is taken in and sent, above what they held before. One after the other, after a
// warm-up, so that what is left is the attachment's own.
import { readFileSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { BenchFailed, findFreePort, until, type Cleanup } from './children.ts';
import { PROGRAMS } from './postfix.ts';
import { cpuOf, peakRssMb, readTree } from './processes.ts';
import { startProduct, type Product } from './product.ts';
import { startSink, type Sink } from './sink.ts';

/** The largest that is taken (decisions.md, "Emails"). */
const BASE64_BYTES = 40 * 1024 * 1024;
const SENDS = 5;
const WARM_UPS = 300;
/** What no process may grow by. */
const GROWTH_MAX_MB = 150;
const PHASE_MAX_MS = 120_000;
/** Of quiet before memory is looked at. */
const SETTLE_MS = 2_000;
const CHUNK = Buffer.alloc(64 * 1024, 'QUJD');

interface Held {
  readonly part: string;
  readonly beforeMb: number;
  readonly peakMb: number;
}

interface Sent {
  readonly acceptMs: number;
  /** From the first byte of the request to the last of the message. */
  readonly totalMs: number;
  readonly cpuS: number;
  readonly held: readonly Held[];
}

export async function benchAttachment(options: {
  readonly folder: string;
  readonly workers: number;
  readonly hasSmtpSink: boolean;
  readonly cleanup: Cleanup;
}): Promise<string> {
  const { folder, cleanup, workers } = options;
  const port = await findFreePort();
  const program = options.hasSmtpSink ? PROGRAMS.sink : null;
  const sink = await startSink({ program, port, folder, cleanup });
  const product = await startProduct({
    folder: join(folder, 'attachment'),
    sinkPort: port,
    workers,
    roles: null,
    profileFolder: null,
    cleanup,
  });
  // The first start in development mode sends an email of its own.
  let count = 1;
  for (let i = 0; i < WARM_UPS; i += 1) await post(product, 0);
  count += WARM_UPS;
  await sink.untilCount(count, PHASE_MAX_MS);

  const sent: Sent[] = [];
  for (let i = 0; i < SENDS; i += 1) {
    await sleep(SETTLE_MS);
    count += 1;
    sent.push(await measure(product, sink, count));
  }
  await product.stop();
  await sink.stop();
  return render(sent);
}

async function measure(product: Product, sink: Sink, count: number): Promise<Sent> {
  const before = product
    .processes()
    .map(({ part, pid }) => ({ part, pid, rssMb: forgetPeak(pid) }));
  const cpuBeforeS = cpuS(product);
  const startedAt = performance.now();
  await post(product, BASE64_BYTES);
  const acceptMs = performance.now() - startedAt;
  const endedAt = await sink.untilCount(count, PHASE_MAX_MS);
  return {
    acceptMs,
    totalMs: endedAt - startedAt,
    cpuS: cpuS(product) - cpuBeforeS,
    held: before.map(({ part, pid, rssMb }) => ({
      part,
      beforeMb: rssMb,
      peakMb: peakRssMb(pid) ?? 0,
    })),
  };
}

const cpuS = (product: Product): number =>
  product.processes().reduce((sum, { pid }) => sum + cpuOf(readTree(pid).slice(0, 1)), 0);

/** Makes the kernel forget the most that the process has held (proc(5), clear_refs); what it holds now, in MB. */
function forgetPeak(pid: number): number {
  writeFileSync(`/proc/${pid}/clear_refs`, '5');
  const kib = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'latin1'))?.[1];
  return (Number(kib) * 1024) / 1e6;
}

/** Sends an email with so much base64, as it is read from a disk: a piece at a time. */
async function post(product: Product, base64Bytes: number): Promise<void> {
  const email = {
    from: 'Bench <bench@mailstead.test>',
    to: 'ok@recipient.test',
    subject: 'One large file',
    text: 'See the file.',
    attachments: base64Bytes === 0 ? [] : [{ filename: 'large.bin', content: '@' }],
  };
  const [head = '', tail = ''] = JSON.stringify(email).split('@"}');
  const isSmall = base64Bytes === 0;
  const start = isSmall ? JSON.stringify(email) : head;
  const end = isSmall ? '' : `"}${tail}`;
  const asked = request({
    port: product.httpPort,
    method: 'POST',
    path: '/emails',
    headers: {
      authorization: `Bearer ${product.key}`,
      'content-type': 'application/json',
      'content-length': Buffer.byteLength(start) + base64Bytes + Buffer.byteLength(end),
    },
  });
  const answered = new Promise<string>((resolve, reject) => {
    asked.on('error', reject).on('response', (response) => {
      let text = '';
      response.setEncoding('utf8').on('data', (chunk: string) => (text += chunk));
      response.on('end', () => resolve(response.statusCode === 200 ? '' : text));
    });
  });
  asked.write(start);
  for (let left = base64Bytes; left > 0; left -= CHUNK.length) {
    if (!asked.write(CHUNK.subarray(0, left))) {
      await until('room for more', { maxMs: PHASE_MAX_MS, pollMs: 1 }, () =>
        asked.writableNeedDrain ? null : true,
      );
    }
  }
  asked.end(end);
  const refusal = await answered;
  if (refusal !== '') throw new BenchFailed(`refused: ${refusal.slice(0, 500)}`);
}

function render(sent: readonly Sent[]): string {
  const mb = (value: number): string => value.toFixed(0).padStart(4);
  const growths = sent.flatMap(({ held }) => held.map(({ beforeMb, peakMb }) => peakMb - beforeMb));
  const worst = Math.max(...growths);
  return [
    `One email with ${BASE64_BYTES / 1024 / 1024} MiB of base64, ${sent.length} times (MB of 1,000,000 bytes):`,
    ...sent.map(({ acceptMs, totalMs, cpuS: cpu, held }) => {
      const parts = held.map(
        ({ part, beforeMb, peakMb }) =>
          `${part} +${mb(peakMb - beforeMb)} (${mb(beforeMb)} -> ${mb(peakMb)})`,
      );
      const times = `accepted in ${acceptMs.toFixed(0)} ms, sent in ${totalMs.toFixed(0)} ms, CPU ${cpu.toFixed(1)} s`;
      return `  ${parts.join(', ')}; ${times}`;
    }),
    `Worst growth of a process: ${mb(worst).trim()} MB; the limit is ${GROWTH_MAX_MB} MB: ${worst < GROWTH_MAX_MB ? 'kept' : 'BROKEN'}.`,
  ].join('\n');
}
