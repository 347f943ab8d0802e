/**
 * The TLS certificate that our SMTP listeners show.
 *
 * In: two PEM files that an operator renews, or what was ordered for our host name, or a folder of ours; the first that is there.
 * Out: the pair in use now, and the next one as soon as it is there: files are read again when they change, our own is
 * self-signed, made when there is none and again before it ends. It never takes a pair that does not work: the one in use stays, and the log says why.
 */
import { X509Certificate, createPrivateKey, randomBytes } from 'node:crypto';
import { mkdir, open, rename } from 'node:fs/promises';
import { join } from 'node:path';
import { createSecureContext } from 'node:tls';
import type { Logger } from './log.ts';
import { makeSelfSigned } from './self-signed.ts';
import { readTextUpTo } from './store/files.ts';

export interface Certificate {
  /** PEM; the chain, our own certificate first. */
  readonly cert: string;
  /** PEM. */
  readonly key: string;
}

/** Whose it is: the operator's files; an authority's, ordered by us; nobody's. */
export type CertificateKind = 'files' | 'ordered' | 'self_signed';

export interface CertificateSource {
  /** The pair in use. */
  current(): Certificate;
  kind(): CertificateKind;
  /** Called with every later pair. */
  onChange(listener: (certificate: Certificate) => void): void;
  /** Looks now whether there is a better pair, as it also does from time to time. Never rejects. */
  refresh(): Promise<void>;
  stop(): void;
}

/** The certificate that was configured cannot be used. */
export class CertificateUnusable extends Error {
  override name = 'CertificateUnusable';
}

export interface CertificateOptions {
  /** What the operator renews; null: self-signed. */
  readonly files: { readonly cert: string; readonly key: string } | null;
  /** What was ordered for our host name; null: nothing yet. Absent: nothing ever is. */
  readonly ordered?: () => Certificate | null;
  /** Where the self-signed pair is kept. */
  readonly folder: string;
  /** Our name in the self-signed one, beside `localhost` and 127.0.0.1. */
  readonly hostname: string;
  readonly log: Logger;
  readonly now: () => Date;
}

const OWN_FILE = 'smtp-tls.pem';
const DAY_MS = 86_400_000;
const OWN_RENEWAL_MS = 30 * DAY_MS;
const REFRESH_MS = 10_000;
const PEM_BYTES_MAX = 1024 * 1024;

/** Resolves with a pair that works. Throws CertificateUnusable when the files do not hold one. */
export async function openCertificate(options: CertificateOptions): Promise<CertificateSource> {
  const { files, log } = options;
  const load = async (): Promise<{ pair: Certificate; kind: CertificateKind }> => {
    if (files !== null) return { pair: await loadFiles(files), kind: 'files' };
    const ordered = options.ordered?.() ?? null;
    if (ordered !== null && problemOf(ordered) === null) return { pair: ordered, kind: 'ordered' };
    return { pair: await loadOwn(options), kind: 'self_signed' };
  };
  let { pair: current, kind } = await load();
  let complaint = '';
  let isLoading = false;
  const listeners: ((certificate: Certificate) => void)[] = [];

  async function refresh(): Promise<void> {
    if (isLoading) return;
    isLoading = true;
    try {
      const { pair: next, kind: nextKind } = await load();
      complaint = '';
      if (next.cert === current.cert && next.key === current.key) return;
      current = next;
      kind = nextKind;
      for (const listener of listeners) listener(next);
      log.info(
        { validTo: new X509Certificate(next.cert).validTo },
        'a new TLS certificate is used',
      );
    } catch (error) {
      const { message } = error as Error;
      // Once for each fault: a pair is replaced file by file, and a broken one stays broken for a while.
      if (message !== complaint) log.error(`${message} The certificate in use stays.`);
      complaint = message;
    } finally {
      isLoading = false;
    }
  }

  const timer = setInterval(() => void refresh(), REFRESH_MS);
  timer.unref();
  return {
    current: () => current,
    kind: () => kind,
    onChange: (listener) => void listeners.push(listener),
    refresh,
    stop: () => clearInterval(timer),
  };
}

async function loadFiles(files: NonNullable<CertificateOptions['files']>): Promise<Certificate> {
  const read = async (name: string, path: string): Promise<string> => {
    try {
      return await readTextUpTo(path, PEM_BYTES_MAX);
    } catch (error) {
      const { code = 'unreadable' } = error as NodeJS.ErrnoException;
      throw new CertificateUnusable(`${name} ${path} cannot be read (${code}).`, { cause: error });
    }
  };
  const pair = {
    cert: await read('MAILSTEAD_TLS_CERT', files.cert),
    key: await read('MAILSTEAD_TLS_KEY', files.key),
  };
  const problem = problemOf(pair);
  if (problem === null) return pair;
  const [name, path] =
    problem.in === 'key' ? ['MAILSTEAD_TLS_KEY', files.key] : ['MAILSTEAD_TLS_CERT', files.cert];
  throw new CertificateUnusable(`${name} ${path} cannot be used: ${problem.text}.`);
}

/** Why a server cannot show this pair, or null. */
function problemOf({ cert, key }: Certificate): { in: 'cert' | 'key'; text: string } | null {
  let step: 'cert' | 'key' = 'key';
  let what = 'it holds no private key in PEM without a passphrase';
  try {
    const privateKey = createPrivateKey(key);
    step = 'cert';
    what = 'it holds no certificate in PEM';
    if (!new X509Certificate(cert).checkPrivateKey(privateKey)) {
      return { in: 'cert', text: 'MAILSTEAD_TLS_KEY is the key of another certificate' };
    }
    what = 'TLS does not take it';
    createSecureContext({ cert, key, minVersion: 'TLSv1.2' });
    return null;
  } catch (error) {
    return { in: step, text: `${what} (${(error as Error).message})` };
  }
}

async function loadOwn({ folder, hostname, now }: CertificateOptions): Promise<Certificate> {
  const path = join(folder, OWN_FILE);
  const kept = await readTextUpTo(path, PEM_BYTES_MAX).then(splitPem, () => null);
  if (kept !== null && isFresh(kept, { hostname, at: now() })) return kept;
  // Nothing is lost with a damaged one: nobody trusts a self-signed certificate for what it is.
  const made = makeSelfSigned(hostname, now());
  await mkdir(folder, { recursive: true, mode: 0o700 });
  const draft = join(folder, `.${OWN_FILE}.${randomBytes(8).toString('hex')}`);
  const file = await open(draft, 'wx', 0o600);
  try {
    await file.writeFile(`${made.key}\n${made.cert}\n`);
    await file.sync();
  } finally {
    await file.close();
  }
  await rename(draft, path);
  return made;
}

function isFresh(pair: Certificate, about: { hostname: string; at: Date }): boolean {
  if (problemOf(pair) !== null) return false;
  const certificate = new X509Certificate(pair.cert);
  const leftMs = Date.parse(certificate.validTo) - about.at.getTime();
  return (
    leftMs > OWN_RENEWAL_MS &&
    Date.parse(certificate.validFrom) <= about.at.getTime() &&
    certificate.checkHost(about.hostname) !== undefined
  );
}

function splitPem(text: string): Certificate | null {
  const block = (label: string): string | undefined =>
    new RegExp(`-----BEGIN ${label}-----[^-]+-----END ${label}-----`).exec(text)?.[0];
  const [key, cert] = [block('PRIVATE KEY'), block('CERTIFICATE')];
  return key === undefined || cert === undefined ? null : { key, cert };
}
