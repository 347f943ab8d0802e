// What a template may say: the fields of a request laid over what the template says already, and every rule that
// needs no database. Pure; all issues are found, not only the first.
import { isDeepStrictEqual } from 'node:util';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { parseMailbox } from '../mail/address.ts';
import { isUuid, newId } from '../store/id.ts';
import type { TemplateVariable } from '../store/template.ts';
import { ALIAS } from './find.ts';
import { KEY, parsePlaceholders } from './placeholder.ts';
import { isStorable, valueProblem } from './value.ts';

/** A variable as a request declares it. */
export interface TemplateVariableRequest {
  /** 1 to 50 letters, digits and underscores; stands in the texts as `{{{key}}}`. */
  key: string;
  /** For people; at most 255 characters. */
  name?: string | null;
  /** Absent: `string`. */
  type?: 'string' | 'number' | 'boolean' | 'object' | 'list';
  /** False: may be left out when sending, also without a fallback. A fallback makes it optional anyway. */
  required?: boolean;
  /** Of the variable's type, at most 2,000 characters; stands in for a value that is not given. */
  fallback_value?: unknown;
}

/** A change of a template: what is absent stays. */
export interface UpdateTemplateRequest {
  /** 1 to 255 characters. */
  name?: string;
  /** 1 to 128 letters, digits, dashes and underscores, no UUID; unique. Null removes it. */
  alias?: string | null;
  /** `published` makes this the version that is sent, `draft` stops the template from being sent. */
  status?: 'draft' | 'published';
  /** The author of emails that name none: `a@b.c` or `Name <a@b.c>`. */
  from?: string | null;
  /** The subject of emails that have none; one line. */
  subject?: string | null;
  /** Where answers go when the email does not say: one address or up to 50. */
  reply_to?: string | string[] | null;
  /** A short summary for people; kept with the template, not put into emails. */
  preview_text?: string | null;
  /** At most 5 MiB in UTF-8. */
  html?: string;
  /** At most 5 MiB in UTF-8. Null: made from `html`. */
  text?: string | null;
  /** At most 50; replaces all that were declared. */
  variables?: TemplateVariableRequest[] | null;
}

/** A new template. */
export interface CreateTemplateRequest {
  /** 1 to 255 characters. */
  name: string;
  /** At most 5 MiB in UTF-8. */
  html: string;
  /** 1 to 128 letters, digits, dashes and underscores, no UUID; unique. */
  alias?: string | null;
  /** The author of emails that name none: `a@b.c` or `Name <a@b.c>`. */
  from?: string | null;
  /** The subject of emails that have none; one line. */
  subject?: string | null;
  /** Where answers go when the email does not say: one address or up to 50. */
  reply_to?: string | string[] | null;
  /** A short summary for people; kept with the template, not put into emails. */
  preview_text?: string | null;
  /** At most 5 MiB in UTF-8. Absent: made from `html`. */
  text?: string | null;
  /** Everything that stands in subject, html or text as `{{{key}}}`; at most 50. */
  variables?: TemplateVariableRequest[] | null;
}

/** What a version says. */
export interface TemplateContent {
  readonly fromGiven: string | null;
  readonly replyToGiven: readonly string[];
  readonly subject: string | null;
  readonly previewText: string | null;
  readonly html: string;
  readonly text: string | null;
  readonly variables: readonly TemplateVariable[];
}

export interface TemplateDraft {
  readonly name: string;
  readonly alias: string | null;
  readonly content: TemplateContent;
}

export const NAME_MAX_CHARACTERS = 255;
/** Of html and of text, before and after they are filled in; the same as an email's. */
export const CONTENT_MAX_BYTES = 5 * 1024 * 1024;
const SUBJECT_MAX_CHARACTERS = 2_000;
const PREVIEW_MAX_CHARACTERS = 2_000;
const REPLY_TO_MAX = 50;
const VARIABLES_MAX = 50;
/** Of one text: more of them cost more memory than their text. */
export const PLACEHOLDERS_MAX = 10_000;
/** What can be put into broadcasts only, and words with a meaning of their own. */
const RESERVED: ReadonlySet<string> = new Set([
  'FIRST_NAME',
  'LAST_NAME',
  'EMAIL',
  'UNSUBSCRIBE_URL',
  'RESEND_UNSUBSCRIBE_URL',
  'contact',
  'this',
]);
/** May stand in a template all the same, undeclared: whoever sends it makes the link or is given one. */
export const LINK_KEYS: ReadonlySet<string> = new Set([
  'UNSUBSCRIBE_URL',
  'RESEND_UNSUBSCRIBE_URL',
]);
/** Everything that must not be in a line, NUL among it; a tab may. */
// oxlint-disable-next-line no-control-regex
export const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f]/;

