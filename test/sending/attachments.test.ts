// The attachments of a request: what is taken, what is refused and in which words.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  attachmentMeaning,
  ATTACHMENTS_MAX_BYTES,
  checkAttachments,
  type CheckedAttachment,
  type SendEmailAttachment,
  type SpooledContent,
} from '../../src/sending/attachments.ts';

const none = new Map<string, SpooledContent>();
const check = (...given: readonly SendEmailAttachment[]) => checkAttachments(given, none);
const good = (given: SendEmailAttachment): CheckedAttachment => {
  const { issues, attachments } = check(given);
  assert.equal(issues, [], JSON.stringify(given).slice(0, 200));
  return attachments[0]!;
};
/** The paths and messages of the issues, a line each. */
const issuesOf = (...given: readonly SendEmailAttachment[]): readonly string[] =>
  check(...given).issues.map(({ path, message }) => `${path}: ${message}`);
const base64 = (text: string): string => Buffer.from(text).toString('base64');
const note = { filename: 'note.txt', content: base64('a note') };

const test = suite('attachments');

test('content: the octets, whatever way base64 is written', () => {
  const octets = Buffer.from([0xfb, 0xff, 0xfe, 0x00, 0x3e, 0x3f, 0xff]);
  const standard = octets.toString('base64');
  for (const content of [
    standard,
    standard.replace(/=+$/, ''),
    octets.toString('base64url'),
    `${standard.slice(0, 5)}\r\n ${standard.slice(5)}\n`,
    standard.replaceAll(/./g, '$&\t'),
  ]) {
    assert.equal(good({ filename: 'a.bin', content }).content, octets, content);
  }
  assert.equal(good({ filename: 'empty.txt', content: '' }).content, Buffer.alloc(0));
});

test('content: what is not base64 is refused, not repaired', () => {
  for (const content of [
    'a',
    'abcde',
    'ab=c',
    'abcd=',
    'abc==',
    '====',
    'ab==cd==',
    'hello world!',
    'YWJj\u0000',
    'YWJjé',
    'YWJj,',
    '<p>hello</p>',
  ]) {
    assert.match(
      issuesOf({ filename: 'a.txt', content })[0] ?? 'taken',
      /^attachments\.0\.content: `attachments\.0\.content` must be base64, but it /,
      content,
    );
  }
  assert.match(
    issuesOf({ filename: 'a.txt', content: 'data:text/plain;base64,YWJj' })[0] ?? 'taken',
    /leave out `data:`/,
  );
});

test('content or path: exactly one', () => {
  const path = 'https://files.example/a.pdf';
  assert.match(issuesOf({ filename: 'a.pdf' })[0] ?? 'taken', /^attachments\.0: .*either/);
  assert.match(issuesOf({ ...note, path })[0] ?? 'taken', /^attachments\.0: .*not both/);
  assert.match(issuesOf({ filename: 'a', content: null, path: null })[0] ?? '', /either/);
  const fetched = good({ filename: 'a.pdf', path, content: null });
  assert.is(fetched.url, path);
  assert.is(fetched.content, null);
  assert.is(fetched.contentType, 'application/pdf');
  assert.is(good(note).url, null);
});

test('path: a plain http or https URL', () => {
  for (const path of [
    '',
    'a.pdf',
    '/etc/passwd',
    'file:///etc/passwd',
    'ftp://files.example/a',
    'javascript:alert(1)',
    'https://',
    'https://user:secret@files.example/a',
    'http://localhost/a',
    'http://0x7f.1/a',
    'https://files.example/a b',
    `https://files.example/${'a'.repeat(2_048)}`,
  ]) {
    assert.match(
      issuesOf({ filename: 'a.pdf', path })[0] ?? 'taken',
      /^attachments\.0\.path: `attachments\.0\.path` must .*\.$/,
      path.slice(0, 50),
    );
  }
});

test('filename: the name alone, of a kind that mail programs take', () => {
  const named = (filename: string): string | null => good({ ...note, filename }).filename;
  assert.is(named('Größe №1 (Kopie).pdf'), 'Größe №1 (Kopie).pdf');
  assert.is(named('../../etc/passwd'), 'passwd');
  assert.is(named('C:\\Users\\ada\\plan.docx'), 'plan.docx');
  assert.is(named('.gitignore'), '.gitignore');
  assert.is(named('x'.repeat(251) + '.pdf'), 'x'.repeat(251) + '.pdf');
  assert.is(named('report.exe.pdf'), 'report.exe.pdf');
  for (const [filename, says] of [
    ['a\r\nBcc: b@y.example.txt', /control character/],
    ['a\0.txt', /control character/],
    ['a\u0085.txt', /control character/],
    ['\ud800.txt', /not valid Unicode/],
    ['', /names no file/],
    ['..', /names no file/],
    ['folder/', /names no file/],
    ['x'.repeat(256), /256 characters; at most 255/],
    ['run.exe', /`\.exe`/],
    ['RUN.EXE', /`\.exe`/],
    ['run.exe.', /`\.exe`/],
    ['run.exe ', /`\.exe`/],
    ['a.pdf.js', /`\.js`/],
    ['x.ps1xml', /`\.ps1xml`/],
  ] as const) {
    const [issue = 'taken'] = issuesOf({ ...note, filename });
    assert.match(issue, /^attachments\.0\.filename: `attachments\.0\.filename` .*\.$/, filename);
    assert.match(issue, says);
  }
});

