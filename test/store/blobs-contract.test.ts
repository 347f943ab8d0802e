// What every blob store promises, on disk and in a bucket; and what a bucket does that is away, silent, or cuts short.
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openDiskBlobs, type MarkedBlobStore } from '../../src/store/blob.ts';
import { BlobsUnavailable } from '../../src/store/blobs-unavailable.ts';
import { newId } from '../../src/store/id.ts';
import { openS3Blobs } from '../../src/store/s3-blobs.ts';
import { startS3, type S3Bench } from '../support/s3.ts';

const MIB = 1024 * 1024;
const folder = mkdtempSync(join(tmpdir(), 'mailstead-blobs-contract-'));
const bucket: { bench?: S3Bench } = {};
const s3 = (): S3Bench => bucket.bench!;
const stores: readonly (readonly [name: string, open: () => MarkedBlobStore])[] = [
  ['disk', () => openDiskBlobs(folder)],
  ['s3', () => openS3Blobs(s3().url)],
];

const test = suite('blob stores');
test.before(async () => {
  bucket.bench = await startS3('/of/ours');
});
test.before.each(() => {
  s3().fault = 'none';
  s3().answer = () => null;
  s3().asked.length = 0;
});
test.after(async () => {
  await s3().stop();
  rmSync(folder, { recursive: true, force: true });
});

/** Like a body that is read from a socket: one buffer, written over. */
async function* reused(sizeBytes: number, chunkBytes: number): AsyncGenerator<Buffer> {
  const buffer = Buffer.alloc(chunkBytes);
  for (let from = 0; from < sizeBytes; from += chunkBytes) {
    const chunk = buffer.subarray(0, Math.min(chunkBytes, sizeBytes - from));
    chunk.fill(String.fromCharCode(97 + ((from / chunkBytes) % 26)));
    yield await Promise.resolve(chunk);
  }
}

async function all(stream: AsyncIterable<Uint8Array> | null): Promise<Buffer | null> {
  if (stream === null) return null;
  const parts: Buffer[] = [];
  for await (const part of stream) parts.push(Buffer.from(part));
  return Buffer.concat(parts);
}

async function fails(work: Promise<unknown>): Promise<Error> {
  return work.then(
    () => assert.unreachable('it did not fail') as never,
    (error: Error) => error,
  );
}

async function listed(blobs: MarkedBlobStore, before: Date): Promise<readonly string[]> {
  const keys: string[] = [];
  for await (const key of blobs.list(before)) keys.push(key);
  return keys;
}

