// What comes to the rewritten sender of mail that we forwarded (mail/srs.ts): a bounce settles the delivery that it is about,
// as one to a return path does, and goes on to the author with nobody as its sender. So do replies of vacation programs.
//
// Only mail with the null sender is taken, one recipient at a time; a second arrival of the same bytes changes nothing;
// and what tells of nothing new goes on to an author so many times an hour, so that nobody can be written to at will.
// The fact, the settled delivery and the message that goes on are one transaction, before the 250.
import { createHash } from 'node:crypto';
import type { Pool, PoolClient } from 'pg';
import type { Logger } from '../log.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import type { BounceRule } from '../mail/bounce-rules.ts';
import { returnedFields } from '../mail/dsn-returned.ts';
import { readForwardHeader, receivedFields, type ForwardHeader } from '../mail/forward-header.ts';
import { LOOP_HEADER, readLoopToken } from '../mail/loop-token.ts';
import { readReport, type Report } from '../mail/report.ts';
import { readSrs } from '../mail/srs.ts';
import { enqueue } from '../queue/enqueue.ts';
import { findTenant, settleForwardReport, type LateResult } from '../queue/late.ts';
import { describeNullSender } from '../sending/dsn.ts';
import { removeBlobs } from '../sending/store-emails.ts';
import { findSuppressed, type NewEmailDependencies } from '../sending/new-email.ts';
import { newId } from '../store/id.ts';
import { noteAccepted } from '../telemetry/counted.ts';
import { OWN_HOPS_MAX } from './forward-decision.ts';
import { isReturnPathDomain } from './returned.ts';

/** What a recipient is that looks like a rewritten sender of ours. */
export type ForwardReturn =
  /** `sender`: where the mail goes on to. */
  { readonly kind: 'open'; readonly sender: string } | { readonly kind: 'expired' };

export interface ForwardReturnDependencies extends NewEmailDependencies {
  readonly log: Logger;
  readonly srsKeys: readonly Buffer[];
  readonly loopKeys: readonly Buffer[];
  /** Ours. */
  readonly hostname: string;
  readonly bounceRules: readonly BounceRule[];
  /** Whose mail it is where nothing tells: the operator. */
  readonly firstTenantId: string;
  /** Deliveries became ready. */
  readonly onReady: () => void;
}

/** A message that came to one, with the null sender. */
export interface ReturnedMessage {
  /** As the client wrote it. */
  readonly address: string;
  readonly sender: string;
  /** With our trace fields on top. */
  readonly raw: Buffer;
  readonly traceSizeBytes: number;
}

export type ForwardReturnResult =
  /** `refused`: with these words. */
  | { readonly kind: 'taken' }
  | { readonly kind: 'refused'; readonly code: number; readonly text: string };

export const NOT_A_REPORT = {
  code: 550,
  text: '5.7.1 This address takes reports with the null sender only',
} as const;
export const EXPIRED_RETURN = {
  code: 550,
  text: '5.1.1 This address was good for 21 days and is so no more: the message that it was made for is too old',
} as const;
const NOT_NOW = {
  code: 451,
  text: '4.2.1 The delivery that this is about is under way, try again later',
} as const;
const TOO_MANY = {
  code: 451,
  text: '4.7.1 Too much comes back for this sender, try again later',
} as const;
const LOOP = {
  code: 554,
  text: '5.4.6 This message has been here before: it goes round in a circle',
};

/** What goes on to one author within an hour beside reports of failures that nobody had told of. */
const UNPROVEN_PER_HOUR_MAX = 20;
/** How long a second arrival of the same bytes is known. */
const REMEMBERED_DAYS = 7;
const FORGOTTEN_PER_RETURN = 20;

/** Null: it is no rewritten sender of ours. */
export async function readForwardReturn(
  d: { readonly pool: Pool; readonly srsKeys: readonly Buffer[]; readonly hostname: string },
  address: string,
  now: Date,
): Promise<ForwardReturn | null> {
  const found = readSrs(address, d.srsKeys, now);
  // The hash says nothing about where the address is: at another host it would be relaying.
  if (found === null || !(await isReturnPathDomain(d.pool, d, address))) return null;
  return found.kind === 'expired' ? found : { kind: 'open', sender: found.sender };
}

