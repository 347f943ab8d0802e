// Rows 11 and 12: time. A worker that stands still for two minutes while another takes over what it held, and wakes up
// again; and a machine whose clock jumps by an hour and back.
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describeLedger, promiseBalance, readLedger } from './ledger.ts';
import { signalTo, simpleEmail, startMachine, startOwnPostgres } from './machine.ts';
import { sleep, untilSo, type Row } from './row.ts';
import { startTally } from './tally.ts';

const SECRET = 'one secret for both of the programs, 32 or more';
/** Silence until a run is suspected, and until it counts as lost, with room for a sweep. */
const LOST_AFTER_MS = 115_000;

const leaseTheft: Row = {
  name: 'lease-theft',
  number: 11,
  title: 'SIGSTOP of a worker until another has taken over, then SIGCONT',
  async run(torture) {
    const postgres = await startOwnPostgres(torture);
    const tally = await startTally({ beforeDot: () => sleep(20) });
    torture.undo.add(() => tally.stop());
    const settings = {
      MAILSTEAD_DATABASE_URL: postgres.url,
      MAILSTEAD_SECRET: SECRET,
      MAILSTEAD_DELIVERY: 'smarthost',
      MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
    };
    // Two programs with data folders of their own, as on two machines: neither can read the other's journal or end it.
    const stayer = await startMachine(torture, settings);
    const sleeper = await startMachine(torture, settings);
    const load = stayer.load({
      connections: 10,
      email: (number) => simpleEmail(number),
      everyMs: 20,
    });
    const heldBySleeper = async (): Promise<number> => {
      const [row] = await stayer.query<{ count: string }>(
        `select count(*) from delivery d join worker w on w.epoch = d.lease_epoch
         where d.state = 'in_flight' and w.pid = any ($1)`,
        [sleeper.workers()],
      );
      return Number(row?.count);
    };
    const asleep = [sleeper.program.pid() ?? 0, ...sleeper.workers()];
    await untilSo('it holds something', 60_000, async () =>
      (await heldBySleeper()) > 3 ? true : null,
    );
    for (const pid of asleep) signalTo(pid, 'SIGSTOP');
    torture.undo.add(async () => asleep.forEach((pid) => signalTo(pid, 'SIGCONT')));
    const held = await heldBySleeper();
    await sleep(5_000);
    const { accepted } = await load.stop();
    await untilSo('what it held is decided by the other', LOST_AFTER_MS + 60_000, async () =>
      (await heldBySleeper()) === 0 ? true : null,
    );
    await sleep(Math.max(0, LOST_AFTER_MS - 100_000));
    const takenBefore = tally.accepted();
    for (const pid of asleep) signalTo(pid, 'SIGCONT');
    // Time for whatever it still wants to send or to write.
    await sleep(20_000);
    await stayer.drained();
    const ledger = await readLedger(stayer, { tally, accepted });
    promiseBalance(torture.report, ledger);
    const fenced =
      sleeper.program.output().match(/after their lease was gone|given to others/g) ?? [];
    const extra = [...tally.counts.values()].filter((count) => count > 2).length;
    torture.report.did(
      'two programs on one database; one stopped with SIGSTOP until the other had taken over, then woken',
    );
    torture.report.counted(
      `${held} held when it was stopped; ${tally.accepted() - takenBefore} taken from it after it woke; its log says ${fenced.length} times that its lease is gone; ${describeLedger(ledger)}`,
    );
    torture.report.promise(held > 0, 'it held nothing when it was stopped');
    torture.report.promise(extra === 0, `${extra} were sent more than twice`);
    torture.report.promise(ledger.admitted <= held, 'more was sent twice than it held');
  },
};

const PRELOADS = [
  '/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1',
  '/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1',
  '/usr/lib/faketime/libfaketime.so.1',
  '/usr/local/lib/faketime/libfaketime.so.1',
];

