// What comes back from forwarded mail, over real sockets with real DNS packets: a destination that refuses, a bounce that
// comes later, senders who must not hear of it; and received mail that is forwarded again because somebody asks.
import { authenticate } from 'mailauth';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { composeDsn } from '../../src/mail/dsn-compose.ts';
import { readReport } from '../../src/mail/report.ts';
import { startApp, until, type App } from '../support/app.ts';
import { header, mailbox } from '../support/composed.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { rulesOf } from '../support/forwarding-rules.ts';
import { handIn } from '../support/hand-in.ts';
import { startRawPeer, type PeerMessage, type RawPeer } from '../support/raw-peer.ts';
import { publishedDomain } from '../support/receiving-domain.ts';
import { onDatabase } from '../support/second-tenant.ts';

interface Replay {
  readonly id: string;
  readonly status: string;
  readonly planned: number;
  readonly skipped: number;
  readonly forwards: Readonly<Record<string, number>>;
}

const HOSTNAME = 'appliance.example';
const AUTHORS = '127.0.0.4';
const test = suite('forward-home');
let app: App;
let dns: DnsServer;
let far: RawPeer;
let authors: RawPeer;
let domainId: string;

test.before(async () => {
  const noSuch = { reply: '550 5.1.1 No such user here' };
  far = await startRawPeer(
    { on: { RCPT: (line) => (line.includes('gone') ? noSuch : { reply: '250 2.1.5 ok' }) } },
    { host: '127.0.0.2' },
  );
  authors = await startRawPeer({}, { host: AUTHORS, port: far.port });
  dns = await startDns({
    [HOSTNAME]: { A: ['127.0.0.1'] },
    'far.test': { MX: ['10 mx.far.test'] },
    'mx.far.test': { A: ['127.0.0.2'] },
    'author.test': { TXT: ['v=spf1 ip4:127.0.0.1 -all'], MX: ['10 mx.author.test'] },
    'mx.author.test': { A: [AUTHORS] },
    'victim.test': { TXT: ['v=spf1 -all'], MX: ['10 mx.author.test'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(far.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_HOSTNAME: HOSTNAME,
  });
  domainId = await publishedDomain(app, dns, { name: 'acme.test', sending: 'enabled' });
});
test.after(async () => {
  for (const peer of [far, authors]) await peer.stop();
  await app.stop();
  await dns.stop();
});

/** A route of acme.test with a rule; the rule's id. */
const forwardFrom = (local: string, destinations: readonly string[]): Promise<string> =>
  rulesOf(app).forward(domainId, local, destinations);

const letter = (to: string, subject: string): string =>
  [
    'From: Ada <ada@author.test>',
    `To: ${to}`,
    `Subject: ${subject}`,
    `Message-ID: <${subject}@author.test>`,
    '',
    'Words.',
  ].join('\r\n');

async function arrive(local: string, subject: string, mailFrom: string): Promise<void> {
  const recipient = `${local}@acme.test`;
  const message = letter(recipient, subject);
  const { code, reply } = await handIn(app.appliance.mxPort!, { recipient, mailFrom, message });
  assert.is(code, 250, reply);
}

/** The one forwarded email of the message with this subject, and its received one. */
async function forwardedAs(subject: string): Promise<{ emailId: string; receivedId: string }> {
  const find = (): Promise<readonly { email_id: string; received_email_id: string }[]> =>
    onDatabase(app, async (pool) => {
      const { rows } = await pool.query<{ email_id: string; received_email_id: string }>(
        `select a.email_id, a.received_email_id from forwarding_attempt a
         join received_email r on r.tenant_id = a.tenant_id and r.id = a.received_email_id
         where r.subject = $1 and a.email_id is not null`,
        [subject],
      );
      return rows;
    });
  const [row] = await until(find, (rows) => rows.length > 0);
  return { emailId: row!.email_id, receivedId: row!.received_email_id };
}

const openReports = (): Promise<number> =>
  onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ count: number }>(
      'select count(*)::integer as count from forwarding_attempt where is_report_open',
    );
    return rows[0]!.count;
  });

const at = (peer: RawPeer, count: number): Promise<readonly PeerMessage[]> =>
  until(
    () => Promise.resolve(peer.messages),
    (messages) => messages.length >= count,
  );

