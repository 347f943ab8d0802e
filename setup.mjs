#!/usr/bin/env node
// The door of the project: `npm start`, `npm test` and the other scripts all come through here.
//
// It installs what is missing, builds what is out of date, then runs the verb with Node 24 or newer
// (the machine's own, or the pinned `node` package where that is older) and ends with the child's
// exit code. SIGINT, SIGTERM and SIGHUP go on to the child, so whoever stops npm stops the
// appliance in an orderly way.
//
// Runs on Node 20 with nothing installed: only `node:` imports. Everything it has to say goes to
// stderr; stdout belongs to the verb. Two of these at once in one tree take turns (a lock folder),
// and a run with nothing to do writes nothing.

import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const NODE_MAJOR_MIN = 24;
const PROGRESS_AFTER_MS = 1_000;
const PROGRESS_EVERY_MS = 10_000;
const PARENT_WATCH_MS = 500;
const TOOL_PATIENCE_MS = 1_000;
const LOCK_HEARTBEAT_MS = 1_000;
const LOCK_STALE_MS = 15_000;
const LOCK_ORPHAN_MS = 300_000;
const OUTPUT_CHARS_MAX = 1_000_000;
/** What an npm may hand on to the npm inside it: how to reach the registry. */
const REGISTRY_SETTING =
  /^npm_config_(\W|_|registry|cache|userconfig|globalconfig|(https?_?)?proxy|noproxy|ca|cert|key|strict_ssl|offline|prefer_offline|fetch_|maxsockets)/;

const root = path.dirname(fileURLToPath(import.meta.url));
const at = (...parts) => path.join(root, ...parts);
const LOCK = at('dist', '.setup-lock');
const INSTALL_STAMP = at('node_modules', '.mailstead-installed');
const BUILD_STAMP = at('dist', '.built');
const ROUTES = at('src', 'http', 'routes.gen.ts');
const ROUTES_STAMP = at('dist', '.routes');
const OPENAPI = at('docs', 'openapi.json');
const EXAMPLES = at('docs', 'examples.json');

const VERBS = {
  async start(args) {
    await build();
    return runProgram('dist/main.js', args);
  },
  async cli(args) {
    await build();
    return runProgram('dist/cli.js', args);
  },
  async bench(args) {
    await build();
    return run(['--import', 'tsx', 'test/bench/main.ts', ...args]);
  },
  async torture(args) {
    await build();
    return run(['--import', 'tsx', 'test/torture/main.ts', ...args]);
  },
  async test(args) {
    await install();
    await locked(writeRoutes, routesAreFresh);
    return run(['--import', 'tsx', 'test/run.ts', ...args]);
  },
  async build() {
    await build();
    return 0;
  },
  async generate(args) {
    if (args.some((word) => word !== 'examples')) throw new Stop('usage: generate [examples]', 2);
    await install();
    await locked(() => generate(args.includes('examples')));
    return 0;
  },
  async check() {
    await install();
    return run(['--import', 'tsx', 'test/check.ts']);
  },
  async fmt() {
    await install();
    return run([bin('prettier'), '--write', '.']);
  },
};

// ---- signals, exit codes, words -----------------------------------------------------------------

/** Ends the run with a sentence for the user and no stack. */
class Stop extends Error {
  constructor(message, code = 1) {
    super(message);
    this.code = code;
  }
}

let child = null;
let toolRuns = false;
let signalled = null;
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) {
  process.on(signal, () => {
    signalled = signal;
    child?.kill(signal);
    // npm finishes what it is at before it heeds a signal; the next run repairs what it left.
    if (toolRuns) setTimeout(() => child?.kill('SIGKILL'), TOOL_PATIENCE_MS).unref();
  });
}

// npm passes on SIGINT and SIGTERM only. Where npm dies of anything else, its child would stay
// behind with the ports.
const parent = process.ppid;
if (process.env.npm_lifecycle_event) {
  setInterval(() => {
    if (process.ppid !== parent && !signalled) process.kill(process.pid, 'SIGTERM');
  }, PARENT_WATCH_MS).unref();
}

