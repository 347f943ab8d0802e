// Counting how TLS went: sums are exact whoever counts at the same time, also where finer points are dropped for want
// of room and where the database is away for a while.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createTlsResults,
  type TlsResult,
  type TlsResults,
} from '../../src/delivery/tls-results.ts';
import type { AppliedPolicy } from '../../src/dns/tls-policy.ts';
import { until } from '../support/app.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite('tls results');
let bench: Bench;
const clock = { now: new Date('2026-03-01T12:00:00Z') };

test.before(async () => {
  bench = await openQueue();
});
test.after(async () => {
  await bench.stop();
});
test.after.each(async () => {
  await bench.store.pool.query('delete from tls_result');
});

const counter = (storeMs = 3_600_000): TlsResults =>
  createTlsResults({ pool: bench.store.pool, log: silent, now: () => clock.now, storeMs });

const none: AppliedPolicy = { type: 'no-policy-found', strings: [], mxHosts: [] };
const sts: AppliedPolicy = {
  type: 'sts',
  strings: ['version: STSv1', 'mode: enforce', 'mx: *.mail.test', 'max_age: 86400'],
  mxHosts: ['*.mail.test'],
};
const result = (about: Partial<TlsResult> = {}): TlsResult => ({
  domain: 'one.test',
  policy: sts,
  mxHost: 'mx1.one.test',
  receivingIp: '192.0.2.1',
  sendingIp: '198.51.100.1',
  failure: null,
  ...about,
});

interface Row {
  readonly day: string;
  readonly domain: string;
  readonly policy: AppliedPolicy;
  readonly mx_host: string;
  readonly receiving_ip: string;
  readonly sending_ip: string;
  readonly result: string;
  readonly reason: string | null;
  readonly sessions: number;
}

async function stored(): Promise<readonly Row[]> {
  const { rows } = await bench.store.pool.query<{ row: Row | string }>(
    `select jsonb_build_object('day', day, 'domain', domain, 'policy', policy, 'mx_host', mx_host,
      'receiving_ip', receiving_ip, 'sending_ip', sending_ip, 'result', result, 'reason', reason,
      'sessions', sessions) as row from tls_result
     order by day, domain, result, mx_host, receiving_ip`,
  );
  return rows.map(({ row }) => (typeof row === 'string' ? (JSON.parse(row) as Row) : row));
}
const total = (rows: readonly Row[]): number =>
  rows.reduce((all, { sessions }) => all + sessions, 0);

