// The files that are written from the table of settings: up to date, and true.
import { readFileSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { check } from 'prettier';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { renderGeneratedFiles } from '../src/settings-reference.ts';
import { API_KEY, problemsOf, SECRET } from './support/settings.ts';

const generated = suite('settings reference');
const root = resolve(import.meta.dirname, '..');

for (const { path, text } of renderGeneratedFiles()) {
  generated(`${path} is what src/config.ts gives: npm run generate`, () => {
    assert.fixture(readFileSync(join(root, path), 'utf8'), text);
  });
}

generated('the reference is as Prettier would write it', async () => {
  const [reference] = renderGeneratedFiles();
  assert.ok(await check(reference?.text ?? '', { parser: 'markdown', printWidth: 100 }));
});

generated('every line of the example can be turned on, but for what is not in this release', () => {
  const example = renderGeneratedFiles()[1]?.text ?? '';
  const lines = [...example.matchAll(/^#(MAILSTEAD_\w+)=(.*)$/gm)];
  const all = Object.fromEntries(lines.map(([, name, value]) => [name, value]));
  const variables = {
    ...all,
    MAILSTEAD_SECRET: SECRET,
    MAILSTEAD_API_KEY: API_KEY,
    MAILSTEAD_DELIVERY: 'smarthost',
  };
  const problems = problemsOf(variables);
  assert.ok(
    problems.every((problem) => problem.endsWith('not in this release; leave it out.')),
    problems.join('\n'),
  );
  assert.equal(
    problems.map((problem) => problem.split(' ')[0]),
    ['METRICS_PORT'].map((name) => `MAILSTEAD_${name}`),
  );
  assert.is(all['MAILSTEAD_SECRET'], '', 'no secret to copy');
  assert.is(all['MAILSTEAD_API_KEY'], '', 'no key to copy');
});

generated('the reference says what is not in this release', () => {
  const rows = (renderGeneratedFiles()[0]?.text ?? '')
    .split('\n')
    .filter((row) => row.startsWith('| `'));
  const later = rows.filter((row) => row.includes('ot in this release'));
  assert.is(rows.length, 28);
  assert.equal(
    later.map((row) => /MAILSTEAD_(\w+)/.exec(row)?.[1]),
    ['METRICS_PORT', 'BLOB_STORE'],
  );
});

generated.run();
