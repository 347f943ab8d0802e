// docs/first-ten-minutes.md, followed literally: its shell blocks run in order in one bash, in a clean folder, with `npm start` and
// `npm run cli` leading to our sources. A DNS server plays the user's provider: what the API says is to be published, is. A peer
// plays the mail host of the mailbox elsewhere. What stands below a block must be in what the block answered.
import { spawn } from 'node:child_process';
import { Resolver } from 'node:dns/promises';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readTlsSettings } from '../../src/certificates/settings.ts';
import { until } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { zonesOf } from '../support/domains.ts';
import { LOADER } from '../support/loader.ts';
import { freePort } from '../support/program.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const ROOT = join(import.meta.dirname, '../..');
const readDoc = (name: string): string => readFileSync(join(ROOT, 'docs', name), 'utf8');
const PAGE = readDoc('first-ten-minutes.md');
/** Behind what a block answered. */
const MARK = '\u001e';

interface Fence {
  readonly language: string;
  readonly text: string;
}

const fences: readonly Fence[] = [...PAGE.matchAll(/^```(\w+)\n([^]*?)^```$/gm)].map(
  ([, language = '', text = '']) => ({ language, text }),
);
const withLanguage = (wanted: string): readonly string[] =>
  fences.filter(({ language }) => language === wanted).map(({ text }) => text);

interface Shell {
  /** Its exit code, and all that it wrote. */
  run(block: string): Promise<{ readonly code: number; readonly said: string }>;
  end(): Promise<void>;
}

/** What a reader has open: variables, functions and jobs stay from block to block. */
function openShell(cwd: string, env: NodeJS.ProcessEnv): Shell {
  const bash = spawn('bash', ['--norc', '--noprofile'], { cwd, env, detached: true });
  let said = '';
  let wake = (): void => undefined;
  for (const stream of [bash.stdout, bash.stderr]) {
    stream.on('data', (chunk: Buffer) => {
      said += chunk.toString();
      wake();
    });
  }
  const gone = once(bash, 'exit').then(() => wake());
  let count = 0;
  return {
    async run(block) {
      const file = join(cwd, `.block-${(count += 1)}.sh`);
      await writeFile(file, block);
      said = '';
      bash.stdin.write(`. '${file}' < /dev/null 2>&1; printf '${MARK}%s${MARK}' $?\n`);
      for (;;) {
        const [answer = '', code] = said.split(MARK);
        if (code !== undefined && said.endsWith(MARK)) return { code: Number(code), said: answer };
        assert.is(bash.exitCode, null, `the shell ended: ${said}`);
        await new Promise<void>((resolve) => (wake = resolve));
      }
    },
    async end() {
      // Whatever the page left running goes in order, then the shell.
      bash.stdin.end('kill $(jobs -p) 2> /dev/null; wait\n');
      await gone;
    },
  };
}

/** Each line of `expected` is one of `said`; `…` stands for anything. */
function expectAnswer(expected: string, said: string, block: string): void {
  const lines = said.split('\n').map((line) => line.trim());
  for (const wanted of expected.trim().split('\n')) {
    const pattern = wanted
      .trim()
      .split('…')
      .map((part) => part.replace(/[$()*+.?[\\\]^{|}]/g, '\\$&').replace(/ +/g, '\\s+'))
      .join('.*');
    const isThere = lines.some((line) => new RegExp(`^${pattern}$`).test(line));
    assert.ok(isThere, `\n${block}\nshould answer\n  ${wanted}\nand answered\n${said}`);
  }
}

const test = suite('first ten minutes');
let folder: string;
let dns: DnsServer;
let elsewhere: RawPeer;
let shell: Shell;
let httpPort: string;

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-ten-'));
  elsewhere = await startRawPeer();
  dns = await startDns({
    'mail.example.com': { A: ['127.0.0.1'] },
    'example.net': { MX: ['10 mx.example.net'] },
    'mx.example.net': { A: ['127.0.0.1'] },
  });
  // Stands for the clone.
  const clone = join(folder, 'clone');
  await mkdir(clone);
  const loader = LOADER.map((word) => (word === 'tsx' ? import.meta.resolve('tsx') : word));
  const node = [process.execPath, ...loader].map((word) => `'${word}'`).join(' ');
  const source = (name: string): string => `exec ${node} '${join(ROOT, 'src', name)}'`;
  const scripts = { start: source('main.ts'), cli: source('cli.ts') };
  await writeFile(join(clone, 'package.json'), JSON.stringify({ scripts }));

  const ports = await Promise.all(Array.from({ length: 5 }, freePort));
  const [http = '', mx = '', submission = '', submissions = '', metrics = ''] = ports.map(String);
  httpPort = http;
  const inherited = Object.entries(process.env).filter(
    ([name]) => !/^(?:MAILSTEAD|npm)_/.test(name),
  );
  shell = openShell(clone, {
    ...Object.fromEntries(inherited),
    HOME: folder,
    // Where what the page leaves out comes from: our sources, no registry.
    TSX_TSCONFIG_PATH: join(ROOT, 'tsconfig.json'),
    npm_config_update_notifier: 'false',
    npm_config_offline: 'true',
    // What the page names for a try without an internet.
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(elsewhere.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_HTTP_PORT: http,
    MAILSTEAD_MX_PORT: mx,
    MAILSTEAD_SUBMISSION_PORT: submission,
    MAILSTEAD_SUBMISSIONS_PORT: submissions,
    MAILSTEAD_METRICS_PORT: metrics,
  });
});
test.after(async () => {
  await shell.end();
  await elsewhere.stop();
  await dns.stop();
  await rm(folder, { recursive: true, force: true });
});

