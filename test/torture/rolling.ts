// Row 26: a rolling restart. An appliance in four processes is restarted one process after the other under load, and one
// that delivers is killed at the end. Nothing that was acknowledged is lost; nothing is doubled, but what the kill left
// unknown and is told so.
import { resolve } from 'node:path';
import { Pool } from 'pg';
import {
  forwardTheCrowd,
  startFleet,
  startFleetLoad,
  type Fleet,
  type FleetLoad,
} from '../support/fleet.ts';
import { startS3 } from '../support/s3.ts';
import { describeLedger, promiseBalance, readLedger, type Ledger } from './ledger.ts';
import { startOwnPostgres } from './machine.ts';
import { sleep, untilSo, type Row, type Torture } from './row.ts';
import { startTally, type Tally } from './tally.ts';

const PROGRAM = resolve(import.meta.dirname, '../../dist/main.js');
const DRAIN_MAX_MS = 180_000;
const LOAD = { api: 8, submission: 2, largeEvery: 25, inboundConnections: 4, everyMs: 20 };
/** Every client must have been served by the processes as they are now before the next one is restarted. */
const BETWEEN = { api: 150, submission: 30 };
const OPEN = `('ready', 'in_flight', 'deferred', 'preparing', 'scheduled')`;

export interface Rolled {
  readonly ledger: Ledger;
  /** Of received messages, how often each was taken by its destination: more than once, and never. */
  readonly forwards: { readonly doubled: number; readonly lost: number };
}

/** Waits until nothing is open any more, and holds what was acknowledged against what arrived. */
export async function holdFleet(d: {
  readonly pool: Pool;
  readonly load: FleetLoad;
  readonly tally: Tally;
}): Promise<Rolled> {
  const { pool, load, tally } = d;
  const idsOf = (count: number): readonly string[] =>
    Array.from({ length: count }, (_, n) => `<${n}@outside.test>`);
  const ids = idsOf(load.messages.length);
  await untilSo('everything is on its way', DRAIN_MAX_MS, async () => {
    const { rows } = await pool.query(`select 1 from delivery where state in ${OPEN} limit 1`);
    const isForwarded = ids.every((id) => tally.counts.has(id));
    return rows.length === 0 && isForwarded ? true : null;
  });
  const query = async <T extends object>(
    sql: string,
    values: readonly unknown[] = [],
  ): Promise<readonly T[]> => (await pool.query<T>(sql, [...values])).rows;
  const ledger = await readLedger({ query }, { tally, accepted: load.accepted });
  const doubled = ids.filter((id) => (tally.counts.get(id) ?? 0) > 1).length;
  const lost = ids.filter((id) => !tally.counts.has(id)).length;
  return { ledger, forwards: { doubled, lost } };
}

/** Waits until both the API and submission have taken more. */
export async function moreAccepted(
  load: FleetLoad,
  more: { readonly api: number; readonly submission: number } = BETWEEN,
): Promise<void> {
  const before = load.counts();
  await untilSo('more is accepted', 60_000, () => {
    const { api, submission } = load.counts();
    return api - before.api >= more.api && submission - before.submission >= more.submission
      ? true
      : null;
  });
}

const NAMES = ['one', 'front', 'other', 'door'] as const;

async function roll(torture: Torture, fleet: Fleet, load: FleetLoad): Promise<number> {
  let slowestMs = 0;
  for (const name of NAMES) {
    await moreAccepted(load);
    const startedAt = performance.now();
    const code = await fleet.programs[name].terminate();
    const tookMs = performance.now() - startedAt;
    slowestMs = Math.max(slowestMs, tookMs);
    torture.report.promise(code === 0, `${name} ended with ${code}`);
    await fleet.programs[name].start();
    torture.say(`${name} restarted; its stop took ${Math.round(tookMs)} ms`);
  }
  return slowestMs;
}

export const rolling: Row = {
  name: 'rolling',
  number: 26,
  title: 'rolling restart of four processes',
  async run(torture) {
    const postgres = await startOwnPostgres(torture);
    const s3 = await startS3('/blobs');
    torture.undo.add(() => s3.stop());
    const tally = await startTally({ beforeDot: () => sleep(Math.random() * 50) });
    torture.undo.add(() => tally.stop());
    const fleet = await startFleet({
      databaseUrl: postgres.url,
      blobStore: s3.url,
      smarthostPort: tally.port,
      args: ['--enable-source-maps', PROGRAM],
    });
    torture.undo.add(() => fleet.stop());
    const pool = new Pool({ connectionString: postgres.url, max: 2 });
    torture.undo.add(() => pool.end());
    await forwardTheCrowd(fleet, 'onward@far.test');

    const rounds = torture.rounds ?? (torture.short ? 1 : 3);
    let slowestMs = 0;
    const load = startFleetLoad(fleet, { ...LOAD, name: 'rolled', inboundMessages: 400 });
    for (let round = 1; round <= rounds; round++) {
      slowestMs = Math.max(slowestMs, await roll(torture, fleet, load));
      torture.say(`round ${round} of ${rounds}: ${load.accepted.size} accepted`);
    }
    await moreAccepted(load);
    await load.stop();
    const calm = await holdFleet({ pool, load, tally });
    promiseBalance(torture.report, calm.ledger);
    const { report } = torture;
    const unknown = (calm.ledger.byState['unknown'] ?? 0) + calm.ledger.admitted;
    report.promise(unknown === 0, `${unknown} are unknown or doubled after restarts in order`);
    report.promise(calm.forwards.doubled === 0, `${calm.forwards.doubled} were forwarded twice`);
    report.promise(load.ambiguous() === 0, `${load.ambiguous()} submissions lost their answer`);
    const { rows } = await pool.query<{ count: string }>(
      "select count(*) from email where subject like 'rolled %'",
    );
    const stored = Number(rows[0]?.count);
    report.promise(
      stored === load.numbers(),
      `${stored} emails of ${load.numbers()} API requests, each with its idempotency key`,
    );
    report.did(
      `${rounds} rounds: SIGTERM and restart of API+jobs, MX+submission and both that deliver, under load at API, submission and MX, with forwards and large messages in S3`,
    );
    report.counted(
      `${describeLedger(calm.ledger)}; ${load.messages.length} received and forwarded once; ${load.refused()} came again; the slowest stop took ${Math.round(slowestMs)} ms`,
    );
    report.promise(slowestMs < 30_000, 'a stop took more than 30 s');
    await kill(torture, { fleet, tally, pool });
  },
};

/** kill -9 of one that delivers; only what it may have handed over in that moment is in doubt. */
async function kill(
  torture: Torture,
  d: { readonly fleet: Fleet; readonly tally: Tally; readonly pool: Pool },
): Promise<void> {
  const load = startFleetLoad(d.fleet, { ...LOAD, name: 'killed', inboundMessages: 0 });
  await moreAccepted(load);
  await d.fleet.programs.one.kill();
  await moreAccepted(load);
  await d.fleet.programs.one.start();
  await moreAccepted(load);
  await load.stop();
  const { ledger } = await holdFleet({ ...d, load });
  promiseBalance(torture.report, ledger);
  torture.report.did('then kill -9 of one that delivers, and its start');
  torture.report.counted(describeLedger(ledger));
}
