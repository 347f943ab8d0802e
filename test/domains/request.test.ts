// What a caller may say about a domain, and what is said back where it is wrong.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { checkDomainName, isReservedName, toLabel } from '../../src/domains/name.ts';
import { checkCreate, checkUpdate } from '../../src/domains/request.ts';

const test = suite('domain requests');

function refusalOf(work: () => unknown): Refusal {
  try {
    work();
  } catch (error) {
    if (error instanceof Refusal) return error;
    throw error;
  }
  throw new Error('it was not refused');
}
const pathsOf = (work: () => unknown): string[] => refusalOf(work).issues.map(({ path }) => path);

test('names are taken in any case and script, and kept as A-labels', () => {
  const names = {
    'example.com': 'example.com',
    'Mail.EXAMPLE.com': 'mail.example.com',
    'bücher.example': 'xn--bcher-kva.example',
    'BÜCHER.example': 'xn--bcher-kva.example',
    'xn--bcher-kva.example': 'xn--bcher-kva.example',
    'a.b.c.d.e.f': 'a.b.c.d.e.f',
    ' example.com ': 'example.com',
    '1.example': '1.example',
    '0x7f.example': '0x7f.example',
    'a.0xyz': 'a.0xyz',
  };
  for (const [given, name] of Object.entries(names)) {
    assert.equal(checkDomainName(given), { ok: true, name }, given);
  }
  const longest = `${'a'.repeat(60)}.${'b'.repeat(60)}.${'c'.repeat(60)}.${'d'.repeat(42)}`;
  assert.ok(checkDomainName(longest.slice(0, 224)).ok);
  assert.not(checkDomainName(longest).ok);
});

test('what is no name of a domain is refused with what to fix', () => {
  const wrong: readonly (readonly [string, RegExp])[] = [
    ['', /such as example\.com/],
    ['com', /a full domain name/],
    ['localhost', /a full domain name/],
    ['example.com.', /must not end with a dot/],
    ['192.0.2.1', /not an IP address/],
    ['2001:db8::1', /not an IP address/],
    ['[192.0.2.1]', /not an IP address/],
    ['a@example.com', /leave out the @/],
    ['https://example.com', /is not a domain name/],
    ['exa mple.com', /is not a domain name/],
    ['exa_mple.com', /is not a domain name/],
    ['-a.example', /is not a domain name/],
    ['a..example', /is not a domain name/],
    [`${'a'.repeat(64)}.example`, /is not a domain name/],
    ['1.2.3', /is not a domain name/],
    ['1.0x7f', /must not end with a number/],
    ['0X7F.0x', /must not end with a number/],
    ['mail.example.0xff', /must not end with a number/],
    ['a\r\n.example', /is not a domain name/],
    [`${'a.'.repeat(120)}example`, /at most \d+ octets/],
    ['xn--a.example', /is not a domain name/],
  ];
  for (const [given, says] of wrong) {
    const checked = checkDomainName(given);
    assert.not(checked.ok, given);
    if (checked.ok) continue;
    assert.is(checked.issue.path, 'name');
    assert.match(checked.issue.message, says, given);
    assert.match(checked.issue.message, /^`name` .*\.$/);
  }
});

test('a label is one label', () => {
  assert.is(toLabel('Links'), 'links');
  assert.is(toLabel('a'.repeat(63)), 'a'.repeat(63));
  for (const wrong of ['', 'a.b', '-a', 'a-', 'a_b', 'ü', 'a'.repeat(64), ' a', 'a\n']) {
    assert.is(toLabel(wrong), null, wrong);
  }
});

test('reserved names are those of RFC 2606 and RFC 6761, below them, and no others', () => {
  for (const name of ['a.test', 'a.b.example', 'x.localhost', 'example.com', 'mail.example.org']) {
    assert.ok(isReservedName(name), name);
  }
  for (const name of ['a.com', 'test.com', 'atest', 'myexample.com', 'example.de', 'a.invalid']) {
    assert.not(isReservedName(name), name);
  }
});

test('defaults and both forms of capabilities', () => {
  assert.equal(checkCreate({ name: 'a.test' }), {
    name: 'a.test',
    region: 'us-east-1',
    returnPathLabel: 'send',
    trackingSubdomain: null,
    openTracking: false,
    clickTracking: false,
    tls: 'opportunistic',
    inboundDmarc: 'reject',
    mtaSts: 'off',
    sending: true,
    receiving: false,
  });
  const both = checkCreate({ name: 'a.test', capabilities: { receiving: 'enabled' } });
  assert.equal([both.sending, both.receiving], [true, true]);
  const capabilities = [
    { name: 'sending', enabled: false },
    { name: 'receiving', enabled: true },
  ];
  const one = checkCreate({ name: 'a.test', capabilities });
  assert.equal([one.sending, one.receiving], [false, true]);
  assert.equal(checkUpdate({ capabilities }), { sending: false, receiving: true });
  assert.equal(checkUpdate({ capabilities: { sending: 'disabled' } }), { sending: false });
  assert.equal(checkUpdate({}), {});
  assert.equal(checkUpdate({ tracking_subdomain: null }), { trackingSubdomain: null });
});

test('every issue is named; a wrong region alone has a code of its own', () => {
  const region = refusalOf(() => checkCreate({ name: 'a.test', region: 'mars-1' }));
  assert.is(region.code, 'invalid_region');
  assert.is(region.status, 422);
  assert.equal(
    pathsOf(() =>
      checkCreate({
        name: 'a',
        region: 'mars-1',
        custom_return_path: 'a.b',
        tracking_subdomain: '-',
        capabilities: [{ name: 'flying', enabled: true }],
      }),
    ),
    ['name', 'region', 'custom_return_path', 'tracking_subdomain', 'capabilities.0.name'],
  );
  assert.equal(
    pathsOf(() => checkCreate({ name: 'a.test', capabilities: { sending: 'disabled' } })),
    ['capabilities'],
  );
  const twice = [
    { name: 'sending', enabled: true },
    { name: 'sending', enabled: false },
  ];
  assert.equal(
    pathsOf(() => checkUpdate({ capabilities: twice })),
    ['capabilities.1.name'],
  );
  assert.equal(
    pathsOf(() => checkCreate({ name: 'a.test', tracking_subdomain: 'send' })),
    ['tracking_subdomain'],
  );
  assert.equal(
    pathsOf(() => checkCreate({ name: 'a.test', custom_return_path: 'links' })),
    ['custom_return_path'],
  );
});

test.run();
