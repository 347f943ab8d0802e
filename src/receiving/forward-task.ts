// One forward, from its task to its attempt. Everything is read and the bytes are made first; then one transaction removes
// the task, records the attempt and enqueues the outbound email, so whoever removes the task has forwarded, and
// nobody else has.
import type { PoolClient } from 'pg';
import type { DomainLookup } from '../domains/lookup.ts';
import { readForwardHeader, resultsIn, type ForwardHeader } from '../mail/forward-header.ts';
import { mintLoopToken } from '../mail/loop-token.ts';
import { mintSrs } from '../mail/srs.ts';
import { enqueue, type NewEmail } from '../queue/enqueue.ts';
import { describeForward, UnfitForward, type ForwardingDependencies } from '../sending/forward.ts';
import type { BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import type { Authentication } from '../store/received-email.ts';
import type { AttemptStatus, ForwardReason, RuleStatus } from '../store/receiving-route.ts';
import { noteAccepted } from '../telemetry/counted.ts';
import { forwards } from '../telemetry/instruments.ts';
import { isRepeated, repeatKeyOf, REPEATS_MAX } from './forward-repeats.ts';
import { decideForward, type ForwardDecision } from './forward-decision.ts';
import {
  OriginalMissing,
  readHead,
  writeForward,
  type ForwardBytes,
  type StoredOriginal,
} from './forward-message.ts';

export interface ForwardDependencies extends ForwardingDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly domains: Pick<DomainLookup, 'signer'>;
  /** This host's name: in our Received fields, and where bounces come home of a domain that does not send. */
  readonly hostname: string;
  /** The first makes, all read. */
  readonly srsKeys: readonly Buffer[];
  readonly loopKeys: readonly Buffer[];
  /** Adds the seal of a domain to a relayed message (RFC 8617); absent or null: not wanted. */
  readonly sealer?: (about: SealRequest) => Promise<Buffer | null>;
  readonly now: () => Date;
}

export interface SealRequest {
  readonly tenantId: string;
  readonly domainId: string;
  readonly authentication: Authentication;
  /** What our own Authentication-Results field says; null: there is none. */
  readonly results: string | null;
  readonly pieces: AsyncIterable<Buffer>;
}

export interface ForwardTask {
  readonly tenantId: string;
  /** Becomes the attempt's. */
  readonly id: string;
  readonly receivedEmailId: string;
  readonly ruleId: string;
  readonly recipient: string;
  readonly replayId: string | null;
  /** Begun, this one included. */
  readonly tries: number;
}

/** Loops that come back within this time make a rule invalid. */
export const LOOPS_WINDOW_MS = 3_600_000;
export const LOOPS_MAX = 5;

/** What is written of it. */
interface AttemptFacts {
  readonly status: AttemptStatus;
  readonly reason: ForwardReason | null;
  readonly explanation: string;
  readonly method: 'relayed' | 'rebuilt' | null;
  readonly isReportOpen: boolean;
  readonly destinations: readonly string[];
  /** The email of ours that it came back as. */
  readonly loopedEmailId: string | null;
  readonly repeatKey: Buffer | null;
  readonly email: NewEmail | null;
}

/** Ends the task; the email that it became, or null. Rejects when it is to be tried again. */
export async function runForward(
  d: ForwardDependencies,
  task: ForwardTask,
): Promise<NewEmail | null> {
  const found = await readTask(d.store, task);
  const facts = await attemptOf(d, task, found);
  return endTask(d, task, facts);
}

/** Ends a task that cannot be carried out. */
export async function failForward(
  d: Pick<ForwardDependencies, 'store' | 'blobs' | 'now'>,
  task: ForwardTask,
): Promise<void> {
  const { rule } = await readTask(d.store, task);
  const explanation = `A fault of this server kept the message from being forwarded, ${task.tries - 1} times in a row; it is kept.`;
  const destinations = rule?.destinations ?? [];
  await endTask(d, task, { ...failed('internal', explanation), destinations });
}

interface Rule {
  readonly status: RuleStatus;
  readonly invalidReason: string | null;
  readonly target: string;
  readonly destinations: readonly string[];
  /** Null: the domain is gone. */
  readonly domain: { readonly id: string; readonly name: string } | null;
}

interface Received extends StoredOriginal {
  readonly mailFrom: string;
  readonly authentication: Authentication | null;
}

interface Found {
  readonly rule: Rule | null;
  /** Null: it is gone. */
  readonly received: Received | null;
}

