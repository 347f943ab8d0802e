// Row 25: ten thousand events for an endpoint that fails three times in ten, a dead and a hanging one beside three that
// work. Every event arrives, acknowledged once under its one id; who works waits for nobody.
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { Webhook } from 'standardwebhooks';
import { RETRY_DELAYS_MS } from '../../src/webhooks/calls.ts';
import { PLACES_MAX } from '../../src/webhooks/turns.ts';
import { freePort } from '../support/program.ts';
import { startMachine } from './machine.ts';
import { sleep, untilSo, type Row, type Torture } from './row.ts';
import { firstTenantId } from './seed.ts';

const FAILS = 0.3;
const GOOD_MAX_MS = 180_000;
const ALL_MAX_MS = 300_000;
const TYPE = 'contact.created';

interface Endpoint {
  readonly url: string;
  /** Acknowledgements by id. */
  readonly acknowledged: Map<string, number>;
  readonly counts: { calls: number; forged: number; open: number; most: number };
  secret: string;
}

/** `answer`: a status; null: never. */
async function startEndpoint(
  torture: Torture,
  answer: (id: string) => number | null,
): Promise<Endpoint> {
  const counts = { calls: 0, forged: 0, open: 0, most: 0 };
  const acknowledged = new Map<string, number>();
  const server = createServer((request, response) => {
    counts.open += 1;
    counts.most = Math.max(counts.most, counts.open);
    response.on('close', () => (counts.open -= 1));
    const parts: Buffer[] = [];
    request.on('data', (part: Buffer) => parts.push(part));
    request.on('end', () => {
      counts.calls += 1;
      const headers = request.headers as Record<string, string>;
      try {
        new Webhook(endpoint.secret).verify(Buffer.concat(parts).toString(), headers);
      } catch {
        counts.forged += 1;
      }
      const id = headers['webhook-id'] ?? '';
      const status = answer(id);
      if (status === null) return;
      if (status < 300) acknowledged.set(id, (acknowledged.get(id) ?? 0) + 1);
      response.writeHead(status).end();
    });
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  torture.undo.add(async () => {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  });
  const { port } = server.address() as AddressInfo;
  const url = `http://127.0.0.1:${port}/hook`;
  const endpoint: Endpoint = { url, acknowledged, counts, secret: '' };
  return endpoint;
}

export const webhookStorm: Row = {
  name: 'webhooks',
  number: 25,
  title: 'webhook endpoints that fail, hang and are dead, beside good ones',
  async run(torture) {
    const { promise } = torture.report;
    const count = torture.short ? 1_000 : 10_000;
    const machine = await startMachine(torture, {});
    const failures = new Map<string, number>();
    const flaky = await startEndpoint(torture, (id) => {
      const failed = failures.get(id) ?? 0;
      // The schedule has one try more.
      if (failed === RETRY_DELAYS_MS.length || Math.random() >= FAILS) return 200;
      failures.set(id, failed + 1);
      return 500;
    });
    const hanging = await startEndpoint(torture, () => null);
    const good = [
      await startEndpoint(torture, () => 200),
      await startEndpoint(torture, () => 200),
      await startEndpoint(torture, () => 200),
    ];
    const subscribe = async (endpoint: string): Promise<{ id: string; secret: string }> => {
      const { body } = await machine.program.call('POST', '/webhooks', {
        endpoint,
        events: [TYPE],
      });
      return { id: String(body['id']), secret: String(body['signing_secret']) };
    };
    const dead = await subscribe(`http://127.0.0.1:${await freePort()}/`);
    const ids = new Map<Endpoint, string>();
    for (const endpoint of [hanging, flaky, ...good]) {
      const made = await subscribe(endpoint.url);
      endpoint.secret = made.secret;
      ids.set(endpoint, made.id);
    }
    const tenantId = await firstTenantId(machine);
    const startedAt = performance.now();
    const happened = await machine.query<{ id: string }>(
      `insert into outbox (tenant_id, id, type, subject_id, detail, at)
        select $1, uuidv7(), $2, uuidv7(), jsonb_build_object('email', 'c' || n || '@recipient.test'),
          now() from generate_series(1, $3::int) as n returning id`,
      [tenantId, TYPE, count],
    );
    const wanted = new Set(happened.map(({ id }) => `msg_${id.replaceAll('-', '')}`));
    const secondsSince = (): number => Math.round((performance.now() - startedAt) / 100) / 10;
    const hasAll = ({ acknowledged }: Endpoint): boolean => acknowledged.size >= count;
    // Whatever waits for its next try is due: so the day of the schedule passes in a minute.
    let isOver = false;
    const hurrying = (async () => {
      while (!isOver) {
        await machine.query(
          `update webhook_event set next_attempt_at = now()
            where webhook_id = $1 and status = 'pending' and next_attempt_at > now()`,
          [ids.get(flaky)],
        );
        await sleep(500);
      }
    })();
    torture.undo.add(async () => {
      isOver = true;
      await hurrying.catch(() => undefined);
    });
    await untilSo('all at the good ones', GOOD_MAX_MS, () => (good.every(hasAll) ? true : null));
    const goodS = secondsSince();
    await untilSo('all at the failing one', ALL_MAX_MS, () => (hasAll(flaky) ? true : null));
    const flakyS = secondsSince();
    isOver = true;
    await hurrying;
    const states = await untilSo('all is stored', 60_000, async () => {
      const rows = await machine.query<{ webhook_id: string; status: string; count: number }>(
        `select webhook_id, status, count(*)::int as count from webhook_event
          group by webhook_id, status`,
      );
      const isStored = [flaky, ...good].every((one) =>
        rows.some((row) => row.webhook_id === ids.get(one) && row.count === count),
      );
      return isStored ? rows : null;
    });
    const [calls] = await machine.query<{ dead: number; hung: number }>(
      `select count(*) filter (where webhook_id = $1)::int as dead,
        count(*) filter (where webhook_id = $2)::int as hung from webhook_attempt`,
      [dead.id, ids.get(hanging)],
    );
    const twice = [flaky, ...good].map(
      ({ acknowledged }) => [...acknowledged.values()].filter((times) => times > 1).length,
    );
    torture.report.did(
      `${count} events to six endpoints: one fails ${FAILS * 100} %, one is dead, one hangs`,
    );
    torture.report.counted(
      `the good ones had everything after ${goodS} s, the failing one after ${flakyS} s and ${flaky.counts.calls} calls; ${calls?.dead} calls of the dead one, ${hanging.counts.calls} of the hanging one, at most ${hanging.counts.most} at a time`,
    );
    for (const one of [flaky, ...good]) {
      const strange = [...one.acknowledged.keys()].filter((id) => !wanted.has(id)).length;
      const { size } = one.acknowledged;
      promise(size === count && strange === 0, `${size} ids, ${strange} of them unknown`);
      promise(one.counts.most <= PLACES_MAX, `${one.counts.most} calls at a time`);
    }
    promise(
      twice.every((times) => times === 0),
      `acknowledged more than once: ${twice.join(', ')}`,
    );
    const forged = [hanging, flaky, ...good].reduce((sum, one) => sum + one.counts.forged, 0);
    promise(forged === 0, `${forged} calls with a wrong signature`);
    promise(goodS * 1_000 < GOOD_MAX_MS, `the good ones waited ${goodS} s`);
    promise((calls?.dead ?? 0) < 100, `the dead one was called ${calls?.dead} times`);
    promise(hanging.counts.most <= PLACES_MAX, `${hanging.counts.most} calls hang at a time`);
    const left = states.filter(({ status }) => status === 'success').length;
    promise(left === 4, `${left} endpoints have it all acknowledged in the rows`);
  },
};
