// Tokens in addresses and links, and what is written around them, in seeded rounds of support/fuzz.ts: one opens as it was made
// and never with another byte or key, SRS gives back what it was given, tracked html is the html that it was.
import { Buffer } from 'node:buffer';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { createSignedLinks, LINK_PATH, linkKinds } from '../../src/access/signed-link.ts';
import { createPreferenceLinks, PREFERENCE_PATH } from '../../src/audience/preference-links.ts';
import { readUrl } from '../../src/dns/url-guard.ts';
import { parseMailbox } from '../../src/mail/address.ts';
import { mintLoopToken, readLoopToken } from '../../src/mail/loop-token.ts';
import { mintReturnPathLocal, readReturnPathLocal } from '../../src/mail/return-path.ts';
import { mintSrs, readSrs } from '../../src/mail/srs.ts';
import { parsePlaceholders } from '../../src/templates/placeholder.ts';
import { createTrackingTokens, readLink } from '../../src/tracking/tokens.ts';
import { trackHtml } from '../../src/tracking/track-html.ts';
import { clean, fuzz, grow, mutate, pieces, staysLinear, type Dice } from '../support/fuzz.ts';

const key = Buffer.alloc(32, 1);
const other = Buffer.alloc(32, 2);
const now = new Date('2026-11-21T12:00:00Z');
const uuid = (d: Dice): string =>
  d
    .bytes(16)
    .toString('hex')
    .replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
const ALPHABET = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=+./ ';

/** The text with one character that is another one, one more or one less; `same` are spellings of the same. */
function alter(d: Dice, text: string, same: (other: string) => boolean): string {
  for (;;) {
    const at = d.oneIn(4) ? text.length - 1 : d.below(text.length);
    const by = d.oneIn(8)
      ? ''
      : d.oneIn(8)
        ? text[at]! + d.pick([...ALPHABET])
        : d.pick([...ALPHABET]);
    const altered = text.slice(0, at) + by + text.slice(at + 1);
    if (!same(altered)) return altered;
  }
}

test('a return path opens as it was made, in any case, and with no other byte or key', async () => {
  await fuzz('return paths', 1_500, (d, say) => {
    const subject = { emailId: uuid(d), position: d.below(0x1_0000) };
    const local = mintReturnPathLocal({ ...subject, key, keyId: 'k' });
    const forged = alter(d, local, (one) => one.toLowerCase() === local);
    say([local, forged]);
    assert.equal(readReturnPathLocal(local.toUpperCase(), { k: key }), subject);
    assert.is(readReturnPathLocal(forged, { k: key }), null);
    assert.is(readReturnPathLocal(local, { k: other }), null);
    assert.is(readReturnPathLocal(mutate(d, local), { o: key }), null);
  });
});

test('a loop token opens as it was made, and with no other byte or key', async () => {
  await fuzz('loop tokens', 600, (d, say) => {
    const [emailId, target] = [uuid(d), 'a@b.test'];
    const token = mintLoopToken({ emailId, target, keys: [key] });
    const forged = alter(d, token, (one) => one.trim().toLowerCase() === token);
    say([token, forged]);
    const read = readLoopToken(token, [other, key]);
    assert.is(read?.emailId, emailId);
    assert.ok(read?.isFor('A@B.test') === true && !read.isFor('c@b.test'));
    assert.is(readLoopToken(forged, [key]), null);
    assert.is(readLoopToken(token, [other]), null);
  });
});

const SENDER_PIECES = [
  ...pieces(
    'SRS0=¦SRS1=¦srs0+¦HHHHHHHH=¦AB=¦c.test=¦==¦=¦-¦+¦a¦B¦"¦two words¦\\"¦@¦b.test¦ü',
    'bücher.test¦prvs=1=¦.¦"a b"@',
  ),
  'x'.repeat(30),
];

