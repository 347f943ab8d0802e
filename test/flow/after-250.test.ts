// The one moment that a database cannot witness: the host has said 250, and Postgres does not know it yet. The worker is
// killed exactly there; its journal knows, and nobody gets a second copy.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';
import { openWorkerBench, type WorkerBench } from '../support/worker-process.ts';

const EMAILS = 12;
const test = suite('killed between 250 and commit');
let peer: RawPeer;
let bench: WorkerBench;
let holder: Client;
let answer: Promise<void>;
let mayAnswer: () => void;

test.before(async () => {
  ({ promise: answer, resolve: mayAnswer } = Promise.withResolvers<void>());
  peer = await startRawPeer({
    on: {
      async dot() {
        await answer;
        return { reply: '250 2.0.0 taken' };
      },
    },
  });
  bench = await openWorkerBench(peer.port);
  holder = new Client(bench.app.databaseUrl);
  await holder.connect();
});
test.after(async () => {
  await holder.end();
  await bench.stop();
  await peer.stop();
});

test('no second copy of anything that was taken', async () => {
  const worker = await bench.spawn();
  const ids = await Promise.all(
    Array.from({ length: EMAILS }, (_, number) => bench.app.send({ subject: `No. ${number}` })),
  );
  const underWay = await until(
    async () => peer.messages.length,
    (count) => count >= 3, // a lane begins with a few connections
  );
  // Nobody may write deliveries: results stay outside.
  await holder.query('begin; lock table delivery in exclusive mode');
  mayAnswer();
  await until(
    async () => (bench.journal().match(/^R /gm) ?? []).length,
    (answered) => answered >= underWay,
  );
  await worker.kill();
  const taken = peer.messages.filter(({ accepted }) => accepted).length;
  assert.ok(taken >= underWay);
  await holder.query('rollback');
  const { rows } = await holder.query("select 1 from delivery where state = 'delivered'");
  assert.is(rows.length, 0, 'Postgres knows of none');

  await bench.recover(worker);
  await bench.spawn();
  for (const id of ids) await bench.app.untilEvent(id, 'delivered');
  const copies = Map.groupBy(
    peer.messages,
    ({ raw }) => /^Message-ID: .*$/im.exec(raw.toString())?.[0],
  );
  assert.is(copies.size, EMAILS);
  assert.is(peer.messages.length, EMAILS, 'each exactly once');
});

test.run();
