// Gives mail that was given up one more lifetime, because somebody asked for it: dead letters whose cause can be mended,
// what expired, and, where the asker wants that, mail that may have arrived already. Nobody else is touched: what was
// delivered, refused by its host, suppressed, not wanted or canceled stays so.
import type { PoolClient } from 'pg';
import { UNSUBSCRIBED } from '../audience/wanting.ts';
import { UNKNOWNS_MAX } from '../store/delivery.ts';
import type { Store } from '../store/orm.ts';
import type { Queryable } from './enqueue.ts';
import { tellFacts } from './facts.ts';
import { showEmails } from './settle.ts';
import { findSuppressedNow } from './withhold.ts';

/** Causes of `failed` that no further attempt mends: there is no whole message to send. */
const UNMENDABLE = ['attachment_unavailable', 'attachment_refused'];

/** Why a recipient was not released; the first that applies to any of them is told. */
export type NotReleased =
  /** Given up, but its address has been suppressed since. */
  | 'suppressed'
  /** Nobody got it, because they have opted out. */
  | 'unsubscribed'
  /** It may have arrived, and the asker did not say that this does not matter. */
  | 'unknown'
  /** Given up, and not all of the message was ever there. */
  | 'incomplete'
  /** Delivered, on its way, refused by its host, canceled. */
  | 'not_given_up';

export type Release =
  | { readonly outcome: 'released'; readonly recipients: readonly string[] }
  | { readonly outcome: 'nothing'; readonly why: NotReleased }
  /** There is nothing to send any more. */
  | { readonly outcome: 'removed'; readonly at: Date }
  | { readonly outcome: 'not_found' };

interface Row {
  readonly position: number;
  readonly recipient: string;
  readonly state: string;
  readonly unknowns: number;
  readonly last_cause: string | null;
  readonly recipient_count: number;
}

/**
 * Where the message of an email lies; null: there is no such email, `blobKey` null: in its row. `removedAt`: retention
 * has taken it away.
 */
export async function findMessageBlob(
  db: Queryable,
  tenantId: string,
  id: string,
): Promise<{ readonly blobKey: string | null; readonly removedAt: Date | null } | null> {
  const { rows } = await db.query<{ blob_key: string | null; removed_ms: number | null }>({
    text: `select k.blob_key, (extract(epoch from e.content_removed_at) * 1000)::float8 as removed_ms
      from email e left join email_content k on k.tenant_id = e.tenant_id and k.email_id = e.id
      where e.tenant_id = $1 and e.id = $2`,
    values: [tenantId, id],
  });
  const [found] = rows;
  if (found === undefined) return null;
  const { blob_key: blobKey, removed_ms: removedMs } = found;
  return { blobKey, removedAt: removedMs === null ? null : new Date(removedMs) };
}

/**
 * Makes the given-up recipients of an email ready again, with `lifetimeMs` from now. Pauses are short again. A recipient whose
 * outcome is unknown is sent to once more only, and its next attempt is flagged as a possible second copy.
 */
export async function releaseEmail(
  store: Store,
  of: { readonly tenantId: string; readonly emailId: string },
  how: { readonly includeUnknown: boolean; readonly lifetimeMs: number },
): Promise<Release> {
  const { tenantId, emailId } = of;
  return store.transact(async (client) => {
    const { rows } = await client.query<Row>({
      text: `select d.position, d.recipient, d.state, d.unknowns, d.last_cause, e.recipient_count
        from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
        where d.tenant_id = $1 and d.email_id = $2 order by d.position for no key update of d`,
      values: [tenantId, emailId],
    });
    // A statement of its own: whoever took the content away held the deliveries until it was gone.
    const known = await findMessageBlob(client, tenantId, emailId);
    if (rows.length === 0 || known === null) return { outcome: 'not_found' };
    if (known.removedAt !== null) return { outcome: 'removed', at: known.removedAt };
    const isSuppressed = await findSuppressedNow(
      client,
      rows.map(({ recipient }) => ({ tenantId, recipient })),
    );
    const reasonOf = (row: Row): NotReleased | null => {
      if (!isGivenUp(row)) return 'not_given_up';
      if (row.last_cause === UNSUBSCRIBED.cause) return 'unsubscribed';
      if (isSuppressed({ tenantId, recipient: row.recipient })) return 'suppressed';
      // Also where a later attempt was put off until the end: the first copy may have arrived.
      if (row.unknowns > 0 && !how.includeUnknown) return 'unknown';
      return UNMENDABLE.includes(row.last_cause ?? '') ? 'incomplete' : null;
    };
    const released = rows.filter((row) => reasonOf(row) === null);
    if (released.length === 0) {
      const reasons = new Set(rows.map(reasonOf));
      const told = (['suppressed', 'unknown', 'incomplete', 'unsubscribed'] as const).find((r) =>
        reasons.has(r),
      );
      return { outcome: 'nothing', why: told ?? 'not_given_up' };
    }
    await makeReady(client, of, { released, lifetimeMs: how.lifetimeMs });
    const recipients = released.map(({ recipient }) => recipient);
    await tellFacts(client, [{ ...of, kind: 'released', recipients }]);
    await showEmails(client, [{ ...of, recipientCount: rows[0]!.recipient_count }]);
    return { outcome: 'released', recipients };
  });
}

const isGivenUp = ({ state, unknowns, last_cause: cause }: Row): boolean =>
  state === 'failed' ||
  (state === 'bounced' && cause === 'expired') ||
  (state === 'unknown' && unknowns >= UNKNOWNS_MAX);

async function makeReady(
  client: PoolClient,
  { tenantId, emailId }: { readonly tenantId: string; readonly emailId: string },
  about: { readonly released: readonly Row[]; readonly lifetimeMs: number },
): Promise<void> {
  // The attempts so far hardly make the pauses longer, as if the lane had been at fault.
  await client.query({
    text: `update delivery
      set state = 'ready', due_at = now(), expires_at = now() + $4 * interval '1 millisecond',
        lane_faults = attempts, interruptions = 0, deferred_at = null, delay_told_at = null,
        unknowns = case when state = 'unknown' then ${UNKNOWNS_MAX - 1} else unknowns end,
        last_cause = null, last_reply = null
      where tenant_id = $1 and email_id = $2 and position = any ($3::smallint[])`,
    values: [tenantId, emailId, about.released.map(({ position }) => position), about.lifetimeMs],
  });
}
