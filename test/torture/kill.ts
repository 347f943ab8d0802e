// Rows 1, 2, 16 and 17: ends of processes. A delivery worker or the whole program is killed at a random moment under load;
// between a peer's 250 and our commit; again and again over one message; and asked to stop in the middle of its work.
import { describeLedger, promiseBalance, readLedger } from './ledger.ts';
import { signalTo, simpleEmail, startMachine, startOwnPostgres, type Machine } from './machine.ts';
import { sleep, untilSo, type Row, type Torture } from './row.ts';
import { startTally, type Tally, type TallyOptions } from './tally.ts';

const EMAILS = 300;
const CONNECTIONS = 15;
/** A round's mail takes about this long, so that a kill may come at its beginning, middle or end. */
const KILL_WITHIN_MS = 1_200;

async function startWithTally(
  torture: Torture,
  options: TallyOptions = {},
  settings: Record<string, string> = {},
): Promise<{ readonly machine: Machine; readonly tally: Tally }> {
  const tally = await startTally(options);
  torture.undo.add(() => tally.stop());
  const machine = await startMachine(torture, {
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
    ...settings,
  });
  return { machine, tally };
}

/** What is in no row of an undecided state any more; `unknown` waits 20 minutes and is decided for our purposes. */
async function holdAgainst(
  torture: Torture,
  about: {
    readonly machine: Machine;
    readonly tally: Tally;
    readonly accepted: ReadonlySet<string>;
    readonly after?: string;
  },
): Promise<Awaited<ReturnType<typeof readLedger>>> {
  await about.machine.drained();
  const ledger = await readLedger(about.machine, about);
  promiseBalance(torture.report, ledger);
  return ledger;
}

function killRow(name: string, title: string, strike: (machine: Machine) => Promise<void>): Row {
  return {
    name,
    number: 1,
    title,
    async run(torture) {
      const { machine, tally } = await startWithTally(torture);
      const rounds = torture.rounds ?? (torture.short ? 3 : 100);
      const total = { accepted: 0, unknown: 0, inFlight: 0, admitted: 0 };
      let after: string | undefined;
      for (let round = 1; round <= rounds; round++) {
        const load = machine.load({
          connections: CONNECTIONS,
          max: EMAILS,
          email: (number) => simpleEmail(number),
        });
        await sleep(Math.random() * KILL_WITHIN_MS);
        await strike(machine);
        // The API takes mail all the same when only a worker has died.
        if (machine.program.pid() !== null) await load.ended;
        const { accepted } = await load.stop();
        if (machine.program.pid() === null) {
          await machine.forget();
          await machine.program.start();
        }
        const ledger = await holdAgainst(torture, {
          machine,
          tally,
          accepted,
          ...(after === undefined ? {} : { after }),
        });
        after = ledger.last;
        total.accepted += accepted.size;
        total.unknown += ledger.byState['unknown'] ?? 0;
        total.admitted += ledger.admitted;
        if (round % 10 === 0 || torture.short) {
          torture.say(`round ${round} of ${rounds}: ${describeLedger(ledger)}`);
        }
      }
      torture.report.did(`${rounds} rounds of up to ${EMAILS} emails, a kill -9 within each`);
      torture.report.counted(
        `${total.accepted} accepted, 0 lost; ${total.unknown} unknown; ${total.admitted} taken twice and told so`,
      );
    },
  };
}

const killWorker = killRow('kill-worker', 'kill -9 of the delivery worker', async (machine) => {
  for (const pid of machine.workers()) signalTo(pid, 'SIGKILL');
});

const killProgram = killRow('kill-program', 'kill -9 of the whole program', async (machine) => {
  const workers = machine.workers();
  await machine.program.kill();
  for (const pid of workers) signalTo(pid, 'SIGKILL');
});

