// The certificates that this appliance shows: for which names, until when, who vouches for them; and whether ordering new
// ones works. Read from where they lie, so that it also works where no appliance runs.
import { X509Certificate } from 'node:crypto';
import { join } from 'node:path';
import { connect } from 'node:tls';
import { isIP } from 'node:net';
import { chainFault } from '../certificates/trust.ts';
import { readTextUpTo } from '../store/files.ts';
import { bad, info, ok, shown, type Finding } from './finding.ts';
import { dials, type Surroundings } from './surroundings.ts';

const DAY_MS = 86_400_000;
/** Of one of ninety days or more; in proportion of one that lives shorter and so is renewed later. */
const WARN_DAYS = 21;
const ERROR_DAYS = 7;
const FULL_LIFE_DAYS = 90;
const ROWS_MAX = 100;
/** It is noted every hour that a name is wanted (certificates/rows.ts). */
const WANTED_WITHIN = `interval '3 hours'`;
const PEM_BYTES_MAX = 1024 * 1024;
const OWN_FILE = join('secrets', 'smtp-tls.pem');
const HANDSHAKE_MS = 8_000;
/** An order that failed this often in a row is not bad luck. */
const FAILURES_MIN = 3;

const RENEW_ORDERED =
  'See what `acme` says of it; ACME renews it when a third of its life is left, where config/tls.json names an authority.';
const RENEW =
  'Renew it and put the new PEM files where MAILSTEAD_TLS_CERT and MAILSTEAD_TLS_KEY say; they are read again within seconds.';

interface Row {
  readonly name: string;
  readonly chain: string | null;
  readonly failures: number;
  readonly last_error: string | null;
  readonly after_ms: string | null;
  readonly is_wanted: boolean;
}

/** Of the listeners for SMTP. */
export async function checkCertificates(s: Surroundings): Promise<readonly Finding[]> {
  const rows = s.pool === null ? [] : await readRows(s.pool, s.config.hostname);
  const ordered = rows.flatMap((row) => {
    const finding = row.is_wanted ? judgeOrder(s, row) : null;
    return finding === null ? [] : [finding];
  });
  const { hostname, tlsCert } = s.config;
  const about = ['certificate', hostname] as const;
  const ofHost = rows.find(({ name, chain }) => name === hostname && chain !== null)?.chain ?? null;
  const path = tlsCert ?? join(s.dataDir, OWN_FILE);
  let pem = tlsCert === null ? ofHost : null;
  try {
    const isOrdered = pem !== null;
    pem ??= await readTextUpTo(path, PEM_BYTES_MAX);
    return [judgeChain(s, about, { pem, isOrdered }), ...ordered];
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (tlsCert === null && code === 'ENOENT') {
      const none = info(about, 'No certificate has been made yet; the first start makes one.');
      return [none, ...ordered];
    }
    const broken = bad('error', about, {
      message: `The certificate in ${path} cannot be read (${code ?? shown(message)}).`,
      advice: 'Put a certificate chain in PEM there that this user may read.',
    });
    return [broken, ...ordered];
  }
}

/** Of the host, and of names that are wanted now: of a domain that is gone nobody wants to hear. */
async function readRows(
  pool: NonNullable<Surroundings['pool']>,
  hostname: string,
): Promise<readonly Row[]> {
  const { rows } = await pool.query<Row>(
    `select name, chain, failures, last_error, (extract(epoch from not_after) * 1000)::bigint::text as after_ms,
       wanted_at > now() - ${WANTED_WITHIN} as is_wanted
     from certificate where name = $1 or wanted_at > now() - ${WANTED_WITHIN}
     order by name = $1 desc, failures desc, name limit ${ROWS_MAX}`,
    [hostname],
  );
  return rows;
}

