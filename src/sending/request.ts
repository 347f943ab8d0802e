// The request to send one email: its fields as the API takes them, and the check that turns them into
// values the rest can trust. Pure. Every rule of contract seed.md "Send-email request" and of
// decisions.md "Emails" that needs no database is here; all issues are found, not only the first.
import { refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import { checkHeader } from '../mail/header.ts';
import type { Tag } from '../store/email.ts';

/** Where mail comes from and goes to, what it says, and how it is labelled. */
export interface SendEmailRequest {
  /** The author: `a@b.c` or `Name <a@b.c>`. Its domain must be a verified sending domain. */
  from?: string | null;
  /** One address or up to 50. */
  to?: string | string[] | null;
  /** One line of text. */
  subject?: string | null;
  /** The HTML body, at most 5 MiB in UTF-8. At least one of `html` and `text` is needed. */
  html?: string | null;
  /** The plain-text body, at most 5 MiB in UTF-8. Absent: made from `html`. Empty: no text part. */
  text?: string | null;
  /** One address or up to 50. */
  cc?: string | string[] | null;
  /** One address or up to 50; never shown to the other recipients. */
  bcc?: string | string[] | null;
  /** Where answers go: one address or up to 50. */
  reply_to?: string | string[] | null;
  /** Custom header fields, name to value. Fields that the appliance writes itself are refused. */
  headers?: { [name: string]: string } | null;
  /** Labels to find the email by: at most 75. */
  tags?: SendEmailTag[] | null;
  /** Not in this release: refused when given. */
  attachments?: unknown;
  /** Not in this release: refused when given. */
  scheduled_at?: string | null;
  /** Not in this release: refused when given. */
  topic_id?: string | null;
  /** Not in this release: refused when given. */
  template?: unknown;
}

export interface SendEmailTag {
  /** 1 to 256 ASCII letters, digits, underscores or dashes. */
  name: string;
  /** Up to 256 of the same characters; may be empty. */
  value: string;
}

export interface CheckedEmail {
  readonly from: Mailbox;
  readonly to: readonly Mailbox[];
  readonly cc: readonly Mailbox[];
  readonly bcc: readonly Mailbox[];
  readonly replyTo: readonly Mailbox[];
  readonly subject: string;
  readonly html: string | null;
  /** Null: not given, to be made from html. Empty: suppressed. */
  readonly text: string | null;
  readonly headers: readonly (readonly [string, string])[];
  readonly tags: readonly Tag[] | null;
  /** Envelope recipients in order, without repeats. */
  readonly recipients: readonly Mailbox[];
}

export const RECIPIENTS_MAX = 50;
const TAGS_MAX = 75;
const HEADERS_MAX = 100;
const HEADERS_MAX_BYTES = 64 * 1024;
const SUBJECT_MAX_CHARACTERS = 2_000;
/** Of `html` and of `text`; mail programs clip at a fiftieth of it, and every byte is looked at several times. */
export const CONTENT_MAX_BYTES = 5 * 1024 * 1024;
const TAG_NAME = /^[A-Za-z0-9_-]{1,256}$/;
const TAG_VALUE = /^[A-Za-z0-9_-]{0,256}$/;
/** CR, LF, NUL: what could end a header line or cannot be stored. */
// oxlint-disable-next-line no-control-regex
const LINE_BREAKERS = /[\r\n\0]/;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f]/;

const NOT_YET = ['attachments', 'scheduled_at', 'topic_id', 'template'] as const;

/** Checks the request. Throws a Refusal that lists every issue. */
export function checkRequest(request: SendEmailRequest): CheckedEmail {
  const missing: Issue[] = [];
  const issues: Issue[] = [];
  refuseWhatIsNotYet(request);

  const readList = (path: 'to' | 'cc' | 'bcc' | 'reply_to'): readonly Mailbox[] => {
    const given = request[path];
    if (given === undefined || given === null) return [];
    const list = Array.isArray(given) ? given : [given];
    if (list.length > RECIPIENTS_MAX) {
      issues.push({
        path,
        message: `\`${path}\` has ${list.length} addresses; at most ${RECIPIENTS_MAX} are allowed.`,
      });
      return [];
    }
    return list.flatMap((text, index) => {
      const parsed = parseMailbox(text);
      if (parsed.ok) return [parsed.mailbox];
      const at = Array.isArray(given) ? `${path}.${index}` : path;
      issues.push({ path: at, message: `Invalid \`${at}\` field: the address ${parsed.problem}.` });
      return [];
    });
  };

  const to = readList('to');
  if (isAbsent(request.to)) missing.push(missingField('to'));
  else if (Array.isArray(request.to) && request.to.length === 0) {
    issues.push({ path: 'to', message: '`to` is empty; give at least one address.' });
  }
  const html = request.html ?? null;
  const text = request.text ?? null;
  if (html === null && text === null) {
    missing.push({ path: 'html', message: 'Missing `html` or `text` field.' });
  }
  for (const [path, body] of [['html', html] as const, ['text', text] as const]) {
    const sizeBytes = body === null ? 0 : Buffer.byteLength(body);
    if (sizeBytes > CONTENT_MAX_BYTES) {
      const message = `\`${path}\` has ${sizeBytes} bytes; at most ${CONTENT_MAX_BYTES} are allowed.`;
      issues.push({ path, message });
    } else if (body?.includes('\0')) {
      issues.push({ path, message: `\`${path}\` contains a NUL character; remove it.` });
    }
  }
  const subject = request.subject ?? '';
  if (isAbsent(request.subject)) missing.push(missingField('subject'));
  else issues.push(...subjectIssues(subject));

  let from: Mailbox | null = null;
  if (isAbsent(request.from)) missing.push(missingField('from'));
  else {
    const parsed = parseMailbox(request.from ?? '');
    if (parsed.ok) from = parsed.mailbox;
    else
      issues.push({
        path: 'from',
        message: `Invalid \`from\` field: the address ${parsed.problem}.`,
      });
  }
  const cc = readList('cc');
  const bcc = readList('bcc');
  const replyTo = readList('reply_to');
  const headers = Object.entries(request.headers ?? {});
  issues.push(...headerIssues(headers));
  issues.push(...tagIssues(request.tags ?? []));

  if (missing.length > 0) throw refuseFields([...missing, ...issues], 'missing_required_field');
  if (issues.length > 0 || from === null) throw refuseFields(issues);
  return {
    from,
    to,
    cc,
    bcc,
    replyTo,
    subject,
    html,
    text,
    // The keys of an object have no order (RFC 8259 §4): equal requests give equal emails and equal hashes.
    headers: headers.toSorted(([a], [b]) => (a < b ? -1 : 1)),
    tags: request.tags?.map(({ name, value }) => ({ name, value })) ?? null,
    recipients: distinct([...to, ...cc, ...bcc]),
  };
}

