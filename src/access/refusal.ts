// A refusal: the caller asked for something we will not do. One table holds, for every code, the HTTP
// status and the `name` of the error envelope (Resend's list); the message says what to fix. The edges
// translate it, so the same rule has the same words at every door. Nothing internal belongs in one.

import { isBlobsUnavailable } from '../store/blobs-unavailable.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';

interface Kind {
  readonly status: number;
  readonly name: string;
}

const kinds = {
  invalid_json: { status: 400, name: 'validation_error' },
  invalid_request: { status: 400, name: 'validation_error' },
  invalid_idempotency_key: { status: 400, name: 'invalid_idempotency_key' },
  missing_api_key: { status: 401, name: 'missing_api_key' },
  invalid_api_key: { status: 401, name: 'invalid_api_key' },
  restricted_api_key: { status: 401, name: 'restricted_api_key' },
  not_found: { status: 404, name: 'not_found' },
  method_not_allowed: { status: 405, name: 'method_not_allowed' },
  invalid_idempotent_request: { status: 409, name: 'invalid_idempotent_request' },
  request_timeout: { status: 408, name: 'validation_error' },
  request_too_large: { status: 413, name: 'validation_error' },
  expectation_failed: { status: 417, name: 'validation_error' },
  validation_error: { status: 422, name: 'validation_error' },
  missing_required_field: { status: 422, name: 'missing_required_field' },
  invalid_attachment: { status: 422, name: 'invalid_attachment' },
  // The contract has no 409 for a batch, and the name is what clients look at.
  invalid_idempotent_batch: { status: 422, name: 'invalid_idempotent_request' },
  email_not_scheduled: { status: 422, name: 'validation_error' },
  nothing_to_release: { status: 422, name: 'validation_error' },
  message_missing: { status: 422, name: 'validation_error' },
  invalid_parameter: { status: 422, name: 'invalid_parameter' },
  domain_not_verified: { status: 422, name: 'validation_error' },
  domain_exists: { status: 422, name: 'validation_error' },
  domain_taken: { status: 422, name: 'validation_error' },
  invalid_region: { status: 422, name: 'invalid_region' },
  alias_taken: { status: 422, name: 'validation_error' },
  template_not_published: { status: 422, name: 'validation_error' },
  receiving_disabled: { status: 422, name: 'validation_error' },
  forwarding_loop: { status: 422, name: 'validation_error' },
  route_exists: { status: 409, name: 'validation_error' },
  rule_exists: { status: 409, name: 'validation_error' },
  rate_limit_exceeded: { status: 429, name: 'rate_limit_exceeded' },
  headers_too_large: { status: 431, name: 'validation_error' },
  internal_server_error: { status: 500, name: 'internal_server_error' },
  service_unavailable: { status: 503, name: 'service_unavailable' },
} as const satisfies Record<string, Kind>;

export type RefusalCode = keyof typeof kinds;

/** One thing that is wrong with the request. */
export interface Issue {
  /** Where: a field such as `to.1` or `headers.X-Id`, a query parameter, or `body`. */
  readonly path: string;
  /** What to fix, as a sentence. */
  readonly message: string;
}

export class Refusal extends Error {
  override readonly name = 'Refusal';
  readonly code: RefusalCode;
  readonly issues: readonly Issue[];
  /** Seconds until it is worth trying again; sent as Retry-After. */
  readonly retryAfterSeconds: number | null;

  constructor(
    code: RefusalCode,
    message: string,
    options: { issues?: readonly Issue[]; retryAfterSeconds?: number } = {},
  ) {
    super(message);
    this.code = code;
    this.issues = options.issues ?? [];
    this.retryAfterSeconds = options.retryAfterSeconds ?? null;
  }

  get status(): number {
    return kinds[this.code].status;
  }

  /** The `name` of the envelope. */
  get errorName(): string {
    return kinds[this.code].name;
  }
}

const ISSUES_MAX = 100;
/** Paths hold keys of the caller's own making. */
const ISSUE_PATH_MAX = 200;
const ISSUE_MESSAGE_MAX = 500;

const clip = (text: string, max: number): string =>
  text.length > max ? `${text.slice(0, max).toWellFormed()}…` : text;

/** The refusal of a request whose fields are wrong: the first issue is the message, the first hundred are listed. */
export function refuseFields(
  issues: readonly Issue[],
  code: RefusalCode = 'validation_error',
): Refusal {
  const listed = issues.slice(0, ISSUES_MAX).map(({ path, message }) => ({
    path: clip(path, ISSUE_PATH_MAX),
    message: clip(message, ISSUE_MESSAGE_MAX),
  }));
  const [first] = listed;
  if (first === undefined) throw new Error('a refusal needs an issue');
  return new Refusal(code, first.message, { issues: listed });
}

/** Worth a few tries by then, and not yet a timeout at the caller. */
const RETRY_AFTER_SECONDS = 5;

/** The refusal for an error that says the database or the blob store is away; null for every other error. */
export function refuseUnavailable(error: unknown): Refusal | null {
  if (!isDatabaseUnavailable(error)) return null;
  return new Refusal(
    'service_unavailable',
    isBlobsUnavailable(error)
      ? 'The store of large messages cannot be reached right now; try again in a few seconds.'
      : 'The database cannot be reached right now; try again in a few seconds.',
    { retryAfterSeconds: RETRY_AFTER_SECONDS },
  );
}
