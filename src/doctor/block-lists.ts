// Whether one of our addresses is on a DNS block list (RFC 5782). Lists say in the same way that they do not answer whoever
// asks: that is no listing.
import type { OwnAddress } from './addresses.ts';
import { reversed } from '../receiving/dnsbl.ts';
import { bad, info, ok, shown, unknown, type Finding } from './finding.ts';
import type { Surroundings } from './surroundings.ts';

/** RFC 5782 §5: a living list never has it, one that was given up often has everything. */
const NEVER_LISTED = '1.0.0.127';
/** Of Spamhaus' PBL: addresses that are not meant to send, such as those of homes, whatever they send. */
const POLICY_CODES: ReadonlySet<string> = new Set(['127.0.0.10', '127.0.0.11']);

export async function checkBlockList(
  s: Surroundings,
  { address }: OwnAddress,
  zone: string,
): Promise<Finding> {
  const about = ['dnsbl', `${address} ${zone}`] as const;
  const name = `${reversed(address)}.${zone}`;
  const answer = await s.resolver.a(name);
  if (answer.kind === 'failed') {
    return unknown(about, {
      message: `${zone} did not say whether it lists ${address} (${answer.cause}).`,
      advice: `If it stays silent, take ${zone} out of \`dnsbl_zones\` in config/doctor.json, or ask it through a resolver of your own (MAILSTEAD_DNS_SERVERS).`,
    });
  }
  if (answer.kind !== 'found') return ok(about, `${zone} does not list ${address}.`);
  const codes = answer.records.slice(0, 10);
  // Spamhaus: 127.255.255.252 is a typing error, .254 a public resolver, .255 too many questions.
  if (codes.some((code) => code.startsWith('127.255.255.') || code === '127.0.0.1')) {
    return info(
      about,
      `${zone} refuses to answer our resolver, so nothing is known of ${address}.`,
      {
        advice:
          'Block lists refuse public resolvers: run one of your own and name it in MAILSTEAD_DNS_SERVERS, or take the list out of config/doctor.json.',
        detail: { codes },
      },
    );
  }
  if (!codes.some((code) => code.startsWith('127.'))) {
    return info(about, `${zone} answers ${codes.join(', ')}, which is no answer of a block list.`, {
      advice: `Take ${zone} out of \`dnsbl_zones\` in config/doctor.json, or ask through a resolver that does not rewrite answers.`,
      detail: { codes },
    });
  }
  if ((await s.resolver.a(`${NEVER_LISTED}.${zone}`)).kind === 'found') {
    return info(about, `${zone} lists every address, so it is no living list.`, {
      advice: `Take ${zone} out of \`dnsbl_zones\` in config/doctor.json.`,
      detail: { codes },
    });
  }
  const isPolicy = zone.endsWith('spamhaus.org') && codes.every((code) => POLICY_CODES.has(code));
  const text = await s.resolver.txt(name);
  const reason = text.kind === 'found' ? shown(text.records[0] ?? '') : null;
  return bad('error', about, {
    message: `${address} is listed by ${zone}${reason === null ? '' : `: ${reason}`}.`,
    advice: isPolicy
      ? `The network of ${address} is not meant to send mail itself: ask its provider for an address that is, have this one taken out on the web site of ${zone}, or send through a relay (MAILSTEAD_DELIVERY=smarthost).`
      : `Find and stop what sends unwanted mail from ${address}, then ask ${zone} on its web site to remove it.`,
    detail: { codes, reason },
  });
}
