// Whose an envelope recipient is, decided at RCPT in one question: the receiving domain, the route of the local part,
// the forwarding rule of the route.
//
// Precedence: exact, alias, the same two for what is before the first `+` (subaddressing), catch-all, unrouteable. A domain
// without routes takes every local part, and so does the postmaster of each (RFC 5321 §4.5.1).
import type { Pool } from 'pg';
import { normalizedAddress, parseDomain } from '../mail/address.ts';
import type { RouteType } from '../store/receiving-route.ts';
import type { RouteDecision } from '../store/received-email.ts';
import type { InboundDmarc } from '../store/sending-domain.ts';
import { askTogether } from '../store/together.ts';
import type { Receiver, Resolution } from './arrival.ts';

const POSTMASTER = 'postmaster';
/** No address has them, and Postgres cannot hold all of them. */
const CONTROLS = /\p{Cc}/u;
/** More at a time would not be faster. */
const TOGETHER_MAX = 50;
/** Any domain will do: it is cut off again. */
const SOME_DOMAIN = '@local.test';

/** What is compared of a local part: lower case, NFC, without needless quotes and outer white space. */
export function localKeyOf(local: string): string {
  return normalizedAddress(local + SOME_DOMAIN).slice(0, -SOME_DOMAIN.length);
}

/** The key before the first `+`; null when there is none. In a quoted local part a `+` is a letter. */
function baseOf(key: string): string | null {
  const plus = key.startsWith('"') ? -1 : key.indexOf('+');
  return plus > 0 ? key.slice(0, plus) : null;
}

interface Row {
  readonly tenant_id: string;
  readonly domain_id: string;
  readonly domain: string;
  readonly inbound_dmarc: InboundDmarc;
  readonly is_verified: boolean;
  readonly has_routes: boolean;
  readonly route_id: string | null;
  readonly type: RouteType | null;
  readonly local_part: string | null;
  readonly target_local_part: string | null;
  readonly rule_id: string | null;
}

/** Who takes mail for this address, and by which route. `address` is as a client writes it after RCPT TO. */
export async function resolveRecipient(
  pool: Pick<Pool, 'query'>,
  address: string,
): Promise<Resolution> {
  const [resolution] = await resolveAll(pool, [address]);
  return resolution!;
}

/** The same for a listener: recipients that are asked for in one turn of the event loop share one question. */
export const createRecipientResolver = (
  pool: Pick<Pool, 'query'>,
): ((address: string) => Promise<Resolution>) =>
  askTogether(TOGETHER_MAX, (addresses: readonly string[]) => resolveAll(pool, addresses));

/** In the order of the addresses. One question to the database, none when no address could be of ours. */
async function resolveAll(
  pool: Pick<Pool, 'query'>,
  addresses: readonly string[],
): Promise<readonly Resolution[]> {
  const asked = addresses.map(askedOf);
  const found = asked.filter((one) => one !== null);
  const rows = new Map<string, Row>();
  if (found.length > 0) {
    // Each part once for each address, by an index; the empty key is the catch-all's.
    const { rows: answers } = await pool.query<Row & { readonly number: string }>({
      name: 'resolve-recipients',
      text: `select q.number, d.tenant_id, d.id as domain_id, d.name as domain, d.inbound_dmarc,
          d.is_verified,
          r.id as route_id, r.type, r.local_part, r.target_local_part, f.id as rule_id,
          r.id is not null or o.one is not null as has_routes
        from unnest($1::text[], $2::text[], $3::text[]) with ordinality
          as q (domain, key, base, number)
        cross join lateral (
          select tenant_id, id, name, inbound_dmarc, receiving_verified as is_verified
          from sending_domain
          where name = q.domain and receiving
            and (receiving_verified or next_check_at is not null)
          order by receiving_verified desc, created_at limit 1
        ) d
        left join lateral (
          select id, type, local_part, target_local_part from receiving_route
          where tenant_id = d.tenant_id and domain_id = d.id
            and local_key in (q.key, q.base, '')
          order by case local_key when q.key then 0 when q.base then 1 else 2 end, type <> 'exact'
          limit 1
        ) r on true
        left join lateral (
          select 1 as one from receiving_route
          where r.id is null and tenant_id = d.tenant_id and domain_id = d.id limit 1
        ) o on true
        left join lateral (
          select id from forwarding_rule
          where tenant_id = d.tenant_id and route_id = r.id limit 1
        ) f on true`,
      values: [
        found.map(({ domain }) => domain),
        found.map(({ key }) => key),
        found.map(({ key }) => baseOf(key) ?? key),
      ],
    });
    for (const row of answers) rows.set(row.number, row);
  }
  let number = 0;
  return addresses.map((address, at) => {
    const one = asked[at]!;
    if (one === null) return { kind: 'not_ours', isAwaited: false };
    number += 1;
    const row = rows.get(String(number));
    if (row === undefined) return { kind: 'not_ours', isAwaited: false };
    if (!row.is_verified) return { kind: 'not_ours', isAwaited: true };
    const isTaken = row.route_id !== null || !row.has_routes || one.key === POSTMASTER;
    return { kind: isTaken ? 'taken' : 'unrouteable', receiver: receiverOf(address, row) };
  });
}

/** Null: nobody could take mail for it. */
function askedOf(address: string): { readonly domain: string; readonly key: string } | null {
  const at = address.lastIndexOf('@');
  const domain = at < 1 ? null : parseDomain(address.slice(at + 1));
  if (domain === null || !domain.ok || CONTROLS.test(address)) return null;
  const key = localKeyOf(address.slice(0, at));
  return key === '' ? null : { domain: domain.domain, key };
}

function receiverOf(recipient: string, row: Row): Receiver {
  return {
    tenantId: row.tenant_id,
    domainId: row.domain_id,
    recipient,
    decision: decisionOf(recipient, row),
    inboundDmarc: row.inbound_dmarc,
  };
}

const decisionOf = (recipient: string, row: Row): RouteDecision => ({
  recipient,
  status: row.type ?? 'unrouteable',
  route_id: row.route_id,
  route_type: row.type,
  local_part: row.local_part,
  domain_id: row.domain_id,
  target_address: row.target_local_part === null ? null : `${row.target_local_part}@${row.domain}`,
  forwarding_rule_id: row.rule_id,
});

/**
 * Who reads what is for the postmaster of this host (RFC 5321 §4.5.1): the owner of the receiving domain that the
 * host has its name from, the longest first, or of `homeDomain`. Null: nobody.
 */
export async function findPostmaster(
  pool: Pool,
  host: { readonly hostname: string; readonly homeDomain: string | null },
): Promise<Receiver | null> {
  const ends = host.hostname.split('.').map((_, at, labels) => labels.slice(at).join('.'));
  for (const domain of host.homeDomain === null ? ends : [...ends, host.homeDomain]) {
    const resolution = await resolveRecipient(pool, `${POSTMASTER}@${domain}`);
    if (resolution.kind === 'taken') return resolution.receiver;
  }
  return null;
}
