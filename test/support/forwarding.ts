// Forwards on a real database, with received messages that are stored as the listener stores them: a domain with keys, a
// route, a rule, and the parts of a forwarder.
import { randomUUID } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import * as assert from 'uvu/assert';
import { laneFor } from '../../src/delivery/next-hop.ts';
import { createDomain, generateDkimKeys, type DkimKeys } from '../../src/domains/create.ts';
import { createDomainLookup, type DomainLookup } from '../../src/domains/lookup.ts';
import { readHeaderOnly } from '../../src/mail/parse.ts';
import { startForwarder, type ForwarderDependencies } from '../../src/receiving/forwarder.ts';
import { receive } from '../../src/receiving/receive.ts';
import { createCopyWriter } from '../../src/receiving/store-copies.ts';
import { FORWARD_POOL } from '../../src/sending/forward.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import type { Authentication } from '../../src/store/received-email.ts';
import { until } from './app.ts';
import { arrivalOf, receiver } from './arrival.ts';
import { openQueue, silent } from './queue.ts';

export const HOST = 'mail.host.test';
export const SRS_KEYS = [Buffer.alloc(32, 1)];
export const LOOP_KEYS = [Buffer.alloc(32, 2)];
const SEALING_KEY = Buffer.alloc(32, 7);

export interface Attempt {
  readonly id: string;
  readonly status: string;
  readonly reason: string | null;
  readonly explanation: string;
  readonly method: string | null;
  readonly email_id: string | null;
  readonly is_report_open: boolean;
  readonly destinations: readonly string[];
}

export interface Outbound {
  readonly raw: Buffer;
  readonly envelope_from: string | null;
  readonly may_go_unsigned: boolean;
  readonly needs_smtp_utf8: boolean;
  readonly message_id: string;
  readonly from_given: string;
  readonly from_domain: string;
  readonly to_given: readonly string[];
  readonly reply_to_given: readonly string[] | null;
  readonly subject: string;
  readonly lanes: readonly string[];
  readonly states: readonly string[];
  readonly accepted: Readonly<Record<string, unknown>>;
}

export interface RouteOf {
  readonly domainId: string;
  readonly ruleId: string;
  readonly target: string;
}

export interface Forwarding {
  readonly store: Store;
  readonly url: string;
  readonly blobs: BlobStore;
  readonly domains: DomainLookup;
  readonly tenantId: string;
  readonly keys: DkimKeys;
  /** `info@<domain>` with a rule. */
  route(
    domain: string,
    about?: { destinations?: readonly string[]; status?: string; sending?: boolean },
  ): Promise<RouteOf>;
  /** Stores a message as received; the id of its task. */
  arrive(route: RouteOf, message: string | Buffer, about?: ArriveAbout): Promise<string>;
  dependencies(about?: Partial<ForwarderDependencies>): ForwarderDependencies;
  start(about?: Partial<ForwarderDependencies>): { nudge(): void; stop(): Promise<void> };
  attempt(taskId: string): Promise<Attempt>;
  outbound(emailId: string | null): Promise<Outbound>;
  stop(): Promise<void>;
}

export interface ArriveAbout {
  readonly mailFrom?: string;
  readonly recipient?: string;
  readonly authentication?: Authentication | null;
  /** Default: Return-Path, Authentication-Results and Received of this host. */
  readonly trace?: string;
}

/** With a forwarder that runs. */
export interface RunningForwarding extends Forwarding {
  /** Of `info@acme.test`. */
  readonly home: RouteOf;
  nudge(): void;
  /** What became of a message; default: one of its own, to `home`. */
  forward(about?: ForwardAbout): Promise<Attempt>;
  /** Of a message that must have been forwarded. */
  sent(about?: ForwardAbout): Promise<{ attempt: Attempt; email: Outbound }>;
}

export interface ForwardAbout extends ArriveAbout {
  readonly message?: string | Buffer;
  readonly route?: RouteOf;
}

