// Blobs on disk: whole or in part, never half, found again by age.
import { mkdtempSync, readdirSync, rmSync, statSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';

const folder = mkdtempSync(join(tmpdir(), 'mailstead-blobs-'));
const blobs = openDiskBlobs(folder);
const pathOf = (key: string): string => join(folder, key.slice(-2), key);

async function* chunks(...parts: readonly string[]): AsyncGenerator<Buffer> {
  for (const part of parts) yield await Promise.resolve(Buffer.from(part));
}

async function all(stream: AsyncIterable<Buffer> | null): Promise<string | null> {
  if (stream === null) return null;
  const parts: Buffer[] = [];
  for await (const part of stream) parts.push(part);
  return Buffer.concat(parts).toString();
}

const test = suite('blobs');
test.after(() => rmSync(folder, { recursive: true, force: true }));

test('what was written is read, whole or in part', async () => {
  const key = newId();
  await blobs.write(key, chunks('Hello ', '', 'world'));
  assert.is((await blobs.get(key))?.toString(), 'Hello world');
  assert.is(await all(await blobs.read(key)), 'Hello world');
  assert.is(await all(await blobs.read(key, { offset: 4, length: 3 })), 'o w');
  assert.is(await all(await blobs.read(key, { offset: 4, length: 0 })), '');
  assert.is(statSync(pathOf(key)).mode & 0o777, 0o600);
  await blobs.put(key, Buffer.from('again'));
  assert.is((await blobs.get(key))?.toString(), 'again');
});

test('what is not there is null, and removed twice is removed', async () => {
  const key = newId();
  assert.is(await blobs.get(key), null);
  assert.is(await blobs.read(key), null);
  await blobs.remove(key);
  await blobs.put(key, Buffer.from('x'));
  await blobs.remove(key);
  assert.is(await blobs.get(key), null);
});

test('a write that fails leaves nothing', async () => {
  const key = newId();
  async function* broken(): AsyncGenerator<Buffer> {
    yield await Promise.resolve(Buffer.from('half'));
    throw new Error('broken');
  }
  let says = '';
  await blobs.write(key, broken()).catch((error: Error) => (says = error.message));
  assert.is(says, 'broken');
  assert.is(await blobs.get(key), null);
  assert.equal(
    readdirSync(join(folder, key.slice(-2))).filter((name) => name.startsWith(key)),
    [],
  );
});

test('keys are ids and nothing else', async () => {
  for (const key of ['', '../../../../etc/passwd', `${newId()}.part`, newId().toUpperCase()]) {
    let failed = false;
    await blobs.get(key).catch(() => (failed = true));
    assert.ok(failed, key);
  }
});

test('a list names what is older, and clears away what a crash left half-written', async () => {
  const [old, young] = [newId(), newId()];
  await blobs.put(old, Buffer.from('old'));
  await blobs.put(young, Buffer.from('young'));
  const half = `${pathOf(old)}.part`;
  writeFileSync(half, 'half');
  for (const path of [pathOf(old), half]) utimesSync(path, 1_000, 1_000);
  const found: string[] = [];
  for await (const key of blobs.list(new Date(2_000_000))) found.push(key);
  assert.equal(found, [old]);
  assert.not(readdirSync(join(folder, old.slice(-2))).includes(`${old}.part`));
});

test.run();
