// A message that ends every worker that touches it, five times: it is set aside, and everything that happened to be
// under way beside it arrives.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';
import {
  openWorkerBench,
  type WorkerBench,
  type WorkerProcess,
} from '../support/worker-process.ts';

const INNOCENTS = 15;
const test = suite('poison');
let peer: RawPeer;
let bench: WorkerBench;
let worker: WorkerProcess;
let deaths = 0;

test.before(async () => {
  peer = await startRawPeer({
    on: {
      RCPT(line) {
        if (!line.includes('poison@')) return { reply: '250 2.1.5 ok' };
        deaths += 1;
        process.kill(worker.pid, 'SIGKILL');
        return { hang: true };
      },
      async dot() {
        // Slow enough that others are under way when the worker ends.
        await new Promise((resolve) => setTimeout(resolve, 20));
        return { reply: '250 2.0.0 taken' };
      },
    },
  });
  bench = await openWorkerBench(peer.port);
});
test.after(async () => {
  await bench.stop();
  await peer.stop();
});

test('set aside after the fifth death; the queue moves on', async () => {
  const innocents = await Promise.all(
    Array.from({ length: INNOCENTS }, (_, number) => bench.app.send({ to: `r${number}@x.test` })),
  );
  const poison = await bench.app.send({ to: 'poison@x.test' });
  const more = await Promise.all(
    Array.from({ length: INNOCENTS }, (_, number) => bench.app.send({ to: `s${number}@x.test` })),
  );
  for (let start = 1; start <= 5; start++) {
    worker = await bench.spawn();
    await bench.dueNow(); // the pauses of suspects
    let ended = false;
    void worker.ended.then(() => (ended = true));
    await until(async () => {
      if (!ended) await bench.dueNow();
      return ended;
    }, Boolean);
    await bench.recover(worker);
  }
  worker = await bench.spawn();
  await until(
    async () => {
      await bench.dueNow();
      return bench.states();
    },
    // Whose answer was lost at two of the deaths stays unknown.
    ({ delivered = 0, failed = 0, unknown = 0 }) =>
      delivered + failed + unknown === 2 * INNOCENTS + 1,
  );
  assert.is(deaths, 5);
  const { body } = await bench.app.call('GET', `/emails/${poison}`);
  assert.is(body['last_event'], 'failed');
  assert.is((body['provider_last_error'] as { code: string }).code, 'worker_lost');
  for (const id of [...innocents, ...more]) {
    const answer = await bench.app.call('GET', `/emails/${id}`);
    assert.ok(['delivered', 'sent'].includes(String(answer.body['last_event'])));
    assert.ok(
      peer.messages.some(({ raw }) => raw.includes(id)),
      'it has arrived',
    );
  }
  // What was lost after its dot may have come twice; it says so.
  const flagged = await bench.store.pool.query(
    "select 1 from timeline where kind = 'possible_duplicate'",
  );
  assert.ok(peer.messages.length - 2 * INNOCENTS <= flagged.rows.length);
});

test.run();
