// The HTTP edge: one express app. Every API request passes the same gate in the same order: known path (404),
// method (405), credential (401), what the key may do (401), rate (429), body (400, 413); then tsoa's
// routes check the fields (422) and call a verb. Nothing of a body is looked at for a caller we do not know.
import { randomUUID } from 'node:crypto';
import express, { type Express, type NextFunction, type Request, type Response } from 'express';
import helmet from 'helmet';
import type { Caller } from '../access/keys.ts';
import type { RateLimiter } from '../access/rate-limit.ts';
import { Refusal } from '../access/refusal.ts';
import type { Logger } from '../log.ts';
import { bearerToken, restriction, setCaller } from './authenticate.ts';
import { BODY_MAX_BYTES, createBodyReader } from './body.ts';
import { createErrorHandler, sendRefusal } from './envelope.ts';
import { createReference, readOpenApi } from './reference.ts';
import { createRouteTable } from './routes.ts';
import { RegisterRoutes } from './routes.gen.ts';
import type { Verbs } from './verbs.ts';

export interface AppOptions {
  readonly verbs: Verbs;
  readonly log: Logger;
  readonly authenticate: (token: string) => Promise<Caller | null>;
  readonly limiter: RateLimiter;
  /** What is missing for this process to work; empty when it is ready. */
  readonly missing: () => Promise<readonly { what: string; why: string }[]>;
}

const API_VERSION = '2026-05-06';
const SHOWN_PATH_MAX = 200;
const REQUEST_ID = /^[A-Za-z0-9._-]{1,64}$/;

export function createApp(options: AppOptions): Express {
  const app = express();
  app.disable('x-powered-by');
  app.disable('etag');
  app.set('query parser', 'simple');
  app.locals['verbs'] = options.verbs;

  app.use(identify);
  app.use(
    helmet({
      contentSecurityPolicy: {
        useDefaults: false,
        directives: { defaultSrc: ["'none'"], frameAncestors: ["'none'"], baseUri: ["'none'"] },
      },
      // Behind plain HTTP it would be ignored; TLS in front sets its own.
      strictTransportSecurity: false,
    }),
  );
  app.get('/health/live', (_request, response) => {
    response.json({ status: 'live' });
  });
  app.get('/health/ready', async (_request, response) => {
    const missing = await options.missing();
    response
      .status(missing.length === 0 ? 200 : 503)
      .json({ status: missing.length === 0 ? 'ready' : 'not_ready', missing });
  });
  app.use(createReference());
  app.get('/', (_request, response) => {
    response.redirect('/docs');
  });

  const api = express.Router();
  api.use(createGate(options));
  // Programs that forget the content type mean JSON too; nothing else is spoken here.
  api.use(...createBodyReader());
  RegisterRoutes(api);
  app.use('/api', api);
  app.use('/', api);
  app.use(createErrorHandler(options.log));
  return app;
}

/** Every answer says which request it answers and which contract it speaks. */
function identify(request: Request, response: Response, next: NextFunction): void {
  const given = request.headers['x-request-id'];
  const id = typeof given === 'string' && REQUEST_ID.test(given) ? given : randomUUID();
  response.setHeader('x-request-id', id);
  response.setHeader('mailstead-version', API_VERSION);
  response.setHeader('cache-control', 'no-store');
  next();
}

function createGate(options: AppOptions) {
  const routes = createRouteTable(readOpenApi());
  return async (request: Request, response: Response, next: NextFunction): Promise<void> => {
    // Both mounts share this router; express has taken /api off already.
    const path = request.path;
    const methods = routes.methodsOf(path);
    const method = request.method === 'HEAD' ? 'GET' : request.method;
    const token = bearerToken(request);
    const caller = token === null || methods === null ? null : await options.authenticate(token);
    const rate = await options.limiter.take(
      caller?.tenantId ?? `ip ${request.socket.remoteAddress ?? ''}`,
    );
    for (const [name, value] of Object.entries(rate.headers)) response.setHeader(name, value);
    const refusal =
      methods === null
        ? new Refusal('not_found', `There is no ${shownPath(request)} here.`)
        : !methods.includes(method)
          ? new Refusal('method_not_allowed', `Use ${methods.join(' or ')} here.`)
          : token === null
            ? new Refusal('missing_api_key', 'Missing API key: send `Authorization: Bearer re_…`.')
            : caller === null
              ? new Refusal('invalid_api_key', 'API key is invalid.')
              : (restriction(caller, method, path.replace(/\/$/, '')) ?? rate.refusal);
    if (refusal !== null) {
      if (refusal.code === 'method_not_allowed' && methods !== null) {
        response.setHeader('allow', methods.join(', '));
      }
      // Node reads past a body that nobody asked for, so that a caller who sends first and listens then gets to
      // hear this answer. More than an email can have ends the connection instead.
      if (announcedBytes(request) > BODY_MAX_BYTES) response.setHeader('connection', 'close');
      sendRefusal(response, refusal);
      return;
    }
    if (caller !== null) setCaller(request, caller);
    next();
  };
}

function shownPath(request: Request): string {
  const path = request.originalUrl.split('?')[0] ?? '';
  return path.length > SHOWN_PATH_MAX ? `${path.slice(0, SHOWN_PATH_MAX)}…` : path;
}

const announcedBytes = (request: Request): number =>
  request.headers['transfer-encoding'] === undefined
    ? Number(request.headers['content-length'] ?? 0)
    : Infinity;
