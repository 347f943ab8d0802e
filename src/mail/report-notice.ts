/**
 * Bounces in words: what mail programs without a machine-readable format write when they cannot deliver. The words are
 * data here: how each kind begins, what means that it is only late, where the copy of the message begins.
 *
 * In: header values and the text. Out: a Notice, or null when these are not a mail program's words. Every pattern looks
 * at one line, and lines are cut, so that no text takes long.
 */
import { topicOfRefusal } from './refusal-words.ts';
import type { Stage } from './reply.ts';

export interface NoticeInput {
  readonly from: string;
  readonly to: string;
  /** With angle brackets; empty when there is none. */
  readonly returnPath: string;
  readonly subject: string;
  readonly autoSubmitted: string;
  /** Of X-Failed-Recipients (Exim, Gmail). */
  readonly failedRecipients: string;
  /** It has a field that only replies have. */
  readonly isReply: boolean;
  /** With CRLF. */
  readonly text: string;
  readonly isHtml: boolean;
}

/** What the words say about one recipient. */
export interface Reason {
  readonly status: string | null;
  /** The reply or reason that is quoted, in one line; where none is known as one, what there is. */
  readonly diagnostic: string | null;
  /** Which command was refused, where they tell. */
  readonly stage: Stage | null;
}

export interface Notice {
  readonly action: 'failed' | 'delayed';
  /** Who was not reached, bare, and why; one without an address where the text names nobody. */
  readonly failures: readonly (Reason & { readonly address: string | null })[];
}

const LINES_MAX = 400;
const LINE_CHARS_MAX = 500;
const ADDRESSES_MAX = 20;
const DIAGNOSTIC_CHARS_MAX = 1_000;

/** Lines that only a mail program writes, whoever it says it is: qmail and its kin, Exim, Gmail. */
const SURE_OPENINGS: readonly RegExp[] = [
  /^Hi\. This is the /,
  /^I'm afraid I wasn't able to deliver your message/,
  /^Sorry, we were unable to deliver your message/,
  /^This message was created automatically by mail delivery software/,
  /^Delivery to the following recipients? (?:has been |has )?(?:failed|delayed)/,
  /^did not reach the following recipient\(s\):/,
];

/** Lines that mean it when the sender and the subject are a mail program's too. */
const OPENINGS: readonly RegExp[] = [
  // Exim, Courier, Postfix, OpenSMTPD, dragonfly
  /^A message that you (?:have )?sent could not be delivered/,
  /^This is (?:a delivery failure notification message|the [\w.-]+ program at|the mail (?:system|delivery agent) at)/i,
  /^\s*This is the (?:MAILER-DAEMON|Mail Delivery|DragonFly Mail Agent)/,
  // Sendmail, Exchange, Domino
  /^\s*-+ ?(?:Transcript of session follows|Failure Reasons|The following addresses had (?:permanent|delivery|transient|fatal))/i,
  /^(?:Your message|Your mail message to the following|This message was undeliverable|The following message)/i,
  /\bdid not reach the following recipient/i,
  // and the rest
  /\b(?:could|can) ?not be delivered\b/i,
  /\b(?:unable|error sending|trouble|failed|attempting|problem) (?:to deliver|delivering|your (?:e-?)?mail)/i,
  /\berror (?:has )?occurred while (?:trying|attempting) to deliver\b/i,
  /\bundeliverable\b/i,
  /\bdelivery (?:has |to the following \w+ )?failed\b/i,
  /\bwas (?:not|rejected|returned|unable)\b/i,
  /\b(?:recipient|user|mailbox|address(?:es)?)s?\b.*\b(?:unknown|rejected|failed|errors|invalid|not found|disabled|full|exceeds|exceeded)\b/i,
  /\b(?:returned|bounced) (?:mail|message|to (?:the )?sender|below)\b/i,
  /^<[^\s<>]{1,64}@[^\s<>]{1,255}>:?/,
  /^\s*[45]\d\d[ -].*@/,
  /^\s*[45]\d\d[ -][45]\.\d{1,3}\.\d{1,3} /,
];

