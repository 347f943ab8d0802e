// A worker on another machine stops moving for longer than anybody waits: what it held is decided without its journal,
// and when it wakes up in the middle of its work, its results do not count, it sends no further dot and ends.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startUpkeep, type Upkeep } from '../../src/jobs/upkeep.ts';
import { DEFAULT_OUTCOMES } from '../../src/queue/outcome-policy.ts';
import { until } from '../support/app.ts';
import { silent } from '../support/queue.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';
import { openWorkerBench, type WorkerBench } from '../support/worker-process.ts';

const test = suite('lease theft');
const elsewhere = mkdtempSync(join(tmpdir(), 'mailstead-elsewhere-'));
let peer: RawPeer;
let bench: WorkerBench;
let upkeep: Upkeep | null = null;
const gate = Promise.withResolvers<void>();

test.before(async () => {
  peer = await startRawPeer({
    on: {
      async RCPT(line) {
        if (line.includes('before@')) await gate.promise;
        return { reply: '250 2.1.5 ok' };
      },
      async dot(_line, connection) {
        if (connection.rcpts.length === 0 && connection.counts['dot'] === 1) await gate.promise;
        return { reply: '250 2.0.0 taken' };
      },
    },
  });
  bench = await openWorkerBench(peer.port);
});
test.after(async () => {
  gate.resolve();
  await upkeep?.stop();
  await bench.stop();
  await peer.stop();
  rmSync(elsewhere, { recursive: true, force: true });
});

test('its results are fenced; at most one more copy, and that one is flagged', async () => {
  const stolen = await bench.spawn({ journalFolder: elsewhere });
  const before = await bench.app.send({ to: 'before@x.test' });
  const after = await bench.app.send({ to: 'after@x.test' });
  await until(
    async () =>
      peer.messages.length === 1 &&
      peer.connections.some(({ rcpts }) => rcpts.join().includes('before@')),
    Boolean,
  );
  stolen.child.kill('SIGSTOP');
  upkeep = await startUpkeep({
    store: bench.store,
    log: silent,
    databaseUrl: bench.app.databaseUrl,
    mongodbUrl: null,
    journalFolder: bench.journalFolder, // nothing of the stolen one lies here
    outcomes: () => DEFAULT_OUTCOMES,
    onReady: () => undefined,
    pruneSink: () => Promise.resolve(),
    recheckDomains: () => Promise.resolve(),
    examine: () => Promise.resolve(),
    sendTlsReports: () => Promise.resolve(),
    refreshStsPolicies: () => Promise.resolve(),
    greylistForgetAfterMs: () => 86_400_000,
    collectBlobs: () => Promise.resolve(),
    sweepMs: 200,
    silenceMs: 1_000,
    watchMs: 500,
  });
  await until(
    () => bench.states(),
    (states) => states['unknown'] === 2,
  );

  // Somebody else sends both once more while it sleeps.
  const thief = await bench.spawn();
  gate.resolve();
  await bench.dueNow();
  for (const id of [before, after]) await bench.app.untilEvent(id, 'delivered');
  const settledAt = await bench.store.pool.query('select * from delivery order by email_id');

  stolen.child.kill('SIGCONT');
  assert.is(await stolen.ended, 1, 'it ends by itself: what it held is not its own any more');
  await thief.kill();
  assert.equal(
    (await bench.store.pool.query('select * from delivery order by email_id')).rows,
    settledAt.rows,
    'nothing that it said counted',
  );
  for (const [id, to] of [
    [before, 'before@'],
    [after, 'after@'],
  ] as const) {
    const copies = peer.messages.filter(({ rcpts }) => rcpts.join().includes(to)).length;
    assert.ok(copies <= 2, `${copies} copies to ${to}`);
    const { body } = await bench.app.call('GET', `/emails/${id}/timeline`);
    const kinds = (body['events'] as { type: string }[]).map(({ type }) => type);
    assert.is(kinds.filter((kind) => kind === 'possible_duplicate').length, 1);
    assert.is(kinds.at(-1), 'delivered');
  }
});

test.run();
