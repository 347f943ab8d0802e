// What metrics say of a worker's lanes, read when they are asked for.
import { connections, lanesByCircuit, providerName } from '../telemetry/instruments.ts';
import type { Lane } from './lane.ts';

/** Until the function that it returns is called. */
export function measureLanes(lanes: ReadonlyMap<string, Lane>): () => void {
  const stops = [
    connections.read(() =>
      [...lanes.values()].map((lane) => [{ provider: labelOf(lane) }, lane.view().connections]),
    ),
    lanesByCircuit.read(() =>
      [...lanes.values()].map((lane) => [{ circuit: lane.view().circuit.state }, 1]),
    ),
  ];
  return () => {
    for (const stop of stops) stop();
  };
}

/** Where a lane leads, without the name of any single domain. */
export const labelOf = ({
  name,
  site,
  provider,
}: Pick<Lane, 'name' | 'site' | 'provider'>): string =>
  providerName(provider ?? (name === site ? name : 'other'));
