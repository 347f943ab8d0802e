// How the rows of a file become contacts: which column is for what, and what a cell may say. Contacts themselves are
// stored by contact-changes.ts.
import type { NewContact } from './contact-fields.ts';
import { contactIssues } from './contact-fields.ts';
import {
  placeOf,
  REPLACEMENT,
  shownColumns,
  UnusableFile,
  type Header,
  type RawRow,
} from './import-file.ts';
import type { ColumnMap } from './import-request.ts';
import { typedValue, type PropertyRecord, type PropertyType } from './properties.ts';

/** Places of columns, from 0; null: there is none. */
export interface Plan {
  readonly width: number;
  readonly email: number;
  readonly firstName: number | null;
  readonly lastName: number | null;
  readonly unsubscribed: number | null;
  readonly properties: readonly PlannedProperty[];
}

interface PlannedProperty {
  readonly key: string;
  readonly type: PropertyType;
  readonly place: number;
}

/** Which properties a map names, for those that are not there yet. */
export const mappedProperties = (
  map: ColumnMap | null,
): readonly { readonly key: string; readonly type: PropertyType }[] =>
  Object.entries(map?.properties ?? {}).map(([key, { type }]) => ({ key, type: type ?? 'string' }));

/**
 * With a map it alone says what is read, but that the address is at `email` where it does not say so. Without one a
 * column is read when it is called `email`, `first_name`, `last_name`, `unsubscribed` or exactly as one of `known`, the
 * tenant's properties by key; others are not read. Throws UnusableFile.
 */
export function planColumns(
  header: Header,
  map: ColumnMap | null,
  known: ReadonlyMap<string, PropertyRecord>,
): Plan {
  const mapped = (name: string | undefined): number | null => {
    if (name === undefined) return null;
    const place = placeOf(header, name);
    if (place === null) throw missing(header, name);
    return place;
  };
  const email = placeOf(header, map?.email ?? 'email');
  if (email === null) throw missing(header, map?.email ?? 'email');
  const width = header.names.length;
  if (map === null) {
    return {
      width,
      email,
      firstName: placeOf(header, 'first_name'),
      lastName: placeOf(header, 'last_name'),
      unsubscribed: placeOf(header, 'unsubscribed'),
      properties: [...known.values()].flatMap(({ key, type }) => {
        const place = placeOf(header, key);
        return place === null ? [] : [{ key, type, place }];
      }),
    };
  }
  const properties = Object.entries(map.properties ?? {}).map(([key, wanted]) => {
    const place = mapped(wanted.column)!;
    const type = known.get(key)?.type;
    if (type === undefined) throw new UnusableFile(`There is no contact property \`${key}\`.`);
    if (type !== (wanted.type ?? type)) {
      throw new UnusableFile(`The contact property \`${key}\` is a ${type}, not a ${wanted.type}.`);
    }
    return { key, type, place };
  });
  return {
    width,
    email,
    firstName: mapped(map.first_name),
    lastName: mapped(map.last_name),
    unsubscribed: mapped(map.unsubscribed),
    properties,
  };
}

const missing = (header: Header, name: string): UnusableFile =>
  new UnusableFile(
    `The file has no column \`${name}\`; ${shownColumns(header)}, and \`column_map\` names those to read.`,
  );

/** A contact, or what is wrong with the row as one sentence; null: the row is empty. An empty cell says nothing. */
export function contactOf({ cells }: RawRow, plan: Plan): NewContact | string | null {
  if (cells.every((cell) => cell.trim() === '')) return null;
  if (cells.slice(plan.width).some((cell) => cell.trim() !== '')) {
    const words = `has ${cells.length} cells, but there are ${plan.width} columns`;
    return `The row ${words}; a cell with a delimiter in it needs quotes.`;
  }
  const at = (place: number | null): string | undefined => {
    const cell = place === null ? '' : (cells[place] ?? '').trim();
    return cell === '' ? undefined : cell;
  };
  const email = at(plan.email);
  if (email === undefined) return 'The row has no address.';
  const flag = at(plan.unsubscribed);
  const unsubscribed = flag === undefined ? undefined : flagOf(flag);
  if (unsubscribed === null) return '`unsubscribed` must be true or false.';
  const properties: [string, string | number | boolean][] = [];
  for (const { key, type, place } of plan.properties) {
    const cell = at(place);
    if (cell === undefined) continue;
    const typed = typedValue(type, type === 'boolean' ? (flagOf(cell) ?? cell) : cell);
    if ('problem' in typed) return `\`properties.${key}\` ${typed.problem}.`;
    properties.push([key, typed.value]);
  }
  const contact: NewContact = {
    email,
    firstName: at(plan.firstName),
    lastName: at(plan.lastName),
    unsubscribed,
    ...(properties.length === 0 ? {} : { properties: Object.fromEntries(properties) }),
  };
  const said = [
    email,
    contact.firstName,
    contact.lastName,
    ...properties.map(([, value]) => value),
  ];
  if (said.some((text) => typeof text === 'string' && text.includes(REPLACEMENT))) {
    return 'The row has bytes that are not UTF-8; save the file as CSV in UTF-8.';
  }
  return contactIssues(contact)[0]?.message ?? contact;
}

const FLAGS: Readonly<Record<string, boolean>> = {
  true: true,
  yes: true,
  '1': true,
  false: false,
  no: false,
  '0': false,
};

/** Null: neither. */
const flagOf = (cell: string): boolean | null => {
  const word = cell.toLowerCase();
  return Object.hasOwn(FLAGS, word) ? (FLAGS[word] ?? null) : null;
};
