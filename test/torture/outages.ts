// Rows 3 to 5: what the program stands on goes away under load and comes back. Postgres stands still and is restarted;
// the store of the clock is wiped; the disk is full.
import { execFileSync } from 'node:child_process';
import { closeSync, mkdtempSync, openSync, rmSync, statfsSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { MongoClient } from 'mongodb';
import { freePort } from '../support/program.ts';
import { describeLedger, promiseBalance, readLedger } from './ledger.ts';
import { simpleEmail, startMachine, startOwnPostgres, type Machine } from './machine.ts';
import { sleep, untilSo, type Row, type Torture } from './row.ts';
import { handIn, shortMessage } from '../support/hand-in.ts';
import { startTally, type Tally } from './tally.ts';

const CONNECTIONS = 10;
const RECEIVER = 'x@mailstead.test';
/** CPU seconds a second that a program may burn while it waits for its database. */
const IDLE_CPU_MAX = 0.2;
const RESUME_MAX_MS = 120_000;

async function startAgainst(
  torture: Torture,
  tally: Tally,
  settings: Record<string, string>,
): Promise<{ readonly machine: Machine; readonly mxPort: number }> {
  const mxPort = await freePort();
  const machine = await startMachine(torture, {
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
    MAILSTEAD_MX_PORT: String(mxPort),
    ...settings,
  });
  return { machine, mxPort };
}

/** What the SMTP door answered 250 to has to be there afterwards. */
async function promiseReceived(
  torture: Torture,
  { machine, taken }: { readonly machine: Machine; readonly taken: number },
): Promise<void> {
  const [row] = await machine.query<{ count: string }>('select count(*) from received_email');
  const stored = Number(row?.count);
  torture.report.promise(
    stored >= taken,
    `${taken} messages were answered 250, ${stored} are stored`,
  );
}

/** Hands in inbound mail, one message after the other, until told to stop. */
function knock(port: number): { readonly codes: Map<number, number>; stop(): Promise<void> } {
  const codes = new Map<number, number>();
  let stopped = false;
  let number = 0;
  const ended = (async () => {
    while (!stopped) {
      const { code } = await handIn(port, { recipient: RECEIVER, message: shortMessage(++number) });
      codes.set(code, (codes.get(code) ?? 0) + 1);
      await sleep(code === 250 ? 20 : 200);
    }
  })();
  return {
    codes,
    async stop() {
      stopped = true;
      await ended;
    },
  };
}

const since = (now: ReadonlyMap<number, number>, before: ReadonlyMap<number, number>): string =>
  [...now]
    .map(([code, count]) => [code, count - (before.get(code) ?? 0)] as const)
    .filter(([, count]) => count > 0)
    .map(([code, count]) => `${count} x ${code === 0 ? 'no answer' : code}`)
    .join(', ') || 'nothing';

const postgresAway: Row = {
  name: 'postgres-away',
  number: 3,
  title: 'Postgres stands still, and is restarted',
  async run(torture) {
    const awayS = torture.short ? 40 : 60;
    const postgres = await startOwnPostgres(torture);
    const tally = await startTally();
    torture.undo.add(() => tally.stop());
    const { machine, mxPort } = await startAgainst(torture, tally, {
      MAILSTEAD_DATABASE_URL: postgres.url,
    });
    const load = machine.load({ connections: CONNECTIONS, email: (n) => simpleEmail(n) });
    const door = knock(mxPort);
    const flows = (count: number): Promise<true> => {
      const [api, smtp] = [load.sent.accepted.size, door.codes.get(250) ?? 0];
      return untilSo('mail flows', RESUME_MAX_MS, () =>
        load.sent.accepted.size >= api + count && (door.codes.get(250) ?? 0) > smtp ? true : null,
      );
    };
    const away = async (how: string): Promise<void> => {
      // Requests that were under way get their answers first.
      await sleep(3_000);
      const before = { api: new Map(load.sent.refused), smtp: new Map(door.codes) };
      const accepted = load.sent.accepted.size;
      const cpu = machine.cpuS();
      await sleep((awayS - 3) * 1_000);
      const burnt = (machine.cpuS() - cpu) / (awayS - 3);
      torture.report.counted(
        `${how} ${awayS} s: API ${since(load.sent.refused, before.api)}; SMTP ${since(door.codes, before.smtp)}; ${burnt.toFixed(3)} CPU s a second`,
      );
      torture.report.promise(
        load.sent.accepted.size === accepted,
        `${how}: a 200 without a database`,
      );
      torture.report.promise(
        burnt < IDLE_CPU_MAX,
        `${how}: ${burnt.toFixed(2)} CPU s a second while idle`,
      );
      const odd = [...load.sent.refused.keys()].filter((status) => ![503, 0].includes(status));
      torture.report.promise(odd.length === 0, `${how}: the API answered ${odd.join(', ')}`);
      const said = [...load.sent.refused].filter(
        ([status, count]) => status === 503 && count > (before.api.get(503) ?? 0),
      );
      torture.report.promise(said.length > 0, `${how}: the API never said 503`);
      const smtp = [...door.codes.keys()].filter((code) => ![250, 451, 421].includes(code));
      torture.report.promise(smtp.length === 0, `${how}: SMTP answered ${smtp.join(', ')}`);
      torture.report.promise(
        (door.codes.get(451) ?? 0) > (before.smtp.get(451) ?? 0),
        `${how}: SMTP never said 451`,
      );
    };
    await flows(200);
    postgres.signal('SIGSTOP');
    await away('SIGSTOP');
    postgres.signal('SIGCONT');
    await flows(200);
    torture.say('it goes on after SIGCONT');
    await machine.forget();
    await postgres.restart(() => away('stopped'));
    await flows(200);
    await door.stop();
    const { accepted } = await load.stop();
    await machine.drained();
    const ledger = await readLedger(machine, { tally, accepted });
    promiseBalance(torture.report, ledger);
    await promiseReceived(torture, { machine, taken: door.codes.get(250) ?? 0 });
    torture.report.did(
      `SIGSTOP of all of Postgres for ${awayS} s under load, then a restart with ${awayS} s between`,
    );
    torture.report.counted(
      `${describeLedger(ledger)}; ${door.codes.get(250) ?? 0} received, all stored`,
    );
  },
};

/** Mail that every peer puts off once, so that all of it needs the clock. */
async function wipeUnderLoad(
  torture: Torture,
  about: {
    readonly settings: Record<string, string>;
    readonly where: string;
    readonly wipe: (machine: Machine, turn: number) => Promise<void>;
  },
): Promise<void> {
  const emails = torture.short ? 200 : 2_000;
  const wipes = torture.short ? 3 : 20;
  const seen = new Set<string>();
  const tally = await startTally({
    onRcpt(recipient) {
      if (seen.has(recipient)) return null;
      seen.add(recipient);
      return '451 4.3.0 later';
    },
  });
  torture.undo.add(() => tally.stop());
  const { machine } = await startAgainst(torture, tally, {
    MAILSTEAD_RETRY_SCHEDULE: '5s',
    ...about.settings,
  });
  const load = machine.load({
    connections: CONNECTIONS,
    max: emails,
    email: (number) => simpleEmail(number),
    everyMs: torture.short ? 50 : 100,
  });
  for (let turn = 0; turn < wipes; turn++) {
    await sleep(1_000);
    await about.wipe(machine, turn);
  }
  await untilSo('all are handed in', 300_000, () =>
    load.sent.accepted.size >= emails ? true : null,
  );
  const { accepted } = await load.stop();
  const startedAt = performance.now();
  // Two sweeps, and what is claimed then.
  await machine.drained(90_000);
  const seconds = Math.round((performance.now() - startedAt) / 1_000);
  const ledger = await readLedger(machine, { tally, accepted });
  promiseBalance(torture.report, ledger);
  torture.report.promise(
    ledger.byState['delivered'] === accepted.size,
    `only ${ledger.byState['delivered'] ?? 0} of ${accepted.size} arrived`,
  );
  torture.report.did(
    `${emails} emails that are each put off once, the clock's store (${about.where}) wiped ${wipes} times meanwhile`,
  );
  torture.report.counted(
    `all gone ${seconds} s after the last was handed in; ${describeLedger(ledger)}`,
  );
}

const clockInPostgres: Row = {
  name: 'clock-wiped',
  number: 4,
  title: "Agenda's tables dropped and emptied (Postgres)",
  run: (torture) =>
    wipeUnderLoad(torture, {
      settings: {},
      where: 'Postgres',
      async wipe(machine, turn) {
        const sql = turn % 2 === 0 ? 'drop table if exists agenda_jobs' : 'delete from agenda_jobs';
        // It may not be there again yet.
        await machine.query(sql).catch(() => []);
      },
    }),
};

const mongodbUrl = process.env['MAILSTEAD_TEST_MONGODB_URL'] ?? '';
const clockInMongo: Row = {
  name: 'clock-wiped-mongodb',
  number: 4,
  title: "Agenda's collection dropped (MongoDB)",
  whyNot: async () =>
    mongodbUrl === '' ? 'MAILSTEAD_TEST_MONGODB_URL names no server that speaks MongoDB' : null,
  async run(torture) {
    const client = await MongoClient.connect(mongodbUrl);
    torture.undo.add(() => client.close());
    await wipeUnderLoad(torture, {
      settings: { MAILSTEAD_MONGODB_URL: mongodbUrl },
      where: mongodbUrl.replace(/\/\/[^@/]*@/, '//'),
      async wipe() {
        for (const { name } of await client.db().listCollections().toArray()) {
          await client.db().collection(name).drop();
        }
      },
    });
  },
};

const DISK_MB = 400;

const diskFull: Row = {
  name: 'disk-full',
  number: 5,
  title: 'the disk of the data folder is full',
  async whyNot() {
    const folder = mkdtempSync(join(tmpdir(), 'mailstead-mount-'));
    try {
      execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', folder], { stdio: 'pipe' });
      execFileSync('umount', [folder]);
      return null;
    } catch (error) {
      const said = (error as { stderr?: Buffer }).stderr?.toString().trim() ?? String(error);
      return `a small tmpfs cannot be mounted here: ${said}`;
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  },
  async run(torture) {
    const fullS = torture.short ? 10 : 60;
    const folder = mkdtempSync(join(tmpdir(), 'mailstead-full-'));
    torture.undo.add(async () => rmSync(folder, { recursive: true, force: true }));
    execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${DISK_MB}m,mode=755`, 'tmpfs', folder]);
    torture.undo.add(async () => execFileSync('umount', ['-l', folder]));
    const tally = await startTally();
    torture.undo.add(() => tally.stop());
    const mxPort = await freePort();
    const machine = await startMachine(
      torture,
      {
        MAILSTEAD_DELIVERY: 'smarthost',
        MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
        MAILSTEAD_MX_PORT: String(mxPort),
      },
      { dataDir: join(folder, 'data') },
    );
    const load = machine.load({ connections: CONNECTIONS, email: (n) => simpleEmail(n) });
    const door = knock(mxPort);
    await untilSo('mail flows', 60_000, () => (load.sent.accepted.size > 200 ? true : null));
    const ballast = join(folder, 'ballast');
    const before = { api: new Map(load.sent.refused), smtp: new Map(door.codes) };
    const fullSince = performance.now();
    while (performance.now() - fullSince < fullS * 1_000) {
      fill(folder, ballast);
      await sleep(100);
    }
    const odd = [...load.sent.refused.keys()].filter((status) => status !== 0 && status < 500);
    torture.report.promise(odd.length === 0, `the API answered ${odd.join(', ')}`);
    const smtp = [...door.codes.keys()].filter((code) => code >= 500);
    torture.report.promise(smtp.length === 0, `SMTP answered ${smtp.join(', ')}`);
    torture.report.counted(
      `full: API ${since(load.sent.refused, before.api)}; SMTP ${since(door.codes, before.smtp)}`,
    );
    torture.report.promise(
      load.sent.refused.size > 0,
      'nothing was refused: the disk was not full',
    );
    const [api, inbound] = [load.sent.accepted.size, door.codes.get(250) ?? 0];
    rmSync(ballast);
    const startedAt = performance.now();
    await untilSo('mail flows again', RESUME_MAX_MS, () =>
      load.sent.accepted.size > api + 100 && (door.codes.get(250) ?? 0) > inbound ? true : null,
    );
    const seconds = Math.round((performance.now() - startedAt) / 1_000);
    await door.stop();
    const { accepted } = await load.stop();
    await machine.drained();
    const ledger = await readLedger(machine, { tally, accepted });
    promiseBalance(torture.report, ledger);
    await promiseReceived(torture, { machine, taken: door.codes.get(250) ?? 0 });
    // Every page of every table is read, and its checksum with it.
    const tables = await machine.query<{ name: string }>(
      `select c.oid::regclass::text as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
       where c.relkind = 'r' and n.nspname = 'public'`,
    );
    for (const { name } of tables) await machine.query(`select count(*) from ${name}`);
    torture.report.did(
      `data folder with Postgres, journal and blobs on a tmpfs of ${DISK_MB} MB, filled to the last byte for ${fullS} s under load`,
    );
    torture.report.counted(
      `flowing ${seconds} s after space was freed; ${tables.length} tables read whole; ${describeLedger(ledger)}`,
    );
  },
};

/** Takes all the space there is; what is freed meanwhile is taken at the next call. */
function fill(folder: string, ballast: string): void {
  const { bavail, bsize } = statfsSync(folder);
  const file = openSync(ballast, 'a');
  try {
    const chunk = Buffer.alloc(bsize);
    for (let left = bavail; left > 0; left--) writeSync(file, chunk);
  } catch {
    // full
  } finally {
    closeSync(file);
  }
}

export const outageRows: readonly Row[] = [postgresAway, clockInPostgres, clockInMongo, diskFull];
