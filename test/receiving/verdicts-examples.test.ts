// The examples of the RFCs for DKIM and DMARC, and messages that others collected: our result beside that of mailauth as
// it comes, and beside that of dkimpy where it is installed.
import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { Resolver } from 'node:dns/promises';
import { fileURLToPath } from 'node:url';
import { authenticate, type AuthenticateResult } from 'mailauth';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { generateKeyPair, publicKeyRecord, signMessage } from '../../src/mail/dkim.ts';
import type { DnsZones } from '../support/dns.ts';
import { HOSTNAME, letter, lines, startVerifying, type Verifying } from '../support/verifier.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

const it = suite<{ at: Verifying; dns: Resolver }>('examples of the RFCs');
it.before.each(async (context) => {
  context.at = await startVerifying({});
  context.dns = new Resolver();
  context.dns.setServers([context.at.dns.server]);
});
it.after.each(async ({ at, dns }) => {
  dns.cancel();
  await at.stop();
});

/** What mailauth says when it is given nothing but the message and a resolver. */
const alone = (raw: Buffer, dns: Resolver, mailFrom = ''): Promise<AuthenticateResult> =>
  authenticate(raw, {
    ip: '192.0.2.1',
    helo: 'client.invalid',
    sender: mailFrom,
    mta: HOSTNAME,
    disableBimi: true,
    resolver: (name, type) => dns.resolve(name, type) as Promise<string[]>,
  });

const FOOTBALL = [
  'From: Joe SixPack <joe@football.example.com>',
  'To: Suzie Q <suzie@shopping.example.net>',
  'Subject: Is dinner ready?',
  'Date: Fri, 11 Jul 2003 21:00:37 -0700 (PDT)',
  'Message-ID: <20030712040037.46341.5F8J@football.example.com>',
] as const;

/** RFC 6376 appendix A.2 with errata 3192 and 4926. */
const RFC_6376 = lines(
  'DKIM-Signature: v=1; a=rsa-sha256; s=brisbane; d=example.com;',
  '      c=simple/simple; q=dns/txt; i=joe@football.example.com;',
  '      h=Received : From : To : Subject : Date : Message-ID;',
  '      bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;',
  '      b=AuUoFEfDxTDkHlLXSZEpZj79LICEps6eda7W3deTVFOk4yAUoqOB',
  '      4nujc7YopdG5dWLSdNg6xNAZpOPr+kHxt1IrE+NahM6L/LbvaHut',
  '      KVdkLLkpVaVVQPzeRDI009SO2Il5Lu7rDNH6mZckBdrIx0orEtZV',
  '      4bmp/YzhwvcubU4=;',
  'Received: from client1.football.example.com  [192.0.2.1]',
  '      by submitserver.example.com with SUBMISSION;',
  '      Fri, 11 Jul 2003 21:01:54 -0700 (PDT)',
  ...FOOTBALL,
  '',
  'Hi.',
  '',
  'We lost the game. Are you hungry yet?',
  '',
  'Joe.',
);
const RFC_6376_KEY =
  'v=DKIM1; p=MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDwIRP/UC3SBsEmGqZ9ZJW3/DkMoGeLnQg1fWn7/zYtIxN2SnFCjxOCKG9v3b4jYfcTNh5ijSsq631uBItLa7od+v/RtdC2UzJ1lWT947qR+Rcac2gbto/NMqJ0fzfVjH4OuKhitdY9tf6mcwGjaNBcWToIMmPSPDdQPNUYckcQ2QIDAQAB';

