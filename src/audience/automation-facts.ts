// What an automation knows of a contact: its fields, and its properties with the fallbacks of those it has no value for.
import type { Pool, PoolClient } from 'pg';
import type { PropertyValue } from '../store/contact.ts';
import type { ContactFacts } from './automation-values.ts';
import type { ContactRecord } from './contacts.ts';
import { readProperties } from './properties.ts';

export async function factsOf(
  db: Pick<Pool | PoolClient, 'query'>,
  tenantId: string,
  contact: ContactRecord,
): Promise<ContactFacts> {
  const properties = new Map<string, PropertyValue>();
  for (const { key, fallbackValue } of (await readProperties(db, tenantId)).values()) {
    const value = Object.hasOwn(contact.properties, key) ? contact.properties[key] : fallbackValue;
    if (value !== null && value !== undefined) properties.set(key, value);
  }
  return {
    id: contact.id,
    email: contact.email,
    first_name: contact.firstName,
    last_name: contact.lastName,
    unsubscribed: contact.unsubscribed,
    created_at: contact.createdAt.toISOString(),
    properties: Object.fromEntries(properties),
  };
}
