// The attachments of a request: their fields as the API takes them, and the check that turns them into files
// that the rest can trust. Pure: content that was large has been spooled to disk while the body was read, and what
// is given by URL is fetched after acceptance, where every address is looked at (decisions.md, "Emails").
// A refusal for nothing but these issues has the code `invalid_attachment`.
import { createHash } from 'node:crypto';
import { extension, lookup } from 'mime-types';
import type { Issue } from '../access/refusal.ts';
import { urlProblem } from '../dns/url-guard.ts';
import { readBase64 } from '../mail/base64.ts';
import { isContentType } from '../mail/compose.ts';

/** A file to send along: either `content` or `path`. */
export interface SendEmailAttachment {
  /**
   * The name that the recipient sees, up to 255 characters; folders before it are left out. May be absent beside
   * `content_type` or `content_id`.
   */
  filename?: string | null;
  /** The file in base64. All attachments of an email together: at most 40 MiB in base64. */
  content?: string | null;
  /** The http or https URL of the file, fetched after the email was accepted; up to 2,048 characters. */
  path?: string | null;
  /** `type/subtype`, with parameters; absent: by the extension of the name. */
  content_type?: string | null;
  /** Up to 127 characters; makes the file part of the HTML body as `cid:…`. */
  content_id?: string | null;
}

/** Decoded bytes in a file of their own. */
export interface SpooledFile {
  readonly path: string;
  readonly sizeBytes: number;
}

/** What was spooled of a request's body. */
export interface SpooledContent extends SpooledFile {
  /** Of the decoded bytes, in hex. */
  readonly sha256: string;
  /** What is wrong with the base64, as the end of a sentence; the file is gone then. */
  readonly problem: string | null;
}

/** By the placeholder that stands for the text in the parsed body; nobody outside can know one. */
export type Spooled = ReadonlyMap<string, SpooledContent>;

/** Bytes that were staged in the blob store. */
export interface StagedBlob {
  readonly blobKey: string;
  readonly sizeBytes: number;
}

export interface CheckedAttachment {
  /** Null only where a message was submitted as a whole. */
  readonly filename: string | null;
  readonly contentType: string;
  /** Without angle brackets. */
  readonly contentId: string | null;
  readonly disposition: 'attachment' | 'inline';
  /** Null until it is fetched from `url`. */
  readonly content: Buffer | SpooledFile | StagedBlob | null;
  readonly url: string | null;
  /** SHA-256 of the content in hex; null for what is fetched, absent where nobody compares. */
  readonly digest?: string | null;
}

export const ATTACHMENTS_MAX = 100;
/** Of all attachments of an email together, in base64. */
export const ATTACHMENTS_MAX_BYTES = 40 * 1024 * 1024;
const FILENAME_MAX_CHARACTERS = 255;
const CONTENT_ID_MAX_CHARACTERS = 127;
const DEFAULT_TYPE = 'application/octet-stream';
/** Printable ASCII without angle brackets: what a Content-ID header can carry (RFC 5322 §3.6.4, relaxed). */
const CONTENT_ID = /^[!-;=?-~]+$/;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u2028\u2029]/;

/** What mail programs would run: Resend's list, and every large provider's. */
const BLOCKED_EXTENSIONS: ReadonlySet<string> = new Set(
  (
    'adp app asp bas bat cer chm cmd com cpl crt csh der exe fxp gadget hlp hta inf ins isp its js jse ksh lib lnk ' +
    'mad maf mag mam maq mar mas mat mau mav maw mda mdb mde mdt mdw mdz msc msh msh1 msh2 mshxml msh1xml ' +
    'msh2xml msi msp mst ops pcd pif plg prf prg ps1 ps1xml ps2 ps2xml psc1 psc2 reg scf scr sct shb shs sys ' +
    'tmp url vb vbe vbs vps vsmacros vss vst vsw vxd ws wsc wsf wsh xnk'
  ).split(' '),
);

/** The size in base64, without line ends. */
export const base64Size = (sizeBytes: number): number => Math.ceil(sizeBytes / 3) * 4;

export const contentSize = (content: Buffer | SpooledFile | StagedBlob): number =>
  Buffer.isBuffer(content) ? content.length : content.sizeBytes;

/** Checks the attachments of one email. All issues are found; with any, the files are not to be used. */
export function checkAttachments(
  given: readonly SendEmailAttachment[] | null | undefined,
  spooled: Spooled,
): { readonly issues: readonly Issue[]; readonly attachments: readonly CheckedAttachment[] } {
  const list = given ?? [];
  if (list.length > ATTACHMENTS_MAX) {
    const message = `\`attachments\` has ${list.length} items; at most ${ATTACHMENTS_MAX} are allowed.`;
    return { issues: [{ path: 'attachments', message }], attachments: [] };
  }
  const issues: Issue[] = [];
  const attachments = list.map((one, index) =>
    checkOne(one, { path: `attachments.${index}`, index, spooled, issues }),
  );
  const sizeBytes = attachments.reduce(
    (sum, { content }) => sum + (content === null ? 0 : base64Size(contentSize(content))),
    0,
  );
  if (sizeBytes > ATTACHMENTS_MAX_BYTES) {
    const message =
      `The \`attachments\` have ${sizeBytes} bytes in base64; at most ${ATTACHMENTS_MAX_BYTES} ` +
      'are allowed in one email.';
    issues.push({ path: 'attachments', message });
  }
  return { issues, attachments };
}

