// The shared rate limit: however many processes ask, together they get what the limit says and no more; a
// process alone costs few statements; without the database each goes on by itself.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createRateLimiter, forgetOldWindows, type Rate } from '../../src/access/rate-limit.ts';
import { createLogger } from '../../src/log.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { until } from '../support/app.ts';
import { migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite('rate limit');
const MINUTE = 60_000;
let database: FreshDatabase;
const stores: Store[] = [];

test.before(async () => {
  database = await migratedDatabase();
  for (let count = 0; count < 3; count += 1) {
    const options = { url: database.url, log: silent, connectionsMax: 4, migrate: true };
    stores.push(await openStore(options));
  }
});
test.after(async () => {
  for (const store of stores) await store.close();
  await database.drop();
});

const limiterOf = (store: Store, requests: number, windowMs = MINUTE) =>
  createRateLimiter({ requests, windowMs, shared: { pool: store.pool, log: silent } });
const passed = (rates: readonly Rate[]): number =>
  rates.filter(({ refusal }) => refusal === null).length;
const left = ({ headers }: Rate): number => Number(headers['ratelimit-remaining']);

test('three processes with 300 requests at once let exactly 100 of 100 pass', async () => {
  const limiters = stores.map((store) => limiterOf(store, 100));
  const rates = await Promise.all(
    Array.from({ length: 300 }, (_, index) => limiters[index % 3]!.take('at-once')),
  );
  assert.is(passed(rates), 100);
  for (const rate of rates) {
    assert.is(rate.headers['ratelimit-limit'], '100');
    assert.is(rate.headers['ratelimit-policy'], '100;w=60');
    assert.ok(Number(rate.headers['ratelimit-reset']) <= 60);
    if (rate.refusal === null) continue;
    assert.is(rate.refusal.code, 'rate_limit_exceeded');
    assert.is(left(rate), 0);
    const seconds = rate.refusal.retryAfterSeconds ?? 0;
    assert.ok(seconds >= 1 && seconds <= 60, `${seconds} s`);
  }
  assert.is(passed(await Promise.all(limiters.map((one) => one.take('at-once')))), 0);
});

test('three processes that ask in turns never exceed the limit, and waste little of it', async () => {
  const limiters = stores.map((store) => limiterOf(store, 60));
  let count = 0;
  let turn = 0;
  for (const rounds of [40, 7, 90]) {
    for (let round = 0; round < rounds; round += 1) {
      const batch = Array.from({ length: (round % 4) + 1 }, () => limiters[turn]!.take('turns'));
      count += passed(await Promise.all(batch));
    }
    turn += 1;
  }
  assert.ok(count <= 60, `${count} of 60`);
  assert.ok(count > 50, `${count} of 60`);
});

test('one process counts down exactly and costs few statements', async () => {
  const pool = stores[0]!.pool;
  let statements = 0;
  const counted = new Proxy(pool, {
    get(target, name, receiver) {
      if (name === 'query') statements += 1;
      const value: unknown = Reflect.get(target, name, receiver);
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
  const limiter = createRateLimiter({
    requests: 1_000,
    windowMs: MINUTE,
    shared: { pool: counted, log: silent },
  });
  for (let index = 0; index < 1_000; index += 1) {
    const rate = await limiter.take('alone');
    assert.is(rate.refusal, null);
    assert.is(left(rate), 999 - index);
  }
  const taken = statements;
  assert.ok(taken > 0 && taken < 80, `${taken} statements for 1000 requests`);
  for (let index = 0; index < 200; index += 1) {
    assert.is((await limiter.take('alone')).refusal?.code, 'rate_limit_exceeded');
  }
  assert.is(statements, taken, 'what is over is remembered');
});

test('tenants have budgets of their own, and the budget comes back after its window', async () => {
  const limiter = limiterOf(stores[0]!, 2, 1_000);
  const rates = [];
  for (const tenant of ['one', 'one', 'two', 'one']) rates.push(await limiter.take(tenant));
  assert.equal(
    rates.map(({ refusal }) => refusal?.code ?? null),
    [null, null, null, 'rate_limit_exceeded'],
  );
  await until(
    () => limiter.take('one'),
    ({ refusal }) => refusal === null,
  );
});

test('strangers are counted by network, in memory', async () => {
  const limiter = limiterOf(stores[0]!, 2);
  const isRefused = async (address: string): Promise<boolean> =>
    (await limiter.takeStranger(address)).refusal !== null;
  assert.equal(
    [await isRefused('192.0.2.1'), await isRefused('192.0.2.1'), await isRefused('192.0.2.1')],
    [false, false, true],
  );
  assert.is(await isRefused('192.0.2.2'), false);
  assert.equal(
    [
      await isRefused('2001:db8::1'),
      await isRefused('2001:db8:0:0:5::'),
      await isRefused('2001:db8::9'),
    ],
    [false, false, true],
    'one /64',
  );
  assert.is(await isRefused('2001:db8:0:1::1'), false);
  assert.is(await isRefused('::ffff:192.0.2.3'), false);
  assert.is(await isRefused('::ffff:192.0.2.4'), false);
});

test('without the database a process counts by itself', async () => {
  const pool = new Pool({ host: '/nowhere', connectionTimeoutMillis: 1_000 });
  const complaints: string[] = [];
  const log = createLogger({ level: 'warn', name: 'test', write: (line) => complaints.push(line) });
  const limiter = createRateLimiter({ requests: 3, windowMs: MINUTE, shared: { pool, log } });
  const rates = await Promise.all(Array.from({ length: 5 }, () => limiter.take('away')));
  assert.is(passed(rates), 3);
  assert.equal(complaints, [], 'that the database is away is said elsewhere');
  await pool.end();
});

test('windows that are long over are forgotten', async () => {
  const { pool } = stores[0]!;
  await limiterOf(stores[0]!, 5).take('fresh');
  await pool.query("insert into rate_limit (key, points, expire) values ('old', 1, 1000)");
  assert.is(await forgetOldWindows(pool), 1);
  const { rows } = await pool.query<{ key: string }>('select key from rate_limit');
  assert.ok(rows.some(({ key }) => key === 'tenant:fresh'));
  assert.not.ok(rows.some(({ key }) => key === 'old'));
});

test.run();
