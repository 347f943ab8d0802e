// Making, changing, publishing and reading templates. Whoever changes one locks its row first, so that of two changes
// at the same time the second builds on the first. What is published goes on being sent until the next
// publication, however often the template is edited meanwhile.
import { isDeepStrictEqual } from 'node:util';
import { IsolationLevel, LockMode, type SqlEntityManager } from '@mikro-orm/postgresql';
import {
  checkPage,
  refuseCursor,
  toPage,
  type PageRequest,
  orderOf,
  rangeOf,
} from '../access/page.ts';
import { Refusal, refuseFields } from '../access/refusal.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { Template, TemplateVersion } from '../store/template.ts';
import {
  applyRequest,
  checkCreate,
  NAME_MAX_CHARACTERS,
  type CreateTemplateRequest,
  type TemplateContent,
  type TemplateDraft,
  type UpdateTemplateRequest,
} from './content.ts';
import { whereIs } from './find.ts';

export interface TemplateRecord {
  readonly id: string;
  readonly name: string;
  readonly alias: string | null;
  readonly status: TemplateRow['status'];
  /** The newest version, which `content` is of. */
  readonly currentVersionId: string;
  readonly publishedVersionId: string | null;
  readonly publishedAt: Date | null;
  readonly createdAt: Date;
  readonly updatedAt: Date;
  readonly content: TemplateContent;
}

