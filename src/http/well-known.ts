// GET /.well-known/acme-challenge/{token} and /.well-known/mta-sts.txt: what certificate authorities and senders ask for at names
// that lead here, without a key. Also the small listener on port 80 that answers the former and leads everybody else to HTTPS.
import type { Request, Response, Router } from 'express';
import type { RateLimiter } from '../access/rate-limit.ts';
import { Refusal } from '../access/refusal.ts';
import { setCommonHeaders } from './common-headers.ts';
import { sendRefusal } from './envelope.ts';
import type { Answerer } from './front-door.ts';

export interface WellKnown {
  /** The answer to a challenge (RFC 8555 §8.3), or null. Rejects when the database is away. */
  challenge(token: string): Promise<string | null>;
  /** The MTA-STS policy (RFC 8461 §3.2) of a host, lower case without a port, or null. Rejects as above. */
  stsPolicy(host: string): Promise<string | null>;
}

const CHALLENGE_PATH = '/.well-known/acme-challenge/';
const CHALLENGE_ROUTE = `${CHALLENGE_PATH}:token`;
const POLICY_ROUTE = '/.well-known/mta-sts.txt';
export const WELL_KNOWN_ROUTES: readonly string[] = [CHALLENGE_ROUTE, POLICY_ROUTE];

export function addWellKnown(
  router: Router,
  d: { readonly wellKnown: WellKnown; readonly limiter: Pick<RateLimiter, 'takeStranger'> },
): void {
  const find =
    (type: string, ask: (request: Request) => Promise<string | null>, lacks: string) =>
    async (request: Request, response: Response): Promise<void> => {
      const found = await ask(request);
      if (found !== null) {
        response.setHeader('content-type', type);
        response.send(found);
        return;
      }
      // Who asks for what is there is never told to wait; who guesses is.
      const { refusal } = await d.limiter.takeStranger(request.socket.remoteAddress ?? '');
      sendRefusal(response, refusal ?? new Refusal('not_found', lacks));
    };
  router.get(
    CHALLENGE_ROUTE,
    find(
      'application/octet-stream',
      ({ params }) => d.wellKnown.challenge(String(params['token'])),
      'No certificate is being ordered with this token.',
    ),
  );
  router.get(
    POLICY_ROUTE,
    find(
      'text/plain; charset=utf-8',
      (request) => d.wellKnown.stsPolicy(hostOf(request.headers.host)),
      'No MTA-STS policy is served for this host.',
    ),
  );
}

/** Lower case, without a port; '' where there is none. */
const hostOf = (header: string | undefined): string =>
  (header ?? '').toLowerCase().replace(/:\d{1,5}$/, '');

/**
 * For a listener that does nothing else. `httpsAt` gives where a host is served over HTTPS, without a slash at the end, or null
 * for one that is not ours.
 */
export function createChallengeAnswerer(d: {
  readonly challenge: WellKnown['challenge'];
  readonly httpsAt: (host: string) => string | null;
}): Answerer {
  return (request, response) => {
    setCommonHeaders(request, response);
    const target = request.url ?? '/';
    const { method = '' } = request;
    const path = target.split('?')[0] ?? '';
    if (method !== 'GET' && method !== 'HEAD') {
      response.setHeader('allow', 'GET, HEAD');
      response.setHeader('connection', 'close');
      sendRefusal(response, new Refusal('method_not_allowed', 'Use HTTPS.'));
      return;
    }
    if (!path.startsWith(CHALLENGE_PATH)) {
      const base = d.httpsAt(hostOf(request.headers.host));
      if (base === null || !target.startsWith('/')) {
        sendRefusal(response, new Refusal('not_found', 'There is nothing here without HTTPS.'));
        return;
      }
      response.statusCode = 308;
      response.setHeader('location', base + target);
      response.setHeader('content-length', 0);
      response.end();
      return;
    }
    d.challenge(path.slice(CHALLENGE_PATH.length)).then(
      (found) => {
        if (found === null) {
          const refusal = new Refusal(
            'not_found',
            'No certificate is being ordered with this token.',
          );
          sendRefusal(response, refusal);
          return;
        }
        response.setHeader('content-type', 'application/octet-stream');
        response.end(found);
      },
      () =>
        sendRefusal(
          response,
          new Refusal('service_unavailable', 'The database is away.', { retryAfterSeconds: 2 }),
        ),
    );
  };
}
