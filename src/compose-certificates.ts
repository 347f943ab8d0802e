// Builds what shows, orders and renews TLS certificates, and the doors that need them: part of the composition root.
import { X509Certificate } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { createOrdering, type Ordering } from './certificates/ordering.ts';
import { findChallenge } from './certificates/rows.ts';
import { readTlsSettings, type TlsSettings } from './certificates/settings.ts';
import { openShelf, type Shelf } from './certificates/shelf.ts';
import { chainFault } from './certificates/trust.ts';
import type { Config } from './config.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createResolver } from './dns/resolver.ts';
import { findStsPolicy } from './domains/sts-policy.ts';
import { openFrontDoor, type Answerer, type FrontDoor } from './http/front-door.ts';
import { createChallengeAnswerer, type WellKnown } from './http/well-known.ts';
import type { Logger } from './log.ts';
import { openOperatorFile } from './operator-files.ts';
import { ownAddresses } from './own-addresses.ts';
import { deriveKey } from './store/seal.ts';
import type { Store } from './store/orm.ts';
import { openCertificate, type CertificateSource } from './tls-certificate.ts';

export interface ComposedCertificates {
  /** What our SMTP listeners show, and HTTPS to who asks for no other name. */
  readonly source: CertificateSource;
  readonly wellKnown: WellKnown;
  /** Why senders would not trust `source`, as the end of a sentence; null: they do. */
  readonly fault: () => string | null;
  /** Whether one of an authority may still come for our host name. */
  readonly isOrdering: () => boolean;
  /** Null: it is off. */
  readonly httpsPort: number | null;
  readonly challengePort: number | null;
  /** From now on the doors answer, and what is due is ordered. `answer` is null in a process without the API. */
  open(answer: Answerer | null): void;
  /** Lets nobody in any more, resolves when what was being answered is. */
  closeDoors(): Promise<void>;
  stop(): Promise<void>;
}

const HTTPS_DEFAULT = 443;

/** Throws PortUnusable, CertificateUnusable, and an Error about config/tls.json. */
export async function composeCertificates(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly dataDir: string;
    readonly configFolder: string;
    /** The master secret. */
    readonly secret: string;
  },
): Promise<ComposedCertificates> {
  const { store, log } = d;
  const hostname = config.hostname.toLowerCase();
  const now = (): Date => new Date();
  const file = openOperatorFile('tls', { folder: d.configFolder, read: readTlsSettings, log });
  const settings: TlsSettings = file.current();
  const sealingKey = deriveKey(d.secret, 'certificate keys at rest');
  const shelf = await openShelf({ pool: store.pool, sealingKey, log });
  const { tlsCert, tlsKey } = config;
  const source = await openCertificate({
    files: tlsCert === null || tlsKey === null ? null : { cert: tlsCert, key: tlsKey },
    ordered: () => shelf.find(hostname),
    folder: join(d.dataDir, 'secrets'),
    hostname: config.hostname,
    log,
    now,
  });
  shelf.onChange(() => void source.refresh());
  const isCovered = (name: string): boolean =>
    source.kind() === 'files' &&
    new X509Certificate(source.current().cert).checkHost(name, { subject: 'never' }) !== undefined;

  const doors: FrontDoor[] = [];
  const openDoor = async (at: {
    readonly port: number | null;
    readonly setting: string;
    readonly isSecure: boolean;
  }): Promise<FrontDoor | null> => {
    if (at.port === null || !config.roles.has('api')) return null;
    const contextOf = (name: string) => (isCovered(name) ? null : shelf.context(name));
    const door = await openFrontDoor({
      port: at.port,
      host: config.httpHost,
      setting: `${at.setting} in config/tls.json of the data folder`,
      ...(at.isSecure
        ? { tls: { current: source.current, onChange: source.onChange, contextOf } }
        : {}),
    });
    doors.push(door);
    return door;
  };
  const closeDoors = async (): Promise<void> =>
    void (await Promise.all(doors.map((door) => door.close())));
  const resolver = createResolver({ servers: config.dnsServers, keepsAnswers: false });
  let ordering: Ordering | null = null;
  const stop = async (): Promise<void> => {
    file.stop();
    await ordering?.stop();
    await closeDoors();
    shelf.stop();
    source.stop();
    resolver.close();
  };
  try {
    const https = await openDoor({
      port: settings.httpsPort,
      setting: 'https_port',
      isSecure: true,
    });
    const challenges = await openDoor({
      port: settings.challengePort,
      setting: 'http_challenge_port',
      isSecure: false,
    });
    if (config.roles.has('jobs')) {
      ordering = createOrdering({
        store,
        log,
        sealingKey,
        settings: () => file.current().acme,
        names: () => namesServed(config, file.current()),
        isCovered,
        resolver,
        guard: createAddressGuard({ allow: config.privateHosts, ownAddresses }),
        onIssued: () => shelf.refresh(),
        now,
        random: Math.random,
      });
    }
    const wellKnown: WellKnown = {
      challenge: (token) => findChallenge(store.pool, token, now()),
      stsPolicy: (host) => findStsPolicy(store.pool, host, config.hostname),
    };
    return {
      source,
      wellKnown,
      fault() {
        if (source.kind() === 'self_signed') return 'is self-signed';
        const authorities = readAuthorities(file.current());
        return chainFault(source.current().cert, { host: hostname, at: now(), authorities });
      },
      isOrdering: () => file.current().acme !== null,
      httpsPort: https?.port ?? null,
      challengePort: challenges?.port ?? null,
      open(answer) {
        if (answer !== null) https?.open(answer);
        challenges?.open(
          createChallengeAnswerer({
            challenge: wellKnown.challenge,
            httpsAt: (host) => httpsAt(config, { host, shelf, port: https?.port ?? null }),
          }),
        );
        ordering?.start();
      },
      closeDoors,
      stop,
    };
  } catch (error) {
    await stop();
    throw error;
  }
}

/** What is served over HTTPS by ourselves, and so needs certificates; SMTP needs the one of the host name. */
function namesServed(
  { hostname, publicUrl }: Config,
  { httpsPort }: TlsSettings,
): { readonly own: readonly string[]; readonly servesDomains: boolean } {
  const { protocol, hostname: publicHost } = new URL(publicUrl);
  const servesPublic = httpsPort !== null && protocol === 'https:';
  return {
    own: servesPublic ? [hostname, publicHost] : [hostname],
    servesDomains: httpsPort !== null,
  };
}

/** Where a host is reached over HTTPS from outside; null: not here. */
function httpsAt(
  { publicUrl, hostname }: Config,
  about: { readonly host: string; readonly shelf: Shelf; readonly port: number | null },
): string | null {
  const { host, shelf } = about;
  const base = new URL(publicUrl);
  const isPublicSecure = base.protocol === 'https:';
  if (isPublicSecure && host === base.hostname) return base.origin;
  if (about.port === null) return null;
  if (host !== hostname.toLowerCase() && shelf.find(host) === null) return null;
  // The public URL knows the port that is seen from outside, where that is not the one that is listened on.
  const port = isPublicSecure ? Number(base.port || HTTPS_DEFAULT) : about.port;
  return `https://${host}${port === HTTPS_DEFAULT ? '' : `:${port}`}`;
}

function readAuthorities({ acme }: TlsSettings): readonly string[] {
  const path = acme?.caFile ?? null;
  if (path === null) return [];
  try {
    return [readFileSync(path, 'utf8')];
  } catch {
    return []; // the order that reads it says so
  }
}