for (const [name, open] of stores) {
  test(`${name}: what was put is there, whole and in part`, async () => {
    const blobs = open();
    const key = newId();
    assert.is(await blobs.get(key), null);
    assert.is(await blobs.read(key), null);
    assert.is(await blobs.read(key, { offset: 0, length: 1 }), null);
    await blobs.put(key, Buffer.from('Hello world'));
    assert.is((await blobs.get(key))?.toString(), 'Hello world');
    assert.is((await all(await blobs.read(key)))?.toString(), 'Hello world');
    for (const [offset, length, text] of [
      [4, 3, 'o w'],
      [4, 0, ''],
      [6, 99, 'world'],
      [99, 3, ''],
    ] as const) {
      assert.is((await all(await blobs.read(key, { offset, length })))?.toString(), text);
    }
    await blobs.put(key, Buffer.from('again'));
    assert.is((await blobs.get(key))?.toString(), 'again');
    await blobs.remove(key);
    await blobs.remove(key);
    assert.is(await blobs.get(key), null);
  });

  test(`${name}: nothing at all is a blob, too`, async () => {
    const blobs = open();
    const [put, written] = [newId(), newId()];
    await blobs.put(put, Buffer.alloc(0));
    await blobs.write(written, reused(0, 1));
    for (const key of [put, written]) assert.is((await blobs.get(key))?.length, 0);
  });

  test(`${name}: what comes chunk by chunk, of any size, is the same afterwards`, async () => {
    const blobs = open();
    for (const sizeBytes of [1, MIB, MIB + 1, 8 * MIB, 17 * MIB + 5]) {
      const key = newId();
      await blobs.write(key, reused(sizeBytes, 70_001));
      const expected = (await all(reused(sizeBytes, 70_001)))!;
      assert.ok(expected.equals((await blobs.get(key))!), `${sizeBytes} whole`);
      assert.ok(expected.equals((await all(await blobs.read(key)))!), `${sizeBytes} streamed`);
      const offset = Math.floor(sizeBytes / 3);
      const part = await all(await blobs.read(key, { offset, length: 2 * MIB }));
      assert.ok(expected.subarray(offset, offset + 2 * MIB).equals(part!), `${sizeBytes} in part`);
      await blobs.remove(key);
    }
  });

  test(`${name}: a stream can be left in its middle`, async () => {
    const blobs = open();
    const key = newId();
    await blobs.write(key, reused(3 * MIB, 100_000));
    const stream = await blobs.read(key);
    for await (const part of stream!) {
      assert.ok((part as Buffer).length > 0);
      break;
    }
    assert.ok(stream?.destroyed);
  });

  test(`${name}: a write whose bytes fail leaves nothing`, async () => {
    const blobs = open();
    for (const sizeBytes of [3, 9 * MIB]) {
      const key = newId();
      const broken = async function* (): AsyncGenerator<Buffer> {
        yield* reused(sizeBytes, MIB);
        throw new Error('broken');
      };
      assert.is((await fails(blobs.write(key, broken()))).message, 'broken');
      assert.is(await blobs.get(key), null);
    }
    assert.is(
      s3().asked.filter((one) => one.startsWith('POST') && one.includes('uploads')).length,
      name === 's3' ? 1 : 0,
    );
  });

  test(`${name}: keys are ids and nothing else`, async () => {
    const blobs = open();
    for (const key of ['', '../../../../etc/passwd', `${newId()}.part`, newId().toUpperCase()]) {
      for (const work of [blobs.get(key), blobs.put(key, Buffer.alloc(1)), blobs.remove(key)]) {
        assert.match((await fails(work)).message, 'a blob key is a UUID');
      }
    }
  });

  test(`${name}: a list names what is older, and not the mark`, async () => {
    const blobs = open();
    assert.is(await blobs.readMark(), null);
    await blobs.writeMark('which one');
    await blobs.writeMark('which one it is');
    assert.is(await blobs.readMark(), 'which one it is');
    const keys = [newId(), newId(), newId()];
    for (const key of keys) await blobs.put(key, Buffer.from('x'));
    const found = await listed(blobs, new Date(Date.now() + 60_000));
    for (const key of keys) assert.ok(found.includes(key));
    assert.ok(found.every((key) => /^[0-9a-f-]{36}$/.test(key)));
    assert.equal(await listed(blobs, new Date(Date.now() - 60_000)), []);
  });
}

test('s3: more than one page is listed', async () => {
  const keys = [newId(), newId()];
  s3().answer = ({ url = '' }) => {
    if (!url.includes('list-type=2')) return null;
    const page = url.includes('continuation-token=next') ? 1 : 0;
    const name = `of/ours/${keys[page]!.slice(-2)}/${keys[page]}`;
    const more = page === 0 ? '<NextContinuationToken>next</NextContinuationToken>' : '';
    return `<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>${page === 0}</IsTruncated>${more}<Contents><Key>${name}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>`;
  };
  assert.equal(await listed(openS3Blobs(s3().url), new Date()), keys);
});

test('s3: uploads that nobody completed are aborted by their age', async () => {
  const key = newId();
  const upload = (id: string, name: string, at: string): string =>
    `<Upload><Key>${name}</Key><UploadId>${id}</UploadId><Initiated>${at}</Initiated></Upload>`;
  s3().answer = ({ method, url = '' }) => {
    if (method === 'DELETE' && url.includes('uploadId=')) return '<ok/>';
    if (method !== 'GET' || !/[?&]uploads/.test(url)) return null;
    const path = `of/ours/${key.slice(-2)}/${key}`;
    return `<?xml version="1.0" encoding="UTF-8"?><ListMultipartUploadsResult><IsTruncated>false</IsTruncated>${[
      upload('old', path, '2020-01-01T00:00:00.000Z'),
      upload('young', path, '2030-01-01T00:00:00.000Z'),
      upload('foreign', 'of/ours/backup.tar', '2020-01-01T00:00:00.000Z'),
    ].join('')}</ListMultipartUploadsResult>`;
  };
  await listed(openS3Blobs(s3().url), new Date('2025-01-01'));
  const aborted = s3().asked.filter((one) => one.startsWith('DELETE'));
  assert.is(aborted.length, 1);
  assert.match(aborted[0]!, 'uploadId=old');
});

