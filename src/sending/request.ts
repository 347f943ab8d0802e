// The request to send one email: its fields as the API takes them, and the check that turns them into
// values the rest can trust. Pure. Every rule of contract seed.md "Send-email request" and of
// decisions.md "Emails" that needs no database is here; all issues are found, not only the first.
import { refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import { isUuid } from '../store/id.ts';
import type { Tag } from '../store/email.ts';
import {
  attachmentMeaning,
  checkAttachments,
  type CheckedAttachment,
  type SendEmailAttachment,
  type Spooled,
} from './attachments.ts';
import { bodyIssues, headerIssues, subjectIssues, tagIssues } from './field-rules.ts';
import { parseSchedule, planTime, type Schedule } from './schedule-grammar.ts';

export { CONTENT_MAX_BYTES } from './field-rules.ts';

/** Where mail comes from and goes to, what it says, and how it is labelled. */
export interface SendEmailRequest {
  /** The author: `a@b.c` or `Name <a@b.c>`. Its domain must be a verified sending domain. A template may have it. */
  from?: string | null;
  /** One address or up to 50. */
  to?: string | string[] | null;
  /** One line of text. A template may have it. */
  subject?: string | null;
  /** The HTML body, at most 5 MiB in UTF-8. One of `html`, `text` and `template` is needed. */
  html?: string | null;
  /** The plain-text body, at most 5 MiB in UTF-8. Absent: made from `html`. Empty: no text part. */
  text?: string | null;
  /** One address or up to 50. */
  cc?: string | string[] | null;
  /** One address or up to 50; never shown to the other recipients. */
  bcc?: string | string[] | null;
  /** Where answers go: one address or up to 50. A template may have it. */
  reply_to?: string | string[] | null;
  /** Custom header fields, name to value. Fields that the appliance writes itself are refused. */
  headers?: { [name: string]: string } | null;
  /** Labels to find the email by: at most 75. */
  tags?: SendEmailTag[] | null;
  /** Files, given in base64 or fetched from a URL: at most 40 MiB together after base64. */
  attachments?: SendEmailAttachment[] | null;
  /**
   * When to send it, within 30 days: an ISO 8601 date-time with a time zone, or `in <number> <unit>` with the unit
   * `minute`, `min`, `minutes`, `hour`, `hours`, `day` or `days`. Absent: at once.
   */
  scheduled_at?: string | null;
  /**
   * The id of a topic. Recipients who opted out of it, or did not opt in where that is its default, get nothing. To one contact
   * alone, the email has `List-Unsubscribe` headers, and a link for `{{{RESEND_UNSUBSCRIBE_URL}}}`.
   */
  topic_id?: string | null;
  /** A published template in place of `html` and `text`. */
  template?: SendEmailTemplate | null;
}

export interface SendEmailTag {
  /** 1 to 256 ASCII letters, digits, underscores or dashes. */
  name: string;
  /** Up to 256 of the same characters; may be empty. */
  value: string;
}

export interface SendEmailTemplate {
  /** The id or the alias of a published template. */
  id: string;
  /** What stands for its variables, by their keys. */
  variables?: { [key: string]: unknown } | null;
}

/** A request without a fault that could be seen in it alone, whatever the time. */
export interface CheckedEmail {
  /** Null: the template's. */
  readonly from: Mailbox | null;
  readonly to: readonly Mailbox[];
  readonly cc: readonly Mailbox[];
  readonly bcc: readonly Mailbox[];
  /** Empty: the template's, if it has any. */
  readonly replyTo: readonly Mailbox[];
  /** Null: the template's. */
  readonly subject: string | null;
  readonly html: string | null;
  /** Null: not given, to be made from html. Empty: suppressed. */
  readonly text: string | null;
  readonly headers: readonly (readonly [string, string])[];
  readonly tags: readonly Tag[] | null;
  readonly attachments: readonly CheckedAttachment[];
  /** As given; null: at once. */
  readonly scheduledGiven: string | null;
  readonly topicId: string | null;
  readonly template: {
    readonly id: string;
    readonly variables: Readonly<Record<string, unknown>>;
  } | null;
  /** Envelope recipients in order, without repeats. */
  readonly recipients: readonly Mailbox[];
}

/** With the time at which it is to be sent. */
export interface PlannedEmail extends CheckedEmail {
  readonly scheduledAt: Date | null;
}

/** What a request says, whatever the time. */
export interface ReadRequest {
  /** Null when there are issues. */
  readonly email: CheckedEmail | null;
  readonly schedule: Schedule | null;
  readonly missing: readonly Issue[];
  readonly issues: readonly Issue[];
}

export const RECIPIENTS_MAX = 50;

/**
 * Reads the request, apart from the clock: the same request reads the same at every time, so that it can be told
 * from another one (sending/idempotency.ts) even when its time has passed.
 */
export function readRequest(request: SendEmailRequest, spooled: Spooled): ReadRequest {
  const missing: Issue[] = [];
  const issues: Issue[] = [];
  const readList = (path: 'to' | 'cc' | 'bcc' | 'reply_to'): readonly Mailbox[] =>
    readAddresses(path, request[path], issues);

  const to = readList('to');
  if (isAbsent(request.to)) missing.push(missingField('to'));
  else if (Array.isArray(request.to) && request.to.length === 0) {
    issues.push({ path: 'to', message: '`to` is empty; give at least one address.' });
  }
  const html = request.html ?? null;
  const text = request.text ?? null;
  const template = request.template ?? null;
  if (template !== null && (html !== null || text !== null)) {
    const message = 'Give `template` or `html` and `text`, not both.';
    issues.push({ path: 'template', message });
  } else if (template === null && html === null && text === null) {
    missing.push({ path: 'html', message: 'Missing `html`, `text` or `template` field.' });
  }
  issues.push(...bodyIssues('html', html), ...bodyIssues('text', text));
  const subject = request.subject ?? null;
  if (subject !== null) issues.push(...subjectIssues(subject));
  else if (template === null) missing.push(missingField('subject'));

  let from: Mailbox | null = null;
  if (!isAbsent(request.from)) {
    const parsed = parseMailbox(request.from ?? '');
    if (parsed.ok) from = parsed.mailbox;
    else
      issues.push({
        path: 'from',
        message: `Invalid \`from\` field: the address ${parsed.problem}.`,
      });
  } else if (template === null) missing.push(missingField('from'));
  const cc = readList('cc');
  const bcc = readList('bcc');
  const replyTo = readList('reply_to');
  const headers = Object.entries(request.headers ?? {});
  issues.push(...headerIssues(headers), ...tagIssues(request.tags ?? []));
  const attached = checkAttachments(request.attachments, spooled);
  issues.push(...attached.issues);
  const topicId = request.topic_id ?? null;
  if (topicId !== null && !isUuid(topicId)) issues.push(badTopic());
  const scheduledGiven = request.scheduled_at ?? null;
  const schedule = scheduledGiven === null ? null : parseSchedule(scheduledGiven);
  if (schedule?.ok === false) issues.push(scheduleIssue(schedule.problem));

  const email: CheckedEmail = {
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
    attachments: attached.attachments,
    scheduledGiven,
    topicId: topicId?.toLowerCase() ?? null,
    template: template === null ? null : { id: template.id, variables: template.variables ?? {} },
    recipients: distinct([...to, ...cc, ...bcc]),
  };
  return {
    email: missing.length + issues.length === 0 ? email : null,
    schedule: schedule?.ok === true ? schedule.schedule : null,
    missing,
    issues,
  };
}

/** The email, if its time will do, too. Throws a Refusal that lists every issue. */
export function planRequest(
  { email, schedule, missing, issues }: ReadRequest,
  now: Date,
): PlannedEmail {
  const planned = schedule === null ? null : planTime(schedule, now);
  const all = [...issues, ...(planned?.ok === false ? [scheduleIssue(planned.problem)] : [])];
  if (missing.length > 0) throw refuseFields([...missing, ...all], 'missing_required_field');
  if (email === null || all.length > 0) {
    const isAttached = all.every(({ path }) => /^attachments(\.|$)/.test(path));
    throw refuseFields(all, isAttached ? 'invalid_attachment' : 'validation_error');
  }
  return { ...email, scheduledAt: planned?.ok === true ? planned.at : null };
}

/** Checks the request as of `now`. Throws a Refusal that lists every issue. */
export const checkRequest = (
  request: SendEmailRequest,
  { now, spooled }: { readonly now: Date; readonly spooled: Spooled },
): PlannedEmail => planRequest(readRequest(request, spooled), now);

/** What makes two requests the same: the fields that matter, as they were given. */
export function meaningOf(email: CheckedEmail): unknown {
  const given = (list: readonly { given: string }[]): string[] =>
    list.map(({ given: text }) => text);
  return {
    ...email,
    from: email.from?.given ?? null,
    to: given(email.to),
    cc: given(email.cc),
    bcc: given(email.bcc),
    replyTo: given(email.replyTo),
    attachments: attachmentMeaning(email.attachments),
    recipients: null,
  };
}

/** The time that a field `scheduled_at` says. Throws a Refusal. */
export function checkSchedule(given: string | null | undefined, now: Date): Date {
  if (given === null || given === undefined) {
    throw refuseFields([missingField('scheduled_at')], 'missing_required_field');
  }
  const parsed = parseSchedule(given);
  const planned = parsed.ok ? planTime(parsed.schedule, now) : parsed;
  if (!planned.ok) throw refuseFields([scheduleIssue(planned.problem)]);
  return planned.at;
}

export const badTopic = (): Issue => ({
  path: 'topic_id',
  message: '`topic_id` must be the id of a topic.',
});

export const missingField = (path: string): Issue => ({
  path,
  message: `Missing \`${path}\` field.`,
});

const scheduleIssue = (problem: string): Issue => ({
  path: 'scheduled_at',
  message: `\`scheduled_at\` ${problem}.`,
});

const isAbsent = (value: unknown): boolean => value === undefined || value === null;

function readAddresses(
  path: string,
  given: string | readonly string[] | null | undefined,
  issues: Issue[],
): readonly Mailbox[] {
  if (given === undefined || given === null) return [];
  const list = typeof given === 'string' ? [given] : given;
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
    const at = typeof given === 'string' ? path : `${path}.${index}`;
    issues.push({ path: at, message: `Invalid \`${at}\` field: the address ${parsed.problem}.` });
    return [];
  });
}

/** One delivery for each address, however often and in whatever case its domain was written. */
export function distinct(mailboxes: readonly Mailbox[]): readonly Mailbox[] {
  const seen = new Map<string, Mailbox>();
  for (const mailbox of mailboxes) {
    const key = normalizedAddress(mailbox.address);
    if (!seen.has(key)) seen.set(key, mailbox);
  }
  return [...seen.values()];
}
