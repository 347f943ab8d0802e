// Tells a second arrival of the same message from a new one: the same bytes from the same sender for the same recipients of
// a tenant. A client that did not hear our 250 sends again (RFC 1047); Message-IDs alone say nothing, lists and
// attackers use them twice. Without one the same bytes say nothing either: a device that sends `Door 3 is open` twice
// means it twice.
import { hash } from 'node:crypto';
import type { Pool } from 'pg';
import { normalizedAddress } from '../mail/address.ts';
import { splitHeader } from '../mail/header.ts';
import { newId } from '../store/id.ts';

/** Clients that lost a reply are back within minutes. */
export const SECOND_ARRIVAL_WITHIN_MS = 3_600_000;

/** Some field that a new message would have otherwise: its author's id, or that of a host that it came by (RFC 5321 §4.4). */
const TELLING = /^(?:message-id|received)$/i;

/**
 * What all copies of one arrival have in common; the bytes without our trace fields, which differ each time. A message
 * that nothing tells from the next one like it has a digest of its own.
 */
export function digestOf(arrival: {
  readonly mailFrom: string;
  readonly raw: Buffer;
  readonly traceSizeBytes: number;
}): (recipients: readonly string[]) => Buffer {
  const message = arrival.raw.subarray(arrival.traceSizeBytes);
  const isTold = splitHeader(message).fields.some(({ name, value }) => TELLING.test(name) && value);
  const bytes = isTold ? hash('sha256', message, 'base64') : newId();
  return (recipients) => {
    const names = [...new Set(recipients.map(normalizedAddress))].toSorted();
    // As JSON, so that no name can end where another begins.
    return hash('sha256', JSON.stringify([bytes, arrival.mailFrom, ...names]), 'buffer');
  };
}

/** Removes at most `max` that are too old to matter; how many. */
export async function forgetOldDigests(pool: Pool, max: number): Promise<number> {
  const { rowCount } = await pool.query(
    `delete from received_digest where ctid = any (array(
       select ctid from received_digest
       where received_at < now() - 2 * interval '${SECOND_ARRIVAL_WITHIN_MS} ms'
       order by received_at limit $1))`,
    [max],
  );
  return rowCount ?? 0;
}