const clockJumps: Row = {
  name: 'clock-jumps',
  number: 12,
  title: 'the clock of the machine jumps by an hour, forth and back',
  whyNot: async () =>
    PRELOADS.some((path) => existsSync(path))
      ? null
      : 'libfaketime is not installed (Debian: apt-get install faketime)',
  async run(torture) {
    const watchS = torture.short ? 40 : 120;
    const folder = mkdtempSync(join(tmpdir(), 'mailstead-clock-'));
    torture.undo.add(async () => rmSync(folder, { recursive: true, force: true }));
    const stamp = join(folder, 'offset');
    const jump = (offset: string): void => writeFileSync(stamp, `${offset}\n`);
    jump('+0');
    const postgres = await startOwnPostgres(torture);
    const tally = await startTally({
      onRcpt: (recipient) => (recipient.startsWith('later') ? '451 4.3.0 later' : null),
    });
    torture.undo.add(() => tally.stop());
    const machine = await startMachine(
      torture,
      {
        MAILSTEAD_DATABASE_URL: postgres.url,
        MAILSTEAD_DELIVERY: 'smarthost',
        MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
        MAILSTEAD_RETRY_SCHEDULE: '20m',
        MAILSTEAD_MESSAGE_LIFETIME: '50m',
      },
      {
        env: {
          LD_PRELOAD: PRELOADS.find((path) => existsSync(path)) ?? '',
          FAKETIME_TIMESTAMP_FILE: stamp,
          FAKETIME_NO_CACHE: '1',
          FAKETIME_DONT_FAKE_MONOTONIC: '1',
          DONT_FAKE_MONOTONIC: '1',
        },
      },
    );
    const LATER = 200;
    const putOff = machine.load({
      connections: 10,
      max: LATER,
      email: (number) => ({ ...simpleEmail(number), to: `later${number}@recipient.test` }),
    });
    await untilSo('all are put off', 120_000, async () =>
      (await machine.states())['deferred'] === LATER ? true : null,
    );
    const all = new Set((await putOff.stop()).accepted);
    for (const offset of ['+3600', '-3600', '+0']) {
      jump(offset);
      // What the program says of the time shows that it has jumped.
      const now = await untilSo('the jump is seen', 30_000, async () => {
        const date = (await fetch(`${machine.program.base}/health/live`)).headers.get('date');
        const ahead = (new Date(date ?? 0).getTime() - Date.now()) / 1_000;
        return Math.abs(ahead - Number(offset)) < 30 ? ahead : null;
      });
      const load = machine.load({
        connections: 2,
        email: (number) => simpleEmail(number),
        everyMs: 100,
      });
      await sleep(watchS * 1_000);
      const { accepted, refused } = await load.stop();
      for (const id of accepted) all.add(id);
      await untilSo('what was sent meanwhile arrives', 60_000, async () =>
        ((await machine.states())['delivered'] ?? 0) >= all.size - LATER ? true : null,
      );
      const [row] = await machine.query<{ attempts: string; bounced: string }>(
        `select sum(attempts) as attempts, count(*) filter (where state = 'bounced') as bounced
         from delivery where recipient like 'later%'`,
      );
      torture.report.promise(Number(row?.bounced) === 0, `${offset} s: ${row?.bounced} expired`);
      torture.report.promise(
        Number(row?.attempts) === LATER,
        `${offset} s: ${row?.attempts} attempts at what was put off, not ${LATER}`,
      );
      torture.report.promise(
        refused.size === 0,
        `${offset} s: requests were refused: ${[...refused.keys()].join(', ')}`,
      );
      torture.report.counted(
        `${Math.round(now)} s ahead for ${watchS} s: ${accepted.size} sent and delivered, 0 expired, 0 early`,
      );
    }
    const ledger = await readLedger(machine, { tally, accepted: all });
    promiseBalance(torture.report, ledger);
    torture.report.did(
      `${LATER} deferred for 20 min with a lifetime of 50 min; the clock of all processes but Postgres one hour ahead, one hour behind, right again`,
    );
  },
};

export const clockRows: readonly Row[] = [leaseTheft, clockJumps];
