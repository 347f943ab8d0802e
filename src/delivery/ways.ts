// Which of our addresses a delivery leaves from, and where it goes from there: the first of its pool's that is not closed,
// and where port 25 is closed to that one, the smarthost, if the operator allows it.
import type { Logger } from '../log.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import { readDestination } from '../store/destination.ts';
import { egressesOf, membersOf, SYSTEM_EGRESS, type Egress } from './egress.ts';
import type { Lane } from './lane.ts';
import {
  findHome,
  findNextHops,
  toSmarthost,
  type NextHopDependencies,
  type NextHops,
} from './next-hop.ts';
import type { PortWatch } from './port25.ts';

export interface Ways {
  egressFor(delivery: ClaimedDelivery): Egress;
  /** Whether mail for it may leave from an address that is not among those with a known lane. */
  hasOther(destination: string, known: ReadonlyMap<string, string>): boolean;
  /** Never rejects. */
  find(destination: string, egress: Egress): Promise<NextHops>;
}

export const maySpill = ({ smarthost, policy }: NextHopDependencies): boolean =>
  smarthost !== null && policy().spill.smarthost;

export function createWays(d: {
  readonly nextHops: NextHopDependencies;
  readonly watch: PortWatch | null;
  readonly log: Logger;
  /** As last resolved; undefined: not known. */
  readonly laneOf: (destination: string, egress: string) => Lane | undefined;
}): Ways {
  const { nextHops } = d;
  const isBlocked = ({ name }: Egress): boolean => (d.watch?.isBlocked(name) ?? null) !== null;

  const isOpen = (destination: string, egress: Egress): boolean => {
    if (isBlocked(egress)) return false;
    const lane = d.laneOf(destination, egress.name);
    return lane === undefined || (lane.closedBy() === null && !lane.isStalled());
  };

  return {
    egressFor({ lane: destination, emailId }) {
      const to = readDestination(destination);
      if (to.kind !== 'mx') return SYSTEM_EGRESS;
      const able = egressesOf(nextHops.policy(), { ...to, emailId });
      const [first = SYSTEM_EGRESS] = able;
      return able.length === 1 ? first : (able.find((one) => isOpen(destination, one)) ?? first);
    },
    hasOther(destination, known) {
      const to = readDestination(destination);
      if (to.kind !== 'mx') return false;
      const members = membersOf(nextHops.policy(), to.pool);
      return members.some((one) => !known.has(one.name) && !isBlocked(one));
    },
    async find(destination, egress) {
      try {
        const to = readDestination(destination);
        if (to.kind === 'mx' && isBlocked(egress) && maySpill(nextHops)) {
          return (await findHome(nextHops, to.domain)) ?? (await toSmarthost(nextHops));
        }
        return await findNextHops(nextHops, destination, egress);
      } catch (error) {
        d.log.error({ err: error, destination }, 'the way to a destination cannot be found');
        return {
          kind: 'none',
          permanent: false,
          cause: 'internal',
          enhanced: '4.3.0',
          message: 'An internal fault interrupted the search for the next host; it is tried again.',
        };
      }
    },
  };
}
