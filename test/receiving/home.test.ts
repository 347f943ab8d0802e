// Mail to the rewritten sender of what we forwarded, on a real Postgres: what it settles, that it goes on to the author once,
// and what is refused.
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { composeDsn } from '../../src/mail/dsn-compose.ts';
import { mintSrs } from '../../src/mail/srs.ts';
import { reportFailedForwards } from '../../src/receiving/forward-reports.ts';
import {
  readForwardReturn,
  refuseForwardReturn,
  takeForwardReturn,
  type ForwardReturnDependencies,
  type ForwardReturnResult,
} from '../../src/receiving/home.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { mailbox } from '../support/composed.ts';
import {
  addDomain,
  addForward,
  addReceived,
  addRule,
  forgetMail,
  forwardParts,
  HOSTNAME,
  LOOP_KEY,
  nullSenderMail,
  setStates,
  SRS_KEY,
  type Destination,
  type Forwarded,
} from '../support/forwarded.ts';
import { openQueue, type Bench } from '../support/queue.ts';
import { qmailNotice, vacationReply } from '../support/returned.ts';

interface Context {
  q: Bench;
  d: ForwardReturnDependencies;
  domainId: string;
  ruleId: string;
  ready: number;
}
const test = suite<Context>('home');

const HOST = 'send.route.test';
const NOW = new Date();
const srs = (sender = 'ann@author.test', now = NOW, host = HOST): string =>
  mintSrs({ sender, host, keys: [SRS_KEY], now })!;

test.before(async (context) => {
  const q = (context.q = await openQueue());
  context.d = {
    ...forwardParts(q),
    srsKeys: [SRS_KEY],
    loopKeys: [LOOP_KEY],
    bounceRules: [],
    firstTenantId: q.tenantId,
    onReady: () => (context.ready += 1),
  };
  context.domainId = await addDomain(q);
  context.ruleId = (await addRule(q, context.domainId)).id;
});
test.before.each(async (context) => {
  context.ready = 0;
  await forgetMail(context.q);
});
test.after(({ q }) => q.stop());

async function forward(
  { q, ruleId, domainId }: Context,
  destinations: readonly Destination[],
): Promise<Forwarded> {
  const receivedId = await addReceived(q);
  return addForward(q, {
    receivedId,
    ruleId,
    destinations,
    envelopeFrom: srs(),
    signingDomainId: domainId,
  });
}

/** As a host writes it that took the message and cannot place it. */
const bounce = (token: string | null, recipient = 'far@dest.test', status = '5.1.1'): string =>
  composeDsn({
    reportingMta: 'mx.dest.test',
    from: mailbox('MAILER-DAEMON@mx.dest.test'),
    to: mailbox(srs()),
    messageId: '<bounce@mx.dest.test>',
    date: NOW,
    boundarySeed: `${token} ${recipient}`,
    arrivedAt: NOW,
    original: Buffer.from(
      `${token === null ? '' : `X-Mailstead-Loop: ${token}\r\n`}From: Ann <ann@author.test>\r\nSubject: Hello\r\n\r\nx\r\n`,
    ),
    failures: [
      {
        finalRecipient: recipient,
        originalRecipient: recipient,
        status,
        remoteMta: null,
        reason: `550 ${status} <${recipient}>: User unknown`,
        lastAttemptAt: null,
      },
    ],
  }).raw.toString('utf8');

const TRACE =
  'Return-Path: <>\r\nAuthentication-Results: mail.host.test; spf=none\r\nReceived: from mx.dest.test\r\n\tby mail.host.test with ESMTP id x; now\r\n';
const come = (
  { d }: Context,
  message: string,
  address = srs(),
  sender = 'ann@author.test',
): Promise<ForwardReturnResult> =>
  takeForwardReturn(d, {
    address,
    sender,
    raw: Buffer.from(TRACE + message),
    traceSizeBytes: TRACE.length,
  });

const states = async ({ q }: Context, emailId: string): Promise<readonly string[]> => {
  const { rows } = await q.store.pool.query<{ state: string }>(
    'select state from delivery where email_id = $1 order by position',
    [emailId],
  );
  return rows.map(({ state }) => state);
};

test('a bounce settles the delivery, shows in its timeline and goes on to the author, once', async (context) => {
  const { q } = context;
  const { emailId, token } = await forward(context, [
    { recipient: 'far@dest.test', state: 'delivered' },
  ]);
  const message = bounce(token);
  const both = await Promise.all([come(context, message), come(context, message)]);
  assert.equal(both, [{ kind: 'taken' }, { kind: 'taken' }]);
  assert.equal(await come(context, message), { kind: 'taken' }, 'the client did not hear our 250');
  assert.equal(await states(context, emailId), ['bounced']);
  const sent = await nullSenderMail(q);
  assert.is(sent.length, 1);
  const [home] = sent;
  assert.is(home?.recipient, 'ann@author.test');
  assert.is(home?.via, 'returned');
  assert.is(home?.about, emailId);
  assert.is(home?.signing, null, 'whoever has the address writes what they like');
  const received = 'Received: from mx.dest.test\r\n\tby mail.host.test with ESMTP id x; now\r\n';
  assert.is(home?.raw, `${received}Delivered-To: ${srs()}\r\n${message}`, 'the bytes as they came');
  assert.is(context.ready, 1);
  const trace = await readTrace(q.store, q.tenantId, emailId);
  const told = trace!.events.map(({ type }) => type).filter((type) => type !== 'accepted');
  assert.equal(told.toSorted(), ['author_told', 'bounced']);
  const { rowCount } = await q.store.pool.query('select 1 from suppression');
  assert.is(rowCount, 0, 'whoever shares the address could have written it');
});

