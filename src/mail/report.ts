/**
 * Reports that come back by mail: that a message could not be delivered, is late or has arrived (DSN, RFC 3464 in
 * RFC 6522 containers, and in the words of programs that have no such format), and that a recipient complained
 * (ARF, RFC 5965).
 *
 * In: a message as it came, hostile or not. Out: a Report, or null for everything else: replies of people and of
 * vacation programs (RFC 3834) are none. Never throws. Only the beginning of the message is read: reports stand before
 * the message that they return.
 */
import { Buffer } from 'node:buffer';
import libmime from 'libmime';
import { parseMailbox } from './address.ts';
import { readMimeTree, textOf, type MimePart } from './mime-tree.ts';
import type { Stage } from './reply.ts';
import { addressIn, readNotice, readReasons, stageIn, type Notice } from './report-notice.ts';
import { decodeBody } from './seven-bit.ts';

export type ReportAction = 'failed' | 'delayed' | 'delivered' | 'relayed' | 'expanded';

export interface ReportedRecipient {
  /** As the reporter knows it, bare; null where it names none. */
  readonly address: string | null;
  /** As the sender knew it, where the report says so. */
  readonly originalAddress: string | null;
  readonly action: ReportAction;
  /** RFC 3463, such as `5.1.1`. */
  readonly status: string | null;
  /** What the host said, in one line. */
  readonly diagnostic: string | null;
  /** The command that was refused, where the reporter tells. */
  readonly stage: Stage | null;
}

interface AnyReport {
  readonly recipients: readonly ReportedRecipient[];
  /** The host or program that reports. */
  readonly reporter: string | null;
  /** Envelope senders of the returned message, as the report names them. */
  readonly returnPaths: readonly string[];
}
export type DeliveryReport = AnyReport & { readonly kind: 'dsn' };
export type FeedbackReport = AnyReport & {
  readonly kind: 'arf';
  /** In lower case: `abuse`, `fraud`, `not-spam`, … */
  readonly feedbackType: string;
};
export type Report = DeliveryReport | FeedbackReport;

/** Of a message, this much is read. */
const READ_BYTES_MAX = 512 * 1024;
const PART_BYTES_MAX = 128 * 1024;
const RECIPIENTS_MAX = 100;
const FIELD_CHARS_MAX = 2_000;
const RETURN_PATHS_MAX = 5;

const STATUS_TYPES = ['message/delivery-status', 'message/global-delivery-status'];
const FEEDBACK_TYPE = 'message/feedback-report';
const RETURNED_TYPES = [
  'message/rfc822',
  'message/global',
  'text/rfc822-headers',
  'message/global-headers',
];

// oxlint-disable-next-line no-control-regex -- encoded parts may hold what no log and no database takes
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)/g;

/** The report that this message is, or null. */
export function readReport(raw: Buffer): Report | null {
  try {
    const message = withoutSeparator(withCrlf(raw.subarray(0, READ_BYTES_MAX)));
    const tree = readMimeTree(message);
    const leaves = leavesOf(tree);
    const returnPaths = returnPathsOf(message, leaves);
    const feedback = leaves.find(({ type }) => type === FEEDBACK_TYPE);
    if (feedback !== undefined) {
      return readFeedback(decoded(message, feedback), returnPaths);
    }
    const status = leaves.find(({ type }) => STATUS_TYPES.includes(type));
    const standard =
      status === undefined ? null : readDeliveryStatus(decoded(message, status), returnPaths);
    if (standard === null) return readOther(message, { tree, leaves, returnPaths });
    const words = leaves.find(({ type }) => type === 'text/plain');
    return words === undefined ? standard : withWords(standard, decoded(message, words));
  } catch {
    return null; // no message that can be read: no report
  }
}

/** A report that stands in words only. */
function readOther(
  message: Buffer,
  at: { tree: MimePart; leaves: readonly MimePart[]; returnPaths: readonly string[] },
): DeliveryReport | null {
  const { fields } = at.tree;
  const words =
    at.leaves.find(({ type }) => type === 'text/plain' || type === 'text/html') ??
    at.leaves.find(({ type }) => type.startsWith('multipart/')); // one without its boundary
  if (words === undefined) return null;
  const text = decoded(message, words);
  const notice: Notice | null = readNotice({
    from: textOf(fields, 'from'),
    to: textOf(fields, 'to'),
    returnPath: textOf(fields, 'return-path'),
    subject: subjectOf(fields),
    autoSubmitted: textOf(fields, 'auto-submitted'),
    failedRecipients: textOf(fields, 'x-failed-recipients'),
    isReply: fields.some(({ lower }) => REPLY_FIELDS.has(lower)),
    text,
    isHtml: words.type === 'text/html',
  });
  if (notice === null) return null;
  // Programs that write the fields of a report into the text.
  const fieldsInText = /^Final-Recipient:/im.test(text)
    ? readDeliveryStatus(text, at.returnPaths)
    : null;
  if (fieldsInText !== null) return fieldsInText;
  const { action, failures } = notice;
  return {
    kind: 'dsn',
    reporter: null,
    returnPaths: at.returnPaths,
    recipients: failures
      .slice(0, RECIPIENTS_MAX)
      .map((failure) => ({ originalAddress: null, action, ...failure })),
  };
}

