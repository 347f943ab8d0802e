// Whether the SPF record of a name (RFC 7208) lets our host send: read as a receiver would read it, for the addresses
// of that host, but asking no more than it must: a mechanism that names the host decides without them. Mechanisms are
// compared by what they mean, so their order, others beside them, and a way through `include` or `redirect` are all right.
//
// In: a resolver, the name and our host. Out: a finding (dns/records.ts), never an exception for what the DNS said.
import { BlockList, isIP } from 'node:net';
import { nameOf } from './host-name.ts';
import {
  listed,
  missing,
  show,
  unknown,
  wrong,
  type Finding,
  type RecordResolver,
} from './records.ts';
import { parseSpfTerm, type SpfTerm } from './spf-term.ts';

// RFC 7208 §4.6.4.
const LOOKUPS_MAX = 10;

interface Search {
  readonly resolver: RecordResolver;
  /** '': only the address counts. */
  readonly host: string;
  /** The address of our host that is looked for; '': it has none; null: none was needed yet. */
  readonly address: string | null;
  lookups: number;
}

type Mechanism = Exclude<SpfTerm, { kind: 'modifier' }>;

type Verdict =
  | { readonly kind: 'pass' }
  /** Our host is not named, and the record goes on to nothing else. */
  | { readonly kind: 'neutral' }
  /** `all` or a mechanism that refuses us stands before ours. */
  | { readonly kind: 'refused'; readonly by: string }
  /** It takes the addresses of our host to say. */
  | { readonly kind: 'depends' }
  | { readonly kind: 'finding'; readonly finding: Finding };

/** The SPF record at `name` authorises `host`. */
export async function findSpf(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly host: string },
): Promise<Finding> {
  const { name } = wanted;
  const host = nameOf(wanted.host);
  const byName = await evaluate({ resolver, host, address: null, lookups: 0 }, name);
  const verdict = byName.kind === 'depends' ? await byAddress(resolver, name, host) : byName;
  return judge(verdict, { name, who: 'this host', term: `a:${host}` });
}

/** The SPF record at `name` authorises this very address, whatever it is called. */
export async function findSpfOf(
  resolver: RecordResolver,
  wanted: { readonly name: string; readonly address: string },
): Promise<Finding> {
  const { name, address } = wanted;
  const verdict = await evaluate({ resolver, host: '', address, lookups: 0 }, name);
  return judge(verdict, { name, who: address, term: `ip${isIP(address)}:${address}` });
}

/** What a verdict means for whoever publishes the record at `name`, and which term would mend it. */
function judge(
  verdict: Verdict,
  { name, who, term }: { readonly name: string; readonly who: string; readonly term: string },
): Finding {
  const fix = `add ${term} in front of its \`all\``;
  switch (verdict.kind) {
    case 'pass':
      return { kind: 'right' };
    case 'finding':
      return verdict.finding;
    case 'refused':
      return wrong(
        `The SPF record at ${name} reaches ${verdict.by} before it names ${who}; ${fix}.`,
      );
    default:
      return wrong(`The SPF record at ${name} does not name ${who}; ${fix}.`);
  }
}

/** Passes when every IPv4 address of our host does, or every IPv6 address. */
async function byAddress(resolver: RecordResolver, name: string, host: string): Promise<Verdict> {
  const answers = await Promise.all([resolver.a(host), resolver.aaaa(host)]);
  const families = answers.flatMap((answer) => (answer.kind === 'found' ? [answer.records] : []));
  let verdict: Verdict = { kind: 'neutral' };
  for (const addresses of families.length === 0 ? [['']] : families) {
    for (const address of addresses) {
      verdict = await evaluate({ resolver, host, address, lookups: 0 }, name);
      if (verdict.kind !== 'pass') break;
    }
    if (verdict.kind === 'pass') return verdict;
  }
  const silent = answers.find((answer) => answer.kind === 'failed');
  if (silent === undefined || verdict.kind === 'finding') return verdict;
  return found(unknown('A and AAAA', host, silent.cause));
}

async function evaluate(search: Search, name: string): Promise<Verdict> {
  const answer = await search.resolver.txt(name);
  if (answer.kind === 'failed') return found(unknown('TXT', name, answer.cause));
  if (answer.kind !== 'found') {
    return found(await missing(search.resolver, { name, type: 'TXT' }));
  }
  const policies = answer.records.filter((text) => /^v=spf1( |$)/i.test(text));
  const [policy] = policies;
  if (policy === undefined) {
    return found(
      wrong(`The TXT records of ${name} hold no SPF record: ${listed(answer.records)}.`),
    );
  }
  if (policies.length > 1) {
    return found(
      wrong(
        `There are ${policies.length} SPF records at ${name}, which is an error for every receiver; put them into one.`,
      ),
    );
  }
  const terms: { readonly text: string; readonly term: SpfTerm }[] = [];
  for (const text of policy.split(' ').slice(1)) {
    if (text === '') continue;
    const term = parseSpfTerm(text);
    if (term === null) {
      return found(
        wrong(
          `The SPF record at ${name} has \`${show(text)}\` in it, which is an error for every receiver.`,
        ),
      );
    }
    terms.push({ text, term });
  }
  return run(search, name, terms);
}