/** Why mail to such a recipient is refused at RCPT; null: it is taken. `mailFrom`: empty for the null sender. */
export function refuseForwardReturn(
  found: ForwardReturn,
  mailFrom: string,
): { readonly code: number; readonly text: string } | null {
  if (found.kind === 'expired') return EXPIRED_RETURN;
  return mailFrom === '' ? null : NOT_A_REPORT;
}

/** Rejects when the database is away. */
export async function takeForwardReturn(
  d: ForwardReturnDependencies,
  message: ReturnedMessage,
): Promise<ForwardReturnResult> {
  const { raw, traceSizeBytes, address } = message;
  const header = readForwardHeader(raw, { hostname: d.hostname, traceSizeBytes });
  const isHereAgain = header.deliveredTo.includes(normalizedAddress(address));
  if (isHereAgain || header.ownHops > OWN_HOPS_MAX) return { kind: 'refused', ...LOOP };
  const original = raw.subarray(traceSizeBytes);
  const parsed = parseMailbox(`<${message.sender}>`);
  if (!parsed.ok) return { kind: 'refused', ...EXPIRED_RETURN };
  const place = await findPlace(d, { address, original });
  const email = await describeNullSender(d, {
    tenantId: place.tenantId,
    id: newId(),
    createdAt: d.now(),
    via: 'returned',
    from: authorOf(header, address),
    to: parsed.mailbox,
    subject: header.subject,
    text: null,
    headers: null,
    messageId: header.messageId ?? `<${newId()}@${d.hostname}>`,
    raw: Buffer.concat([
      receivedFields(raw.subarray(0, traceSizeBytes)),
      // RFC 9228: who meets it here again knows it.
      Buffer.from(`Delivered-To: ${address}\r\n`),
      original,
    ]),
    needsSmtpUtf8: header.hasUtf8 || parsed.mailbox.needsSmtpUtf8,
    // Whoever knows the address writes what they like: a signature of ours would make it the domain's own.
    signingDomainId: null,
    about: place.emailId,
    suppressed: await findSuppressed(d.store, place.tenantId, [{ recipients: [parsed.mailbox] }]),
  });
  // Until the commit is asked for, nothing can be stored; after a lost commit nobody knows, so a blob stays.
  let isCertainlyLost = true;
  try {
    const isNew = await d.store.transact(async (client) => {
      const isFirst = await take(client, d, {
        place,
        sender: normalizedAddress(parsed.mailbox.address),
        digest: createHash('sha256').update(original).update(normalizedAddress(address)).digest(),
        report: place.emailId === null ? null : readReport(raw),
      });
      if (isFirst) {
        await enqueue(client, [email]);
        await tellOf(client, place, { id: email.id, author: parsed.mailbox });
      }
      isCertainlyLost = false;
      return isFirst;
    });
    if (isNew) {
      noteAccepted([email]);
      d.onReady();
    } else await removeBlobs(d.blobs, [email]);
    d.log.debug(
      { email_id: place.emailId, tenant_id: place.tenantId, is_new: isNew },
      'mail to a rewritten sender went on',
    );
    return { kind: 'taken' };
  } catch (error) {
    if (isCertainlyLost) await removeBlobs(d.blobs, [email]).catch(() => undefined);
    if (error instanceof NotTaken) return { kind: 'refused', ...error.reply };
    throw error;
  }
}

/** Undoes the transaction. */
class NotTaken extends Error {
  override name = 'NotTaken';
  readonly reply: { readonly code: number; readonly text: string };

  constructor(reply: { readonly code: number; readonly text: string }) {
    super(reply.text);
    this.reply = reply;
  }
}

/** Whose mail it is about. */
interface Place {
  readonly tenantId: string;
  /** The forwarded email; null: the message does not tell. */
  readonly emailId: string | null;
}

