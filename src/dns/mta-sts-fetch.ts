// Fetches the MTA-STS policy of a domain (RFC 8461 §3.3) over HTTPS, without being led into the operator's network.
//
// In: a domain. Out: its policy, or why there is none, in words and in RFC 8460's. The host name is asked once through
// our resolver, every address of it must pass the guard, and the socket goes to exactly such an address. The certificate
// must be valid for the name; only status 200 counts, no redirect is followed, nothing is decompressed. Bounded in time
// and size.

import { request, type RequestOptions } from 'node:https';
import type { IncomingMessage } from 'node:http';
import type { AddressGuard } from './address-guard.ts';
import { isFor, readCertificate } from './dane.ts';
import { parseStsPolicy, type FetchedSts, type StsFailure } from './mta-sts.ts';
import { lookUpHosts } from './mx-hosts.ts';
import type { Resolver } from './resolver.ts';

export interface StsFetchDependencies {
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** PEM; in place of the certificate authorities that the runtime trusts. */
  readonly authorities?: readonly string[];
  /** 443 unless a test says otherwise. */
  readonly port?: number;
  /** For all of it; 60 s as RFC 8461 §3.3 has it. */
  readonly timeoutMs?: number;
}

const TIMEOUT_MS = 60_000;
const DIAL_MAX_MS = 10_000;
const ADDRESSES_MAX = 4;
const POLICY_BYTES_MAX = 64 * 1024;
const HEADER_BYTES_MAX = 16 * 1024;

type Failed = Extract<FetchedSts, { readonly kind: 'failed' }>;

const failed = (reason: string, failure: StsFailure = 'sts-policy-fetch-error'): Failed => ({
  kind: 'failed',
  failure,
  reason,
});

export async function fetchStsPolicy(d: StsFetchDependencies, domain: string): Promise<FetchedSts> {
  const host = `mta-sts.${domain}`;
  const timeoutMs = d.timeoutMs ?? TIMEOUT_MS;
  const until = performance.now() + timeoutMs;
  // A chain of CNAMEs, each answered as late as it can be, takes longer than all the rest may.
  const looking = lookUpHosts({ ...d, random: Math.random }, [{ name: host, preference: 0 }]);
  const lookups = await within(looking, timeoutMs);
  if (lookups === null) return failed(`the DNS gave no answer for ${host} in time`);
  const [found] = lookups;
  // One bad address is enough: who mixes them is not to be trusted with the next answer.
  const [refusal] = found?.refusals ?? [];
  if (refusal !== undefined) return failed(`${host} has an address that may not be dialled`);
  const addresses = found?.addresses.map(({ address }) => address) ?? [];
  if (addresses.length === 0) {
    return failed(`${host} has no address${found?.failure ? ` (${found.failure})` : ''}`);
  }
  let last = failed('no address of it was tried');
  for (const address of addresses.slice(0, ADDRESSES_MAX)) {
    const leftMs = until - performance.now();
    if (leftMs <= 0) break;
    const got = await get(d, { host, address, leftMs });
    if (got.kind === 'text') return read(got.text);
    last = got;
    // Another address has the same certificate and the same file.
    if (got.isFinal) break;
  }
  return failed(`https://${host}: ${last.reason}`, last.failure);
}

/** Null: it took longer. */
async function within<T>(promise: Promise<T>, ms: number): Promise<T | null> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(() => resolve(null), ms);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

function read(text: string): FetchedSts {
  const policy = parseStsPolicy(text);
  return typeof policy === 'string'
    ? failed(`the policy is not valid: ${policy}`, 'sts-policy-invalid')
    : { kind: 'policy', policy };
}

type Got =
  { readonly kind: 'text'; readonly text: string } | (Failed & { readonly isFinal: boolean });

function get(
  d: StsFetchDependencies,
  to: { readonly host: string; readonly address: string; readonly leftMs: number },
): Promise<Got> {
  const { host, address } = to;
  return new Promise((resolve) => {
    const options: RequestOptions = {
      // An address, so nothing is looked up.
      host: address,
      port: d.port ?? 443,
      servername: host,
      path: '/.well-known/mta-sts.txt',
      headers: { host, accept: 'text/plain', 'user-agent': 'Mailstead' },
      agent: false,
      maxHeaderSize: HEADER_BYTES_MAX,
      minVersion: 'TLSv1.2',
      rejectUnauthorized: true,
      ...(d.authorities === undefined ? {} : { ca: [...d.authorities] }),
      // RFC 8461 §3.3: a DNS-ID, never a common name.
      checkServerIdentity: (_name, { raw }) => {
        const certificate = readCertificate(raw);
        if (certificate !== null && isFor(certificate, host, 'never')) return undefined;
        return Object.assign(new Error('of another name'), {
          code: 'ERR_TLS_CERT_ALTNAME_INVALID',
        });
      },
    };
    const asked = request(options, (response) => {
      clearTimeout(dialTimer);
      take(response, done);
    });
    const timer = setTimeout(() => done(late()), to.leftMs);
    const dialTimer = setTimeout(() => done(late()), Math.min(DIAL_MAX_MS, to.leftMs));
    const done = (got: Got): void => {
      clearTimeout(timer);
      clearTimeout(dialTimer);
      asked.destroy();
      resolve(got);
    };
    asked.on('socket', (socket) => {
      socket.on('secureConnect', () => {
        clearTimeout(dialTimer);
        // The address was checked before dialling; what answered is checked again.
        const peer = d.guard.check(socket.remoteAddress ?? '');
        if (!peer.ok) done(final('it has an address that may not be dialled'));
      });
    });
    asked.on('error', (error: NodeJS.ErrnoException) => done(ofError(error)));
    asked.end();
  });
}

const late = (): Got => ({ ...failed('the server did not answer in time'), isFinal: false });
const final = (reason: string): Got => ({ ...failed(reason), isFinal: true });

function take(response: IncomingMessage, done: (got: Got) => void): void {
  const { statusCode, headers } = response;
  if (statusCode !== 200) return done(final(`the server answered with status ${statusCode}`));
  // RFC 8461 §3.2: so that a file which somebody may upload there is not taken for a policy.
  const type = (headers['content-type'] ?? '').split(';')[0]?.trim().toLowerCase();
  if (type !== 'text/plain') return done(final('the file is not of type text/plain'));
  const coding = (headers['content-encoding'] ?? 'identity').trim().toLowerCase();
  if (coding !== 'identity') return done(final('the file is compressed although not asked for'));
  const chunks: Buffer[] = [];
  let size = 0;
  response.on('data', (chunk: Buffer) => {
    size += chunk.length;
    chunks.push(chunk);
    if (size > POLICY_BYTES_MAX) done(final(`the file has more than ${POLICY_BYTES_MAX} bytes`));
  });
  response.on('error', (error) => done(ofError(error)));
  response.on('close', () => {
    done(
      response.complete
        ? { kind: 'text', text: Buffer.concat(chunks).toString() }
        : { ...failed('the connection was lost'), isFinal: false },
    );
  });
}

function ofError(error: NodeJS.ErrnoException): Got {
  const code = error.code ?? '';
  if (/CERT|^UNABLE_TO_|SELF_SIGNED|^HOSTNAME_MISMATCH$/.test(code)) {
    const reason = `its certificate is not valid for it, or nobody vouches for it (${code})`;
    return { ...failed(reason, 'sts-webpki-invalid'), isFinal: true };
  }
  return { ...failed(`the connection failed (${code || 'unknown'})`), isFinal: false };
}
