// Agenda's tables are dropped while deliveries wait for it: the sweep takes over, everything arrives once.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';

const EMAILS = 20;
/** Two sweeps. */
const WAIT_MAX_MS = 75_000;

const test = suite('clock lost');
let app: App;
let database: Client;

test.before(async () => {
  app = await startApp({ MAILSTEAD_RETRY_SCHEDULE: '3s' });
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
});

test('dropped in mid-run: all are delivered exactly once', async () => {
  const ids = await Promise.all(
    Array.from({ length: EMAILS }, (_, number) =>
      app.send({ to: `tempfail-1@r${number}.test`, subject: `Clock ${number}` }),
    ),
  );
  const count = async (condition: string): Promise<number> => {
    const { rows } = await database.query<{ count: string }>(
      `select count(*) from delivery where ${condition}`,
    );
    return Number(rows[0]?.count);
  };
  await until(
    () => count('attempts > 0'),
    (begun) => begun === EMAILS,
  );
  await database.query('drop table agenda_jobs');
  await until(
    () => count("state = 'delivered'"),
    (delivered) => delivered === EMAILS,
    WAIT_MAX_MS,
  );
  assert.is(await count('attempts <> 2'), 0);
  const { rows } = await database.query<{ count: string }>('select count(*) from sink_message');
  assert.is(Number(rows[0]?.count), EMAILS);
  assert.is((await app.untilEvent(ids[0]!, 'delivered'))['provider_retry_count'], 1);
  // The clock itself is back for whatever is deferred next.
  await until(
    async () => (await database.query("select to_regclass('agenda_jobs') as found")).rows,
    (found: { found: string | null }[]) => found[0]?.found === 'agenda_jobs',
    WAIT_MAX_MS,
  );
});

test.run();
