// The worker's diary of the one moment that a database cannot witness: between the final dot and the
// stored outcome. A line is written before the dot is flushed and another when the answer came. The
// lines are plain appends: after kill -9 the kernel still has them.
//
//   D <email>/<position>/<attempt>        the final dot is about to leave
//   R <settlement as JSON>                the answer, not yet known to be in Postgres
//
// After a crash, `readJournal` tells for every delivery the run held whether it may be tried again
// (no D), what became of it (R), or that nobody can know (D alone).
import {
  closeSync,
  ftruncateSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import type { Held, Trace } from '../queue/lease.ts';
import type { Settlement } from '../queue/settle.ts';

/** Above this the file is rewritten with only what is still open. */
const COMPACT_BYTES = 4 * 1024 * 1024;
const SUFFIX = '.journal';

type Key = Pick<Held, 'emailId' | 'position' | 'attempt'>;
const keyOf = (at: Key): string => `${at.emailId}/${at.position}/${at.attempt}`;

export interface Journal {
  /** Call right before the final dot is handed to the socket. Throws when it cannot be written. */
  dot(at: Key): void;
  result(settlement: Settlement): void;
  /** These are in Postgres now. */
  settled(settlements: readonly Settlement[]): void;
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

export function openJournal(folder: string, run: Omit<LostRun, 'traceOf'>): Journal {
  const path = join(folder, `${run.epoch}${SUFFIX}`);
  const header = `${JSON.stringify({ ...run, bootId: bootId() })}\n`;
  const open = new Map<string, string>();
  let compactAt = COMPACT_BYTES;
  let file = openSync(path, 'wx', 0o600);
  writeFileSync(file, header);
  let sizeBytes = Buffer.byteLength(header);

  /** All of the line or nothing: half a line would hide that a dot left. */
  const append = (line: string): void => {
    const bytes = Buffer.from(line);
    let written = 0;
    try {
      while (written < bytes.length) {
        written += writeSync(file, bytes, written, bytes.length - written, sizeBytes + written);
      }
      sizeBytes += bytes.length;
    } catch (error) {
      ftruncateSync(file, sizeBytes);
      throw error;
    }
  };
  const compact = (): void => {
    const bytes = Buffer.from(header + [...open.values()].join(''));
    const next = openSync(`${path}.next`, 'w', 0o600);
    try {
      writeFileSync(next, bytes);
      renameSync(`${path}.next`, path);
    } catch (error) {
      closeSync(next);
      throw error;
    }
    closeSync(file);
    file = next;
    sizeBytes = bytes.length;
  };
  return {
    dot(at) {
      const line = `D ${keyOf(at)}\n`;
      append(line);
      open.set(keyOf(at), line);
    },
    result(settlement) {
      const line = `R ${JSON.stringify(settlement)}\n`;
      append(line);
      open.set(keyOf(settlement), (open.get(keyOf(settlement)) ?? '') + line);
    },
    settled(settlements) {
      for (const settlement of settlements) open.delete(keyOf(settlement));
      if (sizeBytes > compactAt) {
        // When most of it is still open, or there is no room, the next try comes after as much again.
        compactAt = sizeBytes + COMPACT_BYTES;
        compact();
        compactAt = sizeBytes + COMPACT_BYTES;
      }
    },
    end() {
      closeSync(file);
      rmSync(path, { force: true });
    },
  };
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
    if (line.startsWith('D ')) dots.add(line.slice(2));
    if (!line.startsWith('R ')) continue;
    const settlement = tryParse(line.slice(2)) as Settlement | null;
    if (settlement !== null) results.set(keyOf(settlement), settlement);
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

export const isJournal = (name: string): boolean => name.endsWith(SUFFIX);
