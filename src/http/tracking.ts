// GET /o/{token}.gif and GET /c/{token}: the pixel and the links of tracked emails, at whatever host they are asked for.
// Who holds a token needs no key, and is never told to come later: thousands may read behind one address. Only tokens that
// are none of ours count, as requests of strangers do.
import type { RequestHandler, Router } from 'express';
import type { RateLimiter } from '../access/rate-limit.ts';
import { Refusal } from '../access/refusal.ts';
import { CLICK_PATH, PIXEL_PATH } from '../tracking/track-html.ts';
import type { Visit } from '../tracking/readers.ts';
import type { TrackingVerbs } from '../tracking/tracker.ts';
import { sendRefusal } from './envelope.ts';

const PIXEL_ROUTE = `${PIXEL_PATH}:token.gif`;
const CLICK_ROUTE = `${CLICK_PATH}:token`;
export const TRACKING_ROUTES: readonly string[] = [PIXEL_ROUTE, CLICK_ROUTE];

/** One transparent dot. */
const PIXEL = Buffer.from('R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7', 'base64');

interface Tracking {
  readonly tracking: TrackingVerbs;
  readonly limiter: Pick<RateLimiter, 'takeStranger'>;
}

export function addTracking(router: Router, d: Tracking): void {
  router.get(PIXEL_ROUTE, createPixelHandler(d));
  router.get(CLICK_ROUTE, createClickHandler(d));
}

function createPixelHandler({ tracking, limiter }: Tracking): RequestHandler {
  return async (request, response) => {
    setHeaders(response);
    if (!tracking.open(tokenOf(request), visitOf(request))) {
      await refuse(limiter, request, response);
      return;
    }
    // Web mail shows it on pages of its own.
    response.setHeader('cross-origin-resource-policy', 'cross-origin');
    response.type('gif').send(PIXEL);
  };
}

function createClickHandler({ tracking, limiter }: Tracking): RequestHandler {
  return async (request, response) => {
    setHeaders(response);
    const location = tracking.click(tokenOf(request), visitOf(request));
    if (location === null) {
      await refuse(limiter, request, response);
      return;
    }
    response.statusCode = 302;
    response.setHeader('location', location);
    response.setHeader('content-length', 0);
    response.end();
  };
}

type Request = Parameters<RequestHandler>[0];
type Response = Parameters<RequestHandler>[1];

const tokenOf = ({ params }: Request): string =>
  typeof params['token'] === 'string' ? params['token'] : '';

function visitOf(request: Request): Visit {
  const header = (name: string): string | null => request.get(name) ?? null;
  return {
    method: request.method,
    remoteAddress: request.socket.remoteAddress ?? '',
    forwardedFor: header('x-forwarded-for'),
    userAgent: header('user-agent'),
    purpose: header('sec-purpose') ?? header('purpose') ?? header('x-purpose') ?? header('x-moz'),
  };
}

function setHeaders(response: Response): void {
  response.setHeader('referrer-policy', 'no-referrer');
  response.setHeader('x-robots-tag', 'noindex, nofollow');
}

/** A person, who followed a link that was cut or changed, gets a page; a program the envelope. */
async function refuse(
  limiter: Pick<RateLimiter, 'takeStranger'>,
  request: Request,
  response: Response,
): Promise<void> {
  const rate = await limiter.takeStranger(request.socket.remoteAddress ?? '');
  for (const [name, value] of Object.entries(rate.headers)) response.setHeader(name, value);
  const refusal = rate.refusal ?? new Refusal('not_found', 'This link is not valid.');
  if (request.accepts(['json', 'html']) !== 'html') {
    sendRefusal(response, refusal);
    return;
  }
  if (refusal.retryAfterSeconds !== null) {
    response.setHeader('retry-after', refusal.retryAfterSeconds);
  }
  response.status(refusal.status).type('html').send(page(refusal));
}

const page = ({ status }: Refusal): string => `<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Link not found</title></head>
<body><h1>${status === 404 ? 'This link is not valid' : 'Too many requests'}</h1><p>${
  status === 404
    ? 'Part of it may be missing. Open the email again and follow its link from there.'
    : 'Try again in a minute.'
}</p></body>
</html>
`;