async function readTask({ pool }: Pick<Store, 'pool'>, task: ForwardTask): Promise<Found> {
  const { rows: rules } = await pool.query<{
    status: RuleStatus;
    invalid_reason: string | null;
    route_target_address: string;
    destinations: readonly string[] | string;
    domain_id: string | null;
    domain: string | null;
  }>({
    name: 'forward-rule',
    text: `select r.status, r.invalid_reason, r.route_target_address, r.destinations,
        s.id as domain_id, s.name as domain
      from forwarding_rule r
      left join sending_domain s on s.tenant_id = r.tenant_id and s.id = r.domain_id
      where r.tenant_id = $1 and r.id = $2`,
    values: [task.tenantId, task.ruleId],
  });
  const { rows: messages } = await pool.query<{
    mail_from: string;
    authentication: Authentication | string | null;
    raw: Buffer | null;
    blob_key: string | null;
    raw_size_bytes: number;
    trace_size_bytes: number;
  }>({
    name: 'forward-received',
    text: `select e.mail_from, e.authentication, c.raw, c.blob_key, c.raw_size_bytes, c.trace_size_bytes
      from received_email e
      join received_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
      where e.tenant_id = $1 and e.id = $2`,
    values: [task.tenantId, task.receivedEmailId],
  });
  const [rule] = rules;
  const [message] = messages;
  return {
    rule:
      rule === undefined
        ? null
        : {
            status: rule.status,
            invalidReason: rule.invalid_reason,
            target: rule.route_target_address,
            destinations: fromJson(rule.destinations) ?? [],
            domain:
              rule.domain_id === null || rule.domain === null
                ? null
                : { id: rule.domain_id, name: rule.domain },
          },
    received:
      message === undefined
        ? null
        : {
            mailFrom: message.mail_from,
            authentication: fromJson(message.authentication),
            raw: message.raw,
            blobKey: message.blob_key,
            rawSizeBytes: message.raw_size_bytes,
            traceSizeBytes: message.trace_size_bytes,
          },
  };
}

async function attemptOf(
  d: ForwardDependencies,
  task: ForwardTask,
  { rule, received }: Found,
): Promise<AttemptFacts> {
  const destinations = rule?.destinations ?? [];
  const head = received === null ? null : await readHead(d.blobs, received);
  if (received === null || head === null) {
    const explanation = 'The received message is not stored any more, so it cannot be forwarded.';
    return { ...failed('message_missing', explanation), destinations };
  }
  const header = readForwardHeader(head, {
    hostname: d.hostname,
    traceSizeBytes: received.traceSizeBytes,
  });
  const decision = decideForward({
    ...task,
    ...received,
    rule,
    header,
    ownNames: [d.hostname, rule?.domain?.name ?? []].flat(),
    keys: d.loopKeys,
  });
  if (decision.kind === 'skipped') {
    const { reason, explanation, loopedEmailId } = decision;
    return { ...NOTHING_SENT, status: 'skipped', reason, explanation, loopedEmailId, destinations };
  }
  if (rule === null || rule.domain === null) {
    const explanation = 'The domain of the route was deleted before the message was forwarded.';
    return {
      ...NOTHING_SENT,
      status: 'skipped',
      reason: 'rule_invalid',
      explanation,
      destinations,
    };
  }
  const repeatKey = task.replayId === null ? repeatKeyOf(header, task.recipient) : null;
  if (
    repeatKey !== null &&
    (await isRepeated(d.store.pool, { ...task, key: repeatKey, now: d.now() }))
  ) {
    const explanation = `A message with this Message-ID and Date was forwarded for ${task.recipient} ${REPEATS_MAX} times within a day: a loop.`;
    return { ...NOTHING_SENT, status: 'skipped', reason: 'loop', explanation, destinations };
  }
  try {
    const { email, explanation } = await makeEmail(d, task, {
      rule: { ...rule, domain: rule.domain },
      received,
      header,
      decision,
    });
    const { method, isReportOpen } = decision;
    const done = { explanation, method, isReportOpen, destinations, email };
    return { ...done, status: 'queued', reason: null, loopedEmailId: null, repeatKey };
  } catch (error) {
    if (error instanceof OriginalMissing) {
      const explanation =
        'The received message is not stored as it came any more, so it cannot be forwarded.';
      return { ...failed('message_missing', explanation), destinations };
    }
    if (!(error instanceof UnfitForward)) throw error;
    return { ...failed('refused', error.message), destinations };
  }
}

