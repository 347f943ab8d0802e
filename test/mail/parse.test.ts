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

test.run();
