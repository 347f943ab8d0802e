// What people see of messages that parsers stumble over: never nothing.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMessage } from '../../src/mail/parse.ts';

const test = suite('parse');

const head = [
  'Received: from a by b; now',
  'From: =?utf-8?q?J=C3=BCrgen?= <j@outside.test>',
  'To: One <one@x.test>, two@x.test',
  'Subject: =?utf-8?q?J=C3=BCrgen?= writes',
  'Message-ID: <one@outside.test>',
  'Content-Type: multipart/mixed; boundary=b',
  '',
];
const withParts = (...parts: readonly (readonly string[])[]): Buffer =>
  Buffer.from([...head, ...parts.flatMap((part) => ['--b', ...part]), '--b--', ''].join('\r\n'));

for (const field of ['Content-Type: "', 'Content-Type: ""', 'Content-Type: ;', 'Content-Type:']) {
  test(`a part with ${field} does not hide the others`, async () => {
    const parsed = await parseMessage(withParts(['', 'Readable'], [field, '', 'Strange']));
    assert.is(parsed.subject, 'Jürgen writes');
    assert.is(parsed.from, 'Jürgen <j@outside.test>');
    assert.match(parsed.text ?? '', /Readable/);
    const files = parsed.attachments.map(({ content }) => content.toString().trim());
    assert.match(`${parsed.text} ${files.join(' ')}`, /Strange/);
  });
}

test('what the parser gives up on shows its header', async () => {
  const many = Array.from({ length: 1_200 }, () => ['', 'x']);
  const parsed = await parseMessage(withParts(...many));
  assert.is(parsed.from, 'Jürgen <j@outside.test>');
  assert.equal(parsed.to, ['One <one@x.test>', 'two@x.test']);
  assert.is(parsed.subject, 'Jürgen writes');
  assert.is(parsed.messageId, '<one@outside.test>');
  assert.is(parsed.headers['received'], 'from a by b; now');
});

test('an image that the text shows is inline, unless its author says otherwise', async () => {
  const image = (id: string, ...fields: readonly string[]) =>
    ['--b', 'Content-Type: image/png', `Content-ID: <${id}>`, ...fields, '', 'x'].join('\r\n');
  const related = [
    'Content-Type: multipart/related; boundary=b',
    '',
    '--b',
    'Content-Type: text/html',
    '',
    '<img src="cid:bare"><img src="cid:said">',
    image('bare'),
    image('said', 'Content-Disposition: attachment; filename=said.png'),
    image('told', 'Content-Disposition: inline'),
    '--b--',
    '',
  ].join('\r\n');
  const { attachments } = await parseMessage(Buffer.from(related));
  assert.equal(
    attachments.map(({ contentId, disposition }) => [contentId, disposition]),
    [
      ['bare', 'inline'],
      ['said', 'attachment'],
      ['told', 'inline'],
    ],
  );
});

test('what stands on one line is shown on one line', async () => {
  const parsed = await parseMessage(
    Buffer.from(
      [
        'From: =?utf-8?q?A=0D=0AB?= <a@outside.test>',
        'Subject: =?utf-8?q?one=0D=0ABcc:_two=09three?=',
        'MIME-Version: 1.0',
        'Content-Type: multipart/mixed; boundary=b',
        '',
        '--b',
        'Content-Type: application/pdf',
        "Content-Disposition: attachment; filename*=utf-8''x%0D%0AX-Evil%3A1.pdf",
        '',
        'x',
        '--b--',
        '',
      ].join('\r\n'),
    ),
  );
  const shown = [parsed.from, parsed.subject, parsed.attachments[0]?.filename];
  assert.equal(shown, ['A B <a@outside.test>', 'one Bcc: two three', 'x X-Evil:1.pdf']);
});

test.run();
