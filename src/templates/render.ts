// Fills a published template with values: verbatim and in one pass, so that a value is never looked at for
// placeholders itself. Versions never change, so their parsed texts are kept for the next email.
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import type { Store } from '../store/orm.ts';
import { Template, TemplateVersion, type TemplateVariable } from '../store/template.ts';
import { CONTENT_MAX_BYTES, CONTROLS, LINK_KEYS } from './content.ts';
import { whereIs } from './find.ts';
import { parsePlaceholders, type ParsedText } from './placeholder.ts';
import { undeclaredValueProblem, valueProblem, writeValue } from './value.ts';

export interface RenderedTemplate {
  readonly templateId: string;
  /** As the template has it; null: the email must say. */
  readonly from: string | null;
  readonly replyTo: readonly string[];
  readonly subject: string | null;
  readonly html: string | null;
  readonly text: string | null;
}

/** What stands for LINK_KEYS that have no value: the link of the email, or the end of the sentence why it has none. */
export type UnsubscribeLink = { readonly url: string } | { readonly whyNot: string };

export interface TemplateRenderer {
  /**
   * The published version of the tenant's template with these values. `id` may be an alias. Values that the template does
   * not know are ignored; null is no value. Throws a Refusal: not_found, template_not_published, or a
   * validation_error that lists every missing and every wrong value.
   */
  render(
    tenantId: string,
    template: { readonly id: string; readonly variables: Readonly<Record<string, unknown>> },
    link: UnsubscribeLink,
  ): Promise<RenderedTemplate>;
}

interface ParsedVersion {
  readonly from: string | null;
  readonly replyTo: readonly string[];
  readonly subject: ParsedText | null;
  readonly html: ParsedText;
  readonly text: ParsedText | null;
  readonly variables: readonly TemplateVariable[];
  /** The keys that stand in it anywhere. */
  readonly used: ReadonlySet<string>;
  /** Those that stand somewhere without a default of their own. */
  readonly bare: ReadonlySet<string>;
  readonly inSubject: ReadonlySet<string>;
  readonly fallbacks: Written;
  readonly sizeBytes: number;
}

/** Of all parsed versions that are kept, by the size of their texts. */
const CACHE_MAX_BYTES = 8 * 1024 * 1024;
/** Beside its texts, a version costs at least this. */
const ENTRY_BYTES = 4 * 1024;
/** How often the published version may be replaced while we look. */
const LOOKS_MAX = 5;
const PATH = 'template.variables';
/** Of a subject in UTF-8; the rules of an email say the rest. */
const SUBJECT_MAX_BYTES = 8 * 1024;

export function createTemplateRenderer(store: Store): TemplateRenderer {
  const cache = createCache();

  const read = async (tenantId: string, idOrAlias: string): Promise<[string, ParsedVersion]> => {
    const where = whereIs(tenantId, idOrAlias);
    for (let look = 0; where !== null && look < LOOKS_MAX; look += 1) {
      const em = store.em();
      const template = await em.findOne(Template, where, {
        fields: ['id', 'publishedVersionId'],
      });
      if (template === null) break;
      const versionId = template.publishedVersionId ?? null;
      if (versionId === null) throw notPublished();
      const kept = cache.get(versionId);
      if (kept !== undefined) return [template.id, kept];
      const version = await em.findOne(TemplateVersion, { tenantId, id: versionId });
      if (version === null) continue; // a newer one was published meanwhile, or the template deleted
      const parsed = parseVersion(version);
      cache.put(versionId, parsed);
      return [template.id, parsed];
    }
    throw new Refusal('not_found', 'Template not found');
  };

  return {
    async render(tenantId, { id, variables }, link) {
      const [templateId, version] = await read(tenantId, id);
      const written = checkValues(version, variables, link);
      const values = { written, fallbacks: version.fallbacks };
      return {
        templateId,
        from: version.from,
        replyTo: version.replyTo,
        subject: fill('subject', version.subject, values),
        html: fill('html', version.html, values),
        text: fill('text', version.text, values),
      };
    },
  };
}

const notPublished = (): Refusal =>
  refuseFields(
    [
      {
        path: 'template.id',
        message: 'The template in `template.id` is a draft; publish it before sending it.',
      },
    ],
    'template_not_published',
  );

function parseVersion(version: InstanceType<typeof TemplateVersion.class>): ParsedVersion {
  const parse = (text: string | null | undefined): ParsedText | null =>
    text === null || text === undefined ? null : parsePlaceholders(text);
  const subject = parse(version.subject);
  const html = parsePlaceholders(version.html);
  const text = parse(version.text);
  const all = [subject, html, text].flatMap((parsed) => parsed?.placeholders ?? []);
  return {
    from: version.fromGiven ?? null,
    replyTo: version.replyToGiven,
    subject,
    html,
    text,
    variables: version.variables,
    used: new Set(all.map(({ key }) => key)),
    bare: new Set(all.filter(({ fallback }) => fallback === null).map(({ key }) => key)),
    inSubject: new Set(subject?.placeholders.map(({ key }) => key)),
    fallbacks: new Map(
      version.variables
        .filter(({ fallback }) => fallback !== null)
        .map(({ key, fallback }) => [key, writeValue(fallback)]),
    ),
    sizeBytes: version.sizeBytes,
  };
}