/** Whether a certificate of ACME can be had; null: nothing is known against it. */
function judgeOrder(s: Surroundings, row: Row): Finding | null {
  const about = ['acme', row.name] as const;
  const leftMs = row.after_ms === null ? null : Number(row.after_ms) - s.now().getTime();
  if (row.failures === 0) {
    return leftMs === null ? null : ok(about, `The certificate of ${row.name} was ordered well.`);
  }
  const isUrgent = leftMs === null ? row.failures >= FAILURES_MIN : leftMs < ERROR_DAYS * DAY_MS;
  return bad(isUrgent ? 'error' : 'warning', about, {
    message: `Ordering a certificate for ${row.name} failed ${row.failures} times in a row: ${shown(row.last_error ?? 'no reason is known')}.`,
    advice: `See that ${row.name} leads here in the DNS and that http://${row.name}/.well-known/acme-challenge/ on port 80 reaches this appliance.`,
    detail: { failures: row.failures },
  });
}

/** Throws for what is no certificate. */
function judgeChain(
  s: Surroundings,
  about: readonly [string, string],
  { pem, isOrdered }: { readonly pem: string; readonly isOrdered: boolean },
): Finding {
  const [first] = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/.exec(pem) ?? [];
  if (first === undefined) throw new Error('it holds no certificate in PEM');
  const certificate = new X509Certificate(first);
  const { hostname } = s.config;
  if (certificate.checkHost(hostname) === undefined) {
    return bad('error', about, {
      message: `The certificate is for ${shown(certificate.subjectAltName ?? 'no name')} and not for ${hostname}, so clients and hosts that verify turn away.`,
      advice: `Get a certificate for ${hostname}, the name of this appliance (MAILSTEAD_HOSTNAME).`,
    });
  }
  const dated = judgeDates(s, about, certificate, isOrdered ? RENEW_ORDERED : RENEW);
  if (dated.severity !== 'ok') return dated;
  const isOwn =
    certificate.subject === certificate.issuer && certificate.verify(certificate.publicKey);
  if (isOwn && s.config.mode === 'production') {
    return bad('warning', about, {
      message: `The certificate of ${hostname} is self-signed, which nobody can verify: submission is off, and domains here cannot have MTA-STS.`,
      advice:
        'Set MAILSTEAD_TLS_CERT and MAILSTEAD_TLS_KEY, or have one ordered by ACME (config/tls.json).',
    });
  }
  const fault = chainFault(pem, {
    host: hostname,
    at: s.now(),
    authorities: s.ownAuthorities,
  });
  if (!isOwn && fault !== null && s.config.mode === 'production') {
    return bad('warning', about, {
      message: `The certificate of ${hostname} ${fault}, so clients and hosts that verify turn away.`,
      advice:
        'Put the whole chain into the file, with the intermediate certificates of the authority after your own; where ACME orders of an authority of your own, acme.ca_file in config/tls.json names it.',
    });
  }
  return isOwn
    ? info(about, `The certificate of ${hostname} is self-signed, which is enough for development.`)
    : dated;
}

function judgeDates(
  s: Surroundings,
  about: readonly [string, string],
  { validFromDate, validToDate: validTo }: Pick<X509Certificate, 'validFromDate' | 'validToDate'>,
  advice: string,
): Finding {
  const leftMs = validTo.getTime() - s.now().getTime();
  const days = Math.floor(leftMs / DAY_MS);
  const part = Math.min(1, (validTo.getTime() - validFromDate.getTime()) / DAY_MS / FULL_LIFE_DAYS);
  const detail = { expires_at: validTo.toISOString(), days_left: days };
  const at = validTo.toISOString().slice(0, 10);
  if (leftMs >= WARN_DAYS * part * DAY_MS) {
    return ok(about, `The certificate of ${about[1]} is good until ${at}.`, detail);
  }
  return bad(leftMs < ERROR_DAYS * part * DAY_MS ? 'error' : 'warning', about, {
    message:
      days < 0
        ? `The certificate of ${about[1]} ended on ${at}.`
        : `The certificate of ${about[1]} ends on ${at}, in ${days} days.`,
    advice,
    detail,
  });
}

