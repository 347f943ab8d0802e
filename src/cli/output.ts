// How commands answer: one JSON document or plain text on stdout, what is going on on stderr. Tables are ASCII, and what
// peers and tenants wrote cannot steer a terminal.
import { SingleBar } from 'cli-progress';
import type { Output, Progress } from './command.ts';

/** A stream of the process. */
export type Screen = Pick<NodeJS.WriteStream, 'write'> & { readonly isTTY?: boolean };

export interface OutputParts {
  readonly stdout: Screen;
  readonly stderr: Screen;
  readonly isJson: boolean;
  /** Where the terminal shows nothing else. */
  readonly isAscii: boolean;
}

/** Work that is shorter is not spoken of. */
const LINE_AFTER_MS = 1_000;
/** Where nobody watches a bar. */
const LINE_EVERY_MS = 10_000;
const CELL_MAX_CHARACTERS = 200;

export function createOutput(parts: OutputParts): Output {
  const { stdout, stderr, isJson, isAscii } = parts;
  const shown = (text: string): string => (isAscii ? toAscii(text) : text);
  const say = (sentence: string): void => {
    if (!isJson) stderr.write(`${shown(printable(sentence))}\n`);
  };
  return {
    result(value, text) {
      if (isJson) stdout.write(`${JSON.stringify(value, null, 2)}\n`);
      else stdout.write(shown(`${printableLines(text().replace(/\n+$/, ''))}\n`));
    },
    say,
    progress(what, total) {
      if (isJson) return { at: () => undefined, end: () => undefined };
      const isWatched = stderr.isTTY === true && total !== null && total > 0;
      return isWatched ? bar(stderr, what, total) : lines(say, what, total);
    },
  };
}

function bar(stderr: Screen, what: string, total: number): Progress {
  const shown = new SingleBar({
    stream: stderr as NodeJS.WriteStream,
    format: `${printable(what)} [{bar}] {percentage}% | {value}/{total} | {eta_formatted} left`,
    barCompleteChar: '#',
    barIncompleteChar: '.',
    hideCursor: false,
    stopOnComplete: false,
    clearOnComplete: false,
  });
  shown.start(total, 0);
  return { at: (done) => shown.update(Math.min(done, total)), end: () => shown.stop() };
}

function lines(say: (sentence: string) => void, what: string, total: number | null): Progress {
  const startedAt = Date.now();
  let done = 0;
  let isSpoken = false;
  const tell = (): void => {
    isSpoken = true;
    const share = total === null || total === 0 ? '' : ` ${Math.floor((done / total) * 100)}%`;
    const count =
      total === null && done === 0 ? '' : ` (${done}${total === null ? '' : ` of ${total}`})`;
    say(`${what} ...${share}${count}`);
  };
  const first = setTimeout(tell, LINE_AFTER_MS);
  const again = setInterval(tell, LINE_EVERY_MS);
  first.unref();
  again.unref();
  return {
    at: (now) => void (done = now),
    end() {
      clearTimeout(first);
      clearInterval(again);
      if (isSpoken) say(`${what}: done in ${Math.round((Date.now() - startedAt) / 1000)} s`);
    },
  };
}

/** Controls, line separators, and what turns the direction of writing, as `\u{…}`. */
export function printable(text: string): string {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, escaped);
}

export const printableLines = (text: string): string => text.split('\n').map(printable).join('\n');

/** What is beyond ASCII, too. */
const toAscii = (text: string): string => text.replace(/[^\p{ASCII}]/gu, escaped);

const escaped = (character: string): string => `\\u{${character.codePointAt(0)!.toString(16)}}`;

export type Cell = string | number | boolean | Date | null | undefined;

/** What a value is written as, on one line; nothing is `-`. */
export function cellText(value: Cell): string {
  if (value === null || value === undefined || value === '') return '-';
  if (value instanceof Date) return value.toISOString();
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  return printable(String(value));
}

/** How many columns a terminal needs for it, near enough: wide scripts take two. */
function widthOf(text: string): number {
  let width = 0;
  for (const character of text.normalize('NFC')) {
    if (/\p{M}/u.test(character)) continue;
    width +=
      /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u.test(
        character,
      )
        ? 2
        : 1;
  }
  return width;
}

/** Columns under their names, two spaces apart. `empty` is said in place of a table without rows. */
export function table(
  names: readonly string[],
  rows: readonly (readonly Cell[])[],
  empty: string,
): string {
  if (rows.length === 0) return empty;
  const texts = rows.map((row) => row.map((cell) => clip(cellText(cell))));
  const all = [names.map((name) => name.toUpperCase()), ...texts];
  const widths = names.map((_, at) => Math.max(...all.map((row) => widthOf(row[at] ?? ''))));
  const line = (row: readonly string[]): string =>
    row
      .map((text, at) => text + ' '.repeat(Math.max(0, (widths[at] ?? 0) - widthOf(text))))
      .join('  ')
      .trimEnd();
  return all.map(line).join('\n');
}

const clip = (text: string): string =>
  [...text].length > CELL_MAX_CHARACTERS
    ? `${[...text].slice(0, CELL_MAX_CHARACTERS - 3).join('')}...`
    : text;

/** Names and values under each other. */
export function fields(pairs: readonly (readonly [name: string, value: Cell])[]): string {
  const width = Math.max(...pairs.map(([name]) => name.length));
  return pairs.map(([name, value]) => `${name.padEnd(width)}  ${cellText(value)}`).join('\n');
}

/** What is said below a page that is not the last one. */
export function moreAfter(page: {
  readonly hasMore: boolean;
  readonly lastId: string | undefined;
}): string {
  return page.hasMore && page.lastId !== undefined
    ? `\n\nThere is more: go on with --after ${page.lastId}`
    : '';
}
