// Received mail and its forwards as rows, for tests of what comes back from them.
import { mintLoopToken } from '../../src/mail/loop-token.ts';
import { enqueue } from '../../src/queue/enqueue.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import type { Authentication } from '../../src/store/received-email.ts';
import { newEmail, silent, type Bench } from './queue.ts';

export const HOSTNAME = 'mail.host.test';
export const SRS_KEY = Buffer.alloc(32, 1);
export const LOOP_KEY = Buffer.alloc(32, 2);
export const TARGET = 'support@route.test';

export const authentication = (about: {
  spf?: Authentication['spf']['result'];
  spfDomain?: string;
  dmarc?: Authentication['dmarc']['result'];
}): Authentication => ({
  spf: { result: about.spf ?? 'pass', domain: about.spfDomain ?? 'author.test', reason: null },
  dkim: [],
  dmarc: {
    result: about.dmarc ?? 'none',
    domain: 'author.test',
    policy: null,
    aligned: { spf: false, dkim: about.dmarc === 'pass' },
    reason: null,
  },
  arc: { result: 'none', sealer: null, instances: 0 },
  verdict: 'accepted',
});

const TRACE = 'Return-Path: <ann@author.test>\r\nReceived: from a\r\n\tby mail.host.test; now\r\n';
export const ORIGINAL = [
  'From: Ann <ann@author.test>',
  'To: support@route.test',
  'Subject: Hello',
  'Message-ID: <one@author.test>',
  '',
  'A body.',
  '',
].join('\r\n');

/** What every part needs that looks after forwards. */
export const forwardParts = (q: Bench) => ({
  store: q.store,
  log: silent,
  blobs: openDiskBlobs('/nowhere'),
  now: () => new Date(),
  laneOf: (domain: string) => `mx:${domain}@forward`,
  lifetimeMs: 86_400_000,
  hostname: HOSTNAME,
});

