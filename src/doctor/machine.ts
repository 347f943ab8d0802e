// The machine under the appliance: its clock and its disk.
import { statfs } from 'node:fs/promises';
import { bad, info, ok, unknown, type Finding } from './finding.ts';
import type { Surroundings } from './surroundings.ts';

const CLOCK_WARN_MS = 5_000;
const CLOCK_ERROR_MS = 60_000;
const PROCESSES_MAX = 200;
const GB = 1_000_000_000;
/** Of the disk or in bytes, whichever says so first. */
const SPACE = { warn: { part: 0.1, bytes: 2 * GB }, error: { part: 0.04, bytes: 0.5 * GB } };
const INODES = { warn: 0.1, error: 0.03 };

/** NTP cannot be asked from here; two clocks that agree are seldom both wrong. */
export async function checkClock(s: Surroundings): Promise<readonly Finding[]> {
  const about = ['clock', 'database'] as const;
  if (s.pool === null) {
    return [
      info(about, 'The database is away, so there is no other clock to compare ours with.', {
        advice: 'See what `database` says.',
      }),
    ];
  }
  const before = s.now().getTime();
  const { rows } = await s.pool.query<{ ms: number }>(
    'select (extract(epoch from clock_timestamp()) * 1000)::float8 as ms',
  );
  const after = s.now().getTime();
  // The answer was made somewhere in between.
  const offsetMs = Math.round(rows[0]!.ms - (before + after) / 2);
  const detail = { offset_ms: offsetMs, uncertain_ms: Math.ceil((after - before) / 2) };
  const size = Math.abs(offsetMs) - detail.uncertain_ms;
  const words = `The clock of this machine is ${Math.abs(offsetMs)} ms ${offsetMs > 0 ? 'behind' : 'ahead of'} that of the database`;
  const clock =
    size > CLOCK_WARN_MS
      ? bad(size > CLOCK_ERROR_MS ? 'error' : 'warning', about, {
          message: `${words}; retries, signatures and schedules go by both.`,
          advice: 'Turn on time synchronisation (chrony or systemd-timesyncd) on both machines.',
          detail,
        })
      : ok(about, `${words}; no time server was asked.`, detail);
  return [clock, ...(await checkProcesses(s.pool))];
}

/** Processes that say they began in what is the future for the database. */
async function checkProcesses(
  pool: NonNullable<Surroundings['pool']>,
): Promise<readonly Finding[]> {
  const { rows } = await pool.query<{ host: string; pid: number; ahead_ms: number }>(
    `select host, pid, (extract(epoch from started_at - seen_at) * 1000)::float8 as ahead_ms
     from appliance_process where started_at > seen_at + interval '${CLOCK_WARN_MS} milliseconds'
     order by host, pid limit ${PROCESSES_MAX}`,
  );
  return rows.map(({ host, pid, ahead_ms }) =>
    bad('warning', ['clock', `${host} ${pid}`], {
      message: `The clock of ${host} is at least ${Math.round(ahead_ms)} ms ahead of that of the database.`,
      advice: `Turn on time synchronisation (chrony or systemd-timesyncd) on ${host}.`,
      detail: { ahead_ms: Math.round(ahead_ms) },
    }),
  );
}

export interface Space {
  readonly bytes: number;
  readonly freeBytes: number;
  /** 0 in both: the file system has no limit. */
  readonly files: number;
  readonly freeFiles: number;
}

export async function checkDisk(s: Surroundings): Promise<readonly Finding[]> {
  try {
    const { bsize, blocks, bavail, files, ffree } = await statfs(s.dataDir);
    const space = { bytes: blocks * bsize, freeBytes: bavail * bsize, files, freeFiles: ffree };
    return [judgeSpace(s.dataDir, space)];
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    return [
      unknown(['disk', s.dataDir], {
        message: `The data folder ${s.dataDir} cannot be looked at (${code ?? 'unknown error'}).`,
        advice: 'See that the folder is there and that this user may read it.',
        whenLasting: 'error',
      }),
    ];
  }
}

export function judgeSpace(dataDir: string, space: Space): Finding {
  const { bytes, freeBytes, files, freeFiles } = space;
  const about = ['disk', dataDir] as const;
  const part = bytes === 0 ? 1 : freeBytes / bytes;
  const inodes = files === 0 ? 1 : freeFiles / files;
  const detail = {
    free_bytes: freeBytes,
    size_bytes: bytes,
    free_part: Math.round(part * 1_000) / 1_000,
    free_inodes_part: Math.round(inodes * 1_000) / 1_000,
  };
  const isBelow = (limit: { part: number; bytes: number }): boolean =>
    part < limit.part || freeBytes < limit.bytes;
  const severity =
    isBelow(SPACE.error) || inodes < INODES.error
      ? 'error'
      : isBelow(SPACE.warn) || inodes < INODES.warn
        ? 'warning'
        : null;
  const message =
    inodes < part
      ? `${Math.round(inodes * 100)} % of the inodes under ${dataDir} are free.`
      : `${(freeBytes / GB).toFixed(1)} GB (${Math.round(part * 100)} %) of the disk under ${dataDir} are free.`;
  return severity === null
    ? ok(about, message, detail)
    : bad(severity, about, {
        message: `${message} When it is full, mail is refused with 452 and 503.`,
        advice: 'Make the disk larger, or keep less (config/retention.json).',
        detail,
      });
}
