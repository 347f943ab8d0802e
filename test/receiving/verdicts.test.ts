// What the checks at the door come to: SPF, DKIM, DMARC and trusted seals together, what the reply and the field say,
// and that nothing is held against a message that only the DNS kept from being proven.
import { generateKeyPairSync, type KeyObject } from 'node:crypto';
import { sealMessage } from 'mailauth/lib/arc/index.js';
import { dkimSign } from 'mailauth/lib/dkim/sign.js';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { generateKeyPair, publicKeyRecord, signMessage } from '../../src/mail/dkim.ts';
import { dmarcRefusal } from '../../src/receiving/verdicts.ts';
import { withoutNames } from '../../src/receiving/verdicts-questions.ts';
import type { DnsZones } from '../support/dns.ts';
import { HOSTNAME, letter, lines, startVerifying, type Verifying } from '../support/verifier.ts';

const ed25519 = await generateKeyPair('ed25519-sha256');
const rsa = await generateKeyPair('rsa-sha256');
const KEY = { TXT: [publicKeyRecord(ed25519.publicKey)] };

const zones = (): DnsZones => ({
  'spf.test': { TXT: ['v=spf1 ip4:192.0.2.0/24 -all'] },
  'bank.test': { A: ['192.0.2.9'], TXT: ['v=spf1 -all'] },
  '_dmarc.bank.test': { TXT: ['v=DMARC1; p=reject'] },
  's._domainkey.bank.test': KEY,
  's._domainkey.mail.bank.test': KEY,
  's._domainkey.other.test': KEY,
  '_dmarc.shop.test': { TXT: ['v=DMARC1; p=quarantine'] },
  '_dmarc.open.test': { TXT: ['v=DMARC1; p=none'] },
  '_dmarc.strict.test': { TXT: ['v=DMARC1; p=reject; adkim=s; aspf=s'] },
  's._domainkey.mail.strict.test': KEY,
  '_dmarc.testing.test': { TXT: ['v=DMARC1; p=reject; t=y'] },
  's._domainkey.sealer.test': { TXT: [publicKeyRecord(rsa.publicKey)] },
  's._domainkey.second.test': { TXT: [publicKeyRecord(rsa.publicKey)] },
});

const it = suite<{ at: Verifying }>('verdicts');
it.before.each(async (context) => {
  context.at = await startVerifying(zones());
});
it.after.each(({ at }) => at.stop());

const sign = async (message: string, domain: string): Promise<string> => {
  const key = {
    domain,
    selector: 's',
    algorithm: 'ed25519-sha256',
    privateKey: ed25519.privateKey,
  };
  const signed = await signMessage({
    message: Buffer.from(message),
    keys: [{ ...key, algorithm: 'ed25519-sha256' }],
    signedAt: new Date(),
  });
  return `${signed.toString()}${message}`;
};

it('a message that everything speaks for', async ({ at }) => {
  const message = await sign(letter('Ann <ann@bank.test>'), 'bank.test');
  const { authentication, field, raw } = await at.verify(message, { mailFrom: 'ann@spf.test' });
  assert.equal(authentication, {
    spf: { result: 'pass', domain: 'spf.test', reason: null },
    dkim: [{ result: 'pass', domain: 'bank.test', selector: 's', aligned: true, reason: null }],
    dmarc: {
      result: 'pass',
      domain: 'bank.test',
      policy: 'reject',
      aligned: { spf: false, dkim: true },
      reason: null,
    },
    arc: { result: 'none', sealer: null, instances: 0 },
    verdict: 'accepted',
  });
  assert.is(raw.toString(), message);
  const start = /b=([^;\s]{8})/.exec(message)?.[1] ?? '';
  assert.is(
    field.replace(start, 'START').replace('"START"', 'START'),
    lines(
      `Authentication-Results: ${HOSTNAME};`,
      '\tspf=pass smtp.mailfrom=spf.test;',
      '\tdkim=pass header.d=bank.test header.s=s header.a=ed25519-sha256',
      '\theader.b=START;',
      '\tdmarc=pass header.from=bank.test policy.dmarc=reject;',
      '\tarc=none smtp.remote-ip=192.0.2.1',
    ),
  );
  assert.is(dmarcRefusal(authentication, 'reject'), null);
  assert.equal(at.logged, []);
});

