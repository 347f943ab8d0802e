// What is made to keep a verifier busy, to break it or to slip past it: large messages go through a thread and have the
// same result, threads that hang or break lose nobody's mail, and no bytes make it throw. The randomness is seeded.
import { Worker } from 'node:worker_threads';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { generateKeyPair, publicKeyRecord, signMessage } from '../../src/mail/dkim.ts';
import { dmarcRefusal } from '../../src/receiving/verdicts.ts';
import { createSignatureReader } from '../../src/receiving/verdicts-aside.ts';
import type { Authentication } from '../../src/store/received-email.ts';
import type { DnsZones } from '../support/dns.ts';
import { HOSTNAME, letter, startVerifying, type Verifying } from '../support/verifier.ts';

/** Above the longest that one message may take; a hang is longer. */
const HANG_MS = 15_000;
const MUTATIONS = 600;

const { privateKey, publicKey } = await generateKeyPair('ed25519-sha256');
const zones = (): DnsZones => ({
  '_dmarc.bank.test': { TXT: ['v=DMARC1; p=reject'] },
  's._domainkey.bank.test': { TXT: [publicKeyRecord(publicKey)] },
});
const sign = async (message: string): Promise<string> => {
  const key = {
    domain: 'bank.test',
    selector: 's',
    algorithm: 'ed25519-sha256',
    privateKey,
  } as const;
  const about = { message: Buffer.from(message), keys: [key], signedAt: new Date() };
  return `${(await signMessage(about)).toString()}${message}`;
};

const it = suite('hostile mail at the door');

async function within<T>(work: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const hang = new Promise<never>((_resolve, reject) => {
    timer = setTimeout(() => reject(new Error('it hangs')), HANG_MS);
  });
  try {
    return await Promise.race([work, hang]);
  } finally {
    clearTimeout(timer);
  }
}

async function using<T>(at: Verifying, use: (at: Verifying) => Promise<T>): Promise<T> {
  try {
    return await use(at);
  } finally {
    await at.stop();
  }
}

const brief = ({ dkim, dmarc, verdict }: Authentication) => [
  dkim[0]?.result,
  dmarc.result,
  verdict,
];

it('large messages and large headers have the same result in a thread, several at once', async () => {
  await using(await startVerifying(zones()), async (at) => {
    const body = 'The quick brown  fox. \r\n'.repeat(80_000);
    const good = await sign(letter('x@bank.test', body));
    const padding = Array.from({ length: 800 }, (_, index) => `X-${index}: ${'x'.repeat(80)}\r\n`);
    const long = await sign(padding.join('') + letter('x@bank.test'));
    const all = [
      good,
      good.replace('quick', 'slow'),
      long,
      good,
      letter('x@bank.test', body),
      good,
    ];
    const results = await Promise.all(all.map((raw) => within(at.verify(raw))));
    assert.equal(
      results.map(({ authentication }) => brief(authentication)),
      [
        ['pass', 'pass', 'accepted'],
        ['fail', 'fail', 'tagged'],
        ['pass', 'pass', 'accepted'],
        ['pass', 'pass', 'accepted'],
        [undefined, 'fail', 'tagged'],
        ['pass', 'pass', 'accepted'],
      ],
    );
    at.dns.zones['s._domainkey.bank.test'] = 'SERVFAIL';
    const unknown = await within(at.verify(good));
    assert.equal(brief(unknown.authentication), ['temperror', 'temperror', 'accepted']);
    assert.equal(at.logged, []);
  });
});

