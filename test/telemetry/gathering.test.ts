// How the numbers of several processes become one answer, who gets it, and what an operator's file may say.
import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openMetricsEndpoint } from '../../src/telemetry/endpoint.ts';
import { startTurns } from '../../src/jobs/turns.ts';
import { createLogger } from '../../src/log.ts';
import { createGathering, takeSnapshot, type Snapshot } from '../../src/telemetry/gathering.ts';
import { boundedNames } from '../../src/telemetry/instrument.ts';
import { attempts, fencedResults, queueAge } from '../../src/telemetry/instruments.ts';
import { readTelemetryPolicy } from '../../src/telemetry/policy.ts';
import {
  inside,
  placeOfCaller,
  placeOfEmail,
  readTraceparent,
  traceFields,
  useTracer,
} from '../../src/telemetry/trace.ts';
import { openTracing } from '../../src/telemetry/tracing.ts';

const test = suite('gathering');

/** What a worker says that has counted this much. */
async function snapshotOf(count: number): Promise<Snapshot> {
  attempts.reset();
  attempts.inc({ provider: 'google', outcome: 'delivered' }, count);
  const snapshot = structuredClone(await takeSnapshot());
  attempts.reset();
  return snapshot;
}

const counted = (text: string): number =>
  Number(/^mailstead_attempts_total\{.*\} (\d+)$/m.exec(text)?.[1] ?? 0);

test('totals of workers are added, and do not go down when one ends', async () => {
  const gathering = createGathering();
  const five = await snapshotOf(5);
  const first = gathering.join((number) => first.heard(number, five));
  const second = gathering.join((number) => second.heard(number, five));
  assert.is(counted(await gathering.metrics('prometheus')), 10);
  first.left();
  assert.is(counted(await gathering.metrics('prometheus')), 10);
  first.left();
  assert.is(counted(await gathering.metrics('prometheus')), 10, 'it leaves once');
  const two = await snapshotOf(2);
  const third = gathering.join((number) => third.heard(number, two));
  const text = await gathering.metrics('prometheus');
  assert.is(counted(text), 12);
  assert.match(text, /process="delivery-1"/);
  assert.match(text, /process="delivery-2"/, 'a place that is free is taken again');
  assert.not.match(text, /process="delivery-3"/);
});

test('a worker that does not answer counts as it last said, and holds nobody up for long', async () => {
  const gathering = createGathering();
  const five = await snapshotOf(5);
  let isMute = false;
  const seat = gathering.join((number) => {
    if (!isMute) seat.heard(number, five);
  });
  assert.is(counted(await gathering.metrics('prometheus')), 5);
  isMute = true;
  assert.is(counted(await gathering.metrics('prometheus')), 5);
});

test('whoever asks while others are answered gets the same, from one gathering', async () => {
  const gathering = createGathering();
  let asked = 0;
  gathering.before(() => {
    asked += 1;
    return Promise.resolve();
  });
  const answers = await Promise.all(
    Array.from({ length: 20 }, () => gathering.metrics('prometheus')),
  );
  assert.is(asked, 1);
  assert.is(new Set(answers).size, 1);
});

test('what nobody reads is not told as zero, and of several sources the worst counts', async () => {
  const gathering = createGathering();
  const isTold = /^mailstead_queue_oldest_ready_age_seconds (\S+)$/m;
  assert.not.match(await gathering.metrics('prometheus'), isTold);
  const stops = [7, 3].map((age) => queueAge.read(() => [[{}, age]]));
  assert.is(isTold.exec(await gathering.metrics('prometheus'))?.[1], '7');
  for (const stop of stops) stop();
  assert.not.match(await gathering.metrics('prometheus'), isTold);
});

test('a set of names that others decide has an end', () => {
  const name = boundedNames(2);
  assert.equal(['a', 'b', 'c', 'a', 'd'].map(name), ['a', 'b', 'other', 'a', 'other']);
});

test('the port answers /metrics, and nothing else', async () => {
  fencedResults.inc(0);
  const complaints: unknown[] = [];
  let isBroken = false;
  const real = createGathering();
  const endpoint = await openMetricsEndpoint({
    port: 0,
    host: '127.0.0.1',
    gathering: {
      metrics: (type) => (isBroken ? Promise.reject(new Error('broken')) : real.metrics(type)),
    },
    onError: (error) => complaints.push(error),
  });
  const ask = (path: string, options: RequestInit = {}): Promise<Response> =>
    fetch(`http://127.0.0.1:${endpoint.port}${path}`, options);
  const found = await ask('/metrics?name[]=x');
  assert.is(found.status, 200);
  assert.match(await found.text(), /^mailstead_results_fenced_total \d+$/m);
  assert.is((await ask('/metrics', { method: 'HEAD' })).status, 200);
  const posted = await ask('/metrics', { method: 'POST', body: 'x'.repeat(100_000) });
  assert.is(posted.status, 405);
  assert.is(posted.headers.get('allow'), 'GET, HEAD');
  for (const path of ['/', '/metrics/', '/health/live', '/emails']) {
    assert.is((await ask(path)).status, 404, path);
  }
  for (const [accept, type] of [
    ['*/*', 'text/plain'],
    ['application/openmetrics-text', 'application/openmetrics-text'],
    ['application/openmetrics-text;q=0, text/plain', 'text/plain'],
  ] as const) {
    const { headers } = await ask('/metrics', { headers: { accept } });
    assert.ok(headers.get('content-type')?.startsWith(type), accept);
  }
  isBroken = true;
  const failed = await ask('/metrics');
  assert.is(failed.status, 500);
  assert.not.match(await failed.text(), /broken/);
  assert.is(complaints.length, 1);
  await endpoint.stop();
});

