// What a received message becomes when a rule forwards it: relayed or rebuilt, with which sender, or skipped, and why.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readLoopToken, mintLoopToken } from '../../src/mail/loop-token.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';
import { readSrs } from '../../src/mail/srs.ts';
import { read } from '../support/composed.ts';
import {
  AUTHENTICATED,
  HOST,
  LOOP_KEYS,
  message,
  SRS_KEYS,
  startForwarding,
  TRACE,
  verdict,
  type Attempt,
  type RunningForwarding,
} from '../support/forwarding.ts';

const test = suite('forward');
let f: RunningForwarding;

test.before(async () => {
  f = await startForwarding();
});
test.after(() => f.stop());

const AFTER_TRACE = TRACE.replace(/^Return-Path.*\r\n/, '');
const fresh = (headers: readonly string[], body?: string): string =>
  message({ headers, ...(body === undefined ? {} : { body }) });

test('a signed message is relayed byte for byte, with our fields on top', async () => {
  const original = message();
  const { attempt, email } = await f.sent({ message: original });
  assert.is(attempt.method, 'relayed');
  assert.match(
    attempt.explanation,
    /^Relayed as it came, because the signature of author\.test still proves its author; its envelope sender is rewritten for send\.acme\.test\.$/,
  );
  assert.ok(attempt.is_report_open);
  const text = email.raw.toString();
  assert.ok(text.endsWith(`${AFTER_TRACE}${original}`), text);
  const top = text.slice(0, -(AFTER_TRACE.length + original.length));
  const [, token = ''] =
    /^Delivered-To: info@acme\.test\r\nX-Mailstead-Loop: ([0-9a-f]+)\r\n$/.exec(top) ?? [];
  const read = readLoopToken(token, LOOP_KEYS);
  assert.is(read?.emailId, attempt.email_id);
  assert.ok(read?.isFor('INFO@acme.test'));
  assert.not(read?.isFor('other@acme.test'));
  assert.not.match(text, /Return-Path/);
  assert.match(
    email.envelope_from ?? '',
    /^SRS0=[A-Z2-7]{8}=[A-Z2-7]{2}=author\.test=ada@send\.acme\.test$/,
  );
  assert.equal(readSrs(email.envelope_from!, SRS_KEYS, new Date()), {
    kind: 'srs0',
    sender: 'ada@author.test',
  });
  assert.equal(
    [email.message_id, email.from_given, email.from_domain, email.subject, email.to_given],
    [
      '<one@author.test>',
      'Ada Author <ada@author.test>',
      'acme.test',
      'Hello there',
      ['out@far.test'],
    ],
  );
  assert.equal([email.lanes, email.states], [['mx:far.test@forward'], ['ready']]);
  assert.ok(email.may_go_unsigned);
  assert.not(email.needs_smtp_utf8);
  assert.is(email.accepted['via'], 'forward');
  assert.is(email.accepted['api_key_id'], null);
  assert.is(email.accepted['forwarding_rule_id'], f.home.ruleId);
  assert.is(email.accepted['forwarding_attempt_id'], attempt.id);
  assert.match(String(email.accepted['received_email_id']), /^[0-9a-f-]{36}$/);
});

