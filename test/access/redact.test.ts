// What the request log keeps of a body: everything a developer wants to see again, and nothing that opens a door.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newToken } from '../../src/access/keys.ts';
import { describeBody, LOGGED_BODY_MAX_BYTES } from '../../src/access/redact.ts';
import { createSignedLinks } from '../../src/access/signed-link.ts';

const test = suite('redact');
const kept = (body: unknown): unknown => JSON.parse(describeBody(body) ?? 'null');

test('ordinary bodies stay as they are', () => {
  const body = {
    from: 'Ada <ada@mailstead.test>',
    to: ['a@x.test'],
    subject: 'Zeichen: "\\ \u0000 \ud800 ✓',
    html: '<p>reset your password</p>',
    tags: [{ name: 'kind', value: '' }],
    scheduled_at: null,
    count: 2.5,
    ok: true,
    nested: [[{}], []],
    at: new Date('2026-05-06T12:00:00.000Z'),
    absent: undefined,
    content: 'not of an attachment',
    path: 'https://x.test/?q',
  };
  assert.equal(kept(body), JSON.parse(JSON.stringify(body)));
  assert.equal(
    kept({ note: 'at https://u:p@x.test/?q, a@b.test', endpoint: 'https://x.test/a?b' }),
    {
      note: 'at https://[redacted]@x.test/?q, a@b.test',
      endpoint: 'https://x.test/a?[redacted]',
    },
  );
  assert.is(describeBody(undefined), null);
  assert.is(describeBody(null), 'null');
  assert.is(describeBody('text'), '"text"');
});

test('secrets are replaced by their names', () => {
  const names = [
    'token',
    'signing_secret',
    'signingSecret',
    'secret',
    'Password',
    'smtp_password',
    'authorization',
    'X-Authorization',
    'api_key',
    'apiKey',
    'private_key',
    'RESET_TOKEN',
    'credentials',
  ];
  for (const name of names) {
    for (const value of ['hunter2', ['hunter2'], { a: 'hunter2' }, 42]) {
      assert.equal(kept({ deep: [{ [name]: value }] }), { deep: [{ [name]: '[redacted]' }] }, name);
    }
  }
  assert.equal(kept({ token: null, api_key_id: 'x', tokenize: 'y' }), {
    token: null,
    api_key_id: 'x',
    tokenize: 'y',
  });
});

test('secrets are replaced by their form, wherever they stand', () => {
  const token = newToken();
  const { url } = createSignedLinks({
    key: Buffer.alloc(32, 1),
    publicUrl: 'https://mail.test',
    now: () => new Date(),
  }).sign({ kind: 'email', tenantId: token, id: token, partId: token }, 1_000);
  const text = `a ${token} b whsec_c2VjcmV0 c <${url}>`;
  const expected = `a ${token.slice(0, 11)}_[redacted] b whsec_[redacted] c <https://mail.test/links/[redacted]>`;
  assert.equal(kept({ text, list: [text] }), { text: expected, list: [expected] });
  // In the cut form of a large body, across the cut.
  for (const before of [0, 950, 970, 999, 1_000]) {
    const long = `${'x'.repeat(before)} ${token} ${url} ${'y'.repeat(LOGGED_BODY_MAX_BYTES)}`;
    const json = describeBody({ text: long }) ?? '';
    assert.not.ok(json.includes(token.slice(12)), String(before));
    assert.not.ok(json.includes(url.slice(-43)), String(before));
  }
});

test('attachments keep their names and lose their contents', () => {
  const content = Buffer.from('very private').toString('base64');
  const attachment = (about: object): unknown => kept({ attachments: [about] });
  assert.equal(attachment({ filename: 'a.txt', content }), {
    attachments: [{ filename: 'a.txt', content: '[content, about 12 bytes]' }],
  });
  assert.equal(attachment({ content: { type: 'Buffer', data: [1, 2] } }), {
    attachments: [{ content: '[content]' }],
  });
  assert.equal(attachment({ path: 'https://user:word@x.test/a.pdf?X-Amz-Signature=abc#d' }), {
    attachments: [{ path: 'https://[redacted]@x.test/a.pdf?[redacted]' }],
  });
  assert.equal(attachment({ path: 'https://x.test/a.pdf' }), {
    attachments: [{ path: 'https://x.test/a.pdf' }],
  });
  for (const wrong of [{ content }, [content], [{ path: `data:text/plain;base64,${content}` }]]) {
    assert.not.ok((describeBody({ attachments: wrong }) ?? '').includes(content));
  }
  assert.equal(kept([{ attachments: [{ content }] }]), [
    { attachments: [{ content: '[content, about 12 bytes]' }] },
  ]);
  const sizeOf = (placeholder: string): number | null => (placeholder === 'spooled 1' ? 99 : null);
  assert.is(
    describeBody({ attachments: [{ content: 'spooled 1' }] }, sizeOf),
    '{"attachments":[{"content":"[content, about 99 bytes]"}]}',
  );
  assert.equal(kept({ raw: 'Subject: x', list: [{ raw: { download_url: 'u' } }] }), {
    raw: '[raw message, 10 characters]',
    list: [{ raw: { download_url: 'u' } }],
  });
});

test('files in the wrong place lose their contents, too', () => {
  const content = Buffer.from('very private').toString('base64');
  for (const wrong of [
    { attachments: content },
    { attachments: [[content]] },
    { attachments: [[{ content }]] },
    { attachments: { a: { content } } },
    { attachments: [{ file: { content } }] },
    { attachment: content },
    { attachment: [{ content }] },
    { Attachments: [{ content }] },
    [{ attachments: content }],
  ]) {
    assert.not.ok((describeBody(wrong) ?? '').includes(content), JSON.stringify(wrong));
  }
  const file = 'QUJD'.repeat(2_000);
  for (const wrong of [file, [file], { files: [file] }, { attachments: [{ data: file }] }]) {
    const json = describeBody(wrong) ?? '';
    assert.not.ok(json.includes('QUJD'), json.slice(0, 100));
    assert.ok(json.includes('[8000 characters]') || json.includes('[content, about 6000 bytes]'));
  }
  assert.equal(kept({ html: file, text: file, subject: 'x'.repeat(4_096) }), {
    html: file,
    text: file,
    subject: 'x'.repeat(4_096),
  });
});

test('large bodies are shortened, and stay JSON', () => {
  const html = 'ä'.repeat(40_000); // 80,000 bytes
  const shortened = kept({ subject: 'S', html, to: Array.from({ length: 50 }, () => 'a@x.test') });
  assert.equal(shortened, {
    subject: 'S',
    html: `${'ä'.repeat(1_000)}… [40000 characters]`,
    to: [...Array.from({ length: 20 }, () => 'a@x.test'), '[30 more]'],
  });
  const wide = Object.fromEntries(Array.from({ length: 9_000 }, (_, at) => [`k${at}`, at]));
  assert.equal(kept(wide), { truncated: true });
  for (const size of [100, 65_000, 65_520, 65_536, 70_000, 50_000_000]) {
    const json = describeBody({ text: 'x'.repeat(size) }) ?? '';
    assert.ok(Buffer.byteLength(json) <= LOGGED_BODY_MAX_BYTES, String(size));
    assert.type((JSON.parse(json) as { text: string }).text, 'string');
  }
  let deep: unknown = 'bottom';
  for (let depth = 0; depth < 5_000; depth += 1) deep = [deep];
  assert.ok((describeBody(deep) ?? '').includes('[too deep]'));
});

test.run();
