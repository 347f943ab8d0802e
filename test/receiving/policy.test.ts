// config/receiving.json: what ships, what an operator may say, and what is refused with its key.
import { readFileSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readReceivingPolicy } from '../../src/receiving/policy.ts';

const test = suite('receiving policy');

test('what ships is what an empty file says', () => {
  const shipped: unknown = JSON.parse(
    readFileSync(new URL('../../config/receiving.json', import.meta.url), 'utf8'),
  );
  const { isProxy, ...policy } = readReceivingPolicy(shipped);
  const { isProxy: isProxyToo, ...empty } = readReceivingPolicy({});
  assert.equal(policy, empty);
  assert.is(isProxy('127.0.0.1') || isProxyToo('127.0.0.1'), false);
  assert.equal(policy, {
    connections: { max: 200, perClient: 20, newPerMinute: 120 },
    dnsbl: [],
    recipientsMax: 100,
    bareNewlines: 'reject',
    lineBytesMax: 8_192,
    receivedMax: 100,
    greylisting: { enabled: false, delayMs: 60_000, forgetAfterMs: 36 * 86_400_000 },
    trustedArcSealers: [],
    sealForwards: false,
  });
});

test('proxies are addresses and networks', () => {
  const { isProxy } = readReceivingPolicy({
    proxy_from: ['192.0.2.1', '10.0.0.0/8', '2001:db8::/32', 'fd00::1'],
  });
  for (const address of ['192.0.2.1', '10.255.0.1', '2001:db8:1::', 'fd00::1']) {
    assert.ok(isProxy(address), address);
  }
  for (const address of ['192.0.2.2', '11.0.0.1', '2001:db9::', 'fd00::2', '', 'x']) {
    assert.not.ok(isProxy(address), address);
  }
});

test('names are compared in A-labels', () => {
  const { trustedArcSealers, dnsbl } = readReceivingPolicy({
    trusted_arc_sealers: ['Bücher.example'],
    dnsbl: ['Zen.List.test'],
  });
  assert.equal([...trustedArcSealers, ...dnsbl], ['xn--bcher-kva.example', 'zen.list.test']);
});

test('whatever is not known, or out of bounds, is refused with its key', () => {
  const cases: readonly (readonly [file: unknown, words: RegExp])[] = [
    [[], /^the file: must be an object$/],
    [{ conections: {} }, /^the file: "conections" is not known; it may hold connections, /],
    [{ connections: { most: 1 } }, /^connections: "most" is not known/],
    [{ connections: { max: 0 } }, /^connections\.max: must be a whole number from 1 to 10000$/],
    [{ connections: { per_client: '5' } }, /^connections\.per_client: must be a whole number/],
    [{ connections: { new_per_minute: 1.5 } }, /^connections\.new_per_minute: /],
    [{ recipients_max: 99 }, /^recipients_max: .* from 100 /],
    [{ line_bytes_max: 997 }, /^line_bytes_max: .* from 998 /],
    [{ received_max: 29 }, /^received_max: .* from 30 /],
    [{ bare_newlines: 'keep' }, /^bare_newlines: must be one of reject, normalize$/],
    [{ proxy_from: '10.0.0.1' }, /^proxy_from: must be a list$/],
    [{ proxy_from: ['10.0.0.0/33'] }, /^proxy_from\[0\]: must be an address or a network/],
    [{ proxy_from: ['10.0.0.1', 'lb.test'] }, /^proxy_from\[1\]: /],
    [{ proxy_from: ['10.0.0.0/8/8'] }, /^proxy_from\[0\]: /],
    [{ proxy_from: ['10.0.0.0/'] }, /^proxy_from\[0\]: /],
    [{ dnsbl: ['list'] }, /^dnsbl\[0\]: must be a domain$/],
    [{ dnsbl: Array.from({ length: 9 }, () => 'a.test') }, /^dnsbl: has more than 8 entries$/],
    [{ greylisting: { enabled: 1 } }, /^greylisting\.enabled: must be true or false$/],
    [{ greylisting: { delay: 60 } }, /^greylisting\.delay: must be a duration up to `1h`/],
    [{ greylisting: { delay: '2h' } }, /^greylisting\.delay: /],
    [{ greylisting: { forget_after: '400d' } }, /^greylisting\.forget_after: .*`366d`/],
    [{ trusted_arc_sealers: [7] }, /^trusted_arc_sealers\[0\]: must be a domain$/],
    [{ seal_forwards: 'yes' }, /^seal_forwards: must be true or false$/],
  ];
  for (const [file, words] of cases) assert.throws(() => readReceivingPolicy(file), words);
});

test.run();
