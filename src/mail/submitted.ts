/**
 * A message that a program hands in over SMTP, as the message that goes out (RFC 6409 §8).
 *
 * In: its bytes as they came. Out: the bytes that are delivered, and what its header says. Its MIME
 * structure stays as it is; what not every host takes is encoded anew (seven-bit.ts), what is missing in the header is
 * added, and a trace line stands on top (RFC 5321 §4.4), without the client's address: recipients need not know
 * where our tenants' machines are. Throws an UnfitMessage that says what to fix.
 */
import { Buffer } from 'node:buffer';
import { readFields, readMimeTree, UnfitMessage } from './mime-tree.ts';
import { ENCODED_FIELDS, makePlain, plainField, type PlainPart } from './seven-bit.ts';
import { readSubmittedHeader, type SubmittedHeader } from './submitted-header.ts';
import type { Survey } from './wire-survey.ts';

export interface Outgoing {
  readonly header: SubmittedHeader;
  /** With angle brackets, as it is sent. */
  readonly messageId: string;
  /** The whole message: CRLF, 7-bit but for addresses, lines of at most 998 octets. */
  readonly raw: Buffer;
}

export interface SubmittedInput {
  readonly message: Buffer;
  readonly survey: Survey;
  /** The client said SMTPUTF8. */
  readonly allowsUtf8: boolean;
  /** Where there is none: `<…@author's domain>`. */
  readonly newMessageId: string;
  readonly now: Date;
  readonly trace: { readonly hostname: string; readonly id: string; readonly isTls: boolean };
}

const CRLF = Buffer.from('\r\n');

export function prepareSubmitted(input: SubmittedInput): Outgoing {
  const { message, survey } = input;
  if (survey.hasNul) throw new UnfitMessage('5.6.0', 'The message has a NUL character');
  if (survey.hasBareLineEnd) {
    throw new UnfitMessage(
      '5.6.11',
      'The message has a bare CR or LF: every line must end in CRLF (RFC 5321 2.3.8)',
    );
  }
  const { fields, bodyStart } = readFields(message, 0, message.length);
  const header = readSubmittedHeader(fields, input);
  const messageId = header.messageId ?? `<${input.newMessageId}@${header.from.domain}>`;
  const plain: PlainPart = survey.isPlain
    ? {
        fields: fields.filter(({ lower }) => ENCODED_FIELDS.has(lower)).map(plainField),
        body: [message.subarray(bodyStart)],
      }
    : makePlain(message, readMimeTree(message));
  const pieces = [
    Buffer.from(traceField(input, header.needsSmtpUtf8)),
    ...header.fields,
    Buffer.from(addedFields(header, { messageId, date: input.now })),
    ...plain.fields,
    CRLF,
    ...plain.body,
  ];
  return { header, messageId, raw: Buffer.concat(pieces) };
}

const dateOf = (date: Date): string => date.toUTCString().replace('GMT', '+0000');

/** RFC 3848 and RFC 6531 §4.3 name the protocol; RFC 2606 the name that stands for the client. */
function traceField({ trace, now }: SubmittedInput, isUtf8: boolean): string {
  const protocol = `${isUtf8 ? 'UTF8SMTP' : 'ESMTP'}${trace.isTls ? 'S' : ''}A`;
  return [
    'Received: from submission.invalid (authenticated)',
    ` by ${trace.hostname} (Mailstead) with ${protocol} id ${trace.id};`,
    ` ${dateOf(now)}`,
    '',
  ].join('\r\n');
}

function addedFields(
  { missing }: SubmittedHeader,
  about: { readonly messageId: string; readonly date: Date },
): string {
  let added = '';
  // RFC 5322 §3.6.3: a group without members says that there are recipients whom nobody shall see.
  if (missing.has('to')) added += 'To: undisclosed-recipients:;\r\n';
  if (missing.has('message-id')) added += `Message-ID: ${about.messageId}\r\n`;
  if (missing.has('date')) added += `Date: ${dateOf(about.date)}\r\n`;
  if (missing.has('mime-version')) added += 'MIME-Version: 1.0\r\n';
  return added;
}
