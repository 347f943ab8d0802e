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
/** Nothing new gets as far as its dot: who is killed then is lost before it, or has had its answer. */
let isClosed = false;

test.before(async () => {
  ({ promise: answer, resolve: mayAnswer } = Promise.withResolvers<void>());
  peer = await startRawPeer({
    on: {
      MAIL: () => (isClosed ? { hang: true } : { reply: '250 2.1.0 ok' }),
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
  await until(
    async () => peer.messages.length,
    (count) => count >= 3, // a lane begins with a few connections
  );
  isClosed = true;
  // Nobody may write deliveries: results stay outside.
  await holder.query('begin; lock table delivery in exclusive mode');
  mayAnswer();
  const open = async (): Promise<number> => {
    const lines = bench.journal().split('\n');
    const count = (kind: string): number => lines.filter((line) => line.startsWith(kind)).length;
    return count('D ') - count('R ');
  };
  await until(
    async () => [await open(), peer.messages.filter(({ accepted }) => !accepted).length],
    ([dots, unanswered]) => dots === 0 && unanswered === 0,
  );
  await worker.kill();
  isClosed = false;
  assert.ok(peer.messages.length >= 3);
  // What the worker had asked for waits in Postgres, which does not notice that nobody hears the answer.
  await holder.query(
    `select pg_terminate_backend(pid, 5000) from pg_stat_activity
     where datname = current_database() and wait_event_type = 'Lock'`,
  );
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