test('telemetry.json: what it may say, and what is wrong with the rest', () => {
  const shipped: unknown = JSON.parse(
    readFileSync(join(import.meta.dirname, '../../config/telemetry.json'), 'utf8'),
  );
  assert.is(readTelemetryPolicy(shipped), null);
  const url = 'http://127.0.0.1:4318/v1/traces';
  const headers = { authorization: 'Bearer x' };
  assert.equal(readTelemetryPolicy({ otlp: { url, headers, ratio: 0.1 } }), {
    url,
    headers,
    ratio: 0.1,
  });
  for (const [otlp, why] of [
    [{ url: 'ftp://a.test' }, /otlp\.url/],
    [{ url: 'https://me:secret@a.test' }, /otlp\.url/],
    [{ url, ratio: 0 }, /otlp\.ratio/],
    [{ url, ratio: 2 }, /otlp\.ratio/],
    [{ url, headers: { 'a b': 'x' } }, /otlp\.headers/],
    [{ url, headers: { a: 'x\ny' } }, /otlp\.headers/],
    [{ url, head: {} }, /`head`/],
    [null, /`otlp` must be an object/],
  ] as const) {
    assert.throws(() => readTelemetryPolicy({ otlp }), why);
  }
});

test('traceparent: what is valid is taken, and what is not is none', () => {
  const [trace, span] = ['4bf92f3577b34da6a3ce929d0e0e4736', '00f067aa0ba902b7'];
  const place = { traceId: trace, spanId: span, isRemote: true };
  assert.equal(readTraceparent(`00-${trace}-${span}-01`), { ...place, isSampled: true });
  assert.equal(readTraceparent(`00-${trace}-${span}-00`), { ...place, isSampled: false });
  assert.equal(readTraceparent(`cc-${trace}-${span}-01-more`), { ...place, isSampled: true });
  for (const bad of [
    undefined,
    '',
    'x',
    `ff-${trace}-${span}-01`,
    `00-${trace.toUpperCase()}-${span}-01`,
    `00-${'0'.repeat(32)}-${span}-01`,
    `00-${trace}-${'0'.repeat(16)}-01`,
    `00-${trace}-${span}-01-more`,
    `00-${trace}-${span}`,
  ]) {
    assert.is(readTraceparent(bad), null, String(bad));
  }
  const { traceId, spanId } = placeOfEmail('019a0b1c-2d3e-7f40-8a5b-6c7d8e9fa0b1');
  assert.is(traceId, '019a0b1c2d3e7f408a5b6c7d8e9fa0b1');
  assert.is(spanId, '8a5b6c7d8e9fa0b1');
});

test('who does not trace does not load what traces', () => {
  const src = join(import.meta.dirname, '../../src');
  const files = readdirSync(src, { recursive: true, encoding: 'utf8' }).filter((name) =>
    name.endsWith('.ts'),
  );
  const loading = files.filter((name) =>
    /^import (?!type )[^;]*(?:@opentelemetry\/|telemetry\/tracing\.ts|'\.\/tracing\.ts)/m.test(
      readFileSync(join(src, name), 'utf8'),
    ),
  );
  assert.equal(loading, ['telemetry/tracing.ts']);
});

test('a caller does not choose that it is traced, and a loop is not part of the request that nudged it', async () => {
  const tracing = openTracing(
    { url: 'http://127.0.0.1:9/v1/traces', headers: {}, ratio: 1e-9 },
    { resource: {}, onTrouble: () => undefined },
  );
  useTracer(tracing);
  try {
    // An id that any ratio picks.
    const wanted = `00-${'0'.repeat(31)}1-00f067aa0ba902b7-01`;
    const parent = placeOfCaller(wanted);
    assert.is(parent?.isSampled, false);
    const request = tracing.begin('GET', { parent });
    assert.is(request.place.isSampled, false);

    const seen: unknown[] = [];
    let turned: () => void = () => undefined;
    const turns = startTurns({
      name: 'test',
      log: createLogger({ level: 'silent', name: 'test', mode: 'development' }),
      turn() {
        seen.push(traceFields());
        turned();
        return Promise.resolve(60_000);
      },
    });
    await new Promise(setImmediate);
    const again = new Promise<void>((resolve) => (turned = resolve));
    inside(request, () => turns.nudge());
    await again;
    await turns.stop();
    assert.equal(seen, [{}, {}]);
  } finally {
    useTracer(null);
    await tracing.stop();
  }
});

test.run();