/** What the reader does between two blocks, or has time for. */
const MEANWHILE: readonly { readonly after: string; readonly act: () => Promise<void> }[] = [
  {
    after: 'domain=$(api /domains',
    async act() {
      const { said } = await shell.run('echo "$domain"');
      Object.assign(dns.zones, zonesOf(JSON.parse(said) as Parameters<typeof zonesOf>[0]));
    },
  },
  {
    after: 'email=$(api /emails',
    async act() {
      await untilSays('api "/emails/$(field id <<< "$email")"', '"last_event":"delivered"');
    },
  },
  {
    after: 'curl -sS "smtp://',
    async act() {
      await untilSays(
        'api "/receiving/forwarding-rules/$(field id <<< "$rule")"',
        '"explanation":"Relayed',
      );
      await until(
        async () => elsewhere.messages.length,
        (count) => count === 2,
      );
    },
  },
];

const untilSays = (question: string, answer: string): Promise<unknown> =>
  until(
    () => shell.run(question),
    ({ said }) => said.includes(answer),
  );

test('every block does what the page says', async () => {
  let blocks = 0;
  for (const [at, { language, text }] of fences.entries()) {
    if (language !== 'sh') continue;
    blocks += 1;
    const { code, said } = await shell.run(text);
    // The doctor's own: no provider has set a PTR record here.
    assert.is(code, text.startsWith('mailstead doctor') ? 1 : 0, `${text}\n${said}`);
    for (const { after, act } of MEANWHILE) if (text.includes(after)) await act();
    const below = fences[at + 1];
    if (below?.language === 'text') expectAnswer(below.text, said, text);
  }
  assert.ok(blocks >= 10, `${blocks} blocks`);
});

test('what left is signed, what came is kept and went on', async () => {
  const [sent, forwarded] = elsewhere.messages;
  assert.match(sent?.mail ?? '', /^FROM:<b\+[^@]+@send\.example\.com>/);
  const resolver = new Resolver();
  resolver.setServers([dns.server]);
  for (const message of [sent, forwarded]) {
    assert.equal(message?.rcpts, ['TO:<you@example.net>']);
    const { results } = await dkimVerify(message?.raw ?? '', {
      resolver: (name: string) => resolver.resolveTxt(name),
    });
    const verdicts = results.map(
      ({ signingDomain, status }) => `${signingDomain} ${status.result}`,
    );
    assert.equal(verdicts, ['example.com pass', 'example.com pass']);
  }
  assert.match(String(forwarded?.raw), /^Delivered-To: hello@example\.com\r$/m);
  assert.match(String(forwarded?.raw), /^Yes\?\r$/m);
});

test('it was stopped, and the unit for systemd leads to where it was', async () => {
  const live = await fetch(`http://127.0.0.1:${httpPort}/health/live`).catch(() => null);
  assert.is(live, null);
  const unit = readFileSync(join(folder, 'mailstead', 'mailstead.service'), 'utf8');
  assert.match(unit, /^WorkingDirectory=\/.*\/clone$/m);
  const [, program = ''] = /^ExecStart=(\S+) start$/m.exec(unit) ?? [];
  assert.ok(existsSync(program), unit);
});

test('what the Docker variant names is in docker/compose.yaml; the settings for TLS are such', () => {
  const compose = readFileSync(join(ROOT, 'docker/compose.yaml'), 'utf8');
  const blocks = withLanguage('console').join('');
  const made = [...blocks.matchAll(/> (\w+)$/gm)].map(([, name]) => name);
  const mounted = [...compose.matchAll(/file: \.\/secrets\/(\w+)/g)].map(([, name]) => name);
  assert.equal(new Set(made), new Set(mounted));
  const services = [...blocks.matchAll(/docker compose (?:exec -T|logs) (\w+)/g)];
  assert.ok(services.length >= 3);
  for (const [, name] of services) assert.match(compose, new RegExp(`^  ${name}:$`, 'm'));
  for (const [, name] of blocks.matchAll(/"(MAILSTEAD_\w+)=/g)) {
    assert.ok(compose.includes(`\${${name}`), name);
  }
  const [settings = ''] = withLanguage('json');
  assert.is(readTlsSettings(JSON.parse(settings)).httpsPort, 443);
});

const anchorsOf = (doc: string): readonly string[] =>
  [...doc.matchAll(/^#+ (.+)$/gm)].map(([, text = '']) =>
    text
      .toLowerCase()
      .replace(/[^\p{L}\p{N} -]/gu, '')
      .replaceAll(' ', '-'),
  );

test('the links of the pages for operators lead somewhere, and operations.md lists all that it has', () => {
  const links: string[] = [];
  for (const name of ['first-ten-minutes.md', 'scaling.md', 'operations.md']) {
    for (const [, file = '', anchor] of readDoc(name).matchAll(
      /\]\(([^)#:\s]*)(?:#([^)\s]+))?\)/g,
    )) {
      const target = file === '' ? name : file;
      assert.ok(existsSync(join(ROOT, 'docs', target)), `${name}: ${target}`);
      if (anchor === undefined) continue;
      assert.ok(anchorsOf(readDoc(target)).includes(anchor), `${name}: ${target}#${anchor}`);
      links.push(`${target}#${anchor}`);
    }
  }
  const sections = [...readDoc('operations.md').matchAll(/^## .+$/gm)].flatMap(([heading]) =>
    anchorsOf(heading),
  );
  assert.ok(sections.length > 20);
  for (const one of sections)
    assert.ok(links.includes(`operations.md#${one}`), `not listed: ${one}`);
});

test.run();
