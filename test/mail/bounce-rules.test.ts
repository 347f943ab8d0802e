// The rules of config/bounces.json: each is looked at with a reply that its provider is known to give, by way of the
// judgement that they are there for. And what a file of rules may not hold.
import { readFileSync } from 'node:fs';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { findBounceRule, readBounceRules } from '../../src/mail/bounce-rules.ts';
import { causes, classOf, outcomeOfReply } from '../../src/mail/outcome.ts';
import { parseReply, type Stage } from '../../src/mail/reply.ts';

const file: unknown = JSON.parse(
  readFileSync(new URL('../../config/bounces.json', import.meta.url), 'utf8'),
);
const rules = readBounceRules(file);

const judge = (
  host: string,
  stage: Stage,
  said: string,
  { with: used = rules, tenantId = 'one' } = {},
): { outcome: string; rule: string | null } => {
  const reply = parseReply(said)!;
  const rule = findBounceRule(used, { reply, stage, host, tenantId });
  const via = { host, address: '192.0.2.1', port: 25, tls: null };
  const outcome = outcomeOfReply({ reply, stage, via, rule });
  const cause = 'cause' in outcome ? ` ${outcome.cause}` : '';
  return { outcome: `${outcome.kind}${cause}`, rule: rule?.name ?? null };
};

const GMAIL = 'gmail-smtp-in.l.google.com';
const YAHOO = 'mta5.am0.yahoodns.net';
const MICROSOFT = 'example-com.mail.protection.outlook.com';
const OTHER = 'mx.example.org';

