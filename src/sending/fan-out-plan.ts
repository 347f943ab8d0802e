// What the fan-out of a broadcast needs for every contact, worked out once: its texts taken apart, its author's domain, the
// tenant's contact properties. Kept in memory while it is being sent, since a text may have megabytes and a batch takes
// a fraction of a second.
import type { Pool } from 'pg';
import { Refusal } from '../access/refusal.ts';
import { parseBroadcast, type ParsedBroadcast } from '../audience/broadcast-text.ts';
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import type { PropertyValue } from '../store/contact.ts';
import { fromJson } from '../store/json.ts';

/** A broadcast whose turn it is. */
export interface Queued {
  readonly tenantId: string;
  readonly id: string;
  /** Tells one sending from the next: what was canceled before its time may be changed and sent again. */
  readonly queuedMs: string;
}

export interface FanOutPlan {
  readonly parsed: ParsedBroadcast;
  readonly from: Mailbox;
  readonly replyTo: readonly Mailbox[];
  /** By key. */
  readonly properties: ReadonlyMap<
    string,
    { readonly id: string; readonly fallback: PropertyValue | null }
  >;
}

export interface FanOutPlans {
  /** Null: it is being sent no more. Throws a Refusal that says why it cannot be sent. */
  get(queued: Queued): Promise<FanOutPlan | null>;
}

/** Of all texts together, in characters; what was used last stays. */
const KEPT_MAX_CHARACTERS = 16 * 1024 * 1024;
const KEPT_MAX = 100;

export function createFanOutPlans(pool: Pool): FanOutPlans {
  const kept = new Map<string, FanOutPlan>();
  return {
    async get(queued) {
      const key = `${queued.tenantId} ${queued.id} ${queued.queuedMs}`;
      const known = kept.get(key);
      const plan = known ?? (await readPlan(pool, queued));
      if (plan === null) return null;
      kept.delete(key);
      kept.set(key, plan);
      let characters = [...kept.values()].reduce((sum, { parsed }) => sum + parsed.size, 0);
      for (const [oldest, { parsed }] of kept) {
        if ((characters <= KEPT_MAX_CHARACTERS && kept.size <= KEPT_MAX) || oldest === key) break;
        kept.delete(oldest);
        characters -= parsed.size;
      }
      return plan;
    },
  };
}

async function readPlan(pool: Pool, { tenantId, id }: Queued): Promise<FanOutPlan | null> {
  const { rows } = await pool.query<{
    from_given: string;
    subject: string;
    reply_to_given: readonly string[] | string;
    preview_text: string | null;
    html: string | null;
    text: string | null;
    properties: readonly { id: string; key: string; fallback: PropertyValue | null }[] | string;
  }>({
    text: `select from_given, subject, reply_to_given, preview_text, html, text,
        (select coalesce(jsonb_agg(jsonb_build_object('id', p.id, 'key', p.key, 'fallback', p.fallback_value)), '[]')
          from contact_property p where p.tenant_id = $1) as properties
      from broadcast where tenant_id = $1 and id = $2 and status = 'queued'`,
    values: [tenantId, id],
  });
  const [row] = rows;
  if (row === undefined) return null;
  const properties = fromJson(row.properties);
  return {
    parsed: parseBroadcast({ ...row, previewText: row.preview_text }, null),
    from: mailbox(row.from_given),
    replyTo: fromJson(row.reply_to_given).map(mailbox),
    properties: new Map(properties.map((one) => [one.key, one])),
  };
}

/** It was checked when it was stored. */
function mailbox(given: string): Mailbox {
  const parsed = parseMailbox(given);
  if (parsed.ok) return parsed.mailbox;
  throw new Refusal('validation_error', `The address ${parsed.problem}.`);
}
