// The MTA-STS policy (RFC 8461) that we serve for a receiving domain: its text, the id that its TXT record shows, and whose it is
// by the host that was asked for. The id follows from the text, so it changes when and only when the policy does.
import { createHash } from 'node:crypto';
import type { Pool } from 'pg';
import type { StsHosting } from '../store/sending-domain.ts';

/** RFC 8461 §3.3: the policy is at this label. */
export const STS_LABEL = 'mta-sts';

const DAY_SECONDS = 86_400;
/** A sender that saw it holds to it for this long: a mistake in `enforce` costs mail, one in `testing` a report. */
const MAX_AGE_SECONDS = { none: DAY_SECONDS, testing: DAY_SECONDS, enforce: 14 * DAY_SECONDS };
const ID_CHARS = 20;

/** Null: none is served. */
export function stsPolicyText(mode: StsHosting, hostname: string): string | null {
  if (mode === 'off') return null;
  const lines = [
    'version: STSv1',
    `mode: ${mode}`,
    `mx: ${hostname.toLowerCase()}`,
    `max_age: ${MAX_AGE_SECONDS[mode]}`,
  ];
  return lines.map((line) => `${line}\r\n`).join('');
}

export const stsPolicyId = (text: string): string =>
  createHash('sha256').update(text).digest('hex').slice(0, ID_CHARS);

/** The policy that `host` (lower case, without a port) is asked for; null: no domain of ours has one there. */
export async function findStsPolicy(
  pool: Pool,
  host: string,
  hostname: string,
): Promise<string | null> {
  if (!host.startsWith(`${STS_LABEL}.`)) return null;
  const { rows } = await pool.query<{ mode: StsHosting }>(
    `select mta_sts as mode from sending_domain
     where name = $1 and receiving and receiving_verified and mta_sts <> 'off' limit 1`,
    [host.slice(STS_LABEL.length + 1)],
  );
  return rows[0] === undefined ? null : stsPolicyText(rows[0].mode, hostname);
}
