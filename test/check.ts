// `npm run check`: everything that can be said about the tree without running it.
//
// Runs every step, also after one failed; prints one line per step, what a failed step said, and a summary.
// Exit code 1 when any failed. Generated files that are committed must be what the sources generate now:
// they are compared with what stood in the working tree before, and are left rewritten.
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';

const GENERATED = ['docs/openapi.json', 'docs/config.md', 'config/mailstead.example.env'];
const OUTPUT_CHARS_MAX = 1_000_000;

interface Step {
  readonly name: string;
  readonly run: () => Promise<{ readonly ok: boolean; readonly output: string }>;
}

const root = join(import.meta.dirname, '..');

const STEPS: readonly Step[] = [
  { name: 'generated', run: checkGenerated },
  { name: 'types', run: () => runTool('typescript/bin/tsc', '--noEmit', '-p', 'tsconfig.json') },
  { name: 'lint', run: () => runTool('oxlint/bin/oxlint', '--type-aware', '--deny-warnings') },
  { name: 'format', run: () => runTool('prettier/bin/prettier.cjs', '--check', '.') },
  { name: 'unused', run: () => runTool('knip/bin/knip.js', '--no-config-hints') },
];

const failed: string[] = [];
for (const step of STEPS) {
  const startedAt = performance.now();
  const { ok, output } = await step.run();
  const seconds = ((performance.now() - startedAt) / 1000).toFixed(1);
  console.log(`${ok ? 'ok  ' : 'FAIL'} ${step.name.padEnd(10)} ${seconds} s`);
  if (ok) continue;
  failed.push(step.name);
  console.log(output.trim().replace(/^(?=.)/gm, '     '));
}
const verdict =
  failed.length === 0 ? 'all passed' : `${failed.length} failed: ${failed.join(', ')}`;
console.log(`check: ${STEPS.length} steps, ${verdict}`);
process.exitCode = failed.length === 0 ? 0 : 1;

async function checkGenerated(): ReturnType<Step['run']> {
  const read = () => GENERATED.map((file) => readOrEmpty(join(root, file)));
  const before = read();
  const made = await runNode('setup.mjs', 'generate');
  if (!made.ok) return made;
  const after = read();
  const changed = GENERATED.filter((_, index) => before[index] !== after[index]);
  const output = `out of date, rewritten just now; read and commit: ${changed.join(', ')}`;
  return { ok: changed.length === 0, output };
}

function readOrEmpty(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch {
    return ''; // Not there yet, so it counts as changed.
  }
}

function runTool(script: string, ...args: readonly string[]): ReturnType<Step['run']> {
  return runNode(join('node_modules', script), ...args);
}

function runNode(...args: readonly string[]): ReturnType<Step['run']> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, args, { cwd: root, stdio: ['ignore', 'pipe', 'pipe'] });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', (chunk: string) => {
        output = (output + chunk).slice(-OUTPUT_CHARS_MAX);
      });
    }
    child.on('error', reject);
    child.on('close', (code) => resolve({ ok: code === 0, output }));
  });
}