type Written = ReadonlyMap<string, string>;

/** The given values as they are written. Throws a Refusal that lists everything that is missing or wrong. */
function checkValues(
  version: ParsedVersion,
  given: Readonly<Record<string, unknown>>,
  link: UnsubscribeLink,
): Written {
  const written = new Map<string, string>();
  const issues: Issue[] = [];
  /** False when nothing was given. */
  const take = (key: string, problemOf: (value: unknown) => string | null): boolean => {
    const value = Object.hasOwn(given, key) ? (given[key] ?? null) : null;
    if (value === null) return false;
    const path = `${PATH}.${key}`;
    const problem = problemOf(value);
    if (problem !== null) {
      issues.push({ path, message: `\`${path}\` ${problem}.` });
      return true;
    }
    const text = writeValue(value);
    if (version.inSubject.has(key) && CONTROLS.test(text)) {
      const message = `\`${path}\` stands in the subject, so it must be one line without control characters.`;
      issues.push({ path, message });
    } else written.set(key, text);
    return true;
  };

  for (const { key, type, fallback, isOptional } of version.variables) {
    if (take(key, (value) => valueProblem(type, value))) continue;
    const hasOwnDefaults = version.used.has(key) && !version.bare.has(key);
    if (fallback !== null || isOptional || hasOwnDefaults) continue;
    const path = `${PATH}.${key}`;
    const message = `Missing \`${path}\`: the template has no fallback for it.`;
    issues.push({ path, message });
  }
  const declared = new Set(version.variables.map(({ key }) => key));
  for (const key of version.used) {
    if (declared.has(key) || take(key, undeclaredValueProblem)) continue;
    const isLink = LINK_KEYS.has(key);
    if (isLink && 'url' in link) written.set(key, link.url);
    else if (version.bare.has(key)) {
      const path = `${PATH}.${key}`;
      const why =
        isLink && 'whyNot' in link
          ? `${link.whyNot}. Send it with a \`topic_id\` to one contact alone, or give the value.`
          : 'nothing else says what stands for it.';
      issues.push({ path, message: `Missing \`${path}\`: ${why}` });
    }
  }
  if (issues.length > 0) throw refuseFields(issues);
  return written;
}

/** Writes one text. Throws a Refusal when values make it too large. */
function fill(
  path: 'subject' | 'html' | 'text',
  parsed: ParsedText | null,
  { written, fallbacks }: { readonly written: Written; readonly fallbacks: Written },
): string | null {
  if (parsed === null) return null;
  const maxBytes = path === 'subject' ? SUBJECT_MAX_BYTES : CONTENT_MAX_BYTES;
  const pieces: string[] = [];
  let sizeBytes = 0;
  for (const segment of parsed.segments) {
    const piece =
      typeof segment === 'string'
        ? segment
        : (written.get(segment.key) ?? segment.fallback ?? fallbacks.get(segment.key) ?? '');
    sizeBytes += Buffer.byteLength(piece);
    if (sizeBytes > maxBytes) {
      const message = `With these \`${PATH}\` the \`${path}\` has more than ${maxBytes} bytes; shorten them.`;
      throw refuseFields([{ path: PATH, message }]);
    }
    pieces.push(piece);
  }
  return pieces.join('');
}

interface Cache {
  get(versionId: string): ParsedVersion | undefined;
  put(versionId: string, version: ParsedVersion): void;
}

/** Keeps what was used last. */
function createCache(): Cache {
  const entries = new Map<string, ParsedVersion>();
  let heldBytes = 0;
  const costOf = (version: ParsedVersion): number => ENTRY_BYTES + version.sizeBytes;
  const drop = (versionId: string): void => {
    const version = entries.get(versionId);
    if (version !== undefined) heldBytes -= costOf(version);
    entries.delete(versionId);
  };
  return {
    get(versionId) {
      const version = entries.get(versionId);
      if (version !== undefined) {
        entries.delete(versionId);
        entries.set(versionId, version);
      }
      return version;
    },
    put(versionId, version) {
      drop(versionId);
      if (costOf(version) > CACHE_MAX_BYTES) return;
      entries.set(versionId, version);
      heldBytes += costOf(version);
      while (heldBytes > CACHE_MAX_BYTES) drop(entries.keys().next().value!);
    },
  };
}
