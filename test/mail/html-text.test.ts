// The text made from HTML.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import {
  htmlTagsMax,
  indentDepthMax,
  textCharsMax,
  textFromHtml,
} from '../../src/mail/html-text.ts';

test('text from HTML: links kept, images and hidden parts dropped, lines readable', () => {
  const html =
    '<html><head><title>T</title><style>p{}</style></head><body><div id="__react-email-preview">pre</div>' +
    '<h1>Hello Ü</h1><p>Go <a href="https://x.example/a?b=c&amp;d">here</a> or ' +
    '<a href="https://x.example">https://x.example</a>.</p><img src="x.png" alt="no">' +
    '<ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>' +
    '<script>x()</script></body></html>';
  assert.is(
    textFromHtml(html),
    'Hello Ü\n\nGo here <https://x.example/a?b=c&d> or https://x.example.\n\n * one\n * two\n\na b\nc d',
  );
  assert.is(textFromHtml(''), '');
  assert.is(textFromHtml('<img src=x>'), '');
  assert.is(textFromHtml('just text'), 'just text');
  assert.is(textFromHtml('a\ud800'), 'a\ufffd');
  // Quotes and lists in each other are indented to a limit; tags are read to a limit.
  assert.is(textFromHtml(`${'<blockquote>'.repeat(20)}x`), `${'> '.repeat(indentDepthMax)}x`);
  assert.is(textFromHtml('<b>x</b>'.repeat(20_000)), `${'x'.repeat(htmlTagsMax / 2)}\n…`);
});

test('text from HTML: any HTML comes back, within limits', () => {
  const megabyte = (part: string, end = ''): string =>
    part.repeat(Math.ceil(1_000_000 / part.length)) + end;
  for (const html of [
    megabyte('<div>', 'x'),
    `<body>${megabyte('<table><tr><td>', 'x')}`,
    megabyte('<p>'),
    megabyte('<ul><li>', 'x'),
    `${'<b>'.repeat(10_000)}${megabyte('</i>')}`,
    `${'<blockquote>'.repeat(190)}<pre>${megabyte('a\n')}`,
    `${'<ol><li>'.repeat(90)}${megabyte('a<br>')}`,
    megabyte('<'),
    megabyte('<a '),
    megabyte('&'),
    megabyte('<!--'),
    megabyte('word '),
    `<a href="${'x'.repeat(1_000_000)}">a</a>`,
    megabyte(' ', 'x'),
  ]) {
    const text = textFromHtml(html);
    assert.ok(text.length <= textCharsMax + 2, `${html.slice(0, 20)}: ${text.length}`);
    assert.ok(text.endsWith('…'), html.slice(0, 20));
  }
});

test('numbers that no numeral writes are decimal', () => {
  const list = (start: string, type = 'i') =>
    textFromHtml(`<ol type="${type}" start="${start}"><li>one</li><li>two</li></ol>`);
  assert.is(list('4'), ' iv. one\n v.  two');
  for (const start of ['10000', '3999', '0', '-7']) {
    for (const type of ['i', 'I', 'a', 'A']) {
      assert.match(
        list(start, type),
        new RegExp(`^ ${start}\\. +one\\n ${Number(start) + 1}\\. +two$`),
      );
    }
  }
  for (const start of ['1e300', 'Infinity', 'x', '1.5']) assert.match(list(start), /one[^]*two/);
});

test.run();
