// Looks at the DNS for a record that a domain should publish, and says what it found in words that help to mend it.
//
// In: a resolver, a name and what should be there. Out: a finding, never an exception for what the DNS said: `right`;
// `absent`, nothing of the kind is there yet; `wrong`, something else is there; `unknown`, the DNS did not answer, which
// proves nothing. Values are compared by what they mean, not letter by letter.
import { nameOf } from './host-name.ts';
import type { Resolver } from './resolver.ts';

export type Finding =
  | { readonly kind: 'right' }
  | { readonly kind: 'absent'; readonly detail: string }
  | { readonly kind: 'wrong'; readonly detail: string }
  | { readonly kind: 'unknown'; readonly detail: string };

export type RecordResolver = Pick<Resolver, 'txt' | 'mx' | 'cname' | 'a' | 'aaaa'>;

const CNAMES_MAX = 8;
const PARENTS_MAX = 8;
const SHOWN_MAX_CHARS = 120;
const LISTED_MAX = 5;

const right: Finding = { kind: 'right' };

/** The MX of a name. `must` is `contain`: our host is among them; `prefer`: no other host is as good. */
export async function findMx(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly host: string; readonly must: 'contain' | 'prefer' },
): Promise<Finding> {
  const { name, must } = wanted;
  const host = nameOf(wanted.host);
  const answer = await resolver.mx(name);
  if (answer.kind === 'failed') return unknown('MX', name, answer.cause);
  if (answer.kind !== 'found') return missing(resolver, { name, type: 'MX' });
  const hosts = answer.records.map(({ preference, exchange }) => {
    return { preference, exchange: nameOf(exchange) };
  });
  const found = listed(hosts.map(({ preference, exchange }) => `${preference} ${exchange || '.'}`));
  const ours = Math.min(
    ...hosts.filter(({ exchange }) => exchange === host).map((mx) => mx.preference),
  );
  if (!Number.isFinite(ours)) {
    const cname = await resolver.cname(name);
    const why =
      cname.kind === 'found'
        ? ` A CNAME record at ${name} leads to ${show(cname.records[0] ?? '')} and hides every other record there.`
        : '';
    return wrong(`The MX records of ${name} are ${found}; ${host} must be among them.${why}`);
  }
  const better = hosts.filter((mx) => mx.exchange !== host && mx.preference <= ours);
  if (must === 'contain' || better.length === 0) return right;
  const rivals = listed(
    better.map(({ preference, exchange }) => `${preference} ${exchange || '.'}`),
  );
  return wrong(
    `Mail for ${name} goes to ${rivals} as well or instead; the MX record of ${host} needs the lowest preference of all.`,
  );
}

/**
 * A DKIM key (RFC 6376 §3.6.1). The tags may stand in any order with any white space; other TXT records are ignored,
 * but a second key at the name is not: what verifiers do with two is undefined (§3.6.2.2).
 */
export async function findDkim(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly value: string },
): Promise<Finding> {
  const { name } = wanted;
  const expected = tagsOf(wanted.value);
  const answer = await resolver.txt(name);
  if (answer.kind === 'failed') return unknown('TXT', name, answer.cause);
  if (answer.kind !== 'found') return missing(resolver, { name, type: 'TXT' });
  const keys = answer.records
    .map(tagsOf)
    .filter((tags) => tags.has('p') && (tags.get('v') ?? 'DKIM1') === 'DKIM1');
  if (keys.length === 0) {
    return wrong(`The TXT records of ${name} hold no DKIM key: ${listed(answer.records)}.`);
  }
  const problems = keys.map((key) => dkimProblem(key, expected));
  if (!problems.includes(null)) return wrong(`The DKIM key at ${name} ${problems[0]}.`);
  if (keys.length > 1) {
    return wrong(
      `There are ${keys.length} DKIM keys at ${name}; remove all but the one shown here.`,
    );
  }
  return right;
}

/** What is wrong with a published key, as the end of a sentence; null: nothing. */
function dkimProblem(
  key: ReadonlyMap<string, string>,
  expected: ReadonlyMap<string, string>,
): string | null {
  const type = key.get('k') ?? 'rsa';
  const wantedType = expected.get('k') ?? 'rsa';
  if (key.get('p') === '') return 'is empty, which revokes it';
  if (type !== wantedType) return `is of type ${show(type)}, not ${wantedType}`;
  if (key.get('p') !== expected.get('p')) {
    return expected.get('p')?.startsWith(key.get('p') ?? ' ') === true
      ? 'is cut off; publish the whole value'
      : 'is another key than the one shown here';
  }
  const hashes = key.get('h')?.split(':');
  if (hashes !== undefined && !hashes.includes('sha256')) return 'does not allow sha256 (its h=)';
  const services = key.get('s')?.split(':');
  if (services !== undefined && !services.includes('*') && !services.includes('email')) {
    return 'is not for email (its s=)';
  }
  return null;
}

/** RFC 6376 §3.2. White space means nothing in any value that matters here. */
function tagsOf(text: string): ReadonlyMap<string, string> {
  return new Map(
    text.split(';').flatMap((part) => {
      const equals = part.indexOf('=');
      if (equals === -1) return [];
      return [[part.slice(0, equals).trim(), part.slice(equals + 1).replace(/\s+/g, '')] as const];
    }),
  );
}

