// The worker's diary of the one moment that a database cannot witness: between the final dot and the
// stored outcome. A line is written before the dot is flushed and another when the answer came. The
// lines are plain appends: after kill -9 the kernel still has them. Against a power cut the answers are
// synced to the disk, those of a few milliseconds together and off the event loop; nobody waits for that. A
// dot is not synced by itself: after a power cut no line proves nothing, whatever the price.
//
//   D <email>/<position>/<attempt>        the final dot is about to leave
//   R <settlement as JSON>                the answer, not yet known to be in Postgres
//
// After a crash, `readJournal` tells for every delivery the run held whether it may be tried again
// (no D), what became of it (R), or that nobody can know (D alone).
import {
  closeSync,
  fdatasync,
  ftruncateSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { open } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { Held, Trace } from '../queue/lease.ts';
import { NO_EVIDENCE, type Settlement } from '../queue/settle.ts';

/** Above this the file is rewritten with only what is still open. */
const COMPACT_BYTES = 4 * 1024 * 1024;
/** Answers that come within this time share a sync. */
const GATHER_MS = 5;
const SUFFIX = '.journal';
/** What journals of earlier versions do not say. */
const EARLIER = { isLaneFault: false };

type Key = Pick<Held, 'emailId' | 'position' | 'attempt'>;
const keyOf = (at: Key): string => `${at.emailId}/${at.position}/${at.attempt}`;

export interface Journal {
  /** Call right before the final dot is handed to the socket. Throws when it cannot be written. */
  dot(at: Key): void;
  result(settlement: Settlement): void;
  /** These are in Postgres now. */
  settled(settlements: readonly Settlement[]): void;
  /** Resolves when every answer so far is on the disk, or cannot be brought there (`onTrouble`). */
  synced(): Promise<void>;
  /** Removes the file: call when nothing is open. */
  end(): void;
}

export interface LostRun {
  readonly epoch: string;
  readonly pid: number;
  /** When the process started, as the kernel counts it; null where that is not known. */
  readonly startTime: string | null;
  traceOf(held: Held): Trace;
}

/** `onTrouble` is told when the disk does not take what was to be synced or rewritten; lines are kept all the same. */
export function openJournal(
  folder: string,
  run: Omit<LostRun, 'traceOf'>,
  onTrouble: (error: unknown) => void = () => undefined,
): Journal {
  const path = join(folder, `${run.epoch}${SUFFIX}`);
  const header = `${JSON.stringify({ ...run, bootId: bootId() })}\n`;
  const unsettled = new Map<string, string>();
  let compactAt = COMPACT_BYTES;
  let file = openSync(path, 'wx', 0o600);
  writeFileSync(file, header);
  let sizeBytes = Buffer.byteLength(header);
  /** Written while the file is being rewritten: the next one needs them, too. */
  let meanwhile: string[] | null = null;
  let isSyncWanted = false;
  let isCompactWanted = false;
  let working: Promise<void> | null = null;
  let ended = false;
  /** The name of the file is not on the disk yet. */
  let isNew = true;

  /** All of the line or nothing: half a line would hide that a dot left. */
  const append = (line: string): void => {
    const bytes = Buffer.from(line);
    let written = 0;
    try {
      while (written < bytes.length) {
        written += writeSync(file, bytes, written, bytes.length - written, sizeBytes + written);
      }
      sizeBytes += bytes.length;
      meanwhile?.push(line);
    } catch (error) {
      ftruncateSync(file, sizeBytes);
      throw error;
    }
  };
  /** Under the old name until the new file is whole and on the disk. */
  const compact = async (): Promise<void> => {
    const next = openSync(rewrittenAs(path), 'w', 0o600);
    try {
      const kept = Buffer.from(header + [...unsettled.values()].join(''));
      meanwhile = [];
      writeFileSync(next, kept);
      await datasync(next);
      const late = Buffer.from(meanwhile.join(''));
      writeFileSync(next, late);
      if (!ended) renameSync(rewrittenAs(path), path);
      isSyncWanted ||= late.length > 0;
      closeSync(file);
      file = next;
      sizeBytes = kept.length + late.length;
    } catch (error) {
      closeSync(next);
      throw error;
    } finally {
      meanwhile = null;
    }
    if (!ended) await syncFolder(folder);
  };
  // One thing at a time, so that an answer that counts as synced is so in whichever file has the name.
  const work = async (): Promise<void> => {
    while ((isSyncWanted || isCompactWanted) && !ended) {
      if (isCompactWanted) {
        isCompactWanted = false;
        await compact().catch(onTrouble);
        // When most of it is still open, or there is no room, the next try comes after as much again.
        compactAt = sizeBytes + COMPACT_BYTES;
        continue;
      }
      await new Promise((resolve) => setTimeout(resolve, GATHER_MS));
      isSyncWanted = false;
      await datasync(file).catch(onTrouble);
      if (isNew) await syncFolder(folder).catch(onTrouble);
      isNew = false;
    }
  };
  const begin = (): void => {
    working ??= work().finally(() => {
      working = null;
      if ((isSyncWanted || isCompactWanted) && !ended) begin(); // wanted between the last look and now
    });
  };
  return {
    dot(at) {
      const line = `D ${keyOf(at)}\n`;
      append(line);
      unsettled.set(keyOf(at), line);
    },
    result(settlement) {
      const line = `R ${JSON.stringify(settlement)}\n`;
      append(line);
      unsettled.set(keyOf(settlement), (unsettled.get(keyOf(settlement)) ?? '') + line);
      isSyncWanted = true;
      begin();
    },
    settled(settlements) {
      for (const settlement of settlements) unsettled.delete(keyOf(settlement));
      if (sizeBytes <= compactAt) return;
      isCompactWanted = true;
      begin();
    },
    async synced() {
      while (working !== null) await working;
    },
    end() {
      ended = true;
      rmSync(path, { force: true });
      const close = (): void => {
        closeSync(file);
        rmSync(rewrittenAs(path), { force: true });
      };
      if (working === null) close();
      else void working.then(close);
    },
  };
}

const datasync = promisify(fdatasync);

/** Makes new names in the folder durable. */
async function syncFolder(folder: string): Promise<void> {
  const handle = await open(folder, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

/** Reads what a lost run left behind. A torn last line is ignored: its write had not finished. */
export function readJournal(path: string): LostRun | null {
  const lines = readFileSync(path, 'utf8').split('\n');
  const complete = lines.slice(0, -1);
  const header = complete[0] === undefined ? null : tryParse(complete[0]);
  if (header === null) return null;
  const dots = new Set<string>();
  const results = new Map<string, Settlement>();
  for (const line of complete.slice(1)) {
    if (line.startsWith('D ')) {
      dots.add(line.slice(2));
      results.delete(line.slice(2)); // of the same number before it was given back
    }
    if (!line.startsWith('R ')) continue;
    const written = tryParse(line.slice(2)) as Settlement | null;
    if (written === null) continue;
    // Whoever wrote it may have been an earlier version, which knew less.
    const evidence = { ...NO_EVIDENCE, ...written.evidence };
    results.set(keyOf(written), { ...EARLIER, ...written, evidence });
  }
  const { epoch, pid, startTime, ...rest } = header as Omit<LostRun, 'traceOf'> & {
    readonly bootId?: string | null;
  };
  // kill -9 leaves every line; a power cut may take the last ones. After one, no line proves nothing.
  const isWhole = rest.bootId === bootId();
  return {
    epoch,
    pid,
    startTime,
    traceOf(held) {
      const settlement = results.get(keyOf(held));
      if (settlement !== undefined) return { phase: 'settled', settlement };
      return { phase: isWhole && !dots.has(keyOf(held)) ? 'before_dot' : 'dot' };
    },
  };
}

/** Different after every start of the machine; null where the kernel does not say. */
function bootId(): string | null {
  try {
    return readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim();
  } catch {
    return null;
  }
}

function tryParse(text: string): object | null {
  try {
    return JSON.parse(text) as object;
  } catch {
    return null;
  }
}

/** Where a journal is rewritten; of no use until it has the journal's own name. */
export const rewrittenAs = (path: string): string => `${path}.next`;
export const isJournal = (name: string): boolean => name.endsWith(SUFFIX);
