// Forged authors: whoever a mail program may show as the author is one, and a check that cannot be made is no way in.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { dmarcRefusal } from '../../src/receiving/verdicts.ts';
import { plainField } from '../../src/receiving/verdicts-authors.ts';
import { letter, startVerifying, type Verifying } from '../support/verifier.ts';

const zones = () => ({
  '_dmarc.bank.test': { TXT: ['v=DMARC1; p=reject'] },
});

const it = suite('forged authors');

async function using(at: Verifying, use: (at: Verifying) => Promise<void>): Promise<void> {
  try {
    await use(at);
  } finally {
    await at.stop();
  }
}

it('an author that some program may show is an author', async () => {
  const forged = [
    'ceo@bank(x).test',
    '<ceo@bank .test>',
    '<ceo (a)@(b (c))bank.\r\n test>',
    'ceo@=?utf-8?q?bank.test?=',
    'ceo@=?utf-8?B?YmFuay50ZXN0?=',
    'ceo@xn--bank-.test',
    'ceo@xn--bank-rga.test',
    'ceo@ba\u00adnk.test',
    'ceo@bank\u200b.test',
    'ceo@\uff42ank.test',
    'ceo@bank\u3002test',
    'g: x@else.test, ceo@bank.test;',
    'x@else.test\r\nFrom: ceo@bank.test',
  ];
  const honest = [
    'x@else.test',
    '"ceo@bank.test" <x@else.test>',
    'Mr. X (of bank.test) <x@else.test>',
    '"x . y" <x@else.test>',
    '=?utf-8?q?ceo=40bank=2Etest?= <x@else.test>',
    'x@xn--bcher-kva.test',
    'x@b\u00fccher.test',
    'root@localhost',
    'x@[192.0.2.1]',
  ];
  await using(await startVerifying(zones()), async (at) => {
    for (const from of [...forged, ...honest]) {
      const { authentication } = await at.verify(letter(from), { mailFrom: 'x@else.test' });
      const wanted = honest.includes(from) ? null : 550;
      const reply = dmarcRefusal(authentication, 'reject');
      assert.is(reply?.code ?? null, wanted, from);
    }
    assert.equal(at.logged, []);
  });
});

it('a field that is made to be long is read in one go', () => {
  // With a cost that grows with the square this takes many minutes.
  for (const piece of [' ', '. ', '(', '"\\"', '\\', '" "']) {
    const field = `From: ${piece.repeat(200_000)}x`;
    assert.ok((plainField(field)?.length ?? 0) <= field.length);
  }
});

it('who forges cannot name what has no answer', async () => {
  await using(await startVerifying(zones()), async (at) => {
    at.dns.zones['lame.bank.test'] = 'SERVFAIL';
    at.dns.zones['lame._domainkey.bank.test'] = 'SERVFAIL';
    const forged = letter('ceo@bank.test');
    const signed = `DKIM-Signature: v=1; a=rsa-sha256; d=bank.test; s=lame; h=from; bh=aa; b=aa\r\n`;
    const ways = [
      at.verify(forged, { mailFrom: 'x@lame.bank.test' }),
      at.verify(forged, { mailFrom: '', helo: 'lame.bank.test' }),
    ];
    for (const { authentication } of await Promise.all(ways)) {
      assert.is(authentication.dmarc.result, 'temperror');
      assert.is(dmarcRefusal(authentication, 'reject')?.code, 451);
      assert.is(dmarcRefusal(authentication, 'tag'), null);
    }
    const { authentication } = await at.verify(signed + forged);
    assert.ok(dmarcRefusal(authentication, 'reject') !== null);
    // An author whose policy nobody knows is taken: a silent DNS does not stop the mail.
    at.dns.zones['_dmarc.bank.test'] = 'SERVFAIL';
    const unknown = await at.verify(forged, { mailFrom: 'x@lame.bank.test' });
    assert.is(dmarcRefusal(unknown.authentication, 'reject'), null);
  });
});

it('who sends too much at once cannot hide a forged message in it', async () => {
  const reader = {
    read: () => new Promise<never>(() => undefined),
    close: () => Promise.resolve(),
  };
  await using(await startVerifying(zones(), { reader, atOnceMax: 1 }), async (at) => {
    const all = await Promise.all([1, 2].map(() => at.verify(letter('ceo@bank.test'))));
    for (const { authentication } of all) {
      assert.is(authentication.dmarc.result, 'temperror');
      assert.is(dmarcRefusal(authentication, 'reject')?.code, 451);
      assert.is(dmarcRefusal(authentication, 'tag'), null);
    }
  });
});

it.run();