it('the policy of the author decides: reject is refused or tagged, all others are taken', async ({
  at,
}) => {
  const table = [
    ['bank.test', 'reject', 'tagged'],
    ['deep.below.bank.test', 'reject', 'tagged'],
    ['shop.test', 'quarantine', 'accepted'],
    ['open.test', 'none', 'accepted'],
    ['testing.test', 'quarantine', 'accepted'],
  ] as const;
  for (const [domain, policy, verdict] of table) {
    const { authentication } = await at.verify(letter(`x@${domain}`), { mailFrom: 'x@spf.test' });
    assert.is(authentication.spf.result, 'pass');
    assert.equal(
      [authentication.dmarc.result, authentication.dmarc.policy, authentication.verdict],
      ['fail', policy, verdict],
      domain,
    );
    const refusal = dmarcRefusal(authentication, 'reject');
    assert.is(refusal?.code ?? null, verdict === 'tagged' ? 550 : null);
    assert.is(dmarcRefusal(authentication, 'tag'), null);
    if (refusal !== null) {
      assert.match(refusal.text, new RegExp(`^5\\.7\\.26 .*\\b${domain}\\b`));
      assert.ok(refusal.text.length < 500);
    }
  }
  const none = await at.verify(letter('x@nothing.test'));
  assert.equal(none.authentication.dmarc, {
    result: 'none',
    domain: 'nothing.test',
    policy: null,
    aligned: { spf: false, dkim: false },
    reason: null,
  });
  assert.equal(none.authentication.dkim, []);
  assert.match(none.field, /\tdkim=none;\r\n/);
});

it('alignment, relaxed and strict', async ({ at }) => {
  const table = [
    ['bank.test', 'mail.bank.test', true],
    ['bank.test', 'other.test', false],
    ['strict.test', 'mail.strict.test', false],
    ['mail.strict.test', 'mail.strict.test', true],
  ] as const;
  for (const [author, domain, aligned] of table) {
    const { authentication } = await at.verify(await sign(letter(`x@${author}`), domain));
    assert.equal(
      authentication.dkim.map((one) => [one.result, one.aligned]),
      [['pass', aligned]],
      `${domain} for ${author}`,
    );
    assert.is(authentication.dmarc.result, aligned ? 'pass' : 'fail');
    assert.is(authentication.dmarc.aligned.dkim, aligned);
  }
  // A signature of the author's that does not verify is still of the author.
  const broken = (await sign(letter('x@bank.test'), 'mail.bank.test')).replace('Hello', 'Hallo');
  const { authentication } = await at.verify(broken);
  assert.equal(authentication.dkim, [
    {
      result: 'fail',
      domain: 'mail.bank.test',
      selector: 's',
      aligned: true,
      reason: 'body hash did not verify',
    },
  ]);
  assert.is(authentication.verdict, 'tagged');
});

it('the null sender has its HELO name checked', async ({ at }) => {
  const { authentication, field } = await at.verify(letter('x@spf.test'), { helo: 'spf.test' });
  assert.equal(authentication.spf, { result: 'pass', domain: 'spf.test', reason: null });
  assert.match(field, /spf=pass smtp\.helo=spf\.test;/);
  for (const helo of ['', '[192.0.2.1]', 'x y', 'ü', '\0', 'a'.repeat(500)]) {
    const odd = await at.verify(letter('x@spf.test'), { helo });
    assert.not.equal(odd.authentication.spf.result, 'pass');
  }
});

it('SPF: ten lookups, two void ones, and addresses of IPv6', async ({ at }) => {
  const many = Array.from({ length: 11 }, (_, index) => `include:${index}.many.test`).join(' ');
  at.dns.zones['many.test'] = { TXT: [`v=spf1 ${many} +all`] };
  for (let index = 0; index < 11; index += 1) {
    at.dns.zones[`${index}.many.test`] = { TXT: ['v=spf1 ?all'] };
  }
  at.dns.zones['ten.test'] = { TXT: [`v=spf1 ${many.split(' ').slice(1).join(' ')} +all`] };
  at.dns.zones['void.test'] = { TXT: ['v=spf1 a:1.void.test a:2.void.test a:3.void.test +all'] };
  at.dns.zones['two.test'] = { TXT: ['v=spf1 a:1.void.test a:2.void.test +all'] };
  at.dns.zones['six.test'] = { TXT: ['v=spf1 ip6:2001:db8::/32 -all'] };
  at.dns.zones['plus+tag.l.test'] = { A: ['127.0.0.2'] };
  at.dns.zones['local.test'] = { TXT: ['v=spf1 exists:%{l}.l.test -all'] };
  at.dns.zones['1.2.0.192.in-addr.arpa'] = { PTR: ['host.ptr.test.'] };
  at.dns.zones['host.ptr.test'] = { A: ['192.0.2.1'] };
  at.dns.zones['ptr.test'] = { TXT: ['v=spf1 ptr -all'] };
  at.dns.zones['mx.test'] = { TXT: ['v=spf1 mx -all'], MX: ['10 host.ptr.test'] };
  at.dns.zones['alias.test'] = { CNAME: 'spf.test' };
  const table = [
    ['x@many.test', 'permerror', '192.0.2.1'],
    ['x@ten.test', 'pass', '192.0.2.1'],
    ['x@void.test', 'permerror', '192.0.2.1'],
    ['x@two.test', 'pass', '192.0.2.1'],
    ['x@six.test', 'pass', '2001:db8::1'],
    ['x@six.test', 'fail', '192.0.2.1'],
    ['x@spf.test', 'pass', '::ffff:192.0.2.1'],
    ['plus+tag@local.test', 'pass', '192.0.2.1'],
    ['plus@local.test', 'fail', '192.0.2.1'],
    ['x@ptr.test', 'pass', '192.0.2.1'],
    ['x@mx.test', 'pass', '192.0.2.1'],
    ['x@alias.test', 'pass', '192.0.2.1'],
    ['x@nowhere.test', 'none', '192.0.2.1'],
    ['x@spf.test', 'temperror', 'no address'],
  ] as const;
  for (const [mailFrom, result, address] of table) {
    const { authentication } = await at.verify(letter('a@b.test'), { mailFrom, address });
    assert.is(authentication.spf.result, result, `${mailFrom} from ${address}`);
  }
});

