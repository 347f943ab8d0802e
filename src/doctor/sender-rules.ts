// What Gmail, Yahoo and Microsoft ask of who sends to them, for one domain: made of what the other checks found of it, of
// its addresses and of our own count of complaints. One finding for each provider, which names what is not met.
import type { Pool } from 'pg';
import type { DomainRow } from '../domains/rows.ts';
import { checkReverse, type OwnAddress } from './addresses.ts';
import { bad, ok, unknown, type Finding } from './finding.ts';
import type { Surroundings } from './surroundings.ts';

const COMPLAINTS_MAX = 0.003;
/** Below, one reader is a rate. */
const DELIVERED_MIN = 1_000;
const COUNTED_DAYS = 30;

type Rule =
  'authentication' | 'dmarc' | 'alignment' | 'fcrdns' | 'tls' | 'one_click' | 'complaint_rate';
type Standing = 'met' | 'not_met' | 'unknown';

const WORDS: Readonly<Record<Rule, string>> = {
  authentication: 'both SPF and DKIM must pass',
  dmarc: 'a DMARC policy, at least p=none',
  alignment: 'the From domain must align with SPF or DKIM',
  fcrdns: 'every sending address needs forward-confirmed reverse DNS',
  tls: 'mail must arrive encrypted',
  one_click: 'bulk mail needs one-click unsubscribe over HTTPS',
  complaint_rate: 'complaints must stay under 0.3 %',
};

interface Provider {
  readonly code: string;
  readonly name: string;
  readonly rules: readonly Rule[];
}

/** Without `one_click` for Microsoft, which recommends it only. */
const PROVIDERS: readonly Provider[] = [
  {
    code: 'sender_rules_google',
    name: 'Gmail',
    rules: ['authentication', 'dmarc', 'alignment', 'fcrdns', 'tls', 'one_click', 'complaint_rate'],
  },
  {
    code: 'sender_rules_yahoo',
    name: 'Yahoo',
    rules: ['authentication', 'dmarc', 'alignment', 'fcrdns', 'one_click', 'complaint_rate'],
  },
  {
    code: 'sender_rules_microsoft',
    name: 'Microsoft',
    rules: ['authentication', 'dmarc', 'alignment', 'fcrdns'],
  },
];

/** What is asked of everybody; the others of who sends some thousands a day. */
const FOR_ALL: readonly Rule[] = ['fcrdns', 'tls', 'complaint_rate'];

export async function checkSenderRules(
  s: Surroundings,
  d: {
    readonly domain: DomainRow;
    readonly own: readonly OwnAddress[];
    /** What was found of its records. */
    readonly records: readonly Finding[];
  },
): Promise<readonly Finding[]> {
  const standings = await standingsOf(s, d);
  return PROVIDERS.map((provider) => judgeProvider(provider, d.domain.name, standings));
}

interface Standings {
  readonly of: Readonly<Record<Rule, Standing>>;
  readonly complaints: Complaints | null;
}

async function standingsOf(
  s: Surroundings,
  { domain, own, records }: Parameters<typeof checkSenderRules>[1],
): Promise<Standings> {
  const standing = (code: string): Standing =>
    readStanding(records.find((finding) => finding.code === code));
  const reverse = await Promise.all(own.map((address) => checkReverse(s, address)));
  const complaints = s.pool === null ? null : await countComplaints(s.pool, domain);
  const [spf, dkim] = [standing('spf'), standing('dkim')];
  return {
    complaints,
    of: {
      authentication: all([spf, dkim]),
      dmarc: standing('dmarc'),
      // Our signatures are of the From domain itself; the return path is below it.
      alignment: dkim === 'met' || spf === 'met' ? 'met' : all([spf, dkim]),
      // A relay's addresses are its own matter.
      fcrdns: all(reverse.map(readStanding)),
      // Delivery encrypts with every host that offers it, and all of these do.
      tls: 'met',
      one_click: s.config.publicUrl.startsWith('https:') ? 'met' : 'not_met',
      complaint_rate:
        complaints === null ? 'unknown' : isComplained(complaints) ? 'not_met' : 'met',
    },
  };
}

function readStanding(finding: Finding | undefined): Standing {
  if (finding === undefined || finding.severity === 'unknown') return 'unknown';
  return finding.severity === 'ok' || finding.severity === 'info' ? 'met' : 'not_met';
}

const all = (standings: readonly Standing[]): Standing =>
  standings.includes('not_met') ? 'not_met' : standings.includes('unknown') ? 'unknown' : 'met';

function judgeProvider(
  { code, name, rules }: Provider,
  domain: string,
  { of, complaints }: Standings,
): Finding {
  const about = [code, domain] as const;
  const broken = rules.filter((rule) => of[rule] === 'not_met');
  const open = rules.filter((rule) => of[rule] === 'unknown');
  const detail = { not_met: broken, unknown: open, ...complaintDetail(complaints) };
  if (broken.length > 0) {
    const severity = broken.some((rule) => FOR_ALL.includes(rule)) ? 'error' : 'warning';
    return bad(severity, about, {
      message: `${domain} does not meet what ${name} asks of senders: ${broken.map((rule) => WORDS[rule]).join('; ')}.`,
      advice: `Mend ${broken.map((rule) => ADVICE[rule]).join(', ')}; ${severity === 'error' ? `${name} refuses or files as spam what does not meet it` : `${name} refuses mail of who sends thousands a day without it`}.`,
      detail,
    });
  }
  if (open.length > 0) {
    return {
      ...unknown(about, {
        message: `Whether ${domain} meets what ${name} asks of senders is not known: ${open.map((rule) => WORDS[rule]).join('; ')}.`,
        advice: 'See what the other findings of the domain say.',
      }),
      detail,
    };
  }
  return ok(about, `${domain} meets what ${name} asks of senders.`, detail);
}

const ADVICE: Readonly<Record<Rule, string>> = {
  authentication: 'what `spf` and `dkim` say of the domain',
  dmarc: 'what `dmarc` says of the domain',
  alignment: 'what `dkim` says of the domain',
  fcrdns: 'what `reverse_dns` says of its addresses',
  tls: 'encryption',
  one_click: 'MAILSTEAD_PUBLIC_URL, which has to begin with `https:`',
  complaint_rate: 'the lists that the mail goes to: send only to who asked for it',
};

interface Complaints {
  readonly delivered: number;
  readonly complained: number;
}

/** Mail of the last days is not counted yet (sending/metric-rollup.ts). */
async function countComplaints(pool: Pool, { tenantId, name }: DomainRow): Promise<Complaints> {
  const { rows } = await pool.query<{ delivered: number; complained: number }>(
    `select coalesce(sum(delivered), 0)::float8 as delivered, coalesce(sum(complained), 0)::float8 as complained
     from metric_quarter where tenant_id = $1 and domain = $2
       and quarter > now() - interval '${COUNTED_DAYS} days'`,
    [tenantId, name],
  );
  return rows[0]!;
}

const isComplained = ({ delivered, complained }: Complaints): boolean =>
  delivered >= DELIVERED_MIN && complained / delivered >= COMPLAINTS_MAX;

const complaintDetail = (complaints: Complaints | null): Readonly<Record<string, unknown>> =>
  complaints === null
    ? {}
    : {
        counted_days: COUNTED_DAYS,
        delivered: complaints.delivered,
        complained: complaints.complained,
      };
