// Messages while they arrive: in memory while they are small, in a file of their own from then on, so that slow clients
// with large messages cost disk and not memory.
import { randomUUID } from 'node:crypto';
import { mkdir, open, readFile, rm, type FileHandle } from 'node:fs/promises';
import { join } from 'node:path';
import type { SMTPServerDataStream } from 'smtp-server';
import { WireSurvey, type Survey } from '../mail/wire-survey.ts';

export interface SpooledMessage {
  readonly sizeBytes: number;
  readonly survey: Survey;
  read(): Promise<Buffer>;
  /** Must be called, whatever became of it. */
  discard(): Promise<void>;
}

/** There is no room for what arrives. */
export class SpoolFull extends Error {
  override name = 'SpoolFull';
}

const MEMORY_MAX_BYTES = 64 * 1024;

export interface Spool {
  /**
   * The whole message. Rejects when the client leaves before its end, and with SpoolFull; then nothing is kept. What is
   * above the size limit of the listener is read over: smtp-server refuses it.
   */
  receive(stream: SMTPServerDataStream): Promise<SpooledMessage>;
}

/** `maxBytes`: what all messages together may hold, in memory or on disk. */
export function createSpool(d: { readonly folder: string; readonly maxBytes: number }): Spool {
  let heldBytes = 0;

  async function receive(stream: SMTPServerDataStream): Promise<SpooledMessage> {
    const survey = new WireSurvey();
    const path = join(d.folder, randomUUID());
    let chunks: Buffer[] = [];
    let inMemoryBytes = 0;
    let sizeBytes = 0;
    let isFull = false;
    let file: FileHandle | null = null;
    const discard = async (): Promise<void> => {
      heldBytes -= sizeBytes;
      sizeBytes = 0;
      chunks = [];
      if (file !== null) await rm(path, { force: true });
    };
    const flush = async (): Promise<void> => {
      const bytes = Buffer.concat(chunks, inMemoryBytes);
      chunks = [];
      inMemoryBytes = 0;
      if (file === null) {
        await mkdir(d.folder, { recursive: true, mode: 0o700 });
        file = await open(path, 'wx', 0o600);
      }
      await file.writeFile(bytes); // goes on where it is, until all of it is written
    };
    try {
      for await (const chunk of stream as AsyncIterable<Buffer>) {
        isFull ||= heldBytes + chunk.length > d.maxBytes;
        // Read to its end all the same: a client hears the reply only then.
        if (isFull || stream.sizeExceeded) continue;
        survey.push(chunk);
        chunks.push(chunk);
        sizeBytes += chunk.length;
        heldBytes += chunk.length;
        inMemoryBytes += chunk.length;
        if (inMemoryBytes > MEMORY_MAX_BYTES) await flush();
      }
      if (isFull) throw new SpoolFull('no room for a message');
      if (file !== null && inMemoryBytes > 0) await flush();
    } catch (error) {
      await (file as FileHandle | null)?.close();
      await discard();
      const { code } = error as NodeJS.ErrnoException;
      if (code === 'ENOSPC' || code === 'EDQUOT') {
        throw new SpoolFull('the disk is full', { cause: error });
      }
      throw error;
    }
    await (file as FileHandle | null)?.close();
    return {
      sizeBytes,
      survey,
      read: () =>
        file === null ? Promise.resolve(Buffer.concat(chunks, sizeBytes)) : readFile(path),
      discard,
    };
  }

  return { receive };
}
