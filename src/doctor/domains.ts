// What a domain of ours publishes, as receivers and other hosts see it now. Verification (domains/) decides whether a
// domain may send; this says what is wrong before anybody refuses its mail, and looks at what verification does not need.
import type { Pool } from 'pg';
import { membersOf, poolOf } from '../delivery/egress.ts';
import { isHostOf, stsIdOf } from '../dns/mta-sts.ts';
import { fetchStsPolicy } from '../dns/mta-sts-fetch.ts';
import { findDkim, findDmarc, findMx, type Finding as Found } from '../dns/records.ts';
import { findSpf, findSpfOf } from '../dns/spf-record.ts';
import { wantedRecords, type WantedRecord } from '../domains/records.ts';
import { readDomain, type DomainRow } from '../domains/rows.ts';
import type { OwnAddress } from './addresses.ts';
import { bad, info, ok, shown, unknown, type Finding } from './finding.ts';
import { checkSenderRules } from './sender-rules.ts';
import { dials, type Surroundings } from './surroundings.ts';

/** Of one look; the next one goes on with others. */
const DOMAINS_PER_LOOK = 25;
const STS_MAX_MS = 10_000;
/** Verified without any DNS in development mode. */
const HOME_DOMAIN = 'mailstead.test';

/** The verified domains that were not looked at for the longest time, or the one of this name. */
export async function nextDomains(
  pool: Pool,
  { name }: { readonly name: string | null },
): Promise<readonly DomainRow[]> {
  const { rows } = await pool.query<{ tenantId: string; id: string }>(
    `select d.tenant_id as "tenantId", d.id from sending_domain d
     left join (select domain_id, max(looked_at) as at from finding
       where domain_id is not null group by domain_id) f on f.domain_id = d.id
     where (d.sending_verified or d.receiving_verified or $1::text is not null)
       and ($1::text is null or d.name = $1)
     order by f.at nulls first, d.id limit ${DOMAINS_PER_LOOK}`,
    [name],
  );
  const found = await Promise.all(rows.map(({ tenantId, id }) => readDomain(pool, tenantId, id)));
  return found.filter((row) => row !== null);
}

export async function checkDomain(
  s: Surroundings,
  domain: DomainRow,
  addresses: readonly OwnAddress[],
): Promise<readonly Finding[]> {
  const { name } = domain;
  if (s.config.mode === 'development' && name === HOME_DOMAIN) {
    return [info(['domain', name], `${name} exists in development mode only, without any DNS.`)];
  }
  const members = membersOf(
    s.delivery,
    poolOf(s.delivery, { tenantId: domain.tenantId, domain: name }),
  );
  const own = addresses.filter(({ egresses }) =>
    members.some((member) => egresses.includes(member.name)),
  );
  const place = { hostname: s.config.hostname, trackingHost: s.config.hostname };
  const wanted = wantedRecords(domain, domain.keys, place);
  const of = (kind: WantedRecord['kind']): WantedRecord | undefined =>
    wanted.find((record) => record.kind === kind);
  const [spf, dkim, returnPath, dmarc, receiving] = await Promise.all([
    domain.sending ? checkSpf(s, domain, own) : [],
    checkDkim(s, domain, wanted),
    domain.sending ? checkReturnPath(s, domain, of('return_path_mx')) : [],
    domain.sending ? checkDmarc(s, domain) : [],
    domain.receiving ? checkReceiving(s, domain) : [],
  ]);
  const records = [...spf, ...dkim, ...returnPath, ...dmarc];
  const rules = domain.sending ? await checkSenderRules(s, { domain, own, records }) : [];
  return [...records, ...receiving, ...rules];
}

/** What the DNS showed, in the words of the doctor. */
function judge(
  about: readonly [string, string],
  found: Found,
  d: {
    readonly right: string;
    readonly severity: 'warning' | 'error';
    readonly advice: string;
  },
): Finding {
  if (found.kind === 'right') return ok(about, d.right);
  const message = shown(found.detail, 600);
  if (found.kind === 'unknown') {
    return unknown(about, {
      message,
      advice: `See whether the name servers of ${about[1]} answer.`,
    });
  }
  return bad(d.severity, about, { message, advice: d.advice });
}

