// What readers did with an email, opened it or followed a link: a row for each, a fact of the timeline for the first ones,
// what the email shows, and what webhooks are told, in one transaction. Bounded for each email, since whoever has one of
// its links can ask for it as often as he likes.
import type { PoolClient } from 'pg';
import type { EmailEvent } from '../store/email.ts';
import type { Store } from '../store/orm.ts';
import { noteLateChanges } from '../timeline/late-changes.ts';
import { tellWebhooks } from '../timeline/outbox.ts';

export const engagementKinds = ['opened', 'clicked'] as const;
export type EngagementKind = (typeof engagementKinds)[number];

/**
 * Why it may have been no person. `proxy`: a mail provider's, which loads pictures for its readers, so it still counts as
 * opened. The others do not count: `scanner` (a program by its name or network), `prefetch`, `head` (a request without the
 * answer's body), `burst` (too many links at once).
 */
export type Suspect = 'proxy' | 'scanner' | 'prefetch' | 'head' | 'burst';

export interface Engagement {
  /** Twice the same is once. */
  readonly id: string;
  readonly tenantId: string;
  readonly emailId: string;
  readonly kind: EngagementKind;
  readonly at: Date;
  /** Where it leads; null: opened. */
  readonly link: string | null;
  readonly remoteAddress: string | null;
  readonly userAgent: string | null;
  readonly suspect: Suspect | null;
  /** One of several links that were followed at once, from different networks: a machine where there is one recipient. */
  readonly isOfCrowd: boolean;
}

/** Of an email and kind, and apart from them of what does not count, so that machines take nobody's place. */
export const ENGAGEMENTS_MAX = 1_000;
/** The first ones of those. */
export const ENGAGEMENT_FACTS_MAX = 100;

export const isByPerson = (suspect: Suspect | null): boolean =>
  suspect === null || suspect === 'proxy';

interface EmailRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly recipient_count: number;
  readonly broadcast_id: string | null;
}

/** Stores them, all or none. Those of emails that are gone, and those above the limits, are left out. How many were told. */
export async function recordEngagements(
  store: Store,
  engagements: readonly Engagement[],
): Promise<{ readonly told: number }> {
  if (engagements.length === 0) return { told: 0 };
  return store.transact(async (client) => {
    const emails = await lockEmails(client, engagements);
    const judged = engagements.flatMap((one) => {
      const email = emails.get(one.emailId);
      if (email === undefined) return [];
      const isMachine = one.isOfCrowd && one.suspect === null && email.recipient_count === 1;
      const suspect = isMachine ? ('burst' as const) : one.suspect;
      return [{ ...one, suspect, broadcastId: email.broadcast_id }];
    });
    const counts = await countKnown(client, [...emails.keys()], judged);
    const classOf = (one: Judged): string =>
      `${one.emailId} ${one.kind} ${isByPerson(one.suspect)}`;
    const kept = judged.flatMap((one) => {
      const known = counts.get(classOf(one)) ?? 0;
      if (known >= ENGAGEMENTS_MAX) return [];
      counts.set(classOf(one), known + 1);
      return [{ one, isFact: known < ENGAGEMENT_FACTS_MAX }];
    });
    const stored = await insert(
      client,
      kept.map(({ one }) => one),
    );
    const fresh = kept.filter(({ one }) => stored.has(one.id));
    await tellTimeline(
      client,
      fresh.filter(({ isFact }) => isFact).map(({ one }) => one),
    );
    const counted = fresh.map(({ one }) => one).filter(({ suspect }) => isByPerson(suspect));
    for (const kind of engagementKinds) await show(client, kind, counted);
    await noteLateChanges(client, counted);
    await tellWebhooks(client, counted.map(eventOf));
    return { told: counted.length };
  });
}

type Judged = Omit<Engagement, 'isOfCrowd'> & { readonly broadcastId: string | null };

/** In the order in which everybody locks emails. By their ids: a token's tenant and email belong together. */
async function lockEmails(
  client: PoolClient,
  engagements: readonly Engagement[],
): Promise<ReadonlyMap<string, EmailRow>> {
  const keys = [...new Map(engagements.map((one) => [one.emailId, one])).values()];
  const { rows } = await client.query<EmailRow>({
    name: 'engagement-emails',
    text: `select e.tenant_id, e.id, e.recipient_count, e.broadcast_id
      from email e join unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
        on e.tenant_id = k.tenant_id and e.id = k.id
      order by e.tenant_id, e.id for no key update of e`,
    values: [keys.map(({ tenantId }) => tenantId), keys.map(({ emailId }) => emailId)],
  });
  return new Map(rows.map((row) => [row.id, row]));
}

