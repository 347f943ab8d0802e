// The DNS resolver: does it answer, how fast, and does the one that DANE trusts validate.
import { bad, info, ok, unknown, type Finding } from './finding.ts';
import { asksDns, type Surroundings } from './surroundings.ts';

const SLOW_MS = 1_000;

export async function checkResolver(s: Surroundings): Promise<readonly Finding[]> {
  const { dnsServers, hostname } = s.config;
  const about = ['resolver', dnsServers === null ? 'system' : dnsServers.join(', ')] as const;
  if (!asksDns(s)) {
    return [
      info(
        about,
        'Not applicable: in development mode without MAILSTEAD_DNS_SERVERS nothing outside is asked.',
      ),
    ];
  }
  return [await askIt(s, about, hostname), ...(await checkValidation(s))];
}

async function askIt(
  s: Surroundings,
  about: readonly [string, string],
  hostname: string,
): Promise<Finding> {
  const startedAt = s.ticks();
  const answers = await Promise.all([
    s.resolver.a(hostname),
    s.resolver.aaaa(hostname),
    s.resolver.mx(hostname),
  ]);
  const tookMs = Math.round(s.ticks() - startedAt);
  const failed = answers.filter((answer) => answer.kind === 'failed');
  const advice =
    'Run a resolver on this machine (unbound, for example) and name it in MAILSTEAD_DNS_SERVERS.';
  if (failed.length === answers.length) {
    const [first] = failed;
    return unknown(about, {
      message: `The resolver answers nothing (${first?.kind === 'failed' ? first.cause : ''}); mail waits while hosts cannot be looked up.`,
      advice:
        'Mend it, or run one on this machine (unbound, for example) and name it in MAILSTEAD_DNS_SERVERS.',
      whenLasting: 'error',
    });
  }
  if (failed.length > 0 || tookMs > SLOW_MS) {
    return bad('warning', about, {
      message:
        failed.length > 0
          ? `The resolver answered ${answers.length - failed.length} of ${answers.length} questions about ${hostname}.`
          : `The resolver took ${tookMs} ms to answer ${answers.length} questions.`,
      advice,
      detail: { took_ms: tookMs },
    });
  }
  return ok(about, `The resolver answered ${answers.length} questions in ${tookMs} ms.`, {
    took_ms: tookMs,
  });
}

/** DANE believes what the resolver says of DNSSEC. */
async function checkValidation(s: Surroundings): Promise<readonly Finding[]> {
  const { resolver } = s.delivery.dane;
  const { signedName } = s.policy;
  if (resolver === null || s.secureResolver === null || signedName === null) return [];
  const about = ['dnssec', resolver] as const;
  const answer = await s.secureResolver.a(signedName);
  if (answer.kind === 'failed') {
    return [
      unknown(about, {
        message: `The resolver for DANE did not answer the question for ${signedName} (${answer.cause}); mail to domains that may have DANE waits.`,
        advice: 'Mend the resolver, or set `dane.resolver` in config/delivery.json to null.',
        whenLasting: 'error',
      }),
    ];
  }
  if (answer.secure) return [ok(about, `${resolver} validates DNSSEC.`)];
  return [
    bad('error', about, {
      message: `${resolver} does not say that ${signedName}, which is signed, is proven: it does not validate DNSSEC, so DANE protects nothing.`,
      advice:
        'Turn on DNSSEC validation in the resolver, or name one that validates as `dane.resolver` in config/delivery.json.',
    }),
  ];
}
