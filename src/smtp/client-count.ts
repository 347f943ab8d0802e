// How many connections a client has open, and how many came from a network lately. One client is one address; whoever has
// an IPv6 address has 2^64, so there it is one /64.
import { isIPv4 } from 'node:net';
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

/** The connections of this address's /24 (IPv6: /64) within the running minute, this one included. */
export type ConnectionRate = (address: string, nowMs: number) => number;

const WINDOW_MS = 60_000;
/** Networks that are remembered; the one that came first is forgotten for one more. */
const NETWORKS_MAX = 20_000;

export function createConnectionRate(networksMax = NETWORKS_MAX): ConnectionRate {
  const windows = new Map<string, { count: number; readonly beganAtMs: number }>();
  return (address, nowMs) => {
    const network = isIPv4(address) ? address.replace(/\.\d+$/, '') : networkOf(address);
    const running = windows.get(network);
    if (running !== undefined && nowMs - running.beganAtMs < WINDOW_MS) return (running.count += 1);
    windows.delete(network);
    // A Map keeps the order of insertion: the oldest windows are first.
    for (const [oldest, { beganAtMs }] of windows) {
      if (windows.size < networksMax && nowMs - beganAtMs < WINDOW_MS) break;
      windows.delete(oldest);
    }
    windows.set(network, { count: 1, beganAtMs: nowMs });
    return 1;
  };
}