test('what the author hears by mail no report of ours repeats, and the rest it does tell', async (context) => {
  const { q, d } = context;
  const both: Destination[] = [
    { recipient: 'far@dest.test', state: 'delivered' },
    { recipient: 'full@dest.test', state: 'deferred' },
  ];
  const { emailId, token } = await forward(context, both);
  await come(context, bounce(token));
  assert.equal(await states(context, emailId), ['bounced', 'deferred']);
  await setStates(q, emailId, [
    { ...both[0]!, state: 'bounced', cause: '5.1.1', reply: '550 5.1.1 no' },
    { ...both[1]!, state: 'bounced', cause: '5.2.2', reply: '552 5.2.2 full' },
  ]);
  await reportFailedForwards(d);
  await reportFailedForwards(d);
  const [returned, dsn, ...more] = await nullSenderMail(q);
  assert.is(more.length, 0);
  assert.is(returned?.via, 'returned');
  assert.is(dsn?.via, 'dsn');
  assert.match(dsn!.raw, /full@dest\.test/);
  assert.not.match(dsn!.raw, /Final-Recipient: rfc822; far@dest/);
});

test('a bounce that the author has got closes the matter', async (context) => {
  const { q, d } = context;
  const { token } = await forward(context, [{ recipient: 'far@dest.test', state: 'unknown' }]);
  await come(context, bounce(token));
  await reportFailedForwards(d);
  assert.equal(
    (await nullSenderMail(q)).map(({ via }) => via),
    ['returned'],
  );
  const { rows } = await q.store.pool.query('select is_report_open from forwarding_attempt');
  assert.equal(rows, [{ is_report_open: false }]);
});

test('while the delivery is under way: come again, and nothing is kept', async (context) => {
  const { q } = context;
  const { emailId, token } = await forward(context, [
    { recipient: 'far@dest.test', state: 'in_flight' },
  ]);
  const message = bounce(token);
  const first = await come(context, message);
  assert.is(first.kind === 'refused' && first.code, 451);
  assert.is((await nullSenderMail(q)).length, 0);
  await setStates(q, emailId, [{ recipient: 'far@dest.test', state: 'delivered' }]);
  assert.equal(await come(context, message), { kind: 'taken' });
  assert.equal(await states(context, emailId), ['bounced']);
  assert.is((await nullSenderMail(q)).length, 1);
});

test('a message that tells of no email of ours goes on all the same, and settles nothing', async (context) => {
  const { q } = context;
  const { emailId, token } = await forward(context, [
    { recipient: 'far@dest.test', state: 'delivered' },
  ]);
  const forged = token.replace(/.$/, (last) => (last === '0' ? '1' : '0'));
  await come(context, bounce(null));
  await come(context, bounce(forged));
  await come(context, vacationReply('far@dest.test'));
  await come(context, qmailNotice('far@dest.test'));
  // A token of ours, to the address of another author.
  const bobs = srs('bob@author.test');
  await come(context, bounce(token), bobs, 'bob@author.test');
  assert.equal(await states(context, emailId), ['delivered']);
  assert.equal(
    (await nullSenderMail(q)).map(({ recipient, about }) => [recipient, about]),
    [...Array.from({ length: 4 }, () => ['ann@author.test', null]), ['bob@author.test', null]],
  );
});

test('a bounce in words settles it by the token in the copy', async (context) => {
  const { emailId, token } = await forward(context, [
    { recipient: 'far@dest.test', state: 'delivered' },
  ]);
  const notice = qmailNotice('far@dest.test').replace(
    'Subject: Hello\r\n\r\n',
    `X-Mailstead-Loop: ${token}\r\nSubject: Hello\r\n\r\n`,
  );
  await come(context, notice);
  assert.equal(await states(context, emailId), ['bounced']);
});

test('of several destinations the one that is named; of none, nobody', async (context) => {
  const { q } = context;
  const { emailId, token } = await forward(context, [
    { recipient: 'a@dest.test', state: 'delivered' },
    { recipient: 'b@other.test', state: 'delivered' },
  ]);
  await q.store.pool.query(
    `update delivery set lane = 'mx:other.test' where email_id = $1 and position = 1`,
    [emailId],
  );
  await come(context, bounce(token, 'elsewhere@third.test'));
  assert.equal(await states(context, emailId), ['delivered', 'delivered']);
  await come(context, bounce(token, 'b@other.test'));
  assert.equal(await states(context, emailId), ['delivered', 'bounced']);
});

