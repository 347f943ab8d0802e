// Who asked: as the shipped table says, behind which proxies, and which files are refused.
import { readFileSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readReaders, type Visit } from '../../src/tracking/readers.ts';

const shipped = readReaders(
  JSON.parse(readFileSync(new URL('../../config/tracking.json', import.meta.url), 'utf8')),
);
const visit = (about: Partial<Visit> = {}): Visit => ({
  method: 'GET',
  remoteAddress: '192.0.2.1',
  forwardedFor: null,
  userAgent:
    'Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/140.0 Safari/537.36',
  purpose: null,
  ...about,
});

const test = suite('readers');

test('people, proxies and machines', () => {
  for (const [about, opened, clicked] of [
    [{}, null, null],
    [
      {
        userAgent:
          'Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15 Mobile/15E148',
      },
      null,
      null,
    ],
    [
      {
        userAgent:
          'Mozilla/5.0 (Linux; Android 9; CUBOT X19) AppleWebKit/537.36 Chrome/120.0 Mobile',
      },
      null,
      null,
    ],
    [
      {
        userAgent:
          'Mozilla/5.0 (Windows NT 5.1; rv:11.0) Gecko Firefox/11.0 (via ggpht.com GoogleImageProxy)',
      },
      'proxy',
      'scanner',
    ],
    [
      { userAgent: 'YahooMailProxy; https://help.yahoo.com/kb/yahoo-mail-proxy-SLN28749.html' },
      'proxy',
      'scanner',
    ],
    [{ userAgent: 'Mozilla/5.0' }, 'proxy', 'scanner'],
    [
      { userAgent: 'Mozilla/5.0 (compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)' },
      'scanner',
      'scanner',
    ],
    [{ userAgent: 'python-requests/2.32' }, 'scanner', 'scanner'],
    [{ userAgent: 'BarracudaCentral' }, 'scanner', 'scanner'],
    [{ userAgent: null }, 'scanner', 'scanner'],
    [{ userAgent: ' ' }, 'scanner', 'scanner'],
    [{ method: 'HEAD' }, 'head', 'head'],
    [{ purpose: 'prefetch' }, 'prefetch', 'prefetch'],
    [{ purpose: 'prefetch;anonymous-client-ip' }, 'prefetch', 'prefetch'],
    [{ purpose: 'preview' }, 'prefetch', 'prefetch'],
  ] as const) {
    const made = visit(about);
    assert.equal(
      [shipped.suspectOf('opened', made), shipped.suspectOf('clicked', made)],
      [opened, clicked],
      JSON.stringify(about),
    );
  }
});

test('the client is the nearest address that is no proxy of ours', () => {
  const readers = readReaders({ proxies: ['127.0.0.0/8', '::1', '10.0.0.0/8'] });
  for (const [remoteAddress, forwardedFor, client] of [
    ['192.0.2.1', null, '192.0.2.1'],
    ['192.0.2.1', '198.51.100.1', '192.0.2.1'],
    ['::ffff:127.0.0.1', '198.51.100.1', '198.51.100.1'],
    ['::1', '2001:db8::1', '2001:db8::1'],
    ['127.0.0.1', '203.0.113.9, 198.51.100.1', '198.51.100.1'],
    ['127.0.0.1', '203.0.113.9, 198.51.100.1, 10.1.2.3', '198.51.100.1'],
    ['127.0.0.1', '10.0.0.1', '10.0.0.1'],
    ['127.0.0.1', '198.51.100.1:5678', '198.51.100.1'],
    ['127.0.0.1', '203.0.113.9, [2001:db8::1]:443, 10.1.2.3:80', '2001:db8::1'],
    ['127.0.0.1', '[::ffff:198.51.100.1]', '198.51.100.1'],
    ['127.0.0.1', '....', '127.0.0.1'],
    ['127.0.0.1', 'dead:beef', '127.0.0.1'],
    ['127.0.0.1', 'unknown', '127.0.0.1'],
    ['127.0.0.1', '<script>', '127.0.0.1'],
    ['127.0.0.1', '', '127.0.0.1'],
    ['127.0.0.1', `${'1.1.1.1,'.repeat(10_000)}198.51.100.1`, '198.51.100.1'],
  ] as const) {
    assert.is(
      readers.addressOf(visit({ remoteAddress, forwardedFor })),
      client,
      forwardedFor ?? '',
    );
  }
});

test('networks mark as words do', () => {
  const readers = readReaders({
    image_proxies: { networks: ['192.0.2.0/24'] },
    scanners: { networks: ['2001:db8::/32'] },
  });
  assert.is(readers.suspectOf('opened', visit()), 'proxy');
  assert.is(readers.suspectOf('opened', visit({ remoteAddress: '2001:db8::5' })), 'scanner');
  assert.is(readers.suspectOf('opened', visit({ remoteAddress: '198.51.100.1' })), null);
});

test('a file that says what is not known is refused with its place', () => {
  for (const [file, says] of [
    [[], /^the file: must be an object$/],
    [{ proxy: [] }, /"proxy" is not known/],
    [{ proxies: ['x'] }, /^proxies\[0\]: must be an address or a network/],
    [{ scanners: { words: [] } }, /^scanners: "words" is not known/],
    [{ scanners: { user_agent_words: [''] } }, /^scanners\.user_agent_words\[0\]: must be a text/],
    [{ image_proxies: { user_agents: [1] } }, /^image_proxies\.user_agents\[0\]/],
    [{ scanners: { networks: ['10.0.0.0/33'] } }, /^scanners\.networks\[0\]/],
  ] as const) {
    assert.throws(() => readReaders(file), says);
  }
});

test.run();