test('a destination refuses: its author hears of it once, by the route; nobody else does', async () => {
  await forwardFrom('forged', ['gone-1@far.test']);
  await forwardFrom('nobody', ['gone-2@far.test']);
  await forwardFrom('info', ['gone-3@far.test', 'fine@far.test']);
  await arrive('forged', 'forged', 'someone@victim.test');
  await arrive('nobody', 'nobody', '');
  for (const subject of ['forged', 'nobody']) {
    await app.untilEvent((await forwardedAs(subject)).emailId, 'bounced');
  }
  await arrive('info', 'honest', 'ada@author.test');
  const { emailId } = await forwardedAs('honest');
  const [report] = await at(authors, 1);
  assert.match(report!.mail, /^FROM:<> /);
  assert.equal(report!.rcpts, ['TO:<ada@author.test>']);
  assert.is(header(report!.raw, 'From'), 'Mail Delivery System <MAILER-DAEMON@acme.test>');
  assert.is(header(report!.raw, 'In-Reply-To'), '<honest@author.test>');
  assert.equal(
    readReport(report!.raw)?.recipients.map((one) => [
      one.address,
      one.originalAddress,
      one.status,
      one.diagnostic,
    ]),
    [['gone-3@far.test', 'info@acme.test', '5.1.1', '550 5.1.1 No such user here']],
  );
  const seen = await authenticate(report!.raw, {
    ip: '127.0.0.1',
    helo: HOSTNAME,
    sender: '',
    mta: 'mx.author.test',
    resolver: ask as never,
  });
  const results = (seen.dkim as { results: { status: { result: string } }[] }).results;
  assert.ok(results.length > 0, 'it is signed');
  for (const { status } of results) assert.is(status.result, 'pass', JSON.stringify(status));

  const trace = await app.call<{ events: { type: string; detail: Record<string, string> }[] }>(
    'GET',
    `/emails/${emailId}/timeline`,
  );
  const told = trace.body.events.filter(({ type }) => type === 'author_told');
  assert.is(told.length, 1);
  const dsnId = told[0]!.detail['email_id']!;
  await app.untilEvent(dsnId, 'delivered');
  assert.is(await openReports(), 0, 'nothing is owed to anybody');
  assert.is(authors.messages.length, 1, 'neither the victim nor anybody else was written to');
});

test('a bounce comes later: it comes home, settles the delivery, and goes on to the author', async () => {
  const before = far.messages.length;
  await forwardFrom('later', ['later@far.test']);
  await arrive('later', 'later', 'ada@author.test');
  const { emailId } = await forwardedAs('later');
  const message = (await at(far, before + 1))[before]!;
  await app.untilEvent(emailId, 'delivered');
  const sender = /FROM:<([^>]+)>/.exec(message.mail)![1]!;
  assert.match(sender, /^SRS0=.*@send\.acme\.test$/);
  const bounce = composeDsn({
    reportingMta: 'mx.far.test',
    from: mailbox('MAILER-DAEMON@mx.far.test'),
    to: mailbox(sender),
    messageId: '<bounce@mx.far.test>',
    date: new Date(),
    boundarySeed: 'later',
    arrivedAt: new Date(),
    original: message.raw,
    failures: [
      {
        finalRecipient: 'later@far.test',
        originalRecipient: 'later@far.test',
        status: '5.1.1',
        remoteMta: null,
        reason: '550 5.1.1 The mailbox was closed',
        lastAttemptAt: null,
      },
    ],
  }).raw.toString('latin1');
  const come = (recipient: string, mailFrom = ''): Promise<{ code: number; reply: string }> =>
    handIn(app.appliance.mxPort!, { recipient, mailFrom, message: bounce.slice(0, -2) });

  const named = await come(sender, 'ada@author.test');
  assert.match(named.reply, /^550 5\.7\.1 /);
  assert.is((await come(sender.replace(/^SRS0=[^=]{3}/, 'SRS0=AAA'))).code, 550, 'forged');
  assert.is((await come(sender.replace('send.acme.test', 'far.test'))).code, 550, 'no relay');
  assert.is((await app.call('GET', `/emails/${emailId}`)).body['last_event'], 'delivered');

  const sent = authors.messages.length;
  for (const { code, reply } of [await come(sender), await come(sender)])
    assert.is(code, 250, reply);
  const home = (await at(authors, sent + 1))[sent]!;
  assert.match(home.mail, /^FROM:<> /);
  assert.equal(home.rcpts, ['TO:<ada@author.test>']);
  assert.ok(home.raw.toString('latin1').endsWith(`Delivered-To: ${sender}\r\n${bounce}`));
  assert.is((await app.untilEvent(emailId, 'bounced'))['last_event'], 'bounced');
  await until(openReports, (open) => open === 0);
  const { rows } = await onDatabase(app, (pool) =>
    pool.query(`select 1 from suppression where address = 'later@far.test'`),
  );
  assert.is(rows.length, 0);
});

