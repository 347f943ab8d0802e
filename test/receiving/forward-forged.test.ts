// Mail that names an author of the route's or this host's organization: sent on as it came it would pass for that author's,
// by our envelope sender and our signature, whoever wrote it. And loops that show nowhere in a message.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { REPEATS_MAX } from '../../src/receiving/forward-repeats.ts';
import {
  AUTHENTICATED,
  message,
  startForwarding,
  verdict,
  type RunningForwarding,
} from '../support/forwarding.ts';

const test = suite('forward forged');
let f: RunningForwarding;

test.before(async () => {
  f = await startForwarding();
});
test.after(() => f.stop());

test('a forged author of our own is not sent on as what would pass for proven', async () => {
  const of = (from: string): string => message().replace(/^From: .*/, `From: ${from}`);
  const open = { result: 'none', policy: null, aligned: { spf: false, dkim: false } } as const;
  const unproven = verdict({ dmarc: open, spf: { domain: 'evil.test' } });
  for (const from of [
    'Boss <boss@acme.test>',
    'boss@hr.ACME.test',
    'Host <root@host.test>',
    'x@evil.test, boss@acme.test',
    '<boss@ (here) acme.test>',
    'x@evil.test\r\nFrom: boss@acme.test',
  ]) {
    for (const authentication of [unproven, null]) {
      const { attempt, email } = await f.sent({ message: of(from), authentication });
      assert.is(attempt.method, 'rebuilt', from);
      assert.match(attempt.explanation, /nothing proves that its author wrote it/);
      assert.match(email.raw.toString(), /^From: .*via acme\.test.* <info@acme\.test>$/m);
    }
    const bounce = await f.forward({ message: of(from), authentication: unproven, mailFrom: '' });
    assert.is(bounce.reason, 'auto_reply', from);
  }
  for (const proven of [
    verdict({ dkim: AUTHENTICATED.dkim, dmarc: open }),
    verdict({ dmarc: { result: 'pass', policy: null } }),
    verdict({ dmarc: open, spf: { domain: 'send.acme.test' } }),
  ]) {
    const { attempt } = await f.sent({ message: of('boss@acme.test'), authentication: proven });
    assert.is(attempt.method, 'relayed');
  }
  for (const from of [
    '"boss@acme.test" <x@evil.test>',
    'x@notacme.test',
    'x@acme.test.evil.test',
  ]) {
    const { attempt } = await f.sent({ message: of(from), authentication: unproven });
    assert.is(attempt.method, 'relayed', from);
  }
  const itself = await f.forward({ message: of('INFO@acme.test'), authentication: unproven });
  assert.equal([itself.status, itself.reason], ['skipped', 'loop']);
  const british = await f.route('acme.co.uk');
  const { attempt } = await f.sent({
    message: of('x@other.co.uk'),
    route: british,
    authentication: unproven,
  });
  assert.is(attempt.method, 'relayed');
});

test('one Message-ID for one address again and again is a loop, whatever was taken off the message', async () => {
  const circle = await f.route('circle.test');
  let serial = 0;
  /** Equal messages would be one. */
  const stripped = (id = 'circle@author.test'): string =>
    message({ headers: [`X-Serial: ${(serial += 1)}`] })
      .replace(/^Message-ID: .*$/m, `Message-ID: <${id}>`)
      .replace(/^Date: .*$/m, 'Date: Sat, 21 Nov 2026 10:00:00 +0000');
  for (let i = 0; i < REPEATS_MAX; i += 1) await f.sent({ route: circle, message: stripped() });
  const again = await f.forward({ route: circle, message: stripped() });
  assert.equal([again.status, again.reason], ['skipped', 'loop']);
  assert.match(
    again.explanation,
    /Message-ID and Date was forwarded for info@circle\.test 5 times/,
  );
  await f.sent({ route: circle, message: stripped('other@author.test') });
  await f.sent({ route: circle, message: stripped(), recipient: 'other@circle.test' });
  await f.sent({ message: stripped() });
  for (const name of ['Message-ID', 'Date']) {
    await f.sent({
      route: circle,
      message: stripped().replace(new RegExp(`^${name}: .*\\r\\n`, 'm'), ''),
    });
  }
});

test.run();
