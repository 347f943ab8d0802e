// One step of a removal: a bounded piece of what one tenant has of one kind.

/** Where the last step ended; what it means is the kind's. */
export type Place = readonly [string, string];

export interface Step {
  readonly tenantId: string;
  /** What is as old as this or younger stays. */
  readonly before: Date;
  /** The first id of that time. */
  readonly below: string;
  /** Null: from the beginning. */
  readonly after: Place | null;
  /** Rows that are looked at, at most. */
  readonly max: number;
  /** Only look. */
  readonly isDry: boolean;
  readonly now: Date;
  /** What is removed stays so; its blobs are left to the daily collection. */
  readonly signal: AbortSignal;
}

/** What it was, or would be. */
export interface Batch {
  readonly count: number;
  /** About. */
  readonly bytes: number;
  readonly oldest: Date | null;
  readonly newest: Date | null;
  /** Where the next step goes on; null: there is no more. */
  readonly next: Place | null;
}