test('whether it can still pass DMARC decides', async () => {
  const aligned = AUTHENTICATED.dkim;
  const foreign = [{ ...aligned[0]!, domain: 'list.test', aligned: false }];
  const broken = [{ ...aligned[0]!, result: 'fail' as const }];
  for (const [what, authentication, method, because] of [
    [
      'aligned',
      verdict({ dkim: aligned, dmarc: { policy: 'reject' } }),
      'relayed',
      /signature of author\.test/,
    ],
    [
      'aligned below',
      verdict({ dkim: [...foreign, ...aligned] }),
      'relayed',
      /signature of author\.test/,
    ],
    [
      'no policy',
      verdict({ dmarc: { policy: null, result: 'none' } }),
      'relayed',
      /no DMARC policy/,
    ],
    [
      'none',
      verdict({ dmarc: { policy: 'none', result: 'fail' } }),
      'relayed',
      /policy of author\.test is none/,
    ],
    ['unchecked', null, 'relayed', /not checked/],
    [
      'only SPF',
      verdict({}),
      'rebuilt',
      /no valid signature of author\.test, whose DMARC policy is reject/,
    ],
    ['quarantine', verdict({ dmarc: { policy: 'quarantine' } }), 'rebuilt', /policy is quarantine/],
    ['foreign', verdict({ dkim: foreign }), 'rebuilt', /no valid signature/],
    ['broken', verdict({ dkim: broken }), 'rebuilt', /no valid signature/],
    [
      'unknown policy',
      verdict({ dmarc: { policy: null, result: 'temperror' } }),
      'rebuilt',
      /could not be read/,
    ],
  ] as const) {
    const { attempt } = await f.sent({ message: message(), authentication });
    assert.is(attempt.method, method, what);
    assert.match(attempt.explanation, because, what);
  }
});

test('only a plausible sender is rewritten; nobody is told who may not have written it', async () => {
  for (const [what, mailFrom, authentication, isRewritten] of [
    ['spf', 'a@other.test', verdict({ dkim: AUTHENTICATED.dkim }), true],
    [
      'author',
      'a@author.test',
      verdict({ dkim: AUTHENTICATED.dkim, spf: { result: 'fail' } }),
      true,
    ],
    [
      'of the author',
      'a@bounce.author.test',
      verdict({ dkim: AUTHENTICATED.dkim, spf: { result: 'none' } }),
      true,
    ],
    [
      'of one that the author is below',
      'a@test.example',
      verdict({ dmarc: { domain: 'author.test.example' }, spf: { result: 'none' } }),
      false,
    ],
    [
      'of the signer above the author',
      'a@test.example',
      verdict({
        dkim: [{ ...AUTHENTICATED.dkim[0]!, domain: 'test.example' }],
        dmarc: { domain: 'author.test.example' },
        spf: { result: 'none' },
      }),
      true,
    ],
    [
      'another domain',
      'a@victim.test',
      verdict({ dkim: AUTHENTICATED.dkim, spf: { result: 'softfail' } }),
      false,
    ],
    [
      'looks alike',
      'a@notauthor.test',
      verdict({ dkim: AUTHENTICATED.dkim, spf: { result: 'none' } }),
      false,
    ],
    ['unchecked', 'a@author.test', null, false],
  ] as const) {
    const { attempt, email } = await f.sent({ message: message(), mailFrom, authentication });
    assert.is(attempt.is_report_open, isRewritten, what);
    if (isRewritten) assert.match(email.envelope_from ?? '', /^SRS0=/, what);
    else assert.is(email.envelope_from, null, what);
  }
  const long = await f.sent({ message: message(), mailFrom: `${'a'.repeat(60)}@author.test` });
  assert.is(long.email.envelope_from, null);
  assert.match(long.attempt.explanation, /too long to be rewritten/);
  assert.ok(long.attempt.is_report_open);
});

test('the null sender stays null; programs hear of nothing', async () => {
  const bounce = await f.sent({ message: message(), mailFrom: '' });
  assert.is(bounce.email.envelope_from, '');
  assert.not(bounce.attempt.is_report_open);
  for (const header of [
    'Auto-Submitted: auto-generated',
    'Precedence: bulk',
    'List-Id: <l.author.test>',
  ]) {
    const { attempt, email } = await f.sent({ message: fresh([header]) });
    assert.not(attempt.is_report_open, header);
    assert.match(email.envelope_from ?? '', /^SRS0=/);
  }
  assert.ok((await f.sent({ message: fresh(['Auto-Submitted: no']) })).attempt.is_report_open);
});