/** A CNAME that leads, in one step or several, to the target. */
export async function findCname(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly target: string },
): Promise<Finding> {
  const target = nameOf(wanted.target);
  const seen: string[] = [];
  let name = nameOf(wanted.name);
  while (seen.length < CNAMES_MAX) {
    const answer = await resolver.cname(name);
    if (answer.kind === 'failed') return unknown('CNAME', name, answer.cause);
    if (answer.kind !== 'found') break;
    name = nameOf(answer.records[0] ?? '');
    if (name === target) return right;
    if (seen.includes(name)) break;
    seen.push(name);
  }
  if (seen.length > 0) {
    return wrong(
      `The CNAME record of ${wanted.name} leads to ${show(seen.at(-1) ?? '')}, not to ${target}.`,
    );
  }
  const address = await resolver.a(wanted.name);
  if (address.kind === 'found') {
    return wrong(
      `${wanted.name} has the address ${listed(address.records)} in place of a CNAME record to ${target}.`,
    );
  }
  return absent(`There is no CNAME record at ${wanted.name} yet.`);
}

/** A name where the target answers: a CNAME that leads there, or an address that the target has. */
export async function findHost(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly target: string },
): Promise<Finding> {
  const cname = await findCname(resolver, wanted);
  if (cname.kind === 'right' || cname.kind === 'unknown') return cname;
  const both = [wanted.name, wanted.target].map(async (name) =>
    (await Promise.all([resolver.a(name), resolver.aaaa(name)])).flatMap((answer) =>
      answer.kind === 'found' ? answer.records : [],
    ),
  );
  const [own = [], target = []] = await Promise.all(both);
  // One that leads elsewhere would be asked as often as ours.
  return own.length > 0 && own.every((address) => target.includes(address)) ? right : cname;
}

/** A DMARC policy at the name or, as receivers look for it, at a domain above it (RFC 7489 §6.6.3). */
export async function findDmarc(resolver: RecordResolver, domain: string): Promise<Finding> {
  const labels = domain.split('.');
  const tries = Math.min(labels.length - 1, PARENTS_MAX);
  for (let skipped = 0; skipped < tries; skipped += 1) {
    const name = `_dmarc.${labels.slice(skipped).join('.')}`;
    const answer = await resolver.txt(name);
    if (answer.kind === 'failed') return unknown('TXT', name, answer.cause);
    if (answer.kind !== 'found') continue;
    const policies = answer.records.filter((text) => /^v\s*=\s*DMARC1\s*(;|$)/.test(text));
    if (policies.length > 1) {
      return wrong(
        `There are ${policies.length} DMARC policies at ${name}; receivers then use none.`,
      );
    }
    const [policy] = policies;
    if (policy === undefined) continue;
    if (/^(none|quarantine|reject)$/i.test(tagsOf(policy).get('p') ?? '')) return right;
    return wrong(
      `The DMARC policy at ${name} has no \`p=none\`, \`p=quarantine\` or \`p=reject\`.`,
    );
  }
  return absent(`There is no DMARC policy for ${domain} yet.`);
}

/** A TXT record that is exactly this text, white space around it aside. */
export async function findText(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly value: string },
): Promise<Finding> {
  const answer = await resolver.txt(wanted.name);
  if (answer.kind === 'failed') return unknown('TXT', wanted.name, answer.cause);
  if (answer.kind !== 'found') return absent(`There is no TXT record at ${wanted.name} yet.`);
  if (answer.records.some((text) => text.trim() === wanted.value)) return right;
  return wrong(`The TXT records of ${wanted.name} are ${listed(answer.records)}.`);
}

/** Nothing of the type is there: either nothing yet, or a CNAME in the way. */
export async function missing(
  resolver: RecordResolver,
  about: { readonly name: string; readonly type: 'MX' | 'TXT' },
): Promise<Finding> {
  const { name, type } = about;
  const cname = await resolver.cname(name);
  if (cname.kind !== 'found') return absent(`There is no ${type} record at ${name} yet.`);
  const target = show(cname.records[0] ?? '');
  return wrong(
    `A CNAME record at ${name} leads to ${target}, where there is no ${type} record, and hides every other record at ${name}; remove it.`,
  );
}

export const absent = (detail: string): Finding => ({ kind: 'absent', detail });
export const wrong = (detail: string): Finding => ({ kind: 'wrong', detail });

export function unknown(type: string, name: string, cause: string): Finding {
  const detail = `The DNS did not answer the question for the ${type} records of ${name} (${cause}); it is asked again later.`;
  return { kind: 'unknown', detail };
}

/** A text from the DNS as it may be shown: anyone can write anything there. */
export function show(text: string): string {
  const plain = text.replace(/[^\x20-\x7e]/g, '?');
  return plain.length > SHOWN_MAX_CHARS ? `${plain.slice(0, SHOWN_MAX_CHARS)}…` : plain;
}

export function listed(texts: readonly string[]): string {
  const shown = texts.slice(0, LISTED_MAX).map((text) => `"${show(text)}"`);
  return shown.join(', ') + (texts.length > LISTED_MAX ? ', …' : '');
}