test('it cannot be used to write to somebody at will', async (context) => {
  const { q } = context;
  const { token } = await forward(context, [{ recipient: 'far@dest.test', state: 'delivered' }]);
  const results: ForwardReturnResult[] = [];
  for (let count = 0; count < 25; count += 1) {
    results.push(await come(context, `Subject: buy ${count}\r\n\r\nnow\r\n`));
  }
  assert.is(results.filter(({ kind }) => kind === 'taken').length, 20);
  const last = results.at(-1)!;
  assert.is(last.kind === 'refused' && last.code, 451);
  assert.is((await nullSenderMail(q)).length, 20);
  // Others are not in the way of it, and what is proven is not counted.
  const carol = await come(
    context,
    'Subject: x\r\n\r\nx\r\n',
    srs('carol@author.test'),
    'carol@author.test',
  );
  assert.equal(carol, { kind: 'taken' });
  assert.equal(await come(context, bounce(token)), { kind: 'taken' });
  assert.is((await nullSenderMail(q)).length, 22);
  await q.store.pool.query(`update forward_return set at = now() - interval '61 minutes'`);
  assert.equal(await come(context, 'Subject: later\r\n\r\nx\r\n'), { kind: 'taken' });
});

test('what has been here goes round in a circle', async (context) => {
  const again = `Delivered-To: ${srs().toLowerCase()}\r\n${bounce(null)}`;
  const refused = await come(context, again);
  assert.is(refused.kind === 'refused' && refused.code, 554);
  const hops = 'Received: from a by mail.host.test; now\r\n'.repeat(4);
  const tired = await come(context, hops + bounce(null));
  assert.is(tired.kind === 'refused' && tired.code, 554);
  assert.is((await nullSenderMail(context.q)).length, 0);
});

test('an address of another forwarder goes back there', async (context) => {
  const theirs = 'SRS0=abcd=XY=author.test=ann@first.test';
  const address = srs(theirs);
  assert.match(address, /^SRS1=/);
  const found = await readForwardReturn({ ...context.d, pool: context.q.store.pool }, address, NOW);
  assert.equal(found, { kind: 'open', sender: theirs });
  await come(context, bounce(null), address, theirs);
  assert.equal(
    (await nullSenderMail(context.q)).map(({ recipient }) => recipient),
    [theirs],
  );
});

test('RCPT: what is taken, and with which words the rest is refused', async ({ q, d }) => {
  const read = (address: string, now = NOW): ReturnType<typeof readForwardReturn> =>
    readForwardReturn({ ...d, pool: q.store.pool }, address, now);
  const open = { kind: 'open', sender: 'ann@author.test' } as const;
  assert.equal(await read(srs()), open);
  assert.equal(await read(srs().toLowerCase()), open);
  assert.equal(await read(srs('ann@author.test', NOW, HOSTNAME)), open, 'this host');
  assert.is(await read(srs('ann@author.test', NOW, 'elsewhere.test')), null, 'not our host');
  assert.is(await read(srs().replace(/^SRS0=./, 'SRS0=?')), null, 'forged');
  assert.is(await read('ann@send.route.test'), null);
  const later = new Date(NOW.getTime() + 23 * 86_400_000);
  assert.equal(await read(srs(), later), { kind: 'expired' });
  assert.is(refuseForwardReturn(open, ''), null);
  assert.match(refuseForwardReturn(open, 'a@b.test')?.text ?? '', /^5\.7\.1 /);
  assert.match(refuseForwardReturn({ kind: 'expired' }, '')?.text ?? '', /^5\.1\.1 .*21 days/);
});

test('where nothing says whose it is, it is the operator’s; a host says it', async (context) => {
  const { q } = context;
  const d = { ...context.d, firstTenantId: '00000000-0000-0000-0000-000000000001' };
  await come({ ...context, d }, bounce(null), srs('ann@author.test', NOW, HOSTNAME));
  await come({ ...context, d }, vacationReply('x@dest.test'));
  const { rows } = await q.store.pool.query<{ tenant_id: string }>(
    'select tenant_id from email order by id',
  );
  assert.equal(
    rows.map(({ tenant_id: tenant }) => tenant),
    ['00000000-0000-0000-0000-000000000001', q.tenantId],
  );
});

test('a large report lies in the blob store, and is gone again when it is refused', async (context) => {
  const { mkdtemp, readdir, rm } = await import('node:fs/promises');
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-home-'));
  const d = { ...context.d, blobs: openDiskBlobs(folder) };
  const { emailId, token } = await forward(context, [
    { recipient: 'far@dest.test', state: 'in_flight' },
  ]);
  const message = `${bounce(token)}${'an epilogue\r\n'.repeat(20_000)}`;
  const files = async (): Promise<number> =>
    (await readdir(folder, { recursive: true })).filter((name) => name.length > 30).length;
  assert.is((await come({ ...context, d }, message)).kind, 'refused');
  assert.is(await files(), 0);
  await setStates(context.q, emailId, [{ recipient: 'far@dest.test', state: 'delivered' }]);
  await come({ ...context, d }, message);
  await come({ ...context, d }, message);
  assert.is(await files(), 1);
  await rm(folder, { recursive: true });
});

test.run();
