// Webhooks for tests: endpoints on loopback that answer as they are told and keep every call, endpoints in the database,
// things that happen, and what tells the one of the other under a clock that the test moves.
import { once } from 'node:events';
import { createServer, type IncomingHttpHeaders, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import type { Logger } from '../../src/log.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { deriveKey } from '../../src/store/seal.ts';
import { startCalls, type CallsOptions } from '../../src/webhooks/calls.ts';
import type { EndpointRules } from '../../src/webhooks/endpoint.ts';
import { createWebhookVerbs, type WebhookVerbs } from '../../src/webhooks/endpoints.ts';
import { createFanOut } from '../../src/webhooks/fan-out.ts';

export interface ReceivedCall {
  readonly id: string;
  readonly path: string;
  readonly headers: IncomingHttpHeaders;
  readonly body: string;
  /** What it was answered with. */
  readonly status: number;
}

export interface Receiver {
  readonly url: string;
  readonly port: number;
  readonly calls: ReceivedCall[];
  /** How many calls were open at the same time, at most. */
  readonly most: () => number;
  stop(): Promise<void>;
}

/** A status, or what to do with the answer; nothing: it is never answered. */
export type Reply = number | ((response: ServerResponse) => void) | null;

export async function startReceiver(
  reply: (call: { readonly id: string; readonly number: number }) => Reply = () => 200,
  host = '127.0.0.1',
): Promise<Receiver> {
  const calls: ReceivedCall[] = [];
  let [open, most, number] = [0, 0, 0];
  const server = createServer((request, response) => {
    open += 1;
    most = Math.max(most, open);
    response.on('close', () => (open -= 1));
    const parts: Buffer[] = [];
    request.on('data', (part: Buffer) => parts.push(part));
    request.on('end', () => {
      const id = String(request.headers['webhook-id']);
      const answer = reply({ id, number: (number += 1) });
      calls.push({
        id,
        path: request.url ?? '',
        headers: request.headers,
        body: Buffer.concat(parts).toString(),
        status: typeof answer === 'number' ? answer : 0,
      });
      if (typeof answer === 'number') response.writeHead(answer).end(`answer ${answer}`);
      else answer?.(response);
    });
  });
  server.listen(0, host);
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  return {
    url: `http://${host}:${port}/hook`,
    port,
    calls,
    most: () => most,
    async stop() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

const key = deriveKey('a secret of tests', 'webhook secrets at rest');

export interface Teller {
  readonly verbs: WebhookVerbs;
  /** The time that everything goes by. */
  now(): Date;
  advance(ms: number): void;
  /** Something happened, so many times; the ids as they are shown. */
  happen(tenantId: string, count: number, about?: Partial<Happening>): Promise<readonly string[]>;
  /** Makes events of all that happened, and has them called. */
  tell(): Promise<void>;
  nudge(): void;
  stop(): Promise<void>;
}

export interface Happening {
  readonly type: string;
  readonly subjectId: string;
  readonly detail: Readonly<Record<string, unknown>>;
}

export interface TellerOptions {
  readonly store: Store;
  readonly log: Logger;
  /** Of the DNS; default: the system's. */
  readonly servers?: readonly string[];
  /** Default: loopback. */
  readonly allow?: readonly string[];
  readonly isDevelopment?: boolean;
  readonly callMaxMs?: number;
  readonly random?: CallsOptions['random'];
}

export function startTeller(d: TellerOptions): Teller {
  const { store } = d;
  let ahead = 0;
  const now = (): Date => new Date(Date.now() + ahead);
  const resolver = createResolver({ servers: d.servers ?? null, keepsAnswers: false });
  const rules: EndpointRules = {
    web: {
      resolver,
      guard: createAddressGuard({ allow: d.allow ?? ['127.0.0.0/8'] }),
      what: 'the endpoint',
    },
    isDevelopment: d.isDevelopment ?? true,
  };
  const calls = startCalls({
    ...rules,
    store,
    log: d.log,
    key,
    now,
    random: d.random ?? Math.random,
    lookMs: 20,
    ...(d.callMaxMs === undefined ? {} : { callMaxMs: d.callMaxMs }),
  });
  const fanOut = createFanOut({ store, log: d.log, now });
  return {
    verbs: createWebhookVerbs({ ...rules, store, key, now, onDue: () => calls.nudge() }),
    now,
    advance(ms) {
      ahead += ms;
    },
    async happen(tenantId, count, about = {}) {
      const ids = Array.from({ length: count }, () => newId());
      await store.pool.query(
        `insert into outbox (tenant_id, id, type, subject_id, detail, at)
          select $1, id, $3, $4, $5, $6 from unnest($2::uuid[]) as i (id)`,
        [
          tenantId,
          ids,
          about.type ?? 'contact.created',
          about.subjectId ?? newId(),
          JSON.stringify(about.detail ?? { email: 'a@recipient.test' }),
          now(),
        ],
      );
      return ids.map((id) => `msg_${id.replaceAll('-', '')}`);
    },
    async tell() {
      for (;;) {
        const { hasMore, endpoints } = await fanOut.turn();
        calls.tell(endpoints);
        if (!hasMore) return;
      }
    },
    nudge: () => calls.nudge(),
    async stop() {
      await calls.stop();
      resolver.close();
    },
  };
}

/** Of one endpoint, by status. */
export async function countEvents(
  store: Store,
  webhookId: string,
): Promise<Readonly<Record<string, number>>> {
  const { rows } = await store.pool.query<{ status: string; count: number }>(
    `select status, count(*)::int as count from webhook_event where webhook_id = $1 group by status`,
    [webhookId],
  );
  return Object.fromEntries(rows.map(({ status, count }) => [status, count]));
}