/** As people read it (RFC 2047). */
function subjectOf(fields: MimePart['fields']): string {
  const subject = textOf(fields, 'subject').slice(0, FIELD_CHARS_MAX);
  try {
    return libmime.decodeWords(subject);
  } catch {
    return subject; // in a charset that nobody knows
  }
}

/** What the fields leave out, from the words for people beside them. */
function withWords(report: DeliveryReport, text: string): DeliveryReport {
  const reasons = readReasons(
    text,
    report.recipients.map(({ address, originalAddress }) => address ?? originalAddress ?? ''),
  );
  return {
    ...report,
    recipients: report.recipients.map((recipient, index) => ({
      ...recipient,
      diagnostic: recipient.diagnostic ?? reasons[index]?.diagnostic ?? null,
      stage: recipient.stage ?? reasons[index]?.stage ?? null,
    })),
  };
}

/** What only answers to a message have: fields of people's programs and of vacation programs. */
const REPLY_FIELDS: ReadonlySet<string> = new Set([
  'x-autoreply',
  'x-autorespond',
  'x-autogenerated',
  'x-auto-response-suppress',
]);

/** RFC 3464 §2: groups of fields; the first speaks of the message, each other one of a recipient. */
function readDeliveryStatus(text: string, returnPaths: readonly string[]): DeliveryReport | null {
  const groups = groupsOf(text);
  const recipients: ReportedRecipient[] = [];
  for (const group of groups) {
    const recipient = recipients.length < RECIPIENTS_MAX ? recipientOf(group) : null;
    if (recipient !== null) recipients.push(recipient);
  }
  if (recipients.length === 0) return null;
  const reporter = groups[0]?.get('reporting-mta') ?? null;
  return {
    kind: 'dsn',
    reporter: reporter === null ? null : typed(reporter),
    returnPaths,
    recipients,
  };
}

function recipientOf(group: ReadonlyMap<string, string>): ReportedRecipient | null {
  const final = group.get('final-recipient');
  const original = group.get('original-recipient');
  if (final === undefined && original === undefined && !group.has('status')) return null;
  const said = group.get('diagnostic-code');
  const diagnostic = said === undefined ? null : typed(said).trim();
  const status = /[245]\.\d{1,3}\.\d{1,3}/.exec(group.get('status') ?? '')?.[0] ?? null;
  const action = actionOf(group.get('action'), status, diagnostic);
  if (action === null) return null;
  return {
    address: typedAddress(final ?? '') ?? addressIn(group.get('x-actual-recipient') ?? ''),
    originalAddress: typedAddress(original ?? ''),
    action,
    status,
    diagnostic: diagnostic === '' ? null : diagnostic,
    stage: diagnostic === null ? null : stageIn(diagnostic),
  };
}

/** The word for it, or what the status and the reply say; null: nothing tells. */
function actionOf(
  word: string | undefined,
  status: string | null,
  diagnostic: string | null,
): ReportAction | null {
  const named = /^\W*(fail|delayed|delivered|relayed|expanded)/i.exec(word ?? '')?.[1];
  if (named !== undefined) {
    const lower = named.toLowerCase();
    return lower === 'fail' ? 'failed' : (lower as ReportAction);
  }
  const digit = status?.[0] ?? /^\W*([245])\d\d\b/.exec(diagnostic ?? '')?.[1];
  if (digit === undefined) return null;
  return digit === '5' ? 'failed' : digit === '4' ? 'delayed' : 'delivered';
}

/** RFC 5965 §3. */
function readFeedback(text: string, returnPaths: readonly string[]): FeedbackReport | null {
  const fields = new Map(groupsOf(text).flatMap((group) => [...group]));
  const type = /^[\w-]+/.exec(fields.get('feedback-type') ?? '')?.[0];
  if (type === undefined) return null;
  const mailFrom = addressIn(fields.get('original-mail-from') ?? '');
  const address = addressIn(
    fields.get('original-rcpt-to') ?? fields.get('removal-recipient') ?? '',
  );
  return {
    kind: 'arf',
    feedbackType: type.toLowerCase(),
    reporter: fields.get('user-agent') ?? null,
    returnPaths: mailFrom === null ? returnPaths : [mailFrom, ...returnPaths],
    recipients:
      address === null
        ? []
        : [
            {
              address,
              originalAddress: null,
              action: 'delivered',
              status: null,
              diagnostic: null,
              stage: null,
            },
          ],
  };
}

