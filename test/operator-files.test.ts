// The operator's files: what ships, what replaces it while the program runs, and what is never done silently.
import { chmod, mkdir, mkdtemp, rename, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../src/log.ts';
import { openOperatorFile, type OperatorFile } from '../src/operator-files.ts';
import { until } from './support/app.ts';

const test = suite('operator files');
let folder: string;
let said: string[];
let file: OperatorFile<string> | null = null;

test.before.each(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-operator-'));
  said = [];
});
test.after.each(async () => {
  file?.stop();
  file = null;
  await chmod(folder, 0o700);
  await rm(folder, { recursive: true, force: true });
});

function open(): OperatorFile<string> {
  file = openOperatorFile('delivery', {
    folder,
    lookMs: 20,
    read: (content) => {
      const { addresses } = content as { addresses?: unknown };
      if (typeof addresses !== 'string') throw new Error('addresses: must be a string');
      return addresses;
    },
    log: createLogger({
      level: 'info',
      name: 'test',
      mode: 'development',
      write: (line) => said.push(line),
    }),
  });
  return file;
}
const write = async (content: string): Promise<void> => {
  const next = join(folder, 'next');
  await writeFile(next, content);
  await rename(next, join(folder, 'delivery.json'));
};
const now = (): Promise<string> => Promise.resolve(file!.current());
const words = (): Promise<string> => Promise.resolve(said.join('\n'));

test('shipped, replaced, broken, mended, removed', async () => {
  const { current } = open();
  const shipped = current();
  assert.is(shipped, 'ipv4_first');
  await write('{ "addresses": "mine" }');
  await until(now, (value) => value === 'mine');
  await write('{ "addresses": ');
  await until(words, (text) => /cannot be used.*stays in force/.test(text));
  assert.is(current(), 'mine');
  await write('{ "addresses": 7 }');
  await until(words, (text) => text.includes('addresses: must be a string'));
  assert.is(current(), 'mine');
  await write('{ "addresses": "mended" }');
  await until(now, (value) => value === 'mended');
  await rm(join(folder, 'delivery.json'));
  await until(now, (value) => value === shipped);
});

test('a file that is there and cannot be read stops the start', async () => {
  await mkdir(join(folder, 'delivery.json'));
  assert.throws(open, /delivery\.json: .*EISDIR/);
});

test('a folder that turns out to be a file: what was said before stays in force', async () => {
  const sub = join(folder, 'config');
  await mkdir(sub);
  await writeFile(join(sub, 'delivery.json'), '{ "addresses": "mine" }');
  const outer = folder;
  folder = sub;
  const { current } = open();
  folder = outer;
  await rename(sub, join(outer, 'away'));
  await writeFile(sub, '');
  await until(words, (text) => text.includes('ENOTDIR'));
  assert.is(current(), 'mine');
});

test.run();
