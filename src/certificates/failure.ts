// What an order failed of, in words for the operator.
import type { FailureKind } from './timing.ts';

export class AcmeFailure extends Error {
  override name = 'AcmeFailure';
  readonly kind: FailureKind;
  /** Retry-After, where there was one. */
  readonly askedMs: number | null;
  /** The account is gone at the authority. */
  readonly isAccountGone: boolean;

  constructor(
    message: string,
    about: {
      kind?: FailureKind;
      askedMs?: number | null;
      isAccountGone?: boolean;
      cause?: unknown;
    } = {},
  ) {
    super(message, { cause: about.cause });
    this.kind = about.kind ?? 'refused';
    this.askedMs = about.askedMs ?? null;
    this.isAccountGone = about.isAccountGone ?? false;
  }
}