/** Of MAILSTEAD_PUBLIC_URL, whoever answers there, a proxy for example: as a client sees it. */
export async function checkHttps(s: Surroundings): Promise<readonly Finding[]> {
  const { mode, publicUrl } = s.config;
  const url = new URL(publicUrl);
  const host = url.hostname.replace(/^\[|\]$/g, '');
  const about = ['https', host] as const;
  if (url.protocol !== 'https:') {
    if (mode !== 'production') return [];
    return [
      bad('warning', about, {
        message:
          'MAILSTEAD_PUBLIC_URL begins with `http:`, so API keys travel unencrypted and no one-click unsubscribe can work.',
        advice:
          'Put a certificate in front of the API and set MAILSTEAD_PUBLIC_URL to its `https:` URL.',
      }),
    ];
  }
  if (!dials(s)) return [];
  const address = isIP(host) === 0 ? await publicAddressOf(s, host) : host;
  if (address === null || !s.guard.check(address).ok) {
    return [info(about, `${host} has no public address, so its certificate was not looked at.`)];
  }
  const port = url.port === '' ? s.httpsPort : Number(url.port);
  const seen = await handshake({ address, port, host, authorities: s.authorities });
  if (seen.kind === 'failed') {
    return [
      info(about, `${host} could not be reached on port ${port} from here (${seen.cause}).`, {
        advice: `Open ${publicUrl} from another network; many routers do not let a machine reach its own public address.`,
      }),
    ];
  }
  const advice = `Renew the certificate of ${host} where HTTPS ends (the proxy in front of this appliance, or ACME).`;
  if (seen.problem !== null) {
    return [
      bad('error', about, {
        message: `Clients do not trust the certificate of ${host}: ${shown(seen.problem)}.`,
        advice,
      }),
    ];
  }
  return [judgeDates(s, about, seen.certificate, advice)];
}

async function publicAddressOf(s: Surroundings, host: string): Promise<string | null> {
  const answers = await Promise.all([s.resolver.a(host), s.resolver.aaaa(host)]);
  const addresses = answers.flatMap((one) => (one.kind === 'found' ? one.records : []));
  return addresses.find((address) => s.guard.check(address).ok) ?? null;
}

type Seen =
  | {
      readonly kind: 'seen';
      readonly certificate: X509Certificate;
      readonly problem: string | null;
    }
  | { readonly kind: 'failed'; readonly cause: string };

function handshake(to: {
  readonly address: string;
  readonly port: number;
  readonly host: string;
  readonly authorities: readonly string[] | undefined;
}): Promise<Seen> {
  return new Promise((resolve) => {
    const socket = connect({
      host: to.address,
      port: to.port,
      ...(isIP(to.host) === 0 ? { servername: to.host } : {}),
      // What is wrong with it is what we want to know; nothing is said to it.
      rejectUnauthorized: false,
      ...(to.authorities === undefined ? {} : { ca: [...to.authorities] }),
    });
    const end = (seen: Seen): void => {
      clearTimeout(timer);
      socket.destroy();
      resolve(seen);
    };
    const timer = setTimeout(() => end({ kind: 'failed', cause: 'timeout' }), HANDSHAKE_MS);
    socket.on('error', (error: NodeJS.ErrnoException) =>
      end({ kind: 'failed', cause: error.code ?? 'network error' }),
    );
    socket.on('close', () => end({ kind: 'failed', cause: 'the connection was closed' }));
    socket.once('secureConnect', () => {
      const certificate = socket.getPeerX509Certificate();
      if (certificate === undefined) return end({ kind: 'failed', cause: 'no certificate' });
      // A string, whatever the types say.
      const problem = socket.authorized ? null : String(socket.authorizationError);
      end({ kind: 'seen', certificate, problem });
    });
  });
}
