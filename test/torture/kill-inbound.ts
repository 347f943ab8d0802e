// Row 18: kill -9 while mail comes in. The whole program is killed at a random moment, in every second round its Postgres
// with it; senders who heard no 250 come again. Every message is there once then, to the byte, under the id that was said.
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { createHash } from 'node:crypto';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { readTree } from '../bench/processes.ts';
import {
  inboundMessage,
  startInboundLoad,
  untilAcknowledged,
  type InboundMessage,
} from '../support/inbound-load.ts';
import { freePort } from '../support/program.ts';
import { signalTo, startMachine, type Machine } from './machine.ts';
import { sleep, untilSo, type Row, type Torture } from './row.ts';

const MESSAGES = 300;
const CONNECTIONS = 15;
const ALL_IN_MAX_MS = 120_000;
const READ_MAX_MS = 120_000;

async function startReceiving(
  torture: Torture,
): Promise<{ readonly machine: Machine; readonly port: number }> {
  const port = await freePort();
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-torture-'));
  torture.undo.add(() => rm(dataDir, { recursive: true, force: true }));
  await mkdir(join(dataDir, 'config'));
  // All of them are one client here.
  const connections = { per_client: 100, new_per_minute: 1_000_000 };
  await writeFile(join(dataDir, 'config', 'receiving.json'), JSON.stringify({ connections }));
  const machine = await startMachine(torture, { MAILSTEAD_MX_PORT: String(port) }, { dataDir });
  return { machine, port };
}

interface Stored {
  readonly id: string;
  readonly subject: string;
  /** Of what lies below our trace; null: apart from the row. */
  readonly sha256: string | null;
  readonly bytes: number;
}

const storedIn = (machine: Machine, round: string): Promise<readonly Stored[]> =>
  machine.query<Stored>(
    `select e.id, e.subject, encode(sha256(substr(c.raw, c.trace_size_bytes + 1)), 'hex') as sha256,
       c.raw_size_bytes - c.trace_size_bytes as bytes
     from received_email e
     left join received_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
     where e.subject like $1`,
    [`${round},%`],
  );

async function downloadedHash(machine: Machine, { id, bytes }: Stored): Promise<string> {
  const { body } = await machine.program.call('GET', `/emails/receiving/${id}`);
  const { download_url: url } = body['raw'] as { download_url: string };
  const answer = await fetch(machine.program.base + new URL(url).pathname);
  const raw = Buffer.from(await answer.arrayBuffer());
  return createHash('sha256').update(raw.subarray(-bytes)).digest('hex');
}

async function judge(
  torture: Torture,
  of: {
    readonly machine: Machine;
    readonly round: string;
    readonly messages: readonly InboundMessage[];
    readonly acknowledged: ReadonlyMap<string, string>;
  },
): Promise<void> {
  const { promise } = torture.report;
  // A large one may be acknowledged before it was read: until then it shows no subject.
  await untilSo('everything is read', READ_MAX_MS, async () => {
    const unread = await of.machine.query('select 1 from received_email where not is_read limit 1');
    return unread.length === 0 ? true : null;
  });
  const stored = await storedIn(of.machine, of.round);
  const bySubject = Map.groupBy(stored, ({ subject }) => subject);
  for (const { subject, sha256 } of of.messages) {
    const id = of.acknowledged.get(subject);
    const copies = bySubject.get(subject) ?? [];
    promise(id !== undefined, `${subject} was never acknowledged`);
    promise(copies.length === 1, `${subject} is there ${copies.length} times`);
    const [copy] = copies;
    if (copy === undefined) continue;
    promise(copy.id === id, `${subject} is not there under the id that was said`);
    const found = copy.sha256 ?? (await downloadedHash(of.machine, copy));
    promise(found === sha256, `${subject} is not what was sent`);
  }
}

export const killInbound: Row = {
  name: 'kill-inbound',
  number: 18,
  title: 'kill -9 while mail comes in',
  async run(torture) {
    const { machine, port } = await startReceiving(torture);
    const rounds = torture.rounds ?? (torture.short ? 4 : 100);
    let before = 0;
    for (let number = 1; number <= rounds; number++) {
      const round = `round ${number}`;
      const messages = Array.from({ length: MESSAGES }, (_, n) =>
        inboundMessage(`${round}, ${n}`, n),
      );
      const load = startInboundLoad(port, messages, CONNECTIONS);
      await machine.forget();
      // Anywhere between the first and the last, and in between two of them.
      await untilAcknowledged(load, Math.floor(Math.random() * MESSAGES * 0.9));
      await sleep(Math.random() * 10);
      const pid = machine.program.pid();
      const tree = pid === null ? [] : readTree(pid);
      const heard = load.acknowledged.size;
      await machine.program.kill();
      for (const one of tree) {
        if (one.pid !== pid && (one.name !== 'postgres' || number % 2 === 0)) {
          signalTo(one.pid, 'SIGKILL');
        }
      }
      before += heard;
      await machine.program.start();
      await Promise.race([load.ended, sleep(ALL_IN_MAX_MS)]);
      load.giveUp();
      await judge(torture, { machine, round, messages, acknowledged: load.acknowledged });
      if (number % 10 === 0 || torture.short) {
        torture.say(`${round} of ${rounds}: ${heard} of ${MESSAGES} acknowledged before the kill`);
      }
    }
    const orphans = await machine.query(
      `select 1 from received_content c where not exists (
         select 1 from received_email e where e.tenant_id = c.tenant_id and e.id = c.email_id)`,
    );
    torture.report.promise(orphans.length === 0, `${orphans.length} contents belong to nothing`);
    torture.report.did(
      `${rounds} rounds of ${MESSAGES} messages over ${CONNECTIONS} connections, a kill -9 within each, of Postgres too in every second; senders come again with what was not acknowledged`,
    );
    torture.report.counted(
      `${rounds * MESSAGES} messages, ${before} acknowledged before a kill, all there once`,
    );
  },
};
