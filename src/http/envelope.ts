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

/** What body-parser and express raise. */
interface HttpError extends Error {
  readonly type?: string;
  readonly status?: number;
  readonly limit?: number;
}

function toRefusal(error: unknown): Refusal {
  if (error instanceof Refusal) return error;
  if (error instanceof ValidateError) return fromFields(error.fields);
  const unavailable = refuseUnavailable(error);
  if (unavailable !== null) return unavailable;
  const { type, status, limit } = error as HttpError;
  switch (type) {
    case 'entity.parse.failed':
      return new Refusal('invalid_json', 'The request body is not valid JSON.');
    case 'entity.too.large':
      return new Refusal(
        'request_too_large',
        `The request body is too large; at most ${limit ?? 0} bytes are allowed.`,
      );
    case 'encoding.unsupported':
    case 'charset.unsupported':
      return new Refusal(
        'invalid_request',
        'The request body must be UTF-8, plain, gzip, deflate or br.',
      );
    case 'request.size.invalid':
    case 'request.aborted':
      return new Refusal(
        'invalid_request',
        'The request body ended early or has the wrong length.',
      );
    default:
  }
  if (error instanceof URIError || (status !== undefined && status >= 400 && status < 500)) {
    return new Refusal('invalid_request', 'The request cannot be understood.');
  }
  return new Refusal(
    'internal_server_error',
    'Something went wrong on our side. The request id helps the operator to find it in the log.',
  );
}

/** tsoa's findings in our words. */
function fromFields(fields: FieldErrors): Refusal {
  const issues = Object.entries(fields).map(([key, { message }]): Issue => {
    const path = key.replace(/^(requestBody|body|query|path)\.?/, '').replace(/^\$/, '') || 'body';
    return { path, message: explain(path, message) };
  });
  const isMissing = Object.values(fields).some(({ message }) => message.endsWith(' is required'));
  return refuseFields(issues, isMissing ? 'missing_required_field' : 'validation_error');
}

function explain(path: string, message: string): string {
  const name = `\`${path}\``;
  if (message.endsWith(' is required')) {
    return path === 'body' ? 'Missing request body.' : `Missing ${name} field.`;
  }
  const rules: readonly (readonly [RegExp, string])[] = [
    [/^invalid string value/, 'must be a string'],
    [/^invalid (integer|float|double|long) number/, 'must be a number'],
    [/^invalid boolean/, 'must be true or false'],
    [/^invalid array/, 'must be an array'],
    [/^invalid object/, 'must be an object'],
    [/^No matching model found in additionalProperties/, 'must be an object with string values'],
    [/^min (-?\d+)$/, 'must be at least $1'],
    [/^max (-?\d+)$/, 'must be at most $1'],
    [/^maxItems (\d+)/, 'has too many items; at most $1 are allowed'],
    [/^minItems (\d+)/, 'has too few items; at least $1 are needed'],
    [/^Could not match (the )?(union|intersection)/, 'has the wrong type'],
  ];
  for (const [pattern, words] of rules) {
    const match = pattern.exec(message);
    if (match !== null)
      return `${name} ${words.replace('$1', match[1] ?? '')}${expectation(message)}.`;
  }
  return `${name} is not valid.`;
}

/** A union that failed lists what each member wanted. */
function expectation(message: string): string {
  if (!message.startsWith('Could not match')) return '';
  const wanted = [
    ...(message.includes('invalid string value') ? ['a string'] : []),
    ...(message.includes('invalid array') ? ['an array of strings'] : []),
    ...(message.includes('invalid boolean') ? ['true or false'] : []),
    ...(/invalid (integer|float)/.test(message) ? ['a number'] : []),
    ...(message.includes('invalid object') ? ['an object'] : []),
  ];
  return wanted.length === 0 ? '' : `; it must be ${wanted.join(' or ')}`;
}
