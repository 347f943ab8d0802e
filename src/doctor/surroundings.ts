// What the checks may ask, and nothing else: each of them gets the world through this, so a test can be the world.
import type { Pool } from 'pg';
import type { Config } from '../config.ts';
import type { DeliveryPolicy } from '../delivery/egress.ts';
import type { AddressGuard } from '../dns/address-guard.ts';
import type { SecureResolver } from '../dns/dnssec.ts';
import type { Resolver } from '../dns/resolver.ts';
import type { DoctorPolicy } from './policy.ts';

export interface Surroundings {
  readonly config: Pick<
    Config,
    | 'mode'
    | 'hostname'
    | 'publicUrl'
    | 'delivery'
    | 'dnsServers'
    | 'roles'
    | 'tlsCert'
    | 'messageLifetimeMs'
  >;
  readonly policy: DoctorPolicy;
  readonly delivery: DeliveryPolicy;
  readonly resolver: Resolver;
  /** The validating resolver of `dane`; null: there is none. */
  readonly secureResolver: Pick<SecureResolver, 'a'> | null;
  /** What may be dialled, and what counts as public. Our own addresses may be. */
  readonly guard: AddressGuard;
  /** Null: the database is away. */
  readonly pool: Pool | null;
  /** The mark of the store of large messages (store/blob-identity.ts); null: it cannot be asked here. */
  readonly readBlobMark: (() => Promise<string | null>) | null;
  /** Absolute. */
  readonly dataDir: string;
  readonly now: () => Date;
  /** Milliseconds that only ever grow. */
  readonly ticks: () => number;
  /** Somebody asked for connections to other people's hosts. */
  readonly isActive: boolean;
  /** Where the world finds mail hosts, ours among them; 25 but in tests. */
  readonly port: number;
  /** Of HTTPS; 443 but in tests. */
  readonly httpsPort: number;
  /** PEM; who vouches for our certificates beside the public authorities. */
  readonly ownAuthorities: readonly string[];
  /** PEM; in place of the certificate authorities that the runtime trusts. */
  readonly authorities?: readonly string[];
}

/**
 * Whether the DNS may be asked: in development mode only servers that the operator named, since nothing leaves the machine
 * there otherwise.
 */
export const asksDns = ({ config }: Pick<Surroundings, 'config'>): boolean =>
  config.mode === 'production' || config.dnsServers !== null;

/** Whether hosts may be dialled, ours or others': never in development mode. */
export const dials = ({ config }: Pick<Surroundings, 'config'>): boolean =>
  config.mode === 'production';

/** Why our addresses do not matter to anybody; null: they do. */
export function whyNotDirect({ config }: Pick<Surroundings, 'config'>): string | null {
  if (config.delivery !== 'direct') {
    return `MAILSTEAD_DELIVERY is \`${config.delivery}\`, so no mail leaves from here to other hosts`;
  }
  return asksDns({ config })
    ? null
    : 'in development mode without MAILSTEAD_DNS_SERVERS nothing outside is asked';
}
