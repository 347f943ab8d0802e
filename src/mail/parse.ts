// Reads a complete message for people and programs: who, what, the texts and the files. For showing only:
// nothing is ever rebuilt from it, and a message that cannot be read is still a message. mailparser
// reads; the caps here keep what one message can make of memory and time. What it stumbles over is read by
// what reads submissions, which shows the header of everything and as many parts as it finds.
import { simpleParser, type ParsedAddress, type ParsedMail } from 'mailparser';
import { splitHeader } from './header.ts';
import { decodeShownFiles, readShownParts } from './shown-parts.ts';
import { mailboxesOf as mailboxesIn, shown } from './submitted-header.ts';

export interface ParsedAttachment {
  readonly filename: string | null;
  readonly contentType: string;
  /** Without angle brackets. */
  readonly contentId: string | null;
  readonly disposition: 'attachment' | 'inline';
  readonly content: Buffer;
}

export interface ParsedMessage {
  /** As shown: `Name <a@b.c>`, decoded; empty when there is none. */
  readonly from: string;
  readonly to: readonly string[];
  readonly cc: readonly string[];
  readonly bcc: readonly string[];
  readonly replyTo: readonly string[];
  readonly subject: string;
  /** With angle brackets; null when there is none. */
  readonly messageId: string | null;
  /** `cid:` links as they are in the message. */
  readonly html: string | null;
  readonly text: string | null;
  /** Lower-case name to unfolded value; of a repeated field the values of all, one a line. */
  readonly headers: Readonly<Record<string, string>>;
  readonly attachments: readonly ParsedAttachment[];
  /** Not all of it could be read, or it is more than is shown. */
  readonly isPartial: boolean;
}

const ADDRESSES_MAX = 1_000;
const SUBJECT_MAX = 10_000;
const BODY_CHARACTERS_MAX = 10 * 1024 * 1024;
const HEADER_FIELDS_MAX = 500;
const HEADER_CHARACTERS_MAX = 64 * 1024;
const ATTACHMENTS_MAX = 500;
const FILENAME_MAX = 255;
/** Of a field that is read without a thread: address lists can be made to take long. */
const PLAIN_FIELD_MAX = 8 * 1024;

/** The message as a mail program shows it. Never throws. */
export async function parseMessage(raw: Buffer): Promise<ParsedMessage> {
  try {
    return present(
      await simpleParser(raw, {
        keepCidLinks: true,
        skipTextToHtml: true,
        skipHtmlToText: true,
        skipTextLinks: true,
      }),
    );
  } catch {
    return readPlainly(raw).catch(() => readHeaderOnly(raw));
  }
}

/** What the header shows, without any part: for a message that takes too long. Never throws, and is quick. */
export function readHeaderOnly(raw: Buffer): ParsedMessage {
  const fields = splitHeader(raw).fields.map(({ name, value }) => ({
    key: name.toLowerCase(),
    value,
  }));
  const first = (key: string): string => fields.find((one) => one.key === key)?.value ?? '';
  const addresses = (key: string): string[] =>
    mailboxesIn(first(key).slice(0, PLAIN_FIELD_MAX)).map((one) => storable(one, SUBJECT_MAX));
  return {
    from: addresses('from')[0] ?? '',
    to: addresses('to'),
    cc: addresses('cc'),
    bcc: addresses('bcc'),
    replyTo: addresses('reply-to'),
    subject: shown(first('subject').slice(0, PLAIN_FIELD_MAX), SUBJECT_MAX),
    messageId: storable(first('message-id'), SUBJECT_MAX) || null,
    html: null,
    text: null,
    headers: headersOf(fields),
    attachments: [],
    isPartial: true,
  };
}

async function readPlainly(raw: Buffer): Promise<ParsedMessage> {
  const { html, text, files } = await readShownParts(raw);
  const contents = decodeShownFiles(raw);
  return {
    ...readHeaderOnly(raw),
    html,
    text,
    attachments: files.map(({ filename, contentType, contentId, disposition }, at) => ({
      filename,
      contentType,
      contentId,
      disposition,
      content: contents[at]!,
    })),
  };
}

