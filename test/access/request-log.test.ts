// The writer of the request log: batches, a database that is away, a full buffer, a stop; and the end of old entries.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKeyUsage } from '../../src/access/key-usage.ts';
import type { Caller } from '../../src/access/keys.ts';
import {
  createRequestLogWriter,
  firstIdAt,
  type AnsweredRequest,
} from '../../src/access/request-log.ts';
import { createLogger } from '../../src/log.ts';
import { newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import { openQueue, type Bench } from '../support/queue.ts';
import { removeOld } from '../support/retention.ts';

const test = suite('request log');
const DAY_MS = 86_400_000;
let bench: Bench;
let caller: Caller;

test.before(async () => {
  bench = await openQueue();
  const { rows } = await bench.store.pool.query<{ id: string }>('select id from api_key');
  caller = {
    tenantId: bench.tenantId,
    keyId: rows[0]!.id,
    permission: 'full_access',
    domainId: null,
  };
});
test.after(() => bench.stop());

const answered = (about: Partial<AnsweredRequest> = {}): AnsweredRequest => ({
  caller,
  id: newId(),
  method: 'GET',
  path: '/emails',
  userAgent: null,
  requestId: 'r',
  durationMs: 1,
  requestBody: undefined,
  responseStatus: 200,
  responseBody: undefined,
  ...about,
});
async function count(table = 'request_log'): Promise<number> {
  const { rows } = await bench.store.pool.query<{ count: number }>(
    `select count(*)::int as count from ${table}`,
  );
  return rows[0]!.count;
}
async function clear(): Promise<void> {
  await bench.store.pool.query('truncate request_log, request_log_body, request_log_tag');
}
/** The store's pool, counted, and away while `isAway`. */
function openPool(): { pool: Bench['store']['pool']; statements: number; isAway: boolean } {
  const real = bench.store.pool;
  const state = { pool: real, statements: 0, isAway: false };
  state.pool = new Proxy(real, {
    get(target, name) {
      const value: unknown = Reflect.get(target, name);
      if (name !== 'query') return typeof value === 'function' ? value.bind(target) : value;
      return (...given: unknown[]) => {
        state.statements += 1;
        if (!state.isAway) return (value as (...all: unknown[]) => unknown).apply(target, given);
        return Promise.reject(Object.assign(new Error('away'), { code: 'ECONNREFUSED' }));
      };
    },
  });
  return state;
}
function openLog() {
  const lines: string[] = [];
  const log = createLogger({ level: 'warn', name: 'test', write: (line) => lines.push(line) });
  return { lines, log };
}

test('many requests cost few statements, and a stop writes the rest', async () => {
  await clear();
  const db = openPool();
  const { lines, log } = openLog();
  const writer = createRequestLogWriter({ pool: db.pool, log });
  for (let index = 0; index < 1_700; index += 1) {
    writer.record(answered({ requestBody: { index }, responseBody: [index] }));
  }
  await writer.stop();
  assert.is(await count(), 1_700);
  assert.is(await count('request_log_body'), 1_700);
  assert.ok(db.statements <= 5, `${db.statements} statements`);
  writer.record(answered());
  await writer.stop();
  assert.is(await count(), 1_700, 'after the stop nothing is taken');
  assert.equal(lines, []);
});

test('no token stays in a path or a user agent', async () => {
  await clear();
  const writer = createRequestLogWriter({ pool: bench.store.pool, log: openLog().log });
  const token = `re_${'p'.repeat(8)}_${'s'.repeat(24)}`;
  writer.record(answered({ path: `/emails/${token}`, userAgent: `curl ${token}` }));
  await writer.stop();
  const { rows } = await bench.store.pool.query('select endpoint, user_agent from request_log');
  assert.equal(rows, [
    { endpoint: '/emails/re_pppppppp_[redacted]', user_agent: 'curl re_pppppppp_[redacted]' },
  ]);
});

test('only emails of the tenant are linked', async () => {
  await clear();
  const [own] = await bench.enqueue(1, { tags: [{ name: 'a', value: 'b' }] });
  const stranger = randomUUID();
  await bench.store.pool.query('insert into tenant (id, name) values ($1, $2)', [stranger, 'x']);
  const [foreign] = await bench.enqueue(1, {
    tenantId: stranger,
    tags: [{ name: 'c', value: 'd' }],
  });
  const writer = createRequestLogWriter({ pool: bench.store.pool, log: openLog().log });
  const responseBody = {
    data: [{ id: own }, { id: foreign }, { id: randomUUID() }, { id: 7 }, null],
  };
  writer.record(answered({ method: 'POST', path: '/emails/batch', responseBody }));
  writer.record(answered({ path: `/emails/${foreign}` }));
  writer.record(answered({ path: `/emails/${own!.toUpperCase()}/timeline/` }));
  writer.record(answered({ method: 'POST', responseStatus: 422, responseBody: { id: own } }));
  await writer.stop();
  const { rows } = await bench.store.pool.query<Record<string, unknown>>(
    'select endpoint, email_ids, tags from request_log order by id',
  );
  assert.equal(
    rows.map(({ endpoint, email_ids, tags }) => [endpoint, email_ids, tags]),
    [
      ['/emails/batch', [own], ['a', 'a=b']],
      [`/emails/${foreign}`, null, null],
      [`/emails/${own!.toUpperCase()}/timeline`, [own], ['a', 'a=b']],
      ['/emails', null, null],
    ],
  );
  assert.is(await count('request_log_tag'), 4);
});

test('while the database is away entries wait, and none is written twice', async () => {
  await clear();
  const db = openPool();
  const { lines, log } = openLog();
  db.isAway = true;
  const writer = createRequestLogWriter({ pool: db.pool, log });
  const first = answered();
  for (const request of [first, answered(), first]) writer.record(request);
  await until(
    () => Promise.resolve(db.statements),
    (statements) => statements > 0,
  );
  assert.is(await count(), 0);
  db.isAway = false;
  await until(count, (rows) => rows === 2);
  await writer.stop();
  assert.equal(lines, []);
});

test('an entry that the database refuses takes no other with it', async () => {
  await clear();
  const { lines, log } = openLog();
  const writer = createRequestLogWriter({ pool: bench.store.pool, log });
  for (let index = 0; index < 100; index += 1) {
    writer.record(answered(index === 41 ? { requestId: 'a\0b' } : {}));
  }
  await writer.stop();
  assert.is(await count(), 99);
  assert.is(lines.length, 2);
  assert.match(lines.join(''), /"requests":1\b/);
});

test('a full buffer loses the oldest and says how many', async () => {
  await clear();
  const db = openPool();
  const { lines, log } = openLog();
  db.isAway = true;
  const writer = createRequestLogWriter({ pool: db.pool, log });
  for (let index = 0; index < 10_500; index += 1) {
    writer.record(answered({ requestId: String(index) }));
  }
  await until(
    () => Promise.resolve(db.statements),
    (statements) => statements > 0,
  );
  db.isAway = false;
  await writer.stop();
  const kept = await count();
  assert.ok(kept > 8_000 && kept <= 10_000, `${kept} kept`);
  const { rows } = await bench.store.pool.query<{ request_id: string }>(
    'select request_id from request_log order by id desc limit 1',
  );
  assert.is(rows[0]!.request_id, '10499');
  assert.is(lines.length, 1);
  assert.match(lines[0]!, new RegExp(`"requests":${10_500 - kept}\\b`));
});

test('large bodies are bounded together, too', async () => {
  await clear();
  const db = openPool();
  db.isAway = true;
  const { lines, log } = openLog();
  const writer = createRequestLogWriter({ pool: db.pool, log });
  const requestBody = { text: 'x'.repeat(60_000) };
  for (let index = 0; index < 400; index += 1) writer.record(answered({ requestBody }));
  db.isAway = false;
  await writer.stop();
  const kept = await count();
  assert.ok(kept > 50 && kept < 150, `${kept} kept`);
  assert.is(lines.length, 1);
});

test('entries of more than 30 days end, with all that belongs to them', async () => {
  await clear();
  const [emailId] = await bench.enqueue(1, { tags: [{ name: 'old', value: '' }] });
  const writer = createRequestLogWriter({ pool: bench.store.pool, log: openLog().log });
  const at = (ageMs: number): string =>
    firstIdAt(Date.now() - ageMs).replace(/0{12}$/, randomHex());
  const old = [30 * DAY_MS + 60_000, 31 * DAY_MS, 400 * DAY_MS].map(at);
  const young = [30 * DAY_MS - 60_000, DAY_MS, 0].map(at);
  for (const id of [...old, ...young]) {
    writer.record(answered({ id, path: `/emails/${emailId}`, requestBody: {} }));
  }
  await writer.stop();
  assert.is(await removeOld(bench.store, 'request_logs'), 3);
  assert.is(await removeOld(bench.store, 'request_logs'), 0);
  const { rows } = await bench.store.pool.query<{ id: string }>('select id from request_log');
  assert.equal(rows.map(({ id }) => id).toSorted(), young.toSorted());
  assert.is(await count('request_log_body'), 3);
  assert.is(await count('request_log_tag'), 6);
});
const randomHex = (): string => randomUUID().replaceAll('-', '').slice(0, 12);

test('when a key was used is written once a minute at most', async () => {
  const db = openPool();
  const usage = createKeyUsage({ pool: db.pool, log: openLog().log });
  for (let index = 0; index < 50; index += 1) usage.note(caller);
  await usage.stop();
  assert.is(db.statements, 1);
  const read = async (): Promise<unknown> => {
    const { rows } = await bench.store.pool.query<{ last_used_at: Date | null }>(
      'select last_used_at from api_key where id = $1',
      [caller.keyId],
    );
    return rows[0]!.last_used_at;
  };
  assert.ok((await read()) !== null);
  usage.note(caller);
  await usage.stop();
  assert.is(db.statements, 1);
});

test.run();
