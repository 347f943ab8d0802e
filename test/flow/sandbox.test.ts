// The recipients of the sandbox behave as their names say and nothing of them leaves the machine, however delivery
// is set: no question to the DNS, no connection, no message at the sink, no suppression.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string; attempts: number; last_code: string | null }[];
}

const test = suite('sandbox');
const apps: App[] = [];
let dns: DnsServer;
let peer: RawPeer;

test.before(async () => {
  peer = await startRawPeer();
  dns = await startDns({ 'resend.dev': { A: ['127.0.0.1'] } });
  const direct = {
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
  };
  apps.push(
    await startApp({ MAILSTEAD_DELIVERY: 'direct', ...direct }),
    await startApp({
      MAILSTEAD_DELIVERY: 'smarthost',
      MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${peer.port}`,
    }),
    await startApp(),
  );
});
test.after(async () => {
  for (const app of apps) await app.stop();
  await dns.stop();
  await peer.stop();
});

const timelineOf = async (app: App, id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;

const CASES: readonly (readonly [string, string, string, string | null])[] = [
  ['delivered', 'delivered', 'delivered', null],
  ['bounced', 'bounced', 'bounced', '5.1.1'],
  ['complained', 'complained', 'delivered', null],
  ['suppressed', 'suppressed', 'suppressed', 'suppressed'],
  ['nobody', 'bounced', 'bounced', '5.1.1'],
];

for (const [index, way] of ['direct', 'smarthost', 'sink'].entries()) {
  for (const [local, event, state, code] of CASES) {
    test(`${way}: ${local}@ ends as ${event}, with a label and again`, async () => {
      const app = apps[index]!;
      for (const label of ['', '+user1', '+User.1']) {
        const to = `${local}${label}@Resend.dev`;
        const id = await app.send({ to });
        await app.untilEvent(id, event);
        const { recipients, events } = await timelineOf(app, id);
        assert.equal(
          recipients.map((one) => [one.state, one.attempts, one.last_code]),
          [[state, state === 'suppressed' ? 0 : 1, code]],
        );
        const decided = events.find(({ type }) => type === state);
        if (state !== 'suppressed') assert.is(decided?.detail['host'], 'sandbox');
        const complaints = events.filter(({ type }) => type === 'complained');
        assert.is(complaints.length, local === 'complained' ? 1 : 0);
      }
      const { body } = await app.call<{ data: unknown[] }>('GET', '/suppressions');
      assert.equal(body.data, []);
    });
  }
}

test('a mixed email goes out to the others', async () => {
  const app = apps[0]!;
  dns.zones['real.test'] = { A: ['127.0.0.1'] };
  const id = await app.send({
    to: ['a@real.test', 'delivered@resend.dev', 'suppressed@resend.dev'],
  });
  const { recipients } = await until(
    () => timelineOf(app, id),
    (timeline) => timeline.recipients[0]?.state === 'delivered',
  );
  assert.equal(
    recipients.map(({ state }) => state),
    ['delivered', 'delivered', 'suppressed'],
  );
});

test('a scheduled one waits for its time', async () => {
  const app = apps[2]!;
  const at = new Date(Date.now() + 1_500).toISOString();
  const id = await app.send({ to: 'bounced@resend.dev', scheduled_at: at });
  assert.is((await app.call('GET', `/emails/${id}`)).body['last_event'], 'scheduled');
  await app.untilEvent(id, 'bounced');
});

test('nothing of it left', async () => {
  assert.equal(
    dns.questions.filter(({ name }) => name.includes('resend')),
    [],
  );
  assert.equal(
    peer.messages.map(({ rcpts }) => rcpts),
    [['TO:<a@real.test>']],
  );
  const { body } = await apps[2]!.call<{ data: unknown[] }>('GET', '/sink/messages');
  assert.equal(body.data, []);
});

test.run();
