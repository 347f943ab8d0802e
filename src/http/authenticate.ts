// Who is calling. The gate in app.ts reads the bearer token before the body is read; tsoa asks here for
// what the gate found, so a route without the gate has no caller and stays closed.
import type { Request } from 'express';
import { Refusal } from '../access/refusal.ts';
import type { Caller } from '../access/keys.ts';

const callers = new WeakMap<object, Caller>();

/** Remembers who calls for the rest of this request. */
export function setCaller(request: Request, caller: Caller): void {
  callers.set(request, caller);
}

/** The bearer token, or null when there is none. RFC 6750 §2.1; the scheme is case-insensitive. */
export function bearerToken(request: Request): string | null {
  const match = /^Bearer +([^\s]+) *$/i.exec(request.headers.authorization ?? '');
  return match?.[1] ?? null;
}

/** What a key of this permission may not do; null: go on. */
export function restriction(caller: Caller, method: string, path: string): Refusal | null {
  if (caller.permission === 'full_access') return null;
  if (method === 'POST' && (path === '/emails' || path === '/emails/batch')) return null;
  return new Refusal('restricted_api_key', 'This API key can only send emails.');
}

/** tsoa's hook: resolves with the caller, or rejects with a refusal. */
export function expressAuthentication(request: Request, securityName: string): Promise<Caller> {
  const caller = callers.get(request);
  if (securityName === 'api_key' && caller !== undefined) return Promise.resolve(caller);
  return Promise.reject(new Refusal('missing_api_key', 'Missing API key.'));
}

/** Whose request it is; null before the gate. */
export const tenantOf = (request: Request): string | null => callers.get(request)?.tenantId ?? null;

/** The caller of a request that passed the gate. */
export function callerOf(request: Request): Caller {
  const caller = callers.get(request);
  if (caller === undefined) throw new Refusal('missing_api_key', 'Missing API key.');
  return caller;
}