async function checkSpf(
  s: Surroundings,
  domain: DomainRow,
  own: readonly OwnAddress[],
): Promise<readonly Finding[]> {
  const { name } = domain;
  const returnPath = `${domain.returnPathLabel}.${name}`;
  const { hostname } = s.config;
  const founds =
    own.length === 0
      ? [await findSpf(s.resolver, { name: returnPath, host: hostname })]
      : await Promise.all(
          own.map(({ address }) => findSpfOf(s.resolver, { name: returnPath, address })),
        );
  // One address that may not send is enough to lose mail.
  const worst =
    founds.find(({ kind }) => kind === 'wrong' || kind === 'absent') ??
    founds.find(({ kind }) => kind === 'unknown') ??
    founds[0]!;
  return [
    judge(['spf', name], worst, {
      right: `The SPF record at ${returnPath} lets ${own.length === 0 ? hostname : own.map(({ address }) => address).join(', ')} send.`,
      severity: 'error',
      advice: `Publish at ${returnPath} a TXT record "v=spf1 a:${hostname} ~all", with every address that mail leaves from and at most 10 lookups.`,
    }),
  ];
}

function checkDkim(
  s: Surroundings,
  { name }: DomainRow,
  wanted: readonly WantedRecord[],
): Promise<readonly Finding[]> {
  const keys = wanted.filter(({ kind }) => kind === 'dkim_rsa' || kind === 'dkim_ed25519');
  return Promise.all(
    keys.map(async ({ kind, name: at, value }) => {
      const isRsa = kind === 'dkim_rsa';
      const found = await findDkim(s.resolver, { name: at, value });
      return judge([isRsa ? 'dkim' : 'dkim_ed25519', name], found, {
        right: `The DKIM key at ${at} is the one that signs.`,
        severity: isRsa ? 'error' : 'warning',
        advice: `Publish at ${at} the TXT record that \`GET /domains/{id}\` shows.`,
      });
    }),
  );
}

async function checkReturnPath(
  s: Surroundings,
  { name }: DomainRow,
  wanted: WantedRecord | undefined,
): Promise<readonly Finding[]> {
  if (wanted === undefined) return [];
  const at = wanted.name;
  const found = await findMx(s.resolver, { name: at, host: wanted.value, must: 'contain' });
  return [
    judge(['return_path', name], found, {
      right: `Bounces for ${name} come home: the MX of ${at} is ${wanted.value}.`,
      severity: 'error',
      advice: `Publish at ${at} the MX record "${wanted.priority} ${wanted.value}".`,
    }),
  ];
}

async function checkDmarc(s: Surroundings, { name }: DomainRow): Promise<readonly Finding[]> {
  const about = ['dmarc', name] as const;
  const found = await findDmarc(s.resolver, name);
  if (found.kind === 'absent') {
    return [
      bad('warning', about, {
        message: `${name} has no DMARC policy, which Gmail, Yahoo and Microsoft ask of whoever sends much.`,
        advice: `Publish at _dmarc.${name} a TXT record "v=DMARC1; p=none;".`,
      }),
    ];
  }
  const finding = judge(about, found, {
    right: `${name} has a DMARC policy, and what we send is aligned by DKIM and SPF.`,
    severity: 'error',
    advice: `Publish at _dmarc.${name} exactly one TXT record, such as "v=DMARC1; p=none;".`,
  });
  if (found.kind !== 'right') return [finding];
  const policy = await policyOf(s, name);
  if (!/;\s*aspf\s*=\s*s\s*(;|$)/i.test(policy)) return [finding];
  return [
    info(
      about,
      `The DMARC policy of ${name} asks for strict SPF alignment, which the return path, a name below ${name}, does not have; DKIM alone aligns.`,
      {
        advice: `Take \`aspf=s\` out of the record at _dmarc.${name}, so that a broken signature is not the end.`,
      },
    ),
  ];
}

/** Of the name itself or of the nearest above it; '' where there is none. */
async function policyOf(s: Surroundings, name: string): Promise<string> {
  const labels = name.split('.');
  for (let skipped = 0; skipped < labels.length - 1 && skipped < 8; skipped += 1) {
    const answer = await s.resolver.txt(`_dmarc.${labels.slice(skipped).join('.')}`);
    const policy =
      answer.kind === 'found'
        ? answer.records.find((one) => /^v\s*=\s*DMARC1/.test(one))
        : undefined;
    if (policy !== undefined) return policy;
  }
  return '';
}

async function checkReceiving(s: Surroundings, domain: DomainRow): Promise<readonly Finding[]> {
  const { name } = domain;
  const { hostname } = s.config;
  const mx = await findMx(s.resolver, { name, host: hostname, must: 'prefer' });
  return [
    judge(['receiving_mx', name], mx, {
      right: `Mail to ${name} comes here: its best MX is ${hostname}.`,
      severity: 'error',
      advice: `Publish at ${name} the MX record "10 ${hostname}", and none that is as good.`,
    }),
    await checkSts(s, domain),
    await checkTlsReports(s, name),
  ];
}

