// The probes: of the app, and all that a process without the API answers.
import express, { type Request, type Response, type Router } from 'express';
import { Refusal } from '../access/refusal.ts';
import type { Logger } from '../log.ts';
import { setCommonHeaders } from './common-headers.ts';
import { createErrorHandler, sendRefusal } from './envelope.ts';
import type { Answerer } from './front-door.ts';

export interface HealthOptions {
  /** What is missing for this process to work; empty when it is ready. */
  readonly missing: () => Promise<readonly { what: string; why: string }[]>;
  /** What does not work as it should while everything asked of this process still does. */
  readonly degraded: () => Promise<readonly { what: string; why: string }[]>;
}

export const HEALTH_PATHS = ['/health/live', '/health/ready'];

export function addHealth(router: Router, options: HealthOptions): void {
  router.get('/health/live', (_request, response) => {
    response.json({ status: 'live' });
  });
  router.get('/health/ready', async (_request, response) => {
    const [missing, degraded] = await Promise.all([options.missing(), options.degraded()]);
    response
      .status(missing.length === 0 ? 200 : 503)
      .json({ status: missing.length === 0 ? 'ready' : 'not_ready', missing, degraded });
  });
}

/** For a process that leaves `api` out of its roles. */
export function createHealthApp(options: HealthOptions & { readonly log: Logger }): Answerer {
  const app = express();
  app.disable('x-powered-by');
  app.disable('etag');
  app.enable('case sensitive routing');
  app.use((request, response, next) => {
    setCommonHeaders(request, response);
    next();
  });
  const probes = express.Router({ caseSensitive: true });
  addHealth(probes, options);
  app.use(probes);
  app.use((request, response) => {
    // Nobody reads what comes with it.
    response.setHeader('connection', 'close');
    const isProbe = HEALTH_PATHS.includes(request.path);
    if (isProbe) response.setHeader('allow', 'GET, HEAD');
    sendRefusal(
      response,
      isProbe
        ? new Refusal('method_not_allowed', 'Use GET here.')
        : new Refusal('not_found', 'This process does not run the API; it answers probes only.'),
    );
  });
  app.use(createErrorHandler(options.log));
  return (request, response) => {
    app(request as Request, response as Response, () => response.destroy());
  };
}