it('without an answer that could help, a failure is none', async ({ at }) => {
  const signed = await sign(letter('x@bank.test'), 'bank.test');
  const verdict = async (message: string, mailFrom = 'x@spf.test') => {
    const { authentication } = await at.verify(message, { mailFrom });
    const { spf, dkim, dmarc } = authentication;
    return [spf.result, dkim[0]?.result, dmarc.result, authentication.verdict];
  };
  at.dns.zones['s._domainkey.bank.test'] = 'SERVFAIL';
  assert.equal(await verdict(signed), ['pass', 'temperror', 'temperror', 'accepted']);
  at.dns.zones['bank.test'] = { TXT: 'SERVFAIL' };
  assert.equal(await verdict(letter('x@bank.test'), 'x@bank.test'), [
    'temperror',
    undefined,
    'temperror',
    'accepted',
  ]);
  // What is not of the author cannot help.
  at.dns.zones['s._domainkey.other.test'] = 'SERVFAIL';
  at.dns.zones['spf.test'] = { TXT: 'SERVFAIL' };
  const foreign = await sign(letter('x@bank.test'), 'other.test');
  assert.equal(await verdict(foreign), ['temperror', 'temperror', 'fail', 'tagged']);
  at.dns.zones['_dmarc.bank.test'] = 'SERVFAIL';
  assert.equal(await verdict(foreign), ['temperror', 'temperror', 'temperror', 'accepted']);
});

it('a DNS that says nothing ends as temperror, and slow names of others keep nobody', async ({
  at,
}) => {
  at.dns.zones['silent.test'] = 'TIMEOUT';
  at.dns.zones['_dmarc.silent.test'] = 'TIMEOUT';
  at.dns.zones['s._domainkey.silent.test'] = 'TIMEOUT';
  const own = await at.verify(await sign(letter('x@silent.test'), 'silent.test'), {
    mailFrom: 'x@silent.test',
  });
  const { spf, dkim, dmarc, verdict } = own.authentication;
  assert.equal(
    [spf.result, dkim[0]?.result, dmarc.result, verdict],
    ['temperror', 'temperror', 'temperror', 'accepted'],
  );
  // The bank's policy is heard although eleven names beside it keep silent.
  let message = letter('x@bank.test');
  for (let index = 0; index < 10; index += 1) message = await sign(message, 'silent.test');
  const forged = await at.verify(message, { mailFrom: 'x@silent.test' });
  assert.equal(
    [forged.authentication.dmarc.result, forged.authentication.verdict],
    ['fail', 'tagged'],
  );
});

it('weak keys and algorithms are a matter of policy', async ({ at }) => {
  const signWith = async (privateKey: KeyObject, algorithm: string): Promise<string> => {
    const message = letter('x@bank.test');
    const key = {
      signingDomain: 'bank.test',
      selector: 'weak',
      privateKey: privateKey.export({ type: 'pkcs8', format: 'pem' }),
    };
    const { signatures } = await dkimSign(Buffer.from(message), {
      algorithm,
      canonicalization: 'relaxed/relaxed',
      ...key,
      signatureData: [key],
    });
    return signatures + message;
  };
  const table = [
    [768, 'rsa-sha256', 'policy', 'weak-key'],
    [1_024, 'rsa-sha256', 'pass', null],
    [1_024, 'rsa-sha1', 'policy', 'weak algorithm'],
  ] as const;
  for (const [modulusLength, algorithm, result, reason] of table) {
    const { privateKey, publicKey } = generateKeyPairSync('rsa', { modulusLength });
    at.dns.zones['weak._domainkey.bank.test'] = { TXT: [publicKeyRecord(publicKey)] };
    const { authentication } = await at.verify(await signWith(privateKey, algorithm));
    assert.equal(
      authentication.dkim.map((one) => [one.result, one.reason]),
      [[result, reason]],
      `${algorithm} with ${modulusLength}`,
    );
    assert.is(authentication.verdict, result === 'pass' ? 'accepted' : 'tagged');
  }
});