/** RFC 8463 appendix A.3. */
const RFC_8463 = lines(
  'DKIM-Signature: v=1; a=ed25519-sha256; c=relaxed/relaxed;',
  ' d=football.example.com; i=@football.example.com;',
  ' q=dns/txt; s=brisbane; t=1528637909; h=from : to :',
  ' subject : date : message-id : from : subject : date;',
  ' bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;',
  ' b=/gCrinpcQOoIfuHNQIbq4pgh9kyIK3AQUdt9OdqQehSwhEIug4D11Bus',
  ' Fa3bT3FY5OsU7ZbnKELq+eXdp1Q1Dw==',
  'DKIM-Signature: v=1; a=rsa-sha256; c=relaxed/relaxed;',
  ' d=football.example.com; i=@football.example.com;',
  ' q=dns/txt; s=test; t=1528637909; h=from : to : subject :',
  ' date : message-id : from : subject : date;',
  ' bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;',
  ' b=F45dVWDfMbQDGHJFlXUNB2HKfbCeLRyhDXgFpEL8GwpsRe0IeIixNTe3',
  ' DhCVlUrSjV4BwcVcOF6+FF3Zo9Rpo1tFOeS9mPYQTnGdaSGsgeefOsk2Jz',
  ' dA+L10TeYt9BgDfQNZtKdN1WO//KgIqXP7OdEFE4LjFYNcUxZQ4FADY+8=',
  ...FOOTBALL,
  '',
  'Hi.',
  '',
  'We lost the game.  Are you hungry yet?',
  '',
  'Joe.',
);
const RFC_8463_KEYS = {
  'brisbane._domainkey.football.example.com':
    'v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=',
  'test._domainkey.football.example.com':
    'v=DKIM1; k=rsa; p=MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDkHlOQoBTzWRiGs5V6NpP3idY6Wk08a5qhdR6wy5bdOKb2jLQiY/J16JYi0Qvx/byYzCNb3W91y3FutACDfzwQ/BC/e/8uBsCR+yz1Lxj+PL6lHvqMKrM3rG4hstT5QjvHO9PzoxZyVYLzBfO2EeC3Ip3G+2kryOTIKT+l/K4w3QIDAQAB',
};

it('DKIM: the signed messages of RFC 6376 and RFC 8463', async ({ at, dns }) => {
  at.dns.zones['brisbane._domainkey.example.com'] = { TXT: [RFC_6376_KEY] };
  for (const [name, key] of Object.entries(RFC_8463_KEYS)) at.dns.zones[name] = { TXT: [key] };
  const table = [
    ['RFC 6376 appendix A', RFC_6376, ['pass']],
    ['RFC 8463 appendix A', RFC_8463, ['pass', 'pass']],
    ['  another body', RFC_8463.replace('hungry', 'angry'), ['fail', 'fail']],
    ['  another subject', RFC_8463.replace('dinner', 'lunch'), ['fail', 'fail']],
    ['  another From on top', `From: eve@evil.example\r\n${RFC_8463}`, ['fail', 'fail']],
    ['  folded otherwise', RFC_8463.replace('Is dinner', 'Is\r\n\tdinner'), ['pass', 'pass']],
    ['  simple, with one more space', RFC_6376.replace('Subject: Is', 'Subject:  Is'), ['fail']],
  ] as const;
  for (const [what, message, wanted] of table) {
    const { authentication } = await at.verify(message);
    const ours = authentication.dkim.map(({ result }) => result);
    const own = await alone(Buffer.from(message), dns);
    const theirs = own.dkim.results.map(({ status }) => status.result);
    console.log(`${what}: ${ours.join(', ')}; mailauth: ${theirs.join(', ')}`);
    assert.equal(ours, [...wanted], what);
  }
});

