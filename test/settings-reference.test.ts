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
  generated(`${path} is what the tables give: npm run generate`, () => {
    assert.fixture(readFileSync(join(root, path), 'utf8'), text);
  });
}

generated('the pages are as Prettier would write them', async () => {
  const pages = renderGeneratedFiles().filter(({ path }) => path.endsWith('.md'));
  assert.is(pages.length, 2);
  for (const { text } of pages) {
    assert.ok(await check(text, { parser: 'markdown', printWidth: 100 }));
  }
});

generated('every line of the example can be turned on', () => {
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
  assert.equal(problems, []);
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
    [],
  );
});

generated.run();