/** A tenant's domain; its DNS is right for sending. */
export async function addDomain(q: Bench, name = 'route.test'): Promise<string> {
  const id = newId();
  await q.store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, region, return_path_label, sending,
       receiving, sending_verified, receiving_verified, record_checks, check_count, created_at, open_tracking,
       click_tracking, tls)
     values ($1, $2, $3, 'verified', 'us-east-1', 'send', true, true, true, true, '{}', 0, now(), false, false,
       'opportunistic')`,
    [q.tenantId, id, name],
  );
  return id;
}

export async function addRule(
  q: Bench,
  domainId: string,
): Promise<{ id: string; routeId: string }> {
  const [id, routeId] = [newId(), newId()];
  await q.store.pool.query(
    `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
       destinations, status, created_at, updated_at)
     values ($1, $2, $3, 'route.test', $4, $5, '["far@dest.test"]', 'active', now(), now())`,
    [q.tenantId, id, domainId, routeId, TARGET],
  );
  return { id, routeId };
}

export interface NewReceived {
  readonly mailFrom?: string;
  readonly authentication?: Authentication | null;
  readonly original?: string;
  readonly routeId?: string | null;
  readonly ruleId?: string | null;
  readonly createdAt?: Date;
}

/** A received email; its id. */
export async function addReceived(q: Bench, about: NewReceived = {}): Promise<string> {
  const id = newId();
  const decision = {
    recipient: 'support+x@route.test',
    status: 'exact',
    route_id: about.routeId ?? null,
    route_type: 'exact',
    local_part: 'support',
    domain_id: newId(),
    target_address: TARGET,
    forwarding_rule_id: about.ruleId ?? null,
  };
  const proof = about.authentication === undefined ? authentication({}) : about.authentication;
  await q.store.pool.query(
    `insert into received_email (tenant_id, id, created_at, mail_from, received_for, route_decisions,
       from_shown, to_shown, cc_shown, bcc_shown, reply_to_shown, subject, message_id, attachments,
       authentication)
     values ($1, $2, $3, $4, '["support+x@route.test"]', $5, 'Ann <ann@author.test>', '[]', '[]', '[]', '[]',
       'Hello', null, '[]', $6)`,
    [
      q.tenantId,
      id,
      about.createdAt ?? new Date(),
      about.mailFrom ?? 'ann@author.test',
      JSON.stringify([decision]),
      proof === null ? null : JSON.stringify(proof),
    ],
  );
  const raw = Buffer.from(TRACE + (about.original ?? ORIGINAL));
  await q.store.pool.query(
    `insert into received_content (tenant_id, email_id, raw, raw_size_bytes, trace_size_bytes)
     values ($1, $2, $3, $4, $5)`,
    [q.tenantId, id, raw, raw.length, TRACE.length],
  );
  return id;
}

/** What a destination is in: its state, and what was said. */
export interface Destination {
  readonly recipient: string;
  readonly state: string;
  readonly cause?: string;
  readonly reply?: string;
}

export interface Forwarded {
  readonly attemptId: string;
  readonly emailId: string;
  /** Of X-Mailstead-Loop. */
  readonly token: string;
}

/** A forward whose author is to hear of a failure. */
export async function addForward(
  q: Bench,
  about: {
    readonly receivedId: string;
    readonly ruleId: string;
    readonly destinations: readonly Destination[];
    readonly envelopeFrom?: string | null;
    readonly method?: 'relayed' | 'rebuilt';
    readonly signingDomainId?: string;
  },
): Promise<Forwarded> {
  const { destinations } = about;
  const email = newEmail({
    tenantId: q.tenantId,
    deliveries: destinations.map(({ recipient }) => ({ recipient, lane: 'mx:dest.test@forward' })),
    envelopeFrom: about.envelopeFrom ?? null,
    mayGoUnsigned: true,
    signingTenantId: q.tenantId,
    signingDomainId: about.signingDomainId ?? null,
  });
  const attemptId = newId();
  await enqueue(q.store.pool, [email]);
  await setStates(q, email.id, destinations);
  await q.store.pool.query(
    `insert into forwarding_attempt (tenant_id, id, received_email_id, rule_id, recipient, destinations,
       status, explanation, method, email_id, is_report_open, created_at)
     values ($1, $2, $3, $4, 'support+x@route.test', $5, 'queued', 'x', $6, $7, true, now())`,
    [
      q.tenantId,
      attemptId,
      about.receivedId,
      about.ruleId,
      JSON.stringify(destinations.map(({ recipient }) => recipient)),
      about.method ?? 'relayed',
      email.id,
    ],
  );
  const token = mintLoopToken({ emailId: email.id, target: TARGET, keys: [LOOP_KEY] });
  return { attemptId, emailId: email.id, token };
}

export async function setStates(
  q: Bench,
  emailId: string,
  destinations: readonly Destination[],
): Promise<void> {
  for (const [position, { state, cause, reply }] of destinations.entries()) {
    await q.store.pool.query(
      `update delivery set state = $3, last_cause = $4, last_reply = $5, attempts = 1
       where email_id = $1 and position = $2`,
      [emailId, position, state, cause ?? null, reply ?? null],
    );
  }
}

/** What was enqueued with the null sender, oldest first. */
export async function nullSenderMail(q: Bench): Promise<
  readonly {
    id: string;
    recipient: string;
    raw: string;
    via: string;
    about: string | null;
    signing: string | null;
    mayGoUnsigned: boolean;
    lane: string;
  }[]
> {
  const { rows } = await q.store.pool.query<{
    id: string;
    recipient: string;
    raw: Buffer;
    via: string;
    about: string | null;
    signing: string | null;
    may: boolean;
    lane: string;
  }>(
    `select c.email_id as id, d.recipient, d.lane, c.raw, t.detail ->> 'via' as via,
       t.detail ->> 'about_email_id' as about, c.signing_domain_id as signing, c.may_go_unsigned as may
     from email_content c
     join delivery d on d.tenant_id = c.tenant_id and d.email_id = c.email_id
     join timeline t on t.tenant_id = c.tenant_id and t.email_id = c.email_id and t.kind = 'accepted'
     where c.envelope_from = '' order by c.email_id`,
  );
  return rows.map(({ may, raw, ...row }) => ({
    ...row,
    raw: raw.toString('utf8'),
    mayGoUnsigned: may,
  }));
}

/** Everything of the mail of earlier tests; tenants, domains and rules stay. */
export async function forgetMail(q: Bench): Promise<void> {
  await q.store.pool.query(
    `truncate email, email_content, delivery, attempt, timeline, received_email, received_content,
       forwarding_task, forwarding_attempt, receiving_replay, forward_return, suppression`,
  );
}
