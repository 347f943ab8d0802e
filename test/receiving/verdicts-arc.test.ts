// How well ARC chains are understood that others have sealed: the validation suite of ValiMail over a real DNS server,
// our result beside that of mailauth as it comes. Skipped with a line when the suite is not there.
import { existsSync, readFileSync } from 'node:fs';
import { Resolver } from 'node:dns/promises';
import { fileURLToPath } from 'node:url';
import { arc } from 'mailauth/lib/arc/index.js';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import type { ARCData } from 'mailauth';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createResolver } from '../../src/dns/resolver.ts';
import { createLogger } from '../../src/log.ts';
import { createVerifier } from '../../src/receiving/verdicts.ts';
import { startDns, type DnsZones } from '../support/dns.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));
const path = `${corpora}/arc-validation/arc-validation.json`;
const CASES = 171;
const log = createLogger({ level: 'silent', name: 'test' });

/** Where the suite, which is older than the RFC, asks for something else than the RFC does. */
const RFC_SAYS_FAIL: Readonly<Record<string, string>> = {
  cv_fail_i1_as_cv_fail:
    'RFC 8617 §5.2 step 2: the newest seal says fail; the suite wants no result',
  cv_fail_i2_as2_fail: 'RFC 8617 §5.2 step 2: the newest seal says fail; the suite wants no result',
  cv_fail_i2_as1_fail:
    'RFC 8617 §5.2 step 3C: the first seal must say none; the suite wants no result',
  ams_fields_h_empty:
    'RFC 6376 §5.4: From must be signed; the suite wants a pass of a signature over no field',
};

interface Scenario {
  readonly tests: Readonly<Record<string, { readonly message: string; readonly cv?: string }>>;
  readonly 'txt-records': Readonly<Record<string, string>>;
}

const it = suite('ARC chains');

it('every case of the validation suite has the result that RFC 8617 asks for', async () => {
  if (!existsSync(path)) {
    console.log(`skipped: no ARC suite at ${path}`);
    return;
  }
  const scenarios: readonly Scenario[] = JSON.parse(readFileSync(path, 'utf8'));
  const misses: string[] = [];
  const alone: string[] = [];
  const differing: string[] = [];
  let count = 0;
  for (const { tests, 'txt-records': records } of scenarios) {
    const zones: DnsZones = Object.fromEntries(
      Object.entries(records ?? {}).map(([name, text]) => [name.toLowerCase(), { TXT: [text] }]),
    );
    const dns = await startDns(zones);
    const resolver = createResolver({ servers: [dns.server], timeoutMs: 500, tries: 1 });
    const plain = new Resolver();
    plain.setServers([dns.server]);
    const ask = (name: string, type: string) => plain.resolve(name, type) as Promise<string[]>;
    const verifier = createVerifier({
      resolver,
      hostname: 'mx.receiver.test',
      trustedSealers: () => [],
      log,
    });
    await Promise.all(
      Object.entries(tests).map(async ([name, { message, cv }]) => {
        if (cv === undefined) return;
        count += 1;
        const raw = Buffer.from(message.replaceAll(/\r?\n/g, '\r\n'));
        const client = { address: '192.0.2.1', helo: 'client.invalid', isTls: false };
        const { authentication } = await verifier.verify({ raw, mailFrom: '', client });
        const ours = authentication.arc.result;
        const asked = cv === '' ? 'none' : cv.toLowerCase();
        const wanted = name in RFC_SAYS_FAIL ? 'fail' : asked;
        if (ours !== wanted) misses.push(`${name}: ${ours}, not ${wanted}`);
        if (ours !== asked)
          differing.push(`${name}: ${ours}, not ${asked}: ${RFC_SAYS_FAIL[name] ?? '?'}`);
        const read = await dkimVerify(raw, { resolver: ask });
        const { status } = await arc(read.arc as ARCData, { resolver: ask });
        if (status.result !== asked) alone.push(`${name}: ${status.result}, not ${asked}`);
      }),
    );
    await verifier.close();
    resolver.close();
    plain.cancel();
    await dns.stop();
  }
  console.log(`ARC suite: ${count - differing.length} of ${count} as it asks`);
  for (const line of differing) console.log(`    ${line}`);
  console.log(`  mailauth as it comes: ${count - alone.length} of ${count}`);
  for (const line of alone) console.log(`    ${line}`);
  assert.equal(misses, []);
  assert.is(count, CASES);
});

it.run();