/** The database stands still while peers answer 250, so that no answer is committed; then everything of ours is killed. */
const commitGap: Row = {
  name: 'commit-gap',
  number: 2,
  title: 'kill -9 between the 250 and the commit',
  async run(torture) {
    const rounds = torture.rounds ?? (torture.short ? 2 : 20);
    const postgres = await startOwnPostgres(torture);
    let stopAt = Infinity;
    let stoppedWith = 0;
    const { machine, tally } = await startWithTally(
      torture,
      {
        // In the moment of an answer, and with the answer on its way.
        beforeDot: async () => {
          if (tally.accepted() < stopAt || stoppedWith > 0) return;
          postgres.signal('SIGSTOP');
          stoppedWith = tally.accepted();
        },
      },
      { MAILSTEAD_DATABASE_URL: postgres.url },
    );
    let uncommitted = 0;
    let after: string | undefined;
    for (let round = 1; round <= rounds; round++) {
      stoppedWith = 0;
      stopAt = tally.accepted() + Math.floor(Math.random() * EMAILS * 0.8);
      const load = machine.load({
        connections: CONNECTIONS,
        max: EMAILS,
        email: (number) => simpleEmail(number),
      });
      await untilSo('the database stands still', 60_000, () => (stoppedWith > 0 ? true : null));
      await sleep(500); // what was under way gets its 250 and its line in the journal
      const workers = machine.workers();
      await machine.program.kill();
      for (const pid of workers) signalTo(pid, 'SIGKILL');
      stopAt = Infinity;
      uncommitted += tally.accepted() - stoppedWith;
      postgres.signal('SIGCONT');
      await machine.forget();
      const { accepted } = await load.stop();
      await machine.program.start();
      const ledger = await holdAgainst(torture, {
        machine,
        tally,
        accepted,
        ...(after === undefined ? {} : { after }),
      });
      after = ledger.last;
      torture.report.promise(
        ledger.admitted === 0,
        `round ${round}: ${ledger.admitted} were sent twice although their 250 was in the journal`,
      );
      if (torture.short) torture.say(`round ${round}: ${describeLedger(ledger)}`);
    }
    torture.report.did(
      `${rounds} rounds: SIGSTOP of Postgres at a 250, 500 ms later kill -9 of all of ours`,
    );
    torture.report.counted(`${uncommitted} answered 250 and not committed, 0 sent again`);
    torture.report.promise(uncommitted > 0, 'no round had a 250 without its commit');
  },
};

/** The peer ends whoever brings the message, before its final dot. */
const poison: Row = {
  name: 'poison',
  number: 16,
  title: 'a message that ends its worker',
  async run(torture) {
    let kills = 0;
    let victims: () => readonly number[] = () => [];
    const { machine, tally } = await startWithTally(torture, {
      onRcpt(recipient) {
        if (!recipient.startsWith('poison@')) return null;
        kills += 1;
        for (const pid of victims()) signalTo(pid, 'SIGKILL');
        return '451 4.3.0 gone';
      },
    });
    victims = () => machine.workers();
    const isPoison = (number: number): boolean => number === 50;
    const load = machine.load({
      connections: CONNECTIONS,
      max: EMAILS,
      email: (number) => ({
        ...simpleEmail(number),
        ...(isPoison(number) ? { to: 'poison@recipient.test' } : {}),
      }),
    });
    await untilSo('all are handed in', 60_000, async () =>
      load.sent.accepted.size === EMAILS ? true : null,
    );
    const { accepted } = await load.stop();
    const ledger = await holdAgainst(torture, { machine, tally, accepted });
    torture.report.did(`${EMAILS} emails, one of which kills the worker at RCPT`);
    torture.report.counted(`${kills} deaths; ${describeLedger(ledger)}`);
    torture.report.promise(kills === 5, `it was tried ${kills} times, not 5`);
    torture.report.promise(ledger.byState['failed'] === 1, 'it was not set aside');
    const states = Object.keys(ledger.byState).toSorted().join(', ');
    torture.report.promise(
      ['delivered, failed', 'delivered, failed, unknown'].includes(states),
      `the others did not all arrive: ${states}`,
    );
  },
};

const terminate: Row = {
  name: 'sigterm',
  number: 17,
  title: 'SIGTERM under load',
  async run(torture) {
    const rounds = torture.rounds ?? (torture.short ? 2 : 20);
    const { machine, tally } = await startWithTally(torture, {
      beforeDot: () => sleep(Math.random() * 200),
    });
    let after: string | undefined;
    let slowestMs = 0;
    let doubled = 0;
    let total = 0;
    for (let round = 1; round <= rounds; round++) {
      const load = machine.load({
        connections: CONNECTIONS,
        max: EMAILS,
        email: (number) => simpleEmail(number),
      });
      await sleep(200 + Math.random() * 1_500);
      const startedAt = performance.now();
      await machine.forget();
      const code = await machine.program.terminate();
      slowestMs = Math.max(slowestMs, performance.now() - startedAt);
      torture.report.promise(code === 0, `round ${round}: it ended with ${code}`);
      const { accepted } = await load.stop();
      await machine.program.start();
      const ledger = await holdAgainst(torture, {
        machine,
        tally,
        accepted,
        ...(after === undefined ? {} : { after }),
      });
      after = ledger.last;
      total += accepted.size;
      doubled += ledger.admitted + (ledger.byState['unknown'] ?? 0);
    }
    torture.report.did(
      `${rounds} times SIGTERM with up to ${EMAILS} emails under way, peers answer within 200 ms`,
    );
    torture.report.counted(
      `${total} accepted, ${doubled} twice or unknown; the slowest stop took ${Math.round(slowestMs)} ms`,
    );
    torture.report.promise(doubled === 0, `${doubled} are unknown or were taken twice`);
    torture.report.promise(slowestMs < 30_000, 'a stop took more than 30 s');
  },
};

export const killRows: readonly Row[] = [killWorker, killProgram, commitGap, poison, terminate];