const LATE =
  /\b(?:has been delayed|delayed \d|not yet (?:been )?delivered|will be (?:retried|attempted again)|(?:I'll|will) (?:keep|continue) (?:on )?trying|THIS IS A WARNING MESSAGE ONLY|still being (?:retried|attempted)|for the last \d+ hours?|no action is required on your part|you do not need to resend)/i;
const GIVEN_UP =
  /\b(?:permanent(?:ly)?|given up|giving up|could not be delivered within|in the queue too long|timed out after|expired)\b/i;

/** What stands behind such a line is the message itself. */
const COPY: readonly RegExp[] = [
  /^-+ ?(?:Below this line is a copy|Original message|Forwarded message|Unsent message|Message header|Message text|Returned message|This is a copy|The (?:body|header) of the message|Message from|Undelivered message|Enclosed is a copy)/i,
  /^\s*-+ ?(?:This is a copy of|Original Message|Unsent|Message contents|Returned)/i,
  /^Original message (?:follows|headers?)/i,
  /^(?:Received|Return-Path|X-Mailer|Message-ID): \S/i,
  /^Reporting-MTA:/i,
];

const SENDER =
  /\b(?:mailer-?daemon|postmaster|mail-?daemon|mdaemon|mail delivery|mail system|mail administrator|mail deliver)/i;
const SUBJECT =
  /\b(?:failure notice|returned (?:mail|to sender)|undeliver\w*|delivery (?:status|failure|failed|problem|notification|error|report|incomplete)|(?:mail|message) delivery (?:failed|error|failure|status)|mail (?:system )?error|failed (?:mail|delivery)|delivery .{0,40}fail\w*|error sending|problem delivering|could not be delivered|not delivered|non-?deliver\w*|message status|bounced|user unknown|warning: could not send|nondelivery|unable to deliver|rejected)\b/i;
const AWAY_SUBJECT =
  /^\s*(?:re: )?(?:auto(?:matic)?[ -]?(?:reply|response|mat)|auto:|out of (?:the )?office|vacation|abwesen|on leave|away from)/i;

const ADDRESS =
  /(?:^|[\s<("':;=[])([^\s\p{Cc}<>()[\]",;:@=']{1,64}@[A-Za-z0-9][A-Za-z0-9.-]{0,252}[A-Za-z0-9])/u;
const STATUS = /(?:^|[\s#(:[])([45]\.\d{1,3}\.\d{1,3})(?![.\d])/;
const REPLY = /(?:^|[\s:;>("'])([45]\d\d)(?:[ -](?=\S)|$)/;

/** How reporters say which command was refused: Postfix, Exim, qmail, DragonFly. */
const STAGES: readonly (readonly [Stage, RegExp])[] = [
  [
    'dot',
    /\bend of (?:message|data)\b|\bafter (?:pipelined )?data\b|\bfinal data\b|\bfailed after I sent the message\b/i,
  ],
  ['rcpt', /\b(?:reply to|after|our) rcpt to\b|\bdoes not like recipient\b/i],
  ['mail', /\b(?:reply to|after|our) mail from\b|\bdoes not like sender\b/i],
  ['ehlo', /\b(?:reply to|after) (?:ehlo|helo)\b|\bmy name was rejected\b/i],
  ['greeting', /\brefused to talk to me\b|\bafter initial connection\b/i],
];

/** The first address in the text, bare, or null. */
export function addressIn(text: string): string | null {
  return ADDRESS.exec(text.slice(0, LINE_CHARS_MAX))?.[1] ?? null;
}

/** What these words say, or null when no mail program wrote them. */
export function readNotice(input: NoticeInput): Notice | null {
  const { subject, autoSubmitted } = input;
  // Only programs send from nobody (RFC 5321 §4.5.5).
  const isProgram =
    SENDER.test(input.from.slice(0, LINE_CHARS_MAX)) || input.returnPath.trim() === '<>';
  const named = addressesIn(input.failedRecipients.split(',').slice(0, ADDRESSES_MAX));
  if (input.isReply || AWAY_SUBJECT.test(subject)) return null;
  if (/auto-(?:replied|notified)/i.test(autoSubmitted) && !isProgram && named.length === 0) {
    return null;
  }
  const lines = noticeLines(input);
  const has = (openings: readonly RegExp[]): boolean =>
    lines.some((line) => openings.some((one) => one.test(line)));
  const isLikely = isProgram && SUBJECT.test(subject.slice(0, LINE_CHARS_MAX));
  if (named.length === 0 && !has(SURE_OPENINGS) && !(isLikely && has(OPENINGS))) return null;

  const sender = addressIn(input.to)?.toLowerCase();
  const found = named.length > 0 ? named : addressesIn(lines);
  const addresses = found.filter(
    (one) => one.toLowerCase() !== sender && (named.length > 0 || !SENDER.test(one)),
  );
  const reasons = reasonsIn(lines, addresses);
  const isLate = lines.some((line) => LATE.test(line)) || LATE.test(subject);
  const isOver =
    lines.some((line) => GIVEN_UP.test(line)) || REPLY.exec(quoted(lines) ?? '')?.[1]?.[0] === '5';
  return {
    action: isLate && !isOver ? 'delayed' : 'failed',
    failures:
      addresses.length > 0
        ? addresses.map((address, index) => ({ address, ...reasons[index]! }))
        : [{ address: null, ...reasonIn(lines) }],
  };
}

/** What the words beside a report say about each of its recipients: fields leave out much. */
export function readReasons(text: string, addresses: readonly string[]): readonly Reason[] {
  return reasonsIn(cutLines(text), addresses);
}

/** Of several recipients each has its own lines, from where it is named to the next one. */
function reasonsIn(lines: readonly string[], addresses: readonly string[]): readonly Reason[] {
  const whole = reasonIn(lines);
  if (addresses.length === 1) return [whole];
  const starts = addresses.map((address) =>
    lines.findIndex((line) => line.toLowerCase().includes(address.toLowerCase())),
  );
  return starts.map((start) => {
    if (start === -1) return whole;
    const next = Math.min(...starts.filter((one) => one > start), lines.length);
    const own = reasonIn(lines.slice(start, next));
    return own.diagnostic === null ? whole : own;
  });
}

/** The lines before the copy of the message. */
function noticeLines(input: NoticeInput): readonly string[] {
  const text = input.isHtml
    ? input.text
        .replace(/<(?:br|\/?p|\/?div|\/tr|\/?h\d)\b[^<>]{0,200}>/gi, '\r\n')
        .replace(/<\/?[a-z!][^<>@]{0,500}>/gi, ' ')
    : input.text;
  return cutLines(text);
}

function cutLines(text: string): readonly string[] {
  const lines = text
    .split('\r\n', LINES_MAX)
    .map((line) => line.slice(0, LINE_CHARS_MAX).trimEnd());
  const copy = lines.findIndex((line, index) => index > 0 && COPY.some((one) => one.test(line)));
  return copy === -1 ? lines : lines.slice(0, copy);
}

function addressesIn(lines: readonly string[]): readonly string[] {
  const found = lines.map(addressIn).filter((one) => one !== null);
  const distinct = [...new Map(found.map((one) => [one.toLowerCase(), one])).values()];
  return distinct.slice(0, ADDRESSES_MAX);
}

/** The command that was refused, where the text tells; of several the one that is named first. */
export function stageIn(text: string): Stage | null {
  const [first] = STAGES.map(([stage, words]) => ({ stage, index: words.exec(text)?.index ?? -1 }))
    .filter(({ index }) => index !== -1)
    .toSorted((a, b) => a.index - b.index);
  return first?.stage ?? null;
}

/** What the lines say about one recipient. */
function reasonIn(lines: readonly string[]): Reason {
  const whole = quoted(lines);
  const text =
    whole ??
    lines
      .map((line) => line.trim())
      .join(' ')
      .trim();
  return {
    status: whole === null ? null : (STATUS.exec(whole)?.[1] ?? null),
    diagnostic: text === '' ? null : text.slice(0, DIAGNOSTIC_CHARS_MAX).toWellFormed(),
    stage: stageIn(lines.join(' ')),
  };
}

/** The line that quotes a reply or gives a reason, with those that go on with it; null: none that is known as one. */
function quoted(lines: readonly string[]): string | null {
  const replies = lines.findIndex((line) => REPLY.test(line));
  const reasons = lines.findIndex((line) => STATUS.test(line) || topicOfRefusal(line) !== null);
  const first = replies === -1 ? reasons : replies;
  if (first === -1) return null;
  const end = lines.findIndex((line, index) => index > first && line.trim() === '');
  const whole = lines
    .slice(first, Math.min(end === -1 ? lines.length : end, first + 8))
    .map((line) => line.trim())
    .join(' ');
  const reply = REPLY.exec(whole);
  return reply === null ? whole : whole.slice(whole.indexOf(reply[1]!));
}
