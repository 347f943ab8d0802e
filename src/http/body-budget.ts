// What the bodies of all requests of this process may take together, in memory and on disk. No tenant gets more than
// half of it, so that one with many large or slow requests does not keep the others out.
import { Refusal } from '../access/refusal.ts';

const RETRY_AFTER_SECONDS = 2;

export interface BodyBudget {
  /** Takes so many bytes for the tenant; false, and nothing taken, when there are not as many left. */
  take(bytes: number, tenantId: string | null): boolean;
  give(bytes: number, tenantId: string | null): void;
}

export function createBodyBudget(maxBytes: number): BodyBudget {
  const takenBy = new Map<string, number>();
  let taken = 0;
  const book = (bytes: number, tenantId: string | null): void => {
    taken += bytes;
    if (tenantId === null) return;
    const total = (takenBy.get(tenantId) ?? 0) + bytes;
    if (total > 0) takenBy.set(tenantId, total);
    else takenBy.delete(tenantId);
  };
  return {
    take(bytes, tenantId) {
      const own = tenantId === null ? 0 : (takenBy.get(tenantId) ?? 0);
      const isOwnTooMuch = tenantId !== null && own + bytes > maxBytes / 2;
      if (taken + bytes > maxBytes || isOwnTooMuch) return false;
      book(bytes, tenantId);
      return true;
    },
    give(bytes, tenantId) {
      book(-bytes, tenantId);
    },
  };
}

export const tooMuchAtOnce = (): Refusal =>
  new Refusal(
    'service_unavailable',
    'Too many large requests are arriving at once; try again in a few seconds.',
    { retryAfterSeconds: RETRY_AFTER_SECONDS },
  );
