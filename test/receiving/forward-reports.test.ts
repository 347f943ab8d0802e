// Who hears of a forward that failed, when, and how often: on a real Postgres, with rows in every state that matters.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readReport } from '../../src/mail/report.ts';
import {
  reportFailedForwards,
  type ForwardReportDependencies,
} from '../../src/receiving/forward-reports.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import {
  addDomain,
  addForward,
  addReceived,
  addRule,
  authentication,
  forgetMail,
  forwardParts,
  nullSenderMail,
  setStates,
  type Destination,
  type NewReceived,
} from '../support/forwarded.ts';
import { openQueue, type Bench } from '../support/queue.ts';

interface Context {
  q: Bench;
  d: ForwardReportDependencies;
  domainId: string;
  ruleId: string;
  ready: number;
}
const test = suite<Context>('forward-reports');

test.before(async (context) => {
  const q = (context.q = await openQueue());
  context.d = {
    ...forwardParts(q),
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

const refused = (recipient = 'far@dest.test'): Destination => ({
  recipient,
  state: 'bounced',
  cause: '5.1.1',
  reply: `550 5.1.1 <${recipient}>: User unknown`,
});
const delivered = (recipient: string): Destination => ({ recipient, state: 'delivered' });

async function forward(
  { q, ruleId }: Context,
  destinations: readonly Destination[],
  received: NewReceived = {},
): Promise<{ attemptId: string; emailId: string }> {
  const receivedId = await addReceived(q, received);
  return addForward(q, { receivedId, ruleId, destinations });
}

const isOpen = async ({ q }: Context, attemptId: string): Promise<boolean> => {
  const { rows } = await q.store.pool.query<{ is_report_open: boolean }>(
    'select is_report_open from forwarding_attempt where id = $1',
    [attemptId],
  );
  return rows[0]!.is_report_open;
};

test('a refused forward: its author gets one report, by the route, and never another', async (context) => {
  const { q, d } = context;
  const { attemptId, emailId } = await forward(context, [refused()]);
  await Promise.all([reportFailedForwards(d), reportFailedForwards(d)]);
  await reportFailedForwards(d);
  const sent = await nullSenderMail(q);
  assert.is(sent.length, 1);
  const [dsn] = sent;
  assert.is(dsn?.recipient, 'ann@author.test');
  assert.is(dsn?.via, 'dsn');
  assert.is(dsn?.about, emailId);
  assert.is(dsn?.lane, 'mx:author.test@forward');
  assert.is(dsn?.signing, context.domainId);
  assert.is(dsn?.mayGoUnsigned, true);
  assert.match(dsn!.raw, /^From: Mail Delivery System <MAILER-DAEMON@route\.test>$/m);
  assert.match(dsn!.raw, /^Message-ID: <.*>\r\nDate:/m);
  assert.match(dsn!.raw, /Subject: Hello\r\nMessage-ID: <one@author\.test>/);
  assert.not.match(dsn!.raw, /A body|by mail\.host\.test; now/, 'neither the body nor our trace');
  assert.equal(readReport(Buffer.from(dsn!.raw))?.recipients, [
    {
      address: 'far@dest.test',
      originalAddress: 'support+x@route.test',
      action: 'failed',
      status: '5.1.1',
      diagnostic: '550 5.1.1 <far@dest.test>: User unknown',
      stage: null,
    },
  ]);
  assert.is(await isOpen(context, attemptId), false);
  assert.is(context.ready, 1);
  const trace = await readTrace(q.store, q.tenantId, emailId);
  const told = trace!.events.filter(({ type }) => type === 'author_told');
  assert.is(told.length, 1);
  assert.equal(told[0]?.detail, { email_id: dsn!.id, author: 'ann@author.test' });
});

test('a report waits for the destinations that are under way, then names all that failed', async (context) => {
  const { q, d } = context;
  const waiting: Destination = { recipient: 'slow@dest.test', state: 'deferred' };
  const { attemptId, emailId } = await forward(context, [
    refused(),
    waiting,
    delivered('ok@dest.test'),
  ]);
  await reportFailedForwards(d);
  assert.is((await nullSenderMail(q)).length, 0);
  assert.is(await isOpen(context, attemptId), true);
  await setStates(q, emailId, [
    refused(),
    { ...waiting, state: 'bounced', cause: 'expired', reply: '450 4.2.0 Come back later' },
    delivered('ok@dest.test'),
  ]);
  await reportFailedForwards(d);
  const [dsn, ...more] = await nullSenderMail(q);
  assert.is(more.length, 0);
  assert.equal(
    readReport(Buffer.from(dsn!.raw))?.recipients.map((one) => [one.address, one.status]),
    [
      ['far@dest.test', '5.1.1'],
      ['slow@dest.test', '4.4.7'],
    ],
  );
});

test('after four days what has failed is told, whatever else is under way', async (context) => {
  const { q, d } = context;
  const slow: Destination = { recipient: 'slow@dest.test', state: 'deferred' };
  const { attemptId } = await forward(context, [refused(), slow]);
  const only = await forward(context, [slow]);
  await q.store.pool.query(
    `update forwarding_attempt set created_at = now() - interval '97 hours'`,
  );
  await reportFailedForwards(d);
  const [dsn, ...more] = await nullSenderMail(q);
  assert.is(more.length, 0);
  assert.is(readReport(Buffer.from(dsn!.raw))?.recipients.length, 1);
  assert.is(await isOpen(context, attemptId), false);
  assert.is(await isOpen(context, only.attemptId), true, 'where nothing failed yet it goes on');
  await q.store.pool.query(`update forwarding_attempt set created_at = now() - interval '31 days'`);
  await reportFailedForwards(d);
  assert.is(await isOpen(context, only.attemptId), false, 'not for ever');
});

test('delivered, suppressed, canceled and lost: nothing is told', async (context) => {
  const { q, d } = context;
  const done = await forward(context, [
    delivered('a@dest.test'),
    { recipient: 'b@dest.test', state: 'suppressed' },
    { recipient: 'c@dest.test', state: 'canceled' },
  ]);
  const lost = await forward(context, [{ recipient: 'd@dest.test', state: 'unknown' }]);
  await reportFailedForwards(d);
  assert.is(await isOpen(context, done.attemptId), false);
  assert.is(await isOpen(context, lost.attemptId), true, 'it is tried once more');
  await q.store.pool.query('update delivery set unknowns = 2 where email_id = $1', [lost.emailId]);
  await reportFailedForwards(d);
  assert.is(await isOpen(context, lost.attemptId), false);
  assert.is((await nullSenderMail(q)).length, 0);
});

const withField = (field: string): string =>
  `${field}\r\nFrom: Ann <ann@author.test>\r\nSubject: Hello\r\n\r\nA body.\r\n`;
const NOBODY: readonly (readonly [string, NewReceived])[] = [
  ['the null sender', { mailFrom: '' }],
  ['a forged sender', { authentication: authentication({ spf: 'fail' }) }],
  ['a sender that SPF says nothing of', { authentication: authentication({ spf: 'none' }) }],
  ['a sender that was not checked', { authentication: null }],
  [
    'a sender of another domain than the one that DMARC vouches for',
    {
      mailFrom: 'victim@elsewhere.test',
      authentication: authentication({ spf: 'softfail', dmarc: 'pass' }),
    },
  ],
  ['what a program wrote', { original: withField('Auto-Submitted: auto-generated') }],
  ['a list', { original: withField('List-Id: <news.author.test>') }],
  ['bulk', { original: withField('Precedence: bulk') }],
  [
    'a report',
    { original: withField('Content-Type: multipart/report; report-type=delivery-status') },
  ],
  ['what is no address', { mailFrom: 'nobody' }],
];
for (const [name, received] of NOBODY) {
  test(`nobody hears of ${name}`, async (context) => {
    const { attemptId } = await forward(context, [refused()], received);
    await reportFailedForwards(context.d);
    assert.is((await nullSenderMail(context.q)).length, 0);
    assert.is(await isOpen(context, attemptId), false);
  });
}

test('nobody hears of a replay', async (context) => {
  const { attemptId } = await forward(context, [refused()]);
  await context.q.store.pool.query('update forwarding_attempt set replay_id = gen_random_uuid()');
  await reportFailedForwards(context.d);
  assert.is((await nullSenderMail(context.q)).length, 0);
  assert.is(await isOpen(context, attemptId), false);
});

test('DMARC vouches for a sender of its own domain', async (context) => {
  const proof = authentication({ spf: 'none', dmarc: 'pass' });
  await forward(context, [refused()], {
    mailFrom: 'bounce@mail.author.test',
    authentication: proof,
  });
  await reportFailedForwards(context.d);
  assert.equal(
    (await nullSenderMail(context.q)).map(({ recipient }) => recipient),
    ['bounce@mail.author.test'],
  );
});

test('of what came back by mail the author has heard', async (context) => {
  const { q, d } = context;
  const first = await forward(context, [refused()]);
  const second = await forward(context, [refused('a@dest.test'), refused('b@dest.test')]);
  await q.store.pool.query(`update forwarding_attempt set reported_positions = '{0}'`);
  await reportFailedForwards(d);
  const [dsn, ...more] = await nullSenderMail(q);
  assert.is(more.length, 0);
  assert.is(dsn?.about, second.emailId);
  assert.equal(
    readReport(Buffer.from(dsn!.raw))?.recipients.map(({ address }) => address),
    ['b@dest.test'],
  );
  assert.is(await isOpen(context, first.attemptId), false);
});

test('a rebuilt message, whose bounces nobody sends on, is watched for a day', async (context) => {
  const { q, d, ruleId } = context;
  const receivedId = await addReceived(q);
  const { attemptId, emailId } = await addForward(q, {
    receivedId,
    ruleId,
    destinations: [delivered('far@dest.test')],
    method: 'rebuilt',
  });
  await reportFailedForwards(d);
  assert.is(await isOpen(context, attemptId), true);
  await setStates(q, emailId, [refused()]);
  await reportFailedForwards(d);
  assert.is((await nullSenderMail(q)).length, 1);
  assert.is(await isOpen(context, attemptId), false);

  const late = await addForward(q, {
    receivedId,
    ruleId,
    destinations: [delivered('far@dest.test')],
    method: 'rebuilt',
  });
  await q.store.pool.query(
    `update forwarding_attempt set created_at = now() - interval '25 hours' where id = $1`,
    [late.attemptId],
  );
  await reportFailedForwards(d);
  assert.is(await isOpen(context, late.attemptId), false);
});

test('where the domain of the route cannot sign, this host reports', async (context) => {
  const { q, d } = context;
  await q.store.pool.query('update sending_domain set sending_verified = false');
  await forward(context, [refused()]);
  await reportFailedForwards(d);
  const [dsn] = await nullSenderMail(q);
  assert.is(dsn?.signing, null);
  assert.match(dsn!.raw, /^From: Mail Delivery System <MAILER-DAEMON@mail\.host\.test>$/m);
  await q.store.pool.query('update sending_domain set sending_verified = true');
});

test('an author whom the tenant does not write to any more gets nothing', async (context) => {
  const { q, d } = context;
  await q.store.pool.query(
    `insert into suppression (tenant_id, id, address, origin, created_at)
     values ($1, gen_random_uuid(), 'ann@author.test', 'manual', now())`,
    [q.tenantId],
  );
  await forward(context, [refused()]);
  await reportFailedForwards(d);
  const { rows } = await q.store.pool.query<{ state: string }>(
    `select d.state from delivery d where d.recipient = 'ann@author.test'`,
  );
  assert.equal(rows, [{ state: 'suppressed' }]);
});

test('what cannot be reported now is there the next time, and holds up nobody', async (context) => {
  const { q, d } = context;
  const first = await forward(context, [refused('a@dest.test')]);
  await forward(context, [refused('b@dest.test')]);
  let failures = 1;
  const broken = {
    ...d,
    laneOf: (domain: string) => {
      if (failures-- > 0) throw new Error('not now');
      return `mx:${domain}@forward`;
    },
  };
  await reportFailedForwards(broken);
  assert.is((await nullSenderMail(q)).length, 1);
  assert.is(await isOpen(context, first.attemptId), true, 'the mark stays with what it stands for');
  await reportFailedForwards(broken);
  assert.is((await nullSenderMail(q)).length, 2);
});

test.run();