const isAbsent = (value: unknown): boolean => value === undefined || value === null;

const missingField = (path: string): Issue => ({ path, message: `Missing \`${path}\` field.` });

function refuseWhatIsNotYet(request: SendEmailRequest): void {
  const asksNothing = (value: unknown): boolean =>
    isAbsent(value) || (Array.isArray(value) && value.length === 0);
  const issues = NOT_YET.filter((path) => !asksNothing(request[path])).map((path) => ({
    path,
    message: `\`${path}\` is not supported by this release yet; send without it.`,
  }));
  if (issues.length > 0) throw refuseFields(issues, 'not_supported');
}

function subjectIssues(subject: string): readonly Issue[] {
  const path = 'subject';
  if (LINE_BREAKERS.test(subject)) {
    return [{ path, message: '`subject` contains a line break or NUL; it must be one line.' }];
  }
  if (CONTROLS.test(subject)) {
    return [{ path, message: '`subject` contains a control character; remove it.' }];
  }
  if (subject.length > SUBJECT_MAX_CHARACTERS) {
    return [
      {
        path,
        message: `\`subject\` has ${subject.length} characters; at most ${SUBJECT_MAX_CHARACTERS} are allowed.`,
      },
    ];
  }
  return [];
}

function headerIssues(headers: readonly (readonly [string, string])[]): readonly Issue[] {
  if (headers.length > HEADERS_MAX) {
    return [
      {
        path: 'headers',
        message: `\`headers\` has ${headers.length} fields; at most ${HEADERS_MAX} are allowed.`,
      },
    ];
  }
  // The schema lets values through whose names every object has: `constructor`, `__proto__`, …
  const wrong = headers.filter(([, value]) => typeof value !== 'string');
  if (wrong.length > 0) {
    return wrong.map(([name]) => ({
      path: `headers.${name}`,
      message: `\`headers.${name}\` must be a string.`,
    }));
  }
  const sizeBytes = headers.reduce(
    (sum, [name, value]) => sum + Buffer.byteLength(name) + Buffer.byteLength(value),
    0,
  );
  if (sizeBytes > HEADERS_MAX_BYTES) {
    return [
      {
        path: 'headers',
        message: `\`headers\` has ${sizeBytes} bytes; at most ${HEADERS_MAX_BYTES} are allowed.`,
      },
    ];
  }
  return headers.flatMap(([name, value]) => {
    const problem = checkHeader(name, value) ?? unicodeProblem(name, value);
    return problem === null ? [] : [{ path: `headers.${name}`, message: problem }];
  });
}

/** Half a surrogate pair: JSON can write it, UTF-8 and Postgres cannot. */
const unicodeProblem = (name: string, value: string): string | null =>
  value.isWellFormed() ? null : `The header ${name} is not valid Unicode text.`;

function tagIssues(tags: readonly SendEmailTag[]): readonly Issue[] {
  if (tags.length > TAGS_MAX) {
    return [
      {
        path: 'tags',
        message: `\`tags\` has ${tags.length} items; at most ${TAGS_MAX} are allowed.`,
      },
    ];
  }
  const allowed = 'ASCII letters, digits, underscores or dashes';
  return tags.flatMap(({ name, value }, index) => [
    ...(TAG_NAME.test(name)
      ? []
      : [
          {
            path: `tags.${index}.name`,
            message: `\`tags.${index}.name\` must be 1 to 256 ${allowed}.`,
          },
        ]),
    ...(TAG_VALUE.test(value)
      ? []
      : [
          {
            path: `tags.${index}.value`,
            message: `\`tags.${index}.value\` must be at most 256 ${allowed}.`,
          },
        ]),
  ]);
}

/** One delivery for each address, however often and in whatever case its domain was written. */
function distinct(mailboxes: readonly Mailbox[]): readonly Mailbox[] {
  const seen = new Map<string, Mailbox>();
  for (const mailbox of mailboxes) {
    const key = normalizedAddress(mailbox.address);
    if (!seen.has(key)) seen.set(key, mailbox);
  }
  return [...seen.values()];
}
