// What every answer of the API promises, whatever was asked: the headers, and for a refusal the whole envelope.
import * as assert from 'uvu/assert';
import type { Answer } from '../support/app.ts';

export interface Refused {
  readonly status: number;
  readonly code: string;
  /** The paths of all issues in their order; absent: an envelope without details. */
  readonly paths?: readonly string[];
  /** What the message says. */
  readonly says?: RegExp;
}

/** Resend's names (contract, errors), and service_unavailable. */
const NAMES = new Set([
  'invalid_idempotency_key',
  'validation_error',
  'missing_api_key',
  'restricted_api_key',
  'invalid_api_key',
  'not_found',
  'method_not_allowed',
  'invalid_idempotent_request',
  'concurrent_idempotent_requests',
  'invalid_attachment',
  'invalid_from_address',
  'invalid_access',
  'invalid_parameter',
  'invalid_region',
  'missing_required_field',
  'monthly_quota_exceeded',
  'daily_quota_exceeded',
  'rate_limit_exceeded',
  'security_error',
  'application_error',
  'internal_server_error',
  'service_unavailable',
]);
/** Codes that are finer than their name. */
const NAME_OF: Readonly<Record<string, string>> = {
  invalid_json: 'validation_error',
  invalid_request: 'validation_error',
  request_too_large: 'validation_error',
  headers_too_large: 'validation_error',
  expectation_failed: 'validation_error',
  domain_not_verified: 'validation_error',
  domain_exists: 'validation_error',
  domain_taken: 'validation_error',
  invalid_idempotent_batch: 'invalid_idempotent_request',
  email_not_scheduled: 'validation_error',
  nothing_to_release: 'validation_error',
  message_missing: 'validation_error',
  alias_taken: 'validation_error',
  template_not_published: 'validation_error',
  receiving_disabled: 'validation_error',
  forwarding_loop: 'validation_error',
  route_exists: 'validation_error',
  rule_exists: 'validation_error',
};
/** Stacks, files, SQL, drivers, hosts. */
const INTERNAL =
  /node_modules|node:|\n\s*at |\.[cm]?[jt]s\b|\/(work|src|home|tmp|root)\/|\b(select|insert|update) .*\b(from|into|set)\b|syntax|postgres|sqlstate|ECONN|127\.0\.0\.1|::1|localhost/i;
const ISO_MS = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/;

/** The headers of every answer, even to what is no request. */
export function assertCommonHeaders({ headers }: Pick<Answer, 'headers'>): void {
  assert.is(headers.get('content-type'), 'application/json; charset=utf-8');
  assert.match(headers.get('x-request-id') ?? '', /^[A-Za-z0-9._-]{1,64}$/);
  assert.is(headers.get('mailstead-version'), '2026-05-06');
  assert.is(headers.get('cache-control'), 'no-store');
  assert.is(headers.get('x-content-type-options'), 'nosniff');
  assert.is(headers.get('x-powered-by'), null);
}

/** The headers of every API answer. */
export function assertHeaders(answer: Pick<Answer, 'headers'>): void {
  assertCommonHeaders(answer);
  const { headers } = answer;
  for (const name of ['ratelimit-limit', 'ratelimit-remaining', 'ratelimit-reset']) {
    assert.match(headers.get(name) ?? `no ${name}`, /^\d+$/);
  }
  assert.match(headers.get('ratelimit-policy') ?? '', /^\d+;w=\d+$/);
}

/** The whole envelope of a refusal, and nothing else. */
export function assertRefused(answer: Answer<unknown>, expected: Refused): void {
  const { status, code, paths } = expected;
  const body = answer.body as Record<string, unknown>;
  const shown = JSON.stringify(body);
  assert.is(answer.status, status, shown);
  assertHeaders(answer);
  assert.equal(
    Object.keys(body).toSorted(),
    ['code', 'message', 'name', 'statusCode', ...(paths ? ['details'] : [])].toSorted(),
    shown,
  );
  assert.is(body['statusCode'], status);
  assert.is(body['code'], code, shown);
  assert.is(body['name'], NAME_OF[code] ?? code, shown);
  assert.ok(NAMES.has(String(body['name'])), shown);
  const message = String(body['message']);
  assertSentence(message);
  if (expected.says !== undefined) assert.match(message, expected.says);
  assert.not.match(shown, INTERNAL);
  if (status === 401) assert.match(answer.headers.get('www-authenticate') ?? '', /^Bearer /);
  if (paths === undefined) return;
  const details = body['details'] as { issues: { path: string; message: string }[] };
  assert.equal(Object.keys(details), ['issues'], shown);
  assert.equal(
    details.issues.map(({ path }) => path),
    paths,
    shown,
  );
  assert.is(details.issues[0]?.message, message, 'the first issue is the message');
  for (const issue of details.issues) {
    assert.equal(Object.keys(issue).toSorted(), ['message', 'path']);
    assertSentence(issue.message);
    if (expected.says === undefined) assert.ok(namesField(issue), shown);
  }
}

/** Instants as the API writes them. */
export function assertInstant(value: unknown): void {
  assert.match(String(value), ISO_MS);
}

function assertSentence(message: string): void {
  assert.match(message, /^[A-Z`]/);
  assert.match(message, /^[A-Z][A-Za-z ]+ not found$|\.$/);
  assert.ok(message.length <= 500, `${message.length} characters are no sentence`);
}

/** By its path, or for a header by its name. */
function namesField({ path, message }: { path: string; message: string }): boolean {
  if (!path.startsWith('headers.')) return message.includes(`\`${path}\``);
  return message.includes(path.slice('headers.'.length)) || message.startsWith('A header name ');
}