function stopIfSignalled() {
  if (signalled) throw new Stop(`stopped by ${signalled}`, exitCodeOf(null, signalled));
}

const exitCodeOf = (code, signal) => code ?? 128 + (os.constants.signals[signal] ?? 0);
const say = (line) => process.stderr.write(`mailstead: ${line}\n`);

/** Awaits `work`; says what it is after a second, every ten seconds, and when it is done. */
async function progress(label, work) {
  const startedAt = Date.now();
  const seconds = () => `${Math.round((Date.now() - startedAt) / 1000)} s`;
  let spoken = false;
  const first = setTimeout(() => {
    spoken = true;
    say(`${label} ...`);
  }, PROGRESS_AFTER_MS);
  const again = setInterval(() => say(`${label} ... ${seconds()}`), PROGRESS_EVERY_MS);
  try {
    const result = await work;
    if (spoken) say(`${label}: done in ${seconds()}`);
    return result;
  } finally {
    clearTimeout(first);
    clearInterval(again);
  }
}

// ---- running things -----------------------------------------------------------------------------

/** The Node that runs everything but this file. */
function runtime() {
  if (Number(process.versions.node.split('.')[0]) >= NODE_MAJOR_MIN) return process.execPath;
  const pinned = at('node_modules', '.bin', 'node');
  if (!fs.existsSync(pinned)) {
    throw new Stop(`Node ${NODE_MAJOR_MIN} or newer is needed, and the pinned one is not there`);
  }
  return pinned;
}

/** The script behind a package's command, to be run with `runtime()`. */
function bin(name, packageName = name) {
  const { bin: bins } = JSON.parse(read(at('node_modules', packageName, 'package.json')));
  return at('node_modules', packageName, typeof bins === 'string' ? bins : bins[name]);
}

function launch(command, args, options) {
  stopIfSignalled();
  const started = spawn(command, args, { cwd: root, ...options });
  child = started;
  if (lockHeld) fs.writeFileSync(path.join(LOCK, 'pid'), String(started.pid));
  const ended = new Promise((resolve, reject) => {
    started.on('error', reject);
    started.on('close', (code, signal) => {
      child = null;
      resolve(exitCodeOf(code, signal));
    });
  });
  return { started, ended };
}

/** Runs Node with this terminal and answers its exit code. */
function run(args) {
  return launch(runtime(), args, { stdio: 'inherit' }).ended;
}

/** In development mode, unless the environment says otherwise. */
function runProgram(script, args) {
  if (!process.env.MAILSTEAD_MODE_FILE) process.env.MAILSTEAD_MODE ||= 'development';
  return run(['--enable-source-maps', script, ...args]);
}

