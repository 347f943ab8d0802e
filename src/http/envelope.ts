// The error envelope: the one form in which every failure leaves the API, whatever raised it. Only a
// Refusal speaks for itself; everything else becomes a generic message and a line in the log.
import type { ServerResponse } from 'node:http';
import type { ErrorRequestHandler } from 'express';
import { ValidateError, type FieldErrors } from '@tsoa/runtime';
import { withoutSecrets } from '../access/redact.ts';
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

export const ENVELOPE_TYPE = 'application/json; charset=utf-8';

export function envelopeOf(refusal: Refusal): ErrorEnvelope {
  return {
    name: refusal.errorName,
    code: refusal.code,
    message: refusal.message,
    statusCode: refusal.status,
    ...(refusal.issues.length > 0 ? { details: { issues: [...refusal.issues] } } : {}),
  };
}

export function sendRefusal(response: ServerResponse, refusal: Refusal): void {
  if (refusal.retryAfterSeconds !== null) {
    response.setHeader('retry-after', String(refusal.retryAfterSeconds));
  }
  if (refusal.status === 401) response.setHeader('www-authenticate', 'Bearer realm="Mailstead"');
  const body = Buffer.from(JSON.stringify(envelopeOf(refusal)));
  response.statusCode = refusal.status;
  response.setHeader('content-type', ENVELOPE_TYPE);
  response.setHeader('content-length', body.length);
  response.end(body);
}

/** The last handler of the app. */
export function createErrorHandler(log: Logger): ErrorRequestHandler {
  return (error: unknown, request, response, next) => {
    const refusal = toRefusal(error);
    const about = { request_id: requestIdOf(response), path: withoutSecrets(request.path) };
    if (refusal.status === 503) {
      log.warn({ reason: (error as Error).message, ...about }, 'request refused for now');
    } else if (refusal.status >= 500) {
      log.error({ err: error, ...about }, 'request failed');
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

export const requestIdOf = (response: ServerResponse): string =>
  String(response.getHeader('x-request-id') ?? '');

function toRefusal(error: unknown): Refusal {
  if (error instanceof Refusal) return error;
  if (error instanceof ValidateError) return refuseShape(error.fields);
  const unavailable = refuseUnavailable(error);
  if (unavailable !== null) return unavailable;
  if (error instanceof URIError) {
    return new Refusal(
      'invalid_request',
      'The path is not valid UTF-8 in percent-encoding; write a percent sign as `%25`.',
    );
  }
  // What express raises.
  const { status } = error as { readonly status?: number };
  const isRequest = status !== undefined && status >= 400 && status < 500;
  if (isRequest) return new Refusal('invalid_request', 'The request cannot be understood.');
  return new Refusal(
    'internal_server_error',
    'Something went wrong on our side. The request id helps the operator to find it in the log.',
  );
}

/** tsoa's findings in our words. */
export function refuseShape(fields: FieldErrors): Refusal {
  const issues = Object.entries(fields).flatMap(([key, { message }]) =>
    explain(toPath(key), message),
  );
  const isMissing = issues.some(({ message }) => message.startsWith('Missing '));
  return refuseFields(issues, isMissing ? 'missing_required_field' : 'validation_error');
}

/** `body.to` -> `to`, `tags.$0.name` -> `tags.0.name`. */
function toPath(key: string): string {
  const path = key.replace(/^(requestBody|body|query|path)(\.|$)/, '');
  return path.replace(/(^|\.)\$(?=\d)/g, '$1') || 'body';
}

const CHOICE = /^should be one of the following; \[(.+)\]$/;
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
  [CHOICE, 'must be one of $1'],
];

function explain(path: string, message: string): readonly Issue[] {
  const name = `\`${path}\``;
  if (message.endsWith(' is required')) {
    return [
      { path, message: path === 'body' ? 'Missing request body.' : `Missing ${name} field.` },
    ];
  }
  if (message.startsWith(UNION)) return explainUnion(path, message.slice(UNION.length));
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
function explainUnion(path: string, found: string): readonly Issue[] {
  const members = (JSON.parse(found) as FieldErrors[]).map((fields) =>
    Object.entries(fields).map(([key, field]) => ({ ...field, path: within(path, toPath(key)) })),
  );
  const fitting = members.find((issues) => issues.every((issue) => issue.path !== path));
  if (fitting !== undefined) {
    return fitting.flatMap((issue) => explain(issue.path, issue.message));
  }
  const kinds = members.flatMap(([first]) => {
    const kind = TYPES.find(([pattern]) => pattern.test(first?.message ?? ''));
    return kind === undefined ? [] : [kind[1]];
  });
  const choices = members.flatMap(([first]) => {
    const [, listed] = CHOICE.exec(first?.message ?? '') ?? [];
    return listed === undefined || listed === 'null' ? [] : [listed];
  });
  if (kinds.length === 0 && choices.length > 0) {
    return [{ path, message: `\`${path}\` must be one of ${choices.join(',')}.` }];
  }
  // Where one is enough, a list holds the same.
  const wanted = kinds.map((kind) =>
    kind === 'an array' && kinds.includes('a string') ? 'an array of strings' : kind,
  );
  const words = wanted.length === 0 ? 'has the wrong type' : `must be ${wanted.join(' or ')}`;
  return [{ path, message: `\`${path}\` ${words}.` }];
}

/** Inside a list tsoa forgets where the list itself is: `tags.0.name` of `3.tags` is `3.tags.0.name`. */
function within(outer: string, inner: string): string {
  const around = outer.split('.');
  const start = around.findIndex((_, index) =>
    `${inner}.`.startsWith(`${around.slice(index).join('.')}.`),
  );
  return [...around.slice(0, Math.max(start, 0)), inner].join('.');
}

/** What tsoa says, and the type it wanted. */
const TYPES: readonly (readonly [RegExp, string])[] = [
  [/^invalid string value/, 'a string'],
  [/^invalid (integer|float|double|long) number/, 'a number'],
  [/^invalid boolean/, 'true or false'],
  [/^invalid array/, 'an array'],
  [/^invalid object/, 'an object'],
];
