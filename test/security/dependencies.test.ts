// What is shipped: every package that an installation without development brings has a licence that goes with ours, and none
// runs a program of its own when it is installed but those that package.json allows.
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'uvu';
import * as assert from 'uvu/assert';

/** Of an SPDX expression one alternative is enough; none of them asks that what is linked with it be under the same. */
const ALLOWED = new Set(
  '0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BlueOak-1.0.0 ISC MIT MIT-0 Unlicense'.split(' '),
);

interface Locked {
  readonly version?: string;
  readonly license?: string;
  readonly dev?: boolean;
  readonly devOptional?: boolean;
  readonly hasInstallScript?: boolean;
  readonly deprecated?: string;
  readonly resolved?: string;
  readonly integrity?: string;
}

const root = join(import.meta.dirname, '../..');
const read = (path: string): Record<string, unknown> =>
  JSON.parse(readFileSync(join(root, path), 'utf8')) as Record<string, unknown>;
const shipped = Object.entries(
  read('package-lock.json')['packages'] as Readonly<Record<string, Locked>>,
).filter(([path, { dev, devOptional }]) => path !== '' && dev !== true && devOptional !== true);

const isAllowed = (expression: string): boolean =>
  expression
    .replace(/^\(|\)$/g, '')
    .split(' OR ')
    .some((one) => ALLOWED.has(one));

/** What the package says itself; what is only for another platform is not here. */
function licenceOf(path: string, locked: Locked): string {
  const file = join(path, 'package.json');
  const said = existsSync(join(root, file)) ? read(file)['license'] : undefined;
  return typeof said === 'string' ? said : (locked.license ?? 'none');
}

test('every shipped package has a licence that goes with Apache-2.0', () => {
  assert.ok(shipped.length > 100, `only ${shipped.length} packages`);
  const bad = shipped
    .map(([path, locked]) => `${path} ${licenceOf(path, locked)}`)
    .filter((line) => !isAllowed(line.slice(line.indexOf(' ') + 1)));
  assert.equal(bad, []);
});

test('every shipped package is pinned by a digest, and none is given up by its makers', () => {
  const bad = shipped.flatMap(([path, { integrity, deprecated }]) => [
    ...(integrity?.startsWith('sha512-') === true ? [] : [`${path} has no SHA-512`]),
    ...(deprecated === undefined ? [] : [`${path} is deprecated: ${deprecated}`]),
  ]);
  assert.equal(bad, []);
});

test('what runs at the installation is allowed by name', () => {
  const allowed = read('package.json')['allowScripts'] as Readonly<Record<string, boolean>>;
  const bad = shipped
    .filter(([, { hasInstallScript }]) => hasInstallScript === true)
    .map(([path]) => path.slice(path.lastIndexOf('node_modules/') + 'node_modules/'.length))
    .filter((name) => allowed[name] !== true);
  assert.equal(bad, []);
});

test.run();
