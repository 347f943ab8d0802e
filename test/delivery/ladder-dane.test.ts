// The TLS ladder under DANE, on real sockets, handshakes and DNS packets: what each kind of TLSA record makes of every
// kind of certificate, and what is done when DNSSEC says nothing or something false.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { chainOf, issue, sha256 } from '../support/certificates.ts';
import {
  BROKEN,
  good,
  middle,
  MX,
  PAIRS,
  startLadder,
  word,
  type Ladder,
} from '../support/ladder.ts';

const test = suite('ladder-dane');
let ladder: Ladder;
test.before(async () => {
  ladder = await startLadder();
});
test.after.each(() => ladder.clear());
test.after(() => ladder.stop());

test('DANE-EE: the certificate that is named, whatever its date and name', async () => {
  const old = issue({ names: ['x.test'], from: -9, to: -1 });
  ladder.publishTlsa(`3 1 1 ${sha256(old.spki)}`);
  assert.match(word(await ladder.reach(await ladder.start(chainOf(old)))), /^verified$/);
  assert.equal(
    ladder.results.map(({ domain, policy, failure }) => [domain, policy, failure]),
    [[MX, { type: 'tlsa', strings: [`3 1 1 ${sha256(old.spki)}`], mxHosts: [MX] }, null]],
  );
  ladder.results.length = 0;
  const other = await ladder.start(PAIRS.good);
  const opened = await ladder.reach(other);
  assert.is(word(opened), 'tls_policy_failed');
  assert.match('cause' in opened ? opened.message : '', /its TLSA records ask for/);
  assert.is(ladder.results[0]?.failure, 'validation-failure');
  assert.is(other.sessions.length, 1);
});

test('DANE-TA: the anchor, the name and the date', async () => {
  ladder.publishTlsa(`2 0 1 ${sha256(middle.der)}`);
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.good))), 'verified');
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.expired))), 'tls_policy_failed');
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.wrongName))), 'tls_policy_failed');
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.selfSigned))), 'tls_policy_failed');
});

test('the server is asked for the certificate of the name whose TLSA records these are', async () => {
  const own = issue({ names: ['real.a.test'], issuer: middle });
  ladder.publishTlsa();
  ladder.dns.zones[MX] = { CNAME: 'real.a.test' };
  ladder.dns.zones['real.a.test'] = { A: ['127.0.0.1'] };
  ladder.dns.zones['_25._tcp.real.a.test'] = { TLSA: [`2 0 1 ${sha256(middle.der)}`] };
  const host = await ladder.start(chainOf(own, middle));
  assert.is(word(await ladder.reach(host)), 'verified');
  assert.is(host.sessions[0]?.servername, 'real.a.test');
});

test('DANE never falls back to plaintext', async () => {
  ladder.publishTlsa(`3 1 1 ${sha256(good.spki)}`);
  for (const [name, options] of Object.entries(BROKEN)) {
    const host = await ladder.start(options);
    assert.is(word(await ladder.reach(host)), 'tls_policy_failed', name);
    assert.is(host.sessions.length, 1, name);
  }
});

test('DANE that can be used wins over MTA-STS, and is not rescued by it', async () => {
  const own = issue({ names: [MX] });
  ladder.publishTlsa(`3 1 1 ${sha256(own.spki)}`);
  ladder.publish('enforce', MX, true);
  assert.is(
    word(await ladder.reach(await ladder.start(chainOf(own)))),
    'verified',
    'nobody vouches for it',
  );
  assert.is(
    word(await ladder.reach(await ladder.start(PAIRS.good))),
    'tls_policy_failed',
    'valid for MTA-STS',
  );
  assert.ok(
    ladder.results.some(({ policy, failure }) => policy.type === 'sts' && failure !== null),
  );
});

test('TLSA that cannot be used: TLS, whosever certificate; MTA-STS where there is a policy', async () => {
  ladder.publishTlsa(`1 1 1 ${sha256(good.spki)}`);
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.selfSigned))), 'unverified');
  assert.is(ladder.results[0]?.failure, 'tlsa-invalid');
  assert.is(
    word(await ladder.reach(await ladder.start({ starttls: 'none' }))),
    'tls_policy_failed',
  );
  ladder.publish('enforce', MX, true);
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.selfSigned))), 'tls_policy_failed');
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.good))), 'verified');
});

test('no TLSA, proven: no DANE', async () => {
  ladder.publishTlsa();
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.selfSigned))), 'unverified');
  assert.is(word(await ladder.reach(await ladder.start({ starttls: 'none' }))), 'plaintext');
});

test('what DNSSEC does not validate rules the host out: not dialled, and never plaintext', async () => {
  const host = await ladder.start();
  const cases: Readonly<Record<string, () => void>> = {
    'TLSA bogus': () => (ladder.dns.zones[`_25._tcp.${MX}`] = 'SERVFAIL'),
    'TLSA silent': () => (ladder.dns.zones[`_25._tcp.${MX}`] = 'TIMEOUT'),
    'addresses bogus': () => (ladder.dns.zones[MX] = 'SERVFAIL'),
    'MX bogus': () => (ladder.dns.zones['a.test'] = 'SERVFAIL'),
  };
  for (const [name, damage] of Object.entries(cases)) {
    ladder.publishTlsa();
    damage();
    ladder.results.length = 0;
    assert.is(word(await ladder.reach(host)), 'tls_policy_unknown', name);
    assert.is(ladder.results[0]?.failure, 'dnssec-invalid', name);
  }
  ladder.publishTlsa();
  ladder.dns.zones['a.test'] = { MX: ['10 mx2.a.test'] };
  const stranger = await ladder.reach(host);
  assert.is(word(stranger), 'tls_policy_failed');
  assert.match('cause' in stranger ? stranger.message : '', /DNSSEC does not prove/);
  assert.is(host.sessions.length, 0);
});

test.run();