/** What makes two lists of attachments the same, small enough to hash: see sending/idempotency.ts. */
export function attachmentMeaning(attachments: readonly CheckedAttachment[]): unknown {
  return attachments.map(({ filename, contentType, contentId, url, digest }) => ({
    filename,
    contentType,
    contentId,
    url,
    digest: digest ?? null,
  }));
}

interface Checking {
  readonly path: string;
  readonly index: number;
  readonly spooled: Spooled;
  readonly issues: Issue[];
}

function checkOne(given: SendEmailAttachment, about: Checking): CheckedAttachment {
  const contentId = checkContentId(given.content_id ?? null, about);
  const contentType = checkContentType(given.content_type ?? null, about);
  const filename = checkFilename(given, about);
  const content = checkContent(given, about);
  return {
    filename,
    contentType: contentType ?? (lookup(filename) || DEFAULT_TYPE),
    contentId,
    disposition: contentId === null ? 'attachment' : 'inline',
    content: content?.content ?? null,
    url: given.path ?? null,
    digest: content?.digest ?? null,
  };
}

/** `path` of an issue is the field below the attachment; empty for the attachment itself. */
function complain(about: Checking, field: string, words: string): null {
  const path = field === '' ? about.path : `${about.path}.${field}`;
  about.issues.push({ path, message: `\`${path}\` ${words}.` });
  return null;
}

function checkContent(
  { content = null, path = null }: SendEmailAttachment,
  about: Checking,
): { readonly content: Buffer | SpooledFile; readonly digest: string } | null {
  if (content !== null && path !== null) {
    return complain(about, '', 'must have either `content` or `path`, not both');
  }
  if (path !== null) {
    const problem = urlProblem(path);
    return problem === null ? null : complain(about, 'path', problem);
  }
  if (content === null) {
    return complain(about, '', 'must have either `content` (base64) or `path` (a URL)');
  }
  const file = about.spooled.get(content);
  if (file !== undefined) {
    if (file.problem !== null) return complain(about, 'content', notBase64(file.problem));
    return { content: { path: file.path, sizeBytes: file.sizeBytes }, digest: file.sha256 };
  }
  if (content.startsWith('data:')) {
    return complain(about, 'content', 'must be base64 alone: leave out `data:` up to the comma');
  }
  const read = readBase64(content);
  if (read.problem !== null) return complain(about, 'content', notBase64(read.problem));
  return { content: read.bytes, digest: createHash('sha256').update(read.bytes).digest('hex') };
}

const notBase64 = (problem: string): string => `must be base64, but it ${problem}`;

/** The name without folders. A name that was refused, or that is made up, is still one. */
function checkFilename(given: SendEmailAttachment, about: Checking): string {
  const { filename = null, content_type: type = null, content_id: id = null } = given;
  const ending = type === null ? false : extension(type);
  const standIn = `attachment-${about.index}${ending === false ? '' : `.${ending}`}`;
  if (filename === null) {
    if (type === null && id === null) {
      complain(about, 'filename', 'is missing; give a name, or at least `content_type`');
    }
    return standIn;
  }
  const name = (filename.split(/[/\\]/).at(-1) ?? '').trim();
  if (CONTROLS.test(filename)) {
    complain(about, 'filename', 'contains a line break or control character; remove it');
  } else if (!filename.isWellFormed()) complain(about, 'filename', 'is not valid Unicode text');
  else if (name === '' || /^\.+$/.test(name)) {
    complain(about, 'filename', 'names no file; give a name such as `invoice.pdf`');
  } else if (name.length > FILENAME_MAX_CHARACTERS) {
    const words = `has ${name.length} characters; at most ${FILENAME_MAX_CHARACTERS} are allowed`;
    complain(about, 'filename', words);
  } else {
    const blocked = blockedExtension(name);
    if (blocked === null) return name;
    const words = `ends in \`.${blocked}\`, which mail programs refuse; send it inside an archive`;
    complain(about, 'filename', words);
  }
  return standIn;
}

/** Windows reads over dots and spaces at the end of a name. */
function blockedExtension(name: string): string | null {
  const ending =
    /\.([^.]+)$/
      .exec(name.replace(/[. ]+$/, ''))?.[1]
      ?.trim()
      .toLowerCase() ?? '';
  return BLOCKED_EXTENSIONS.has(ending) ? ending : null;
}

function checkContentType(given: string | null, about: Checking): string | null {
  if (given === null) return null;
  const type = given.trim();
  return isContentType(type)
    ? type
    : complain(about, 'content_type', 'must be a media type such as `application/pdf`');
}

function checkContentId(given: string | null, about: Checking): string | null {
  if (given === null) return null;
  const id = given.replace(/^<(.*)>$/s, '$1');
  if (id.length > CONTENT_ID_MAX_CHARACTERS) {
    const words = `has ${id.length} characters; at most ${CONTENT_ID_MAX_CHARACTERS} are allowed`;
    return complain(about, 'content_id', words);
  }
  return CONTENT_ID.test(id)
    ? id
    : complain(about, 'content_id', 'must be printable ASCII without spaces and angle brackets');
}
