// The second half of the tour that docs/examples.json is recorded from: emails out and in, domains, webhooks and the account.
import type { App } from './app.ts';
import { until } from './app.ts';
import type { Audience } from './reference-audience.ts';
import type { Recorder } from './recorder.ts';
import { receivingDomain } from './receiving-domain.ts';
import { send as handIn } from './sink-session.ts';

interface Id {
  readonly id: string;
}
type List<T = Id> = { readonly data: readonly T[] };
interface Queue {
  readonly workers: number;
  readonly totals: Readonly<Record<string, number>>;
  readonly lanes: List<{ readonly last_success_at: string | null }>;
  readonly tenants: List;
}

const FROM = 'Ada <ada@mailstead.test>';
const NOTE = Buffer.from('A note.\n').toString('base64');

/** `endpoint`: where webhooks of the tour are received. */
export async function tourMail(
  app: App,
  recorder: Recorder,
  of: Audience & { readonly endpoint: string },
): Promise<void> {
  const { sdk, call, settled } = recorder;
  const lost = await loseEmail(app);
  const webhook = await sdk('webhooks.create', {
    endpoint: of.endpoint,
    events: ['email.delivered', 'email.bounced'],
  });
  await tourEmails(app, recorder);
  await tourWebhooks(app, recorder, webhook.id);
  await tourLaterEmails(recorder, of);
  await tourDomains(app, recorder);
  await tourReceiving(app, recorder);

  await app.untilEvent(lost, 'failed');
  await call('POST', `/emails/${lost}/release`, { include_unknown: false });

  // ---- suppressions -------------------------------------------------------------------------------
  const suppression = await sdk('suppressions.add', { email: 'gone@recipient.test' });
  await sdk('suppressions.get', 'gone@recipient.test');
  const emails = ['left@recipient.test', 'moved@recipient.test'];
  await sdk('suppressions.batch.add', { emails });
  await sdk('suppressions.list', { origin: 'manual', limit: 2 });
  await sdk('suppressions.batch.remove', { emails });
  await sdk('suppressions.remove', suppression.id);

  // ---- the operator -------------------------------------------------------------------------------
  await settled<Queue>(
    '/queue',
    ({ workers, totals, lanes, tenants }) =>
      workers === 1 &&
      totals['ready'] === 0 &&
      totals['in_flight'] === 0 &&
      tenants.data.length === 0 &&
      lanes.data.some((lane) => lane.last_success_at !== null),
  );
  const pause = await call('POST', '/queue/pauses', {
    kind: 'destination',
    name: 'mx:example.com',
    reason: 'their maintenance',
  });
  await call('GET', '/queue/pauses');
  await call('DELETE', `/queue/pauses/${pause.id}`);
  await call('GET', '/sink/messages?limit=1');
  await call('DELETE', '/sink/messages');

  // ---- the account --------------------------------------------------------------------------------
  const key = await sdk('apiKeys.create', { name: 'Web shop', permission: 'full_access' });
  await sdk('apiKeys.list', { limit: 1 });
  await sdk('apiKeys.update', key.id, { name: 'Web shop, checkout' });
  await sdk('apiKeys.remove', key.id);
  type Log = Id & { readonly endpoint: string; readonly user_agent: string };
  const isFirst = ({ endpoint, user_agent: agent }: Log): boolean =>
    endpoint === '/emails' && agent.startsWith('resend-node');
  const logs = await until(
    () => app.call<List<Log>>('GET', '/logs?method=POST&limit=100'),
    ({ body }) => body.data.some(isFirst),
  );
  await sdk('logs.list', { limit: 1 });
  await sdk('logs.get', logs.body.data.findLast(isFirst)!.id);
  await sdk('usage.get');
  await sdk('oauthGrants.list');
  await recorder.refused('oauthGrants.revoke', '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70');
}

/** An email that is given up soon, because its domain is not there any more when its time comes. */
async function loseEmail(app: App): Promise<string> {
  const domain = await app.call<Id>('POST', '/domains', { body: { name: 'parted.test' } });
  await app.call('POST', `/domains/${domain.body.id}/verify`);
  const lost = await app.send({ from: 'a@parted.test', scheduled_at: 'in 1 hour' });
  await app.call('DELETE', `/domains/${domain.body.id}`);
  const soon = new Date(Date.now() + 1_000).toISOString();
  await app.call('PATCH', `/emails/${lost}`, { body: { scheduled_at: soon } });
  return lost;
}

async function tourEmails(app: App, { sdk, call }: Recorder): Promise<void> {
  const sent = await sdk(
    'emails.send',
    {
      from: FROM,
      to: ['grace@recipient.test'],
      replyTo: 'support@mailstead.test',
      subject: 'Your order',
      html: '<p>It is on its way.</p>',
      tags: [{ name: 'kind', value: 'order' }],
      attachments: [{ filename: 'note.txt', content: NOTE, contentType: 'text/plain' }],
    },
    { idempotencyKey: 'order-1234' },
  );
  await app.untilEvent(sent.id, 'delivered');
  await sdk('emails.get', sent.id);
  await sdk('emails.list', { limit: 1 });
  await call('GET', `/emails/${sent.id}/timeline`);
  const files = await sdk<List>('emails.attachments.list', { emailId: sent.id });
  await sdk('emails.attachments.get', { emailId: sent.id, id: files.data[0]!.id });
  await sdk('emails.share', sent.id, { expiresIn: '10m' });
  await sdk('emails.metrics', { metrics: ['sent', 'delivered'], emailId: [sent.id] });
}