test('SRS gives back the sender that it was given, and nothing to whoever forges', async () => {
  const host = 'send.a.test';
  await fuzz('senders', 1_500, (d, say) => {
    const sender = `${grow(d, SENDER_PIECES, 6)}@${d.pick(['b.test', 'c.b.test', host])}`;
    say(sender);
    const minted = mintSrs({ sender, host, keys: [key], now });
    const parsed = parseMailbox(`<${sender}>`);
    if (minted === null) return;
    assert.ok(parsed.ok && parseMailbox(minted).ok);
    clean(minted);
    const home = readSrs(minted, [other, key], now);
    if (home?.kind === 'srs0') assert.is(home.sender, parsed.mailbox.address);
    else if (home?.kind === 'srs1') {
      // The first forwarder's address, in its own spelling: its mark, and what stood behind it.
      const opaque = /^"?srs0(.*)$/i.exec(home.sender)?.[1] ?? '?';
      assert.ok(minted.includes(opaque.slice(0, opaque.lastIndexOf('@')).replace(/"$/, '')));
    } else assert.unreachable(`${minted} does not come home`);
    assert.is(readSrs(minted, [other], now), null);
    const local = minted.slice(0, minted.lastIndexOf('@'));
    const spelling = (one: string): string => one.toLowerCase().replace(/["\\]/g, '');
    const forged = alter(d, local, (one) => spelling(one) === spelling(local));
    // The mark may be any of three, and the hash is not over it.
    if (/^"?srs[01][=+-]/i.test(forged) && /^.{5}$/s.test(differing(minted, forged))) return;
    say([minted, forged]);
    assert.is(readSrs(forged, [key], now), null);
  });
  await fuzz('forged senders', 1_500, (d, say) => {
    const local = `SRS${d.below(2)}${grow(d, SENDER_PIECES, 12)}`;
    say(local);
    assert.is(readSrs(local, [key], now), null);
    assert.is(readSrs(mutate(d, `"${local}"`), [key], now), null);
  });
  await staysLinear('senders', 15, {
    pieces: SENDER_PIECES,
    read: (text) => [readSrs(text, [key], now), mintSrs({ sender: text, host, keys: [key], now })],
  });
});

/** How much of the beginning is the same but for its last character; empty when they differ elsewhere. */
function differing(minted: string, forged: string): string {
  const [a, b] = [minted.replace(/^"/, ''), forged.replace(/^"/, '')];
  const rest = a.slice(5, a.lastIndexOf('@'));
  return b.slice(5) === rest ? b.slice(0, 5) : '';
}

test('a link of ours opens as it was made, and with no other character', async () => {
  const tracking = createTrackingTokens(key);
  const signed = createSignedLinks({ key, publicUrl: 'https://a.test', now: () => now });
  const chosen = createPreferenceLinks({ key, publicUrl: 'https://a.test' });
  const URLS = pieces('https://b.test/¦?a=b&c=d¦#x¦ü¦%2f¦\\¦ ¦http://¦b.test:80¦@');
  await fuzz('links', 800, (d, say) => {
    const of = { tenantId: uuid(d), emailId: uuid(d) };
    const link = readLink(d.oneIn(2) ? grow(d, URLS) : mutate(d, 'https://b.test/a?b=c#d', URLS));
    if (link !== null) {
      const { location } = tracking.openLink(tracking.link(of, link))!;
      clean(location);
      assert.match(location, /^https?:\/\/[^/]/);
      assert.is(new URL(location).host, new URL(link).host);
    }
    const target = { kind: d.pick(linkKinds), tenantId: of.tenantId, id: of.emailId, partId: null };
    const choices = {
      tenantId: of.tenantId,
      contactId: of.emailId,
      topicId: d.oneIn(2) ? null : uuid(d),
      broadcastId: d.oneIn(2) ? null : uuid(d),
      emailId: d.oneIn(2) ? null : uuid(d),
    };
    const opening: readonly (readonly [string, (token: string) => unknown, unknown])[] = [
      [tracking.pixel(of), tracking.openPixel, of],
      [tracking.link(of, 'https://b.test/'), tracking.openLink, null],
      [signed.sign(target, 60_000).url.split(LINK_PATH)[1]!, signed.open, target],
      [chosen.url(choices).split(PREFERENCE_PATH)[1]!, chosen.open, choices],
    ];
    for (const [token, open, expected] of opening) {
      const forged = alter(d, token, (one) => one === token);
      say([token, forged]);
      assert.ok(open(token) !== null);
      if (expected !== null) assert.equal(open(token), expected);
      assert.is(open(forged), null);
      const mutated = mutate(d, token);
      if (mutated !== token) assert.is(open(mutated), null);
    }
    assert.is(tracking.openLink(tracking.pixel(of)), null);
  });
  await staysLinear('links', 15, {
    pieces: [...URLS, 'a', '.', 'xn--', '-', '/'],
    read: (text) => [readLink(text), tracking.openLink(text), signed.open(text), readUrl(text)],
  });
});

test('tracked html is the same html once its links lead where they did', async () => {
  const tokens = createTrackingTokens(key);
  const PIECES = pieces(
    '<a href="https://b.test/">¦<a href=https://b.test/x>¦<a href=\'http://b.test\'¦</a>',
    '<a ¦href=¦"¦\'¦>¦<!--¦-->¦<script>¦</script>¦&amp;¦&#104;¦</¦<title>¦<b>¦</body>',
    '</html>¦<style>¦<textarea>¦<![CDATA[¦]]>¦<svg>',
  );
  const of = { tenantId: uuid(diceOf(1)), emailId: uuid(diceOf(2)) };
  const plan = {
    opens: false,
    clicks: true,
    base: 'https://t.test',
    keep: 'https://t.test/unsubscribe/',
  };
  await fuzz('tracked html', 800, (d, say) => {
    const html = d.oneIn(3) ? mutate(d, PIECES.join('x'), PIECES) : grow(d, PIECES, 40);
    say(html);
    const tracked = trackHtml(html, plan, { of, tokens });
    const parts = tracked.html.split(/"https:\/\/t\.test\/c\/([A-Za-z0-9_-]+)"/);
    assert.is(parts.length, 1 + 2 * tracked.links);
    let at = 0;
    for (const [index, part] of parts.entries()) {
      if (index % 2 === 1) {
        const { link } = tokens.openLink(part)!;
        clean(link);
        continue;
      }
      const found = html.indexOf(part, at);
      assert.ok(found >= at, `${part} is not in the html`);
      at = found + part.length;
    }
  });
  await staysLinear('tracked html', 20, {
    pieces: PIECES,
    read: (text) => trackHtml(text, { ...plan, opens: true }, { of, tokens }),
  });
  await fuzz('placeholders', 1_000, (d, say) => {
    const text = grow(d, [
      '{{{',
      '}}}',
      '{',
      '}',
      '{{{NAME}}}',
      '{{{A|b}}}',
      '|',
      'NAME',
      ' ',
      '{{{{',
    ]);
    say(text);
    const { segments, placeholders } = parsePlaceholders(text);
    assert.is(segments.filter((one) => typeof one !== 'string').length, placeholders.length);
    let at = 0;
    for (const segment of segments) {
      const piece = typeof segment === 'string' ? segment : segment.key;
      const found = text.indexOf(piece, at);
      assert.ok(found >= at);
      at = found + piece.length;
    }
  });
  await staysLinear('placeholders', 15, {
    pieces: pieces('{{{¦}}}¦{¦}¦|¦NAME¦ ¦\n'),
    read: (text) => parsePlaceholders(text),
  });
});

const diceOf = (byte: number): Dice =>
  ({ bytes: (length: number) => Buffer.alloc(length, byte) }) as Dice;

test.run();
