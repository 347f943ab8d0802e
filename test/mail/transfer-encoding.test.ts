// Bodies that are hard to carry: read back by mailparser as they were, and as nodemailer's MailComposer writes them.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import MailComposer from 'nodemailer/lib/mail-composer';
import { compose } from '../../src/mail/compose.ts';
import type { MessageParts } from '../../src/mail/compose.ts';
import {
  assertWellFormed,
  base,
  bodyOf,
  composed,
  header,
  read,
  withoutLastBreak,
} from '../support/composed.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

/** Lines that readers must find again, and what a reader makes of what cannot be sent at all. */
const expected = (text: string): string => withoutLastBreak(text.toWellFormed());

const boundary = (parts: Partial<MessageParts>): string =>
  /boundary="([^"]+)"/.exec(composed(parts).toString('latin1'))?.[1] ?? '';
const known = boundary({ text: 'a', html: 'b' });

const hostile: Record<string, string> = {
  'no-break space': 'a\u00a0b\u00a0\u00a0\n\u00a0\n',
  emoji: '🚀👩‍👩‍👧‍👦'.repeat(200),
  'Latin-1 letters': 'Größe, façade, ñandú\n'.repeat(40),
  'mostly foreign': '日本語のテキスト\n'.repeat(100),
  'one line of 40,000': 'x'.repeat(40_000),
  'one line of 40,000 words': 'word '.repeat(8_000),
  'one line of 40,000 umlauts': 'ü'.repeat(40_000),
  'long line of equals signs': '='.repeat(5_000),
  'lone surrogates': 'a\ud800b\udc00c\ud83d',
  'NUL inside': 'a\u0000b\u0000',
  'all controls': String.fromCharCode(...Array(0x20).keys(), 0x7f, ...Array(0x20).keys()),
  'form feed and vertical tab': 'a\fb\u000b\n\f\nc',
  'C1 and separators': 'a\u0085b\u2028c\u2029d',
  'byte order mark inside': 'a\ufeffb',
  'leading dots': '.\n..\n.a\n. b\nü.\n',
  'lonely dot in a long line': `${'x'.repeat(75)}.${'y'.repeat(80)}\n.`,
  'From lines': 'From me\nFrom you ü\n>From\nFriday\n',
  'From at a soft break': `${'x'.repeat(75)}From here ${'y'.repeat(75)}`,
  'boundary look-alikes': `--${known}\nContent-Type: text/html\n\n<b>\n--${known}--\n--=_\n`,
  'boundary in a folded line': `${'ü '.repeat(20)}\n--${known}--\n`,
  'header look-alike': 'Subject: x\nContent-Type: y\n\nbody',
  'CR only': 'a\rb\r\rc\r',
  'LF only': 'a\nb\n\nc\n',
  'mixed line ends': 'a\r\nb\rc\nd\n\r\ne\r\r\nf',
  'no line end': 'a',
  'trailing white space': 'a \nb\t\n \n\t\nc  ',
  'long white space': `a${' '.repeat(16_000)}b${'\t'.repeat(16_000)}`,
  'white space to the edge': `${'x'.repeat(70)}${' '.repeat(10)}\n${'x'.repeat(75)} \n${'x'.repeat(76)} \n`,
  'blank lines': `a${'\n'.repeat(16_000)}b`,
  'hundred blank lines': `a${'\n'.repeat(100)}b\n`,
  'encoded look-alikes': '=20=0D=0A= =\n=C3=BC =?UTF-8?Q?x?=\n',
  'lines of 74 to 80': Array.from({ length: 7 }, (_, i) => 'z'.repeat(74 + i)).join('\n'),
  'umlaut at the edge': Array.from({ length: 12 }, (_, i) => `${'z'.repeat(66 + i)}üé`).join('\n'),
  'emoji at the edge': Array.from({ length: 16 }, (_, i) => `${'z'.repeat(60 + i)}🚀 end`).join(
    '\n',
  ),
  'one megabyte of lines': 'The quick brown fox jumps over the lazy dog.\n'.repeat(23_000),
  'one megabyte in one line': 'x'.repeat(1_000_000),
  'one megabyte of umlauts': 'ö'.repeat(500_000),
  'one megabyte of blank lines': '\n'.repeat(1_000_000),
};

