// Rows 6 to 8: peers that are slow, hang, break off, or take few connections. Others must not notice, every ending must be
// told by its phase, and sockets and memory must come back to where they were.
import { startDns, type DnsRecords, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type PeerScript } from '../support/raw-peer.ts';
import { describeLedger, promiseBalance, readLedger } from './ledger.ts';
import { simpleEmail, startMachine, type Machine } from './machine.ts';
import { percentile, sleep, untilSo, type Row, type Torture } from './row.ts';
import { startTally, type Tally, type TallyOptions } from './tally.ts';

const HEALTHY = 'healthy.test';
/** Others' mail may take this much longer while peers misbehave, and a moment that no clock can promise. */
const SLOWER_MAX = 2;
const GRACE_MS = 250;
const SOCKETS_MORE_MAX = 10;
const RSS_MORE_MAX_MB = 120;
const BASE_MAX_MS = 180_000;

export async function startDirect(
  torture: Torture,
  about: {
    readonly tally: TallyOptions;
    readonly zones: Record<string, DnsRecords>;
    readonly settings?: Record<string, string>;
  },
): Promise<{ readonly machine: Machine; readonly tally: Tally; readonly dns: DnsServer }> {
  const tally = await startTally(about.tally);
  torture.undo.add(() => tally.stop());
  const dns = await startDns(about.zones);
  torture.undo.add(() => dns.stop());
  const machine = await startMachine(torture, {
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(tally.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    ...about.settings,
  });
  return { machine, tally, dns };
}

/** From acceptance to the peer's 250, in ms, of mail that nobody troubles, one email after the other. */
export async function latencies(
  machine: Machine,
  about: {
    readonly tally: Tally;
    readonly emails: number;
    readonly to: (number: number) => string;
  },
): Promise<readonly number[]> {
  const found: number[] = [];
  for (let number = 0; number < about.emails; number++) {
    const load = machine.load({
      connections: 1,
      max: 1,
      email: () => ({ ...simpleEmail(number), to: about.to(number) }),
    });
    await load.ended;
    const [id] = load.sent.accepted;
    const [email] = await machine.query<{ message_id: string; created_at: Date }>(
      'select message_id, created_at from email where id = $1',
      [id],
    );
    if (email === undefined) throw new Error('an email was not accepted');
    const takenAt = await untilSo(
      'its 250',
      120_000,
      () => about.tally.takenAt.get(email.message_id) ?? null,
    );
    found.push(takenAt - email.created_at.getTime());
  }
  return found;
}

const zoneOf = (name: string, address: string): Record<string, DnsRecords> => ({
  [name]: { MX: [`10 mx.${name}`] },
  [`mx.${name}`]: { A: [address] },
});

/** By domain: what its host does, and the stages or causes that its deferral may be told with. */
const SLOW: readonly { readonly name: string; readonly script: PeerScript }[] = [
  {
    name: 'drips',
    script: { on: { connect: { drip: '220 slow.test ESMTP and more\r\n', everyMs: 1_000 } } },
  },
  { name: 'silent', script: { on: { connect: { hang: true } } } },
  { name: 'ehlo', script: { on: { EHLO: { hang: true } } } },
  { name: 'rcpt', script: { on: { RCPT: { hang: true } } } },
  { name: 'data', script: { on: { DATA: { hang: true } } } },
  { name: 'dot', script: { on: { dot: { hang: true } } } },
];

const slowPeers: Row = {
  name: 'slow-peers',
  number: 6,
  title: 'slow and hanging peers',
  async run(torture) {
    const each = torture.short ? 50 : 300;
    const { machine, tally, dns } = await startDirect(torture, {
      tally: { hosts: ['127.0.0.1'] },
      zones: zoneOf(HEALTHY, '127.0.0.1'),
      settings: { MAILSTEAD_RETRY_SCHEDULE: '2h' },
    });
    const to = (number: number): string => `h${number}@${HEALTHY}`;
    const emails = torture.short ? 20 : 100;
    await latencies(machine, { tally, emails: 5, to }); // warm
    const idle = await latencies(machine, { tally, emails, to });
    const before = machine.weight();
    const peers = await Promise.all(
      SLOW.map(async ({ name, script }, index) => {
        const host = `127.0.20.${index + 1}`;
        const peer = await startRawPeer(script, { host, port: tally.port });
        torture.undo.add(() => peer.stop());
        Object.assign(dns.zones, zoneOf(`${name}.test`, host));
        return { name, peer };
      }),
    );
    const load = machine.load({
      connections: 20,
      max: each * SLOW.length,
      email: (number) => simpleEmail(number, `${SLOW[number % SLOW.length]!.name}.test`),
    });
    await untilSo('all are handed in', 120_000, () =>
      load.sent.accepted.size === each * SLOW.length ? true : null,
    );
    await load.stop();
    const busy = await latencies(machine, { tally, emails, to });
    const heldOpen = peers.map(({ name, peer }) => `${name} ${peer.openMax()}`).join(', ');
    const [idleP95, busyP95] = [percentile(idle, 0.95), percentile(busy, 0.95)];
    torture.report.did(
      `${each} emails to each of ${SLOW.length} hosts that drip or hang (${SLOW.map(({ name }) => name).join(', ')})`,
    );
    torture.report.counted(
      `p95 of other mail ${Math.round(idleP95)} ms before, ${Math.round(busyP95)} ms meanwhile; connections held: ${heldOpen}`,
    );
    torture.report.promise(
      busyP95 <= idleP95 * SLOWER_MAX + GRACE_MS,
      `other mail took ${Math.round(busyP95)} ms instead of ${Math.round(idleP95)} ms`,
    );
    const most = Math.max(...peers.map(({ peer }) => peer.openMax()));
    torture.report.promise(most <= 20, `a hanging host held ${most} connections`);
    const unknown = async (): Promise<number> => (await machine.states())['unknown'] ?? 0;
    torture.report.promise((await unknown()) === 0, 'unknown before ten minutes were over');
    if (!torture.short) {
      const at = performance.now();
      await untilSo('unknown after the wait for an answer', 900_000, async () =>
        (await unknown()) > 0 ? true : null,
      );
      const minutes = (performance.now() - at) / 60_000;
      torture.report.counted(`unknown ${minutes.toFixed(1)} min later`);
    }
    for (const { peer } of peers) await peer.stop();
    await promiseBase(torture, { machine, before });
  },
};

/** By domain: when its host resets, and the stages that this may be told with. */
const PHASES: readonly {
  readonly name: string;
  readonly script: PeerScript;
  readonly stages: readonly string[];
}[] = [
  // The connection may be gone before it was seen to be there.
  {
    name: 'connect',
    script: { on: { connect: { reset: true } } },
    stages: ['greeting', 'connect'],
  },
  { name: 'ehlo', script: { on: { EHLO: { reset: true } } }, stages: ['ehlo'] },
  { name: 'mail', script: { on: { MAIL: { reset: true } } }, stages: ['mail'] },
  { name: 'rcpt', script: { on: { RCPT: { reset: true } } }, stages: ['rcpt'] },
  { name: 'data', script: { on: { DATA: { reset: true } } }, stages: ['data'] },
  { name: 'body', script: { on: { body: { reset: true } } }, stages: ['data', 'dot'] },
  { name: 'dot', script: { on: { dot: { reset: true } } }, stages: ['dot'] },
];
const SMALL = 'x'.repeat(1_500);
/** More than sockets take in at once, so that the reset comes before the end. */
const LARGE = `${'x'.repeat(70)}\n`.repeat(60_000);
const LARGE_MAX = 20;

const resets: Row = {
  name: 'resets',
  number: 7,
  title: 'RST at each phase',
  async run(torture) {
    const each = torture.short ? 30 : 500;
    const { machine, tally, dns } = await startDirect(torture, {
      tally: { hosts: ['127.0.0.1'] },
      zones: zoneOf(HEALTHY, '127.0.0.1'),
      settings: { MAILSTEAD_RETRY_SCHEDULE: '1h' },
    });
    const to = (number: number): string => `h${number}@${HEALTHY}`;
    await latencies(machine, { tally, emails: 20, to });
    const before = machine.weight();
    for (const [index, { name, script }] of PHASES.entries()) {
      const host = `127.0.21.${index + 1}`;
      const peer = await startRawPeer(script, { host, port: tally.port });
      torture.undo.add(() => peer.stop());
      Object.assign(dns.zones, zoneOf(`${name}.test`, host));
    }
    const load = machine.load({
      connections: 20,
      max: each * PHASES.length,
      email(number) {
        const { name } = PHASES[number % PHASES.length]!;
        const isLarge = name === 'body' && number < LARGE_MAX * PHASES.length;
        const domain = name === 'body' && !isLarge ? 'mail' : name;
        return { ...simpleEmail(number, `${domain}.test`), text: isLarge ? LARGE : SMALL };
      },
    });
    const healthy = await latencies(machine, { tally, emails: torture.short ? 20 : 100, to });
    await untilSo('all are handed in', 300_000, () =>
      load.sent.accepted.size === each * PHASES.length ? true : null,
    );
    await load.stop();
    // A lane whose handshakes fail is closed for a while: what waits behind it has not been tried.
    await untilSo('each host has been tried', 120_000, async () => {
      const [row] = await machine.query<{ count: string }>(
        'select count(distinct d.lane) from delivery d where d.attempts > 0',
      );
      return Number(row?.count) > PHASES.length ? true : null;
    });
    await sleep(5_000);
    const told = await machine.query<{
      lane: string;
      stage: string;
      outcome: string;
      count: string;
    }>(
      `select d.lane, a.stage, a.outcome, count(*) from attempt a
       join delivery d on d.tenant_id = a.tenant_id and d.email_id = a.email_id and d.position = a.position
       where a.outcome is not null group by 1, 2, 3 order by 1, 2, 3`,
    );
    for (const { name, stages } of PHASES) {
      const rows = told.filter(({ lane }) => lane === `mx:${name}.test`);
      const right = rows.filter((row) => stages.includes(row.stage));
      const outcomes = new Set(rows.map(({ outcome }) => outcome));
      torture.report.promise(
        rows.length > 0 && right.length === rows.length,
        `a reset at ${name} was told as ${rows.map((row) => row.stage).join(', ') || 'nothing'}`,
      );
      const wanted = name === 'dot' ? 'unknown' : 'deferred';
      torture.report.promise(
        outcomes.size === 1 && outcomes.has(wanted),
        `a reset at ${name} came to ${[...outcomes].join(', ')}`,
      );
    }
    torture.report.did(
      `${each} emails to each of ${PHASES.length} hosts that reset (${PHASES.map(({ name }) => name).join(', ')})`,
    );
    torture.report.counted(
      `${told.reduce((sum, { count }) => sum + Number(count), 0)} attempts, each told by its phase; p95 of other mail meanwhile ${Math.round(percentile(healthy, 0.95))} ms`,
    );
    await promiseBase(torture, { machine, before });
  },
};

async function promiseBase(
  torture: Torture,
  {
    machine,
    before,
  }: { readonly machine: Machine; readonly before: ReturnType<Machine['weight']> },
): Promise<void> {
  const isBack = ({ sockets, rssMb }: ReturnType<Machine['weight']>): boolean =>
    sockets <= before.sockets + SOCKETS_MORE_MAX && rssMb <= before.rssMb + RSS_MORE_MAX_MB;
  await untilSo('sockets and memory are back', BASE_MAX_MS, () =>
    isBack(machine.weight()) ? true : null,
  ).catch(() => undefined);
  const after = machine.weight();
  torture.report.counted(
    `sockets ${before.sockets} before, ${after.sockets} after; memory ${before.rssMb} MB before, ${after.rssMb} MB after`,
  );
  torture.report.promise(isBack(after), 'sockets or memory did not come back');
}

const CAP = 5;
/** Plain steps of one up and one down defer half of the mail of such a peer, steps of 1/N a sixth (mta notes, Postfix). */
const DEFERRED_MAX = 0.25;

const storm: Row = {
  name: 'storm',
  number: 8,
  title: `421 storm: a peer that takes ${CAP} connections`,
  async run(torture) {
    const emails = torture.short ? 300 : 2_000;
    const { machine, tally } = await startDirect(torture, {
      tally: { connectionsMax: CAP, beforeDot: () => sleep(50) },
      zones: zoneOf('capped.test', '127.0.0.1'),
      settings: { MAILSTEAD_RETRY_SCHEDULE: '2s' },
    });
    const load = machine.load({
      connections: 20,
      max: emails,
      email: (number) => simpleEmail(number, 'capped.test'),
    });
    await untilSo('all are handed in', 120_000, () =>
      load.sent.accepted.size === emails ? true : null,
    );
    const { accepted } = await load.stop();
    await machine.drained(600_000);
    const ledger = await readLedger(machine, { tally, accepted });
    promiseBalance(torture.report, ledger);
    const [row] = await machine.query<{ all: string; deferred: string; most: string }>(
      `select count(*) as all, count(*) filter (where outcome = 'deferred') as deferred,
         max(number) as most from attempt`,
    );
    const rate = Number(row?.deferred) / Number(row?.all);
    torture.report.did(
      `${emails} emails to one host that tells connection ${CAP + 1} 421 and takes 50 ms for a message`,
    );
    torture.report.counted(
      `deferral rate ${(rate * 100).toFixed(1)} % (${row?.deferred} of ${row?.all} attempts); ${tally.turnedAway()} connections turned away; at most ${row?.most} attempts for one; ${describeLedger(ledger)}`,
    );
    torture.report.promise(rate <= DEFERRED_MAX, `more than ${DEFERRED_MAX * 100} % were deferred`);
    torture.report.promise(ledger.byState['delivered'] === emails, 'not all arrived');
  },
};

export const peerRows: readonly Row[] = [slowPeers, resets, storm];
