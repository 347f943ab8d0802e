// What the request log learns of a request: taken where the answer ends, whoever wrote it. Answers that are
// not JSON are not kept.
import type { NextFunction, Request, Response } from 'express';
import type { Caller } from '../access/keys.ts';
import { LOGGED_BODY_MAX_BYTES } from '../access/redact.ts';
import { newLogId, type RequestLogWriter } from '../access/request-log.ts';
import { requestIdOf } from './envelope.ts';
import { spooledOf } from './spool.ts';

const bodies = new WeakMap<object, unknown>();

/** Keeps the body as it arrived; a permissive batch changes it. */
export function noteBody(request: Request, _response: Response, next: NextFunction): void {
  bodies.set(request, request.body);
  next();
}

/** The texts of a form, which its controller reads. */
export function noteFields(request: Request, fields: ReadonlyMap<string, string>): void {
  bodies.set(request, Object.fromEntries(fields));
}

/** What is known of a request before it is answered. */
interface Noted {
  readonly caller: Caller;
  readonly writer: Pick<RequestLogWriter, 'record'>;
  readonly id: string;
  readonly startedAt: number;
  readonly method: string;
  readonly path: string;
  answer: { readonly body: unknown } | null;
  isDone: boolean;
}
const NOTED = Symbol('what the request log knows');
type NotedResponse = Response & { [NOTED]?: Noted };

/** Writes one entry when this request is answered. */
export function logAnswer(
  request: Request,
  response: NotedResponse,
  d: { readonly caller: Caller; readonly writer: Pick<RequestLogWriter, 'record'> },
): void {
  const { method, path } = request;
  const id = newLogId();
  const startedAt = performance.now();
  response[NOTED] = { ...d, id, startedAt, method, path, answer: null, isDone: false };
  // The same two functions for all: with closures of its own that know it, a response and all it holds outlives young
  // garbage collections, and the process needs twice the memory.
  response.json = jsonAndNote;
  response.end = endAndRecord as Response['end'];
}

/** What the response is without ours. */
const plainly = (response: NotedResponse): Response => Object.getPrototypeOf(response) as Response;

function jsonAndNote(this: NotedResponse, body: unknown): Response {
  const noted = this[NOTED];
  if (noted !== undefined) noted.answer ??= { body };
  return plainly(this).json.call(this, body);
}

function endAndRecord(this: NotedResponse, ...given: unknown[]): Response {
  const end = plainly(this).end as (...args: unknown[]) => Response;
  const ended = end.apply(this, given);
  const noted = this[NOTED];
  if (noted === undefined || noted.isDone) return ended;
  noted.isDone = true;
  const request = this.req;
  noted.writer.record({
    caller: noted.caller,
    id: noted.id,
    method: noted.method,
    path: noted.path,
    userAgent: request.headers['user-agent'] ?? null,
    requestId: requestIdOf(this),
    durationMs: Math.round(performance.now() - noted.startedAt),
    requestBody: bodies.get(request),
    sizeOf: (placeholder) => spooledOf(request).get(placeholder)?.sizeBytes ?? null,
    responseStatus: this.statusCode,
    responseBody: noted.answer === null ? jsonOf(given[0]) : noted.answer.body,
  });
  return ended;
}

/** What was written as text at once: refusals. */
function jsonOf(chunk: unknown): unknown {
  const isText = typeof chunk === 'string' || Buffer.isBuffer(chunk);
  if (!isText || chunk.length === 0 || chunk.length > LOGGED_BODY_MAX_BYTES) return undefined;
  try {
    return JSON.parse(chunk.toString()) as unknown;
  } catch {
    return undefined;
  }
}
