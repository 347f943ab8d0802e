// How many connections a client has open. One client is one network: whoever has an IPv6 address has 2^64.
import { networkOf } from '../access/rate-limit.ts';

export interface ClientCount {
  /** The connections of this address's network, this one included. */
  enter(address: string): number;
  leave(address: string): void;
}

export function createClientCount(): ClientCount {
  const open = new Map<string, number>();
  return {
    enter(address) {
      const client = networkOf(address);
      const count = (open.get(client) ?? 0) + 1;
      open.set(client, count);
      return count;
    },
    leave(address) {
      const client = networkOf(address);
      const left = (open.get(client) ?? 1) - 1;
      if (left > 0) open.set(client, left);
      else open.delete(client);
    },
  };
}