it('a thread that hangs or breaks is temperror, and the next message has another one', async () => {
  const large = await sign(letter('x@bank.test', 'Hello\r\n'.repeat(200_000)));
  const ways = [
    ['for (;;);', true],
    ['setInterval(() => {}, 1000);', true],
    ['throw new Error("broken");', false],
    ['', false],
  ] as const;
  await Promise.all(
    ways.map(async ([code, isSlow]) => {
      const url = new URL('../../src/receiving/verdicts-thread.ts', import.meta.url);
      let starts = 0;
      const reader = createSignatureReader({
        threadsMax: 1,
        startThread: () => {
          starts += 1;
          return starts === 1
            ? new Worker(code, { eval: true })
            : new Worker(url, { execArgv: [] });
        },
      });
      await using(await startVerifying(zones(), { reader }), async (at) => {
        const lost = await within(at.verify(large));
        assert.equal(brief(lost.authentication), ['temperror', 'temperror', 'accepted'], code);
        assert.match(lost.field, /dkim=temperror/);
        // What is too slow comes again; a fault of ours is no reason to refuse anything.
        const refusal = dmarcRefusal(lost.authentication, 'reject');
        assert.is(refusal?.code ?? null, isSlow ? 451 : null, code);
        assert.is(dmarcRefusal(lost.authentication, 'tag'), null);
        const next = await within(at.verify(large));
        assert.equal(brief(next.authentication), ['pass', 'pass', 'accepted'], code);
      });
    }),
  );
});

it('what breaks inside is logged, and the mail is taken', async () => {
  const reader = {
    read: () => Promise.reject(new Error('a fault in the library')),
    close: () => Promise.resolve(),
  };
  await using(await startVerifying(zones(), { reader }), async (at) => {
    const { authentication } = await at.verify(await sign(letter('x@bank.test')));
    assert.equal(brief(authentication), ['temperror', 'temperror', 'accepted']);
    assert.is(authentication.spf.result, 'none');
    assert.match(at.logged.join(''), /a fault in the library/);
  });
});

it('a closed verifier answers', async () => {
  const at = await startVerifying(zones());
  const large = await sign(letter('x@bank.test', 'Hello\r\n'.repeat(200_000)));
  const open = at.verify(large);
  await at.stop();
  assert.is((await within(open)).authentication.verdict, 'accepted');
  assert.is((await within(at.verify(large))).authentication.verdict, 'accepted');
});

it('more at once than there are turns: they wait, and all have their result', async () => {
  await using(await startVerifying(zones(), { atOnceMax: 2 }), async (at) => {
    const message = await sign(letter('x@bank.test'));
    const all = await Promise.all(Array.from({ length: 40 }, () => within(at.verify(message))));
    for (const { authentication } of all) {
      assert.equal(brief(authentication), ['pass', 'pass', 'accepted']);
    }
  });
});

it('headers that would take minutes end in time', async () => {
  await using(await startVerifying(zones()), async (at) => {
    const signature = (h: string) =>
      `DKIM-Signature: v=1; a=ed25519-sha256; d=bank.test; s=s; h=${h}; bh=aa; b=aa\r\n`;
    const bombs = [
      `X: 1\r\n${' \r\n'.repeat(80_000)}`,
      'a:\r\n'.repeat(60_000),
      `${signature(`from${':a'.repeat(50_000)}`)}${'b:\r\n'.repeat(30_000)}`,
      signature('from').repeat(2_000),
      `DKIM-Signature: ${'a=b;'.repeat(60_000)}\r\n`,
      `Authentication-Results: ${'('.repeat(200_000)}\r\n`,
      `Authentication-Results: ${HOSTNAME}; x=y\r\n`.repeat(5_000),
      `Content-Type: multipart/mixed; boundary=${'"\\'.repeat(80_000)}\r\n`,
      Array.from({ length: 60 }, (_, i) =>
        ['Seal', 'Message-Signature', 'Authentication-Results']
          .map(
            (name) => `ARC-${name}: i=${i + 1}; a=rsa-sha256; d=x${i}.test; s=s; cv=pass; b=aa\r\n`,
          )
          .join(''),
      ).join(''),
    ];
    for (const bomb of bombs) {
      const { authentication } = await within(at.verify(bomb + letter('x@bank.test')));
      // Read or not, nobody has proven anything, and the author is known.
      assert.equal(
        [authentication.dmarc.result, authentication.verdict],
        ['fail', 'tagged'],
        bomb.slice(0, 60),
      );
    }
    for (const from of [
      '('.repeat(100_000),
      '<'.repeat(100_000),
      'a@'.repeat(50_000),
      'a@b.test,'.repeat(20_000),
    ]) {
      const { authentication } = await within(at.verify(letter(from)));
      assert.not.equal(authentication.dmarc.result, 'pass');
    }
  });
});

