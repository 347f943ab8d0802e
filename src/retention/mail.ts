// Steps over sent and received emails. A step is one transaction: what is old is locked, asked once more in other words
// whether anybody still wants it, counted for the metrics, and removed. Its blobs go after the commit; what a crash
// leaves of them is collected (sending/collect-blobs.ts).
import type { PoolClient } from 'pg';
import { SRS_DAYS } from '../mail/srs.ts';
import {
  countUnsent,
  findRemovable,
  lockRemovable,
  nextEmails,
  removeEmails,
  type RemovableEmail,
} from '../queue/remove-emails.ts';
import {
  countWanted,
  findRemovableReceived,
  lockRemovableReceived,
  nextReceived,
  removeReceived,
} from '../receiving/remove-received.ts';
import { freeBlobs } from '../sending/collect-blobs.ts';
import { noteRemoved } from '../sending/removed-counts.ts';
import type { BlobStore } from '../store/blob.ts';
import { LOWEST_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { RetentionKind, RetentionPolicy } from './policy.ts';
import type { Batch, Step } from './step.ts';

export type MailKind = Extract<
  RetentionKind,
  'email_bodies' | 'emails' | 'received_bodies' | 'received'
>;

export interface MailDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly policy: () => RetentionPolicy;
}

/** What was to be removed is still wanted: a fault of ours, and nothing was removed. */
export class StillWanted extends Error {
  override name = 'StillWanted';
}

/** SQL: whether the tenant `t` may have something old, over `c.below`. */
export const EXISTS_MAIL: Readonly<Record<MailKind, string>> = {
  email_bodies: `select 1 from email_content where tenant_id = t.id and email_id < c.below`,
  emails: `select 1 from email where tenant_id = t.id and id < c.below`,
  received_bodies: `select 1 from received_content where tenant_id = t.id and email_id < c.below`,
  received: `select 1 from received_email where tenant_id = t.id and id < c.below`,
};

const DAY_MS = 86_400_000;

/** What differs between sent and received. */
interface Side {
  next(step: Step): Promise<readonly string[]>;
  find(client: PoolClient, ids: readonly string[]): Promise<readonly RemovableEmail[]>;
  lock(client: PoolClient, ids: readonly string[]): Promise<readonly RemovableEmail[]>;
  wanted(client: PoolClient, ids: readonly string[]): Promise<number>;
  remove(client: PoolClient, ids: readonly string[]): Promise<readonly string[]>;
}

/** Removes what is old of the next emails, or only looks at it. Throws a StillWanted. */
export async function stepMail(d: MailDependencies, kind: MailKind, step: Step): Promise<Batch> {
  const part = kind === 'email_bodies' || kind === 'received_bodies' ? 'bodies' : 'records';
  const isSent = kind === 'email_bodies' || kind === 'emails';
  const side = isSent ? sentSide(d, part, step) : receivedSide(d, part, step);
  const ids = await side.next(step);
  const next: Batch['next'] = ids.length < step.max ? null : [ids.at(-1)!, ''];
  if (ids.length === 0) return batchOf([], next);
  const { rows, blobKeys } = await d.store.transact(async (client) => {
    if (step.isDry) {
      // One moment for both questions.
      await client.query('set transaction isolation level repeatable read, read only');
    }
    const found = await (step.isDry ? side.find(client, ids) : side.lock(client, ids));
    const own = found.map(({ id }) => id);
    if (own.length === 0) return { rows: found, blobKeys: [] };
    const wanted = await side.wanted(client, own);
    if (wanted > 0) {
      // Somebody may have begun to want them between the two questions: a replay locks no email.
      const again = await side.find(client, own);
      if (again.length < own.length) return { rows: [], blobKeys: [] };
      throw new StillWanted(
        `${wanted} of ${own.length} emails of tenant ${step.tenantId} that were found to be over (${kind}) ` +
          'are not: nothing of them was removed',
      );
    }
    if (step.isDry) return { rows: found, blobKeys: [] };
    if (part === 'records') await noteRemoved(client, step.tenantId, own);
    return { rows: found, blobKeys: await side.remove(client, own) };
  });
  await freeBlobs(d.store, d.blobs, blobKeys, step.signal);
  return batchOf(rows, next);
}

type Part = 'bodies' | 'records';

function sentSide({ store, policy }: MailDependencies, part: Part, step: Step): Side {
  const { tenantId, now } = step;
  const deadMs = policy().keptMs(tenantId, 'dead_letters');
  const rules = {
    tenantId,
    before: step.before,
    deadBefore: deadMs === null ? null : new Date(now.getTime() - deadMs),
    // A rewritten sender is good for so long.
    forwardedBefore: new Date(now.getTime() - (SRS_DAYS + 1) * DAY_MS),
  };
  return {
    next: () => nextEmails(store.pool, part, placeOf(step)),
    find: (client, ids) => findRemovable(client, part, { rules, ids }),
    lock: (client, ids) => lockRemovable(client, part, { rules, ids }),
    wanted: (client, ids) => countUnsent(client, tenantId, ids),
    remove: (client, ids) => removeEmails(client, part, { tenantId, ids, now }),
  };
}

function receivedSide({ store }: MailDependencies, part: Part, step: Step): Side {
  const { tenantId, before, now } = step;
  return {
    next: () => nextReceived(store.pool, part, placeOf(step)),
    find: (client, ids) => findRemovableReceived(client, part, { tenantId, before, ids }),
    lock: (client, ids) => lockRemovableReceived(client, part, { tenantId, before, ids }),
    wanted: (client, ids) => countWanted(client, tenantId, ids),
    remove: (client, ids) => removeReceived(client, part, { tenantId, ids, now }),
  };
}

const placeOf = ({ tenantId, after, below, max }: Step) => ({
  tenantId,
  after: after?.[0] ?? LOWEST_ID,
  below,
  max,
});

function batchOf(rows: readonly RemovableEmail[], next: Batch['next']): Batch {
  const times = rows.map(({ at }) => at.getTime());
  return {
    count: rows.length,
    bytes: rows.reduce((sum, { bytes }) => sum + bytes, 0),
    oldest: times.length === 0 ? null : new Date(Math.min(...times)),
    newest: times.length === 0 ? null : new Date(Math.max(...times)),
    next,
  };
}