test('a domain that does not send has its bounces at the host', async () => {
  const receivesOnly = await f.route('quiet.test', { sending: false });
  const { email } = await f.sent({ message: message(), route: receivesOnly });
  assert.match(email.envelope_from ?? '', new RegExp(`^SRS0=.*@${HOST}$`));
});

test('a rebuilt message is the route’s own, answers go to the author, the original is attached as it came', async () => {
  const original = fresh(
    [
      'Delivered-To: someone@earlier.test',
      'Received: from x by earlier.test; Sat, 21 Nov 2026 11:58:00 +0000',
      'List-Id: <l.author.test>',
    ],
    'Grüße',
  );
  const { attempt, email } = await f.sent({ message: original, authentication: verdict({}) });
  assert.is(attempt.method, 'rebuilt');
  assert.match(
    attempt.explanation,
    /^Rebuilt as a message of the route with the original attached, because .*; its bounces come to the route\.$/,
  );
  assert.is(email.envelope_from, null);
  assert.equal(
    [email.from_given, email.from_domain, email.reply_to_given, email.subject],
    ['info@acme.test', 'acme.test', ['Ada Author <ada@author.test>'], 'Hello there'],
  );
  assert.is(email.message_id, `<${attempt.email_id}@acme.test>`);
  const { fields } = splitHeader(email.raw);
  const one = (name: string): readonly string[] => findHeaders(fields, name);
  assert.equal(one('From'), ['"Ada Author via acme.test" <info@acme.test>']);
  assert.equal(one('Reply-To'), ['Ada Author <ada@author.test>']);
  assert.equal(one('To'), ['info@acme.test']);
  assert.equal(one('Message-ID'), [email.message_id]);
  assert.equal(one('References'), ['<one@author.test>']);
  assert.equal(one('List-Id'), ['<l.author.test>']);
  assert.equal(one('Delivered-To'), ['info@acme.test', 'someone@earlier.test']);
  assert.is(one('Received').length, 2);
  assert.is(readLoopToken(one('X-Mailstead-Loop')[0] ?? '', LOOP_KEYS)?.emailId, attempt.email_id);
  assert.equal(one('Authentication-Results'), []);
  const text = email.raw.toString();
  assert.match(
    text,
    /Content-Type: message\/rfc822\r\nContent-Disposition: attachment; filename="original\.eml"\r\nContent-Transfer-Encoding: 8bit\r\n\r\n/,
  );
  assert.ok(text.includes(`\r\n\r\n${original}\r\n--=_`), text);
  const shown = await read(email.raw);
  assert.is(shown.subject, 'Hello there');
  assert.match(shown.text ?? '', /attached as it came/);
  assert.is(shown.attachments.length, 1);
});

test('an author without a name, and subjects in any script', async () => {
  const raw = message()
    .replace(/^From: .*$/m, 'From: <grace.hopper@author.test>\r')
    .replace(/^Subject: .*$/m, 'Subject: =?UTF-8?Q?Gr=C3=BC=C3=9Fe_aus_Wien?=\r')
    .replaceAll('\r\r\n', '\r\n');
  const { email } = await f.sent({ message: raw, authentication: verdict({}) });
  const { from, subject } = await read(email.raw);
  assert.equal(from?.value[0], { name: 'grace.hopper via acme.test', address: 'info@acme.test' });
  assert.is(subject, 'Grüße aus Wien');
  assert.is(email.subject, 'Grüße aus Wien');
  const none = await f.sent({
    message: message().replace(/^From: .*\r\n/m, ''),
    authentication: verdict({}),
  });
  const shown = await read(none.email.raw);
  assert.is(shown.from?.value[0]?.address, 'info@acme.test');
});

test('an automatic reply that would have to be rebuilt is not sent', async () => {
  for (const [what, about] of [
    ['an answer', { message: fresh(['Auto-Submitted: auto-replied (vacation)']) }],
    ['a bounce', { message: message(), mailFrom: '' }],
  ] as const) {
    const attempt = await f.forward({ ...about, authentication: verdict({}) });
    assert.equal([attempt.status, attempt.reason], ['skipped', 'auto_reply'], what);
    assert.match(attempt.explanation, /cannot be relayed as it came, because/);
    assert.is(attempt.email_id, null);
  }
  await f.sent({ message: fresh(['Auto-Submitted: auto-replied']) });
});

