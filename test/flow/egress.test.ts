// Which address of this machine mail leaves from: the operator's file in the data folder, its pools, what is read again
// while the appliance runs, and an address that this machine does not have.
import { mkdir, mkdtemp, rename, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

interface Row {
  readonly email_id: string;
  readonly lane: string;
  readonly state: string;
  readonly last_cause: string | null;
  readonly last_reply: string | null;
  readonly source: string | null;
  readonly address: string | null;
}

const test = suite('egress');
let dns: DnsServer;
let peer: RawPeer;
let six: RawPeer;
let isPuttingOff = false;

const egresses = {
  first: { ipv4: '127.0.0.11', helo: 'first.example' },
  second: { ipv4: '127.0.0.12', helo: 'second.example' },
  sixth: { ipv6: '::1' },
  gone: { ipv4: '192.0.2.25' },
};

async function write(folder: string, policy: Record<string, unknown>): Promise<void> {
  const file = join(folder, 'config/delivery.json');
  await writeFile(`${file}.next`, JSON.stringify({ egresses, ...policy }));
  await rename(`${file}.next`, file);
}

interface House {
  readonly app: App;
  readonly folder: string;
  ask<T extends object>(text: string, values?: readonly unknown[]): Promise<T[]>;
  row(id: string): Promise<Row | undefined>;
  untilRow(id: string, ...states: readonly string[]): Promise<Row>;
  stop(): Promise<void>;
}

/** An appliance whose operator has written this file. */
async function startHouse(policy: Record<string, unknown>): Promise<House> {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-egress-'));
  await mkdir(join(folder, 'config'));
  await write(folder, policy);
  const app = await startApp({
    MAILSTEAD_DATA_DIR: folder,
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8,::1/128',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
    MAILSTEAD_HOSTNAME: 'appliance.example',
  });
  const client = new Client({ connectionString: app.databaseUrl });
  await client.connect();
  const house: House = {
    app,
    folder,
    async ask<T extends object>(text: string, values: readonly unknown[] = []) {
      return (await client.query<T>(text, [...values])).rows;
    },
    async row(id) {
      const [row] = await house.ask<Row>(
        `select d.email_id, d.lane, d.state, d.last_cause, d.last_reply, a.source, a.address
         from delivery d left join attempt a using (tenant_id, email_id, position)
         where email_id = $1 order by a.number desc limit 1`,
        [id],
      );
      return row;
    },
    async untilRow(id, ...states) {
      const row = await until(
        () => house.row(id),
        (found) => states.includes(found?.state ?? ''),
      );
      return row!;
    },
    async stop() {
      await client.end();
      await app.stop();
      await rm(folder, { recursive: true, force: true });
    },
  };
  return house;
}

const greetings = (from: RawPeer): readonly string[] =>
  from.connections.flatMap(({ transcript }) => transcript.filter((line) => line.includes('EHLO')));

test.before(async () => {
  peer = await startRawPeer({
    on: {
      RCPT: () =>
        isPuttingOff ? { reply: '450 4.7.1 greylisted' } : { reply: '250 2.1.5 welcome' },
    },
  });
  six = await startRawPeer({}, { host: '::1', port: peer.port });
  dns = await startDns({
    'four.test': { A: ['127.0.0.1'] },
    'both.test': { A: ['127.0.0.1'], AAAA: ['::1'] },
    'six.test': { AAAA: ['::1'] },
  });
});
test.after(async () => {
  await dns.stop();
  await peer.stop();
  await six.stop();
});

test('mail leaves from the address of its pool, and says the name of that address', async () => {
  const house = await startHouse({ pools: { default: ['first'], bulk: ['second'] } });
  const row = await house.untilRow(await house.app.send({ to: 'a@four.test' }), 'delivered');
  assert.is(row.lane, 'mx:four.test');
  assert.is(row.source, '127.0.0.11');
  assert.equal(greetings(peer), ['C: EHLO first.example']);

  const unreached = await house.untilRow(await house.app.send({ to: 'a@six.test' }), 'deferred');
  assert.is(unreached.last_cause, '4.4.4', 'by IPv4 no host with IPv6 only is reached');
  assert.is(six.connections.length, 0);
  await house.stop();
});

test('a domain with a pool of its own; then that pool is gone', async () => {
  isPuttingOff = true;
  const assign = [{ domain: 'mailstead.test', pool: 'bulk' }];
  const house = await startHouse({ pools: { default: ['first'], bulk: ['second'] }, assign });
  const { app, folder, ask, untilRow } = house;
  const id = await app.send({ to: 'b@four.test' });
  const row = await untilRow(id, 'deferred');
  assert.is(row.lane, 'mx:four.test@bulk');
  assert.is(row.source, '127.0.0.12');
  assert.ok(greetings(peer).includes('C: EHLO second.example'));

  await write(folder, { pools: { default: ['first'] } });
  // Whoever accepts reads the file at another time than whoever delivers.
  await until(
    async () => {
      await ask(`update delivery set state = 'ready', due_at = now() where email_id = $1`, [id]);
      return untilRow(id, 'deferred');
    },
    ({ source }) => source === '127.0.0.11',
  );
  await until(
    async () => untilRow(await app.send({ to: 'c@four.test' }), 'deferred'),
    ({ lane }) => lane === 'mx:four.test',
  );
  isPuttingOff = false;

  await write(folder, { pools: { default: ['nobody'] } });
  await until(
    async () => app.complaints,
    (lines) => lines.some((line) => line.includes('is none of the egresses')),
  );
  const after = await untilRow(await app.send({ to: 'd@four.test' }), 'delivered');
  assert.is(after.source, '127.0.0.11', 'a file that became wrong changes nothing');
  await house.stop();
});

test('an egress with an IPv6 address only takes the IPv6 address of a host', async () => {
  const house = await startHouse({ pools: { default: ['sixth'] } });
  const row = await house.untilRow(await house.app.send({ to: 'e@both.test' }), 'delivered');
  assert.equal([row.source, row.address], ['::1', '::1']);
  assert.equal(greetings(six), ['C: EHLO appliance.example']);
  await house.stop();
});

test('an address that this machine does not have: waits, and the operator is told once', async () => {
  const house = await startHouse({ pools: { default: ['gone'] } });
  for (const to of ['f@four.test', 'g@both.test']) {
    const row = await house.untilRow(await house.app.send({ to }), 'deferred');
    assert.is(row.last_cause, 'egress_unusable');
    assert.match(row.last_reply ?? '', /192\.0\.2\.25.*config\/delivery\.json/);
    assert.is(row.source, '192.0.2.25');
  }
  const told = house.app.complaints.filter((line) => line.includes('192.0.2.25'));
  assert.is(told.length, 1, told.join('\n'));
  await house.stop();
});

test.run();