/** Rule, host, stage, what it says, what that means. Replies as the providers document them. */
const REPLIES: readonly (readonly [string, string, Stage, string, string])[] = [
  [
    'gmail: no such user',
    GMAIL,
    'rcpt',
    "550-5.1.1 The email account that you tried to reach does not exist. Please try\n550-5.1.1 double-checking the recipient's email address for typos or\n550 5.1.1 unnecessary spaces. https://support.google.com/mail/?p=NoSuchUser x - gsmtp",
    'bounced no_mailbox',
  ],
  [
    'gmail: no such user',
    GMAIL,
    'rcpt',
    '552-5.2.2 The email account that you tried to reach is over quota and inactive.\n552 5.2.2 https://support.google.com/mail/?p=OverQuotaPerm x - gsmtp',
    'bounced no_mailbox',
  ],
  [
    'gmail: over quota',
    GMAIL,
    'rcpt',
    "452-4.2.2 The recipient's inbox is out of storage space. Please direct the\n452 4.2.2 recipient to https://support.google.com/mail/?p=OverQuotaTemp x - gsmtp",
    'deferred mailbox_full',
  ],
  [
    'gmail: too much mail for one user',
    GMAIL,
    'rcpt',
    '450 4.2.1 The user you are trying to contact is receiving mail at a rate that prevents additional messages from being delivered. Please resend your message at a later time.',
    'deferred rate_limited',
  ],
  [
    'gmail: unusual rate',
    GMAIL,
    'dot',
    '421-4.7.28 Our system has detected an unusual rate of unsolicited mail originating\n421 4.7.28 from your IP address. To protect our users from spam, mail sent from your IP address has been temporarily rate limited. - gsmtp',
    'deferred rate_limited',
  ],
  [
    'gmail: not authenticated',
    GMAIL,
    'dot',
    "550-5.7.26 Unauthenticated email from example.com is not accepted due to domain's\n550 5.7.26 DMARC policy. - gsmtp",
    'bounced policy_refused',
  ],
  [
    'gmail: likely unsolicited',
    GMAIL,
    'dot',
    '550-5.7.1 [192.0.2.1] Our system has detected that this message is likely unsolicited mail.\n550 5.7.1 To reduce the amount of spam sent to Gmail, this message has been blocked. - gsmtp',
    'bounced content_refused',
  ],
  [
    'google groups: no such group, or not open to this sender',
    'gmail-smtp-in.l.google.com',
    'rcpt',
    '550-5.1.1 The group you tried to contact may not exist, or you may not have permission\n550 5.1.1 to post to it. https://groups.google.com/support/',
    'bounced policy_refused',
  ],
  [
    'yahoo: no such account',
    YAHOO,
    'dot',
    "554 delivery error: dd This user doesn't have a yahoo.com account (nobody@yahoo.com) [0] - mta1.mail.bf1.yahoo.com",
    'bounced no_mailbox',
  ],
  [
    'yahoo: no such account',
    YAHOO,
    'dot',
    '552 1 Requested mail action aborted, mailbox not found',
    'bounced no_mailbox',
  ],
  ['yahoo: over quota', YAHOO, 'dot', "552 user's mailbox quota exceeded", 'deferred mailbox_full'],
  [
    'yahoo: deferred for volume or complaints',
    YAHOO,
    'greeting',
    '421 4.7.0 [TSS04] Messages from 192.0.2.25 temporarily deferred due to unexpected volume or user complaints - 4.16.55.1; see https://postmaster.yahooinc.com/error-codes',
    'deferred rate_limited',
  ],
  [
    'yahoo: policy',
    YAHOO,
    'dot',
    '554 5.7.9 Message not accepted for policy reasons. See https://postmaster.yahooinc.com/error-codes',
    'bounced policy_refused',
  ],
  [
    'microsoft: recipient not found',
    MICROSOFT,
    'rcpt',
    '550 5.1.10 RESOLVER.ADR.RecipientNotFound; Recipient nobody@example.com not found by SMTP address lookup',
    'bounced no_mailbox',
  ],
  [
    'microsoft: recipient not found',
    'hotmail-com.olc.protection.outlook.com',
    'rcpt',
    '550 5.5.0 Requested action not taken: mailbox unavailable (S2017062302).',
    'bounced no_mailbox',
  ],
  [
    'microsoft: recipient not found at the edge',
    MICROSOFT,
    'rcpt',
    '550 5.4.1 Recipient address rejected: Access denied. [DB5EUR01FT029.eop-EUR01.prod.protection.outlook.com]',
    'bounced peer_permanent',
  ],
  [
    'microsoft: mailbox full',
    MICROSOFT,
    'dot',
    '554 5.2.2 mailbox full; STOREDRV.Deliver.Exception:QuotaExceededException.MapiExceptionShutoffQuotaExceeded; Failed to process message due to a permanent exception',
    'deferred mailbox_full',
  ],
  [
    'microsoft: busy, or too much from this address',
    MICROSOFT,
    'rcpt',
    '451 4.7.500 Server busy. Please try again later from [192.0.2.1]. (S77719)',
    'deferred rate_limited',
  ],
  [
    'microsoft: block list',
    MICROSOFT,
    'mail',
    "550 5.7.1 Unfortunately, messages from [192.0.2.1] weren't sent. Please contact your Internet service provider since part of their network is on our block list (S3140).",
    'bounced policy_refused',
  ],
  [
    'greylisting',
    OTHER,
    'rcpt',
    '450 4.2.0 <a@example.org>: Recipient address rejected: Greylisted, see http://postgrey.schweikert.ch/help/example.org.html',
    'deferred greylisted',
  ],
  [
    'greylisting',
    OTHER,
    'rcpt',
    '550 5.7.1 Graylisted, come back in 5 minutes',
    'deferred greylisted',
  ],
  ['full mailbox', OTHER, 'rcpt', '452 4.2.2 Mailbox full', 'deferred mailbox_full'],
  [
    'full mailbox with a code that says for good',
    OTHER,
    'rcpt',
    '552 5.2.2 <a@example.org>: Recipient address rejected: Mailbox over quota',
    'deferred mailbox_full',
  ],
  [
    'too many connections or too fast',
    OTHER,
    'mail',
    '452 4.3.2 Connection rate limit exceeded.',
    'deferred rate_limited',
  ],
  [
    'listed in a DNS block list',
    OTHER,
    'rcpt',
    '554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using zen.spamhaus.org; https://www.spamhaus.org/query/ip/192.0.2.1',
    'bounced policy_refused',
  ],
  [
    'spam',
    OTHER,
    'dot',
    '550 5.7.1 Message rejected as spam by Content Filtering.',
    'bounced content_refused',
  ],
];

