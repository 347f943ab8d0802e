// The TLS ladder on real sockets and real handshakes: what each demand makes of every kind of certificate and of every
// way in which STARTTLS can fail; what is never done; and what is noted for the reports. DANE is in ladder-dane.test.ts.
import { DEFAULT_CIPHERS, setDefaultCACertificates } from 'node:tls';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { isEnough, planRungs, sumUp, type Tried } from '../../src/delivery/ladder.ts';
import type { Failure, Session, Target } from '../../src/delivery/session.ts';
import { createTlsPolicies } from '../../src/dns/tls-policy.ts';
import { makeSelfSigned } from '../../src/self-signed.ts';
import { sha256 } from '../support/certificates.ts';
import {
  BROKEN,
  heard,
  MX,
  OLD,
  PAIRS,
  root,
  startLadder,
  word,
  type Ladder,
} from '../support/ladder.ts';
import type { TlsHostOptions } from '../support/tls-host.ts';

const test = suite('ladder');
let ladder: Ladder;
test.before(async () => {
  ladder = await startLadder();
});
test.after.each(() => ladder.clear());
test.after(() => ladder.stop());

test('opportunistic: any certificate will do, and it is said whether it was verified', async () => {
  for (const [name, pair] of Object.entries(PAIRS)) {
    const isVerified = name === 'good' || name === 'wildcard';
    assert.is(
      word(await ladder.reach(await ladder.start(pair))),
      isVerified ? 'verified' : 'unverified',
      name,
    );
  }
  const opened = await ladder.reach(await ladder.start());
  assert.match('cause' in opened ? '' : (opened.tls ?? ''), /^TLSv1\.3 TLS_\w+ verified$/);
  assert.ok(
    ladder.results.every(
      ({ policy, failure }) => policy.type === 'no-policy-found' && failure === null,
    ),
  );
});

test('opportunistic: where TLS cannot be had, the same host in plaintext', async () => {
  for (const [name, options] of Object.entries(BROKEN)) {
    const host = await ladder.start(options);
    assert.is(word(await ladder.reach(host)), 'plaintext', name);
    assert.is(host.sessions.length, name === 'not offered' ? 1 : 2, name);
  }
  assert.equal(
    ladder.results.map(({ failure }) => failure),
    [
      'starttls-not-supported',
      'starttls-not-supported',
      'validation-failure',
      'validation-failure',
    ],
  );
});

test('opportunistic: a host of 2005 gets TLS 1.0, which nobody else does', async () => {
  const rsaLess = { ...PAIRS.selfSigned, ...OLD };
  const opened = await ladder.reach(await ladder.start(rsaLess));
  assert.match('cause' in opened ? opened.message : (opened.tls ?? ''), /^TLSv1 .* unverified$/);
  const required = await ladder.start(rsaLess);
  assert.is(word(await ladder.reach(required, { tls: 'required' })), 'tls_failed');
  ladder.publish('enforce');
  assert.is(
    word(await ladder.reach(await ladder.start({ ...PAIRS.good, ...OLD }))),
    'tls_policy_failed',
  );
});

test('broken STARTTLS does not loop: it is asked for once an hour', async () => {
  const host = await ladder.start({ starttls: 'garbage' });
  for (let number = 0; number < 5; number += 1)
    assert.is(word(await ladder.reach(host)), 'plaintext');
  const asked = (): number => heard(host).filter((line) => line === 'C: STARTTLS').length;
  assert.is(asked(), 1);
  assert.is(host.sessions.length, 6);
  const { now } = Date;
  Date.now = () => now() + 3_600_001;
  try {
    assert.is(word(await ladder.reach(host)), 'plaintext');
  } finally {
    Date.now = now;
  }
  assert.is(asked(), 2);
});

test('a host that is remembered as broken must show TLS all the same where it is demanded', async () => {
  const host = await ladder.start({ starttls: 'garbage' });
  assert.is(word(await ladder.reach(host)), 'plaintext');
  const before = host.sessions.length;
  assert.is(word(await ladder.reach(host, { tls: 'required' })), 'tls_failed');
  ladder.publish('enforce');
  assert.is(word(await ladder.reach(host)), 'tls_policy_failed');
  assert.is(host.sessions.length, before + 2, 'one session each');
});

