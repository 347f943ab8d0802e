// People that a tenant writes to, what it knows of them, the segments they are in, the topics they chose, and files that
// bring many of them at once.
import { defineEntity, p } from '@mikro-orm/core';

export type PropertyValue = string | number | boolean;

export const Contact = defineEntity({
  name: 'Contact',
  tableName: 'contact',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** As it was given. */
    email: p.text(),
    /** Lower case, domain in A-labels; unique in the tenant. */
    address: p.text(),
    firstName: p.text().nullable(),
    lastName: p.text().nullable(),
    /** Wants no broadcast at all. */
    unsubscribed: p.boolean(),
    /** By id of a contact property (audience/properties.ts says why; `propertiesByKey` there reads them). */
    properties: p.json<Readonly<Record<string, PropertyValue>>>(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

/** What a tenant may know of each contact. */
export const ContactProperty = defineEntity({
  name: 'ContactProperty',
  tableName: 'contact_property',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** Unique in the tenant; never changes, as the type. */
    key: p.text(),
    type: p.enum(['string', 'number', 'boolean']),
    /** For contacts without a value. */
    fallbackValue: p.json<PropertyValue>().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const Segment = defineEntity({
  name: 'Segment',
  tableName: 'segment',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const SegmentContact = defineEntity({
  name: 'SegmentContact',
  tableName: 'segment_contact',
  properties: {
    tenantId: p.uuid().primary(),
    segmentId: p.uuid().primary(),
    contactId: p.uuid().primary(),
    createdAt: p.datetime(),
  },
});

export type Subscription = 'opt_in' | 'opt_out';

/** A choice; without a row the default of the topic holds. Kept for a while when the topic is deleted (audience/topics.ts). */
export const ContactTopic = defineEntity({
  name: 'ContactTopic',
  tableName: 'contact_topic',
  properties: {
    tenantId: p.uuid().primary(),
    contactId: p.uuid().primary(),
    topicId: p.uuid().primary(),
    subscription: p.enum(['opt_in', 'opt_out']),
    updatedAt: p.datetime(),
  },
});

export const importStatuses = ['queued', 'in_progress', 'completed', 'failed'] as const;

/** A file of contacts, read in steps that survive a restart. */
export const ContactImport = defineEntity({
  name: 'ContactImport',
  tableName: 'contact_import',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    status: p.enum(importStatuses),
    onConflict: p.enum(['upsert', 'skip']),
    columnMap: p.json<Readonly<Record<string, unknown>>>().nullable(),
    segmentIds: p.json<readonly string[]>(),
    topics: p.json<readonly { readonly id: string; readonly subscription: Subscription }[]>(),
    /** Where the file lies until it was read. */
    blobKey: p.text().nullable(),
    /** Bytes of the file, and how many of them are stored contacts by now. */
    sizeBytes: p.bigint('number'),
    readBytes: p.bigint('number'),
    readRows: p.integer(),
    created: p.integer(),
    updated: p.integer(),
    skipped: p.integer(),
    failed: p.integer(),
    /** Why the whole of it failed. */
    failure: p.text().nullable(),
    /** Since something of it was stored last. */
    tries: p.smallint(),
    leasedUntil: p.datetime().nullable(),
    createdAt: p.datetime(),
    completedAt: p.datetime().nullable(),
  },
});