const NOTHING_SENT = {
  method: null,
  isReportOpen: false,
  loopedEmailId: null,
  repeatKey: null,
  email: null,
} as const;
const failed = (
  reason: ForwardReason,
  explanation: string,
): Omit<AttemptFacts, 'destinations'> => ({
  ...NOTHING_SENT,
  status: 'failed',
  reason,
  explanation,
});

async function makeEmail(
  d: ForwardDependencies,
  task: ForwardTask,
  about: {
    readonly rule: Rule & { readonly domain: NonNullable<Rule['domain']> };
    readonly received: Received;
    readonly header: ForwardHeader;
    readonly decision: Extract<ForwardDecision, { kind: 'forward' }>;
  },
): Promise<{ readonly email: NewEmail; readonly explanation: string }> {
  const { rule, received, header, decision } = about;
  const { domain, target } = rule;
  const { method } = decision;
  const { tenantId } = task;
  const id = newId();
  const createdAt = d.now();
  const sender = await senderOf(d, { ...about, task, now: createdAt });
  const isRelayed = method === 'relayed';
  const messageId = isRelayed ? (header.messageId ?? '') : `<${id}@${domain.name}>`;
  const { authentication } = received;
  const { sealer } = d;
  const plan = {
    method,
    emailId: id,
    messageId,
    date: createdAt,
    target,
    domain: domain.name,
    recipient: task.recipient,
    token: mintLoopToken({ emailId: id, target, keys: d.loopKeys }),
    envelopeFrom: sender.envelopeFrom,
    header,
    ...(sealer === undefined || authentication === null
      ? {}
      : {
          seal: async (pieces: AsyncIterable<Buffer>, trace: Buffer) =>
            (await sealer({
              tenantId,
              domainId: domain.id,
              authentication,
              results: resultsIn(trace),
              pieces,
            })) ?? Buffer.alloc(0),
        }),
  };
  const stored = await writeForward(d.blobs, received, plan);
  try {
    const email = await describeForward(d, {
      tenantId,
      id,
      createdAt,
      taskId: task.id,
      receivedEmailId: task.receivedEmailId,
      ruleId: task.ruleId,
      replayId: task.replayId,
      domain,
      method,
      author: isRelayed ? header.author : target,
      replyTo: isRelayed ? null : (header.authorMailbox?.given ?? null),
      subject: header.subject,
      messageId,
      destinations: rule.destinations,
      envelopeFrom: sender.envelopeFrom,
      stored,
    });
    const what = isRelayed
      ? 'Relayed as it came, because'
      : 'Rebuilt as a message of the route with the original attached, because';
    return { email, explanation: `${what} ${decision.because}; ${sender.because}.` };
  } catch (error) {
    await removeBlob(d.blobs, stored);
    throw error;
  }
}

async function senderOf(
  d: ForwardDependencies,
  about: {
    readonly task: ForwardTask;
    readonly rule: { readonly domain: { readonly id: string; readonly name: string } };
    readonly received: Received;
    readonly decision: Extract<ForwardDecision, { kind: 'forward' }>;
    readonly now: Date;
  },
): Promise<{ readonly envelopeFrom: string | null; readonly because: string }> {
  const { decision, received, task, rule, now } = about;
  if (decision.sender === 'null') {
    return { envelopeFrom: '', because: 'it has no envelope sender, and keeps none' };
  }
  const ours = (because: string) => ({ envelopeFrom: null, because });
  if (decision.sender === 'ours') {
    return ours(
      decision.method === 'rebuilt'
        ? 'its bounces come to the route'
        : 'nothing proves its envelope sender, so its bounces come here',
    );
  }
  const signer = await d.domains.signer(task.tenantId, rule.domain.id);
  const host = signer?.canSend === true ? `${signer.returnPathLabel}.${signer.domain}` : d.hostname;
  const minted = mintSrs({ sender: received.mailFrom, host, keys: d.srsKeys, now });
  if (minted === null) return ours('its envelope sender is too long to be rewritten');
  return { envelopeFrom: minted, because: `its envelope sender is rewritten for ${host}` };
}

async function removeBlob(
  blobs: BlobStore,
  { blobKey }: Pick<ForwardBytes, 'blobKey'>,
): Promise<void> {
  if (blobKey !== null) await blobs.remove(blobKey);
}

