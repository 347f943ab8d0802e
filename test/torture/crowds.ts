// Rows 9 and 13: many others. Ten destinations of a thousand are dead or half dead; one tenant has a million emails
// waiting. Everybody else's mail goes on.
import { newId } from '../../src/store/id.ts';
import type { DnsRecords } from '../support/dns.ts';
import { startRawPeer } from '../support/raw-peer.ts';
import { latencies, startDirect } from './peers.ts';
import { percentile, untilSo, type Row, type Torture } from './row.ts';
import { firstTenantId, seed } from './seed.ts';

const DOMAINS = 1_000;
const HOSTS = 200;
const UNDER = 'crowd.test';
const addresses = Array.from(
  { length: HOSTS },
  (_, index) => `127.0.${30 + (index >> 7)}.${(index & 127) + 1}`,
);
const SILENT = '127.0.40.1';
const CLOSED = '127.0.40.2';

/** Every domain has hosts of its own name, so each is a site of its own; `dead`: the first ten are not well. */
function crowd(dead: boolean): {
  readonly zones: Record<string, DnsRecords>;
  readonly lost: ReadonlySet<number>;
} {
  const lost = new Set<number>();
  const zones: Record<string, DnsRecords> = {};
  for (let number = 0; number < DOMAINS; number++) {
    const name = `d${number}.${UNDER}`;
    const good = addresses[number % HOSTS]!;
    zones[name] = { MX: [`10 mx.${name}`] };
    zones[`mx.${name}`] = { A: [good] };
    if (!dead || number >= 10) continue;
    if (number < 8) lost.add(number);
    if (number < 3) zones[`mx.${name}`] = { A: [CLOSED] };
    else if (number < 6) zones[`mx.${name}`] = { A: [SILENT] };
    else if (number < 8) zones[name] = { MX: 'SERVFAIL' };
    else {
      // One of two is dead: its mail arrives all the same.
      zones[name] = { MX: [`10 dead.${name}`, `20 mx.${name}`] };
      zones[`dead.${name}`] = { A: [CLOSED] };
    }
  }
  return { zones, lost };
}

interface Run {
  /** Of mail for destinations that are well, or have one host that is. */
  readonly perSecond: number;
  readonly rest: Record<string, number>;
}

async function runCrowd(torture: Torture, dead: boolean): Promise<Run> {
  const emails = torture.short ? 2_000 : 20_000;
  const { zones, lost } = crowd(dead);
  const { machine, tally } = await startDirect(torture, {
    tally: { hosts: addresses },
    zones,
    settings: { MAILSTEAD_RETRY_SCHEDULE: '1h' },
  });
  const silent = await startRawPeer(
    { on: { connect: { hang: true } } },
    { host: SILENT, port: tally.port },
  );
  torture.undo.add(() => silent.stop());
  const wanted = emails - (emails / DOMAINS) * lost.size;
  const tenantId = await firstTenantId(machine);
  const startedAt = performance.now();
  await seed(machine, { tenantId, count: emails, domains: DOMAINS, under: UNDER });
  await untilSo(`all ${wanted} of the others arrive`, 600_000, () =>
    tally.counts.size >= wanted ? true : null,
  );
  const perSecond = (wanted * 1_000) / (performance.now() - startedAt);
  const taken = [...tally.counts.values()];
  torture.report.promise(
    tally.counts.size === wanted,
    `${tally.counts.size} arrived, not ${wanted}`,
  );
  torture.report.promise(
    taken.every((count) => count === 1),
    'some arrived twice',
  );
  return { perSecond, rest: await machine.states() };
}