/** Groups of fields with blank lines between them; of a repeated field the first counts. */
function groupsOf(text: string): readonly ReadonlyMap<string, string>[] {
  const groups: Map<string, string>[] = [new Map()];
  let name = '';
  for (const line of text.split('\r\n')) {
    const group = groups.at(-1)!;
    if (line.trim() === '') {
      if (group.size > 0) groups.push(new Map());
      name = '';
      continue;
    }
    const field = /^([!-9;-~]{1,60})[ \t]*:(.*)$/.exec(line);
    if (/^[ \t]/.test(line)) {
      const before = group.get(name);
      if (before !== undefined && before.length < FIELD_CHARS_MAX) {
        group.set(name, `${before} ${line.trim()}`.slice(0, FIELD_CHARS_MAX).toWellFormed());
      }
    } else if (field !== null) {
      name = field[1]!.toLowerCase();
      const value = field[2]!.trim().slice(0, FIELD_CHARS_MAX).toWellFormed();
      // A reporter that forgets the blank line between two recipients.
      if (name === 'final-recipient' && group.has(name)) groups.push(new Map([[name, value]]));
      else if (!group.has(name)) group.set(name, value);
      else name = '';
    }
  }
  return groups;
}

/** `rfc822; a@b.c`: what stands behind the type. */
function typed(value: string): string {
  return /^\s*[\w.-]{1,40}\s*;(.*)$/s.exec(value)?.[1]?.trim() ?? value;
}

/** Of a typed address; `\x{FC}` is how ASCII reports write UTF-8 (RFC 6533 §3). */
function typedAddress(value: string): string | null {
  const isUtf8 = /^\s*utf-8\s*;/i.test(value);
  const plain = typed(value);
  // With characters that in a text stand around an address: o'neil@a.example.
  const bare = plain.trim().replace(/^<(.*)>$/s, '$1');
  if (!isUtf8) return parseMailbox(bare).ok && !/[<>]/.test(bare) ? bare : addressIn(plain);
  const spelled = plain.replace(/\\x\{((?:10|[\dA-F])?[\dA-F]{1,4})\}/gi, (_, hex: string) =>
    String.fromCodePoint(Number.parseInt(hex, 16)),
  );
  const clean = spelled.replace(CONTROLS, '?').toWellFormed().trim();
  return parseMailbox(clean).ok && !/[<>]/.test(clean) ? clean : addressIn(clean);
}

/** The parts that hold no others, in their order. */
function leavesOf(part: MimePart): readonly MimePart[] {
  return part.children === null ? [part] : part.children.flatMap(leavesOf);
}

function decoded(message: Buffer, part: MimePart): string {
  const body = message.subarray(part.bodyStart, part.end);
  const bytes = decodeBody(body, part.encoding) ?? body;
  const text = withCrlf(bytes.subarray(0, PART_BYTES_MAX)).toString('utf8');
  return text.replace(CONTROLS, '?');
}

/** Where the returned message says that it came from. */
function returnPathsOf(message: Buffer, leaves: readonly MimePart[]): readonly string[] {
  return leaves
    .filter(({ type }) => RETURNED_TYPES.includes(type))
    .flatMap((part) => {
      const header = decoded(message, part).split('\r\n\r\n', 1)[0] ?? '';
      const paths = [...header.matchAll(/^(?:return-path|x-original-mail-from):(.*)$/gim)];
      return paths.map(([, value = '']) => addressIn(value));
    })
    .filter((address) => address !== null)
    .slice(0, RETURN_PATHS_MAX);
}

/** A mailbox file's separator that somebody let through is no field. */
function withoutSeparator(message: Buffer): Buffer {
  const separator = /(?:^|\r\n)(>?From [^\r\n]{0,500}\r\n)/.exec(
    message.toString('latin1', 0, 4_096),
  );
  if (separator === null) return message;
  const at = separator.index + separator[0].length - separator[1]!.length;
  const blank = message.indexOf('\r\n\r\n', 0, 'latin1');
  if (blank !== -1 && blank < at) return message;
  return Buffer.concat([message.subarray(0, at), message.subarray(at + separator[1]!.length)]);
}

function withCrlf(bytes: Buffer): Buffer {
  const text = bytes.toString('latin1');
  return /(?<!\r)\n/.test(text) ? Buffer.from(text.replace(/\r?\n/g, '\r\n'), 'latin1') : bytes;
}