it('a second verifier agrees', async ({ at }) => {
  // Only its own reading of the message counts: it gets its keys from here, not from the DNS.
  const script =
    'import dkim, json, sys\n' +
    'd = json.load(sys.stdin)\n' +
    'def key(name, timeout=5):\n' +
    '    return d["keys"].get(name.decode().rstrip("."), "").encode()\n' +
    'def verify(m, i):\n' +
    '    try:\n' +
    '        return bool(dkim.DKIM(m.encode()).verify(i, dnsfunc=key))\n' +
    '    except dkim.ValidationError:\n' +
    '        return False\n' +
    'print(json.dumps([[verify(m, i) for i in range(n)] for m, n in d["messages"]]))\n';
  const python = '/usr/bin/python3';
  if (spawnSync(python, ['-c', 'import dkim']).status !== 0) {
    console.log('skipped: dkimpy (python3-dkim) is not installed');
    return;
  }
  if (spawnSync(python, ['-c', 'import spf']).status !== 0) {
    console.log('SPF has no second verifier here: pyspf (python3-spf) is not installed');
  }
  const keys: Record<string, string> = { ...RFC_8463_KEYS };
  keys['brisbane._domainkey.example.com'] = RFC_6376_KEY;
  const messages = [RFC_6376, RFC_8463, RFC_8463.replace('hungry', 'angry')];
  for (const algorithm of ['rsa-sha256', 'ed25519-sha256'] as const) {
    const { privateKey, publicKey } = await generateKeyPair(algorithm);
    const key = { domain: 'signer.test', selector: algorithm, algorithm, privateKey };
    keys[`${algorithm}._domainkey.signer.test`] = publicKeyRecord(publicKey);
    for (const body of ['', '\r\n\r\n', 'a  b \t\r\n\r\n\r\n', ' \r\n', 'no line end']) {
      const message = letter('x@signer.test', body);
      const about = { message: Buffer.from(message), keys: [key], signedAt: new Date() };
      const signed = `${(await signMessage(about)).toString()}${message}`;
      messages.push(signed, signed.replace('Subject: Hi', 'Subject: Ho'));
    }
  }
  for (const [name, key] of Object.entries(keys)) at.dns.zones[name] = { TXT: [key] };
  const ours = await Promise.all(
    messages.map(async (message) => {
      const { authentication } = await at.verify(message);
      return authentication.dkim.map(({ result }) => result === 'pass');
    }),
  );
  const input = messages.map((message, index) => [message, ours[index]?.length ?? 0]);
  const { stdout, stderr } = spawnSync(python, ['-c', script], {
    input: JSON.stringify({ keys, messages: input }),
    encoding: 'utf8',
  });
  assert.is(stderr, '');
  assert.equal(JSON.parse(stdout), ours);
  console.log(`dkimpy agrees about ${ours.flat().length} signatures`);
});

const ed25519 = await generateKeyPair('ed25519-sha256');

it('DMARC: the alignment examples and the tree walk of RFC 9989', async ({ at, dns }) => {
  const zones: DnsZones = {
    // Appendix B.1: SPF and DKIM for example.com, its child and another domain.
    '_dmarc.example.com': { TXT: ['v=DMARC1; p=reject'] },
    '_dmarc.strict.example': { TXT: ['v=DMARC1; p=reject; aspf=s; adkim=s'] },
    // §4.10: below a public suffix, with psd tags, and deep names.
    '_dmarc.psd.example': { TXT: ['v=DMARC1; p=reject; psd=y'] },
    '_dmarc.own.psd.example': { TXT: ['v=DMARC1; p=quarantine; sp=reject; psd=n'] },
    '_dmarc.np.example': { TXT: ['v=DMARC1; p=none; sp=quarantine; np=reject'] },
    'there.np.example': { A: ['192.0.2.1'] },
    '_dmarc.two.example': { TXT: ['v=DMARC1; p=reject', 'v=DMARC1; p=none'] },
    '_dmarc.broken.example': { TXT: ['v=DMARC1; p=refuse; rua=mailto:d@broken.example'] },
    '_dmarc.other.example': { TXT: ['v=spf1 -all'] },
  };
  const spf = { TXT: ['v=spf1 ip4:192.0.2.1 -all'] };
  const key = { TXT: [publicKeyRecord(ed25519.publicKey)] };
  for (const name of [
    'example.com',
    'child.example.com',
    'strict.example',
    'child.strict.example',
    'example.net',
    'a.psd.example',
    'b.psd.example',
  ]) {
    zones[name] = spf;
    zones[`s._domainkey.${name}`] = key;
  }
  Object.assign(at.dns.zones, zones);
  // From, the domain that SPF or DKIM proves, and what it comes to.
  const table = [
    ['example.com', 'example.com', 'pass', 'reject'],
    ['example.com', 'child.example.com', 'pass', 'reject'],
    ['child.example.com', 'example.com', 'pass', 'reject'],
    ['child.example.com', 'example.net', 'fail', 'reject'],
    ['example.com', 'example.net', 'fail', 'reject'],
    ['strict.example', 'strict.example', 'pass', 'reject'],
    ['strict.example', 'child.strict.example', 'fail', 'reject'],
    ['child.strict.example', 'strict.example', 'fail', 'reject'],
    ['a.psd.example', 'a.psd.example', 'pass', 'reject'],
    ['x.a.psd.example', 'a.psd.example', 'pass', 'reject'],
    ['a.psd.example', 'b.psd.example', 'fail', 'reject'],
    ['own.psd.example', 'example.net', 'fail', 'quarantine'],
    ['x.own.psd.example', 'example.net', 'fail', 'reject'],
    ['there.np.example', 'example.net', 'fail', 'quarantine'],
    ['gone.np.example', 'example.net', 'fail', 'reject'],
    ['np.example', 'example.net', 'fail', 'none'],
    ['1.2.3.4.5.6.7.8.9.example.com', 'example.com', 'pass', 'reject'],
    ['two.example', 'example.net', 'none', null],
    ['broken.example', 'example.net', 'fail', 'none'],
    ['other.example', 'example.net', 'none', null],
  ] as const;
  let count = 0;
  let same = 0;
  for (const [author, proven, result, policy] of table) {
    const message = letter(`x@${author}`);
    const signer = { domain: proven, selector: 's', privateKey: ed25519.privateKey };
    const signed = await signMessage({
      message: Buffer.from(message),
      keys: [{ ...signer, algorithm: 'ed25519-sha256' }],
      signedAt: new Date(),
    });
    for (const [raw, mailFrom] of [
      [message, `x@${proven}`],
      [`${signed.toString()}${message}`, 'x@nothing.invalid'],
    ] as const) {
      const { authentication } = await at.verify(raw, { mailFrom });
      const { dmarc } = authentication;
      const what = `${author}, proven ${proven} by ${raw === message ? 'SPF' : 'DKIM'}`;
      assert.equal([dmarc.result, dmarc.policy], [result, policy], what);
      assert.is(authentication.verdict === 'tagged', result === 'fail' && policy === 'reject');
      const own = (await alone(Buffer.from(raw), dns, mailFrom)).dmarc;
      const theirs = own === false ? 'none' : own.status.result;
      count += 1;
      if (theirs === dmarc.result) same += 1;
      else console.log(`${what}: ${dmarc.result}; mailauth: ${theirs}`);
    }
  }
  console.log(`DMARC: ${count} of ${count} as RFC 9989 says; mailauth as it comes: ${same}`);
});