it('ten signatures are checked, and what RFC 6376 does not allow does not pass', async ({ at }) => {
  let message = letter('x@bank.test');
  for (let index = 0; index < 15; index += 1) message = await sign(message, 'other.test');
  const { authentication } = await at.verify(message);
  assert.equal(
    authentication.dkim.map(({ result }) => result),
    Array.from({ length: 10 }, () => 'pass'),
  );
  const field = (tags: string) => `DKIM-Signature: ${tags}\r\n${letter('x@bank.test')}`;
  for (const tags of [
    'v=1; a=rsa-sha512; d=bank.test; s=s; h=from; bh=aa; b=aa',
    'v=1; a=rsa-sha256; d=bank.test; h=from; bh=aa; b=aa',
    'v=1; a=rsa-sha256; d=bank.test; s=s; h=to; bh=aa; b=aa',
    'v=1; a=rsa-sha256; d=bank.test; s=s; h=from; b=aa',
    `v=1; a=rsa-sha256; d=bank.test; s=s; h=from${':x'.repeat(2_000)}; bh=aa; b=aa`,
    'nonsense',
    '',
  ]) {
    const odd = await at.verify(field(tags));
    assert.is(odd.authentication.dkim.length, 1, tags);
    assert.ok(['neutral', 'fail', 'policy'].includes(odd.authentication.dkim[0]!.result), tags);
    assert.is(odd.authentication.verdict, 'tagged');
  }
});

it('each kind of body that is hashed costs: there are four, and the rest does not pass', async ({
  at,
}) => {
  const signatures = await Promise.all(
    [1, 2, 3, 4, 5, 6].map(async (maxBodyLength) => {
      const key = {
        signingDomain: 'bank.test',
        selector: 's',
        privateKey: ed25519.privateKey.export({ type: 'pkcs8', format: 'pem' }),
        maxBodyLength,
      };
      const { signatures: written } = await dkimSign(Buffer.from(letter('x@bank.test')), {
        algorithm: 'ed25519-sha256',
        ...key,
        signatureData: [key],
      });
      return written;
    }),
  );
  const { authentication } = await at.verify(signatures.join('') + letter('x@bank.test'));
  assert.equal(
    authentication.dkim.map(({ result }) => result),
    ['pass', 'pass', 'pass', 'pass', 'policy', 'policy'],
  );
  assert.match(
    authentication.dkim[0]!.reason ?? '',
    /\d+ bytes at the end of the body are not signed/,
  );
});

const seal = async (message: string, domain: string, results: string, cv?: string) =>
  `${(
    await sealMessage(Buffer.from(message), {
      signingDomain: domain,
      selector: 's',
      privateKey: rsa.privateKey.export({ type: 'pkcs8', format: 'pem' }),
      authResults: results,
      ...(cv === undefined ? {} : { cv }),
    })
  ).toString()}${message}`;

