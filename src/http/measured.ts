// Counts requests and times them, whoever answers them; and begins the span of each, where traces are asked for.
import type { NextFunction, Request, Response } from 'express';
import { httpDuration, httpRequests, routeName } from '../telemetry/instruments.ts';
import { beginSpan, inside, isTracing, placeOfCaller, type Span } from '../telemetry/trace.ts';
import { requestIdOf } from './envelope.ts';

const METHODS = new Set(['GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE', 'OPTIONS']);
const NO_ROUTE = 'none';

const BEGUN = Symbol('when it began');
const SPAN = Symbol('its span');
type MeasuredResponse = Response & { [BEGUN]?: number; [SPAN]?: Span };

/** Goes first. */
export function measure(request: Request, response: MeasuredResponse, next: NextFunction): void {
  response[BEGUN] = performance.now();
  // The same function for all, for the reason that request-log.ts gives.
  response.once('close', noteEnd);
  if (!isTracing()) return next();
  const span = beginSpan(request.method, {
    kind: 'server',
    parent: placeOfCaller(headerOf(request, 'traceparent')),
    attributes: {
      'http.request.method': methodOf(request),
      'mailstead.request_id': requestIdOf(response),
    },
  });
  if (span === null) return next();
  response[SPAN] = span;
  inside(span, next);
}

function noteEnd(this: MeasuredResponse): void {
  const request = this.req;
  const method = methodOf(request);
  const route = routeOf(request);
  const status = this.writableFinished ? `${Math.floor(this.statusCode / 100)}xx` : 'left';
  httpRequests.inc({ route, method, status });
  httpDuration.observe({ route, method }, (performance.now() - (this[BEGUN] ?? 0)) / 1_000);
  const span = this[SPAN];
  if (span === undefined) return;
  span.set({ 'http.route': route, 'http.response.status_code': this.statusCode });
  span.end(this.statusCode >= 500 ? `${this.statusCode}` : undefined);
}

const methodOf = ({ method }: Request): string => (METHODS.has(method) ? method : 'other');

/** `/emails/:id` is `/emails/{id}`, as in docs/openapi.json. */
function routeOf(request: Request): string {
  const path = (request.route as { readonly path?: unknown } | undefined)?.path;
  if (typeof path !== 'string') return NO_ROUTE;
  return routeName(path.replace(/:(\w+)/g, '{$1}'));
}

const headerOf = ({ headers }: Request, name: string): string | undefined => {
  const value = headers[name];
  return typeof value === 'string' ? value : undefined;
};
