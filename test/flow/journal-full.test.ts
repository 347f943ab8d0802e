// The disk of the journal is full: without its line no final dot leaves, so nothing is sent that a crash could make us
// send twice; and when there is room again, everything goes out once.
import { spawnSync } from 'node:child_process';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';
import { openWorkerBench, type WorkerBench } from '../support/worker-process.ts';

const test = suite('journal on a full disk');
// The kernel's limit on file sizes refuses what a full disk refuses, and needs no root.
const limit = (pid: number, bytes: string): void => {
  const { status, stderr } = spawnSync('prlimit', ['--pid', String(pid), `--fsize=${bytes}:`]);
  assert.is(status, 0, String(stderr));
};
const hasPrlimit = spawnSync('prlimit', ['--version']).status === 0;
if (!hasPrlimit) console.log('skipped: a journal on a full disk: there is no prlimit here');
let peer: RawPeer;
let bench: WorkerBench;

test.before(async () => {
  peer = await startRawPeer();
  bench = await openWorkerBench(peer.port);
});
test.after(async () => {
  await bench.stop();
  await peer.stop();
});

(hasPrlimit ? test : test.skip)('no dot without its line; later all arrive once', async () => {
  const worker = await bench.spawn();
  limit(worker.pid, String(bench.journal().length + 10));
  const ids = await Promise.all(
    Array.from({ length: 5 }, (_, number) => bench.app.send({ subject: `No. ${number}` })),
  );
  for (const id of ids) await bench.app.untilEvent(id, 'delivery_delayed');
  assert.is(peer.messages.length, 0, 'no message was completed');
  const { body } = await bench.app.call('GET', `/emails/${ids[0]}`);
  assert.match(JSON.stringify(body['provider_last_error']), /internal.*fault of this server/i);
  assert.equal(await bench.states(), { deferred: 5 });

  limit(worker.pid, 'unlimited');
  await bench.dueNow();
  worker.child.send({ type: 'nudge' });
  for (const id of ids) await bench.app.untilEvent(id, 'delivered');
  assert.is(peer.messages.length, 5);
  await until(
    async () => (bench.journal().match(/^D /gm) ?? []).length,
    (dots) => dots >= 5,
  );
});

test.run();
