// What comes back: refusals while we deliver, bounces and complaints by mail days later. Real sockets out (a peer
// that takes or refuses) and in (the inbound listener), and what the email, its timeline and the suppression list
// say afterwards.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type PeerActions, type RawPeer } from '../support/raw-peer.ts';
import { deliveryReport, feedbackReport, qmailNotice, vacationReply } from '../support/returned.ts';
import { onDatabase } from '../support/second-tenant.ts';
import { closeAll, dial, failure, send } from '../support/sink-session.ts';

interface Timeline {
  events: { type: string; recipient: string | null; detail: Record<string, unknown> }[];
  recipients: { state: string; attempts: number; last_code: string | null }[];
}

const test = suite('bounces');
let app: App;
let dns: DnsServer;
let peer: RawPeer;
let port: number;
let count = 0;
/** What the peer says to RCPT and to the dot; by the local part's first word. */
const answers: Record<string, PeerActions> = {};

const answerTo = (line: string): PeerActions =>
  answers[/<(\w+)/.exec(line)?.[1] ?? ''] ?? { reply: '250 2.1.5 ok' };

test.before(async () => {
  peer = await startRawPeer({ on: { RCPT: answerTo } });
  dns = await startDns({ 'r.test': { A: ['127.0.0.1'] } });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '100ms,300ms',
    MAILSTEAD_HOSTNAME: 'appliance.example',
  });
  port = app.appliance.mxPort!;
});
test.after.each(closeAll);
test.after(async () => {
  await app.stop();
  await dns.stop();
  await peer.stop();
});

const timelineOf = async (id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;
const eventOf = async (id: string): Promise<unknown> =>
  (await app.call('GET', `/emails/${id}`)).body['last_event'];
const suppressionOf = async (address: string): Promise<Record<string, unknown> | null> => {
  const { status, body } = await app.call('GET', `/suppressions/${encodeURIComponent(address)}`);
  return status === 200 ? body : null;
};
const come = (to: string, raw: string, from = ''): Promise<{ response: string }> =>
  send(port, { from, to: [to], raw });

/** A recipient that nobody has used. */
const anyone = (word = 'user'): string => `${word}${(count += 1)}@r.test`;

/** An email that was delivered to the peer, and the return path that it gave. */
async function deliver(to: string | readonly string[]): Promise<{ id: string; path: string }> {
  const before = peer.messages.length;
  const id = await app.send({ to });
  await app.untilEvent(id, 'delivered');
  const sent = peer.messages
    .slice(before)
    .find(({ rcpts }) => String(to).includes(pathOf(rcpts[0]!)));
  return { id, path: pathOf(sent!.mail) };
}
const pathOf = (line: string): string => /<([^<>]*)>/.exec(line)![1]!;

test('a refused recipient is suppressed at once, and the next email is not attempted', async () => {
  const to = anyone('Gone');
  answers[/^\w+/.exec(to)![0]] = { reply: '550 5.1.1 no such user' };
  const id = await app.send({ to });
  await app.untilEvent(id, 'bounced');
  const suppression = await suppressionOf(to);
  assert.is(suppression?.['origin'], 'bounce');
  assert.is(suppression?.['source_id'], id);
  assert.is(suppression?.['email'], to.toLowerCase());
  const { events } = await timelineOf(id);
  assert.is(events.at(-1)?.detail['cause'], 'no_mailbox');

  const next = await app.send({ to: to.toUpperCase() });
  assert.is(await eventOf(next), 'suppressed');
  const { recipients } = await timelineOf(next);
  assert.equal(
    recipients.map(({ state, attempts }) => [state, attempts]),
    [['suppressed', 0]],
  );
});

test('who is taken off the list is tried again, and listed again when nothing has changed', async () => {
  const to = anyone('back');
  const local = /^\w+/.exec(to)![0];
  answers[local] = { reply: '550 5.1.1 no such user' };
  await app.untilEvent(await app.send({ to }), 'bounced');
  const path = `/suppressions/${encodeURIComponent(to)}`;
  assert.is((await app.call('DELETE', path)).status, 200);
  const again = await app.send({ to });
  await app.untilEvent(again, 'bounced');
  assert.is((await suppressionOf(to))?.['source_id'], again);
  assert.is((await app.call('DELETE', path)).status, 200);
  answers[local] = { reply: '250 2.1.5 ok' };
  await app.untilEvent(await app.send({ to }), 'delivered');
  assert.is(await suppressionOf(to), null);
});

const harmless: readonly (readonly [string, string, string])[] = [
  ['policy', '550 5.7.1 policy', 'bounced'],
  ['full', '552 5.2.2 over quota', 'delivery_delayed'],
  ['listed', '554 5.7.1 blocked using zen.spamhaus.org', 'bounced'],
  ['grey', '550 5.7.1 Greylisted', 'delivery_delayed'],
];
for (const [word, reply, event] of harmless) {
  test(`"${reply}" suppresses nobody`, async () => {
    const to = anyone(word);
    answers[/^\w+/.exec(to)![0]] = { reply };
    const id = await app.send({ to });
    await app.untilEvent(id, event);
    assert.is(await suppressionOf(to), null);
    if (event === 'delivery_delayed') answers[/^\w+/.exec(to)![0]] = { reply: '250 2.1.5 ok' };
  });
}

test('a rule of config/bounces.json names the cause in the timeline', async () => {
  const to = anyone('listed');
  answers[/^\w+/.exec(to)![0]] = { reply: '554 5.7.1 Client host blocked using zen.spamhaus.org' };
  const id = await app.send({ to });
  await app.untilEvent(id, 'bounced');
  assert.is((await timelineOf(id)).events.at(-1)?.detail['cause'], 'policy_refused');
});

test('a bounce by mail turns delivered into bounced, once, and suppresses', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  assert.match((await come(path, deliveryReport({ recipient: to }))).response, /^250 2\.0\.0 /);
  const email = await app.untilEvent(id, 'bounced');
  assert.is((email['provider_last_error'] as { code: string }).code, '5.1.1');
  await come(path, deliveryReport({ recipient: to }));
  const { events, recipients } = await timelineOf(id);
  const told = events.filter(({ type }) => type === 'bounced');
  assert.is(told.length, 1);
  assert.is(told[0]!.recipient, to);
  assert.is(told[0]!.detail['source'], 'dsn');
  assert.is(told[0]!.detail['reporter'], 'mx.recipient.test');
  assert.match(String(told[0]!.detail['reply']), /^550 5\.1\.1 /);
  assert.equal(
    recipients.map(({ state, attempts, last_code }) => [state, attempts, last_code]),
    [['bounced', 1, '5.1.1']],
  );
  assert.is((await suppressionOf(to))?.['source_id'], id);
});

