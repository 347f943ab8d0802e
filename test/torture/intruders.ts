// Rows 19 to 23: strangers at the inbound listener who bring no mail, bring it for ever, or leave in the middle. Honest mail
// must still come in, the main process must not grow beyond bounds, and nothing that was not complete may be stored.
import { once } from 'node:events';
import { readdirSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { handIn } from '../support/hand-in.ts';
import { freePort } from '../support/program.ts';
import { rssMbOf, startMachine, type Machine } from './machine.ts';
import { percentile, sleep, untilSo, type Row, type Torture } from './row.ts';

const RECEIVER = 'honest@mailstead.test';
const HONEST_EVERY_MS = 100;
const HONEST_FIRST = 20;
const SAMPLE_MS = 100;
/** What a siege may add to the main process, most of it not yet collected. */
const RSS_MORE_MAX_MB = 150;
const REOPEN_MS = 500;
const CALM_MAX_MS = 60_000;

interface Siege {
  readonly torture: Torture;
  readonly port: number;
  isOver(): boolean;
}

/** What the attackers count; keys are told as they are. */
type Tally = Map<string, number>;

const count = (tally: Tally, what: string, more = 1): void =>
  void tally.set(what, (tally.get(what) ?? 0) + more);

/** A connection from one of many addresses; what it hears is counted by its code. */
function intrude(siege: Siege, tally: Tally, from: string): Socket {
  const socket = connect({ port: siege.port, host: '127.0.0.1', localAddress: from });
  socket.on('error', () => undefined); // refused, or shown out
  socket.on('data', (chunk: Buffer) => {
    for (const [code] of chunk.toString('latin1').matchAll(/^\d{3}(?= )/gm)) count(tally, code);
  });
  return socket;
}

const addressOf = (number: number): string => `127.0.${50 + (number >> 7)}.${(number & 127) + 1}`;

/** Resolves with false when it closed first. */
async function hear(socket: Socket, code: RegExp): Promise<boolean> {
  let heard = '';
  return new Promise((resolve) => {
    const onData = (chunk: Buffer): void => {
      heard += chunk.toString('latin1');
      if (code.test(heard)) done(true);
    };
    const onClose = (): void => done(false);
    const done = (isHeard: boolean): void => {
      socket.off('data', onData).off('close', onClose);
      resolve(isHeard);
    };
    socket.on('data', onData).on('close', onClose);
    if (socket.destroyed) done(false);
  });
}

/** Up to the 354; false when it came to something else. */
async function enterData(socket: Socket): Promise<boolean> {
  socket.write(
    `EHLO intruder.test\r\nMAIL FROM:<i@intruder.test>\r\nRCPT TO:<victim@mailstead.test>\r\nDATA\r\n`,
  );
  return hear(socket, /^354 /m);
}

/** Keeps `wanted` connections open, each from the beginning whenever it is closed. */
async function keepOpen(
  siege: Siege,
  wanted: number,
  live: (number: number) => Promise<void>,
): Promise<void> {
  const one = async (number: number): Promise<void> => {
    while (!siege.isOver()) {
      await live(number);
      await sleep(REOPEN_MS);
    }
  };
  await Promise.all(Array.from({ length: wanted }, (_, number) => one(number)));
}

async function besiege(
  torture: Torture,
  about: {
    readonly ms: number | null;
    readonly did: string;
    readonly attack: (siege: Siege, tally: Tally) => Promise<void>;
  },
): Promise<void> {
  const port = await freePort();
  const machine = await startMachine(torture, {
    MAILSTEAD_MX_PORT: String(port),
    // Nobody answers there: what is asked about senders ends at once and on this machine.
    MAILSTEAD_DNS_SERVERS: '127.0.0.1:1',
  });
  const rss = (): number => rssMbOf(machine.program.pid() ?? 0);
  const honest = sendHonestly(port);
  torture.undo.add(() => honest.stop());
  await untilSo('honest mail goes through', 60_000, () =>
    honest.accepted.length >= HONEST_FIRST ? true : null,
  );
  const before = rss();
  const calm = honest.accepted.map(({ ms }) => ms);
  let peak = before;
  const sampling = setInterval(() => (peak = Math.max(peak, rss())), SAMPLE_MS);
  const [firstOfSiege, refusedBefore] = [honest.accepted.length, honest.refused()];
  const tally: Tally = new Map();
  const endsAt = performance.now() + (about.ms ?? Number.POSITIVE_INFINITY);
  const beganAt = performance.now();
  await about.attack({ torture, port, isOver: () => performance.now() > endsAt }, tally);
  const seconds = (performance.now() - beganAt) / 1_000;
  clearInterval(sampling);
  const served = honest.accepted.slice(firstOfSiege).map(({ ms }) => ms);
  const turnedAway = honest.refused() - refusedBefore;
  const last = honest.accepted.length;
  await untilSo('honest mail goes through afterwards', CALM_MAX_MS, () =>
    honest.accepted.length > last + 5 ? true : null,
  );
  await honest.stop();
  await promiseWhole(torture, { machine, acknowledged: honest.accepted.length });

  torture.report.did(about.did);
  const said = [...tally]
    .toSorted(([a], [b]) => a.localeCompare(b))
    .map(([what, times]) => `${what}: ${times}`);
  torture.report.counted(
    `${seconds.toFixed(0)} s; honest mail meanwhile ${served.length} taken, ${turnedAway} tries turned away, p95 ${Math.round(percentile(served, 0.95))} ms (${Math.round(percentile(calm, 0.95))} ms before)`,
  );
  torture.report.counted(
    `main process ${Math.round(before)} MB before, at most ${Math.round(peak)} MB, ${Math.round(rss())} MB after`,
  );
  torture.report.counted(`the intruders heard ${said.join(', ') || 'nothing'}`);
  torture.report.promise(served.length > 0, 'no honest mail came in meanwhile');
  torture.report.promise(
    peak - before <= RSS_MORE_MAX_MB,
    `the main process grew by ${Math.round(peak - before)} MB`,
  );
}

/** One honest client that comes again when it is turned away. */
function sendHonestly(port: number): {
  readonly accepted: readonly { readonly ms: number }[];
  refused(): number;
  stop(): Promise<void>;
} {
  const accepted: { readonly ms: number }[] = [];
  let refused = 0;
  let isStopping = false;
  const sending = (async () => {
    for (let number = 0; !isStopping; number += 1) {
      const beganAt = performance.now();
      const message = `From: h@else.test\r\nSubject: honest ${number}\r\nMessage-ID: <${number}@else.test>\r\n\r\nhello`;
      for (;;) {
        const { code } = await handIn(port, { recipient: RECEIVER, message });
        if (code === 250) break;
        if (isStopping) return;
        refused += 1;
        await sleep(HONEST_EVERY_MS);
      }
      accepted.push({ ms: performance.now() - beganAt });
      await sleep(HONEST_EVERY_MS);
    }
  })();
  return {
    accepted,
    refused: () => refused,
    async stop() {
      isStopping = true;
      await sending;
    },
  };
}

/** What was acknowledged is there, and nothing else is. */
async function promiseWhole(
  torture: Torture,
  { machine, acknowledged }: { readonly machine: Machine; readonly acknowledged: number },
): Promise<void> {
  const rows = await machine.query<{ subject: string }>('select subject from received_email');
  const honest = rows.filter(({ subject }) => subject.startsWith('honest '));
  const spool = join(machine.program.dataDir, 'mx-spool');
  const left = await untilSo('no file is left of what did not end', CALM_MAX_MS, () =>
    filesIn(spool) === 0 ? 0 : null,
  ).catch(() => filesIn(spool));
  torture.report.counted(`${honest.length} honest messages stored, ${acknowledged} acknowledged`);
  torture.report.promise(
    honest.length >= acknowledged && honest.length <= acknowledged + 1,
    `${honest.length} honest messages are stored and ${acknowledged} were acknowledged`,
  );
  torture.report.promise(
    rows.length === honest.length,
    `${rows.length - honest.length} messages of the intruders are stored`,
  );
  torture.report.promise(left === 0, `${left} files of messages that did not end are left`);
}

function filesIn(folder: string): number {
  try {
    return readdirSync(folder).length;
  } catch {
    return 0; // there was never one
  }
}

const idle: Row = {
  name: 'idle-connections',
  number: 19,
  title: 'strangers who connect and say nothing',
  async run(torture) {
    const wanted = torture.short ? 1_000 : 5_000;
    let open = 0;
    let most = 0;
    await besiege(torture, {
      ms: torture.short ? 20_000 : 60_000,
      did: `${wanted} connections from 250 addresses, each opened again when it is closed`,
      async attack(siege, tally) {
        await keepOpen(siege, wanted, async (number) => {
          const socket = intrude(siege, tally, addressOf(number % 250));
          socket.once('connect', () => (most = Math.max(most, (open += 1))));
          let timer: NodeJS.Timeout | undefined;
          const over = new Promise<void>((resolve) => {
            timer = setInterval(() => siege.isOver() && resolve(), 500);
          });
          const isOpen = await Promise.race([
            once(socket, 'close').then(
              () => false,
              () => false,
            ),
            over.then(() => true),
          ]);
          clearInterval(timer);
          if (isOpen) socket.destroy();
          open -= 1;
        });
      },
    });
    torture.report.counted(`at most ${most} were connected at a time`);
  },
};

const slowloris: Row = {
  name: 'slowloris',
  number: 20,
  title: 'strangers who send a byte a second',
  async run(torture) {
    const wanted = torture.short ? 200 : 400;
    await besiege(torture, {
      ms: torture.short ? 30_000 : 150_000,
      did: `${wanted} connections from 40 addresses that send a byte a second: of a command, a header, a body`,
      async attack(siege, tally) {
        await keepOpen(siege, wanted, async (number) => {
          const socket = intrude(siege, tally, addressOf(number % 40));
          const isIn = await hear(socket, /^220 /m);
          if (isIn && number % 3 > 0 && (await enterData(socket)) && number % 3 === 2) {
            socket.write('Subject: slow\r\n\r\n');
          }
          while (!siege.isOver() && !socket.destroyed && socket.writable) {
            socket.write('x');
            await sleep(1_000);
          }
          socket.destroy();
        });
      },
    });
  },
};

const endless: Row = {
  name: 'endless-message',
  number: 21,
  title: 'strangers who send 1 GB of DATA',
  async run(torture) {
    const [clients, bytes] = torture.short ? [2, 1e9] : [8, 1e9];
    const piece = Buffer.from(`${'x'.repeat(998)}\r\n`.repeat(64));
    let sent = 0;
    await besiege(torture, {
      ms: null,
      did: `${clients} clients that send ${bytes / 1e9} GB each without saying so`,
      async attack(siege, tally) {
        await Promise.all(
          Array.from({ length: clients }, async (_, number) => {
            const socket = intrude(siege, tally, addressOf(number));
            if (!(await hear(socket, /^220 /m)) || !(await enterData(socket))) return;
            const closed = new Promise<void>((resolve) => void socket.once('close', resolve));
            socket.write('Subject: endless\r\n\r\n');
            for (let left = bytes; left > 0 && !socket.destroyed; left -= piece.length) {
              sent += piece.length;
              if (socket.write(piece)) continue;
              const drained = new Promise<void>((resolve) => void socket.once('drain', resolve));
              await Promise.race([closed, drained]);
            }
            if (!socket.destroyed) {
              socket.write('.\r\n');
              await hear(socket, /^\d/m);
            }
            socket.destroy();
          }),
        );
      },
    });
    torture.report.counted(`${Math.round(sent / 1e6)} MB were sent before they were shown out`);
  },
};

const recipients: Row = {
  name: 'many-recipients',
  number: 22,
  title: 'strangers who name 100,000 recipients',
  async run(torture) {
    const wanted = torture.short ? 10_000 : 100_000;
    await besiege(torture, {
      ms: null,
      did: `${wanted} RCPT, half of them to nobody here, pipelined, on a new connection whenever one is closed`,
      async attack(siege, tally) {
        let named = 0;
        const client = async (number: number): Promise<void> => {
          while (named < wanted) {
            const socket = intrude(siege, tally, addressOf(number));
            if (!(await hear(socket, /^220 /m))) continue;
            count(tally, 'connections');
            socket.write('EHLO intruder.test\r\nMAIL FROM:<i@intruder.test>\r\n');
            const closed = new Promise<void>((resolve) => void socket.once('close', resolve));
            const domain = number % 2 === 0 ? 'mailstead.test' : 'elsewhere.test';
            while (named < wanted && !socket.destroyed) {
              const lines = Array.from(
                { length: 100 },
                () => `RCPT TO:<r${named++}@${domain}>\r\n`,
              );
              socket.write(lines.join(''));
              await Promise.race([closed, sleep(20)]);
            }
            // What it was told so far was told; the rest of its recipients is given up.
            await Promise.race([closed, sleep(5_000)]);
            socket.destroy();
          }
        };
        await Promise.all(Array.from({ length: 10 }, (_, number) => client(number)));
      },
    });
  },
};

const leavers: Row = {
  name: 'mid-data-close',
  number: 23,
  title: 'strangers who leave in the middle of DATA',
  async run(torture) {
    const wanted = torture.short ? 200 : 1_000;
    await besiege(torture, {
      ms: null,
      did: `${wanted} messages of up to 300 KB that end without their dot: half closed, half reset`,
      async attack(siege, tally) {
        let left = wanted;
        const client = async (number: number): Promise<void> => {
          while (left > 0) {
            const turn = left--;
            const socket = intrude(siege, tally, addressOf(number));
            if (!(await hear(socket, /^220 /m)) || !(await enterData(socket))) {
              socket.destroy();
              left += 1;
              await sleep(REOPEN_MS);
              continue;
            }
            const size = 300 * ((turn * 7_919) % 1_000);
            socket.write(`Subject: partial\r\n\r\n${'0123456789'.repeat(7)}\r\n`);
            socket.write(`${'x'.repeat(70)}\r\n`.repeat(Math.ceil(size / 72)));
            // As much as a dot, without its line.
            if (turn % 3 === 0) socket.write('.');
            await sleep(5);
            const closed = new Promise<void>((resolve) => void socket.once('close', resolve));
            if (turn % 2 === 0) socket.end();
            else socket.resetAndDestroy();
            count(tally, turn % 2 === 0 ? 'ended' : 'reset');
            await Promise.race([closed, sleep(2_000)]);
            socket.destroy();
          }
        };
        await Promise.all(Array.from({ length: 40 }, (_, number) => client(number)));
      },
    });
  },
};

export const intruderRows: readonly Row[] = [idle, slowloris, endless, recipients, leavers];
