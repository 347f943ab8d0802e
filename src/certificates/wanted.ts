// Which names this appliance wants certificates for: its own, and those of domains that lead to it and are served over HTTPS.
import { isIP } from 'node:net';
import type { Pool } from 'pg';
import { STS_LABEL } from '../domains/sts-policy.ts';
import { TRACKING_DEFAULT } from '../domains/records.ts';

/** Beyond it names of domains go without. */
const NAMES_MAX = 1_000;
const NAME =
  /^(?=.{4,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]$/;

/** Whether a certificate can be ordered for it: a name of the DNS with a dot, and not this machine's name for itself. */
export const isCertifiable = (name: string): boolean =>
  isIP(name) === 0 && NAME.test(name) && !name.endsWith('.localhost');

/** In the order in which they matter. */
export async function wantedNames(
  pool: Pool,
  about: { readonly own: readonly string[]; readonly servesDomains: boolean },
): Promise<readonly string[]> {
  const names = about.servesDomains ? [...about.own, ...(await domainNames(pool))] : about.own;
  const lower = names.map((name) => name.toLowerCase());
  return [...new Set(lower)].filter(isCertifiable).slice(0, NAMES_MAX);
}

async function domainNames(pool: Pool): Promise<readonly string[]> {
  const { rows } = await pool.query<{ name: string }>(
    `select coalesce(tracking_subdomain, $2) || '.' || name as name from sending_domain
     where (open_tracking or click_tracking)
       and record_checks -> 'tracking_cname' ->> 'status' in ('verified', 'temporary_failure')
     union
     select $3 || '.' || name from sending_domain
     where receiving and receiving_verified and mta_sts <> 'off'
     order by name limit $1`,
    [NAMES_MAX, TRACKING_DEFAULT, STS_LABEL],
  );
  return rows.map(({ name }) => name);
}
