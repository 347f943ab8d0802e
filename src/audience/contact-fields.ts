// What a contact may be given: checked here, once for the API, files and automations.
import type { PoolClient } from 'pg';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress, parseMailbox } from '../mail/address.ts';
import type { PropertyValue, Subscription } from '../store/contact.ts';
import { ensureProperties, readProperties, typedValue, typeOfValue } from './properties.ts';
import { lineIssues } from './texts.ts';

/** What is absent stays as it is; null removes. */
export interface ContactFields {
  readonly firstName?: string | null | undefined;
  readonly lastName?: string | null | undefined;
  readonly unsubscribed?: boolean | undefined;
  /** By key; null removes the value. Keys of no property make one of the value's type. */
  readonly properties?: Readonly<Record<string, PropertyValue | null>> | undefined;
}

export interface NewContact extends ContactFields {
  /** One address without a name. */
  readonly email: string;
  /** Segments and topics that are not there (any more) are passed over. */
  readonly segmentIds?: readonly string[] | undefined;
  readonly topics?: readonly TopicChoice[] | undefined;
}

export interface TopicChoice {
  readonly id: string;
  readonly subscription: Subscription;
}

/** Checked fields: properties by their ids. */
export interface CheckedFields {
  readonly firstName?: string | null | undefined;
  readonly lastName?: string | null | undefined;
  readonly unsubscribed?: boolean | undefined;
  readonly values: ReadonlyMap<string, PropertyValue | null>;
  /** Of all properties of the tenant, where values change: others are swept from the contact. */
  readonly liveIds: ReadonlySet<string>;
}

export const NAME_MAX_CHARACTERS = 255;

/** What is wrong with the address, as an issue about `path`. */
export function emailIssues(path: string, email: string): Issue[] {
  const parsed = parseMailbox(email);
  const problem = !parsed.ok
    ? parsed.problem
    : parsed.mailbox.given.endsWith('>')
      ? 'must stand alone, without a name and angle brackets'
      : null;
  return problem === null
    ? []
    : [{ path, message: `Invalid \`${path}\` field: the address ${problem}.` }];
}

/** All that can be said without looking at the tenant's properties. */
export const contactIssues = (contact: ContactFields & { readonly email?: string }): Issue[] => [
  ...(contact.email === undefined ? [] : emailIssues('email', contact.email)),
  ...lineIssues('first_name', contact.firstName ?? '', NAME_MAX_CHARACTERS),
  ...lineIssues('last_name', contact.lastName ?? '', NAME_MAX_CHARACTERS),
  ...Object.entries(contact.properties ?? {}).flatMap(([key, value]) =>
    value === null || ['string', 'number', 'boolean'].includes(typeof value)
      ? []
      : [
          {
            path: `properties.${key}`,
            message: `\`properties.${key}\` must be a string, a number, true, false or null.`,
          },
        ],
  ),
];

/** The address that a contact is found by. */
export const addressOf = (email: string): string => normalizedAddress(email);

/**
 * The contacts with their properties typed and by id, in their order; makes the properties that are not there. Throws a
 * Refusal with the issues of the first contact that has some.
 */
export async function checkFields(
  client: PoolClient,
  tenantId: string,
  contacts: readonly (ContactFields & { readonly email?: string })[],
  at: Date,
): Promise<readonly CheckedFields[]> {
  for (const contact of contacts) {
    const issues = contactIssues(contact);
    if (issues.length > 0) throw refuseFields(issues);
  }
  const wanted = contacts.flatMap(({ properties = {} }) =>
    Object.entries(properties).flatMap(([key, value]) =>
      value === null ? [] : [{ key, type: typeOfValue(value) }],
    ),
  );
  const isAsked = contacts.some(({ properties = {} }) => Object.keys(properties).length > 0);
  const known = isAsked
    ? wanted.length > 0
      ? await ensureProperties(client, tenantId, wanted, at)
      : await readProperties(client, tenantId)
    : new Map<string, never>();
  const liveIds = new Set([...known.values()].map(({ id }) => id));
  return contacts.map((contact) => {
    const issues: Issue[] = [];
    const values = new Map<string, PropertyValue | null>();
    for (const [key, given] of Object.entries(contact.properties ?? {})) {
      const property = known.get(key);
      if (property === undefined) continue; // nothing to remove
      if (given === null) {
        values.set(property.id, null);
        continue;
      }
      const typed = typedValue(property.type, given);
      if ('value' in typed) {
        values.set(property.id, typed.value);
        continue;
      }
      const path = `properties.${key}`;
      issues.push({ path, message: `\`${path}\` ${typed.problem}.` });
    }
    if (issues.length > 0) throw refuseFields(issues);
    return {
      firstName: blankToNull(contact.firstName),
      lastName: blankToNull(contact.lastName),
      unsubscribed: contact.unsubscribed,
      values,
      liveIds,
    };
  });
}

const blankToNull = (name: string | null | undefined): string | null | undefined =>
  name?.trim() === '' ? null : name;
