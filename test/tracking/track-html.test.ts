// Tracked html: which links lead through us, that everything else stays as it was, and that hostile html costs no time.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { simpleParser } from 'mailparser';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createTrackingTokens } from '../../src/tracking/tokens.ts';
import {
  TRACKED_HTML_MAX_CHARS,
  TRACKED_LINKS_MAX,
  TRACKED_URL_MAX_CHARS,
  trackHtml,
  type TrackingPlan,
} from '../../src/tracking/track-html.ts';
import { createHtmlTracker } from '../../src/tracking/tracker.ts';

const tokens = createTrackingTokens(Buffer.alloc(32, 'k'));
const of = {
  tenantId: '018f0000-0000-7000-8000-000000000001',
  emailId: '018f0000-0000-7000-8000-000000000002',
};
const base = 'https://links.example.com';
const clicks: TrackingPlan = {
  opens: false,
  clicks: true,
  base,
  keep: 'https://mail.example.com/unsubscribe/',
};
const opens: TrackingPlan = { ...clicks, opens: true, clicks: false };
const both: TrackingPlan = { ...clicks, opens: true };
const track = (html: string, plan = clicks) => trackHtml(html, plan, { of, tokens });

const OURS = /"https:\/\/links\.example\.com\/c\/([A-Za-z0-9_-]+)"/g;
const IMAGE = /<img src="https:\/\/links\.example\.com\/o\/([A-Za-z0-9_-]+)\.gif" alt=""[^>]*>/g;
/** Where its tracked links lead, in order. */
const linksIn = (html: string): (string | null)[] =>
  [...html.matchAll(OURS)].map(([, token]) => tokens.openLink(token!)?.link ?? null);

const test = suite('tracked html');

test('absolute links of a and area lead through us', () => {
  for (const [html, link] of [
    ['<a href="https://x.example/">', 'https://x.example/'],
    ["<a href='http://x.example/a'>", 'http://x.example/a'],
    ['<a href=http://x.example/a>', 'http://x.example/a'],
    ['<a href=http://x.example/a/>', 'http://x.example/a/'],
    ['<A CLASS=b HREF="HTTPS://X.example">', 'HTTPS://X.example'],
    ['<map><area shape="rect" href="https://x.example/m"/></map>', 'https://x.example/m'],
    ['<a\n href\t=\n "https://x.example/s"\n>', 'https://x.example/s'],
    ['<a/href="https://x.example/">', 'https://x.example/'],
    ['<a href="  https://x.example/\n?a=1\tb ">', 'https://x.example/?a=1b'],
    [
      '<a href="https://x.example/?a=1&amp;b=2&c=3&copy=4">',
      'https://x.example/?a=1&b=2&c=3&copy=4',
    ],
    ['<a href="https://x.example/?q=&quot;&#x2F;&#47;">', 'https://x.example/?q="//'],
    ['<a href="&#104;ttps://x.example/">', 'https://x.example/'],
    ["<a href='https://x.example/?q=\"&apos;'>", 'https://x.example/?q="\''],
    ['<a href="https://täst.example/ü?ö#ä">', 'https://täst.example/ü?ö#ä'],
    ['<a href="https://x.example/a b">', 'https://x.example/a b'],
    // No white space to a browser: it is part of where the link leads.
    ['<a href=" https://x.example/?q=a&nbsp;">', 'https://x.example/?q=a\u00a0'],
    ['<a href="\f https://x.example/\u3000 ">', 'https://x.example/\u3000'],
    [`<a href="https://${'y'.repeat(255)}/">`, `https://${'y'.repeat(255)}/`],
    ['<a href="https://x.example/#here">', 'https://x.example/#here'],
    ['<a title=">" href="https://x.example/">', 'https://x.example/'],
    ['<a href="https://x.example/1" href="https://x.example/2">', 'https://x.example/1'],
    [
      '<!--[if mso]><a href="https://no.example/"><![endif]--><a href="https://x.example/">',
      'https://x.example/',
    ],
    ['<![if !mso]><a href="https://x.example/"><![endif]>', 'https://x.example/'],
    ['<!--><a href="https://x.example/">', 'https://x.example/'],
    [
      '<title><a href="https://no.example/"></title><a href="https://x.example/">',
      'https://x.example/',
    ],
    ['<style>a{}</style><a href="https://x.example/">', 'https://x.example/'],
    ['a < b <a href="https://x.example/">', 'https://x.example/'],
  ] as const) {
    const made = track(html);
    assert.equal([linksIn(made.html), made.links], [[link], 1], html);
  }
});