/** A small generator with a seed: the same run every time. */
function randomFrom(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

const PIECES = [
  '\r\n',
  '\n',
  '\r',
  '\0',
  ';',
  '=',
  ':',
  '"',
  '\\',
  '(',
  ')',
  '<',
  '>',
  '@',
  ',',
  ' ',
  '\t',
  '.',
  '%',
  'ü',
  '\xff',
  'i=1',
  'i=51',
  'i=-1',
  'l=0',
  'l=99999999999999999999',
  't=9e99',
  'x=1',
  'h=',
  'd=',
  's=',
  'b=',
  'bh=',
  'cv=pass',
  'cv=fail',
  'a=rsa-sha1',
  'From: y@bank.test\r\n',
  'DKIM-Signature: ',
  'ARC-Seal: ',
  '__proto__',
  'constructor',
  '=?utf-8?B?AAA=?=',
  'x'.repeat(1_000),
  `Authentication-Results: ${HOSTNAME}; dmarc=pass\r\n`,
] as const;

it('no change to a header makes it throw or lie', async () => {
  const arc = [
    'Authentication-Results: i=1; mx.test; dmarc=pass header.from=bank.test',
    'Message-Signature: i=1; a=rsa-sha256; c=relaxed/relaxed; d=bank.test; s=s; h=from; bh=aa; b=aa',
    'Seal: i=1; a=rsa-sha256; cv=none; d=bank.test; s=s; b=aa',
  ];
  const signed = await sign(letter('Ann <x@bank.test>'));
  const base = Buffer.from(arc.map((field) => `ARC-${field}\r\n`).join('') + signed);
  const end = base.indexOf('\r\n\r\n');
  const random = randomFrom(20_260_506);
  await using(await startVerifying(zones()), async (at) => {
    at.sealers.push('bank.test');
    let passed = 0;
    for (let round = 0; round < MUTATIONS; round += 20) {
      const batch = Array.from({ length: 20 }, () => {
        let raw = base;
        for (let left = 1 + random(4); left > 0; left -= 1) {
          const from = random(end);
          const cut = random(3) === 0 ? random(40) : 0;
          const piece = random(4) === 0 ? '' : PIECES[random(PIECES.length)]!;
          raw = Buffer.concat([
            raw.subarray(0, from),
            Buffer.from(piece, 'latin1'),
            raw.subarray(from + cut),
          ]);
        }
        return raw;
      });
      const results = await Promise.all(
        batch.map((raw) =>
          within(at.verify(raw, { mailFrom: raw.toString('latin1', 0, random(60)) })),
        ),
      );
      for (const { authentication, field, raw } of results) {
        const json = JSON.stringify(authentication);
        assert.not.match(json, /\\u0000|\\ud[89a-f]/i);
        assert.match(field, /^Authentication-Results: [!-~]+;\r\n(?:[\t ][\t -~]{1,997}\r\n)+$/);
        assert.ok(field.split('\r\n').every((line) => line.length <= 998));
        const header = raw.toString('latin1').split(/\r?\n\r?\n/)[0] ?? '';
        assert.not.match(header, new RegExp(`^Authentication-Results: ${HOSTNAME};`, 'im'));
        // Whoever passes has the author's signature as it was, over the fields that it covers.
        if (authentication.dmarc.result !== 'pass') continue;
        passed += 1;
        assert.is(header.match(/^from[ \t]*:/gim)?.length, 1);
        assert.match(header, /^from[ \t]*:[^:]*<x@bank\.test>/im);
      }
    }
    assert.ok(passed < MUTATIONS / 2, `${passed} of ${MUTATIONS}`);
    assert.equal(at.logged, []);
  });
});

it('random bytes are a message, too', async () => {
  const random = randomFrom(7);
  await using(await startVerifying(zones()), async (at) => {
    const some = Array.from({ length: 60 }, () =>
      Buffer.from(Array.from({ length: random(2_000) }, () => random(256))),
    );
    some.push(Buffer.alloc(0), Buffer.from('\r\n'), Buffer.from('From'));
    for (const raw of some) {
      const { authentication } = await within(at.verify(raw));
      assert.is(authentication.verdict, 'accepted');
    }
  });
});

it.run();