test('a bounce in words does the same, whatever the case of its return path', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  await come(path.toUpperCase(), qmailNotice(to), 'MAILER-DAEMON@mx.recipient.test');
  await app.untilEvent(id, 'bounced');
  assert.is((await suppressionOf(to))?.['origin'], 'bounce');
});

test('of two recipients only the one that bounced is bounced', async () => {
  // Each claim takes what a destination has room for, so the two may go apart; with room for both they share a return path.
  let first = anyone();
  let second = anyone();
  let id = '';
  const [sent] = await until(
    async () => {
      [first, second] = [anyone(), anyone()];
      const before = peer.messages.length;
      id = await app.send({ to: [first, second] });
      await app.untilEvent(id, 'delivered');
      return peer.messages.slice(before);
    },
    ({ length }) => length === 1,
  );
  assert.is(sent?.rcpts.length, 2, 'they share a return path');
  await come(pathOf(sent!.mail), deliveryReport({ recipient: second }));
  await app.untilEvent(id, 'bounced');
  assert.equal(
    (await timelineOf(id)).recipients.map(({ state }) => state),
    ['delivered', 'bounced'],
  );
  assert.is(await suppressionOf(first), null);
});

test('a bounce of somebody behind an alias suppresses nobody', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  const raw = deliveryReport({ recipient: 'hidden@internal.test' });
  await come(path, raw);
  await app.untilEvent(id, 'bounced');
  assert.is(await suppressionOf(to), null);
  assert.is(await suppressionOf('hidden@internal.test'), null);
});

test('a report of a delay is noted and changes nothing', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  await come(path, deliveryReport({ recipient: to, action: 'delayed', status: '4.4.1' }));
  const { events } = await timelineOf(id);
  assert.equal(
    events.slice(-1).map(({ type, detail }) => [type, detail['action']]),
    [['reported', 'delayed']],
  );
  assert.is(await eventOf(id), 'delivered');
});

test('a report in the words of a policy bounces and suppresses nobody', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  const about = {
    recipient: to,
    status: '5.7.1',
    diagnostic: '554 5.7.1 Message rejected as spam',
  };
  await come(path, deliveryReport(about));
  await app.untilEvent(id, 'bounced');
  assert.is(await suppressionOf(to), null);
});

test('what is no report is taken and dropped', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  assert.match((await come(path, vacationReply(to))).response, /^250 /);
  assert.match((await come(path, 'Subject: hello?\r\n\r\nWho is this?\r\n', to)).response, /^250 /);
  assert.match((await come(path, 'no header at all')).response, /^250 /);
  assert.is(await eventOf(id), 'delivered');
  const { body } = await app.call<{ data: unknown[] }>('GET', '/emails/receiving?limit=1');
  assert.equal(body.data, []);
});

