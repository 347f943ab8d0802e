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

/** Writes one entry when this request is answered. */
export function logAnswer(
  request: Request,
  response: Response,
  d: { readonly caller: Caller; readonly writer: Pick<RequestLogWriter, 'record'> },
): void {
  const id = newLogId();
  const startedAt = performance.now();
  const { method, path } = request;
  let answer: { readonly body: unknown } | null = null;
  let isDone = false;

  const json = response.json.bind(response);
  response.json = (body: unknown) => {
    answer ??= { body };
    return json(body);
  };
  const end = response.end.bind(response) as (...given: unknown[]) => Response;
  response.end = (...given: unknown[]) => {
    const ended = end(...given);
    if (!isDone) {
      isDone = true;
      d.writer.record({
        caller: d.caller,
        id,
        method,
        path,
        userAgent: request.headers['user-agent'] ?? null,
        requestId: requestIdOf(response),
        durationMs: Math.round(performance.now() - startedAt),
        requestBody: bodies.get(request),
        sizeOf: (placeholder) => spooledOf(request).get(placeholder)?.sizeBytes ?? null,
        responseStatus: response.statusCode,
        responseBody: answer === null ? jsonOf(given[0]) : answer.body,
      });
    }
    return ended;
  };
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
