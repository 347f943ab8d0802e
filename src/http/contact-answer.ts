// How a contact is answered, by its own paths and by those of segments and audiences. Not in a controller: the generator
// would register that one with the first that imports it, and `/contacts/{id}` has to come after `/contacts/imports`.
import type express from 'express';
import type { ContactPage, ContactRecord } from '../audience/contacts.ts';

/** A value with its type. */
export interface TypedPropertyValue {
  type: 'string' | 'number' | 'boolean';
  value: string | number | boolean;
}

/** Somebody to write to. */
export interface Contact {
  object: 'contact';
  id: string;
  email: string;
  first_name: string | null;
  last_name: string | null;
  /** Wants no broadcast at all. */
  unsubscribed: boolean;
  /**
   * By key; fallbacks are not in it. `GET /contacts/{id}` gives each value with its type, except under `/api`; all other
   * answers give values as they are.
   */
  properties: { [key: string]: string | number | boolean | TypedPropertyValue };
  created_at: Date;
}

export interface ContactList {
  object: 'list';
  data: Contact[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

/** The contact that was changed. */
export interface ContactChanged {
  object: 'contact';
  id: string;
}

export interface ContactDeleted {
  object: 'contact';
  id: string;
  /** The same id. */
  contact: string;
  deleted: boolean;
}

/** The contact with its properties as values. */
export const presentContact = (contact: ContactRecord): Contact => ({
  object: 'contact',
  id: contact.id,
  email: contact.email,
  first_name: contact.firstName,
  last_name: contact.lastName,
  unsubscribed: contact.unsubscribed,
  properties: { ...contact.properties },
  created_at: contact.createdAt,
});

/** The same, or with the type of each property where the request did not come by the `/api` mount. */
export function presentOne(request: express.Request, contact: ContactRecord): Contact {
  if (request.baseUrl === '/api') return presentContact(contact);
  const typed = Object.entries(contact.properties).map(([key, value]) => {
    const type =
      typeof value === 'string' ? 'string' : typeof value === 'number' ? 'number' : 'boolean';
    return [key, { type, value }] as const;
  });
  return { ...presentContact(contact), properties: Object.fromEntries(typed) };
}

export const presentContacts = (page: ContactPage): ContactList => ({
  object: 'list',
  data: page.items.map(presentContact),
  has_more: page.hasMore,
});
