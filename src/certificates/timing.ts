/**
 * When a certificate is renewed and when a name that failed is tried again. Pure.
 *
 * Everything is a part of the lifetime, so that a certificate of six days is treated as one of ninety. Jitter keeps the names of
 * one appliance, and the appliances of the world, apart.
 */

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;

/** Renewed when this part of its lifetime is left. */
const LEFT_PART = 1 / 3;
/** And up to this part earlier. */
const EARLIER_PART = 1 / 20;

/**
 * What kind of failure: the name is not ready (its DNS, its port 80), which costs the authority nothing to find out; the
 * authority refused; it said that there were too many orders.
 */
export type FailureKind = 'not_ready' | 'refused' | 'rate_limited';

const BACKOFF: Readonly<Record<FailureKind, { readonly firstMs: number; readonly maxMs: number }>> =
  {
    not_ready: { firstMs: 2 * MINUTE_MS, maxMs: HOUR_MS },
    // Let's Encrypt allows five failed validations of a name in an hour.
    refused: { firstMs: 15 * MINUTE_MS, maxMs: 12 * HOUR_MS },
    rate_limited: { firstMs: 3 * HOUR_MS, maxMs: 24 * HOUR_MS },
  };
const JITTER_PART = 1 / 4;
/** Of what is left of a certificate: a short-lived one must not end between two tries. */
const LEFT_TRY_PART = 1 / 6;
const PAUSE_MIN_MS = MINUTE_MS;

interface Lifetime {
  readonly notBefore: Date;
  readonly notAfter: Date;
}

/** `random` is in [0, 1). */
export function renewalAt({ notBefore, notAfter }: Lifetime, random: number): Date {
  const lifeMs = notAfter.getTime() - notBefore.getTime();
  return new Date(notAfter.getTime() - lifeMs * (LEFT_PART + EARLIER_PART * random));
}

/**
 * After the `count`th failure in a row. `askedMs` is what the authority asked for (Retry-After) and wins where it is longer;
 * the end of the certificate in use shortens any pause but that one.
 */
export function nextTryAt(
  failure: { readonly kind: FailureKind; readonly count: number; readonly askedMs: number | null },
  at: { readonly now: Date; readonly notAfter: Date | null; readonly random: number },
): Date {
  const { firstMs, maxMs } = BACKOFF[failure.kind];
  const grown = Math.min(maxMs, firstMs * 2 ** Math.min(failure.count - 1, 30));
  const leftMs = (at.notAfter?.getTime() ?? 0) - at.now.getTime();
  const shortened =
    leftMs > 0 && failure.kind !== 'rate_limited' ? Math.min(grown, leftMs * LEFT_TRY_PART) : grown;
  const pauseMs = Math.max(PAUSE_MIN_MS, shortened) * (1 + JITTER_PART * (2 * at.random - 1));
  return new Date(at.now.getTime() + Math.max(pauseMs, failure.askedMs ?? 0));
}
