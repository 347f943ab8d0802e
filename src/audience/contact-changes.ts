// The only writer of contacts, of who is in which segment and of topic choices, for the API, files, automations and
// unsubscribing. Each change tells webhooks in its own transaction, and only when something is different afterwards.
//
// Locks are taken in one order, contacts by address and what belongs to them after that, so that two files with the same
// people never wait for each other in a circle.
import type { PoolClient } from 'pg';
import type { PropertyValue } from '../store/contact.ts';
import { addressOf, checkFields, type CheckedFields } from './contact-fields.ts';
import type { ContactFields, NewContact, TopicChoice } from './contact-fields.ts';
import {
  insertMembers,
  insertNew,
  lockContact,
  readLocked,
  storeChoices,
  touch,
  writeChanged,
  type Chosen,
  type NewRow,
} from './contact-rows.ts';
import { readTold, tellContacts, type Told } from './contact-told.ts';

export interface Upserted {
  readonly id: string;
  readonly isNew: boolean;
  /** Something about a contact that was there is different now. */
  readonly isChanged: boolean;
}

export interface UpsertOptions {
  readonly at: Date;
  /** Whether webhooks hear of it. */
  readonly tells: boolean;
  /** What becomes of a contact that is there: `upsert` (default) changes what is given, `skip` leaves it alone. */
  readonly onConflict?: 'upsert' | 'skip';
}

/** Of one call; a transaction with more would hold its locks for too long. */
export const UPSERTS_MAX = 1_000;

/** One contact, made or changed; by its address. Throws a Refusal for wrong fields. */
export async function upsertContact(
  client: PoolClient,
  tenantId: string,
  contact: NewContact,
  options: UpsertOptions,
): Promise<Upserted> {
  const [upserted] = await upsertContacts(client, tenantId, [contact], options);
  return upserted!;
}

/**
 * Up to UPSERTS_MAX at once, in a fixed number of statements; the outcomes in the order given. An address that comes
 * twice is changed twice, one after the other. Throws a Refusal with the issues of the first contact that has some, and
 * has then changed nothing that the caller should commit.
 */
export async function upsertContacts(
  client: PoolClient,
  tenantId: string,
  contacts: readonly NewContact[],
  options: UpsertOptions,
): Promise<readonly Upserted[]> {
  if (contacts.length > UPSERTS_MAX) throw new RangeError(`more than ${UPSERTS_MAX} contacts`);
  const checked = await checkFields(client, tenantId, contacts, options.at);
  const rows = contacts.map((contact, index) => ({
    contact,
    fields: checked[index]!,
    address: addressOf(contact.email),
    index,
  }));
  const upserted: Upserted[] = [];
  for (const round of roundsOf(rows)) {
    const outcomes = await upsertDistinct(client, tenantId, round, options);
    for (const [position, { index }] of round.entries()) upserted[index] = outcomes[position]!;
  }
  return upserted;
}

/** Changes what is given. False when there is no such contact. Throws a Refusal for wrong fields. */
export async function changeContact(
  client: PoolClient,
  tenantId: string,
  contactId: string,
  change: ContactFields,
  at: Date,
): Promise<boolean> {
  const [fields] = await checkFields(client, tenantId, [change], at);
  const held = await lockContact(client, tenantId, contactId);
  if (held === null) return false;
  const next = withFields(held, fields!);
  if (next === null) return true;
  await writeChanged(client, tenantId, [next], at);
  await tellContacts(client, tenantId, { type: 'contact.updated', ids: [contactId], at });
  return true;
}

/** Removes a contact with its memberships and choices. False when there is no such contact. */
export async function removeContact(
  client: PoolClient,
  tenantId: string,
  contactId: string,
  at: Date,
): Promise<boolean> {
  if ((await lockContact(client, tenantId, contactId)) === null) return false;
  // What is told of it has to be read while it is there.
  const told = await readTold(client, tenantId, 'contact.deleted', [contactId]);
  await client.query('delete from contact where tenant_id = $1 and id = $2', [tenantId, contactId]);
  await tellContacts(client, tenantId, { type: 'contact.deleted', told, at });
  return true;
}

/** `missing`: the tenant has no such contact or no such segment. */
export async function addToSegment(
  client: PoolClient,
  tenantId: string,
  { contactId, segmentId }: { readonly contactId: string; readonly segmentId: string },
  at: Date,
): Promise<'added' | 'present' | 'missing'> {
  if ((await lockContact(client, tenantId, contactId)) === null) return 'missing';
  const { rows } = await client.query(
    'select 1 from segment where tenant_id = $1 and id = $2 for key share',
    [tenantId, segmentId],
  );
  if (rows.length === 0) return 'missing';
  const added = await insertMembers(client, tenantId, [{ contactId, segmentId }], at);
  if (added.size === 0) return 'present';
  await touch(client, tenantId, [contactId], at);
  await tellContacts(client, tenantId, { type: 'contact.updated', ids: [contactId], at });
  return 'added';
}

/** False when the contact was not in it, or there is no such contact or segment. */
export async function removeFromSegment(
  client: PoolClient,
  tenantId: string,
  { contactId, segmentId }: { readonly contactId: string; readonly segmentId: string },
  at: Date,
): Promise<boolean> {
  if ((await lockContact(client, tenantId, contactId)) === null) return false;
  const { rowCount } = await client.query(
    'delete from segment_contact where tenant_id = $1 and segment_id = $2 and contact_id = $3',
    [tenantId, segmentId, contactId],
  );
  if (rowCount === 0) return false;
  await touch(client, tenantId, [contactId], at);
  await tellContacts(client, tenantId, { type: 'contact.updated', ids: [contactId], at });
  return true;
}

