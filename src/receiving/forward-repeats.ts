// Loops that show nowhere in the message: a host on the way that takes away all that we write on top still keeps the
// Message-ID and the Date, so the same ones come to the same address of the same rule again and again.
import { hash } from 'node:crypto';
import type { Pool } from 'pg';
import { normalizedAddress } from '../mail/address.ts';
import type { ForwardHeader } from '../mail/forward-header.ts';
import { findHeaders } from '../mail/header.ts';

/** Clients that lost our answer send once more; nobody sends one message so often. */
export const REPEATS_MAX = 5;
const REPEATS_WINDOW_MS = 86_400_000;
const KEY_OCTETS = 12;

/** Null: the message has no Message-ID that can be used, or no Date; some programs write one Message-ID all their life. */
export function repeatKeyOf(
  { messageId, fields }: Pick<ForwardHeader, 'messageId' | 'fields'>,
  recipient: string,
): Buffer | null {
  const [date = ''] = findHeaders(fields, 'Date');
  if (messageId === null || date === '') return null;
  const text = JSON.stringify([normalizedAddress(recipient), messageId, date]);
  return hash('sha256', text, 'buffer').subarray(0, KEY_OCTETS);
}

/** Whether it was forwarded REPEATS_MAX times within a day; replays do not count. */
export async function isRepeated(
  pool: Pool,
  about: {
    readonly tenantId: string;
    readonly ruleId: string;
    readonly key: Buffer;
    readonly now: Date;
  },
): Promise<boolean> {
  const { rowCount } = await pool.query({
    name: 'forward-repeats',
    text: `select 1 from forwarding_attempt
      where tenant_id = $1 and rule_id = $2 and repeat_key = $3 and status = 'queued'
        and created_at > $4::timestamptz - $5 * interval '1 millisecond'
      limit ${REPEATS_MAX}`,
    values: [about.tenantId, about.ruleId, about.key, about.now, REPEATS_WINDOW_MS],
  });
  return (rowCount ?? 0) >= REPEATS_MAX;
}
