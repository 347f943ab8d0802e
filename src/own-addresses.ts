// The addresses of this machine, loopback included: part of the composition root.
import { networkInterfaces } from 'node:os';

/** Asking the system costs as much as the rest of a check; a machine seldom gets an address while it runs. */
const KEPT_MS = 5_000;
let known: { readonly at: number; readonly addresses: readonly string[] } | null = null;

/** At most KEPT_MS old. */
export function ownAddresses(): readonly string[] {
  const at = performance.now();
  if (known === null || at - known.at > KEPT_MS) {
    const lists = Object.values(networkInterfaces());
    known = { at, addresses: lists.flatMap((list) => (list ?? []).map(({ address }) => address)) };
  }
  return known.addresses;
}