async function run(
  search: Search,
  name: string,
  terms: readonly { readonly text: string; readonly term: SpfTerm }[],
): Promise<Verdict> {
  let redirect: string | null = null;
  for (const { text, term } of terms) {
    if (term.kind === 'modifier') {
      if (term.name === 'redirect') redirect ??= term.value;
      continue;
    }
    const isOurs = await matches(search, name, term);
    if (typeof isOurs !== 'boolean') return isOurs;
    if (!isOurs) continue;
    return term.qualifier === '+' ? { kind: 'pass' } : { kind: 'refused', by: `\`${show(text)}\`` };
  }
  return redirect === null ? { kind: 'neutral' } : follow(search, redirect);
}

async function matches(
  search: Search,
  name: string,
  mechanism: Mechanism,
): Promise<boolean | Verdict> {
  const { kind, value } = mechanism;
  if (kind === 'all') return true;
  if (kind === 'ip4' || kind === 'ip6') return covers(search, [value], mechanism);
  if (kind === 'include') {
    const inner = await follow(search, value);
    // RFC 7208 §5.2: only a pass inside is a match.
    if (inner.kind === 'finding' || inner.kind === 'depends') return inner;
    return inner.kind === 'pass';
  }
  const limit = takeLookup(search);
  if (limit !== null) return limit;
  // What these two say depends on the message.
  if (kind === 'ptr' || kind === 'exists' || isMacro(value)) return false;
  const target = nameOf(value === '' ? name : value);
  return kind === 'a' ? hasAddress(search, target, mechanism) : hasMx(search, target, mechanism);
}

async function hasMx(
  search: Search,
  target: string,
  mechanism: Mechanism,
): Promise<boolean | Verdict> {
  const { resolver, host } = search;
  const answer = await resolver.mx(target);
  if (answer.kind === 'failed') return found(unknown('MX', target, answer.cause));
  if (answer.kind !== 'found') return false;
  if (host !== '') return answer.records.some(({ exchange }) => nameOf(exchange) === host);
  for (const { exchange } of answer.records.slice(0, LOOKUPS_MAX)) {
    const isOurs = await hasAddress(search, nameOf(exchange), mechanism);
    if (isOurs !== false) return isOurs;
  }
  return false;
}

/** Another name may have our address. */
async function hasAddress(
  search: Search,
  target: string,
  mechanism: Mechanism,
): Promise<boolean | Verdict> {
  const { resolver, address } = search;
  if (target === search.host) return true;
  if (address === null) return { kind: 'depends' };
  if (address === '') return false;
  const answer = await (isIP(address) === 4 ? resolver.a(target) : resolver.aaaa(target));
  if (answer.kind === 'failed') return found(unknown('address', target, answer.cause));
  return answer.kind === 'found' && covers(search, answer.records, mechanism);
}

/** Whether our address is one of these, or in the range of one. */
function covers(
  { address }: Search,
  others: readonly string[],
  { bits4, bits6 }: Mechanism,
): boolean | Verdict {
  if (address === null) return { kind: 'depends' };
  const family = isIP(address);
  const [type, bits] = family === 4 ? (['ipv4', bits4] as const) : (['ipv6', bits6] as const);
  const block = new BlockList();
  for (const other of others) {
    if (family !== 0 && isIP(other) === family) block.addSubnet(other, bits, type);
  }
  return family !== 0 && block.check(address, type);
}

/** Macros depend on the message; none of them can name our host for sure. */
const isMacro = (value: string): boolean => value.includes('%');

async function follow(search: Search, name: string): Promise<Verdict> {
  const limit = takeLookup(search);
  if (limit !== null) return limit;
  if (isMacro(name)) return { kind: 'neutral' };
  const verdict = await evaluate(search, nameOf(name));
  if (verdict.kind !== 'finding' || verdict.finding.kind !== 'absent') return verdict;
  // RFC 7208 §5.2: an error for the whole record.
  return found(wrong(`The SPF record includes ${show(nameOf(name))}, which has none.`));
}

function takeLookup(search: Search): Verdict | null {
  search.lookups += 1;
  if (search.lookups <= LOOKUPS_MAX) return null;
  return found(
    wrong(
      `The SPF record needs more than ${LOOKUPS_MAX} lookups, which is an error for every receiver.`,
    ),
  );
}

const found = (finding: Finding): Verdict => ({ kind: 'finding', finding });
