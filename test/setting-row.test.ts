// Settings whose values stand in files.
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { loadConfig } from '../src/config.ts';
import { API_KEY, env, problemsOf, SECRET } from './support/settings.ts';

const files = suite('config: files');
let folder = '';
files.before(() => {
  folder = mkdtempSync(join(tmpdir(), 'mailstead-config-'));
});
files.after(() => rmSync(folder, { recursive: true, force: true }));

function file(name: string, content: string | Uint8Array): string {
  writeFileSync(join(folder, name), content);
  return join(folder, name);
}

files('one line break at the end is dropped', () => {
  for (const end of ['', '\n', '\r\n']) {
    const variables = env({ SECRET_FILE: file('secret', SECRET + end), SECRET: '' });
    assert.is(loadConfig(variables).secret, SECRET);
  }
});

files('works for what is no secret, the mode included', () => {
  const variables = env({ MODE_FILE: 'm', HOSTNAME: 'a.test', PUBLIC_URL: 'http://a.test' });
  const config = loadConfig({ ...variables, MAILSTEAD_SECRET_FILE: 's' }, (path) =>
    path === 'm' ? 'production\n' : SECRET,
  );
  assert.is(config.mode, 'production');
});

files('a bad value from a file is named as the setting', () => {
  const [problem = ''] = problemsOf(env({ HTTP_PORT_FILE: file('port', 'http\n') }));
  assert.match(problem, /^MAILSTEAD_HTTP_PORT is "http"/);
});

const UNUSABLE: readonly (readonly [string, () => string, RegExp])[] = [
  ['missing', () => join(folder, 'nowhere'), /cannot be read \(ENOENT\)/],
  ['a folder', () => folder, /cannot be read \(EISDIR\)/],
  ['empty', () => file('empty', '\n'), /names an empty file/],
  ['too large', () => file('large', 'x'.repeat(65_537)), /cannot be read \(EFBIG\)/],
  ['endless', () => '/dev/zero', /cannot be read \(EFBIG\)/],
  ['binary', () => file('binary', Uint8Array.of(0xff, 0xfe)), /ERR_ENCODING_INVALID/],
];

for (const [title, path, says] of UNUSABLE) {
  files(`unusable: ${title}`, () => {
    for (const name of ['LOG_LEVEL_FILE', 'SECRET_FILE']) {
      const problems = problemsOf(env({ [name]: path() }));
      assert.is(problems.length, 1);
      assert.match(problems[0] ?? '', says);
      assert.is(problems[0]?.includes(path()), name === 'LOG_LEVEL_FILE');
    }
  });
}

files('name and file together', () => {
  const problems = problemsOf(env({ API_KEY, API_KEY_FILE: '/nowhere' }));
  assert.equal(problems, [
    'MAILSTEAD_API_KEY and MAILSTEAD_API_KEY_FILE are both set; set only one.',
  ]);
});

files.run();
