// A blob store whose operations are counted and timed.
import { blobDuration, blobOperations } from '../telemetry/instruments.ts';
import type { BlobStore } from './blob.ts';

export function measureBlobs<Store extends BlobStore>(blobs: Store): Store {
  const timed = async <T>(operation: string, work: () => Promise<T>): Promise<T> => {
    const begunAt = performance.now();
    let result = 'failed';
    try {
      const done = await work();
      result = 'done';
      return done;
    } finally {
      blobOperations.inc({ operation, result });
      blobDuration.observe({ operation }, (performance.now() - begunAt) / 1_000);
    }
  };
  return {
    ...blobs,
    put: (key, bytes) => timed('put', () => blobs.put(key, bytes)),
    write: (key, chunks) => timed('write', () => blobs.write(key, chunks)),
    get: (key) => timed('get', () => blobs.get(key)),
    read: (key, range) => timed('read', () => blobs.read(key, range)),
    remove: (key) => timed('remove', () => blobs.remove(key)),
  };
}