function present(mail: ParsedMail): ParsedMessage {
  return {
    from: mailboxesOf(mail.from)[0] ?? '',
    to: mailboxesOf(mail.to),
    cc: mailboxesOf(mail.cc),
    bcc: mailboxesOf(mail.bcc),
    replyTo: mailboxesOf(mail.replyTo),
    subject: oneLine(mail.subject ?? '', SUBJECT_MAX),
    messageId: mail.messageId === undefined ? null : oneLine(mail.messageId, SUBJECT_MAX),
    html: typeof mail.html === 'string' ? storable(mail.html, BODY_CHARACTERS_MAX) : null,
    text: mail.text === undefined ? null : storable(mail.text, BODY_CHARACTERS_MAX),
    headers: headersOf(
      (mail.headerLines ?? []).slice(0, HEADER_FIELDS_MAX).map(({ key, line }) => ({
        key,
        value: line
          .slice(line.indexOf(':') + 1)
          .replace(/\r?\n(?=[ \t])/g, '')
          .trim(),
      })),
    ),
    attachments: mail.attachments.slice(0, ATTACHMENTS_MAX).map((part) => ({
      filename: part.filename === undefined ? null : oneLine(part.filename, FILENAME_MAX),
      contentType: oneLine(part.contentType || 'application/octet-stream', FILENAME_MAX),
      contentId: part.cid === undefined ? null : oneLine(part.cid, FILENAME_MAX),
      disposition: isInline(part) ? 'inline' : 'attachment',
      content: part.content,
    })),
    isPartial: isMore(mail),
  };
}

type MailAttachment = ParsedMail['attachments'][number];

/** RFC 2387, RFC 2183 §2: what the text refers to, and nobody says otherwise, is part of it. */
const isInline = ({ contentDisposition, related, cid }: MailAttachment): boolean =>
  contentDisposition === 'inline' || (!contentDisposition && related === true && cid !== undefined);

/** Than is shown. */
const isMore = (mail: ParsedMail): boolean =>
  mail.attachments.length > ATTACHMENTS_MAX ||
  (mail.headerLines ?? []).length > HEADER_FIELDS_MAX ||
  [mail.html, mail.text].some((text) => text && text.length > BODY_CHARACTERS_MAX);

/** Text that Postgres can hold: NUL, and half a surrogate pair, it cannot. */
const storable = (text: string, max: number): string =>
  text.slice(0, max).replaceAll('\0', '\uFFFD').toWellFormed();

/** Encoded words and parameters can hold line breaks, with which whoever makes a header of them would make two. */
const oneLine = (text: string, max: number): string =>
  storable(text.replace(/[^\P{Cc}\0]+/gu, ' '), max);

type AddressField = ParsedMail['to'];

function mailboxesOf(field: AddressField): string[] {
  const fields = field === undefined ? [] : 'value' in field ? [field] : field;
  const flat = (entry: ParsedAddress): readonly ParsedAddress[] => entry.group ?? [entry];
  return fields
    .flatMap(({ value }) => value)
    .flatMap(flat)
    .filter(({ address }) => address !== undefined && address !== '')
    .slice(0, ADDRESSES_MAX)
    .map(({ address, name }) => oneLine(show(name, address!), SUBJECT_MAX));
}

/** In Unicode, as people read and write it. */
const show = (name: string, address: string): string => {
  if (name === '') return address;
  const phrase = /[()<>[\]:;@\\,."]/.test(name) ? `"${name.replace(/["\\]/g, '\\$&')}"` : name;
  return `${phrase} <${address}>`;
};

function headersOf(
  fields: readonly { readonly key: string; readonly value: string }[],
): Record<string, string> {
  const headers = new Map<string, string>();
  let characters = 0;
  for (const { key, value } of fields.slice(0, HEADER_FIELDS_MAX)) {
    characters += value.length;
    if (characters > HEADER_CHARACTERS_MAX) break;
    const before = headers.get(key);
    headers.set(
      storable(key, FILENAME_MAX),
      storable(before === undefined ? value : `${before}\n${value}`, HEADER_CHARACTERS_MAX),
    );
  }
  return Object.fromEntries(headers);
}