test('nobody gets our proof for an author of ours: neither by a rewritten sender nor through a route', async () => {
  const [before, sent] = [far.messages.length, authors.messages.length];
  await forwardFrom('oracle', ['oracle@far.test']);
  await arrive('oracle', 'oracle', 'ada@author.test');
  const first = (await at(far, before + 1))[before]!;
  const forged = letter('x@author.test', 'pay').replace(/^From: .*/, 'From: Boss <boss@acme.test>');
  const sender = /FROM:<([^>]+)>/.exec(first.mail)![1]!;
  const come = (recipient: string, mailFrom: string): ReturnType<typeof handIn> =>
    handIn(app.appliance.mxPort!, { recipient, mailFrom, message: forged });
  assert.is((await come(sender, '')).code, 250);
  const home = (await at(authors, sent + 1))[sent]!;
  assert.is(header(home.raw, 'From'), 'Boss <boss@acme.test>');
  assert.not.match(home.raw.toString('latin1'), /^DKIM-Signature:/im);

  assert.is((await come('oracle@acme.test', 'ada@author.test')).code, 250);
  const passed = (await at(far, before + 2))[before + 1]!;
  assert.is(header(passed.raw, 'From'), '"Boss via acme.test" <oracle@acme.test>');
});

test('received mail is forwarded again on request, and the replay tells how far it is', async () => {
  const before = far.messages.length;
  const ruleId = await forwardFrom('again', ['again@far.test']);
  await arrive('again', 'again', 'ada@author.test');
  const { receivedId } = await forwardedAs('again');
  await at(far, before + 1);
  const made = await app.call<Replay>('POST', '/receiving/replays', {
    body: { kinds: ['forward'], ids: [receivedId] },
  });
  assert.is(made.status, 201, JSON.stringify(made.body));
  await at(far, before + 2);
  const byTime = await app.call<Replay>('POST', '/api/receiving/replays', {
    body: {
      start_date: new Date(Date.now() - 3_600_000).toISOString(),
      end_date: new Date().toISOString(),
      per_minute: 6_000,
      rule_id: ruleId,
    },
  });
  assert.is(byTime.status, 201, JSON.stringify(byTime.body));
  for (const { id } of [made.body, byTime.body]) {
    const { body } = await until(
      () => app.call<Replay>('GET', `/receiving/replays/${id}`),
      (answer) => answer.body.status === 'finished' && answer.body.forwards['waiting'] === 0,
    );
    assert.is(body.planned, 1);
    assert.equal(body.forwards, { waiting: 0, queued: 1, skipped: 0, failed: 0 });
  }
  const seen = await at(far, before + 3);
  for (const message of seen.slice(before)) assert.equal(message.rcpts, ['TO:<again@far.test>']);
  const list = await app.call<{ data: Replay[]; has_more: boolean }>(
    'GET',
    '/receiving/replays?limit=1',
  );
  assert.is(list.body.data[0]?.id, byTime.body.id);
  assert.is(list.body.has_more, true);
  const gone = await app.call<Replay>('DELETE', `/receiving/replays/${byTime.body.id}`);
  assert.is(gone.body.status, 'finished');
  const bad = await app.call('POST', '/receiving/replays', {
    body: { kinds: ['telegram'], ids: [receivedId] },
  });
  assert.is(bad.status, 422);
  assert.match(String(bad.body['message']), /`forward`/);
});

/** For mailauth: it throws what has a code. */
async function ask(name: string, type: string): Promise<unknown> {
  if (type !== 'TXT') throw Object.assign(new Error('not asked here'), { code: 'ENODATA' });
  const zone = dns.zones[name.toLowerCase()];
  const texts = typeof zone === 'object' && Array.isArray(zone.TXT) ? zone.TXT : [];
  if (texts.length === 0) throw Object.assign(new Error('nothing'), { code: 'ENODATA' });
  return Promise.resolve(texts.map((text: string) => [text]));
}

test.run();