test('the rest stays as it is', () => {
  for (const html of [
    '',
    'plain',
    '<a>',
    '<a href>',
    '<a href="">',
    '<a href="mailto:a@x.example">',
    '<a href="tel:+4912345">',
    '<a href="sms:+4912345">',
    '<a href="#top">',
    '<a href="cid:part1@x.example">',
    '<a href="javascript:location=\'https://x.example\'">',
    '<a href="data:text/html,https://x.example">',
    '<a href="/relative">',
    '<a href="//x.example/">',
    '<a href="https:x.example">',
    '<a href="https://">',
    '<a href="https:///x.example">',
    '<a href="https://?x">',
    '<a href="https://x y/">',
    '<a href="https://[::1">',
    '<a href="https://x.example:99999/">',
    '<a href="https://x.example/&#1;">',
    '<a href="https://x.example/\u0007">',
    `<a href="https://x.example/${'y'.repeat(2_000)}">`,
    '<a href="\u00a0https://x.example/">',
    `<a href="https://${'y'.repeat(256)}/">`,
    // Looked at by a URL parser, a megabyte of these would hold up everybody for seconds.
    `<a href="https://${String.fromCodePoint(...Array.from({ length: 1_900 }, (_, at) => 0x4e00 + at))}.example/">`,
    '<a href="https://mail.example.com/unsubscribe/token">',
    '<a href="https://mail.example.com/unsubscribe/token?a=1&amp;b">',
    '<a data-mailstead-no-track href="https://x.example/">',
    '<a href="https://x.example/" DATA-mailstead-no-track="true">',
    '<a data-href="https://x.example/">',
    '<link href="https://x.example/"><img src="https://x.example/"><form action="https://x.example/">',
    '<abbr href="https://x.example/">',
    '<!-- <a href="https://x.example/"> -->',
    '<!-- <a href="https://x.example/">',
    '<script>"<a href=https://x.example/>"</script>',
    '<style><a href="https://x.example/"></style>',
    '<textarea><a href="https://x.example/"></textarea>',
    '<a href="https://x.example/"',
    '<a href="https://x.example/',
    '<a href="https://x.example/ onclick=x>',
    '</a href="https://x.example/">',
    '&lt;a href="https://x.example/"&gt;',
  ]) {
    assert.equal(track(html), { html, opens: false, links: 0, skipped: null }, html);
  }
});

test('no link gets longer than programs follow', () => {
  const made = (chars: number) => track(`<a href="https://x.example/${'y'.repeat(chars)}">`);
  const longest = made(1_449);
  assert.is(longest.links, 1);
  assert.is(/"(.*)"/.exec(longest.html)?.[1]?.length, TRACKED_URL_MAX_CHARS);
  assert.is(made(1_450).links, 0);
  assert.match(made(1_450).html, /"https:\/\/x\.example\/y+"/);
});

test('the same link has the same token, and what it leads to is a Location', () => {
  const { html } = track(
    '<a href="https://x.example/?a=1&amp;b=ü"><a href=\'https://x.example/?a=1&b=ü\'>',
  );
  const [first, second] = [...html.matchAll(OURS)].map(([, token]) => token!);
  assert.is(first, second);
  assert.equal(tokens.openLink(first!), {
    ...of,
    link: 'https://x.example/?a=1&b=ü',
    location: 'https://x.example/?a=1&b=%C3%BC',
  });
});

test('the pixel stands at the end of the body', () => {
  for (const [html, before] of [
    ['<html><body><p>x</p></body></html>', '<html><body><p>x</p>'],
    ['<body>x</BODY >y', '<body>x'],
    ['<body>x</body><!-- </body> -->', '<body>x'],
    ['a</body>b</body>c', 'a</body>b'],
    ['<p>x</p>', '<p>x</p>'],
    ['', ''],
    ['x <', 'x <'],
    ['x &am', 'x &am'],
  ] as const) {
    const made = track(html, opens);
    const [image] = [...made.html.matchAll(IMAGE)];
    assert.is(image?.index, before.length, html);
    assert.equal(tokens.openPixel(image?.[1] ?? ''), of);
    assert.is(made.html.replace(IMAGE, ''), html);
    assert.ok(made.opens);
  }
});

test('where it would be no image there is none', () => {
  for (const html of ['x<!-- y', '<script>x', '<textarea>x', '<title>x', '<a href="', '<a', '</']) {
    assert.equal(track(html, opens), { html, opens: false, links: 0, skipped: null }, html);
  }
});

test('a base is written as an attribute needs it', () => {
  const odd = { ...both, base: 'https://x.example/a&b"c' };
  assert.match(
    track('<a href=http://y.example>', odd).html,
    /^<a href="https:\/\/x\.example\/a&amp;b&quot;c\/c\//,
  );
});

test('a verified host takes the place of the public one, at its port and path', () => {
  const tracker = createHtmlTracker({ tokens, publicUrl: 'https://mail.example.com:8443/post' });
  const plan = (host: string | null, opensToo = true) =>
    tracker.plan({ opens: opensToo, clicks: false, host })?.base;
  assert.is(plan('links.sender.example'), 'https://links.sender.example:8443/post');
  assert.is(plan(null), 'https://mail.example.com:8443/post');
  assert.is(plan('links.sender.example', false), undefined);
});

