// Where a webhook may lead. What the URL shows is judged when it is given; what its name leads to then, too, and again at
// every call (dns/guarded-http.ts), since the same name may lead elsewhere tomorrow.
import { findAddresses, FaultError, type GuardedDependencies } from '../dns/guarded-http.ts';
import { lookUpHosts } from '../dns/mx-hosts.ts';
import { readUrl, type WebTarget } from '../dns/url-guard.ts';

export interface EndpointRules {
  readonly web: GuardedDependencies;
  /**
   * Development: people call their own machine by name (the guard lets loopback through), and name hosts that are not
   * there yet. Elsewhere a name that does not exist is refused like one that leads inside, so nobody learns which exist.
   */
  readonly isDevelopment: boolean;
}

/** A slow DNS delays the answer by this much at most; the call will ask again. */
const LOOK_MAX_MS = 3_000;

/** Where calls go, or what is wrong with the URL, as the end of a sentence. */
export const readEndpoint = (rules: EndpointRules, text: string): ReturnType<typeof readUrl> =>
  readUrl(text, { takesLocalhost: rules.isDevelopment });

/** What is wrong with an endpoint that somebody gives us, as a sentence; null: nothing. */
export async function endpointProblem(rules: EndpointRules, text: string): Promise<string | null> {
  const read = readEndpoint(rules, text);
  if (!read.ok) return `\`endpoint\` ${read.problem}.`;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(() => resolve(null), LOOK_MAX_MS);
  });
  try {
    return await Promise.race([placeProblem(rules, read.target), late]);
  } finally {
    clearTimeout(timer);
  }
}

async function placeProblem(rules: EndpointRules, target: WebTarget): Promise<string | null> {
  try {
    await findAddresses(rules.web, target);
    return null;
  } catch (error) {
    if (!(error instanceof FaultError)) throw error;
    const { kind, reason } = error.fault;
    // The DNS is silent: nothing is known about the name.
    if (kind === 'transient') return null;
    if (kind === 'permanent' && rules.isDevelopment && !(await leadsInside(rules, target))) {
      return null;
    }
    return `\`endpoint\` cannot be called: ${reason}.`;
  }
}

async function leadsInside({ web }: EndpointRules, { host }: WebTarget): Promise<boolean> {
  const [found] = await lookUpHosts({ ...web, random: Math.random }, [
    { name: host, preference: 0 },
  ]);
  return found !== undefined && found.refusals.length > 0;
}
