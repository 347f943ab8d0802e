// A CSV file of contacts as text: what its first line says, and its rows one after the other (RFC 4180, and what programs
// write beside it). Knows nothing of the database.
import type { Readable } from 'node:stream';
import { CsvError, parse, type Options } from 'csv-parse';
import { parse as parseWhole } from 'csv-parse/sync';

/** The file, or the row that it stands at, cannot be read; the message tells its sender why. */
export class UnusableFile extends Error {
  override name = 'UnusableFile';
}

/** The first line must end within the first so many bytes of the file. */
export const HEAD_MAX_BYTES = 64 * 1024;
/** A longer row has a quote that is not closed. */
const ROW_MAX_CHARACTERS = 100_000;
/** With its quotes and delimiters: a row of nothing but delimiters has no characters, and each makes a cell. */
const ROW_MAX_BYTES = 1024 * 1024;
/** Read without a pause for others: as many rows, where every line is empty. */
const PIECE_BYTES = 8 * 1024;
const COLUMNS_MAX = 1_000;
const COLUMN_NAME_MAX_CHARACTERS = 200;
/** In the order of their likelihood. */
const DELIMITERS = [',', ';', '\t'];
/** What a decoder writes in place of bytes that are not UTF-8. */
export const REPLACEMENT = '\ufffd';

/** The first line. */
export interface Header {
  readonly delimiter: string;
  /** As they are written, without spaces around them. */
  readonly names: readonly string[];
  /** Where the first row begins, in bytes. */
  readonly endBytes: number;
  /** The number of its row; 1, but for empty lines before it. */
  readonly row: number;
}

export interface RawRow {
  readonly cells: readonly string[];
  /** Where the next one begins, in bytes from where the stream did. */
  readonly endBytes: number;
}

interface Record {
  readonly record: string[];
  readonly info: { readonly bytes: number; readonly empty_lines: number };
}

const options = (delimiter: string): Options => ({
  delimiter,
  // All three in one file, as happens when files are joined.
  record_delimiter: ['\r\n', '\n', '\r'],
  relax_column_count: true,
  relax_quotes: true,
  max_record_size: ROW_MAX_CHARACTERS,
});

/** `head`: the first HEAD_MAX_BYTES, or all where there are fewer. Throws UnusableFile. */
export function readHeader(head: Buffer): Header {
  refuseOtherFormats(head);
  const delimiter = guessDelimiter(head);
  const [first] = readFirst(head, delimiter);
  if (first === undefined) throw new UnusableFile('The file is empty.');
  const { bytes, empty_lines: emptyLines } = first.info;
  if (bytes >= HEAD_MAX_BYTES) {
    throw new UnusableFile(`The first line is longer than ${HEAD_MAX_BYTES} bytes.`);
  }
  const names = first.record.map((name) => name.trim());
  if (names.some((name) => name.includes(REPLACEMENT))) throw new UnusableFile(NOT_UTF8);
  if (names.some((name) => name.includes('\0'))) throw new UnusableFile(NOT_CSV);
  if (names.length > COLUMNS_MAX) {
    throw new UnusableFile(
      `The first line has ${names.length} columns; at most ${COLUMNS_MAX} are allowed.`,
    );
  }
  return { delimiter, names, endBytes: bytes, row: emptyLines + 1 };
}

function readFirst(head: Buffer, delimiter: string): readonly Record[] {
  try {
    return parseWhole(head, {
      ...options(delimiter),
      info: true,
      bom: true,
      skip_empty_lines: true,
      max_record_size: 0,
      to: 1,
    }) as unknown as readonly Record[];
  } catch (error) {
    if (!(error instanceof CsvError)) throw error;
    throw new UnusableFile('A quote in the first line is not closed.');
  }
}

const NOT_CSV = 'The file is not a CSV file; export it as CSV in UTF-8.';
const NOT_UTF8 = 'The file is not in UTF-8; save it as CSV in UTF-8.';

function refuseOtherFormats(head: Buffer): void {
  const begins = (...bytes: readonly number[]): boolean =>
    bytes.every((byte, index) => head[index] === byte);
  if (begins(0xff, 0xfe) || begins(0xfe, 0xff)) throw new UnusableFile(NOT_UTF8);
  // A ZIP archive, which is what a spreadsheet of today is, and an older spreadsheet.
  if (begins(0x50, 0x4b, 0x03, 0x04) || begins(0xd0, 0xcf, 0x11, 0xe0)) {
    throw new UnusableFile(NOT_CSV);
  }
}