test('s3: an answer that is cut short is asked for again, and is never taken for the whole', async () => {
  const blobs = openS3Blobs(s3().url);
  const key = newId();
  await blobs.write(key, reused(2 * MIB, MIB));
  s3().fault = 'cut';
  const about = s3().asked.length;
  assert.instance(await fails(blobs.get(key)), BlobsUnavailable);
  assert.is(s3().asked.length - about, 3);
  assert.instance(await fails(blobs.read(key)), BlobsUnavailable);
  // Better while it is being read.
  s3().fault = 'none';
  const stream = await blobs.read(key);
  s3().fault = 'cut';
  setTimeout(() => (s3().fault = 'none'), 100);
  assert.is((await all(stream))?.length, 2 * MIB);
});

test('s3: away or silent, it is an outage in bounded time, and what was half written is removed later', async () => {
  const blobs = openS3Blobs(s3().url, { answerMs: 200 });
  const key = newId();
  await blobs.put(key, Buffer.from('x'));
  for (const fault of ['away', 'silent'] as const) {
    s3().fault = fault;
    assert.instance(await fails(blobs.get(key)), BlobsUnavailable, fault);
    assert.instance(await fails(blobs.read(key)), BlobsUnavailable, fault);
    assert.instance(
      await fails(blobs.write(newId(), reused(9 * MIB, MIB))),
      BlobsUnavailable,
      fault,
    );
    assert.instance(await fails(blobs.remove(key)), BlobsUnavailable, fault);
  }
  s3().fault = 'none';
  assert.is((await blobs.get(key))?.toString(), 'x');
});

test('s3: who is not let in has an outage, and no password is told', async () => {
  const blobs = openS3Blobs(s3().url.replace('S3RVER:S3RVER', 'stranger:pass%2Fword'));
  const error = await fails(blobs.get(newId()));
  assert.instance(error, BlobsUnavailable);
  assert.match(error.message, 'InvalidAccessKeyId');
  assert.not.match(`${error.stack} ${JSON.stringify(error)}`, 'pass/word');
});

test('s3: a bucket that is not there is no blob that is not there', async () => {
  const blobs = openS3Blobs(s3().url.replace('@mail/', '@nobodys/'));
  assert.instance(await fails(blobs.get(newId())), BlobsUnavailable);
  assert.instance(await fails(blobs.readMark()), BlobsUnavailable);
});

test('s3: a 404 that does not say of what is an outage: it may be the answer of a proxy', async () => {
  const key = newId();
  for (const body of ['<html><body>404 Not Found</body></html>', 'default backend - 404', '']) {
    const proxy = createServer((_request, response) => {
      response.writeHead(404, { 'content-type': 'text/html' }).end(body);
    });
    await new Promise<void>((resolve) => proxy.listen(0, '127.0.0.1', () => resolve()));
    const { port } = proxy.address() as AddressInfo;
    const url = `s3://user:word@mail?endpoint=http://127.0.0.1:${port}&region=us-east-1`;
    const blobs = openS3Blobs(url, { answerMs: 500 });
    try {
      const range = { offset: 0, length: 1 };
      for (const work of [
        () => blobs.get(key),
        () => blobs.read(key, range),
        () => blobs.readMark(),
        () => blobs.put(key, Buffer.from('x')),
      ]) {
        assert.instance(await fails(work()), BlobsUnavailable, body);
      }
    } finally {
      proxy.closeAllConnections();
      await new Promise((resolve) => proxy.close(resolve));
    }
  }
});

test.run();