test('required: any certificate, and never plaintext', async () => {
  for (const [name, pair] of Object.entries(PAIRS)) {
    const opened = await ladder.reach(await ladder.start(pair), { tls: 'required' });
    assert.match(word(opened), /verified$/, name);
  }
  for (const [name, options] of Object.entries(BROKEN)) {
    const host = await ladder.start(options);
    const opened = await ladder.reach(host, { tls: 'required' });
    assert.is('cause' in opened && opened.stage, 'tls', name);
    assert.is(host.sessions.length, 1, name);
    assert.not.ok(heard(host).some((line) => line.startsWith('C: MAIL')));
  }
});

const STS_FAULTS: Readonly<Record<string, string | null>> = {
  good: null,
  wildcard: null,
  expired: 'certificate-expired',
  early: 'certificate-expired',
  wrongName: 'certificate-host-mismatch',
  commonName: 'certificate-host-mismatch',
  selfSigned: 'certificate-not-trusted',
  noMiddle: 'certificate-not-trusted',
};

test('MTA-STS enforce: only a valid certificate for the host, never plaintext', async () => {
  ladder.publish('enforce');
  for (const [name, pair] of Object.entries(PAIRS)) {
    ladder.results.length = 0;
    const host = await ladder.start(pair);
    const opened = await ladder.reach(host);
    const expected = STS_FAULTS[name] ?? null;
    assert.is(word(opened), expected === null ? 'verified' : 'tls_policy_failed', name);
    assert.equal(
      ladder.results.map(({ domain, policy, mxHost, failure }) => [
        domain,
        policy.type,
        mxHost,
        failure,
      ]),
      [['a.test', 'sts', MX, expected]],
      name,
    );
    assert.is(host.sessions.length, 1);
    if ('cause' in opened) {
      assert.is(opened.reply, null);
      assert.match(opened.message, /^mx\.a\.test: its MTA-STS policy asks for verified/);
    }
  }
  for (const [name, options] of Object.entries(BROKEN)) {
    const host = await ladder.start(options);
    const opened = await ladder.reach(host);
    assert.is(word(opened), 'tls_policy_failed', name);
    assert.is('cause' in opened && opened.reply, null, 'its reply is no answer to the mail');
    assert.is(host.sessions.length, 1, `${name}: one session, no second one in plaintext`);
    assert.not.ok(heard(host).some((line) => line.startsWith('C: MAIL')));
  }
});

test('MTA-STS testing: never enforces, and everything is noted', async () => {
  ladder.publish('testing');
  const policyOf = { type: 'sts', mxHosts: [MX] };
  for (const [name, pair] of Object.entries(PAIRS)) {
    ladder.results.length = 0;
    assert.match(word(await ladder.reach(await ladder.start(pair))), /verified$/, name);
    assert.equal(
      ladder.results.map(({ policy: { type, mxHosts }, failure }) => [{ type, mxHosts }, failure]),
      [[policyOf, STS_FAULTS[name] ?? null]],
      name,
    );
  }
  for (const [name, options] of Object.entries(BROKEN)) {
    assert.is(word(await ladder.reach(await ladder.start(options))), 'plaintext', name);
  }
  ladder.publish('testing', 'elsewhere.test');
  ladder.results.length = 0;
  assert.is(word(await ladder.reach(await ladder.start())), 'verified');
  assert.equal(
    ladder.results.map(({ failure, reason }) => [failure, reason]),
    [['validation-failure', 'it is not among the hosts that the MTA-STS policy of a.test names']],
  );
});

test('MTA-STS none is no policy', async () => {
  ladder.publish('none');
  assert.is(word(await ladder.reach(await ladder.start(PAIRS.selfSigned))), 'unverified');
  assert.equal(
    ladder.results.map(({ policy }) => policy.type),
    ['no-policy-found'],
  );
});

test('MTA-STS enforce: a host that the policy does not name is not dialled', async () => {
  ladder.publish('enforce', '*.elsewhere.test');
  const host = await ladder.start();
  const opened = await ladder.reach(host);
  assert.is(word(opened), 'tls_policy_failed');
  assert.is(host.sessions.length, 0);
  assert.is(ladder.results[0]?.failure, 'validation-failure');
});