test('a message that was here before is a loop', async () => {
  const emailId = '019b0c1e-8f00-7abc-9def-0123456789ab';
  const token = (target: string, keys = LOOP_KEYS): string =>
    `X-Mailstead-Loop: ${mintLoopToken({ emailId, target, keys })}`;
  const ours = (count: number): string[] =>
    Array.from(
      { length: count },
      () =>
        `Received: from a (b [192.0.2.1])\r\n\tby ${HOST} with ESMTP id x; Sat, 21 Nov 2026 10:00:00 +0000`,
    );
  for (const [what, headers] of [
    ['delivered to the target', ['Delivered-To: INFO@acme.test']],
    ['our token', [token('info@acme.test')]],
    ['our token below another', ['X-Mailstead-Loop: x', token('info@acme.test').toUpperCase()]],
    ['five times here', ours(4)],
  ] as const) {
    const attempt = await f.forward({ message: fresh(headers) });
    assert.equal([attempt.status, attempt.reason, attempt.method], ['skipped', 'loop', null], what);
    assert.match(attempt.explanation, /loop\.$/);
  }
  const matched = await f.forward({
    message: fresh(['Delivered-To: alias@acme.test']),
    recipient: 'alias@acme.test',
  });
  assert.is(matched.reason, 'loop');
  for (const headers of [
    ['Delivered-To: other@acme.test'],
    [token('other@acme.test')],
    [token('info@acme.test', [Buffer.alloc(32, 9)])],
    ours(3),
    ours(5).map((field) => field.replace(HOST, `not-${HOST}`)),
  ]) {
    await f.sent({ message: fresh(headers) });
  }
});

test('five proven loops within an hour make the rule invalid; what anybody can write does not', async () => {
  const circle = await f.route('circle.test');
  const stateOf = async (): Promise<{
    status: string;
    invalid_reason: string | null;
    loops: number;
  }> => {
    const { rows } = await f.store.pool.query(
      'select status, invalid_reason, loops from forwarding_rule where id = $1',
      [circle.ruleId],
    );
    return rows[0] as { status: string; invalid_reason: string | null; loops: number };
  };
  for (let i = 0; i < 6; i += 1) {
    await f.forward({ route: circle, message: fresh(['Delivered-To: info@circle.test']) });
  }
  assert.equal(await stateOf(), { status: 'active', invalid_reason: null, loops: 0 });
  const back = (emailId: string): Promise<Attempt> => {
    const token = mintLoopToken({ emailId, target: circle.target, keys: LOOP_KEYS });
    return f.forward({ route: circle, message: fresh([`X-Mailstead-Loop: ${token}`]) });
  };
  const leave = async (state: string): Promise<string> => {
    const { attempt } = await f.sent({ route: circle, message: message() });
    await f.store.pool.query('update delivery set state = $2 where email_id = $1', [
      attempt.email_id,
      state,
    ]);
    return attempt.email_id!;
  };
  const looped = async (): Promise<Attempt> => back(await leave('delivered'));
  // Whoever wrote a message has its token from the bounce of it, and a destination may have one for ever.
  const [bounced, once] = [await leave('bounced'), await leave('delivered')];
  for (let i = 0; i < 6; i += 1) assert.is((await back(bounced)).reason, 'loop');
  for (let i = 0; i < 6; i += 1) assert.is((await back(once)).reason, 'loop');
  await back('019b0c1e-8f00-7abc-9def-0123456789ab');
  assert.equal(await stateOf(), { status: 'active', invalid_reason: null, loops: 1 });
  await f.store.pool.query('update forwarding_rule set loops = 0 where id = $1', [circle.ruleId]);
  for (let i = 0; i < 4; i += 1) await looped();
  assert.is((await stateOf()).loops, 4);
  // Those of the hour before do not count.
  await f.store.pool.query(
    `update forwarding_rule set loops_since = now() - interval '61 minutes' where id = $1`,
    [circle.ruleId],
  );
  for (let i = 0; i < 4; i += 1) await looped();
  assert.is((await stateOf()).status, 'active');
  await looped();
  const { status, invalid_reason: reason } = await stateOf();
  assert.is(status, 'invalid');
  assert.match(reason ?? '', /came back 5 times within an hour/);
  const after = await f.forward({ route: circle, message: message() });
  assert.equal([after.status, after.reason], ['skipped', 'rule_invalid']);
  assert.match(after.explanation, /came back 5 times/);
  // Somebody mended it: the loops of before are forgotten.
  await f.store.pool.query(
    `update forwarding_rule set status = 'active', invalid_reason = null where id = $1`,
    [circle.ruleId],
  );
  await looped();
  assert.equal(await stateOf(), { status: 'active', invalid_reason: null, loops: 1 });
});

