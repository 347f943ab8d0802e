// Where the time goes: reads V8's CPU profiles of one round, cut to the measured part, and sums self time by
// function and by group (package, file of ours, part of Node).
import { readdirSync, readFileSync } from 'node:fs';
import { basename, join } from 'node:path';

/** The fields of a .cpuprofile that are used here; times are microseconds of the monotonic clock. */
interface CpuProfile {
  readonly nodes: readonly {
    readonly id: number;
    readonly callFrame: {
      readonly functionName: string;
      readonly url: string;
      readonly lineNumber: number;
    };
  }[];
  readonly startTime: number;
  readonly samples: readonly number[];
  readonly timeDeltas: readonly number[];
}

export interface Share {
  readonly name: string;
  readonly seconds: number;
}

/** One thread's time, largest first. */
export interface Profile {
  readonly pid: number;
  /** 0: the main thread. */
  readonly thread: number;
  /** Without idle. */
  readonly busyS: number;
  readonly groups: readonly Share[];
  readonly functions: readonly Share[];
}

const FILES_MAX = 100;
/** Threads that did less are left out. */
const BUSY_MIN_S = 0.05;

/** Profiles of the threads that did something in the window. */
export function readProfiles(
  folder: string,
  window: { readonly fromUs: number; readonly toUs: number },
): readonly Profile[] {
  return readdirSync(folder)
    .filter((name) => name.endsWith('.cpuprofile'))
    .slice(0, FILES_MAX)
    .map((name) => {
      // CPU.<date>.<time>.<pid>.<thread>.<sequence>.cpuprofile
      const [, , , pid, thread] = basename(name).split('.').map(Number);
      const profile = JSON.parse(readFileSync(join(folder, name), 'utf8')) as CpuProfile;
      return { pid: pid ?? 0, thread: thread ?? 0, ...summarise(profile, window) };
    })
    .filter(({ busyS }) => busyS >= BUSY_MIN_S);
}

function summarise(
  profile: CpuProfile,
  window: { readonly fromUs: number; readonly toUs: number },
): Pick<Profile, 'busyS' | 'groups' | 'functions'> {
  const selfUs = new Map<number, number>();
  let at = profile.startTime;
  for (const [index, node] of profile.samples.entries()) {
    // A delta leads from the sample before to this one, which shows what began then.
    at += profile.timeDeltas[index] ?? 0;
    const lengthUs = profile.timeDeltas[index + 1] ?? 0;
    if (at < window.fromUs || at > window.toUs) continue;
    selfUs.set(node, (selfUs.get(node) ?? 0) + Math.max(0, lengthUs));
  }
  const groups = new Map<string, number>();
  const functions = new Map<string, number>();
  let busyUs = 0;
  for (const { id, callFrame } of profile.nodes) {
    const us = selfUs.get(id) ?? 0;
    if (us === 0 || callFrame.functionName === '(idle)') continue;
    busyUs += us;
    const group = groupOf(callFrame.url, callFrame.functionName);
    const name = callFrame.functionName || `(anonymous, line ${callFrame.lineNumber + 1})`;
    const label = group === name ? name : `${name}  ${group}`;
    groups.set(group, (groups.get(group) ?? 0) + us);
    functions.set(label, (functions.get(label) ?? 0) + us);
  }
  return { busyS: busyUs / 1e6, groups: largestFirst(groups), functions: largestFirst(functions) };
}

function groupOf(url: string, functionName: string): string {
  const ours = /\/dist\/(.*\.js)$/.exec(url)?.[1];
  const packageName = /.*\/node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(url)?.[1];
  if (packageName !== undefined) return packageName;
  if (ours !== undefined) return `dist/${ours}`;
  if (url.startsWith('node:')) return url;
  // (program) is native code outside JavaScript, (garbage collector) what it says.
  return url === '' && functionName.startsWith('(') ? functionName : '(native)';
}

const largestFirst = (byName: ReadonlyMap<string, number>): readonly Share[] =>
  [...byName]
    .map(([name, us]) => ({ name, seconds: us / 1e6 }))
    .sort((a, b) => b.seconds - a.seconds);
