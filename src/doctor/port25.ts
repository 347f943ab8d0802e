// Port 25, outward and inward. Outward, what delivery itself has seen decides; only when somebody asks for it are hosts of
// others dialled. Inward, our own name is dialled from here, which a router may not allow: that proves nothing then.
import { isIPv6 } from 'node:net';
import { membersOf, type Egress } from '../delivery/egress.ts';
import { readBlockedEgresses } from '../queue/egress-state.ts';
import { bad, info, ok, shown, unknown, type Finding } from './finding.ts';
import { greetingOf } from './greeting.ts';
import { dials, whyNotDirect, type Surroundings } from './surroundings.ts';

const EGRESSES_MAX = 32;
const HOSTS_MAX = 2;
const ADDRESSES_MAX = 4;
const OPEN_PORT =
  'Many cloud providers block port 25: ask yours to open it outward, or send through a relay (MAILSTEAD_DELIVERY=smarthost).';

const egressesOf = ({ delivery }: Surroundings): readonly Egress[] =>
  [...new Set([...delivery.pools.keys()].flatMap((pool) => membersOf(delivery, pool)))].slice(
    0,
    EGRESSES_MAX,
  );

/** From the facts that the delivery workers share. */
export async function checkPort25Out(s: Surroundings): Promise<readonly Finding[]> {
  const why = whyNotDirect(s);
  if (why !== null) {
    return [info(['port25_out', s.config.hostname], `Not applicable: ${why}.`)];
  }
  const advice = dials(s)
    ? 'Ask again with `--active`, which dials well-known mail hosts.'
    : 'In development mode no host is dialled to find out.';
  const actively = s.isActive && dials(s) ? await dialOut(s) : new Map<string, Finding>();
  const known = s.pool === null ? null : await readKnown(s, s.pool);
  return egressesOf(s).map(({ name }) => {
    const dialled = actively.get(name);
    if (dialled !== undefined) return dialled;
    const about = ['port25_out', name] as const;
    if (known === null) {
      return info(about, 'The database is away, so what delivery has seen is not known.', {
        advice,
      });
    }
    const blocked = known.blocked.get(name);
    if (blocked !== undefined) {
      return bad('error', about, {
        message: `No connection to port 25 of a mail host has succeeded from \`${name}\` since ${blocked.since.toISOString()}: ${shown(blocked.reason)}.`,
        advice: OPEN_PORT,
        detail: { since: blocked.since.toISOString() },
      });
    }
    const at = known.succeeded.get(name);
    if (at === undefined) {
      return info(about, `No mail has left from \`${name}\` yet, so nothing is known of port 25.`, {
        advice,
      });
    }
    return ok(about, `Port 25 is open from \`${name}\`: a connection succeeded at ${at}.`, {
      last_success_at: at,
    });
  });
}

async function readKnown(s: Surroundings, pool: NonNullable<Surroundings['pool']>) {
  const blocked = await readBlockedEgresses(pool);
  const { rows } = await pool.query<{ name: string; ms: string }>(
    `select name, (extract(epoch from last_success_at) * 1000)::bigint::text as ms
     from egress where last_success_at is not null and name = any ($1)`,
    [egressesOf(s).map(({ name }) => name)],
  );
  return {
    blocked: new Map(blocked.map((one) => [one.name, one])),
    succeeded: new Map(rows.map(({ name, ms }) => [name, new Date(Number(ms)).toISOString()])),
  };
}

/** By egress; nothing for one where no host could be asked about. */
async function dialOut(s: Surroundings): Promise<ReadonlyMap<string, Finding>> {
  const targets = (await Promise.all(s.policy.port25Domains.map((one) => hostsOf(s, one)))).flat();
  const found = await Promise.all(
    egressesOf(s).map(async (egress) => [egress.name, await dialFrom(s, egress, targets)] as const),
  );
  return new Map(found.flatMap(([name, finding]) => (finding === null ? [] : [[name, finding]])));
}

interface Target {
  readonly host: string;
  readonly address: string;
}