test('hosts that are ruled out come last, and the sum says which failed how', async () => {
  ladder.publish('enforce');
  const [host, other] = [await ladder.start(PAIRS.expired), await ladder.start()];
  const policies = await ladder.policies().of('a.test', ['mx.stranger.test', MX]);
  const rungs = planRungs(
    [ladder.target(other, { host: 'mx.stranger.test' }), ladder.target(host)],
    policies,
    { ignoresPolicy: false, isReport: false },
  );
  assert.equal(
    rungs.map(({ target }) => target.host),
    [MX, 'mx.stranger.test'],
  );
  const tried: Tried[] = [];
  for (const rung of rungs) {
    tried.push({ target: rung.target, failure: (await ladder.go(rung)) as Failure });
  }
  const sum = sumUp(tried)?.failure;
  assert.is(sum?.cause, 'tls_policy_failed');
  assert.match(
    sum?.message ?? '',
    /^mx\.a\.test: .*out of date.*; mx\.stranger\.test: it is not among the hosts/,
  );
  const dead: Failure = {
    stage: 'connect',
    cause: 'connect_refused',
    reply: null,
    message: 'dead',
  };
  const mixed = sumUp([...tried, { target: ladder.target(host), failure: dead }])?.failure;
  assert.is(mixed?.cause, 'connect_refused');
  assert.match(mixed?.message ?? '', /^dead; mx\.a\.test: /);
  assert.is(sumUp([]), null);
});

test('a policy that our own store does not tell: not dialled, and not reported to the domain', async () => {
  const away = { kind: 'unknown', reason: 'the stored policies cannot be read now' } as const;
  const policies = createTlsPolicies({
    sts: { find: () => Promise.resolve(away) },
    resolver: () => null,
  });
  const host = await ladder.start();
  const wishes = { ignoresPolicy: false, isReport: false };
  const [rung] = planRungs([ladder.target(host)], await policies.of('a.test', [MX]), wishes);
  assert.is(word(await ladder.go(rung!)), 'tls_policy_unknown');
  assert.is(host.sessions.length, 0);
  assert.equal(ladder.results, []);
});

test('a certificate that changes: the next session is judged anew', async () => {
  ladder.publish('enforce');
  const host = await ladder.start(PAIRS.good);
  assert.is(word(await ladder.reach(host)), 'verified');
  host.present(PAIRS.selfSigned);
  assert.is(word(await ladder.reach(host)), 'tls_policy_failed');
  host.present(PAIRS.wildcard);
  assert.is(word(await ladder.reach(host)), 'verified');
});

test('what is said in plaintext behind the 220 is not taken for an answer over TLS', async () => {
  const injected = '250-mx.test\r\n250-SMTPUTF8\r\n250 SIZE 1\r\n250 2.0.0 ok\r\n250 2.0.0 ok\r\n';
  for (const mode of ['enforce', null] as const) {
    ladder.publish(mode);
    const host = await ladder.start({ ...PAIRS.good, injected });
    const opened = await ladder.reach(host);
    if ('cause' in opened) {
      // The bytes may have gone into the handshake, which then fails: safe too where it is enforced.
      assert.is(mode, 'enforce');
      assert.is(opened.cause, 'tls_policy_failed');
      continue;
    }
    assert.is(opened.supportsSmtpUtf8, false);
    const sent = await opened.send({
      mailFrom: 'a@me.test',
      recipients: ['b@a.test'],
      body: [Buffer.from('Subject: x\r\n\r\nx\r\n')],
      sizeBytes: 18,
      onDot: () => undefined,
    });
    assert.is(sent.kind === 'accepted' && sent.reply, '250 2.0.0 taken');
    assert.is(host.taken.length, 1);
  }
});

test('an open session is enough only where it has what is demanded', async () => {
  const open = async (options?: TlsHostOptions, more?: Partial<Target>): Promise<Session> =>
    (await ladder.reach(await ladder.start(options), more)) as Session;
  const secure = await open(PAIRS.good, { tls: 'required' });
  const loose = await open(PAIRS.selfSigned, { tls: 'required' });
  const plain = await open({ starttls: 'none' });
  const old = await open({ ...PAIRS.selfSigned, ...OLD });
  const enough = async (session: Session, more: Partial<Target> = {}): Promise<boolean> =>
    isEnough(session, await ladder.plan({ ...session.target, ...more }));
  const all = async (more: Partial<Target> = {}): Promise<readonly boolean[]> =>
    Promise.all([secure, loose, plain, old].map((session) => enough(session, more)));
  assert.equal(await all({ tls: 'opportunistic' }), [true, true, true, true]);
  assert.equal(await all({ tls: 'required' }), [true, true, false, false]);
  ladder.publish('enforce');
  assert.equal(await all({ tls: 'opportunistic' }), [true, false, false, false]);
  ladder.publish('enforce', 'elsewhere.test');
  assert.equal(await all(), [false, false, false, false]);
  const pinned = Buffer.from(loose.peer?.chain[0] ?? Buffer.alloc(0));
  ladder.publishTlsa(`3 0 1 ${sha256(pinned)}`);
  assert.equal(await all(), [false, true, false, false]);
  assert.is(await enough(secure, { address: '127.0.0.2' }), false);
  assert.is(await enough(secure, { host: 'mx2.a.test' }), false);
  assert.is(
    await enough(loose, { source: '127.0.0.2' }),
    false,
    'the egress has another address now',
  );
  assert.is(await enough(loose, { helloName: 'other.test' }), false);
});

