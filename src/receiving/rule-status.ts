// Whether a forwarding rule is safe to run: asked under locks when somebody wants it active, and taken back in the
// transaction of whoever ends what it hangs on. All lock in one order: domain, route, rule.
import type { PoolClient } from 'pg';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { ReceivingEnd } from '../domains/changes.ts';
import { parseDomain, normalizedAddress } from '../mail/address.ts';

export interface DomainState {
  readonly name: string;
  readonly receiving: boolean;
  readonly receivingVerified: boolean;
}

/** What a rule hangs on; null: it is gone. */
export interface Carrier {
  readonly domain: DomainState | null;
  readonly route: {
    /** Null for a catch-all. */
    readonly localPart: string | null;
    readonly targetLocalPart: string;
  } | null;
}

/** Until the transaction ends neither of the two changes. The domain first: whoever deletes it goes on to its routes. */
export async function lockCarrier(
  client: PoolClient,
  at: { readonly tenantId: string; readonly domainId: string; readonly routeId: string },
): Promise<Carrier> {
  const { rows: domains } = await client.query<DomainState>(
    `select name, receiving, receiving_verified as "receivingVerified" from sending_domain
     where tenant_id = $1 and id = $2 for share`,
    [at.tenantId, at.domainId],
  );
  const { rows: routes } = await client.query<NonNullable<Carrier['route']>>(
    `select local_part as "localPart", target_local_part as "targetLocalPart" from receiving_route
     where tenant_id = $1 and id = $2 for share`,
    [at.tenantId, at.routeId],
  );
  return { domain: domains[0] ?? null, route: routes[0] ?? null };
}

/** The route was deleted in this transaction: so is what its rule hangs on, whatever was wrong with it before. */
export async function endRuleOf(
  client: PoolClient,
  route: { readonly tenantId: string; readonly id: string; readonly at: Date },
): Promise<void> {
  await client.query(
    `update forwarding_rule
     set status = 'invalid', invalid_reason = 'The route was deleted.', updated_at = $3
     where tenant_id = $1 and route_id = $2`,
    [route.tenantId, route.id, route.at],
  );
}

/** Mail cannot arrive at the domain any more, whose row this transaction holds: its rules are invalid. */
export async function endRules(client: PoolClient, domain: ReceivingEnd): Promise<void> {
  const { tenantId, id, name, at } = domain;
  // They go with it, and nobody may be on the way from one of them to its rule.
  if (domain.why === 'deleted') {
    await client.query(
      `select 1 from receiving_route where tenant_id = $1 and domain_id = $2 for update`,
      [tenantId, id],
    );
  }
  const reason = {
    deleted: `The domain ${name} was deleted.`,
    switched_off: `Receiving was switched off for ${name}.`,
    not_verified: `${name} is not verified for receiving any more.`,
  }[domain.why];
  await client.query(
    `update forwarding_rule set status = 'invalid', invalid_reason = $3, updated_at = $4
     where tenant_id = $1 and domain_id = $2 and (status <> 'invalid' or $5)`,
    [tenantId, id, reason, at, domain.why === 'deleted'],
  );
}

/** Throws a Refusal that says what to fix before a rule with these destinations can be active. */
export function refuseUnsafe(carrier: Carrier, destinations: readonly string[]): void {
  const { domain, route } = carrier;
  if (domain === null || route === null) {
    const gone = domain === null ? 'domain' : 'route';
    const message = `The rule cannot have the \`status\` \`active\`: its ${gone} was deleted. Delete the rule, and make one for another route.`;
    throw refuseFields([{ path: 'status', message }]);
  }
  refuseClosedDomain(domain, 'status');
  const issues = loopIssues({ domain, route }, destinations);
  if (issues.length > 0) throw refuseFields(issues, 'forwarding_loop');
}

/** Throws a Refusal when mail cannot arrive at the domain; `path` is the field that asks for it. */
export function refuseClosedDomain(domain: DomainState, path: 'domain_id' | 'status'): void {
  const { name } = domain;
  const wish =
    path === 'status' ? 'The `status` cannot be `active`' : 'The `domain_id` will not do';
  if (!domain.receiving) {
    const message = `${wish}: ${name} does not receive mail. Enable its capability \`receiving\`, and publish the MX record that it shows then.`;
    throw refuseFields([{ path, message }], 'receiving_disabled');
  }
  if (!domain.receivingVerified) {
    const message = `${wish}: ${name} is not verified for receiving. Publish its Receiving record, then ask for POST /domains/{id}/verify.`;
    throw refuseFields([{ path, message }], 'domain_not_verified');
  }
}

/** Which destinations lead back to where the mail came from. */
function loopIssues(
  { domain, route }: { [part in keyof Carrier]: NonNullable<Carrier[part]> },
  destinations: readonly string[],
): readonly Issue[] {
  const addressOf = (local: string): string => normalizedAddress(`${local}@${domain.name}`);
  const target = addressOf(route.targetLocalPart);
  const matched = route.localPart === null ? null : addressOf(route.localPart);
  return destinations.flatMap((destination, index) => {
    const path = `destinations.${index}`;
    if (domainOf(destination) !== domain.name) return [];
    const address = normalizedAddress(destination);
    const what =
      address === target
        ? "is the route's own target"
        : address === matched
          ? 'is the address that the route matches'
          : `is at ${domain.name}, where the mail is received`;
    const message = `\`${path}\` ${what}, so that an active rule would forward in a circle; give an address at another domain.`;
    return [{ path, message }];
  });
}

function domainOf(address: string): string | null {
  const parsed = parseDomain(address.slice(address.lastIndexOf('@') + 1));
  return parsed.ok ? parsed.domain : null;
}