it('the messages that others collected', async ({ at, dns }) => {
  const folders = ['mime-mikel', 'mime-mailparser', 'mime-postal', 'mime-inbucket']
    .map((name) => `${corpora}/${name}`)
    .filter((folder) => existsSync(folder));
  if (folders.length === 0) {
    console.log(`skipped: no messages in ${corpora}`);
    return;
  }
  const counts = new Map<string, number>();
  const add = (what: string): Map<string, number> => counts.set(what, (counts.get(what) ?? 0) + 1);
  let messages = 0;
  for (const folder of folders) {
    for (const entry of readdirSync(folder, { recursive: true, withFileTypes: true })) {
      if (!entry.isFile() || !/\.(?:eml|raw|txt)$/.test(entry.name)) continue;
      const text = readFileSync(`${entry.parentPath}/${entry.name}`).toString('latin1');
      const raw = Buffer.from(text.replaceAll(/\r?\n/g, '\r\n'), 'latin1');
      messages += 1;
      const { authentication, raw: kept } = await at.verify(raw);
      const own = await alone(raw, dns);
      assert.equal(kept, raw, entry.name);
      assert.is(authentication.verdict, 'accepted');
      const theirs = own.dkim.results.map(({ status }) => status.result);
      const ours = authentication.dkim.map(({ result }) => result);
      add(`DKIM ${ours.join(', ') || 'none'}; mailauth: ${theirs.join(', ')}`);
      add(
        `DMARC ${authentication.dmarc.result}; mailauth: ${own.dmarc === false ? 'not evaluated' : own.dmarc.status.result}`,
      );
      // No key of theirs is to be had here.
      assert.ok(!ours.includes('pass'));
    }
  }
  console.log(`${messages} messages of the MIME corpora, without their keys:`);
  for (const what of [...counts.keys()].toSorted()) console.log(`  ${counts.get(what)} x ${what}`);
  assert.ok(messages > 50);
});

it.run();
