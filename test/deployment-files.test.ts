// The files that people deploy with: they parse (prettier reads them), name settings that there are, and run every role.
import { readdirSync, readFileSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { check } from 'prettier';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { loadConfig, ROWS } from '../src/config.ts';

const docker = resolve(import.meta.dirname, '../docker');
const files = readdirSync(docker, { recursive: true, encoding: 'utf8' })
  .filter((name) => name.endsWith('.yaml'))
  .map((name) => ({ name, text: readFileSync(join(docker, name), 'utf8') }));
const all = (part: string): string =>
  files
    .filter(({ name }) => name.startsWith(part))
    .map(({ text }) => text)
    .join('\n');

const test = suite('deployment files');

for (const { name, text } of files) {
  test(`${name} is YAML that names settings`, async () => {
    assert.ok(await check(text, { parser: 'yaml', singleQuote: true, printWidth: 100 }), name);
    const known = new Set(ROWS.map(([, { name: setting }]) => setting));
    for (const [setting] of text.matchAll(/MAILSTEAD_[A-Z_]+/g)) {
      assert.ok(known.has(setting.replace(/_FILE$/, '')), setting);
    }
    assert.not.match(text, '\t');
  });
}

for (const part of ['compose.scaled.yaml', 'kubernetes/']) {
  test(`${part} runs every role, and each process as far as its settings go`, () => {
    const lists = [...all(part).matchAll(/MAILSTEAD_ROLES(?:: |, value: )'?([a-z,]+)/g)].map(
      ([, list]) => list!,
    );
    const roles = new Set(lists.flatMap((list) => list.split(',')));
    assert.equal([...roles].toSorted(), ['api', 'delivery', 'jobs', 'mx', 'submission']);
    for (const list of lists) {
      const config = loadConfig({
        MAILSTEAD_MODE: 'production',
        MAILSTEAD_PUBLIC_URL: 'https://mail.example.com',
        MAILSTEAD_HOSTNAME: 'mail.example.com',
        MAILSTEAD_SECRET: 'x'.repeat(64),
        MAILSTEAD_DATABASE_URL: 'postgres://mailstead:x@postgres/mailstead',
        MAILSTEAD_BLOB_STORE: 's3://mailstead:x@mailstead?endpoint=http://s3:9000&region=us-east-1',
        MAILSTEAD_TLS_CERT: '/tls/fullchain.pem',
        MAILSTEAD_TLS_KEY: '/tls/key.pem',
        MAILSTEAD_ROLES: list,
      });
      assert.equal([...config.roles], list.split(','));
    }
  });
}

test('containers run as an ordinary user, without capabilities, on a root they cannot write', () => {
  const pods = all('kubernetes/')
    .split(/^kind: (?:Deployment|StatefulSet)$/m)
    .slice(1);
  assert.is(pods.length, 3);
  for (const pod of pods) {
    for (const rule of [
      'runAsNonRoot: true',
      'allowPrivilegeEscalation: false',
      'readOnlyRootFilesystem: true',
      'capabilities: { drop: [ALL] }',
      'kind: PodDisruptionBudget',
    ]) {
      assert.ok(pod.includes(rule), rule);
    }
    // A stop takes up to 30 s.
    assert.ok(Number(/terminationGracePeriodSeconds: (\d+)/.exec(pod)?.[1]) > 30);
    for (const probe of ['startupProbe', 'livenessProbe', 'readinessProbe']) {
      assert.match(
        pod,
        new RegExp(`${probe}:\\n +httpGet: \\{ path: /health/(live|ready), port: http`),
      );
    }
  }
});

test.run();
