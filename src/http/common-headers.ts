// The headers that every answer has, whoever writes it: which request it answers, which contract it speaks,
// and what a browser may do with it (helmet).
import { randomUUID } from 'node:crypto';
import type { IncomingMessage, ServerResponse } from 'node:http';
import helmet from 'helmet';

const API_VERSION = '2026-05-06';
const REQUEST_ID = /^[A-Za-z0-9._-]{1,64}$/;

const protect = helmet({
  contentSecurityPolicy: {
    useDefaults: false,
    directives: { defaultSrc: ["'none'"], frameAncestors: ["'none'"], baseUri: ["'none'"] },
  },
  // Behind plain HTTP it would be ignored; TLS in front sets its own.
  strictTransportSecurity: false,
});

/** Sets them, once a request: a second call keeps the request's id. */
export function setCommonHeaders(request: IncomingMessage, response: ServerResponse): void {
  if (response.hasHeader('x-request-id')) return;
  const given = request.headers['x-request-id'];
  const id = typeof given === 'string' && REQUEST_ID.test(given) ? given : randomUUID();
  for (const [name, value] of identity(id)) response.setHeader(name, value);
  protect(request, response, () => undefined); // synchronous, and fails for no request
}

/** For an answer to what could not be read as a request; the browser has no part in that. */
export const headersWithoutRequest = (): readonly (readonly [string, string])[] => [
  ...identity(randomUUID()),
  ['x-content-type-options', 'nosniff'],
];

const identity = (id: string): readonly (readonly [string, string])[] => [
  ['x-request-id', id],
  ['mailstead-version', API_VERSION],
  ['cache-control', 'no-store'],
];
