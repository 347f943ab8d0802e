// The error envelope: the one form in which every failure leaves the API, whatever raised it. Only a
// Refusal speaks for itself; everything else becomes a generic message and a line in the log.
import type { ErrorRequestHandler, Response } from 'express';
import { ValidateError, type FieldErrors } from '@tsoa/runtime';
import { Refusal, refuseFields, refuseUnavailable, type Issue } from '../access/refusal.ts';
import type { Logger } from '../log.ts';

/** What an error answer holds. */
export interface ErrorEnvelope {
  /** The kind of error; one of Resend's names. */
  name: string;
  /** The same or something finer, for programs. */
  code: string;
  /** One sentence that says what to fix. */
  message: string;
  /** The HTTP status. */
  statusCode: number;
  /** What else is known; for validation every issue, each with its path. */
  details?: { issues: Issue[] };
}

export function sendRefusal(response: Response, refusal: Refusal): void {
  const envelope: ErrorEnvelope = {
    name: refusal.errorName,
    code: refusal.code,
    message: refusal.message,
    statusCode: refusal.status,
    ...(refusal.issues.length > 0 ? { details: { issues: [...refusal.issues] } } : {}),
  };
  if (refusal.retryAfterSeconds !== null) {
    response.setHeader('retry-after', String(refusal.retryAfterSeconds));
  }
  if (refusal.status === 401) response.setHeader('www-authenticate', 'Bearer realm="Mailstead"');
  response.status(refusal.status).json(envelope);
}

/** The last handler of the app. */
export function createErrorHandler(log: Logger): ErrorRequestHandler {
  return (error: unknown, request, response, next) => {
    const refusal = toRefusal(error);
    if (refusal.status >= 500) {
      log.error(
        { err: error, request_id: requestIdOf(response), path: request.path },
        'request failed',
      );
    }
    if (response.headersSent) {
      next(error); // half an answer is out: only closing the connection is honest
      return;
    }
    // The rest of a body that was not read would be taken for the next request.
    if (refusal.status === 413) response.setHeader('connection', 'close');
    sendRefusal(response, refusal);
  };
}

export const requestIdOf = (response: Response): string =>
  String(response.getHeader('x-request-id') ?? '');

/** What body-parser, zlib and express raise. */
interface HttpError extends Error {
  readonly type?: string;
  readonly status?: number;
  readonly limit?: number;
  readonly code?: string;
}

function toRefusal(error: unknown): Refusal {
  if (error instanceof Refusal) return error;
  if (error instanceof ValidateError) return fromFields(error.fields);
  const unavailable = refuseUnavailable(error);
  if (unavailable !== null) return unavailable;
  const { type, status, limit, code } = error as HttpError;
  switch (type) {
    case 'entity.too.large':
      return new Refusal(
        'request_too_large',
        `The request body is too large; at most ${limit ?? 0} bytes are allowed.`,
      );
    case 'encoding.unsupported':
      return new Refusal(
        'invalid_request',
        'The content encoding is not known; send the request body plain, or as gzip, deflate or br.',
      );
    case 'request.size.invalid':
    case 'request.aborted':
      return new Refusal(
        'invalid_request',
        'The request body ended early or has the wrong length.',
      );
    default:
  }
  const isRequest = status !== undefined && status >= 400 && status < 500;
  if (isRequest && /^(Z|ZSTD|ERR)_/.test(code ?? '')) {
    return new Refusal(
      'invalid_request',
      'The request body is not what its content encoding says.',
    );
  }
  if (error instanceof URIError) {
    return new Refusal(
      'invalid_request',
      'The path is not valid UTF-8 in percent-encoding; write a percent sign as `%25`.',
    );
  }
  if (isRequest) return new Refusal('invalid_request', 'The request cannot be understood.');
  return new Refusal(
    'internal_server_error',
    'Something went wrong on our side. The request id helps the operator to find it in the log.',
  );
}