export const AUTHENTICATED: Authentication = {
  spf: { result: 'pass', domain: 'author.test', reason: null },
  dkim: [{ result: 'pass', domain: 'author.test', selector: 's', aligned: true, reason: null }],
  dmarc: {
    result: 'pass',
    domain: 'author.test',
    policy: 'reject',
    aligned: { spf: true, dkim: true },
    reason: null,
  },
  arc: { result: 'none', sealer: null, instances: 0 },
  verdict: 'accepted',
};

/** Of mail that no signature came with, unless `about` has some. */
export const verdict = (about: {
  dkim?: Authentication['dkim'];
  dmarc?: Partial<Authentication['dmarc']>;
  spf?: Partial<Authentication['spf']>;
}): Authentication => ({
  ...AUTHENTICATED,
  dkim: about.dkim ?? [],
  dmarc: { ...AUTHENTICATED.dmarc, ...about.dmarc },
  spf: { ...AUTHENTICATED.spf, ...about.spf },
});

export const TRACE = [
  'Return-Path: <ada@author.test>',
  `Authentication-Results: ${HOST};`,
  '\tspf=pass smtp.mailfrom=author.test',
  'Received: from client.test ([192.0.2.1])',
  `\tby ${HOST} with ESMTPS id abc;`,
  '\tSat, 21 Nov 2026 12:00:00 +0000',
  '',
].join('\r\n');

let messages = 0;
/** Each with a Date of its own, a second later than the one before. */
export const message = (about: { headers?: readonly string[]; body?: string } = {}): string =>
  [
    'From: Ada Author <ada@author.test>',
    'To: info@acme.test',
    'Subject: Hello there',
    'Message-ID: <one@author.test>',
    `Date: ${new Date(Date.UTC(2026, 10, 21) + 1_000 * (messages += 1)).toUTCString()}`,
    ...(about.headers ?? []),
    '',
    about.body ?? 'Words.',
    '',
  ].join('\r\n');