async function hostsOf(s: Surroundings, domain: string): Promise<readonly Target[]> {
  const answer = await s.resolver.mx(domain);
  if (answer.kind !== 'found') return [];
  const hosts = answer.records
    .filter(({ exchange }) => exchange !== '')
    .toSorted((a, b) => a.preference - b.preference)
    .slice(0, HOSTS_MAX);
  const found = await Promise.all(
    hosts.map(async ({ exchange }) => {
      const answers = await Promise.all([s.resolver.a(exchange), s.resolver.aaaa(exchange)]);
      // One of each family: an address of ours reaches its own only.
      return answers.flatMap((one) => {
        const address =
          one.kind === 'found' ? one.records.find((ip) => s.guard.check(ip).ok) : undefined;
        return address === undefined ? [] : [{ host: exchange, address }];
      });
    }),
  );
  return found.flat();
}

async function dialFrom(
  s: Surroundings,
  { name, ipv4, ipv6 }: Egress,
  targets: readonly Target[],
): Promise<Finding | null> {
  const isFree = ipv4 === null && ipv6 === null;
  const usable = targets
    .filter(({ address }) => isFree || (isIPv6(address) ? ipv6 : ipv4) !== null)
    // An IPv6 that this machine does not have must not hide that IPv4 works.
    .toSorted((a, b) => Number(isIPv6(a.address)) - Number(isIPv6(b.address)))
    .slice(0, ADDRESSES_MAX);
  if (usable.length === 0) return null;
  const tried = await Promise.all(
    usable.map(async ({ host, address }) => {
      const source = isIPv6(address) ? ipv6 : ipv4;
      return { host, address, greeting: await greetingOf({ address, port: s.port, source }) };
    }),
  );
  const about = ['port25_out', name] as const;
  const open = tried.find(({ greeting }) => greeting.kind === 'greeted');
  const detail = {
    dialled: tried.map(({ host, address, greeting }) => ({
      host,
      address,
      answer: greeting.kind === 'greeted' ? shown(greeting.line) : greeting.cause,
    })),
  };
  if (open !== undefined) {
    return ok(about, `Port 25 is open from \`${name}\`: ${open.host} greeted us.`, detail);
  }
  return bad('error', about, {
    message: `None of ${tried.length} well-known mail hosts could be reached on port ${s.port} from \`${name}\`.`,
    advice: OPEN_PORT,
    detail,
  });
}

/** Dials our own name, as the world does. */
export async function checkPort25In(s: Surroundings): Promise<readonly Finding[]> {
  const { hostname } = s.config;
  const none = ['port25_in', hostname] as const;
  if (!dials(s)) {
    return [info(none, 'Not applicable: in development mode no host is dialled.')];
  }
  const answers = await Promise.all([s.resolver.a(hostname), s.resolver.aaaa(hostname)]);
  const failed = answers.find((answer) => answer.kind === 'failed');
  if (failed !== undefined && answers.every((answer) => answer.kind !== 'found')) {
    return [
      unknown(none, {
        message: `The DNS did not answer the question for the addresses of ${hostname} (${failed.cause}).`,
        advice: 'See what `resolver` says.',
      }),
    ];
  }
  const addresses = answers
    .flatMap((answer) => (answer.kind === 'found' ? answer.records : []))
    .filter((address) => s.guard.check(address).ok)
    .slice(0, ADDRESSES_MAX);
  if (addresses.length === 0) {
    return [
      info(none, `${hostname} has no public address that could be dialled.`, {
        advice: `Publish an A record of ${hostname} with the public address of this machine.`,
      }),
    ];
  }
  return Promise.all(addresses.map((address) => dialIn(s, address)));
}

async function dialIn(s: Surroundings, address: string): Promise<Finding> {
  const { hostname } = s.config;
  const about = ['port25_in', address] as const;
  const greeting = await greetingOf({ address, port: s.port, source: null });
  if (greeting.kind === 'failed') {
    return info(
      about,
      `${address} (${hostname}) could not be reached on port ${s.port} from here (${greeting.cause}); many routers do not let a machine reach its own public address.`,
      {
        advice: `Try \`telnet ${hostname} ${s.port}\` from another network; if that fails too, open the port inward in the firewall and the router.`,
        detail: { cause: greeting.cause },
      },
    );
  }
  const line = shown(greeting.line);
  if (/^220[ -]/.test(line) && line.slice(4).toLowerCase().startsWith(hostname)) {
    return ok(about, `Port ${s.port} of ${address} greets as ${hostname}.`, { greeting: line });
  }
  return bad('warning', about, {
    message: `What answers at port ${s.port} of ${address} greets as "${line}" and not as ${hostname}.`,
    advice: `Lead port ${s.port} of ${address} to this appliance, or correct the A and AAAA records of ${hostname}.`,
    detail: { greeting: line },
  });
}