/** tsoa's findings in our words. */
function fromFields(fields: FieldErrors): Refusal {
  const issues = Object.entries(fields).flatMap(([key, { message, value }]) =>
    explain(toPath(key), message, value),
  );
  const isMissing = issues.some(({ message }) => message.startsWith('Missing '));
  return refuseFields(issues, isMissing ? 'missing_required_field' : 'validation_error');
}

/** `body.to` -> `to`, `tags.$0.name` -> `tags.0.name`. */
function toPath(key: string): string {
  const path = key.replace(/^(requestBody|body|query|path)(\.|$)/, '');
  return path.replace(/\.\$(?=\d)/g, '.') || 'body';
}

const RULES: readonly (readonly [RegExp, string])[] = [
  [/^invalid string value/, 'must be a string'],
  [/^invalid (integer|float|double|long) number/, 'must be a number'],
  [/^invalid boolean/, 'must be true or false'],
  [/^invalid array/, 'must be an array'],
  [/^invalid object/, 'must be an object'],
  [/^min (-?\d+)$/, 'must be at least $1'],
  [/^max (-?\d+)$/, 'must be at most $1'],
  [/^maxItems (\d+)/, 'has too many items; at most $1 are allowed'],
  [/^minItems (\d+)/, 'has too few items; at least $1 are needed'],
  [/^should be one of the following; \[(.+)\]$/, 'must be one of $1'],
];

function explain(path: string, message: string, value: unknown): readonly Issue[] {
  const name = `\`${path}\``;
  if (message.endsWith(' is required')) {
    return [
      { path, message: path === 'body' ? 'Missing request body.' : `Missing ${name} field.` },
    ];
  }
  if (message.startsWith(UNION)) return explainUnion(path, message.slice(UNION.length), value);
  for (const [pattern, words] of RULES) {
    const match = pattern.exec(message);
    if (match !== null) {
      return [{ path, message: `${name} ${words.replace('$1', match[1] ?? '')}.` }];
    }
  }
  return [{ path, message: `${name} is not valid.` }];
}

const UNION = 'Could not match the union against any of the items. Issues: ';

/**
 * A union that failed lists what each of its members found. When one of them fits but for something inside,
 * that is what is wrong; otherwise the value is of none of the types.
 */
function explainUnion(path: string, found: string, value: unknown): readonly Issue[] {
  const members = (JSON.parse(found) as FieldErrors[]).map((fields) =>
    Object.entries(fields).map(([key, field]) => ({
      ...field,
      path: toPath(key),
      isItem: /\.\$\d/.test(key),
    })),
  );
  const isInside = (issue: { readonly path: string }): boolean => issue.path !== path;
  const fitting = members.find(
    (issues) =>
      issues.every(isInside) &&
      // tsoa takes what is not an array for an array of one.
      (Array.isArray(value) || !issues.some(({ isItem }) => isItem)),
  );
  if (fitting !== undefined) {
    return fitting.flatMap((issue) => explain(issue.path, issue.message, issue.value));
  }
  const wanted = members.flatMap(([first]) => {
    const kind = TYPES.find(([pattern]) => pattern.test(first?.message ?? ''));
    if (first === undefined || kind === undefined) return [];
    return [isInside(first) ? `an array of ${kind[2]}` : kind[1]];
  });
  const words = wanted.length === 0 ? 'has the wrong type' : `must be ${wanted.join(' or ')}`;
  return [{ path, message: `\`${path}\` ${words}.` }];
}

/** What tsoa says, and the type it wanted: one, and several of them. */
const TYPES: readonly (readonly [RegExp, string, string])[] = [
  [/^invalid string value/, 'a string', 'strings'],
  [/^invalid (integer|float|double|long) number/, 'a number', 'numbers'],
  [/^invalid boolean/, 'true or false', 'booleans'],
  [/^invalid array/, 'an array', 'arrays'],
  [/^invalid object/, 'an object', 'objects'],
];
