// How many looks at the DNS a tenant has open at a time: what waits for silent zones must not use up the questions
// that this process can have open, which others need as well.
import { Refusal } from '../access/refusal.ts';

const AT_ONCE_MAX = 50;
const RETRY_AFTER_SECONDS = 5;

/** Runs `work`; throws a Refusal where the tenant has too many of them already. */
type Turns = <T>(tenantId: string, work: () => Promise<T>) => Promise<T>;

export function takeTurns(): Turns {
  const running = new Map<string, number>();
  return async (tenantId, work) => {
    const count = running.get(tenantId) ?? 0;
    if (count >= AT_ONCE_MAX) {
      throw new Refusal(
        'rate_limit_exceeded',
        `There are ${count} verifications on their way; ask again when some have ended.`,
        { retryAfterSeconds: RETRY_AFTER_SECONDS },
      );
    }
    running.set(tenantId, count + 1);
    try {
      return await work();
    } finally {
      const left = running.get(tenantId)! - 1;
      if (left === 0) running.delete(tenantId);
      else running.set(tenantId, left);
    }
  };
}