test('html that is too large, or has too many links, goes out as it is and says so', () => {
  const large = `<a href="https://x.example/">${'x'.repeat(TRACKED_HTML_MAX_CHARS)}`;
  assert.is(track(large, both).html, large);
  assert.match(track(large, both).skipped ?? '', /more than 2097152 characters/);
  const link = '<a href=http://x.example>';
  const full = track(link.repeat(TRACKED_LINKS_MAX), both);
  assert.equal([full.links, full.skipped], [TRACKED_LINKS_MAX, null]);
  const many = link.repeat(TRACKED_LINKS_MAX + 1);
  assert.is(track(many, both).html, many);
  assert.match(track(many, both).skipped ?? '', /more than 2000 links/);
});

/** Walks both texts in step: what is not one of our links or the pixel is the original, and each link took one value's place. */
function assertElsewhereSame(original: string, tracked: string, name: string): void {
  let at = 0;
  const rest = tracked.replace(IMAGE, '');
  let from = 0;
  const same = (text: string): void => {
    assert.ok(
      original.startsWith(text, at),
      `${name} at ${at}: ${JSON.stringify(text.slice(0, 80))}`,
    );
    at += text.length;
  };
  for (const match of rest.matchAll(OURS)) {
    same(rest.slice(from, match.index));
    from = match.index + match[0].length;
    const value = /"[^"]*"|'[^']*'|[^\t\n\f\r >]+/y;
    value.lastIndex = at;
    at += value.exec(original)?.[0].length ?? Number.NaN;
  }
  same(rest.slice(from));
  assert.is(at, original.length, name);
}

test('random html of the worst kind: what is not a link is the same, byte by byte', () => {
  const parts = [
    '<a ',
    '<a href=',
    '"',
    "'",
    '>',
    '<',
    '/',
    '=',
    ' ',
    'href',
    'http://x.example/',
    '&amp;',
    '&#x',
    '<!--',
    '-->',
    '<script>',
    '</script>',
    '</body>',
    '<![CDATA[',
    ']]>',
    '<?',
    'é',
    '\n',
    'data-mailstead-no-track',
    '&',
    ';',
    '<area href="https://y.example/?a&b">',
    '</',
    '<title>',
    '</title>',
  ];
  let seed = 42;
  const random = (below: number): number => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
    return (seed >>> 8) % below;
  };
  let links = 0;
  for (let round = 0; round < 20_000; round++) {
    const html = Array.from({ length: 1 + random(14) }, () => parts[random(parts.length)]).join('');
    const made = track(html, both);
    links += made.links;
    assert.is([...made.html.matchAll(OURS)].length, made.links, html);
    assert.not(linksIn(made.html).includes(null), html);
    assert.is([...made.html.matchAll(IMAGE)].length, made.opens ? 1 : 0, html);
    assertElsewhereSame(html, made.html, html);
    // What was written is read as values again.
    assert.is(track(made.html).links, made.links, html);
  }
  assert.ok(links > 1_000, String(links));
});

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

test('html of real messages: links are replaced, nothing else', async () => {
  const files = existsSync(corpora)
    ? readdirSync(corpora)
        .filter((name) => name.startsWith('mime-'))
        .flatMap((name) =>
          readdirSync(join(corpora, name), { recursive: true, withFileTypes: true })
            .filter((entry) => entry.isFile() && /\.(?:raw|eml|txt|msg)$/.test(entry.name))
            .map((entry) => join(entry.parentPath, entry.name)),
        )
    : [];
  let found = 0;
  let links = 0;
  for (const file of files) {
    const raw = readFileSync(file);
    if (raw.length > 1024 * 1024) continue;
    const parsed = await simpleParser(raw, { skipImageLinks: true }).catch(() => null);
    const html = parsed === null || parsed.html === false ? null : parsed.html;
    if (html === null || html === undefined) continue;
    found += 1;
    const made = track(html, both);
    links += made.links;
    assert.is(made.skipped, null, file);
    assertElsewhereSame(html, made.html, file);
  }
  if (existsSync(corpora)) assert.ok(found > 20 && links > 20, `${found} messages, ${links} links`);
});

test('hostile html of the largest size is linear', () => {
  const fill = (piece: string): string =>
    piece.repeat(Math.floor(TRACKED_HTML_MAX_CHARS / piece.length));
  for (const piece of [
    '<',
    '<a ',
    '<a href="&',
    '<!--',
    '</body>',
    '</',
    ' ',
    '<a href=x ',
    '<title>',
    '&amp',
    "<a href='",
    '<a href=" ',
    '<a href',
  ]) {
    const html = fill(piece);
    const made = track(html, both);
    assert.is(made.html.length >= html.length, true, piece);
  }
  const wide = `<a href="${fill(' ').slice(20)}">`;
  assert.is(track(wide).html, wide);
});

test.run();
