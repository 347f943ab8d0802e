// The HTTP edge: one express app. Every API request passes the same gate in the same order: known path (404),
// method (405), credential (401), what the key may do (401), rate (429), body (400, 413); then tsoa's
// routes check the fields (422) and call a verb. Nothing of a body is looked at for a caller we do not know.
import express, { type NextFunction, type Request, type Response } from 'express';
import type { Caller } from '../access/keys.ts';
import type { Rate, RateLimiter } from '../access/rate-limit.ts';
import { Refusal } from '../access/refusal.ts';
import type { RequestLogWriter } from '../access/request-log.ts';
import type { Logger } from '../log.ts';
import { createBatchSifter } from './batch-items.ts';
import { bearerToken, restriction, setCaller } from './authenticate.ts';
import { createBodyBudget } from './body-budget.ts';
import { BODIES_MAX_BYTES, BODY_MAX_BYTES, createBodyReader } from './body.ts';
import { setCommonHeaders } from './common-headers.ts';
import { measure } from './measured.ts';
import { createErrorHandler, sendRefusal } from './envelope.ts';
import type { Answerer } from './front-door.ts';
import { addHealth, HEALTH_PATHS, type HealthOptions } from './health.ts';
import { addReference, readOpenApi, REFERENCE_PATHS } from './reference.ts';
import { createLinkHandler, LINK_ROUTE } from './links.ts';
import { addTracking, TRACKING_ROUTES } from './tracking.ts';
import { addPreferences } from './preferences.ts';
import { logAnswer, noteBody } from './request-log.ts';
import { createRouteTable } from './routes.ts';
import { RegisterRoutes } from './routes.gen.ts';
import { openSpool } from './spool.ts';
import type { Verbs } from './verbs.ts';
import { addWellKnown, WELL_KNOWN_ROUTES, type WellKnown } from './well-known.ts';

export interface AppOptions extends HealthOptions {
  readonly verbs: Verbs;
  readonly wellKnown: WellKnown;
  readonly log: Logger;
  readonly authenticate: (token: string) => Promise<Caller | null>;
  readonly limiter: RateLimiter;
  readonly requestLog: Pick<RequestLogWriter, 'record'>;
  /** For large attachments while their request lasts; nobody else writes there. */
  readonly spoolFolder: string;
}

const SHOWN_PATH_MAX = 200;

/** Of what needs no key. */
const OPEN_METHODS = ['GET', 'HEAD'];

export function createApp(options: AppOptions): Answerer {
  const app = express();
  app.disable('x-powered-by');
  app.disable('etag');
  app.enable('case sensitive routing');
  app.set('query parser', 'simple');
  app.locals['verbs'] = options.verbs;

  app.use((request, response, next) => {
    setCommonHeaders(request, response);
    measure(request, response, next);
  });
  const open = express.Router({ caseSensitive: true });
  addHealth(open, options);
  addReference(open);
  open.get('/', (_request, response) => {
    response.redirect('/docs');
  });
  addTracking(open, { tracking: options.verbs.tracking, limiter: options.limiter });
  addPreferences(open, {
    preferences: options.verbs.preferences,
    policy: options.verbs.preferencePolicy,
    limiter: options.limiter,
  });
  addWellKnown(open, options);
  const { links, openers } = options.verbs;
  open.get(LINK_ROUTE, createStrangerLimit(options.limiter), createLinkHandler({ links, openers }));
  const openPaths = [
    ...HEALTH_PATHS,
    ...REFERENCE_PATHS,
    ...TRACKING_ROUTES,
    ...WELL_KNOWN_ROUTES,
    LINK_ROUTE,
    '/',
  ];
  open.all(openPaths, (_request, response) => {
    response.setHeader('allow', OPEN_METHODS.join(', '));
    sendRefusal(response, new Refusal('method_not_allowed', 'Use GET here.'));
  });
  app.use(open);

  const api = express.Router({ caseSensitive: true });
  api.use(createGate(options));
  // Programs that forget the content type mean JSON too; nothing else is spoken here.
  api.use(createBodyReader(createBodyBudget(BODIES_MAX_BYTES), openSpool(options.spoolFolder)));
  api.use(noteBody);
  const routes = express.Router({ caseSensitive: true });
  RegisterRoutes(routes);
  api.use(routes, createBatchSifter(routes));
  app.use('/api', renameProperties, api);
  app.use('/', api);
  app.use(createErrorHandler(options.log));
  return (request, response) => {
    // Reached where no handler was: a request target that has no path (`GET http:// HTTP/1.1`).
    app(request as Request, response as Response, () => {
      if (response.headersSent) {
        response.destroy(); // half an answer is out: only closing the connection is honest
        return;
      }
      setCommonHeaders(request, response);
      sendRefusal(response, new Refusal('invalid_request', 'The request target has no path.'));
    });
  };
}

