// Mail written ahead: a template, and the versions of what it says. A version never changes. At most two
// are kept: the newest, which is edited and shown, and the published one, which is sent.
import { defineEntity, p } from '@mikro-orm/core';

export const templateStatuses = ['draft', 'published'] as const;

export const variableTypes = ['string', 'number', 'boolean', 'object', 'list'] as const;

/** One that is filled in at the time of sending. */
export interface TemplateVariable {
  /** The same for a key through all versions, as is `createdAt`. */
  readonly id: string;
  readonly key: string;
  /** For people; null: the key serves. */
  readonly name: string | null;
  readonly type: (typeof variableTypes)[number];
  /** JSON of the variable's type; null: none. */
  readonly fallback: unknown;
  /** May be left out without a fallback; then nothing stands in its place. */
  readonly isOptional: boolean;
  /** ISO 8601; when the declaration was last changed. */
  readonly updatedAt: string;
  readonly createdAt: string;
}

export const Template = defineEntity({
  name: 'Template',
  tableName: 'template',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    /** A second name for the API; unique in the tenant, never a UUID. */
    alias: p.text().nullable(),
    status: p.enum(templateStatuses),
    /** The newest. */
    currentVersionId: p.uuid(),
    /** What is sent; null exactly when the template is a draft. */
    publishedVersionId: p.uuid().nullable(),
    publishedAt: p.datetime().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const TemplateVersion = defineEntity({
  name: 'TemplateVersion',
  tableName: 'template_version',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    templateId: p.uuid(),
    /** As given; null: every email says its own. */
    fromGiven: p.text().nullable(),
    replyToGiven: p.json<readonly string[]>(),
    subject: p.text().nullable(),
    previewText: p.text().nullable(),
    html: p.text(),
    text: p.text().nullable(),
    variables: p.json<readonly TemplateVariable[]>(),
    /** Octets of html and text in UTF-8. */
    sizeBytes: p.integer(),
    createdAt: p.datetime(),
  },
});
