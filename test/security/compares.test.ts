// Who compares a secret does so in constant time: a rule over the sources that needs no understanding of them.
//
// What is called a digest, hash, mac, tag, token, signature, secret, password or check is compared with === or .equals() only in
// the places below, each with its reason. API keys are compared by nobody: the index is asked for their hash.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'uvu';
import * as assert from 'uvu/assert';

const ARGUED: Readonly<Record<string, string>> = {
  'access/signed-link.ts': 'compares texts with timingSafeEqual',
  'audience/preference-links.ts': 'one spelling for a token: both sides are what the caller sent',
  'backup/container.ts': 'of the operator’s own file',
  'backup/tenant-import.ts': 'of a message in the operator’s own file',
  'backup/restore.ts': 'the secret is the operator’s own, at a terminal',
  'certificates/shelf.ts': 'digests of certificates, which everybody is shown',
  'delivery/tls-results.ts': 'of a policy that is public',
  'mail/loop-token.ts': 'a digest behind a tag that was compared in constant time',
  'receiving/verdicts-signatures.ts': 'of a body that its sender wrote',
  'sending/idempotency.ts': 'of a request that the caller sent, found by its own key',
  'store/appliance-facts.ts': 'the secret is the operator’s own, at the start',
  'store/lock.ts': 'who holds a file of this machine',
  'tracking/tokens.ts': 'one spelling for a token: both sides are what the caller sent',
};
const SECRET =
  /(?:digest|hash|hashOf|mac|macOf|tag|token|signature|secret|password|check|checkOf)$/i;
const PLAIN = /^(?:null|undefined|true|false|-?\d.*|'.*|".*|`.*)$/;
const COMPARED =
  /([\w.?!()[\]']+) (?:===|!==) ([\w.?!()[\]'"`-]+)|([\w.?!()[\]']+)\.equals\(([\w.?!()[\]]*)\)/g;

const folder = join(import.meta.dirname, '../../src');
const sources = readdirSync(folder, { recursive: true })
  .map((name) => String(name).replaceAll('\\', '/'))
  .filter((name) => name.endsWith('.ts') && !name.endsWith('.gen.ts') && !name.endsWith('.d.ts'))
  .map((name) => {
    const text = readFileSync(join(folder, name), 'utf8');
    return { name, code: text.replace(/\/\*[\s\S]*?\*\/|(?<=^|\s)\/\/.*$/gm, '') };
  });

/** The last name of an expression: `hash` of `row.hash!)`. */
const nameOf = (side: string): string =>
  /(\w+)(?:\([^()]*\))?[^\w]*$/.exec(side.replace(/\?\.|!/g, '.'))?.[1] ?? '';

test('no secret is compared by === or .equals()', () => {
  const found = sources.flatMap(({ name, code }) =>
    [...code.matchAll(COMPARED)].flatMap(([text, left, right, whole, given]) => {
      const sides = [left ?? whole ?? '', right ?? given ?? ''];
      if (sides.some((side) => PLAIN.test(side.replace(/[()[\]!?.]+$/, '')))) return [];
      return sides.some((side) => SECRET.test(nameOf(side))) ? [{ name, text }] : [];
    }),
  );
  assert.ok(found.length > 5, 'this rule found nothing at all, not even what is argued');
  const bad = found.filter(({ name }) => ARGUED[name] === undefined);
  assert.equal(
    bad.map(({ name, text }) => `src/${name}: ${text}`),
    [],
  );
});

test('who makes a MAC to compare it does so with timingSafeEqual', () => {
  const makers = sources.filter(({ code }) => code.includes('createHmac('));
  assert.ok(makers.length > 4, 'nobody makes a MAC any more?');
  const bad = makers.filter(({ code }) => !code.includes('timingSafeEqual('));
  assert.equal(
    bad.map(({ name }) => `src/${name} makes a MAC and never compares one`),
    [],
  );
});

test.run();