for (const [name, host, stage, said, expected] of REPLIES) {
  test(`${name}: ${said.slice(0, 60)}`, () => {
    assert.equal(judge(host, stage, said), { outcome: expected, rule: name });
  });
}

test('every rule is looked at above', () => {
  assert.ok(rules.length >= 15);
  const seen = new Set(REPLIES.map(([name]) => name));
  assert.equal(
    rules.filter(({ name }) => !seen.has(name)).map(({ name }) => name),
    [],
  );
});

test("a provider's rule holds for its own hosts only", () => {
  const said = "550 This user doesn't have a yahoo.com account";
  assert.is(judge('mta5.am0.yahoodns.net.', 'dot', said).rule, 'yahoo: no such account');
  assert.is(judge('yahoodns.net.evil.example', 'dot', said).rule, null);
  assert.is(judge('notyahoodns.net', 'dot', said).rule, null);
});

test('what no rule speaks of is judged by its codes', () => {
  for (const [stage, said, expected] of [
    ['rcpt', '550 5.1.1 No such user', 'bounced no_mailbox'],
    ['rcpt', '550 5.7.1 Unable to relay', 'bounced policy_refused'],
    ['rcpt', '450 4.1.1 later', 'deferred peer_transient'],
    // The enhanced code, where it is not vague.
    ['rcpt', '550 5.1.8 no', 'bounced policy_refused'],
    ['rcpt', '550 5.7.25 no', 'bounced policy_refused'],
    ['dot', '554 5.3.4 no', 'bounced message_refused'],
    ['dot', '554 5.6.0 no', 'bounced message_refused'],
    ['dot', '554 5.6.0 it holds a virus', 'bounced content_refused'],
    ['rcpt', '550 5.7.1 user unknown', 'bounced peer_permanent'],
    ['rcpt', '550 5.7.17 no', 'bounced peer_permanent'],
    // The words, where it is vague or there is none.
    ['rcpt', '550 5.0.0 no such user', 'bounced no_mailbox'],
    ['rcpt', '550 5.0.0 your server has no reverse DNS', 'bounced policy_refused'],
    ['dot', '554 looks like phishing', 'bounced content_refused'],
    ['rcpt', '450 too many connections', 'deferred rate_limited'],
    ['rcpt', '550 5.1.1 <a@b.test> 192.0.2.1 has sent too many messages', 'deferred rate_limited'],
    // An address and a URL are no words.
    ['rcpt', '550 <spam@b.test>: user unknown', 'bounced no_mailbox'],
    ['rcpt', '550 user unknown, see https://b.test/blocked', 'bounced no_mailbox'],
    // The basic code and the stage, where nothing else tells.
    ['mail', '550 no', 'bounced policy_refused'],
    ['mail', '501 no', 'bounced peer_permanent'],
    ['rcpt', '550 no', 'bounced peer_permanent'],
    ['dot', '554 no', 'bounced peer_permanent'],
    ['rcpt', '552 no', 'deferred mailbox_full'],
    ['dot', '250 2.0.0 taken, not as spam', 'delivered'],
    // However sure a rule is: what comes before MAIL is about us.
    ['greeting', "554 This user doesn't have a yahoo.com account", 'deferred greeting_refused'],
  ] as const) {
    assert.is(judge(stage === 'greeting' ? YAHOO : OTHER, stage, said).outcome, expected, said);
  }
});

