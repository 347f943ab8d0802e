// Deliveries that are not made because their address has been suppressed since the email was accepted, or its owner has
// opted out: found when a schedule wakes them (suppressions), and once more right after they were claimed, which is the
// last moment before a worker dials. So retries and what waited long behind other mail are covered as well. What is left and may already have
// arrived gets a fact that says so.
import { findUnwanted, UNSUBSCRIBED } from '../audience/wanting.ts';
import { normalizedAddress } from '../mail/address.ts';
import type { Store } from '../store/orm.ts';
import type { ClaimedDelivery } from './claim.ts';
import { SUPPRESSED, type Queryable } from './enqueue.ts';
import { tellFacts } from './facts.ts';
import { showEmails } from './settle.ts';
import { suppressed, tellUntried, unwanted } from './told.ts';

interface Addressed {
  readonly tenantId: string;
  /** Null: stands for no recipient. */
  readonly recipient: string | null;
}

/** Which of the recipients their tenants do not send to by now. */
export async function findSuppressedNow(
  db: Queryable,
  rows: readonly Addressed[],
): Promise<(row: Addressed) => boolean> {
  const key = (tenantId: string, address: string): string => `${tenantId} ${address}`;
  // Here and not in SQL: what lower() does to letters beyond ASCII depends on the database's locale.
  const addressOf = (row: Addressed): string => normalizedAddress(row.recipient ?? '');
  const { rows: found } = await db.query<{ tenant_id: string; address: string }>({
    name: 'suppressed-due',
    text: `select s.tenant_id, s.address from suppression s
      join unnest($1::uuid[], $2::text[]) as r (tenant_id, address)
        on s.tenant_id = r.tenant_id and s.address = r.address`,
    values: [rows.map(({ tenantId }) => tenantId), rows.map(addressOf)],
  });
  const suppressed = new Set(found.map((row) => key(row.tenant_id, row.address)));
  if (suppressed.size === 0) return () => false;
  return (row) => row.recipient !== null && suppressed.has(key(row.tenantId, addressOf(row)));
}

/** What an opt-out may be about. */
export interface Offer {
  readonly topicId: string | null;
  readonly isBroadcast: boolean;
}

/** Why a claimed delivery is not made. */
interface End {
  readonly state: 'suppressed' | 'failed';
  readonly cause: string;
  readonly reply: string;
}

const SUPPRESSED_NOW: End = { state: 'suppressed', ...SUPPRESSED };
const endOf = ({ isBroadcast }: Offer): End => ({
  state: 'failed',
  cause: UNSUBSCRIBED.cause,
  reply: isBroadcast ? UNSUBSCRIBED.ofBroadcast : UNSUBSCRIBED.ofTopic,
});

/**
 * Ends those of the claimed deliveries whose address is suppressed by now (`suppressed`) or does not want this topic or
 * broadcast (`failed`), as if they had not been claimed. The others, which are to be attempted. Mail without topic
 * and broadcast is not asked about wishes. Safe to fail: what was claimed is given back by its run.
 */
export async function withholdUnsendable<T extends ClaimedDelivery & Offer>(
  store: Store,
  epoch: string,
  claimed: readonly T[],
): Promise<readonly T[]> {
  if (claimed.length === 0) return claimed;
  const isSuppressed = await findSuppressedNow(store.pool, claimed);
  const optedOut = await findUnwanted(store.pool, claimed);
  const withheld = claimed.flatMap((delivery, index) => {
    if (isSuppressed(delivery)) return [{ delivery, end: SUPPRESSED_NOW }];
    return optedOut.has(index) ? [{ delivery, end: endOf(delivery) }] : [];
  });
  if (withheld.length === 0) return claimed;
  await store.transact(async (client) => {
    const { rows } = await client.query<{
      tenant_id: string;
      email_id: string;
      recipient: string;
      cause: string;
      reply: string;
    }>({
      name: 'withhold',
      text: `with withheld as (
          update delivery d
          set state = k.state, lease_epoch = null, attempts = d.attempts - 1,
            last_cause = k.cause, last_reply = k.reply
          from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::integer[], $6::text[], $7::text[], $8::text[])
            as k (tenant_id, email_id, position, number, state, cause, reply)
          where d.tenant_id = k.tenant_id and d.email_id = k.email_id and d.position = k.position
            and d.state = 'in_flight' and d.lease_epoch = $5 and d.attempts = k.number
          returning d.tenant_id, d.email_id, d.position, d.recipient, k.number, k.cause, k.reply
        ), undone as (
          delete from attempt a using withheld w
          where a.tenant_id = w.tenant_id and a.email_id = w.email_id and a.position = w.position
            and a.number = w.number
        )
        select tenant_id, email_id, recipient, cause, reply from withheld`,
      values: [
        withheld.map(({ delivery }) => delivery.tenantId),
        withheld.map(({ delivery }) => delivery.emailId),
        withheld.map(({ delivery }) => delivery.position),
        withheld.map(({ delivery }) => delivery.attempt),
        epoch,
        withheld.map(({ end }) => end.state),
        withheld.map(({ end }) => end.cause),
        withheld.map(({ end }) => end.reply),
      ],
    });
    await tellFacts(
      client,
      rows.map(({ tenant_id: tenantId, email_id: emailId, recipient, cause }) => ({
        tenantId,
        emailId,
        // `suppressed` or `unsubscribed`, as at acceptance.
        kind: cause,
        recipients: [recipient],
      })),
    );
    await tellUntried(
      client,
      rows.map(({ tenant_id: tenantId, email_id: emailId, recipient, cause, reply }) => {
        const about = { tenantId, emailId, recipient };
        return cause === SUPPRESSED.cause
          ? suppressed(about, reply)
          : unwanted(about, { reason: cause, message: reply });
      }),
    );
    const changed = new Set(rows.map((row) => row.email_id));
    await showEmails(
      client,
      withheld.flatMap(({ delivery }) => (changed.has(delivery.emailId) ? [delivery] : [])),
    );
  });
  const ended = new Set<ClaimedDelivery>(withheld.map(({ delivery }) => delivery));
  return claimed.filter((delivery) => !ended.has(delivery));
}

/**
 * Says of attempts that begin after an answer was lost that they may be the second copy. A failure here fails the claim,
 * and what was claimed is given back: no second copy leaves without its fact. What was given back and claimed again has it.
 */
export async function flagSecondCopies(
  db: Queryable,
  claimed: readonly ClaimedDelivery[],
): Promise<void> {
  const copies = claimed.filter(({ unknowns }) => unknowns > 0);
  if (copies.length === 0) return;
  const { rows } = await db.query<{ key: string }>({
    name: 'flagged-copies',
    text: `select t.email_id || ' ' || (t.detail ->> 'attempt') || ' ' || (t.detail -> 'recipients' ->> 0) as key
      from timeline t
      where (t.tenant_id, t.email_id) in (select * from unnest($1::uuid[], $2::uuid[]))
        and t.kind = 'possible_duplicate'`,
    values: [copies.map(({ tenantId }) => tenantId), copies.map(({ emailId }) => emailId)],
  });
  const flagged = new Set(rows.map(({ key }) => key));
  await tellFacts(
    db,
    copies
      .filter(
        ({ emailId, attempt, recipient }) => !flagged.has(`${emailId} ${attempt} ${recipient}`),
      )
      .map(({ tenantId, emailId, recipient, attempt }) => ({
        tenantId,
        emailId,
        kind: 'possible_duplicate',
        recipients: [recipient],
        detail: { attempt },
      })),
  );
}
