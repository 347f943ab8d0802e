// Files of contacts as text, without a database: however hostile the bytes, a row stays small, what stands before it is
// read, and others get a word in.
import { Readable } from 'node:stream';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readHeader, readRows, UnusableFile } from '../../src/audience/import-file.ts';

const test = suite('import file');
const MIB = 1024 * 1024;
/** As files are read from the disk. */
const CHUNK_BYTES = 64 * 1024;

function stream(bytes: Buffer): Readable {
  const chunks: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += CHUNK_BYTES) {
    chunks.push(bytes.subarray(at, at + CHUNK_BYTES));
  }
  return Readable.from(chunks);
}

/** The rows, and why there are no more. */
async function read(text: string): Promise<{ rows: string[][]; why: string | null }> {
  const rows: string[][] = [];
  try {
    for await (const { cells } of readRows(stream(Buffer.from(text)), ',')) rows.push([...cells]);
    return { rows, why: null };
  } catch (error) {
    assert.instance(error, UnusableFile);
    return { rows, why: (error as Error).message };
  }
}

test('a row without an end is not read to its end, whatever it is made of', async () => {
  for (const filler of [',', '"",', '"', 'x', 'x,']) {
    const { rows, why } = await read(`a,b\n${filler.repeat((4 * MIB) / filler.length)}`);
    assert.equal(rows, [['a', 'b']], filler);
    assert.match(String(why), /^it is longer than/, filler);
  }
});

test('a long row that ends is read, and so is the one behind it', async () => {
  const wide = Array.from({ length: 1_000 }, (_, index) => `"cell ""${index}"""`).join(',');
  const { rows, why } = await read(`${wide}\r\n${','.repeat(999)}\r\na`);
  assert.is(why, null);
  assert.equal(
    rows.map(({ length }) => length),
    [1_000, 1_000, 1],
  );
  assert.is(rows[0]![999], 'cell "999"');
});

test('nothing but ends of lines: others get a word in between', async () => {
  let words = 0;
  let isOver = false;
  const say = (): void => {
    words += 1;
    if (!isOver) setImmediate(say);
  };
  setImmediate(say);
  let rows = 0;
  for await (const { cells } of readRows(stream(Buffer.alloc(CHUNK_BYTES, '\n')), ',')) {
    rows += cells.length;
  }
  isOver = true;
  assert.is(rows, CHUNK_BYTES);
  assert.ok(words >= 4, `only ${words}`);
});

test('a quote in the first line that is not closed is told to who sent it', () => {
  for (const head of ['"email\na@b.test\n', `"email\n${'a@b.test\n'.repeat(5_000)}`]) {
    assert.throws(
      () => readHeader(Buffer.from(head)),
      (error: unknown) => error instanceof UnusableFile && error.message.includes('quote'),
    );
  }
});

test.run();
