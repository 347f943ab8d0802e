// Which lane serves a destination, once its hosts are known: the address that mail leaves from and the place where it
// arrives. Domains with the same MX hosts share a place, and so do all domains of a provider, since it is the hosts that
// count our connections and not the domains.
import { createHash } from 'node:crypto';
import { providerOf, type Limits, type Providers } from './providers.ts';

export interface Site {
  /** The provider's name, or the MX hosts in order of the alphabet, joined by commas. */
  readonly name: string;
  readonly provider: string | null;
  readonly limits: Limits;
}

/** A longer list of hosts ends in a hash of all of them. */
const NAME_CHARS_MAX = 120;
const HASH_CHARS = 16;

/** `hosts`: the names of the MX hosts, lower-case A-labels, in any order. */
export function siteOf(providers: Providers, hosts: readonly string[]): Site {
  const distinct = [...new Set(hosts)].toSorted();
  const provider = providerOf(providers, distinct);
  if (provider !== null) {
    return { name: provider.name, provider: provider.name, limits: provider.limits };
  }
  return { name: shortened(distinct.join(',')), provider: null, limits: providers.default };
}

function shortened(name: string): string {
  if (name.length <= NAME_CHARS_MAX) return name;
  const hash = createHash('sha256').update(name).digest('hex').slice(0, HASH_CHARS);
  return `${name.slice(0, NAME_CHARS_MAX - HASH_CHARS - 1)}~${hash}`;
}

export const laneName = (egress: string, site: string): string => `${egress}/${site}`;