test('a rule that is off, unsafe or gone skips, and the message stays', async () => {
  const off = await f.route('off.test', { status: 'disabled' });
  const unsafe = await f.route('unsafe.test', { status: 'invalid' });
  for (const [reason, at] of [
    ['rule_disabled', off],
    ['rule_invalid', unsafe],
    ['rule_missing', { ...f.home, ruleId: '019b0c1e-8f00-7abc-9def-0123456789ab' }],
  ] as const) {
    const attempt = await f.forward({ route: at, message: message() });
    assert.equal([attempt.status, attempt.reason, attempt.email_id], ['skipped', reason, null]);
    assert.ok(attempt.explanation.endsWith('.'));
  }
});

test('what cannot be sent fails with its reason; what is suppressed is stored, and not sent', async () => {
  const bad = await f.route('bad.test', { destinations: ['not an address'] });
  const refused = await f.forward({ route: bad, message: message() });
  assert.equal([refused.status, refused.reason], ['failed', 'refused']);
  assert.match(refused.explanation, /^The destination not an address /);
  const two = await f.route('two.test', { destinations: ['gone@far.test', 'here@far.test'] });
  await f.store.pool.query(
    `insert into suppression (tenant_id, id, address, origin, created_at)
     values ($1, gen_random_uuid(), 'gone@far.test', 'manual', now())`,
    [f.tenantId],
  );
  const { email } = await f.sent({ route: two, message: message() });
  assert.equal(email.states, ['suppressed', 'ready']);
});

test('a message whose bytes are gone fails', async () => {
  const large = fresh([], 'x'.repeat(76).concat('\r\n').repeat(4_000));
  const task = await f.arrive(f.home, large);
  const { rows } = await f.store.pool.query<{ blob_key: string }>(
    `select blob_key from received_content where blob_key is not null
       and email_id = (select received_email_id from forwarding_task where id = $1)`,
    [task],
  );
  await f.blobs.remove(rows[0]!.blob_key);
  f.nudge();
  const attempt = await f.attempt(task);
  assert.equal([attempt.status, attempt.reason], ['failed', 'message_missing']);
});

test('addresses and headers in UTF-8 say that they need SMTPUTF8; other 8-bit text does not', async () => {
  const header = await f.sent({ message: fresh(['X-Note: grün']) });
  assert.ok(header.email.needs_smtp_utf8);
  const sender = await f.sent({ message: message(), mailFrom: 'grün@author.test' });
  assert.ok(sender.email.needs_smtp_utf8);
  const latin1 = Buffer.from(fresh(['X-Note: gr\xfcn']), 'latin1');
  assert.not((await f.sent({ message: latin1 })).email.needs_smtp_utf8);
  assert.not((await f.sent({ message: fresh([], 'grün') })).email.needs_smtp_utf8);
});

test.run();
