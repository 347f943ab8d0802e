// What an operator decides about outcomes (config/delivery.json), in the words of the queue.

/** `retry_once`: much later, once more. `at_most_once`: never again, since two copies are worse than none. */
export type UnknownPolicy = 'retry_once' | 'at_most_once';

export interface OutcomePolicy {
  /** A recipient that has been put off for so long: its sender is told, once. */
  readonly delayedAfterMs: number;
  /** What becomes of mail whose answer to the final dot was lost. */
  readonly unknownOf: (tenantId: string) => UnknownPolicy;
}

export const DEFAULT_OUTCOMES: OutcomePolicy = {
  delayedAfterMs: 4 * 3_600_000,
  unknownOf: () => 'retry_once',
};