/** Runs a command silently and answers its exit code and what it printed. */
async function capture(command, args, options = {}) {
  const { started, ended } = launch(command, args, {
    ...options,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let output = '';
  for (const stream of [started.stdout, started.stderr]) {
    stream.setEncoding('utf8');
    stream.on('data', (chunk) => {
      output = (output + chunk).slice(-OUTPUT_CHARS_MAX);
    });
  }
  toolRuns = true;
  const code = await ended;
  toolRuns = false;
  stopIfSignalled();
  return { code, output };
}

/** Runs one of our tools; its output is shown only when it fails, which ends the run. */
async function tool(label, args) {
  const { code, output } = await progress(label, capture(runtime(), args));
  if (code !== 0) throw new Stop(`${label} failed (exit ${code})\n${output.trim()}`);
}

// ---- stamps and the lock ------------------------------------------------------------------------

const read = (file) => {
  try {
    return fs.readFileSync(file, 'utf8');
  } catch {
    return null;
  }
};

function filesUnder(folder) {
  if (!fs.existsSync(folder)) return [];
  return fs
    .readdirSync(folder, { withFileTypes: true, recursive: true })
    .filter((entry) => entry.isFile())
    .map((entry) => path.join(entry.parentPath ?? entry.path, entry.name))
    .sort();
}

/** One hash over names and contents, so that neither clocks nor checkouts matter. */
function fingerprint(files, ...extra) {
  const hash = createHash('sha256');
  for (const file of files) hash.update(`${path.relative(root, file)}\0${read(file)}\0`);
  return hash.update(extra.join('\0')).digest('hex');
}

const ageMs = (file) => {
  try {
    return Date.now() - fs.statSync(file).mtimeMs;
  } catch {
    return 0;
  }
};

let lockHeld = false;

/**
 * Runs `work` while no other setup in this tree does. `done`, where given, is asked before the lock
 * is wanted and again when it is held: true means that nothing is left to do. The holder touches
 * the folder every second; untouched for 15 s means it was killed, but an npm that it left behind
 * may finish first (5 min at most).
 */
async function locked(work, done = () => false) {
  if (done()) return;
  if (lockHeld) return work();
  fs.mkdirSync(path.dirname(LOCK), { recursive: true });
  await progress('waiting for another npm command in this folder', takeLock());
  lockHeld = true;
  const heartbeat = setInterval(() => {
    const now = new Date();
    fs.utimes(LOCK, now, now, () => {});
  }, LOCK_HEARTBEAT_MS);
  try {
    if (!done()) await work();
  } finally {
    clearInterval(heartbeat);
    fs.rmSync(LOCK, { recursive: true, force: true });
    lockHeld = false;
  }
}

async function takeLock() {
  for (;;) {
    try {
      fs.mkdirSync(LOCK);
      return;
    } catch (error) {
      if (error.code !== 'EEXIST') throw error;
    }
    if (isStale(LOCK)) breakLock();
    else await sleep(200);
    stopIfSignalled();
  }
}

function isStale(lock) {
  const age = ageMs(lock);
  return (
    age > LOCK_ORPHAN_MS || (age > LOCK_STALE_MS && !isAlive(Number(read(path.join(lock, 'pid')))))
  );
}

function isAlive(pid) {
  if (!pid) return false;
  try {
    return process.kill(pid, 0);
  } catch (error) {
    return error.code === 'EPERM';
  }
}

/** Moves a stale lock aside; puts back one that is fresh, taken by somebody quicker. */
function breakLock() {
  const aside = `${LOCK}.${process.pid}`;
  try {
    fs.renameSync(LOCK, aside);
    if (!isStale(aside)) fs.renameSync(aside, LOCK);
    else fs.rmSync(aside, { recursive: true, force: true });
  } catch (error) {
    if (error.code !== 'ENOENT') throw error;
  }
}

// ---- install ------------------------------------------------------------------------------------

const installFingerprint = () =>
  fingerprint([at('package-lock.json')], process.platform, process.arch);
const isInstalled = () => read(INSTALL_STAMP) === installFingerprint();

async function install() {
  await locked(async () => {
    if (!installedByHand())
      await progress('installing packages (once, about half a minute)', installPackages());
    await runApprovedScripts();
    fs.writeFileSync(INSTALL_STAMP, installFingerprint());
  }, isInstalled);
}

/**
 * True when npm's own record of node_modules agrees with our lock file: somebody ran `npm install`
 * themselves.
 */
function installedByHand() {
  const record = read(at('node_modules', '.package-lock.json'));
  if (record === null) return false;
  const have = JSON.parse(record).packages;
  const want = JSON.parse(read(at('package-lock.json'))).packages;
  return Object.entries(want).every(([key, { version, optional, devOptional }]) => {
    if (key === '') return true;
    return have[key] ? have[key].version === version : optional || devOptional;
  });
}

// No install script runs here: those that package.json approves run in the next step, whatever
// npm's own rules are.
async function installPackages() {
  const clean = await npm(['ci', '--ignore-scripts']);
  if (clean.code === 0) return;
  // A registry that lacks a package for some other platform leaves a hole in the lock file, which
  // `npm ci` refuses.
  const complaints = clean.output.match(/^npm error (Missing|Invalid): .*$/gm) ?? [];
  const onlyHoles =
    complaints.length > 0 && complaints.every((line) => /Missing: \S+@ from lock file$/.test(line));
  const { code, output } = onlyHoles
    ? await npm(['install', '--no-save', '--ignore-scripts'])
    : clean;
  if (code !== 0) throw new Stop(`npm could not install the packages\n${output.trim()}`);
}

/** Runs the install scripts that `allowScripts` in package.json approves, and no others. */
async function runApprovedScripts() {
  const { allowScripts } = JSON.parse(read(at('package.json')));
  const pinned = at('node_modules', '.bin', 'node');
  const names = Object.keys(allowScripts).filter(
    (name) =>
      allowScripts[name] &&
      fs.existsSync(at('node_modules', name)) &&
      !(name === 'node' && fs.existsSync(pinned)),
  );
  const { code, output } = await progress(
    'setting up packages',
    npm(['rebuild', '--ignore-scripts=false', ...names]),
  );
  if (code !== 0) throw new Stop(`npm could not set up ${names.join(', ')}\n${output.trim()}`);
}

/** Runs npm: the one that started us where there is one, else the one on PATH. */
function npm(args) {
  const quiet = ['--loglevel=error', '--no-audit', '--no-fund', '--no-update-notifier'];
  const all = [...args, ...quiet, '--include=dev', '--include=optional'];
  const { npm_execpath: outer, npm_node_execpath: outerNode } = process.env;
  const usable =
    outer?.endsWith('npm-cli.js') && outerNode && !outerNode.startsWith(at('node_modules'));
  const options = { env: npmEnvironment() };
  if (usable) return capture(outerNode, [outer, ...all], options);
  return capture('npm', all, { ...options, shell: process.platform === 'win32' });
}

/**
 * The environment without what an outer npm put there (its flags, its lifecycle, our
 * node_modules/.bin, which is about to be replaced), but with how to reach the registry.
 */
function npmEnvironment() {
  const kept = Object.entries(process.env).filter(
    ([name]) => !name.startsWith('npm_') || REGISTRY_SETTING.test(name),
  );
  const ours = at('node_modules');
  const PATH = (process.env.PATH ?? '')
    .split(path.delimiter)
    .filter((folder) => !folder.startsWith(ours))
    .join(path.delimiter);
  return { ...Object.fromEntries(kept), PATH, SCARF_ANALYTICS: 'false' };
}

// ---- build --------------------------------------------------------------------------------------

const toolFiles = () =>
  ['package-lock.json', 'tsconfig.json', 'tsconfig.build.json', 'tsoa.json'].map((f) => at(f));
const buildFingerprint = () =>
  fingerprint([
    ...filesUnder(at('src')).filter((file) => file !== ROUTES),
    ...toolFiles(),
    at('setup.mjs'),
  ]);
const isBuilt = () =>
  read(BUILD_STAMP) === buildFingerprint() && fs.existsSync(at('dist', 'main.js'));

async function build() {
  await install();
  await locked(async () => {
    const wanted = buildFingerprint();
    fs.rmSync(BUILD_STAMP, { force: true });
    await locked(writeRoutes, routesAreFresh);
    await tool('compiling', [bin('tsc', 'typescript'), '-p', 'tsconfig.build.json']);
    copyAssets();
    fs.writeFileSync(BUILD_STAMP, wanted);
  }, isBuilt);
}

/** What under src is not TypeScript goes along; what has no source any more goes away. */
function copyAssets() {
  const keep = new Set();
  const put = (from, to) => {
    fs.mkdirSync(path.dirname(to), { recursive: true });
    fs.copyFileSync(from, to);
    keep.add(to);
  };
  for (const file of filesUnder(at('src'))) {
    const to = at('dist', path.relative(at('src'), file));
    if (!file.endsWith('.ts')) put(file, to);
    else for (const ending of ['.js', '.js.map']) keep.add(to.replace(/\.ts$/, ending));
  }
  const viewer = at('node_modules', 'rapidoc', 'dist', 'rapidoc-min.js');
  if (fs.existsSync(viewer)) put(viewer, at('dist', 'http', 'assets', 'rapidoc-min.js'));
  for (const file of filesUnder(at('dist'))) {
    const own = path.relative(at('dist'), file).startsWith('.');
    if (!own && !keep.has(file)) fs.rmSync(file);
  }
}

// ---- generated files ----------------------------------------------------------------------------

const controllers = () =>
  filesUnder(at('src', 'http')).filter((file) => file.endsWith('.controller.ts'));

/**
 * What the routes are made from: the HTTP folder, and every file whose types it can see through
 * type imports.
 */
function routeSources() {
  const seen = new Set(filesUnder(at('src', 'http')).filter((file) => file !== ROUTES));
  for (const file of seen) {
    for (const [, clause, target] of (read(file) ?? '').matchAll(
      /\bimport\s([^;]*?)\sfrom\s+'(\.[^']+)'/g,
    )) {
      if (/\btype\s/.test(clause)) seen.add(path.resolve(path.dirname(file), target));
    }
  }
  seen.delete(ROUTES);
  return [...seen].filter((file) => fs.existsSync(file)).sort((a, b) => (a < b ? -1 : 1));
}

