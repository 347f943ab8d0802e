// Facts of the timeline that come with a change of deliveries, written in the transaction that changes them.
import { newId } from '../store/id.ts';
import type { Queryable } from './enqueue.ts';

export interface Fact {
  readonly tenantId: string;
  readonly emailId: string;
  readonly kind: string;
  readonly recipients: readonly string[];
  /** What is null is left out. */
  readonly detail?: Readonly<Record<string, unknown>>;
}

/** One statement for all of them. */
export async function tellFacts(db: Queryable, facts: readonly Fact[]): Promise<void> {
  if (facts.length === 0) return;
  await db.query({
    name: 'tell-facts',
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      select tenant_id, email_id, id, now(), kind, detail
      from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::jsonb[])
        as t (tenant_id, email_id, id, kind, detail)`,
    values: [
      facts.map(({ tenantId }) => tenantId),
      facts.map(({ emailId }) => emailId),
      facts.map(() => newId()),
      facts.map(({ kind }) => kind),
      facts.map(({ recipients, detail }) => JSON.stringify({ recipients, ...present(detail) })),
    ],
  });
}

const present = (detail: Fact['detail'] = {}): Record<string, unknown> =>
  Object.fromEntries(Object.entries(detail).filter(([, value]) => value !== null));