/** What the first line has most of outside quotes; a comma where it has none. */
function guessDelimiter(head: Buffer): string {
  const counts = new Map(DELIMITERS.map((delimiter) => [delimiter, 0]));
  let isQuoted = false;
  for (const character of head.toString('utf8').replace(/^[\ufeff\r\n]+/, '')) {
    if (character === '"') isQuoted = !isQuoted;
    else if (!isQuoted && (character === '\n' || character === '\r')) break;
    else if (!isQuoted && counts.has(character)) {
      counts.set(character, (counts.get(character) ?? 0) + 1);
    }
  }
  return DELIMITERS.reduce((best, other) =>
    (counts.get(other) ?? 0) > (counts.get(best) ?? 0) ? other : best,
  );
}

/** The place of a column; null: there is none. Throws UnusableFile for one that is there twice. */
export function placeOf({ names }: Header, name: string): number | null {
  const place = names.indexOf(name);
  if (place !== names.lastIndexOf(name)) {
    throw new UnusableFile(`The file has more than one column \`${shown(name)}\`.`);
  }
  return place === -1 ? null : place;
}

const SHOWN_COLUMNS_MAX = 20;

/** For a message. */
export function shownColumns({ names }: Header): string {
  const some = names.slice(0, SHOWN_COLUMNS_MAX).map((name) => `\`${shown(name)}\``);
  const more = names.length > SHOWN_COLUMNS_MAX ? ', …' : '';
  return `its columns are ${some.join(', ')}${more}`;
}

const shown = (name: string): string =>
  name.length > COLUMN_NAME_MAX_CHARACTERS
    ? `${name.slice(0, COLUMN_NAME_MAX_CHARACTERS).toWellFormed()}…`
    : name;

/**
 * The rows of a stream that begins where one does. An empty line is a row with one empty cell. The stream is destroyed
 * when this ends. Throws UnusableFile where no end of a row is found, after all rows before it.
 */
export async function* readRows(bytes: Readable, delimiter: string): AsyncGenerator<RawRow> {
  let rows: RawRow[] = [];
  const parser = parse({
    ...options(delimiter),
    // Taken here, since what a stream holds when it fails is lost.
    on_record(cells: readonly string[], { bytes: endBytes }) {
      rows.push({ cells, endBytes });
      return null;
    },
  });
  parser.on('error', () => undefined); // heard by whoever wrote
  parser.resume();
  const push = (work: (done: (error?: Error | null) => void) => void): Promise<Error | null> =>
    new Promise((resolve) => work((error) => resolve(error ?? null)));
  let [readBytes, endBytes] = [0, 0];
  try {
    for await (const piece of piecesOf(bytes)) {
      const failure = await push((done) => parser.write(piece, done));
      readBytes += piece.length;
      endBytes = rows.at(-1)?.endBytes ?? endBytes;
      yield* rows;
      rows = [];
      if (failure !== null) throw explain(failure);
      if (readBytes - endBytes > ROW_MAX_BYTES) throw tooLong();
    }
    const failure = await push((done) => {
      parser.once('end', () => done()).once('error', done);
      parser.end();
    });
    yield* rows;
    if (failure !== null) throw explain(failure);
  } finally {
    bytes.destroy();
    parser.destroy();
  }
}

async function* piecesOf(bytes: Readable): AsyncGenerator<Buffer> {
  for await (const chunk of bytes) {
    const whole = chunk as Buffer;
    for (let at = 0; at < whole.length; at += PIECE_BYTES) {
      yield whole.subarray(at, at + PIECE_BYTES);
      // Requests that have arrived are answered before it goes on.
      await new Promise((resolve) => setImmediate(resolve));
    }
  }
}

function explain(error: Error): Error {
  if (!(error instanceof CsvError)) return error;
  return error.code === 'CSV_MAX_RECORD_SIZE'
    ? tooLong()
    : new UnusableFile('a quote in it is not closed.');
}

const tooLong = (): UnusableFile =>
  new UnusableFile(
    `it is longer than ${ROW_MAX_CHARACTERS} characters; a quote in it may not be closed.`,
  );
