// A verifier over a DNS server of its own, and messages for it.
import { createResolver } from '../../src/dns/resolver.ts';
import { createLogger } from '../../src/log.ts';
import type { SignatureReader } from '../../src/receiving/verdicts-aside.ts';
import { createVerifier, type Verified, type Verifier } from '../../src/receiving/verdicts.ts';
import { startDns, type DnsServer, type DnsZones } from './dns.ts';

export const HOSTNAME = 'mx.receiver.test';

export interface Verifying {
  readonly dns: DnsServer;
  readonly verifier: Verifier;
  /** Changes what the operator trusts. */
  readonly sealers: string[];
  /** What was logged, as JSON. */
  readonly logged: string[];
  verify(
    raw: string | Buffer,
    about?: { readonly mailFrom?: string; readonly address?: string; readonly helo?: string },
  ): Promise<Verified>;
  stop(): Promise<void>;
}

export async function startVerifying(
  zones: DnsZones,
  options: { readonly reader?: SignatureReader; readonly atOnceMax?: number } = {},
): Promise<Verifying> {
  const dns = await startDns(zones);
  const resolver = createResolver({
    servers: [dns.server],
    keepsAnswers: false,
    asksOddNames: true,
  });
  const sealers: string[] = [];
  const logged: string[] = [];
  const log = createLogger({ level: 'debug', name: 'test', write: (line) => logged.push(line) });
  const verifier = createVerifier({
    resolver,
    hostname: HOSTNAME,
    trustedSealers: () => sealers,
    log,
    ...options,
  });
  return {
    dns,
    verifier,
    sealers,
    logged,
    verify: (raw, { mailFrom = '', address = '192.0.2.1', helo = 'client.invalid' } = {}) =>
      verifier.verify({
        raw: typeof raw === 'string' ? Buffer.from(raw) : raw,
        mailFrom,
        client: { address, helo, isTls: false },
      }),
    async stop() {
      await verifier.close();
      resolver.close();
      await dns.stop();
    },
  };
}

/** With CRLF, from lines. */
export const lines = (...all: readonly string[]): string =>
  all.map((line) => `${line}\r\n`).join('');

/** What the message says, from `from`. */
export const letter = (from: string, body = 'Hello there.\r\n'): string =>
  lines(
    `From: ${from}`,
    'To: bob@receiver.test',
    'Subject: Hi',
    'Date: Thu, 1 Jan 2026 00:00:00 +0000',
    'Message-ID: <1@letter.test>',
  ) + `\r\n${body}`;