export async function openForwarding(): Promise<Forwarding> {
  const queue = await openQueue();
  const { store, tenantId, url } = queue;
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-forward-'));
  const blobs = openDiskBlobs(folder);
  const domains = createDomainLookup(store.pool, SEALING_KEY);
  const keys = await generateDkimKeys();
  const write = createCopyWriter(store.pool);
  const dependencies: Forwarding['dependencies'] = (about = {}) => ({
    store,
    blobs,
    domains,
    log: silent,
    laneOf: laneFor('direct', () => FORWARD_POOL),
    lifetimeMs: 86_400_000,
    hostname: HOST,
    srsKeys: SRS_KEYS,
    loopKeys: LOOP_KEYS,
    now: () => new Date(),
    onReady: () => undefined,
    ...about,
  });
  return {
    store,
    url,
    blobs,
    domains,
    tenantId,
    keys,
    dependencies,
    async route(
      domain,
      { destinations = ['out@far.test'], status = 'active', sending = true } = {},
    ) {
      const domainId = await store.transact((client) =>
        createDomain(
          client,
          { tenantId, name: domain, status: 'verified', receiving: true, sending },
          { sealingKey: SEALING_KEY, keys },
        ),
      );
      const [routeId, ruleId] = [newId(), newId()];
      const target = `info@${domain}`;
      await store.pool.query(
        `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key, target_local_part,
           created_at, updated_at) values ($1, $2, $3, 'exact', 'info', 'info', 'info', now(), now())`,
        [tenantId, routeId, domainId],
      );
      await store.pool.query(
        `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
           destinations, status, invalid_reason, created_at, updated_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, now(), now())`,
        [
          tenantId,
          ruleId,
          domainId,
          domain,
          routeId,
          target,
          JSON.stringify(destinations),
          status,
          status === 'invalid' ? 'The route was deleted.' : null,
        ],
      );
      return { domainId, ruleId, target };
    },
    async arrive({ domainId, ruleId, target }, given, about = {}) {
      const trace = Buffer.from(about.trace ?? TRACE);
      const [emailId] = await receive(
        {
          store,
          blobs,
          write,
          parse: (raw) => Promise.resolve(readHeaderOnly(raw)),
          onUnread: () => undefined,
          onForwards: () => undefined,
        },
        arrivalOf({
          mailFrom: about.mailFrom ?? 'ada@author.test',
          receivers: [
            receiver(tenantId, about.recipient ?? target, {
              status: 'exact',
              route_id: randomUUID(),
              route_type: 'exact',
              local_part: 'info',
              domain_id: domainId,
              target_address: target,
              forwarding_rule_id: ruleId,
            }),
          ],
          raw: Buffer.concat([trace, Buffer.from(given)]),
          traceSizeBytes: trace.length,
          authentication: about.authentication === undefined ? AUTHENTICATED : about.authentication,
        }),
      );
      const { rows } = await store.pool.query<{ id: string }>(
        // A forwarder that is running may have ended it.
        `select id from forwarding_task where received_email_id = $1
         union select id from forwarding_attempt where received_email_id = $1`,
        [emailId],
      );
      if (rows.length !== 1) throw new Error(`${rows.length} tasks`);
      return rows[0]!.id;
    },
    start: (about) => startForwarder(dependencies(about)),
    async attempt(taskId) {
      const [row] = await until(
        async () =>
          (
            await store.pool.query<Attempt & { destinations: string }>(
              `select id, status, reason, explanation, method, email_id, is_report_open,
                 destinations::text as destinations
               from forwarding_attempt where id = $1`,
              [taskId],
            )
          ).rows,
        ({ length }) => length > 0,
      );
      return { ...row!, destinations: JSON.parse(row!.destinations) as string[] };
    },
    async outbound(emailId) {
      const { rows } = await store.pool.query<
        Omit<Outbound, 'raw' | 'to_given' | 'reply_to_given' | 'accepted'> & {
          raw: Buffer | null;
          blob_key: string | null;
          given: string;
        }
      >(
        `select c.raw, c.blob_key, c.envelope_from, c.may_go_unsigned, c.needs_smtp_utf8, e.message_id,
           e.from_given, e.from_domain, e.subject,
           json_build_object('to', e.to_given, 'reply', e.reply_to_given, 'accepted', t.detail)::text as given,
           (select array_agg(d.lane order by d.position) from delivery d where d.email_id = e.id) as lanes,
           (select array_agg(d.state order by d.position) from delivery d where d.email_id = e.id) as states
         from email e join email_content c on c.email_id = e.id
         join timeline t on t.email_id = e.id and t.kind = 'accepted' where e.id = $1`,
        [emailId],
      );
      const [row] = rows;
      if (row === undefined) throw new Error('no outbound email');
      const given = JSON.parse(row.given) as {
        to: string[];
        reply: string[] | null;
        accepted: Record<string, unknown>;
      };
      const raw = row.raw ?? (await blobs.get(row.blob_key ?? '')) ?? Buffer.alloc(0);
      return {
        ...row,
        raw,
        to_given: given.to,
        reply_to_given: given.reply,
        accepted: given.accepted,
      };
    },
    async stop() {
      await queue.stop();
      await rm(folder, { recursive: true, force: true });
    },
  };
}

export async function startForwarding(): Promise<RunningForwarding> {
  const opened = await openForwarding();
  const home = await opened.route('acme.test');
  const { nudge, stop } = opened.start();
  const forward: RunningForwarding['forward'] = async (about = {}) => {
    const task = await opened.arrive(about.route ?? home, about.message ?? message(), about);
    nudge();
    return opened.attempt(task);
  };
  return {
    ...opened,
    home,
    nudge,
    forward,
    async sent(about) {
      const attempt = await forward(about);
      assert.is(attempt.status, 'queued', attempt.explanation);
      return { attempt, email: await opened.outbound(attempt.email_id) };
    },
    async stop() {
      await stop();
      await opened.stop();
    },
  };
}