test('hostile text and HTML read back as they were, alone and together', async () => {
  for (const [name, content] of Object.entries(hostile)) {
    const alone = composed({ text: content });
    assertWellFormed(alone);
    assert.is(withoutLastBreak((await read(alone)).text ?? ''), expected(content), name);

    const html = composed({ text: null, html: content });
    assertWellFormed(html);
    assert.is(withoutLastBreak((await read(html)).html || ''), expected(content), name);

    const both = composed({ text: content, html: `<p>${content}</p>` });
    assertWellFormed(both);
    const parsed = await read(both);
    assert.is(withoutLastBreak(parsed.text ?? ''), expected(content), name);
    assert.is(parsed.html, `<p>${content}</p>`.toWellFormed().replace(/\r\n|\r|\n/g, '\n'), name);
    assert.is(parsed.attachments.length, 0, name);
  }
});

test('quoted-printable for letters, base64 for scripts and blank lines, 7-bit where nothing can go wrong', () => {
  const encoding = (text: string): string =>
    header(composed({ text }), 'Content-Transfer-Encoding');
  assert.is(encoding('plain\n'), '7bit');
  assert.is(encoding('x'.repeat(78)), '7bit');
  assert.is(encoding('x'.repeat(79)), 'quoted-printable');
  assert.is(encoding('Größe und Gewicht der Sendung\n'), 'quoted-printable');
  assert.is(encoding('.dot'), 'quoted-printable');
  assert.is(encoding('From me'), 'quoted-printable');
  assert.is(encoding('Friday'), '7bit');
  assert.is(encoding('end '), 'quoted-printable');
  assert.is(encoding('日本語'), 'base64');
  assert.is(encoding(`a${'\n'.repeat(102)}b`), 'base64');
  assert.is(bodyOf(composed({ text: '.a\nFrom b = c \n' })), '=2Ea\r\n=46rom b =3D c=20\r\n');
  assert.is(bodyOf(composed({ text: '' })), '=\r\n');
});

test('naughty strings survive as subject, name and text', async () => {
  const file = `${corpora}/strings-blns/blns.json`;
  if (!existsSync(file)) {
    console.log(`skipped: no corpus at ${file}`);
    return;
  }
  const strings = JSON.parse(readFileSync(file, 'utf8')) as string[];
  assert.ok(strings.length > 400);
  for (const string of strings) {
    const { raw } = compose({
      ...base,
      from: { ...base.from, name: string },
      subject: string,
      text: string,
      headers: [['X-Naughty', string.replace(/[\p{Cc}]/gu, ' ')]],
    });
    assertWellFormed(raw);
    const parsed = await read(raw);
    assert.is(withoutLastBreak(parsed.text ?? ''), expected(string));
    assert.equal(parsed.from?.value[0]?.address, 'jane@x.example', string);
    const squeezed = (text: string | undefined): string =>
      (text ?? '').replace(/[\p{Cc}\s\ufeff]+/gu, ' ').trim();
    assert.is(squeezed(parsed.subject), squeezed(string));
  }
  console.log(`blns: ${strings.length} strings survive`);
});

test('means the same as what MailComposer writes', async () => {
  let compared = 0;
  for (const [name, content] of Object.entries(hostile)) {
    if (content.length > 200_000) continue;
    // MailComposer keeps lone CR as it is; those cases are ours alone.
    if (/\r(?!\n)/.test(content)) continue;
    compared += 1;
    const ours = await read(composed({ text: content, html: `<p>${content}</p>`, subject: 'Ü b' }));
    const theirs = await read(
      await new MailComposer({
        from: { name: 'Jane', address: 'jane@x.example' },
        to: 'bob@y.example',
        subject: 'Ü b',
        text: content,
        html: `<p>${content}</p>`,
        newline: 'windows',
        disableFileAccess: true,
        disableUrlAccess: true,
      })
        .compile()
        .build(),
    );
    assert.is(ours.text, theirs.text, name);
    assert.is(ours.html, theirs.html, name);
    assert.is(ours.subject, theirs.subject);
    assert.equal(ours.from?.value, theirs.from?.value);
    assert.equal(ours.to?.value, theirs.to?.value);
  }
  assert.ok(compared > 25, `${compared} compared`);
});

test.run();
