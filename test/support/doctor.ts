// The world of the doctor for tests: a DNS server, a port 25 and an HTTPS of our own, all on loopback.
import { createServer, type Server, type Socket } from 'node:net';
import { once } from 'node:events';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { readDeliveryPolicy } from '../../src/delivery/egress.ts';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createSecureResolver } from '../../src/dns/dnssec.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import type { Finding } from '../../src/doctor/finding.ts';
import type { Surroundings } from '../../src/doctor/surroundings.ts';
import { startDns, type DnsServer, type DnsZones } from './dns.ts';

export const HOST = 'mail.host.test';

export interface World {
  readonly dns: DnsServer;
  /** What the checks are given, with these changes. */
  at(about?: Partial<Surroundings>, config?: Partial<Surroundings['config']>): Surroundings;
  stop(): Promise<void>;
}

/** With a resolver that remembers nothing, so that a test may change its zones. */
export async function openWorld(zones: DnsZones = {}): Promise<World> {
  const dns = await startDns(zones);
  const resolver = createResolver({
    servers: [dns.server],
    timeoutMs: 200,
    tries: 1,
    keepsAnswers: false,
  });
  return {
    dns,
    at: (about = {}, config = {}) => ({
      config: {
        mode: 'production',
        hostname: HOST,
        publicUrl: `https://${HOST}`,
        delivery: 'direct',
        dnsServers: [dns.server],
        roles: new Set(['api', 'mx', 'submission', 'delivery', 'jobs'] as const),
        tlsCert: null,
        messageLifetimeMs: 86_400_000,
        ...config,
      },
      policy: { dnsblZones: [], port25Domains: [], signedName: null },
      delivery: readDeliveryPolicy({}),
      resolver,
      secureResolver: createSecureResolver({ server: dns.server, timeoutMs: 200 }),
      // Documentation addresses stand for public ones; what is dialled lies on loopback.
      guard: createAddressGuard({ allow: ['192.0.2.0/24', '2001:db8::/32', '127.0.0.0/8'] }),
      pool: null,
      readBlobMark: null,
      dataDir: tmpdir(),
      now: () => new Date(),
      ticks: () => performance.now(),
      isActive: false,
      port: 1,
      httpsPort: 1,
      ownAuthorities: [],
      ...about,
    }),
    async stop() {
      resolver.close();
      await dns.stop();
    },
  };
}

export interface Greeter {
  readonly port: number;
  stop(): Promise<void>;
}

/** Says one line to whoever connects; `null`: nothing, the connection is closed. */
export async function startGreeter(line: string | null): Promise<Greeter> {
  const sockets = new Set<Socket>();
  const server: Server = createServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined);
    if (line === null) socket.destroy();
    else socket.write(`${line}\r\n`);
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return {
    port: (server.address() as AddressInfo).port,
    async stop() {
      for (const socket of sockets) socket.destroy();
      server.close();
      await once(server, 'close');
    },
  };
}

/** `code subject` and the severity. */
export const severitiesOf = (findings: readonly Finding[]): Readonly<Record<string, string>> =>
  Object.fromEntries(
    findings.map(({ code, subject, severity }) => [`${code} ${subject}`, severity]),
  );