/** Over what goes in and what came out, so that a checkout of either is noticed. */
const routesFingerprint = () =>
  fingerprint([
    ...routeSources(),
    ...toolFiles(),
    at('src', 'openapi-examples.ts'),
    EXAMPLES,
    ROUTES,
    OPENAPI,
  ]);
const routesAreFresh = () =>
  controllers().length === 0 || read(ROUTES_STAMP) === routesFingerprint();

// tsoa takes files in the order in which the disk lists them, and both the order of routes and the
// document follow it.
async function writeRoutes() {
  const config = JSON.parse(read(at('tsoa.json')));
  config.controllerPathGlobs = controllers().map((file) =>
    path.relative(root, file).replaceAll(path.sep, '/'),
  );
  if (config.controllerPathGlobs.length === 0)
    throw new Stop('there is no src/http/*.controller.ts to generate from');
  const ordered = at('dist', '.tsoa.json');
  fs.writeFileSync(ordered, JSON.stringify(config));
  await tool('generating routes', [bin('tsoa'), 'spec-and-routes', '-c', ordered]);
  const merge = ['--import', 'tsx', 'src/openapi-examples.ts', '--write'];
  await tool('putting the examples into the document', merge);
  fs.writeFileSync(ROUTES_STAMP, routesFingerprint());
}

// The routes and the OpenAPI document, the settings page and the example of an environment; the examples of the
// document are recorded anew only when that is asked for: it takes a run of the appliance.
async function generate(withExamples) {
  await writeRoutes();
  if (withExamples) {
    const record = ['--import', 'tsx', 'test/http/examples.test.ts', '--record'];
    await tool('recording the examples', record);
    await writeRoutes();
  }
  await tool('generating the settings page', [
    '--import',
    'tsx',
    'src/settings-reference.ts',
    '--write',
  ]);
}

// ---- main ---------------------------------------------------------------------------------------

const [verb, ...args] = process.argv.slice(2);
try {
  if (!Object.hasOwn(VERBS, verb ?? ''))
    throw new Stop(`usage: node setup.mjs ${Object.keys(VERBS).join('|')}`, 2);
  process.exitCode = await VERBS[verb](args);
} catch (error) {
  if (!(error instanceof Stop)) throw error;
  say(error.message);
  process.exitCode = error.code;
}