async function tourLaterEmails({ sdk }: Recorder, of: Audience): Promise<void> {
  await sdk('batch.send', [
    {
      from: FROM,
      to: 'ada@recipient.test',
      template: { id: of.template, variables: { NAME: 'Ada', PLAN: 'gold' } },
    },
    {
      from: FROM,
      to: 'mary@recipient.test',
      subject: 'News',
      text: 'There is some.',
      topicId: of.topic,
    },
  ]);
  const scheduled = await sdk('emails.send', {
    from: FROM,
    to: 'ada@recipient.test',
    subject: 'Later',
    text: 'It is later now.',
    scheduledAt: 'in 1 hour',
  });
  await sdk('emails.update', { id: scheduled.id, scheduledAt: 'in 2 hours' });
  await sdk('emails.cancel', scheduled.id);
}

async function tourWebhooks(app: App, { sdk }: Recorder, webhookId: string): Promise<void> {
  await sdk('webhooks.list');
  await sdk('webhooks.get', webhookId);
  const path = `/webhooks/${webhookId}/events`;
  await until(
    () => app.call<List<{ status: string }>>('GET', path),
    ({ body }) => body.data.length > 0 && body.data.every(({ status }) => status === 'success'),
  );
  const events = await sdk<List>('webhooks.events.list', { webhookId, limit: 1 });
  const event = { webhookId, eventId: events.data[0]!.id };
  await sdk('webhooks.events.get', event);
  await sdk('webhooks.events.attempts.list', event);
  await sdk('webhooks.events.replay', event);
  await sdk('webhooks.update', webhookId, { events: ['email.delivered'], status: 'disabled' });
  await sdk('webhooks.rotateSigningSecret', webhookId);
  await sdk('webhooks.remove', webhookId);
}

async function tourDomains(app: App, { sdk }: Recorder): Promise<void> {
  const domain = await sdk('domains.create', {
    name: 'news.mailstead.test',
    customReturnPath: 'bounces',
    region: 'eu-west-1',
    tls: 'opportunistic',
    capabilities: { sending: 'enabled', receiving: 'disabled' },
  });
  await sdk('domains.verify', domain.id);
  await until(
    () => app.call('GET', `/domains/${domain.id}`),
    ({ body }) => body['status'] === 'verified',
  );
  await sdk('domains.get', domain.id);
  await sdk('domains.list', { limit: 1 });
  await sdk('domains.update', { id: domain.id, clickTracking: true, tls: 'enforced' });
  const claim = await sdk<{ domain_id: string }>('domains.claims.create', { name: 'claimed.test' });
  await sdk('domains.claims.get', claim.domain_id);
  await sdk('domains.claims.verify', claim.domain_id);
  await sdk('domains.remove', domain.id);
}

async function tourReceiving(app: App, { sdk, call }: Recorder): Promise<void> {
  const domainId = await receivingDomain(app, 'shop.test');
  const route = await call('POST', '/receiving/routes', {
    domain_id: domainId,
    type: 'exact',
    local_part: 'support',
  });
  await call('GET', '/receiving/routes');
  await call('GET', `/receiving/routes/${route.id}`);
  await call('PATCH', `/receiving/routes/${route.id}`, { local_part: 'help' });
  const rule = await call('POST', '/receiving/forwarding-rules', {
    route_id: route.id,
    destinations: ['desk@recipient.test'],
  });
  await call('POST', '/receiving/routes/test', {
    recipient: 'help+orders@shop.test',
    from: 'grace@recipient.test',
  });
  await handIn(app.appliance.mxPort!, {
    from: 'grace@recipient.test',
    to: ['help@shop.test'],
    raw: [
      'From: Grace <grace@recipient.test>',
      'To: help@shop.test',
      'Subject: Where is my order?',
      'Message-ID: <1@recipient.test>',
      'Date: Wed, 06 May 2026 09:00:00 +0000',
      'MIME-Version: 1.0',
      'Content-Type: multipart/mixed; boundary=part',
      '',
      '--part',
      'Content-Type: text/plain; charset=utf-8',
      '',
      'Attached is what I bought.',
      '--part',
      'Content-Type: text/plain; name=bill.txt',
      'Content-Disposition: attachment; filename=bill.txt',
      '',
      'One book',
      '--part--',
      '',
    ].join('\r\n'),
  });
  type Received = Id & { attachments: Id[]; forwarding_attempts?: { status: string }[] };
  const list = await until(
    () => app.call<List<Received>>('GET', '/emails/receiving'),
    ({ body }) => body.data.length === 1 && body.data[0]!.attachments.length === 1,
  );
  const emailId = list.body.data[0]!.id;
  const attempts = (body: Received): string[] =>
    (body.forwarding_attempts ?? []).map(({ status }) => status);
  await until(
    () => app.call<Received>('GET', `/emails/receiving/${emailId}`),
    ({ body }) => attempts(body).length > 0 && !attempts(body).includes('pending'),
  );
  await sdk('emails.receiving.list', { limit: 1 });
  const received = await sdk<Received>('emails.receiving.get', emailId);
  await sdk('emails.receiving.attachments.list', { emailId });
  await sdk('emails.receiving.attachments.get', { emailId, id: received.attachments[0]!.id });
  await call('GET', '/receiving/forwarding-rules');
  await call('GET', `/receiving/forwarding-rules/${rule.id}`);
  await call('PATCH', `/receiving/forwarding-rules/${rule.id}`, {
    destinations: ['desk@recipient.test', 'ada@recipient.test'],
  });
  const replay = await call('POST', '/receiving/replays', { ids: [emailId], per_minute: 60 });
  await call('GET', '/receiving/replays');
  await call('GET', `/receiving/replays/${replay.id}`);
  await call('DELETE', `/receiving/replays/${replay.id}`);
  await call('DELETE', `/receiving/forwarding-rules/${rule.id}`);
  await call('DELETE', `/receiving/routes/${route.id}`);
}
