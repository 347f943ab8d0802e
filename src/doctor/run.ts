// Runs checks: a few at a time, each within its time, all within one. A check that throws or takes too long has found
// nothing, and says so; the others go on.
import type { Logger } from '../log.ts';
import { shown, unknown, type Finding } from './finding.ts';

export interface Check {
  /** Unique in a look; findings are kept by it. */
  readonly name: string;
  /** Of a check about one domain. */
  readonly domainId?: string;
  /** What people call it; default: its name. */
  readonly title?: string;
  readonly run: () => Promise<readonly Finding[]>;
}

export interface Checked {
  readonly name: string;
  readonly domainId: string | null;
  /** It brought nothing: what was found before stands. `findings` then says only that. */
  readonly isMissed: boolean;
  readonly findings: readonly Finding[];
}

/** The code of what a check that could not be made leaves behind. */
export const CHECK_CODE = 'check';
const STOPPED = 'the doctor was stopped';
const AT_ONCE = 4;
const CHECK_MAX_MS = 20_000;
/** Of one check; what it says beyond this is left out. */
const FINDINGS_MAX = 300;

export async function runChecks(
  checks: readonly Check[],
  d: {
    readonly log: Logger;
    /** For all of them together. */
    readonly timeMs: number;
    readonly checkMs?: number;
    readonly signal?: AbortSignal;
  },
): Promise<readonly Checked[]> {
  const until = performance.now() + d.timeMs;
  const queue = [...checks.entries()];
  const results: Checked[] = [];
  const work = async (): Promise<void> => {
    for (let next = queue.shift(); next !== undefined; next = queue.shift()) {
      const [at, check] = next;
      const leftMs = Math.min(d.checkMs ?? CHECK_MAX_MS, until - performance.now());
      results[at] = await runOne(check, { leftMs, log: d.log, signal: d.signal });
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return results;
}

async function runOne(
  check: Check,
  d: {
    readonly leftMs: number;
    readonly log: Logger;
    readonly signal: AbortSignal | undefined;
  },
): Promise<Checked> {
  const about = { name: check.name, domainId: check.domainId ?? null };
  const missed = (why: string): Checked => ({
    ...about,
    isMissed: true,
    findings: [
      unknown([CHECK_CODE, check.title ?? check.name], {
        message: `This could not be looked at: ${shown(why)}.`,
        advice: 'Look again in some minutes; when it stays so, the log says more.',
        whenLasting: 'warning',
      }),
    ],
  });
  if (d.signal?.aborted === true) return missed(STOPPED);
  if (d.leftMs <= 0) return missed('the other checks took all the time');
  let timer: NodeJS.Timeout | undefined;
  let onStop = (): void => undefined;
  const late = new Promise<string>((resolve) => {
    timer = setTimeout(() => resolve('it takes too long'), d.leftMs);
    onStop = () => resolve(STOPPED);
    d.signal?.addEventListener('abort', onStop, { once: true });
  });
  try {
    const findings = await Promise.race([check.run(), late]);
    if (typeof findings === 'string') return missed(findings);
    return { ...about, isMissed: false, findings: findings.slice(0, FINDINGS_MAX) };
  } catch (error) {
    d.log.warn({ err: error, check: check.name }, 'a check of the doctor failed');
    return missed('it failed');
  } finally {
    clearTimeout(timer);
    d.signal?.removeEventListener('abort', onStop);
  }
}
