// What a broadcast may say: the fields of a request laid over what it says already, and every rule that needs no
// database. Pure; all issues are found, not only the first.
import { refuseFields, type Issue } from '../access/refusal.ts';
import { isUuid } from '../store/id.ts';
import {
  bodyIssues,
  lineIssues,
  mailboxIssues,
  nameIssues,
  replyToIssues,
} from '../templates/content.ts';
import { parseBroadcast } from './broadcast-text.ts';

/** A change of a broadcast that is a draft: what is absent stays. */
export interface UpdateBroadcastRequest {
  /** For people; 1 to 255 characters. */
  name?: string | null;
  /** Who gets it: the contacts of this segment. */
  segment_id?: string | null;
  /** The old name of `segment_id`. */
  audience_id?: string | null;
  /** The author: `a@b.c` or `Name <a@b.c>`. Its domain must be a verified sending domain. */
  from?: string | null;
  /** One line; `{{{KEY}}}` stands for what is known of the contact. */
  subject?: string | null;
  /** Where answers go: one address or up to 50. */
  reply_to?: string | string[] | null;
  /** One line that mail programs show beside the subject. */
  preview_text?: string | null;
  /** At most 5 MiB in UTF-8. `{{{FIRST_NAME|there}}}` stands for the contact's first name, with a default of its own. */
  html?: string | null;
  /** At most 5 MiB in UTF-8. Null or absent: made from `html`. Empty: no text part. */
  text?: string | null;
  /** Only contacts that want this topic get it. */
  topic_id?: string | null;
}

/** A new broadcast. `segment_id`, `from` and `subject` are needed. */
export interface CreateBroadcastRequest extends UpdateBroadcastRequest {
  /** Sends it at once, or at `scheduled_at`; else it is a draft. */
  send?: boolean | null;
  /** When to send it, as in `POST /emails`; needs `send`. */
  scheduled_at?: string | null;
}

/** What a request can say of a broadcast. */
export interface BroadcastContent {
  readonly name: string;
  readonly segmentId: string | null;
  readonly topicId: string | null;
  readonly fromGiven: string | null;
  readonly subject: string | null;
  readonly replyToGiven: readonly string[];
  readonly previewText: string | null;
  readonly html: string | null;
  readonly text: string | null;
}

/** Of a broadcast that nobody named. */
const NAME_DEFAULT = 'Untitled';

const NOTHING: BroadcastContent = {
  name: NAME_DEFAULT,
  segmentId: null,
  topicId: null,
  fromGiven: null,
  subject: null,
  replyToGiven: [],
  previewText: null,
  html: null,
  text: null,
};

/** A new broadcast. Throws a Refusal that lists every issue. */
export function checkNewBroadcast(request: CreateBroadcastRequest): BroadcastContent {
  const isUnasked = (request.scheduled_at ?? null) !== null && request.send !== true;
  const content = applyToBroadcast(
    NOTHING,
    request,
    isUnasked ? [{ path: 'scheduled_at', message: '`scheduled_at` needs `send: true`.' }] : [],
  );
  const missing = [
    ...(content.segmentId === null ? ['segment_id'] : []),
    ...(content.fromGiven === null ? ['from'] : []),
    ...(content.subject === null ? ['subject'] : []),
  ];
  if (missing.length > 0) throw refuseMissing(missing);
  return content;
}

/** The broadcast with the change. Throws a Refusal that lists these issues and every other. */
export function applyToBroadcast(
  was: BroadcastContent,
  request: UpdateBroadcastRequest,
  more: readonly Issue[] = [],
): BroadcastContent {
  const given = <T>(value: T | undefined, before: T): T => (value === undefined ? before : value);
  const content: BroadcastContent = {
    name: given(request.name, was.name) ?? NAME_DEFAULT,
    segmentId: lower(given(request.segment_id ?? request.audience_id, was.segmentId)),
    topicId: lower(given(request.topic_id, was.topicId)),
    fromGiven: given(request.from, was.fromGiven),
    subject: given(request.subject, was.subject),
    replyToGiven:
      request.reply_to === undefined ? was.replyToGiven : [request.reply_to ?? []].flat(),
    previewText: given(request.preview_text, was.previewText),
    html: given(request.html, was.html),
    text: given(request.text, was.text),
  };
  const { subject, previewText, html, text } = content;
  const issues: Issue[] = [
    ...nameIssues(content.name),
    ...(content.fromGiven === null ? [] : mailboxIssues('from', content.fromGiven)),
    ...replyToIssues(request.reply_to ?? []),
    ...(subject === null ? [] : lineIssues('subject', subject)),
    ...(previewText === null ? [] : lineIssues('preview_text', previewText)),
    ...(html === null ? [] : bodyIssues('html', html)),
    ...(text === null ? [] : bodyIssues('text', text)),
    ...(content.segmentId === null || isUuid(content.segmentId) ? [] : [badSegment()]),
    ...(content.topicId === null || isUuid(content.topicId) ? [] : [badTopicOf()]),
    ...more,
  ];
  if (issues.length > 0) throw refuseFields(issues);
  return content;
}

const lower = (id: string | null): string | null => id?.toLowerCase() ?? null;

export const badSegment = (): Issue => ({
  path: 'segment_id',
  message: '`segment_id` must be the id of a segment.',
});

export const badTopicOf = (): Issue => ({
  path: 'topic_id',
  message: '`topic_id` must be the id of a topic.',
});

const refuseMissing = (paths: readonly string[]): Error =>
  refuseFields(
    paths.map((path) => ({ path, message: `Missing \`${path}\` field.` })),
    'missing_required_field',
  );

/** A broadcast that has all that sending needs. */
export interface ReadyBroadcast extends BroadcastContent {
  readonly segmentId: string;
  readonly fromGiven: string;
  readonly subject: string;
}

/**
 * The broadcast, if it can be sent: it has all parts, and every key in its texts is one that is known (`properties`: the
 * keys of the tenant's contact properties). Throws a Refusal that lists every issue.
 */
export function checkReady(
  content: BroadcastContent,
  properties: readonly string[],
): ReadyBroadcast {
  const { segmentId, fromGiven, subject, html, text } = content;
  const isEmpty = (html ?? '').trim() === '' && (text ?? '').trim() === '';
  if (segmentId === null || fromGiven === null || subject === null || isEmpty) {
    throw refuseMissing([
      ...(segmentId === null ? ['segment_id'] : []),
      ...(fromGiven === null ? ['from'] : []),
      ...(subject === null ? ['subject'] : []),
      ...(isEmpty ? ['html'] : []),
    ]);
  }
  const { issues } = parseBroadcast({ ...content, subject }, new Set(properties));
  if (issues.length > 0) throw refuseFields(issues);
  return { ...content, segmentId, fromGiven, subject };
}