/** Whoever removes the task writes the rest. Null: nothing was enqueued, or another process was first. */
async function endTask(
  d: Pick<ForwardDependencies, 'store' | 'blobs' | 'now'>,
  task: ForwardTask,
  facts: AttemptFacts,
): Promise<NewEmail | null> {
  const { email } = facts;
  // Until the commit is asked for nothing can be stored; after a lost commit nobody knows, so the blob stays.
  let isCertainlyLost = true;
  try {
    const isOurs = await d.store.transact(async (client) => {
      const removed = await client.query({
        name: 'end-forwarding-task',
        text: 'delete from forwarding_task where tenant_id = $1 and id = $2',
        values: [task.tenantId, task.id],
      });
      if (removed.rowCount !== 1) return false;
      await insertAttempt(client, task, facts, d.now());
      if (facts.loopedEmailId !== null) {
        await countLoop(client, { task, loopedEmailId: facts.loopedEmailId, now: d.now() });
      }
      if (email !== null) await enqueue(client, [email]);
      isCertainlyLost = false;
      return true;
    });
    if (isOurs) {
      forwards.inc({ status: facts.status, reason: facts.reason ?? 'none' });
      if (email !== null) noteAccepted([email]);
      return email;
    }
  } catch (error) {
    if (isCertainlyLost && email !== null) await removeBlob(d.blobs, email);
    throw error;
  }
  if (email !== null) await removeBlob(d.blobs, email);
  return null;
}

async function insertAttempt(
  client: PoolClient,
  task: ForwardTask,
  facts: AttemptFacts,
  now: Date,
): Promise<void> {
  await client.query({
    name: 'insert-forwarding-attempt',
    text: `insert into forwarding_attempt (tenant_id, id, received_email_id, rule_id, recipient, destinations,
        status, reason, explanation, method, email_id, replay_id, is_report_open, created_at,
        looped_email_id, repeat_key)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)`,
    values: [
      task.tenantId,
      task.id,
      task.receivedEmailId,
      task.ruleId,
      task.recipient,
      JSON.stringify(facts.destinations),
      facts.status,
      facts.reason,
      facts.explanation,
      facts.method,
      facts.email?.id ?? null,
      task.replayId,
      facts.isReportOpen,
      now,
      facts.loopedEmailId,
      facts.repeatKey,
    ],
  });
}

/**
 * Only loops that are proven, and each email once: else anybody could switch a rule off by what a header says, and who
 * got a bounce of one, with its token, by sending that again and again. A rule that is made active again begins at none.
 */
async function countLoop(
  client: PoolClient,
  {
    task,
    loopedEmailId,
    now,
  }: { readonly task: ForwardTask; readonly loopedEmailId: string; readonly now: Date },
): Promise<void> {
  const came = await client.query({
    name: 'forward-came-back',
    text: `select 1 from forwarding_attempt a
      where a.tenant_id = $1 and a.email_id = $2 and a.rule_id = $3
        and exists (select 1 from delivery d where d.tenant_id = $1 and d.email_id = $2
          and d.state in ('in_flight', 'unknown', 'delivered', 'deferred'))
        and not exists (select 1 from forwarding_attempt o
          where o.tenant_id = $1 and o.looped_email_id = $2 and o.id <> $4)`,
    values: [task.tenantId, loopedEmailId, task.ruleId, task.id],
  });
  if (came.rowCount === 0) return;
  await client.query({
    name: 'count-forwarding-loop',
    text: `with counted as (
        select tenant_id, id, is_new, case when is_new then 1 else loops + 1 end as loops
        from (select *, loops_since is null
            or loops_since < $3::timestamptz - $4 * interval '1 millisecond' as is_new
          from forwarding_rule where tenant_id = $1 and id = $2 for update) r
      )
      update forwarding_rule r
      set loops = case when c.loops >= $5 then 0 else c.loops end,
        loops_since = case when c.loops >= $5 then null when c.is_new then $3 else r.loops_since end,
        status = case when c.loops >= $5 then 'invalid' else r.status end,
        invalid_reason = case when c.loops >= $5 then $6 else r.invalid_reason end,
        updated_at = case when c.loops >= $5 then $3 else r.updated_at end
      from counted c
      where r.tenant_id = c.tenant_id and r.id = c.id and r.status = 'active'`,
    values: [task.tenantId, task.ruleId, now, LOOPS_WINDOW_MS, LOOPS_MAX, LOOPS_REASON],
  });
}

const LOOPS_REASON = `Messages that it forwarded came back ${LOOPS_MAX} times within an hour: a destination sends them here again.`;
