// A seeded fuzzer: mutates samples, makes input of a dictionary's pieces, and holds properties against both.
//
// Every round has a generator of its own, made of the seed, the target's name and the round's number, so a failure names all
// that it takes to see it again: TEST_FUZZ_SEED=… TEST_FUZZ_ROUND=… . TEST_FUZZ_ROUNDS multiplies the rounds.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { Buffer } from 'node:buffer';
import { randomInt } from 'node:crypto';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const SEED = Number(process.env['TEST_FUZZ_SEED'] ?? randomInt(0x1_0000_0000));
const FACTOR = Number(process.env['TEST_FUZZ_ROUNDS'] ?? 1);
const ONLY_ROUND = process.env['TEST_FUZZ_ROUND'];
const SHOWN_MAX = 3_000;
const SAMPLE_MAX_BYTES = 64 * 1024;

/** Where linear time is looked at: a text of so many characters, and one of an eighth, eight times. */
const LARGE = 64 * 1024;
/** Below it nothing is compared; where a square is taken it is seconds. Clocks of processor time may tick in 10 ms. */
const QUICK_MS = 150;
/** How much longer than its eighths, one after the other: once would be linear, eight times a square. */
const GROWTH_MAX = 4;

export interface Dice {
  /** From 0, below `end`. */
  below(end: number): number;
  /** True once in so many times. */
  oneIn(times: number): boolean;
  pick<T>(from: readonly T[]): T;
  bytes(length: number): Buffer;
}

/** xoshiro128**, seeded by splitmix32 over the text. */
function dice(text: string): Dice {
  let mixed = 0x811c9dc5;
  for (let i = 0; i < text.length; i += 1) {
    mixed = Math.imul(mixed ^ text.charCodeAt(i), 0x0100_0193) >>> 0;
  }
  const next32 = (): number => {
    mixed = (mixed + 0x9e37_79b9) >>> 0;
    let z = mixed;
    z = Math.imul(z ^ (z >>> 16), 0x21f0_aaad);
    z = Math.imul(z ^ (z >>> 15), 0x735a_2d97);
    return (z ^ (z >>> 15)) >>> 0;
  };
  const state = [next32(), next32(), next32(), next32()] as [number, number, number, number];
  const rotate = (value: number, by: number): number => (value << by) | (value >>> (32 - by));
  const draw = (): number => {
    const result = Math.imul(rotate(Math.imul(state[1], 5), 7), 9) >>> 0;
    const shifted = state[1] << 9;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= shifted;
    state[3] = rotate(state[3], 11);
    return result;
  };
  const below = (end: number): number => Math.floor((draw() / 0x1_0000_0000) * end);
  return {
    below,
    oneIn: (times) => below(times) === 0,
    pick: (from) => from[below(from.length)]!,
    bytes: (length) => Buffer.from(Array.from({ length }, () => below(256))),
  };
}

/** What stands between `¦` in these texts. */
export const pieces = (...texts: readonly string[]): readonly string[] =>
  texts.flatMap((text) => text.split('¦'));

const ODD = [
  ...pieces(
    '\0¦\r¦\n¦\r\n¦\t¦ ¦\x7f¦\x80¦\xff¦\xc3¦\u2028¦\ud800¦\ufffd¦\u{1f600}¦é¦\u202e',
    '\ufeff¦"¦\'¦\\¦<¦>¦(¦)¦@¦,¦;¦:¦=¦?¦%¦=?¦?=¦--¦..¦//¦%00¦\\"',
  ),
  'a'.repeat(70),
];

/** The sample with one to eight faults; `known`: what means something here. */
export function mutate(d: Dice, sample: string, known: readonly string[] = []): string {
  let text = sample;
  for (let times = 1 + d.below(8); times > 0; times -= 1) {
    const at = d.below(text.length + 1);
    const to = Math.min(text.length, at + 1 + d.below(d.oneIn(4) ? 400 : 8));
    switch (d.below(8)) {
      case 0:
        text = text.slice(0, at) + text.slice(to);
        break;
      case 1:
        text = text.slice(0, at) + text.slice(at, to).repeat(1 + d.below(5)) + text.slice(at);
        break;
      case 2:
        text = text.slice(0, at) + String.fromCharCode(d.below(256)) + text.slice(at + 1);
        break;
      case 3:
        text = d.oneIn(3) ? text.slice(0, at) : text;
        break;
      case 4: {
        const from = d.below(text.length + 1);
        text = text.slice(0, at) + text.slice(from, from + d.below(100)) + text.slice(to);
        break;
      }
      case 5:
        text =
          text.slice(0, at) + (d.oneIn(2) ? text.slice(at).toUpperCase() : text.slice(at).trim());
        break;
      default:
        text = text.slice(0, at) + d.pick(known.length > 0 && d.oneIn(2) ? known : ODD);
        text += sample.slice(d.oneIn(2) ? at : to);
    }
  }
  return text;
}