test("a tenant's rule is asked before all others, and by nobody else", () => {
  const own = {
    name: 'ours',
    tenants: ['one'],
    text: 'greylist',
    verdict: 'permanent',
    cause: 'policy_refused',
    example: '450 Greylisted',
  };
  const used = readBounceRules({ rules: [...(file as { rules: unknown[] }).rules, own] });
  const said = '450 4.7.1 Greylisted';
  assert.is(judge(OTHER, 'rcpt', said, { with: used }).outcome, 'bounced policy_refused');
  assert.is(
    judge(OTHER, 'rcpt', said, { with: used, tenantId: 'two' }).outcome,
    'deferred greylisted',
  );
});

test("the order: a tenant's rule, a provider's, the enhanced code, the basic code", () => {
  const base = { verdict: 'temporary', example: '550 5.1.1 gone' };
  const provider = { ...base, name: 'p', hosts: ['p.test'], text: 'gone', cause: 'mailbox_full' };
  const tenants = { ...base, name: 't', tenants: ['one'], text: 'gone', cause: 'rate_limited' };
  const used = readBounceRules({ rules: [provider, tenants] });
  const at = (host: string, said: string, tenantId: string): string =>
    judge(host, 'rcpt', said, { with: used, tenantId }).outcome;
  assert.is(at('mx.p.test', '550 5.1.1 gone', 'one'), 'deferred rate_limited');
  assert.is(at('mx.p.test', '550 5.1.1 gone', 'two'), 'deferred mailbox_full');
  assert.is(at('mx.q.test', '550 5.1.1 gone', 'two'), 'bounced no_mailbox');
  assert.is(at('mx.q.test', '550 5.7.1 gone', 'two'), 'bounced policy_refused');
  assert.is(at('mx.q.test', '550 gone', 'two'), 'bounced peer_permanent');
  assert.is(at('mx.q.test', '450 gone', 'two'), 'deferred peer_transient');
});

test('a cause belongs to one class', () => {
  const classes = Object.groupBy(causes, classOf);
  assert.equal(classes.block?.toSorted(), ['content_refused', 'policy_refused']);
  for (const [cause, expected] of [
    ['no_mailbox', 'permanent'],
    ['message_refused', 'permanent'],
    ['null_mx', 'permanent'],
    ['mailbox_full', 'transient'],
    ['rate_limited', 'transient'],
    ['expired', 'transient'],
    ['greeting_refused', 'transient'],
  ] as const) {
    assert.is(classOf(cause), expected, cause);
  }
});

const good = { name: 'a', text: 'x', verdict: 'temporary', cause: 'greylisted', example: '450 x' };
for (const [problem, given] of [
  [/must be \{"rules"/, []],
  [/must be \{"rules"/, null],
  [/number 1 needs a `name`/, { rules: [{ ...good, name: '' }] }],
  [/number 2 needs a `name`/, { rules: [good, null] }],
  [/"a" has `txet`/, { rules: [{ ...good, txet: 'x' }] }],
  [/"a" needs `text`/, { rules: [{ ...good, text: '' }] }],
  [/"a" has a `text` that is no regular/, { rules: [{ ...good, text: '(' }] }],
  [/"a" needs `verdict`/, { rules: [{ ...good, verdict: 'hard' }] }],
  [/"a" needs `cause`, one of /, { rules: [{ ...good, cause: 'because' }] }],
  [/"a" has `stages`/, { rules: [{ ...good, stages: ['rcpt', 'toast'] }] }],
  [/"a" has `hosts`/, { rules: [{ ...good, hosts: 'google.com' }] }],
  [/"a" has `tenants`/, { rules: [{ ...good, tenants: [] }] }],
  [/"a" needs an `example`/, { rules: [{ ...good, example: '450 y' }] }],
  [/at most 1000/, { rules: Array.from({ length: 1_001 }, () => good) }],
] as const) {
  test(`refused: ${String(problem)}`, () => {
    assert.throws(() => readBounceRules(given), problem);
  });
}

test.run();