test('counters that store at the same time add up exactly', async () => {
  const counters = Array.from({ length: 4 }, () => counter(2));
  const hosts = ['mx1.one.test', 'mx2.one.test', 'mx3.one.test'];
  for (let turn = 0; turn < 60; turn++) {
    for (const one of counters) {
      for (const mxHost of hosts) {
        one.note(result({ mxHost, failure: 'certificate-expired', reason: 'too old' }));
        one.note(result({ mxHost }));
      }
      one.note(result({ domain: 'two.test', policy: none, failure: 'starttls-not-supported' }));
    }
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
  await Promise.all(counters.map((one) => one.stop()));
  const seen = (await stored()).map((row) => [row.domain, row.mx_host, row.result, row.sessions]);
  assert.equal(seen, [
    ...hosts.map((host) => ['one.test', host, 'certificate-expired', 240]),
    ['one.test', '', 'success', 720],
    ['two.test', 'mx1.one.test', 'starttls-not-supported', 240],
  ]);
});

test('a count is one of the UTC day, whatever the case of names; of equal failures the first is told', async () => {
  const one = counter();
  clock.now = new Date('2026-03-01T23:59:59.999Z');
  one.note(result({ failure: 'validation-failure', reason: 'first' }));
  one.note(result({ failure: 'validation-failure', reason: 'second', domain: 'ONE.test.' }));
  clock.now = new Date('2026-03-02T00:00:00.000Z');
  one.note(result({ mxHost: null, receivingIp: null, failure: 'sts-policy-fetch-error' }));
  await one.stop();
  const common = { domain: 'one.test', policy: sts, sending_ip: '198.51.100.1' };
  assert.equal(await stored(), [
    {
      ...common,
      day: '2026-03-01',
      mx_host: 'mx1.one.test',
      receiving_ip: '192.0.2.1',
      result: 'validation-failure',
      reason: 'first',
      sessions: 2,
    },
    {
      ...common,
      day: '2026-03-02',
      mx_host: '',
      receiving_ip: '',
      result: 'sts-policy-fetch-error',
      reason: null,
      sessions: 1,
    },
  ]);
  clock.now = new Date('2026-03-01T12:00:00Z');
});

test('a session of our own report is not counted', async () => {
  const one = counter();
  one.note(result({ isForReport: true, failure: 'certificate-expired' }));
  one.note(result({ isForReport: true }));
  one.note(result());
  await one.stop();
  assert.equal(
    (await stored()).map((row) => [row.result, row.sessions]),
    [['success', 1]],
  );
});

test('what peers say is cut to size, and what Postgres cannot hold is left out', async () => {
  const one = counter();
  const strings = Array.from({ length: 500 }, (_, index) => `mx: ${index}.${'x'.repeat(300)}`);
  const policy: AppliedPolicy = { type: 'sts', strings, mxHosts: strings };
  const reason = `bad \0 bytes \ud800 ${'y'.repeat(5_000)}`;
  one.note(result({ policy, failure: 'sts-policy-invalid', reason }));
  await one.stop();
  const [row] = await stored();
  assert.ok(JSON.stringify(row).length < 12_000);
  assert.ok(row !== undefined && row.policy.strings.length > 5);
  assert.match(row.reason ?? '', /^bad {2}bytes \ufffd y+$/);
});

test('too many hosts of one domain are counted together, without losing a session', async () => {
  const counters = [counter(), counter()];
  for (let turn = 0; turn < 2; turn++) {
    for (let host = 0; host < 900; host++) {
      counters[turn]?.note(result({ receivingIp: `h${host}`, failure: 'certificate-not-trusted' }));
      counters[turn]?.note(result({ receivingIp: `h${host}`, failure: 'certificate-expired' }));
    }
    counters[turn]?.note(result({ domain: 'other.test', failure: 'certificate-expired' }));
  }
  for (const one of counters) await one.stop();
  const rows = await stored();
  assert.is(total(rows), 2 * (1_800 + 1));
  const ours = rows.filter(({ domain }) => domain === 'one.test');
  assert.ok(ours.length <= 510, `${ours.length} rows`);
  const rest = ours.filter(({ receiving_ip }) => receiving_ip === '');
  assert.equal(
    rest.map((row) => [row.result, row.policy]),
    ['certificate-expired', 'certificate-not-trusted'].map((name) => [
      name,
      { type: 'sts', strings: [], mxHosts: [] },
    ]),
  );
  assert.is(rows.find(({ domain }) => domain === 'other.test')?.receiving_ip, '192.0.2.1');
});

test('counts wait for the database, within bounds, and are stored once', async () => {
  const { pool } = bench.store;
  const one = counter(5);
  await pool.query('alter table tls_result rename to tls_result_away');
  const notes = 26_000;
  for (let host = 0; host < notes; host++) {
    one.note(result({ receivingIp: `h${host}`, failure: 'certificate-not-trusted' }));
    // Room for a turn of the timer in between.
    if (host % 5_000 === 0) await new Promise((resolve) => setTimeout(resolve, 10));
  }
  await pool.query('alter table tls_result_away rename to tls_result');
  await until(stored, (rows) => total(rows) >= notes);
  one.note(result());
  await one.stop();
  const rows = await stored();
  assert.is(total(rows), notes + 1);
  assert.ok(rows.length <= 510, `${rows.length} rows`);
});

test.run();
