// Greylisting: who is a stranger is asked to come again, since senders of bad mail seldom do. Off unless the operator
// turns it on, because it delays the first mail of everybody without SPF and DKIM.
//
// A stranger is a triplet: the client's network (its /24, IPv6: its /64), the domain of the sender, the recipient. It is known once
// a try came `delay` after the first one, and stays known while it writes.
import { createHash } from 'node:crypto';
import { isIPv6 } from 'node:net';
import type { Pool } from 'pg';
import { networkOf } from '../access/rate-limit.ts';
import { normalizedAddress } from '../mail/address.ts';
import type { Authentication } from '../store/received-email.ts';
import type { ReceivingPolicy } from './policy.ts';

/** Whoever did not come again by then is a stranger anew: senders retry for days (RFC 5321 §4.5.4.1). */
const RETRY_WINDOW_MS = 2 * 86_400_000;

export interface GreylistQuestion {
  readonly address: string;
  /** Empty for the null sender. */
  readonly mailFrom: string;
  readonly recipients: readonly string[];
  readonly now: Date;
}

/** A client that proves whose mail it brings is no stranger. */
export const isProven = ({ spf, dkim }: Pick<Authentication, 'spf' | 'dkim'>): boolean =>
  spf.result === 'pass' || dkim.some(({ result }) => result === 'pass');

/** Whether all of these are known; notes the try. Rejects when the database is away. */
export async function passesGreylist(
  pool: Pick<Pool, 'query'>,
  question: GreylistQuestion,
  policy: ReceivingPolicy['greylisting'],
): Promise<boolean> {
  const { now } = question;
  const ago = (ms: number): Date => new Date(now.getTime() - ms);
  const { rows } = await pool.query<{ is_known: boolean }>({
    name: 'greylist',
    // In one order, so that two clients do not wait for each other. A triplet that was forgotten begins anew.
    text: `insert into greylist as g (key, first_at, last_at)
      select key, $2, $2 from unnest($1::bytea[]) key order by key
      on conflict (key) do update set
        last_at = $2,
        first_at = case
          when g.passed_at is null and g.first_at < $4 then $2
          when g.passed_at is not null and g.last_at < $5 then $2
          else g.first_at end,
        passed_at = case
          when g.passed_at is not null then case when g.last_at < $5 then null else g.passed_at end
          when g.first_at between $4 and $3 then $2 end
      returning passed_at is not null as is_known`,
    values: [
      keysOf(question),
      now,
      ago(policy.delayMs),
      ago(RETRY_WINDOW_MS),
      ago(policy.forgetAfterMs),
    ],
  });
  return rows.every((row) => row.is_known);
}

/** Removes what is forgotten, `max` rows at most; how many. */
export async function forgetGreylisted(
  pool: Pick<Pool, 'query'>,
  about: { readonly now: Date; readonly forgetAfterMs: number; readonly max: number },
): Promise<number> {
  const ago = (ms: number): Date => new Date(about.now.getTime() - ms);
  const { rowCount } = await pool.query(
    `delete from greylist where key in (
       select key from greylist where last_at < $1 and (passed_at is null or last_at < $2)
       order by last_at limit $3)`,
    [ago(RETRY_WINDOW_MS), ago(about.forgetAfterMs), about.max],
  );
  return rowCount ?? 0;
}

function keysOf({ address, mailFrom, recipients }: GreylistQuestion): readonly Buffer[] {
  const network = isIPv6(address) ? networkOf(address) : address.split('.').slice(0, 3).join('.');
  const sender = mailFrom.slice(mailFrom.lastIndexOf('@') + 1).toLowerCase();
  const distinct = new Set(recipients.map(normalizedAddress));
  return [...distinct].map((recipient) =>
    createHash('sha256').update(`${network}\0${sender}\0${recipient}`).digest(),
  );
}
