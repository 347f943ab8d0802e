// What tests of the TLS ladder share: certificates of every kind, mail hosts that present them, a domain (a.test) that
// publishes what a test says, and the way from there to a session.
import { DEFAULT_CIPHERS, rootCertificates, setDefaultCACertificates } from 'node:tls';
import { climb, planRungs, type Rung } from '../../src/delivery/ladder.ts';
import type { Failure, Session, Target } from '../../src/delivery/session.ts';
import type { TlsResult } from '../../src/delivery/tls-results.ts';
import { createSecureResolver } from '../../src/dns/dnssec.ts';
import { createStsPolicies, parseStsPolicy, type KnownPolicy } from '../../src/dns/mta-sts.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { createTlsPolicies, type TlsPolicies } from '../../src/dns/tls-policy.ts';
import { chainOf, issue } from './certificates.ts';
import { startDns, type DnsServer } from './dns.ts';
import { startTlsHost, type TlsHost, type TlsHostOptions } from './tls-host.ts';

export const root = issue({ commonName: 'root', isAuthority: true });
export const middle = issue({ commonName: 'middle', isAuthority: true, issuer: root });
export const MX = 'mx.a.test';
export const good = issue({ names: [MX], issuer: middle });
export const PAIRS = {
  good: chainOf(good, middle),
  wildcard: chainOf(issue({ names: ['*.a.test'], issuer: middle }), middle),
  expired: chainOf(issue({ names: [MX], issuer: middle, from: -9, to: -1 }), middle),
  early: chainOf(issue({ names: [MX], issuer: middle, from: 1 }), middle),
  wrongName: chainOf(issue({ names: ['other.test'], issuer: middle }), middle),
  commonName: chainOf(issue({ commonName: MX, issuer: middle }), middle),
  selfSigned: chainOf(issue({ names: [MX] })),
  noMiddle: chainOf(good),
} as const;
/** Nothing that we offer. */
const NO_SHARED_CIPHER = { ciphers: 'AES128-SHA', maxVersion: 'TLSv1.2' } as const;
export const OLD = {
  minVersion: 'TLSv1',
  maxVersion: 'TLSv1',
  ciphers: `${DEFAULT_CIPHERS}:@SECLEVEL=0`,
} as const;

export const BROKEN: Readonly<Record<string, TlsHostOptions>> = {
  'not offered': { starttls: 'none' },
  refused: { starttls: 'refuse' },
  'no TLS behind the 220': { starttls: 'garbage' },
  'no shared cipher': {
    ...chainOf(issue({ names: [MX] })),
    ...NO_SHARED_CIPHER,
    sigalgs: 'RSA+SHA256',
  },
};

/** In one word: how the session is encrypted, or why there is none. */
export const word = (opened: Session | Failure): string =>
  'cause' in opened
    ? opened.cause
    : opened.tls === null
      ? 'plaintext'
      : (opened.tls.split(' ').at(-1) ?? '');

export const heard = (host: TlsHost): string[] =>
  host.sessions.flatMap(({ transcript }) => transcript);

export interface Ladder {
  readonly dns: DnsServer;
  /** What was noted since `clear`. */
  readonly results: TlsResult[];
  policies(): TlsPolicies;
  /** What the domain publishes from now on. Real lookups, over a store that has the policy already. */
  publish(mode: 'enforce' | 'testing' | 'none' | null, mx?: string, hasDane?: boolean): void;
  /** As above, with a signed zone, and TLSA records for the one host. */
  publishTlsa(...records: readonly string[]): void;
  start(options?: TlsHostOptions): Promise<TlsHost>;
  target(host: TlsHost, more?: Partial<Target>): Target;
  plan(target: Target, ignoresPolicy?: boolean): Promise<Rung>;
  go(rung: Rung): Promise<Session | Failure>;
  reach(host: TlsHost, more?: Partial<Target>): Promise<Session | Failure>;
  /** Ends sessions and hosts, and publishes nothing. */
  clear(): Promise<void>;
  stop(): Promise<void>;
}

/** The caller must `stop()` it; until then certificates of `root` are trusted in this process. */
export async function startLadder(): Promise<Ladder> {
  setDefaultCACertificates([...rootCertificates, root.cert]);
  const dns = await startDns({});
  const resolver = createResolver({ servers: [dns.server], keepsAnswers: false });
  let policies: TlsPolicies;
  let stored: KnownPolicy | null = null;
  const results: TlsResult[] = [];
  const hosts: TlsHost[] = [];
  const sessions: Session[] = [];

  const publish: Ladder['publish'] = (mode, mx = MX, hasDane = false) => {
    const raw = `version: STSv1\nmode: ${String(mode)}\nmx: ${mx}\nmax_age: 86400\n`;
    const policy = parseStsPolicy(raw);
    stored =
      typeof policy === 'string' ? null : { ...policy, id: '1', leftMs: 86_400_000, unusedMs: 0 };
    dns.zones['_mta-sts.a.test'] = stored === null ? {} : { TXT: ['v=STSv1; id=1'] };
    const secure = hasDane ? createSecureResolver({ server: dns.server, timeoutMs: 300 }) : null;
    policies = createTlsPolicies({
      sts: createStsPolicies({
        resolver,
        store: {
          find: () => Promise.resolve(stored),
          keep: () => Promise.reject(new Error('nothing is fetched here')),
          touch: () => Promise.resolve(),
          noteFailure: () => Promise.resolve(),
        },
        fetch: () => Promise.reject(new Error('nothing is fetched here')),
        now: () => new Date(),
        onUnkept(error) {
          throw error;
        },
      }),
      resolver: () => secure,
    });
  };
  publish(null);

  const ladder: Ladder = {
    dns,
    results,
    policies: () => policies,
    publish,
    publishTlsa(...records) {
      publish(null, MX, true);
      dns.secure.add('a.test');
      dns.zones['a.test'] = { MX: [`10 ${MX}`] };
      dns.zones[MX] = { A: ['127.0.0.1'] };
      if (records.length > 0) dns.zones[`_25._tcp.${MX}`] = { TLSA: records };
      else delete dns.zones[`_25._tcp.${MX}`];
    },
    async start(options = PAIRS.good) {
      const host = await startTlsHost(options);
      hosts.push(host);
      return host;
    },
    target: (host, more = {}) => ({
      host: MX,
      address: '127.0.0.1',
      port: host.port,
      tls: 'opportunistic',
      verify: false,
      login: null,
      helloName: 'me.test',
      source: null,
      trusted: true,
      ...more,
    }),
    async plan(target, ignoresPolicy = false) {
      const asked = await policies.of('a.test', [target.host]);
      const [rung] = planRungs([target], asked, { ignoresPolicy, isReport: false });
      if (rung === undefined) throw new Error('no rung');
      return rung;
    },
    async go(rung) {
      const opened = await climb(rung, {
        checkPeer: () => ({ ok: true }),
        note: (result) => results.push(result),
      });
      if (!('cause' in opened)) sessions.push(opened);
      return opened;
    },
    reach: async (host, more = {}) => ladder.go(await ladder.plan(ladder.target(host, more))),
    async clear() {
      for (const session of sessions.splice(0)) session.close();
      for (const host of hosts.splice(0)) await host.stop();
      for (const name of Object.keys(dns.zones)) delete dns.zones[name];
      dns.secure.clear();
      results.length = 0;
      publish(null);
    },
    async stop() {
      await ladder.clear();
      resolver.close();
      await dns.stop();
      setDefaultCACertificates([...rootCertificates]);
    },
  };
  return ladder;
}
