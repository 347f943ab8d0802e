// How well SPF is understood that others have described: the suite of RFC 7208 over a real DNS server, our result beside
// that of mailauth as it comes. Skipped with a line when the suite is not there; verdicts.test.ts has cases of its own.
import { Resolver } from 'node:dns/promises';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { spf } from 'mailauth/lib/spf/index.js';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createResolver } from '../../src/dns/resolver.ts';
import { createLogger } from '../../src/log.ts';
import { createVerifier } from '../../src/receiving/verdicts.ts';
import { startDns, type DnsRecords, type DnsZones } from '../support/dns.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));
const path = `${corpora}/spf-rfc7208/rfc7208-tests.json`;
const CASES = 203;
const HOSTNAME = 'mx.receiver.test';
/** What cannot be said to a verifier that gets its questions answered by a DNS server: none so far. */
const NOT_EXPRESSIBLE: Readonly<Record<string, string>> = {};

const LAZY = 'it does not look at the whole record first (§4.6); its strict mode does';
const NAMES = 'it asks only for names that end like a domain, and says permerror; strict mode asks';
const CARES = 'c-ares asks for no name with these characters; asksOddNames does';
/** What mailauth gets wrong as it comes, and what makes it right here. */
const WHY: Readonly<Record<string, string>> = {
  'bare-ip6': LAZY,
  'exp-syntax-error': LAZY,
  'exp-twice': LAZY,
  'exp-only-macro-char': LAZY,
  'invalid-hello-macro': NAMES,
  'hello-domain-literal': NAMES,
  'require-valid-helo': NAMES,
  'a-colon-domain': CARES,
  'a-colon-domain-ip4mapped': CARES,
  'mx-colon-domain': CARES,
  'mx-colon-domain-ip4mapped': CARES,
  'macro-mania-in-domain': CARES,
};

interface Case {
  readonly helo: string;
  readonly host: string;
  readonly mailfrom: string;
  readonly result: string | readonly string[];
}
type ZoneRecord = 'TIMEOUT' | Readonly<Record<string, string | readonly (string | number)[]>>;
interface Scenario {
  readonly description: string;
  readonly tests: Readonly<Record<string, Case>>;
  readonly zonedata: Readonly<Record<string, readonly ZoneRecord[]>>;
}

const TYPES = ['A', 'AAAA', 'MX', 'PTR', 'TXT'] as const;

/** SPF entries also serve TXT unless the name has TXT entries of its own; TIMEOUT is for all that is not there. */
function zoneOf(records: readonly ZoneRecord[]): DnsRecords | 'TIMEOUT' {
  const listed = records.filter((record) => record !== 'TIMEOUT');
  const isSilent = listed.length < records.length;
  if (isSilent && listed.length === 0) return 'TIMEOUT';
  const of = (type: string) => listed.flatMap((record) => (type in record ? [record[type]!] : []));
  const texts = of('TXT').length > 0 ? of('TXT').filter((text) => text !== 'NONE') : of('SPF');
  const zone: Record<string, unknown> = {};
  for (const type of TYPES) {
    const values = type === 'TXT' ? texts : of(type);
    const written = values.map((value) => {
      if (typeof value === 'string') return value;
      return type === 'MX' ? value.join(' ') : value.join('');
    });
    // A name must be there for the empty MX list, too.
    if (written.length > 0) zone[type] = written.map((one) => (one === '0 ' ? '0 .' : one));
    else if (isSilent) zone[type] = 'TIMEOUT';
  }
  const [cname] = of('CNAME');
  return typeof cname === 'string' ? { CNAME: cname } : zone;
}

const it = suite('SPF as RFC 7208 describes it');

it('every case of its test suite has the result that it asks for', async () => {
  if (!existsSync(path)) {
    console.log(`skipped: no SPF suite at ${path}`);
    return;
  }
  const scenarios: readonly Scenario[] = JSON.parse(readFileSync(path, 'utf8'));
  const misses: string[] = [];
  const alone: string[] = [];
  let count = 0;
  for (const { description, tests, zonedata } of scenarios) {
    const zones: DnsZones = {};
    for (const [name, records] of Object.entries(zonedata)) {
      zones[name.toLowerCase()] = zoneOf(records);
    }
    const dns = await startDns(zones);
    const resolver = createResolver({
      servers: [dns.server],
      timeoutMs: 250,
      tries: 1,
      asksOddNames: true,
    });
    const plain = new Resolver({ timeout: 250, tries: 1 });
    plain.setServers([dns.server]);
    const log = createLogger({ level: 'silent', name: 'test' });
    const verifier = createVerifier({
      resolver,
      hostname: HOSTNAME,
      trustedSealers: () => [],
      log,
    });
    await Promise.all(
      Object.entries(tests).map(async ([name, { helo, host, mailfrom, result }]) => {
        if (name in NOT_EXPRESSIBLE) return;
        count += 1;
        const wanted = [result].flat();
        const raw = Buffer.from('From: ann@author.invalid\r\n\r\nHello\r\n');
        const client = { address: host, helo, isTls: false };
        const { authentication } = await verifier.verify({ raw, mailFrom: mailfrom, client });
        const { spf: ours } = authentication;
        if (!wanted.includes(ours.result)) {
          misses.push(`${description}: ${name}: ${ours.result}, not ${wanted.join(' or ')}`);
        }
        const own = await spf({
          sender: mailfrom,
          ip: host,
          helo,
          mta: HOSTNAME,
          resolver: (domain, type) => plain.resolve(domain, type) as Promise<string[]>,
        });
        if (!wanted.includes(own.status.result)) {
          alone.push(
            `${name}: ${own.status.result}, not ${wanted.join(' or ')}: ${WHY[name] ?? 'unknown'}`,
          );
        }
      }),
    );
    await verifier.close();
    resolver.close();
    plain.cancel();
    await dns.stop();
  }
  console.log(`SPF suite of RFC 7208: ${count - misses.length} of ${count} as it asks`);
  console.log(`  mailauth as it comes: ${count - alone.length} of ${count}`);
  for (const line of alone) console.log(`    ${line}`);
  for (const [name, why] of Object.entries(NOT_EXPRESSIBLE))
    console.log(`  left out: ${name}: ${why}`);
  assert.equal(misses, []);
  assert.is(count + Object.keys(NOT_EXPRESSIBLE).length, CASES);
});

it.run();