/** Notes the message, and settles what it reports. False: it was here before. Throws a NotTaken. */
async function take(
  client: PoolClient,
  d: Pick<ForwardReturnDependencies, 'bounceRules'>,
  what: {
    readonly place: Place;
    readonly sender: string;
    readonly digest: Buffer;
    readonly report: Report | null;
  },
): Promise<boolean> {
  const { place, sender, digest, report } = what;
  await forgetOld(client);
  const noted = await client.query(
    `insert into forward_return (digest, sender, is_proven, at) values ($1, $2, false, now())
     on conflict do nothing`,
    [digest, sender],
  );
  if (noted.rowCount === 0) return false;
  const result = report === null ? 'nothing' : await settleReported(client, d, { place, report });
  if (result === 'not_now') throw new NotTaken(NOT_NOW);
  if (result === 'settled') {
    await client.query('update forward_return set is_proven = true where digest = $1', [digest]);
    return true;
  }
  // One after the other, so that two do not count the same.
  await client.query(`select pg_advisory_xact_lock(hashtextextended('forward return ' || $1, 0))`, [
    sender,
  ]);
  const { rows } = await client.query<{ count: number }>(
    `select count(*)::integer as count from forward_return
     where sender = $1 and at > now() - interval '1 hour' and not is_proven`,
    [sender],
  );
  if ((rows[0]?.count ?? 0) > UNPROVEN_PER_HOUR_MAX) throw new NotTaken(TOO_MANY);
  return true;
}

/** What the author hears by this message no report of ours repeats (forward-reports.ts). */
async function settleReported(
  client: PoolClient,
  d: Pick<ForwardReturnDependencies, 'bounceRules'>,
  { place, report }: { readonly place: Place; readonly report: Report },
): Promise<LateResult> {
  const { tenantId, emailId } = place;
  if (emailId === null) return 'nothing';
  const about = { report, rules: d.bounceRules };
  const { result, failed } = await settleForwardReport(client, { tenantId, emailId }, about);
  if (failed.length > 0 && result !== 'not_now') {
    await client.query(
      `update forwarding_attempt set reported_positions = reported_positions || $3::smallint[]
       where tenant_id = $1 and email_id = $2 and is_report_open`,
      [tenantId, emailId, failed],
    );
  }
  return result;
}

async function forgetOld(client: PoolClient): Promise<void> {
  await client.query(
    `delete from forward_return where digest in (
       select digest from forward_return where at < now() - interval '${REMEMBERED_DAYS} days'
       order by at limit ${FORGOTTEN_PER_RETURN} for update skip locked)`,
  );
}

async function tellOf(
  client: PoolClient,
  { tenantId, emailId }: Place,
  sent: { readonly id: string; readonly author: Mailbox },
): Promise<void> {
  if (emailId === null) return;
  // Of the email as a whole: whom it is about, the report says.
  await client.query({
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      values ($1, $2, $3, now(), 'author_told', $4)`,
    values: [
      tenantId,
      emailId,
      newId(),
      JSON.stringify({ email_id: sent.id, author: sent.author.address }),
    ],
  });
}

/**
 * By the token of the message that comes back, if it left with this very sender; else by the host that the address is at.
 */
async function findPlace(
  d: ForwardReturnDependencies,
  { address, original }: { readonly address: string; readonly original: Buffer },
): Promise<Place> {
  for (const value of returnedFields(original, LOOP_HEADER)) {
    const token = readLoopToken(value, d.loopKeys);
    const tenantId = token === null ? null : await findTenant(d.store, token.emailId);
    if (token === null || tenantId === null) continue;
    const { rows } = await d.store.pool.query<{ envelope_from: string | null }>(
      `select envelope_from from email_content where tenant_id = $1 and email_id = $2`,
      [tenantId, token.emailId],
    );
    const [row] = rows;
    if (row === undefined) continue;
    if (normalizedAddress(row.envelope_from ?? '') !== normalizedAddress(address)) continue;
    return { tenantId, emailId: token.emailId };
  }
  const host = address.slice(address.lastIndexOf('@') + 1).toLowerCase();
  const { rows } = await d.store.pool.query<{ tenant_id: string }>({
    name: 'return-path-owner',
    text: `select tenant_id from sending_domain
      where name = any ($1::text[]) and return_path_label || '.' || name = $2
      order by sending_verified desc, created_at limit 1`,
    values: [host.split('.').map((_, at, labels) => labels.slice(at).join('.')), host],
  });
  const [owner] = rows;
  return { tenantId: owner?.tenant_id ?? d.firstTenantId, emailId: null };
}

/** As its header says it; a report without an author is from the host's program. */
function authorOf({ authorMailbox }: ForwardHeader, address: string): Mailbox {
  if (authorMailbox !== null) return authorMailbox;
  const parsed = parseMailbox(`MAILER-DAEMON@${address.slice(address.lastIndexOf('@') + 1)}`);
  if (!parsed.ok) throw new Error('an address without a domain was taken');
  return parsed.mailbox;
}