export interface TemplatePage {
  readonly items: readonly TemplateRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** `id` is an id or an alias; a template that is missing, foreign or named wrongly is one Refusal: not_found. */
export interface TemplateVerbs {
  /** The id of the new draft. Throws a Refusal when a field is wrong or the alias taken. */
  create(tenantId: string, request: CreateTemplateRequest): Promise<string>;
  list(tenantId: string, page: PageRequest): Promise<TemplatePage>;
  find(tenantId: string, id: string): Promise<TemplateRecord>;
  /** Changes what the request names. Throws a Refusal when a field is wrong or the alias taken. */
  update(tenantId: string, id: string, request: UpdateTemplateRequest): Promise<string>;
  /** Sends the newest version from now on. Throws a Refusal when it has no html. */
  publish(tenantId: string, id: string): Promise<string>;
  /** The id of a new draft with the newest content, without an alias. */
  duplicate(tenantId: string, id: string): Promise<string>;
  remove(tenantId: string, id: string): Promise<string>;
}

type TemplateRow = InstanceType<typeof Template.class>;
type VersionRow = InstanceType<typeof TemplateVersion.class>;

/** Of the texts on one page of the list: it ends early rather than hold more, except for its first template. */
const PAGE_MAX_BYTES = 12 * 1024 * 1024;
const COPY_SUFFIX = ' (Copy)';
/** Postgres: the alias is another template's, or is just becoming it while ours was wanted there. */
const ALIAS_ERRORS = ['23505', '40P01'];

export function createTemplateVerbs(store: Store, now: () => Date): TemplateVerbs {
  /** Runs `work` on the tenant's template and its newest version; nobody else changes them until it is stored. */
  const change = async (
    tenantId: string,
    id: string,
    work: (em: SqlEntityManager, template: TemplateRow, version: VersionRow) => string,
  ): Promise<string> => {
    const where = whereIs(tenantId, id);
    if (where === null) throw notFound();
    return refuseTakenAlias(() =>
      store.em().transactional(async (em) => {
        const template = await em.findOne(Template, where, {
          lockMode: LockMode.PESSIMISTIC_WRITE,
        });
        if (template === null) throw notFound();
        const version = await newestVersion(em, template);
        const result = work(em, template, version);
        await em.flush();
        const kept = [template.currentVersionId, template.publishedVersionId ?? null];
        await em.nativeDelete(TemplateVersion, {
          tenantId,
          templateId: template.id,
          id: { $nin: kept.filter((one) => one !== null) },
        });
        return result;
      }),
    );
  };

  return {
    async create(tenantId, request) {
      const at = now();
      const draft = checkCreate(request, at);
      return refuseTakenAlias(() => insertTemplate(store, { tenantId, at }, draft));
    },

    list: (tenantId, page) => listTemplates(store, tenantId, page),

    find: (tenantId, id) => findTemplate(store, tenantId, id),

    update: (tenantId, id, request) =>
      change(tenantId, id, (em, template, version) => {
        const at = now();
        const content = contentOf(version);
        const draft = applyRequest(
          { name: template.name, alias: template.alias ?? null, content },
          request,
          at,
        );
        template.name = draft.name;
        template.alias = draft.alias;
        template.updatedAt = at;
        if (!isDeepStrictEqual(content, draft.content)) {
          addVersion(em, template, draft.content, at);
        }
        if (request.status === 'published') publish(template, draft.content, at);
        if (request.status === 'draft') {
          template.status = 'draft';
          template.publishedVersionId = null;
          template.publishedAt = null;
        }
        return template.id;
      }),

    publish: (tenantId, id) =>
      change(tenantId, id, (_em, template, version) => {
        const at = now();
        publish(template, version, at);
        template.updatedAt = at;
        return template.id;
      }),

    async duplicate(tenantId, id) {
      const { name, content } = await findTemplate(store, tenantId, id);
      const at = now();
      return insertTemplate(
        store,
        { tenantId, at },
        { name: copyName(name), alias: null, content },
      );
    },

    async remove(tenantId, id) {
      const where = whereIs(tenantId, id);
      if (where === null) throw notFound();
      const { rows } = await store.pool.query<{ id: string }>(
        `delete from template where tenant_id = $1 and ${'id' in where ? 'id' : 'alias'} = $2 returning id`,
        [tenantId, 'id' in where ? where.id : where.alias],
      );
      const [removed] = rows;
      if (removed === undefined) throw notFound();
      return removed.id;
    },
  };
}

const notFound = (): Refusal => new Refusal('not_found', 'Template not found');

async function refuseTakenAlias<T>(write: () => Promise<T>): Promise<T> {
  try {
    return await write();
  } catch (error) {
    const { code } = error as { readonly code?: string };
    if (code === undefined || !ALIAS_ERRORS.includes(code)) throw error;
    const message = 'Another template has this `alias`; choose another, or change that one first.';
    throw refuseFields([{ path: 'alias', message }], 'alias_taken');
  }
}

/** Two reads of one moment, so that a version is not replaced between them. */
function readTogether<T>(store: Store, read: (em: SqlEntityManager) => Promise<T>): Promise<T> {
  return store.em().transactional(read, {
    isolationLevel: IsolationLevel.REPEATABLE_READ,
    readOnly: true,
  });
}

function findTemplate(store: Store, tenantId: string, id: string): Promise<TemplateRecord> {
  const where = whereIs(tenantId, id);
  if (where === null) return Promise.reject(notFound());
  return readTogether(store, async (em) => {
    const template = await em.findOne(Template, where);
    if (template === null) throw notFound();
    return toRecord(template, await newestVersion(em, template));
  });
}

async function listTemplates(
  store: Store,
  tenantId: string,
  page: PageRequest,
): Promise<TemplatePage> {
  const cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  return readTogether(store, async (em) => {
    if (at !== null && (await em.count(Template, { tenantId, id: at })) === 0) refuseCursor(cursor);
    const found = await em.find(
      Template,
      {
        tenantId,
        ...rangeOf(cursor),
      },
      orderOf(cursor),
    );
    const sizes = await em.find(
      TemplateVersion,
      { tenantId, id: { $in: found.map(({ currentVersionId }) => currentVersionId) } },
      { fields: ['id', 'sizeBytes'], disableIdentityMap: true },
    );
    const sizeOf = new Map(sizes.map(({ id, sizeBytes }) => [id, sizeBytes]));
    let sizeBytes = 0;
    const fitting = found.filter(({ currentVersionId }, index) => {
      sizeBytes += sizeOf.get(currentVersionId) ?? 0;
      return index === 0 || sizeBytes <= PAGE_MAX_BYTES;
    });
    const cut = toPage(fitting, cursor);
    const versions = await em.find(TemplateVersion, {
      tenantId,
      id: { $in: cut.items.map(({ currentVersionId }) => currentVersionId) },
    });
    const versionOf = new Map(versions.map((version) => [version.id, version]));
    return {
      items: cut.items.map((template) =>
        toRecord(template, versionOf.get(template.currentVersionId)!),
      ),
      hasMore: cut.hasMore || fitting.length < found.length,
    };
  });
}

const newestVersion = (em: SqlEntityManager, template: TemplateRow): Promise<VersionRow> =>
  em.findOneOrFail(TemplateVersion, {
    tenantId: template.tenantId,
    id: template.currentVersionId,
  });

async function insertTemplate(
  store: Store,
  { tenantId, at }: { readonly tenantId: string; readonly at: Date },
  { name, alias, content }: TemplateDraft,
): Promise<string> {
  const id = newId();
  await store.em().transactional(async (em) => {
    const template = em.create(Template, {
      tenantId,
      id,
      name,
      alias,
      status: 'draft',
      currentVersionId: newId(),
      publishedVersionId: null,
      publishedAt: null,
      createdAt: at,
      updatedAt: at,
    });
    em.persist(template);
    // The version refers to it.
    await em.flush();
    addVersion(em, template, content, at);
  });
  return id;
}

function addVersion(
  em: SqlEntityManager,
  template: TemplateRow,
  ...[content, at]: [TemplateContent, Date]
): void {
  template.currentVersionId = newId();
  em.persist(
    em.create(TemplateVersion, {
      tenantId: template.tenantId,
      id: template.currentVersionId,
      templateId: template.id,
      ...content,
      sizeBytes: Buffer.byteLength(content.html) + Buffer.byteLength(content.text ?? ''),
      createdAt: at,
    }),
  );
}

function publish(template: TemplateRow, content: { readonly html: string }, at: Date): void {
  if (content.html.trim() === '') {
    throw refuseFields([{ path: 'html', message: 'A template needs `html` to be published.' }]);
  }
  template.status = 'published';
  template.publishedVersionId = template.currentVersionId;
  template.publishedAt = at;
}

/** The name and its suffix, the name cut between characters where both are too long. */
export function copyName(name: string): string {
  let kept = '';
  for (const character of name) {
    if (kept.length + character.length + COPY_SUFFIX.length > NAME_MAX_CHARACTERS) break;
    kept += character;
  }
  return kept + COPY_SUFFIX;
}

const contentOf = (version: VersionRow): TemplateContent => ({
  fromGiven: version.fromGiven ?? null,
  replyToGiven: version.replyToGiven,
  subject: version.subject ?? null,
  previewText: version.previewText ?? null,
  html: version.html,
  text: version.text ?? null,
  variables: version.variables,
});

const toRecord = (template: TemplateRow, version: VersionRow): TemplateRecord => ({
  id: template.id,
  name: template.name,
  alias: template.alias ?? null,
  status: template.status,
  currentVersionId: template.currentVersionId,
  publishedVersionId: template.publishedVersionId ?? null,
  publishedAt: template.publishedAt ?? null,
  createdAt: template.createdAt,
  updatedAt: template.updatedAt,
  content: contentOf(version),
});
