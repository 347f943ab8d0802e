// What processes cost, as the Linux kernel counts it: CPU seconds of whole process trees, the largest memory of one
// process, how busy the machine was. Where there is no /proc, everything here is null and the benchmark says so.
import { existsSync, readdirSync, readFileSync } from 'node:fs';

/** USER_HZ, 100 on every Linux that Node runs on. */
const TICKS_PER_S = 100;

export interface ProcessFacts {
  readonly pid: number;
  readonly parentPid: number;
  /** At most 15 characters. */
  readonly name: string;
  /** Own time and that of ended children it has waited for. */
  readonly cpuS: number;
}

export const canAccount = existsSync('/proc/self/stat');

/** The living processes below `rootPid`, itself first; empty when it has ended. */
export function readTree(rootPid: number): readonly ProcessFacts[] {
  if (!canAccount) return [];
  const children = new Map<number, ProcessFacts[]>();
  let root: ProcessFacts | null = null;
  for (const entry of readdirSync('/proc')) {
    const facts = /^\d+$/.test(entry) ? readProcess(Number(entry)) : null;
    if (facts === null) continue;
    if (facts.pid === rootPid) root = facts;
    children.set(facts.parentPid, [...(children.get(facts.parentPid) ?? []), facts]);
  }
  if (root === null) return [];
  const found = [root];
  for (const one of found) found.push(...(children.get(one.pid) ?? []));
  return found;
}

function readProcess(pid: number): ProcessFacts | null {
  const stat = readOrNull(`/proc/${pid}/stat`);
  if (stat === null) return null;
  // proc(5): the name in parentheses may hold spaces and parentheses; after it comes field 3.
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  const ticks = [14, 15, 16, 17].map((field) => Number(fields[field - 3]));
  return {
    pid,
    parentPid: Number(fields[4 - 3]),
    name: stat.slice(stat.indexOf('(') + 1, stat.lastIndexOf(')')),
    cpuS: ticks.reduce((sum, one) => sum + one, 0) / TICKS_PER_S,
  };
}

export const cpuOf = (processes: readonly ProcessFacts[]): number =>
  processes.reduce((sum, { cpuS }) => sum + cpuS, 0);

/** CPU seconds of ended children of this process. */
export function reapedCpuS(): number {
  const stat = readOrNull('/proc/self/stat');
  const fields = stat?.slice(stat.lastIndexOf(')') + 2).split(' ') ?? [];
  return (Number(fields[16 - 3] ?? 0) + Number(fields[17 - 3] ?? 0)) / TICKS_PER_S;
}

/** The most memory that the process has held so far, in MB of 1,000,000 bytes; null when it has ended. */
export function peakRssMb(pid: number): number | null {
  const kib = /^VmHWM:\s+(\d+) kB$/m.exec(readOrNull(`/proc/${pid}/status`) ?? '')?.[1];
  return kib === undefined ? null : (Number(kib) * 1024) / 1e6;
}

/**
 * Seconds in which a CPU of this machine did anything, summed over its CPUs, since it started. Without interrupts:
 * those of our loopback traffic are in there.
 */
export function machineBusyS(): number {
  const [, ...fields] = (readOrNull('/proc/stat') ?? '').split('\n')[0]?.split(/\s+/) ?? [];
  const [user = 0, nice = 0, system = 0, , , , , steal = 0] = fields.map(Number);
  return (user + nice + system + steal) / TICKS_PER_S;
}

/** CPU seconds of each kind of thread of one process, by the thread's name. */
export function threadCpuS(pid: number): ReadonlyMap<string, number> {
  const byName = new Map<string, number>();
  if (!existsSync(`/proc/${pid}/task`)) return byName;
  for (const thread of readdirSync(`/proc/${pid}/task`)) {
    const stat = readOrNull(`/proc/${pid}/task/${thread}/stat`);
    if (stat === null) continue;
    const name = stat.slice(stat.indexOf('(') + 1, stat.lastIndexOf(')'));
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    const cpuS = (Number(fields[14 - 3]) + Number(fields[15 - 3])) / TICKS_PER_S;
    byName.set(name, (byName.get(name) ?? 0) + cpuS);
  }
  return byName;
}

/** Null: the process or thread ended in between. */
function readOrNull(path: string): string | null {
  try {
    return readFileSync(path, 'latin1');
  } catch {
    return null;
  }
}