/** Pieces and odd characters, one behind the other. */
export function grow(d: Dice, known: readonly string[], most = 20): string {
  let text = '';
  for (let left = d.below(most); left > 0; left -= 1) text += d.pick(d.oneIn(6) ? ODD : known);
  return text;
}

/** A small piece again and again, as whoever looks for something slow would send it. */
function pump(d: Dice, known: readonly string[]): (length: number) => string {
  const one = (): string => d.pick(d.oneIn(5) ? ODD : known);
  const [start, end] = [d.oneIn(2) ? one() : '', d.oneIn(2) ? one() : ''];
  let middle = one();
  while (d.oneIn(2)) middle += one();
  if (middle === '') middle = ' ';
  return (length) => start + middle.repeat(Math.ceil(length / middle.length)) + end;
}

/** Runs `work` for every round; its error says how to see it again. `rounds`: of a usual run. */
export async function fuzz(
  name: string,
  rounds: number,
  work: (d: Dice, say: (input: unknown) => void) => void | Promise<void>,
): Promise<void> {
  const all = Math.max(1, Math.ceil(rounds * FACTOR));
  const first = ONLY_ROUND === undefined ? 0 : Number(ONLY_ROUND);
  const end = ONLY_ROUND === undefined ? all : first + 1;
  for (let round = first; round < end; round += 1) {
    let said: unknown = null;
    try {
      const working = work(dice(`${SEED} ${name} ${round}`), (input) => (said = input));
      if (working instanceof Promise) await working;
    } catch (error) {
      const again = `TEST_FUZZ_SEED=${SEED} TEST_FUZZ_ROUND=${round}`;
      const why = error instanceof Error ? (error.stack ?? error.message) : String(error);
      const shown = JSON.stringify(said) ?? '';
      throw new Error(`${name}: ${again}\n${shown.slice(0, SHOWN_MAX)}\n${why}`, { cause: error });
    }
  }
}

/** `read` takes time in proportion to what it is given, also for a text that was made to be slow. */
export async function staysLinear(
  name: string,
  rounds: number,
  about: { readonly pieces: readonly string[]; readonly read: (text: string) => unknown },
): Promise<void> {
  await fuzz(`${name} in linear time`, rounds, async (d, say) => {
    const make = pump(d, about.pieces);
    say(make(64));
    const large = make(LARGE);
    if ((await cpuMs(about.read, large)) < QUICK_MS) return;
    const small = make(LARGE / 8);
    const best = async (text: string, times: number): Promise<number> =>
      Math.min(
        await cpuMs(about.read, text, times),
        await cpuMs(about.read, text, times),
        await cpuMs(about.read, text, times),
      );
    const [eighths, whole] = [await best(small, 8), await best(large, 1)];
    if (whole < QUICK_MS || whole < GROWTH_MAX * eighths) return;
    throw new Error(`${LARGE} characters take ${whole} ms, all their eighths ${eighths} ms`);
  });
}

async function cpuMs(read: (text: string) => unknown, text: string, times = 1): Promise<number> {
  const before = process.threadCpuUsage();
  for (let left = times; left > 0; left -= 1) {
    const reading = read(text);
    if (reading instanceof Promise) await reading;
  }
  const { user, system } = process.threadCpuUsage(before);
  return (user + system) / 1_000;
}

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

/** Files of the corpora, and in any case `own`. */
export function samples(folders: readonly string[], end: string, own: readonly string[]): string[] {
  const found = folders
    .map((folder) => join(corpora, folder))
    .filter((folder) => existsSync(folder))
    .flatMap((folder) =>
      readdirSync(folder, { recursive: true })
        .map((name) => join(folder, String(name)))
        .filter((file) => file.endsWith(end)),
    )
    .toSorted();
  return [...own, ...found.map((file) => readFileSync(file, 'latin1').slice(0, SAMPLE_MAX_BYTES))];
}

// oxlint-disable-next-line no-control-regex
const CONTROL = /[\u0000-\u001f\u007f]/;

/** Fails where the text has a control character. */
export function clean(text: string | null): void {
  if (text !== null && CONTROL.test(text)) {
    throw new Error(`has a control character: ${JSON.stringify(text.slice(0, 300))}`);
  }
}

/** Fails where a line does not end in CRLF, a NUL is in it, or a line is too long for a host. */
export function wireReady(message: Buffer, lineMax = 998): void {
  const text = message.toString('latin1');
  if (text.includes('\0')) throw new Error('has a NUL');
  if (/\r(?!\n)|(?<!\r)\n/.test(text)) throw new Error('has a bare CR or LF');
  const longest = Math.max(...text.split('\r\n').map(({ length }) => length));
  if (longest > lineMax) throw new Error(`has a line of ${longest} octets`);
}

/** The error of `work`, which must be of the kind that `isDeclared` knows; null: it went well. */
export function declared(work: () => unknown, isDeclared: (error: Error) => boolean): Error | null {
  try {
    work();
    return null;
  } catch (error) {
    if (error instanceof Error && isDeclared(error)) return error;
    throw error;
  }
}