const deadDestinations: Row = {
  name: 'dead-destinations',
  number: 9,
  title: `10 dead or half-dead destinations among ${DOMAINS}`,
  async run(torture) {
    const rounds = torture.rounds ?? (torture.short ? 1 : 3);
    const well: number[] = [];
    const ill: number[] = [];
    for (let round = 0; round < rounds; round++) {
      for (const dead of [false, true]) {
        const { perSecond, rest } = await runCrowd(torture, dead);
        (dead ? ill : well).push(perSecond);
        torture.say(
          `${dead ? 'ten dead' : 'all well'}: ${Math.round(perSecond)}/s; rows ${JSON.stringify(rest)}`,
        );
      }
    }
    const [best, worst] = [Math.max(...well), Math.max(...ill)];
    torture.report.did(
      `${rounds} rounds each of ${torture.short ? '2,000' : '20,000'} emails, all well and with 10 ill: 3 closed, 3 silent, 2 SERVFAIL, 2 with one dead host of two`,
    );
    torture.report.counted(
      `best rate of the others ${Math.round(best)}/s with all well, ${Math.round(worst)}/s with ten ill: ratio ${(worst / best).toFixed(2)}`,
    );
  },
};

const NOISE_DOMAINS = 1_000;

const noisyTenant: Row = {
  name: 'noisy-tenant',
  number: 13,
  title: 'a tenant with 1,000,000 emails waiting',
  async run(torture) {
    const rows = torture.short ? 30_000 : 1_000_000;
    const emails = torture.short ? 30 : 200;
    const { zones } = crowd(false);
    const { machine, tally } = await startDirect(torture, {
      tally: { hosts: [...addresses, '127.0.41.1'] },
      zones: {
        ...zones,
        'quiet.test': { MX: ['10 mx.quiet.test'] },
        'mx.quiet.test': { A: ['127.0.41.1'] },
      },
    });
    const to = (number: number): string => `q${number}@quiet.test`;
    await latencies(machine, { tally, emails: 10, to }); // warm
    const idle = await latencies(machine, { tally, emails, to });
    const tenantId = newId();
    await machine.query('insert into tenant (id, name) values ($1, $2)', [tenantId, 'noisy']);
    const startedAt = performance.now();
    await seed(machine, { tenantId, count: rows, domains: NOISE_DOMAINS, under: UNDER });
    torture.say(`${rows} rows seeded in ${Math.round((performance.now() - startedAt) / 1_000)} s`);
    const before = tally.accepted();
    const beganAt = performance.now();
    const busy = await latencies(machine, { tally, emails, to });
    const noisePerSecond =
      ((tally.accepted() - before - emails) * 1_000) / (performance.now() - beganAt);
    const [left] = await machine.query<{ count: string }>(
      `select count(*) from delivery where state = 'ready' and tenant_id = $1`,
      [tenantId],
    );
    const [wait] = await machine.query<{ ms: string }>(
      `select percentile_cont(0.5) within group (order by 1000 * extract(epoch from a.started_at - e.created_at)) as ms
       from attempt a join email e on e.tenant_id = a.tenant_id and e.id = a.email_id
       where a.number = 1 and e.tenant_id <> $1
         and e.created_at > (select min(created_at) from email where tenant_id = $1)`,
      [tenantId],
    );
    const [idleP95, busyP95] = [percentile(idle, 0.95), percentile(busy, 0.95)];
    torture.report.did(
      `${rows} emails of one tenant to ${NOISE_DOMAINS} domains, being delivered; another tenant sends ${emails}`,
    );
    torture.report.counted(
      `accepted to delivered, the other tenant: median ${Math.round(percentile(idle, 0.5))} ms, p95 ${Math.round(idleP95)} ms idle; median ${Math.round(percentile(busy, 0.5))} ms, p95 ${Math.round(busyP95)} ms beside it (ratio ${(busyP95 / idleP95).toFixed(2)}; of the median ${Math.round(Number(wait?.ms))} ms until it was claimed); ${Math.round(noisePerSecond)}/s of the noise went out meanwhile, ${left?.count} still waited`,
    );
    torture.report.promise(Number(left?.count) > 0, 'the noise was over before the measurement');
    torture.report.promise(
      busyP95 < 2 * idleP95,
      `p95 is ${(busyP95 / idleP95).toFixed(2)} times that of idle`,
    );
  },
};

export const loadRows: readonly Row[] = [deadDestinations, noisyTenant];