/** What a template is before anything was said. */
const NOTHING: TemplateDraft = {
  name: '',
  alias: null,
  content: {
    fromGiven: null,
    replyToGiven: [],
    subject: null,
    previewText: null,
    html: '',
    text: null,
    variables: [],
  },
};

/** A new template. Throws a Refusal that lists every issue. */
export function checkCreate(request: CreateTemplateRequest, now: Date): TemplateDraft {
  return applyRequest(NOTHING, request, now);
}

/** The template with the change. Throws a Refusal that lists every issue. */
export function applyRequest(
  current: TemplateDraft,
  request: UpdateTemplateRequest,
  now: Date,
): TemplateDraft {
  const issues: Issue[] = [];
  const was = current.content;
  const content: TemplateContent = {
    fromGiven: given(request.from, was.fromGiven),
    replyToGiven:
      request.reply_to === undefined ? was.replyToGiven : [request.reply_to ?? []].flat(),
    subject: given(request.subject, was.subject),
    previewText: given(request.preview_text, was.previewText),
    html: request.html ?? was.html,
    text: given(request.text, was.text),
    variables: was.variables,
  };
  const draft = {
    name: request.name ?? current.name,
    alias: given(request.alias, current.alias),
    content,
  };
  // What was stored passed these rules; only what the request says is looked at.
  if (request.name !== undefined) issues.push(...nameIssues(request.name));
  if (typeof request.alias === 'string') issues.push(...aliasIssues(request.alias));
  if (typeof request.from === 'string') issues.push(...mailboxIssues('from', request.from));
  issues.push(...replyToIssues(request.reply_to ?? []));
  if (typeof request.subject === 'string') issues.push(...lineIssues('subject', request.subject));
  if (typeof request.preview_text === 'string') {
    issues.push(...lineIssues('preview_text', request.preview_text));
  }
  for (const path of ['html', 'text'] as const) {
    const body = request[path];
    if (typeof body === 'string') issues.push(...bodyIssues(path, body));
  }
  if (request.variables === undefined) {
    issues.push(...placeholderIssues(content));
    if (issues.length > 0) throw refuseFields(issues);
    return draft;
  }
  const wanted = request.variables ?? [];
  const wrong = variableIssues(wanted);
  if (wrong.length > 0) throw refuseFields([...issues, ...wrong]);
  const variables = declare(wanted, was.variables, now);
  issues.push(...placeholderIssues({ ...content, variables }));
  if (issues.length > 0) throw refuseFields(issues);
  return { ...draft, content: { ...content, variables } };
}

/** Absent: as it was. */
const given = (value: string | null | undefined, was: string | null): string | null =>
  value === undefined ? was : value;

export function nameIssues(name: string): readonly Issue[] {
  const path = 'name';
  if (name.trim() === '' || name.length > NAME_MAX_CHARACTERS) {
    return [{ path, message: `\`name\` must have 1 to ${NAME_MAX_CHARACTERS} characters.` }];
  }
  if (CONTROLS.test(name) || !name.isWellFormed()) {
    return [{ path, message: '`name` contains a line break or a control character; remove it.' }];
  }
  return [];
}

function aliasIssues(alias: string): readonly Issue[] {
  const path = 'alias';
  if (isUuid(alias)) {
    return [{ path, message: '`alias` looks like a UUID, which could be the id of a template.' }];
  }
  return ALIAS.test(alias)
    ? []
    : [
        {
          path,
          message: '`alias` must be 1 to 128 ASCII letters, digits, dashes or underscores.',
        },
      ];
}

export function mailboxIssues(path: string, text: string): readonly Issue[] {
  if (text.includes('{{{')) {
    const message = `\`${path}\` cannot have variables; they work in subject, html and text.`;
    return [{ path, message }];
  }
  const parsed = parseMailbox(text);
  return parsed.ok
    ? []
    : [{ path, message: `Invalid \`${path}\` field: the address ${parsed.problem}.` }];
}

export function replyToIssues(list: string | readonly string[]): readonly Issue[] {
  const path = 'reply_to';
  if (typeof list === 'string') return mailboxIssues(path, list);
  if (list.length > REPLY_TO_MAX) {
    const message = `\`${path}\` has ${list.length} addresses; at most ${REPLY_TO_MAX} are allowed.`;
    return [{ path, message }];
  }
  return list.flatMap((text, index) => mailboxIssues(`${path}.${index}`, text));
}

export function lineIssues(path: 'subject' | 'preview_text', text: string): readonly Issue[] {
  const max = path === 'subject' ? SUBJECT_MAX_CHARACTERS : PREVIEW_MAX_CHARACTERS;
  if (text.length > max) {
    const message = `\`${path}\` has ${text.length} characters; at most ${max} are allowed.`;
    return [{ path, message }];
  }
  if (CONTROLS.test(text) || !text.isWellFormed()) {
    const message = `\`${path}\` must be one line of text without control characters.`;
    return [{ path, message }];
  }
  return [];
}

