// Statements that are not answered in time: they wait for a lock that somebody else has.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Client, Pool } from 'pg';
import { clientWithTimeout } from '../../src/store/timed-client.ts';
import { isDatabaseUnavailable } from '../../src/store/unavailable.ts';
import { freshDatabase, type FreshDatabase } from '../support/postgres.ts';

const test = suite('timed client');
const LOCK = 'select pg_advisory_lock(7)';
let database: FreshDatabase;
let holder: Client;
let pool: Pool;

test.before(async () => {
  database = await freshDatabase();
  holder = new Client({ connectionString: database.url });
  await holder.connect();
  await holder.query(LOCK);
  const options = { connectionString: database.url, max: 1, Client: clientWithTimeout(() => 150) };
  pool = new Pool(options);
  pool.on('connect', (client) => client.on('error', () => undefined));
});
test.after(async () => {
  await pool.end();
  await holder.end();
  await database.drop();
});

const failure = async (work: Promise<unknown>): Promise<Error> => {
  try {
    await work;
  } catch (error) {
    return error as Error;
  }
  throw new Error('it did not fail');
};

test('an answer in time is an answer, by promise and by callback, of pool and client', async () => {
  const { rows } = await pool.query<{ n: number }>('select $1::integer as n', [1]);
  assert.equal(rows, [{ n: 1 }]);
  const client = await pool.connect();
  const one = await client.query({ name: 'one', text: 'select $1::text as n', values: ['x'] });
  assert.equal(one.rows, [{ n: 'x' }]);
  const called = await new Promise((resolve, reject) => {
    client.query('select 2 as n', (error: Error | null, result: { rows: unknown }) => {
      if (error) reject(error);
      else resolve(result.rows);
    });
  });
  assert.equal(called, [{ n: 2 }]);
  assert.match((await failure(client.query('select nonsense'))).message, /nonsense/);
  client.release();
});

test('without one it fails as an unavailable database does, and the pool takes another connection', async () => {
  const error = await failure(pool.query(LOCK));
  assert.is(error.message, 'Query read timeout');
  assert.ok(isDatabaseUnavailable(error));
  assert.equal((await pool.query<{ n: number }>('select 3 as n')).rows, [{ n: 3 }]);
});

test('what waits on the same connection fails at once', async () => {
  const client = await pool.connect();
  const first = failure(client.query(LOCK));
  const second = failure(client.query('select 4'));
  assert.is((await first).message, 'Query read timeout');
  assert.match((await second).message, /Query read timeout|Connection terminated/);
  assert.ok((await failure(client.query('rollback'))) instanceof Error);
  client.release(true);
  assert.equal((await pool.query<{ n: number }>('select 5 as n')).rows, [{ n: 5 }]);
});

test.run();