test('a complaint shows, suppresses, and is told once', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  const raw = feedbackReport({ recipient: to, returnPath: path });
  for (let times = 0; times < 2; times++) await come(path, raw, 'abusedesk@provider.test');
  await app.untilEvent(id, 'complained');
  const told = (await timelineOf(id)).events.filter(({ type }) => type === 'complained');
  assert.equal(
    told.map(({ detail }) => [detail['source'], detail['feedback_type']]),
    [['arf', 'abuse']],
  );
  const suppression = await suppressionOf(to);
  assert.equal([suppression?.['origin'], suppression?.['source_id']], ['complaint', id]);
});

test('a complaint that is sent to another address of ours finds its email by the return path in it', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  await come(
    'fbl@mailstead.test',
    feedbackReport({ recipient: to, returnPath: path }),
    'x@provider.test',
  );
  await app.untilEvent(id, 'complained');
  const { body } = await app.call<{ data: unknown[] }>('GET', '/emails/receiving?limit=1');
  assert.is(body.data.length, 1, 'and is kept as any mail is');
});

test('"not spam" is no complaint', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  await come(path, feedbackReport({ recipient: to, returnPath: path, type: 'not-spam' }));
  assert.is(await eventOf(id), 'delivered');
  assert.is(await suppressionOf(to), null);
});

test('a forged or foreign return path is refused at RCPT', async () => {
  const { path } = await deliver(anyone());
  const [local, domain] = path.split('@') as [string, string];
  const forged = `${local.slice(0, -4)}${local.endsWith('aaaa') ? 'bbbb' : 'aaaa'}@${domain}`;
  const wire = await dial(port);
  await wire.say('MAIL FROM:<>');
  assert.match(await wire.say(`RCPT TO:<${forged}>`), /^550 5\.1\.1 /);
  assert.match(await wire.say(`RCPT TO:<postmaster@${domain}>`), /^550 5\.1\.1 /);
  assert.match(await wire.say('RCPT TO:<x@appliance.example>'), /^550 5\.1\.1 /);
  assert.match(await wire.say('RCPT TO:<x@elsewhere.test>'), /^550 5\.7\.1 /);
  assert.match(await wire.say(`RCPT TO:<${path}>`), /^250 /);
  assert.match(await wire.say('RCPT TO:<x@mailstead.test>'), /^452 4\.5\.3 /, 'one at a time');
});

test('the return path of an email that is gone is taken, and nothing happens', async () => {
  const to = anyone();
  const { id, path } = await deliver(to);
  await onDatabase(app, (pool) => pool.query('delete from email where id = $1', [id]));
  assert.match((await come(path, deliveryReport({ recipient: to }))).response, /^250 /);
  assert.is(await suppressionOf(to), null);
});

test('a bounce that overtakes the result of its own attempt is asked to come again', async () => {
  const to = anyone('slow');
  const { promise: held, resolve: go } = Promise.withResolvers<void>();
  const { promise: begun, resolve: begin } = Promise.withResolvers<string>();
  const slow = await startRawPeer(
    {
      on: {
        RCPT: (_line, { mail }) => {
          begin(pathOf(mail));
          return { reply: '250 2.1.5 ok' };
        },
        dot: () => held.then(() => ({ reply: '250 2.0.0 taken' })),
      },
    },
    { host: '127.0.1.1', port: peer.port },
  );
  try {
    dns.zones['slow.test'] = { A: ['127.0.1.1'] };
    const id = await app.send({ to: to.replace('r.test', 'slow.test') });
    const path = await begun;
    const raw = deliveryReport({ recipient: to });
    assert.match(await failure(come(path, raw)), /^451 4\.2\.1 /);
    go();
    await app.untilEvent(id, 'delivered');
    await come(path, raw);
    await app.untilEvent(id, 'bounced');
  } finally {
    go();
    await slow.stop();
  }
});

test('an address that is suppressed while its delivery waits for a retry is not tried again', async () => {
  const to = anyone('later');
  const local = /^\w+/.exec(to)![0];
  answers[local] = { reply: '450 4.2.1 later' };
  const id = await app.send({ to });
  await app.untilEvent(id, 'delivery_delayed');
  const { status } = await app.call('POST', '/suppressions', { body: { email: to } });
  assert.is(status, 201);
  const { recipients, events } = await until(
    () => timelineOf(id),
    (timeline) => timeline.recipients[0]?.state === 'suppressed',
  );
  assert.is(await eventOf(id), 'suppressed');
  const begun = events.filter(({ type }) => type === 'attempt_started').length;
  assert.is(recipients[0]?.attempts, begun, 'the attempt that was not made is not in the history');
  assert.equal(
    events.slice(-1).map(({ type, recipient }) => [type, recipient]),
    [['suppressed', to]],
  );
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