it('only a trusted sealer turns a failure, and only for what it saw pass', async ({ at }) => {
  const message = letter('x@bank.test');
  const saw = (dmarc: string, from = 'bank.test') =>
    `mx.sealer.test; spf=none; dmarc=${dmarc} header.from=${from}`;
  const sealed = await seal(message, 'sealer.test', saw('pass'));
  const twice = await seal(sealed, 'second.test', saw('fail'), 'pass');
  const table = [
    ['nobody is trusted', sealed, [], 'pass', 'tagged'],
    ['another one is', sealed, ['second.test'], 'pass', 'tagged'],
    ['the sealer is', sealed, ['Sealer.Test.'], 'pass', 'accepted'],
    [
      'it saw it fail',
      await seal(message, 'sealer.test', saw('fail')),
      ['sealer.test'],
      'pass',
      'tagged',
    ],
    [
      'it saw another author',
      await seal(message, 'sealer.test', saw('pass', 'x.test')),
      ['sealer.test'],
      'pass',
      'tagged',
    ],
    [
      'it says nothing',
      await seal(message, 'sealer.test', 'mx.sealer.test; none'),
      ['sealer.test'],
      'pass',
      'tagged',
    ],
    ['the body was changed', `${sealed}more\r\n`, ['sealer.test'], 'fail', 'tagged'],
    ['the newest is not trusted', twice, ['sealer.test'], 'pass', 'tagged'],
    ['the oldest is not trusted', twice, ['second.test'], 'pass', 'tagged'],
    ['both are', twice, ['sealer.test', 'second.test'], 'pass', 'accepted'],
  ] as const;
  for (const [what, raw, trusted, arc, verdict] of table) {
    at.sealers.splice(0, Infinity, ...trusted);
    const { authentication } = await at.verify(raw);
    assert.equal([authentication.arc.result, authentication.verdict], [arc, verdict], what);
    assert.is(authentication.dmarc.result, 'fail');
    assert.is(dmarcRefusal(authentication, 'reject') === null, verdict === 'accepted');
  }
  at.sealers.splice(0, Infinity, 'sealer.test', 'second.test');
  const { authentication } = await at.verify(twice);
  assert.equal(authentication.arc, { result: 'pass', sealer: 'second.test', instances: 2 });
  assert.match(authentication.dmarc.reason ?? '', /second\.test/);
  // The key of a seal that may have turned it cannot be had.
  at.dns.zones['s._domainkey.second.test'] = 'SERVFAIL';
  const unknown = await at.verify(twice);
  assert.equal(
    [unknown.authentication.dmarc.result, unknown.authentication.verdict],
    ['temperror', 'accepted'],
  );
  at.sealers.splice(0, Infinity);
  assert.is((await at.verify(twice)).authentication.verdict, 'tagged');
});

it('a message of several authors is refused where one of them says so', async ({ at }) => {
  const several = letter('a@open.test, b@bank.test');
  const two = letter('a@open.test').replace('To:', 'From: b@bank.test\r\nTo:');
  for (const message of [several, two]) {
    const { authentication } = await at.verify(message);
    assert.equal(
      [authentication.dmarc.result, authentication.dmarc.domain, authentication.verdict],
      ['fail', 'bank.test', 'tagged'],
    );
  }
  const harmless = await at.verify(letter('a@open.test, b@nothing.test'));
  assert.equal(
    [harmless.authentication.dmarc.result, harmless.authentication.verdict],
    ['permerror', 'accepted'],
  );
  const { authentication } = await at.verify('Subject: no author\r\n\r\nHello\r\n');
  assert.is(authentication.dmarc.result, 'none');
  const one = await at.verify(letter('a@bank.test, b@bank.test'));
  assert.is(one.authentication.verdict, 'tagged');
});

it('forged results of ours go before the message is checked', async ({ at }) => {
  const message = letter('x@bank.test');
  const forged = `Authentication-Results: ${HOSTNAME}; dmarc=pass header.from=bank.test\r\n`;
  const foreign = 'Authentication-Results: mx.other.test; dmarc=pass\r\n';
  const { raw, field } = await at.verify(forged + foreign + message);
  assert.is(raw.toString(), foreign + message);
  assert.match(field, /dmarc=fail header\.from=bank\.test/);
});

it('international names are checked as A-labels', async ({ at }) => {
  at.dns.zones['xn--bcher-kva.test'] = { TXT: ['v=spf1 ip4:192.0.2.1 -all'] };
  at.dns.zones['_dmarc.xn--bcher-kva.test'] = { TXT: ['v=DMARC1; p=reject'] };
  const { authentication, field } = await at.verify(letter('Jörg <jörg@bücher.test>'), {
    mailFrom: 'jörg@bücher.test',
  });
  assert.equal(
    [authentication.spf.result, authentication.spf.domain],
    ['pass', 'xn--bcher-kva.test'],
  );
  assert.equal(
    [authentication.dmarc.result, authentication.dmarc.domain],
    ['pass', 'xn--bcher-kva.test'],
  );
  assert.match(field, /^[\t\r\n -~]*$/);
});

it('names that are known to be absent are not asked for', async () => {
  const found = { kind: 'found', records: [] } as const;
  const asked: string[] = [];
  const answer = async (name: string) => {
    asked.push(name);
    return found;
  };
  const all = { a: answer, aaaa: answer, cname: answer, mx: answer, ptr: answer, txt: answer };
  const some = withoutNames(all, (name) => name.endsWith('.test'));
  assert.equal(await some.txt('_dmarc.A.Test.'), { kind: 'no_name' });
  assert.equal(await some.a('a.example'), found);
  assert.equal(asked, ['a.example']);
});

it.run();