/** `/api/properties` is what `/api/contact-properties` was called first. */
function renameProperties(request: Request, _response: Response, next: NextFunction): void {
  request.url = request.url.replace(/^\/properties(?=[/?]|$)/, '/contact-properties');
  next();
}

function createGate(options: AppOptions) {
  const routes = createRouteTable(readOpenApi());
  return async (request: Request, response: Response, next: NextFunction): Promise<void> => {
    // Both mounts share this router; express has taken /api off already.
    const path = request.path;
    let methods = routes.methodsOf(path);
    const method = request.method === 'HEAD' ? 'GET' : request.method;
    const token = bearerToken(request);
    const stranger = request.socket.remoteAddress ?? '';
    let caller: Caller | null = null;
    try {
      if (token !== null && methods !== null) caller = await options.authenticate(token);
    } catch (error) {
      setRate(response, await options.limiter.takeStranger(stranger));
      throw error;
    }
    if (caller !== null && isForOperators(path) && !options.verbs.queue.isOperator(caller)) {
      methods = null; // for them it is as if it did not exist
      caller = null;
    }
    if (caller !== null) logAnswer(request, response, { caller, writer: options.requestLog });
    const rate = await (caller === null
      ? options.limiter.takeStranger(stranger)
      : options.limiter.take(caller.tenantId));
    setRate(response, rate);
    const refusal =
      methods === null
        ? new Refusal('not_found', `There is no ${shownPath(request)} here.`)
        : !methods.includes(method)
          ? new Refusal('method_not_allowed', `Use ${methods.join(' or ')} here.`)
          : caller === null
            ? (rate.refusal ?? refuseStranger(token)) // who guesses keys is told to wait
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

const isForOperators = (path: string): boolean => /^\/(queue|doctor)(\/|$)/.test(path);

/** A link is all that its holder has: requests are counted by address, with those of callers without a key. */
function createStrangerLimit(limiter: Pick<RateLimiter, 'takeStranger'>) {
  return async (request: Request, response: Response, next: NextFunction): Promise<void> => {
    const rate = await limiter.takeStranger(request.socket.remoteAddress ?? '');
    setRate(response, rate);
    if (rate.refusal === null) next();
    else sendRefusal(response, rate.refusal);
  };
}

function setRate(response: Response, { headers }: Rate): void {
  for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
}

const refuseStranger = (token: string | null): Refusal =>
  token === null
    ? new Refusal('missing_api_key', 'Missing API key: send `Authorization: Bearer re_…`.')
    : new Refusal('invalid_api_key', 'API key is invalid.');

function shownPath(request: Request): string {
  const path = request.originalUrl.split('?')[0] ?? '';
  return path.length > SHOWN_PATH_MAX ? `${path.slice(0, SHOWN_PATH_MAX)}…` : path;
}

const announcedBytes = (request: Request): number =>
  request.headers['transfer-encoding'] === undefined
    ? Number(request.headers['content-length'] ?? 0)
    : Infinity;
