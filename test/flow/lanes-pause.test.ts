// What an operator pauses waits without a change to any row, while all else goes; and it goes when it is resumed.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createPause, removePause } from '../../src/queue/pauses.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('lanes paused');
let app: App;
let dns: DnsServer;
let db: Pool;
let peer: RawPeer;

test.before(async () => {
  peer = await startRawPeer();
  const other = { MX: ['10 mx.one.test'] };
  const held = { MX: ['10 mx.held.test'] };
  dns = await startDns({
    'one.test': other,
    'stranger.test': other,
    'mx.one.test': { A: ['127.0.0.1'] },
    'held.test': held,
    'held2.test': held,
    'mx.held.test': { A: ['127.0.0.1'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
  });
  db = new Pool({ connectionString: app.databaseUrl, max: 2 });
});
test.after(async () => {
  await db.end();
  await app.stop();
  await dns.stop();
  await peer.stop();
});

const rowsOf = async (domain: string): Promise<readonly Record<string, unknown>[]> =>
  (
    await db.query<Record<string, unknown>>(
      'select xmin::text as version, * from delivery where lane = $1 order by email_id, position',
      [`mx:${domain}`],
    )
  ).rows;
const limitOf = async (lane: string): Promise<unknown> =>
  (await db.query<Record<string, unknown>>('select * from lane where name = $1', [lane])).rows[0]?.[
    'limited_by'
  ];

/** Mail for a domain waits untouched while mail for others goes, and goes when `resume` says so. */
async function holds(domain: string, resume: () => Promise<unknown>): Promise<void> {
  const id = await app.send({ to: `a@${domain}` });
  const [before] = await rowsOf(domain);
  await app.untilEvent(await app.send({ to: 'other@one.test' }), 'delivered');
  const [after] = await rowsOf(domain);
  assert.equal(after, before, 'not a column, nor a version');
  assert.is(after?.['attempts'], 0);
  await resume();
  await app.untilEvent(id, 'delivered');
}

test('a paused lane stops and resumes', async () => {
  await app.untilEvent(await app.send({ to: 'a@held.test' }), 'delivered');
  await app.untilEvent(await app.send({ to: 'a@held2.test' }), 'delivered');
  const pause = await createPause(db, {
    kind: 'lane',
    name: 'default/mx.held.test',
    reason: null,
    until: null,
  });
  await until(
    () => limitOf('default/mx.held.test'),
    (limit) => limit === 'paused',
  );
  await db.query("delete from delivery where lane = 'mx:held2.test'");
  await holds('held2.test', () => removePause(db, pause!.id));
  await until(
    () => limitOf('default/mx.held.test'),
    (limit) => limit === null,
  );
});

test('a paused destination stops and resumes, whether it is known or not', async () => {
  const pause = await createPause(db, {
    kind: 'destination',
    name: 'mx:stranger.test',
    reason: null,
    until: null,
  });
  // Read every second.
  await new Promise((resolve) => setTimeout(resolve, 2_000));
  await holds('stranger.test', () => removePause(db, pause!.id));
});

test('all paused: nothing leaves until it is resumed', async () => {
  const pause = await createPause(db, { kind: 'all', name: '', reason: null, until: null });
  await new Promise((resolve) => setTimeout(resolve, 2_000));
  const id = await app.send({ to: 'later@one.test' });
  const state = async (): Promise<unknown> =>
    (await db.query('select state, attempts from delivery where email_id = $1', [id])).rows[0];
  await new Promise((resolve) => setTimeout(resolve, 1_500));
  assert.equal(await state(), { state: 'ready', attempts: 0 });
  await removePause(db, pause!.id);
  await app.untilEvent(id, 'delivered');
});

test.run();