test('filename: may be absent beside a type or an id, and is made up then', () => {
  const { content } = note;
  assert.match(issuesOf({ content })[0] ?? 'taken', /^attachments\.0\.filename: .*missing/);
  assert.match(issuesOf({ content, filename: null })[0] ?? 'taken', /missing/);
  assert.is(good({ content, content_type: 'image/png' }).filename, 'attachment-0.png');
  assert.is(good({ content, content_id: 'logo' }).filename, 'attachment-0');
  assert.is(
    check(note, { content, content_type: 'text/csv' }).attachments[1]?.filename,
    'attachment-1.csv',
  );
});

test('content type: as given, else by the name, else unknown', () => {
  const typed = (given: Partial<SendEmailAttachment>): string =>
    good({ ...note, ...given }).contentType;
  assert.is(
    typed({ content_type: 'text/calendar; method=REQUEST' }),
    'text/calendar; method=REQUEST',
  );
  assert.is(typed({ content_type: ' image/png ' }), 'image/png');
  assert.is(
    typed({ filename: 'forwarded_message.eml', content_type: 'message/rfc822' }),
    'message/rfc822',
  );
  assert.is(typed({ filename: 'A.JPG' }), 'image/jpeg');
  assert.is(typed({ filename: 'unknown.xyzzy' }), 'application/octet-stream');
  for (const type of [
    '',
    'pdf',
    'text/',
    '/plain',
    'text/plain\r\nBcc: x',
    'a b/c',
    'text/plain; x',
    'x'.repeat(300),
  ]) {
    assert.match(
      issuesOf({ ...note, content_type: type })[0] ?? 'taken',
      /^attachments\.0\.content_type: /,
      type,
    );
  }
});

test('content id: makes it inline', () => {
  assert.is(good(note).disposition, 'attachment');
  const inline = good({ ...note, content_id: '<logo@x>' });
  assert.is(inline.contentId, 'logo@x');
  assert.is(inline.disposition, 'inline');
  assert.is(good({ ...note, content_id: 'x'.repeat(127) }).contentId, 'x'.repeat(127));
  for (const id of ['', '<>', 'a b', 'a\r\nBcc: x', 'é', 'a>b', 'x'.repeat(128)]) {
    assert.match(
      issuesOf({ ...note, content_id: id })[0] ?? 'taken',
      /^attachments\.0\.content_id: /,
      id,
    );
  }
});

test('all of them: at most 100, at most 40 MiB in base64, every issue told', () => {
  assert.equal(checkAttachments(null, none), { issues: [], attachments: [] });
  assert.equal(checkAttachments(undefined, none).attachments, []);
  assert.is(check(...Array.from({ length: 100 }, () => note)).issues.length, 0);
  assert.equal(issuesOf(...Array.from({ length: 101 }, () => note)), [
    'attachments: `attachments` has 101 items; at most 100 are allowed.',
  ]);
  assert.is(issuesOf({ filename: 'a.exe', content: '!' }, { content_id: ' ' }).length, 4);

  const whole = (ATTACHMENTS_MAX_BYTES / 4) * 3;
  const spooled = (sizeBytes: number): Map<string, SpooledContent> =>
    new Map([['mark', { path: '/nowhere', sizeBytes, sha256: 'aa', problem: null }]]);
  const large = { filename: 'large.bin', content: 'mark' };
  assert.equal(checkAttachments([large], spooled(whole)).issues, []);
  assert.match(
    checkAttachments([large], spooled(whole + 1)).issues[0]?.message ?? '',
    /41943044 bytes in base64; at most 41943040/,
  );
  assert.match(
    checkAttachments([large, note], spooled(whole)).issues[0]?.message ?? '',
    /at most 41943040/,
  );
});

test('what was spooled: the file, its problem, and no name for it from outside', () => {
  const file = { path: '/nowhere', sizeBytes: 9, sha256: 'aa', problem: null };
  const given = { filename: 'a.txt', content: 'spooled:1' };
  const found = checkAttachments([given], new Map([['spooled:1', file]]));
  assert.equal(found.attachments[0]?.content, { path: '/nowhere', sizeBytes: 9 });
  assert.match(issuesOf(given)[0] ?? 'taken', /must be base64/);
  const bad = new Map([['spooled:1', { ...file, problem: 'has characters that are not base64' }]]);
  assert.match(checkAttachments([given], bad).issues[0]?.message ?? '', /not base64\.$/);
});

test('meaning: by the octets, wherever they lie', () => {
  const [inMemory] = check(note).attachments;
  const [again] = check({ ...note, content: `${note.content}\n` }).attachments;
  const [other] = check({ ...note, content: base64('another note') }).attachments;
  const onDisk: SpooledContent = {
    path: '/x',
    sizeBytes: 6,
    sha256: inMemory?.digest ?? '',
    problem: null,
  };
  const [file] = checkAttachments(
    [{ ...note, content: 'mark' }],
    new Map([['mark', onDisk]]),
  ).attachments;
  const meaning = (one: CheckedAttachment | undefined): string =>
    JSON.stringify(attachmentMeaning([one!]));
  assert.is(meaning(again), meaning(inMemory));
  assert.is(meaning(file), meaning(inMemory));
  assert.is.not(meaning(other), meaning(inMemory));
  assert.ok(meaning(inMemory).length < 300);
});

test.run();