async function checkSts(s: Surroundings, { name, mtaSts }: DomainRow): Promise<Finding> {
  const about = ['mta_sts', name] as const;
  const answer = await s.resolver.txt(`_mta-sts.${name}`);
  if (answer.kind === 'failed') {
    return unknown(about, {
      message: `The DNS did not say whether ${name} has MTA-STS (${answer.cause}).`,
      advice: `See whether the name servers of ${name} answer.`,
    });
  }
  const id = answer.kind === 'found' ? stsIdOf(answer.records) : null;
  if (id === null) {
    const isWrong = answer.kind === 'found' && answer.records.some((one) => /^v=STSv1/i.test(one));
    if (isWrong) {
      return bad('error', about, {
        message: `The TXT record at _mta-sts.${name} breaks the rules of MTA-STS, so hosts ignore it.`,
        advice: `Publish there exactly one TXT record of the form "v=STSv1; id=20260101000000;".`,
      });
    }
    if (mtaSts !== 'off') {
      return bad('warning', about, {
        message: `MTA-STS is on for ${name}, and the record that tells hosts so is not published.`,
        advice: `Publish at _mta-sts.${name} the TXT record that \`GET /domains/{id}\` shows.`,
      });
    }
    return info(about, `${name} has no MTA-STS, so an attacker in between could read mail to it.`, {
      advice: 'Turn MTA-STS on for the domain and publish the two records that it shows then.',
    });
  }
  if (!dials(s)) {
    return info(about, `${name} publishes MTA-STS; its policy is not fetched in development mode.`);
  }
  const fetched = await fetchStsPolicy(
    {
      resolver: s.resolver,
      guard: s.guard,
      port: s.httpsPort,
      timeoutMs: STS_MAX_MS,
      ...(s.authorities === undefined ? {} : { authorities: s.authorities }),
    },
    name,
  );
  if (fetched.kind === 'failed') {
    return bad('warning', about, {
      message: `The MTA-STS policy of ${name} could not be fetched from here: ${shown(fetched.reason)}.`,
      advice: `Open https://mta-sts.${name}/.well-known/mta-sts.txt from another network; if that fails too, mend its address and certificate.`,
    });
  }
  const { mode } = fetched.policy;
  if (mode !== 'none' && !isHostOf(fetched.policy, s.config.hostname)) {
    return bad(mode === 'enforce' ? 'error' : 'warning', about, {
      message: `The MTA-STS policy of ${name} (${mode}) does not name ${s.config.hostname}, so hosts that obey it do not bring mail here.`,
      advice: `Add "mx: ${s.config.hostname}" to the policy, and publish a new id at _mta-sts.${name}.`,
      detail: { mx: fetched.policy.mx.slice(0, 10) },
    });
  }
  return ok(
    about,
    `The MTA-STS policy of ${name} is in mode ${mode} and names ${s.config.hostname}.`,
  );
}

async function checkTlsReports(s: Surroundings, name: string): Promise<Finding> {
  const about = ['tls_rpt', name] as const;
  const at = `_smtp._tls.${name}`;
  const answer = await s.resolver.txt(at);
  if (answer.kind === 'failed') {
    return unknown(about, {
      message: `The DNS did not say whether ${name} wants TLS reports (${answer.cause}).`,
      advice: `See whether the name servers of ${name} answer.`,
    });
  }
  const records = answer.kind === 'found' ? answer.records : [];
  const ours = records.filter((one) => /^v=TLSRPTv1\s*;/.test(one));
  if (ours.length === 1 && /;\s*rua\s*=\s*\S/.test(ours[0]!)) {
    return ok(about, `${name} asks other hosts for TLS reports.`);
  }
  if (ours.length === 0) {
    return info(about, `${name} asks nobody for TLS reports, so failures to encrypt stay unseen.`, {
      advice: `Publish at ${at} a TXT record "v=TLSRPTv1; rua=mailto:" with an address that takes them.`,
    });
  }
  return bad('warning', about, {
    message: `The TLSRPT record of ${name} is not one record with a \`rua\`, so nobody reports.`,
    advice: `Publish at ${at} exactly one TXT record "v=TLSRPTv1; rua=mailto:" with an address that takes them.`,
  });
}