test('a session with what only an opportunistic handshake lets pass is enough for nothing more', async () => {
  const weak = {
    ...PAIRS.good,
    maxVersion: 'TLSv1.2',
    sigalgs: 'ECDSA+SHA1',
    ciphers: `${DEFAULT_CIPHERS}:@SECLEVEL=0`,
  } as const;
  const host = await ladder.start(weak);
  const session = (await ladder.reach(host)) as Session;
  assert.match(session.tls ?? '', / verified$/);
  const required = await ladder.plan(ladder.target(host, { tls: 'required' }));
  assert.is(word(await ladder.go(required)), 'tls_failed');
  assert.is(isEnough(session, required), false);
  ladder.publish('enforce');
  const enforced = await ladder.plan(ladder.target(host));
  assert.is(word(await ladder.go(enforced)), 'tls_policy_failed');
  assert.is(isEnough(session, enforced), false);
});

test('TLS-Required: No ignores what the domain publishes, not what the sender asks for', async () => {
  ladder.publish('enforce', 'elsewhere.test');
  const host = await ladder.start(PAIRS.selfSigned);
  const free = await ladder.plan(ladder.target(host), true);
  assert.is(word(await ladder.go(free)), 'unverified');
  assert.is(ladder.results[0]?.failure, 'validation-failure', 'noted all the same');
  ladder.publishTlsa();
  ladder.dns.zones['a.test'] = 'SERVFAIL';
  assert.is(
    word(
      await ladder.go(
        await ladder.plan(ladder.target(await ladder.start({ starttls: 'none' })), true),
      ),
    ),
    'plaintext',
  );
  const floor = await ladder.plan(
    ladder.target(await ladder.start({ starttls: 'none' }), { tls: 'required' }),
    true,
  );
  const refused = await ladder.go(floor);
  assert.is('cause' in refused && refused.stage, 'tls');
});

test('the floor is never lowered by what the domain publishes', async () => {
  for (const mode of ['none', 'testing', null] as const) {
    ladder.publish(mode);
    const { target } = await ladder.plan(ladder.target(await ladder.start(), { tls: 'required' }));
    assert.equal([target.tls, target.demand.kind], ['required', 'required'], String(mode));
  }
  const rung = await ladder.plan(ladder.target(await ladder.start(), { tls: 'never' }));
  assert.is(rung.target.demand.kind, 'none');
});

test('smarthost: verified by the engine before anything is said, and never plaintext', async () => {
  const relay = { tls: 'required', verify: true } as const;
  for (const [name, pair] of Object.entries(PAIRS)) {
    const host = await ladder.start(pair);
    const opened = await ladder.go(await ladder.plan(ladder.target(host, relay)));
    // Node takes a common name where there is no DNS-ID; a relay is the operator's own choice.
    const isGood = name === 'good' || name === 'wildcard' || name === 'commonName';
    const expected = isGood ? 'verified' : 'tls_failed';
    assert.is(word(opened), expected, name);
    const tls = host.sessions[0]?.transcript.indexOf('TLS') ?? -1;
    if ('cause' in opened && tls !== -1) {
      assert.equal(host.sessions[0]?.transcript.slice(tls + 1), [], name);
    }
    assert.is(host.sessions.length, 1, name);
  }
  for (const [name, options] of Object.entries(BROKEN)) {
    const host = await ladder.start(options);
    const opened = await ladder.reach(host, relay);
    assert.is('cause' in opened && opened.stage, 'tls', name);
    assert.is(host.sessions.length, 1, name);
  }
});

test('smarthost: one that is named by its address', async () => {
  const pair = makeSelfSigned('relay.test', new Date());
  setDefaultCACertificates([root.cert, pair.cert]);
  const host = await ladder.start(pair);
  const byAddress = { host: '127.0.0.1', tls: 'required', verify: true } as const;
  assert.is(word(await ladder.reach(host, byAddress)), 'verified');
  assert.is(word(await ladder.reach(host, { ...byAddress, host: '127.0.0.2' })), 'tls_failed');
  setDefaultCACertificates([root.cert]);
});

test('the name of the host is said in the handshake', async () => {
  const host = await ladder.start();
  await ladder.reach(host);
  assert.is(host.sessions[0]?.servername, MX);
});

test.run();