export function bodyIssues(path: 'html' | 'text', body: string): readonly Issue[] {
  const sizeBytes = Buffer.byteLength(body);
  if (sizeBytes > CONTENT_MAX_BYTES) {
    const message = `\`${path}\` has ${sizeBytes} bytes; at most ${CONTENT_MAX_BYTES} are allowed.`;
    return [{ path, message }];
  }
  return isStorable(body)
    ? []
    : [{ path, message: `\`${path}\` contains a NUL character or half a surrogate pair.` }];
}

function variableIssues(variables: readonly TemplateVariableRequest[]): readonly Issue[] {
  if (variables.length > VARIABLES_MAX) {
    return [
      {
        path: 'variables',
        message: `\`variables\` has ${variables.length} items; at most ${VARIABLES_MAX} are allowed.`,
      },
    ];
  }
  const seen = new Set<string>();
  return variables.flatMap(({ key, name, type = 'string', fallback_value: fallback }, index) => {
    const at = `variables.${index}`;
    const issues: Issue[] = [];
    const keyProblem = seen.has(key) ? 'is declared twice' : keyProblemOf(key);
    seen.add(key);
    if (keyProblem !== null) {
      issues.push({ path: `${at}.key`, message: `\`${at}.key\` ${keyProblem}.` });
    }
    if (typeof name === 'string') {
      issues.push(
        ...nameIssues(name).map(({ message }) => ({
          path: `${at}.name`,
          message: message.replace('`name`', `\`${at}.name\``),
        })),
      );
    }
    const problem =
      fallback === undefined || fallback === null ? null : valueProblem(type, fallback);
    if (problem !== null) {
      const path = `${at}.fallback_value`;
      issues.push({ path, message: `\`${path}\` ${problem}, as its type is ${type}.` });
    }
    return issues;
  });
}

function keyProblemOf(key: string): string | null {
  if (!KEY.test(key)) return 'must be 1 to 50 ASCII letters, digits or underscores';
  // Names that every object has get lost on the way of a request.
  return RESERVED.has(key) || key in Object.prototype ? 'is reserved; choose another' : null;
}

/** A key that was declared before keeps its id. */
function declare(
  wanted: readonly TemplateVariableRequest[],
  was: readonly TemplateVariable[],
  now: Date,
): readonly TemplateVariable[] {
  const known = new Map(was.map((variable) => [variable.key, variable]));
  const at = now.toISOString();
  return wanted.map(({ key, name = null, type = 'string', required, fallback_value }) => {
    const fallback = fallback_value ?? null;
    const said = { key, name, type, fallback, isOptional: required === false };
    const before = known.get(key);
    if (before === undefined) return { id: newId(), ...said, createdAt: at, updatedAt: at };
    const { id, createdAt, updatedAt, ...saidBefore } = before;
    const isSame = isDeepStrictEqual(said, saidBefore);
    return { id, ...said, createdAt, updatedAt: isSame ? updatedAt : at };
  });
}

/** Every placeholder must be a declared variable or bring its own default, and fit where it stands. */
function placeholderIssues(content: TemplateContent): readonly Issue[] {
  const declared = new Map(content.variables.map((variable) => [variable.key, variable]));
  const issues: Issue[] = [];
  for (const path of ['subject', 'html', 'text'] as const) {
    const { placeholders, misnamed } = parsePlaceholders(content[path] ?? '');
    if (placeholders.length > PLACEHOLDERS_MAX) {
      const message = `\`${path}\` has more than ${PLACEHOLDERS_MAX} places for variables.`;
      issues.push({ path, message });
      continue;
    }
    for (const name of misnamed) {
      const message = `\`${path}\` has {{{${name}}}}, but a key is 1 to 50 ASCII letters, digits or underscores.`;
      issues.push({ path, message });
    }
    const undeclared = placeholders.filter(
      ({ key, fallback }) =>
        !LINK_KEYS.has(key) &&
        !declared.has(key) &&
        (fallback === null || keyProblemOf(key) !== null),
    );
    for (const key of new Set(undeclared.map((placeholder) => placeholder.key))) {
      const message =
        keyProblemOf(key) === null
          ? `\`${path}\` uses {{{${key}}}}, which is not declared in \`variables\`.`
          : `\`${path}\` uses {{{${key}}}}, which is reserved for broadcasts; choose another key.`;
      issues.push({ path, message });
    }
    if (path !== 'subject') continue;
    for (const key of new Set(placeholders.map((placeholder) => placeholder.key))) {
      const fallback = declared.get(key)?.fallback;
      if (typeof fallback === 'string' && CONTROLS.test(fallback)) {
        const message = `The fallback of ${key} has a line break or control character, but \`subject\` is one line.`;
        issues.push({ path, message });
      }
    }
  }
  return issues;
}