/**
 * Stores choices; topics that the tenant does not have are passed over. Whether one is different from what was stored;
 * false as well when there is no such contact.
 */
export async function setSubscriptions(
  client: PoolClient,
  tenantId: string,
  contactId: string,
  choices: readonly TopicChoice[],
  at: Date,
): Promise<boolean> {
  if ((await lockContact(client, tenantId, contactId)) === null) return false;
  const rows = choices.map((choice) => ({ contactId, ...choice }));
  const changed = await storeChoices(client, tenantId, rows, at);
  await tellChoices(client, tenantId, changed, at);
  return changed.size > 0;
}

interface Row {
  readonly contact: NewContact;
  readonly fields: CheckedFields;
  readonly address: string;
  readonly index: number;
}

/** In rounds in which every address comes once, the first of each first. */
function roundsOf(rows: readonly Row[]): readonly (readonly Row[])[] {
  const rounds: Row[][] = [];
  const seen = new Map<string, number>();
  for (const row of rows) {
    const round = seen.get(row.address) ?? 0;
    seen.set(row.address, round + 1);
    (rounds[round] ??= []).push(row);
  }
  return rounds;
}

async function upsertDistinct(
  client: PoolClient,
  tenantId: string,
  rows: readonly Row[],
  { at, tells, onConflict = 'upsert' }: UpsertOptions,
): Promise<readonly Upserted[]> {
  const made = await insertNew(client, tenantId, rows.map(toNewRow), at);
  const isNew = new Set(made.map(({ address }) => address));
  const there = rows.map(({ address }) => address).filter((address) => !isNew.has(address));
  const held = await readLocked(client, tenantId, there);
  const idOf = new Map([...made, ...held].map(({ address, id }) => [address, id]));
  const heldBy = new Map(held.map((one) => [one.address, one]));
  const given = rows.filter(({ address }) => onConflict === 'upsert' || isNew.has(address));
  const changed = given.flatMap(({ address, fields }) => {
    const one = heldBy.get(address);
    return (one === undefined ? null : withFields(one, fields)) ?? [];
  });
  await writeChanged(client, tenantId, changed, at);
  const idFor = ({ address }: Row): string => idOf.get(address)!;
  const joined = await insertMembers(
    client,
    tenantId,
    given.flatMap((row) =>
      (row.contact.segmentIds ?? []).map((segmentId) => ({ contactId: idFor(row), segmentId })),
    ),
    at,
  );
  const chosen = await storeChoices(
    client,
    tenantId,
    given.flatMap((row) =>
      (row.contact.topics ?? []).map((choice) => ({ contactId: idFor(row), ...choice })),
    ),
    at,
  );
  const changedIds = new Set(changed.map(({ id }) => id));
  const onlyJoined = held.map(({ id }) => id).filter((id) => joined.has(id) && !changedIds.has(id));
  await touch(client, tenantId, onlyJoined, at);
  if (tells) {
    const created = rows.filter(({ address }) => isNew.has(address)).map(idFor);
    const updated = [...changedIds, ...onlyJoined];
    await tellContacts(client, tenantId, { type: 'contact.created', ids: created, at });
    await tellContacts(client, tenantId, { type: 'contact.updated', ids: updated, at });
    await tellChoices(client, tenantId, chosen, at);
  }
  return rows.map((row) => {
    const id = idFor(row);
    const isFresh = isNew.has(row.address);
    const isDifferent = changedIds.has(id) || joined.has(id) || chosen.has(id);
    return { id, isNew: isFresh, isChanged: !isFresh && isDifferent };
  });
}

const BLANK = { firstName: null, lastName: null, unsubscribed: false, properties: {} };

function toNewRow({ contact, address, fields }: Row): NewRow {
  const row = { ...BLANK, email: contact.email.trim(), address };
  return withFields(row, fields) ?? row;
}

/** The values of a contact with these changes, and without those of properties that are gone. */
function withValues(
  held: Readonly<Record<string, PropertyValue>>,
  { values, liveIds }: CheckedFields,
): Readonly<Record<string, PropertyValue>> {
  if (values.size === 0) return held;
  const next = new Map(Object.entries(held).filter(([id]) => liveIds.has(id)));
  for (const [id, value] of values) {
    if (value === null) next.delete(id);
    else next.set(id, value);
  }
  return Object.fromEntries(next);
}

/** The contact with these changes; null: they change nothing. */
function withFields<T extends Omit<NewRow, 'email'>>(held: T, fields: CheckedFields): T | null {
  const next: T = {
    ...held,
    firstName: fields.firstName === undefined ? held.firstName : fields.firstName,
    lastName: fields.lastName === undefined ? held.lastName : fields.lastName,
    unsubscribed: fields.unsubscribed ?? held.unsubscribed,
    properties: withValues(held.properties, fields),
  };
  const isSame =
    next.firstName === held.firstName &&
    next.lastName === held.lastName &&
    next.unsubscribed === held.unsubscribed &&
    [...fields.values].every(([id, value]) => (held.properties[id] ?? null) === value);
  return isSame ? null : next;
}

async function tellChoices(
  client: PoolClient,
  tenantId: string,
  chosen: Chosen,
  at: Date,
): Promise<void> {
  if (chosen.size === 0) return;
  const type = 'contact.topics.updated';
  const read = await readTold(client, tenantId, type, [...chosen.keys()]);
  const told = read.map(({ id, data }): Told => ({
    id,
    data: { email: data['email'], topics: chosen.get(id) ?? [] },
  }));
  await tellContacts(client, tenantId, { type, told, at });
}
