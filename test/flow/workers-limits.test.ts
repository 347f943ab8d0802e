// Two and three delivery workers as processes, against hosts that count: together they never have more connections than
// the limit of a lane, while they start, stop, die and stand still; everything arrives all the same, and once.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { simpleEmail, until } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type PeerScript, type RawPeer } from '../support/raw-peer.ts';
import {
  openWorkerBench,
  type WorkerBench,
  type WorkerProcess,
} from '../support/worker-process.ts';

const test = suite('workers limits');
const peers: RawPeer[] = [];
let dns: DnsServer;
let bench: WorkerBench;
let port: number;
let number = 0;

test.before(async () => {
  const first = await startRawPeer();
  peers.push(first);
  ({ port } = first);
  dns = await startDns({});
  bench = await openWorkerBench(port, {
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '300ms',
  });
  const folder = join(bench.app.dataDir, 'config');
  mkdirSync(folder, { recursive: true });
  const providers = [1, 6].map((connections) => ({
    name: `takes${connections}`,
    mx: [`takes${connections}.test`],
    connections,
  }));
  const file = {
    default: { new_connections_per_minute: null, circuit_failures: 2, circuit_minutes: 60 },
    providers,
  };
  writeFileSync(join(folder, 'providers.json'), JSON.stringify(file));
});
test.after(async () => {
  await bench.stop();
  await dns.stop();
  for (const peer of peers) await peer.stop();
});

/** A host of its own for a domain of its own. */
async function hostFor(domain: string, script: PeerScript = {}): Promise<RawPeer> {
  number += 1;
  const host = `127.0.8.${number}`;
  const peer = await startRawPeer(script, { host, port });
  peers.push(peer);
  dns.zones[`mx.${domain}`] = { A: [host] };
  dns.zones[domain] = { MX: [`10 mx.${domain}`] };
  return peer;
}

const takes =
  (ms: number): NonNullable<PeerScript['on']>[string] =>
  async () => {
    await new Promise((resolve) => setTimeout(resolve, ms));
    return { reply: '250 2.0.0 taken' };
  };
async function send(domain: string, count: number): Promise<void> {
  for (let sent = 0; sent < count; sent += 100) {
    const body = Array.from({ length: Math.min(100, count - sent) }, (_, index) => ({
      ...simpleEmail,
      to: `r${sent + index}@${domain}`,
    }));
    const { status } = await bench.app.call('POST', '/emails/batch', { body });
    assert.is(status, 200);
  }
}
const taken = (peer: RawPeer): number =>
  new Set(peer.messages.filter(({ accepted }) => accepted).map(({ rcpts }) => rcpts[0])).size;
const arrived = (peer: RawPeer, count: number): Promise<number> =>
  until(
    async () => taken(peer),
    (now) => now >= count,
  );
const holders = async (domain: string): Promise<number> => {
  const { rows } = await bench.store.pool.query<{ count: number }>(
    `select count(*)::int as count from lane_share s, jsonb_each(s.shares) p, worker w
     where s.lane like $1 and w.epoch::text = p.key and (p.value ->> 0)::int > 0`,
    [`default/%${domain}`],
  );
  return rows[0]!.count;
};
/** Those that run, the oldest first. */
const workers = new Set<WorkerProcess>();
async function spawn(): Promise<WorkerProcess> {
  const worker = await bench.spawn();
  workers.add(worker);
  return worker;
}
async function leave(worker: WorkerProcess): Promise<void> {
  workers.delete(worker);
  worker.child.send({ type: 'stop' });
  await worker.ended;
}

test('one that stands still: its place goes to another when its time is over, and awake it asks anew', async () => {
  const peer = await hostFor('takes1.test');
  const stopped = await spawn();
  await send('takes1.test', 10);
  await arrived(peer, 10);
  await spawn();
  stopped.child.kill('SIGSTOP');
  // As if that time had passed.
  await bench.store.pool.query('update worker set shares_until = now() where pid = $1', [
    stopped.pid,
  ]);
  await send('takes1.test', 10);
  await until(
    async () => peer.messages.length,
    (count) => count === 20,
  );
  const before = peer.connections.length;
  stopped.child.kill('SIGCONT');
  await until(
    () =>
      bench.store.pool.query<{ is: boolean }>(
        'select shares_until > now() as is from worker where pid = $1',
        [stopped.pid],
      ),
    (answer) => answer.rows[0]?.is === true,
  );
  assert.is(peer.connections.length, before, 'it opened nothing by what it had before');
});

test('a limit of one and three workers: one connection at a time, everything arrives', async () => {
  const peer = await hostFor('also.takes1.test');
  await spawn();
  await send('also.takes1.test', 100);
  await arrived(peer, 100);
  assert.is(peer.openMax(), 1);
  assert.is(peer.messages.length, 100);
});

test('three workers and a limit of six, while one dies, one leaves and one comes', async () => {
  const peer = await hostFor('takes6.test', { on: { dot: takes(15) } });
  await send('takes6.test', 500);
  await until(
    () => holders('takes6'),
    (count) => count === 3,
  );
  await arrived(peer, 60);
  const [first, second] = [...workers] as [WorkerProcess, WorkerProcess];
  workers.delete(first);
  await first.kill();
  await bench.recover(first);
  await arrived(peer, 160);
  await leave(second);
  await spawn();
  const { unknown = 0 } = await until(
    async () => bench.states(),
    ({ delivered = 0, unknown: open = 0 }) => delivered + open === 620,
  );
  assert.ok(peer.openMax() > 3 && peer.openMax() <= 6, `${peer.openMax()} at a time`);
  assert.ok(peer.messages.length <= 500, 'nothing is sent twice by itself');
  assert.ok(unknown <= 6, 'what was behind the dot when one was killed');
  await bench.store.pool.query(`update delivery set state = 'delivered' where state = 'unknown'`);
});

test('a circuit that one worker opened keeps the other away', async () => {
  const peer = await hostFor('away.test', { on: { connect: { reset: true } } });
  await send('away.test', 40);
  await until(
    () =>
      bench.store.pool.query<{ open_id: string | null }>(
        `select open_id from lane_share where lane like 'default/%away.test'`,
      ),
    (answer) => (answer.rows[0]?.open_id ?? null) !== null,
  );
  const lane = async (): Promise<Record<string, unknown> | undefined> =>
    (
      await bench.store.pool.query<Record<string, unknown>>(
        `select * from lane where site like '%away.test'`,
      )
    ).rows[0];
  await until(lane, (row) => row?.['circuit'] === 'open');
  await until(
    async () => bench.states(),
    ({ in_flight = 0 }) => in_flight === 0,
  );
  const seen = peer.connections.length;
  await bench.dueNow();
  for (const { child } of workers) child.send({ type: 'nudge' });
  // Somebody else's mail goes, so both have looked.
  const fine = await hostFor('fine.test');
  await send('fine.test', 20);
  await arrived(fine, 20);
  assert.is(peer.connections.length, seen, 'nobody dials it');
});

test.run();
