// Reads a URL that somebody else gave us and that the appliance is to fetch: attachments, webhook endpoints.
//
// In: text. Out: where it leads, or what is wrong with it in words for whoever wrote it. It takes http and https with a
// plainly written host only: what two parsers could read differently (0x7f.1, 127.1, full-width digits, %31, a final
// dot, user@host, backslashes) is refused rather than understood. Pure: names are resolved and addresses judged
// elsewhere (address-guard.ts), because the same text may lead elsewhere tomorrow.
import { isIP } from 'node:net';
import { domainToUnicode } from 'node:url';
import { isHostName } from './host-name.ts';

/** Where a URL leads. */
export interface WebTarget {
  readonly url: URL;
  /** A-labels in lower case, or an address without brackets. */
  readonly host: string;
  readonly isAddress: boolean;
  readonly port: number;
}

export type ReadUrl =
  | { readonly ok: true; readonly target: WebTarget }
  | { readonly ok: false; readonly problem: string };

/** Browsers and proxies go to about this. */
export const URL_CHARS_MAX = 2_048;
const PORTS: Readonly<Record<string, number>> = { 'http:': 80, 'https:': 443 };
/** Below are services of the system (mail, DNS, databases of old); none of them is a web server. */
const FREE_PORT_MIN = 1_024;
/** The Fetch standard's bad ports (§2.9) from 1024 on: services that a crafted HTTP request could talk to. */
const BAD_PORTS: ReadonlySet<number> = new Set([
  1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669,
  6679, 6697, 10080,
]);

/** What is wrong with the text as a URL to fetch, as the end of a sentence (`must …`); null: nothing that can be seen. */
export function urlProblem(text: string): string | null {
  const read = readUrl(text);
  return read.ok ? null : read.problem;
}

/** RFC 6761 §6.3: these names are this machine, whatever the DNS says. */
export const isLocalhost = (host: string): boolean =>
  host === 'localhost' || host.endsWith('.localhost');

/** As urlProblem, and where it leads. `localhost` passes only where it is said to; addresses are judged elsewhere. */
export function readUrl(
  text: string,
  options: { readonly takesLocalhost?: boolean } = {},
): ReadUrl {
  const refuse = (problem: string): ReadUrl => ({ ok: false, problem });
  if (text.length > URL_CHARS_MAX) return refuse(`must have at most ${URL_CHARS_MAX} characters`);
  // The URL parser drops tabs and line ends, trims spaces and turns backslashes into slashes.
  // oxlint-disable-next-line no-control-regex
  if (/[\u0000-\u0020\u007f-\u00a0\u2028\u2029\ufeff\\]/u.test(text) || !text.isWellFormed()) {
    return refuse('must not contain spaces, control characters or backslashes');
  }
  const [, authority] = /^https?:\/\/([^/?#]*)/i.exec(text) ?? [];
  if (authority === undefined) return refuse('must begin with http:// or https://');
  if (authority.includes('@')) return refuse('must not contain a user name or password');
  const [, written] = /^(\[[^\]]*\]|[^:[\]]*)(?::\d{1,5})?$/.exec(authority) ?? [];
  if (written === undefined || written === '') return refuse('must name a host');
  if (!URL.canParse(text)) return refuse('must be a valid URL');
  const url = new URL(text);
  const host = url.hostname.replace(/^\[|\]$/g, '');
  if (isIP(host) === 0) {
    const problem = nameProblem(host, written);
    if (problem !== null) return refuse(problem);
    if (isLocalhost(host) && options.takesLocalhost !== true) {
      return refuse('must not lead to this machine');
    }
  } else if (isIP(written.replace(/^\[|\]$/g, '')) === 0 || written.includes('%')) {
    // 2130706433, 0x7f.1, 127.1, 0177.0.0.1, full-width digits: all of them read as an address.
    return refuse('must write an IP address in its plain form');
  }
  const port = url.port === '' ? (PORTS[url.protocol] ?? 0) : Number(url.port);
  const isUsual = Object.values(PORTS).includes(port);
  if (!isUsual && (port < FREE_PORT_MIN || BAD_PORTS.has(port))) {
    return refuse(`must not use port ${port}: use 80, 443 or a web server's port above 1023`);
  }
  return { ok: true, target: { url, host, isAddress: isIP(host) !== 0, port } };
}

/** `host` is what the URL parser made of `written`. */
function nameProblem(host: string, written: string): string | null {
  const asWritten = written.toLowerCase().normalize('NFC');
  // An internationalized name may be written either way, a look-alike of ASCII (ⓛocalhost) in no way.
  if (host !== asWritten && domainToUnicode(host) !== asWritten) {
    return 'must write its host name plainly';
  }
  if (host.endsWith('.')) return 'must write its host name without a final dot';
  if (!isHostName(host)) return 'must name a valid host';
  return null;
}