/** By email, kind and whether it counts. */
async function countKnown(
  client: PoolClient,
  emailIds: readonly string[],
  judged: readonly Judged[],
): Promise<Map<string, number>> {
  const tenantOf = new Map(judged.map(({ emailId, tenantId }) => [emailId, tenantId]));
  const { rows } = await client.query<{
    email_id: string;
    kind: string;
    counts: boolean;
    known: number;
  }>({
    name: 'engagement-counts',
    text: `select g.email_id, g.kind, coalesce(g.suspect, 'proxy') = 'proxy' as counts, count(*)::int as known
      from unnest($1::uuid[], $2::uuid[]) as k (tenant_id, email_id)
      join engagement g on g.tenant_id = k.tenant_id and g.email_id = k.email_id
      group by 1, 2, 3`,
    values: [emailIds.map((id) => tenantOf.get(id)), emailIds],
  });
  return new Map(
    rows.map(({ email_id: id, kind, counts, known }) => [`${id} ${kind} ${counts}`, known]),
  );
}

/** Which of them are new: after a lost connection nobody knows what was committed, and they come again. */
async function insert(client: PoolClient, rows: readonly Judged[]): Promise<ReadonlySet<string>> {
  if (rows.length === 0) return new Set();
  const { rows: stored } = await client.query<{ id: string }>({
    name: 'engagement-insert',
    text: `insert into engagement (tenant_id, email_id, id, kind, at, link, remote_address, user_agent, suspect,
        broadcast_id)
      select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::timestamptz[], $6::text[],
        $7::text[], $8::text[], $9::text[], $10::uuid[])
      on conflict do nothing returning id`,
    values: [
      rows.map(({ tenantId }) => tenantId),
      rows.map(({ emailId }) => emailId),
      rows.map(({ id }) => id),
      rows.map(({ kind }) => kind),
      rows.map(({ at }) => at),
      rows.map(({ link }) => link),
      rows.map(({ remoteAddress }) => remoteAddress),
      rows.map(({ userAgent }) => userAgent),
      rows.map(({ suspect }) => suspect),
      rows.map(({ broadcastId }) => broadcastId),
    ],
  });
  return new Set(stored.map(({ id }) => id));
}

/** At the time when it happened, which may be a while ago. */
async function tellTimeline(client: PoolClient, rows: readonly Judged[]): Promise<void> {
  if (rows.length === 0) return;
  const detailOf = ({ link, remoteAddress, userAgent, suspect }: Judged): string =>
    JSON.stringify({
      ...(link === null ? {} : { link }),
      ip_address: remoteAddress,
      user_agent: userAgent,
      ...(suspect === null ? {} : { suspect }),
    });
  await client.query({
    name: 'engagement-facts',
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::timestamptz[], $5::text[], $6::jsonb[])`,
    values: [
      rows.map(({ tenantId }) => tenantId),
      rows.map(({ emailId }) => emailId),
      rows.map(({ id }) => id),
      rows.map(({ at }) => at),
      rows.map(({ kind }) => kind),
      rows.map(detailOf),
    ],
  });
}

/** What an email shows instead, once it was opened or clicked; a bounce, a complaint and what goes on stay. */
const SHOWN_BEFORE: Readonly<Record<EngagementKind, readonly EmailEvent[]>> = {
  opened: ['sent', 'delivered'],
  clicked: ['sent', 'delivered', 'opened'],
};

async function show(
  client: PoolClient,
  kind: EngagementKind,
  counted: readonly Judged[],
): Promise<void> {
  const emails = counted.filter((one) => one.kind === kind);
  if (emails.length === 0) return;
  await client.query({
    name: 'engagement-show',
    text: `update email e set last_event = $3
      from (select distinct * from unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)) k
      where e.tenant_id = k.tenant_id and e.id = k.id and e.last_event = any ($4::text[])`,
    values: [
      emails.map(({ tenantId }) => tenantId),
      emails.map(({ emailId }) => emailId),
      kind,
      SHOWN_BEFORE[kind],
    ],
  });
}

function eventOf(one: Judged): Parameters<typeof tellWebhooks>[1][number] {
  const { tenantId, emailId: subjectId, at, link } = one;
  const who = {
    ipAddress: one.remoteAddress,
    timestamp: at.toISOString(),
    userAgent: one.userAgent,
  };
  return link === null
    ? { tenantId, subjectId, at, type: 'email.opened', detail: { open: who } }
    : { tenantId, subjectId, at, type: 'email.clicked', detail: { click: { link, ...who } } };
}
