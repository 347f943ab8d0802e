// What templates make of small requests, in all requests of a process together: the budget of bodies (http/body.ts) does
// not see it, since a request that only names a template is small whatever comes of it.
import { Refusal } from '../access/refusal.ts';
import type { CheckedEmail } from './request.ts';

/** Four batches as large as they may be. */
const FILLED_MAX_BYTES = 192 * 1024 * 1024;
const RETRY_AFTER_SECONDS = 2;

/** With a template: what it became. */
type Filled = Pick<CheckedEmail, 'html' | 'text' | 'template'>;

export interface FilledBudget {
  /** Runs the work of one request. What it holds is free again when it ends; to hold too much throws a Refusal. */
  share<T>(work: (hold: (email: Filled) => void) => Promise<T>): Promise<T>;
}

export function createFilledBudget(maxBytes: number = FILLED_MAX_BYTES): FilledBudget {
  let heldBytes = 0;
  return {
    async share(work) {
      let ownBytes = 0;
      try {
        return await work((email) => {
          const sizeBytes = email.template === null ? 0 : contentBytes(email);
          if (heldBytes + sizeBytes > maxBytes) throw tooMuchAtOnce();
          heldBytes += sizeBytes;
          ownBytes += sizeBytes;
        });
      } finally {
        heldBytes -= ownBytes;
      }
    },
  };
}

export const contentBytes = ({ html, text }: Pick<Filled, 'html' | 'text'>): number =>
  Buffer.byteLength(html ?? '') + Buffer.byteLength(text ?? '');

const tooMuchAtOnce = (): Refusal =>
  new Refusal(
    'service_unavailable',
    'Too many large emails are made of templates at once; try again in a few seconds.',
    { retryAfterSeconds: RETRY_AFTER_SECONDS },
  );
