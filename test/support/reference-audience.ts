// The first half of the tour that docs/examples.json is recorded from: contacts and what one writes to them.
import type { App } from './app.ts';
import { until } from './app.ts';
import type { Recorder } from './recorder.ts';

interface Id {
  readonly id: string;
}
// oxlint-disable-next-line typescript/no-unnecessary-type-parameters -- the caller knows the form
type WaitFor = <T>(path: string, done: (body: T) => boolean) => Promise<unknown>;
type List<T = Id> = { readonly data: readonly T[] };

/** Ids that the other half needs. */
export interface Audience {
  readonly template: string;
  readonly topic: string;
  /** Comes by what takes a while, once the rest is done. */
  readonly finish: () => Promise<void>;
}

export async function tourAudience(app: App, { sdk, call }: Recorder): Promise<Audience> {
  /** Asks without recording until it is so. */
  const waitFor: WaitFor = (path, done) =>
    until(
      () => app.call<Parameters<typeof done>[0]>('GET', path),
      ({ body }) => done(body),
    );

  // What is known of a domain is kept a while, so this comes before the first email.
  const domains = await app.call<List<{ id: string; name: string }>>('GET', '/domains');
  const home = domains.body.data.find(({ name }) => name === 'mailstead.test')!;
  await app.call('PATCH', `/domains/${home.id}`, { body: { click_tracking: true } });

  // ---- properties, segments, topics ---------------------------------------------------------------
  const property = await sdk('contactProperties.create', {
    key: 'plan',
    type: 'string',
    fallbackValue: 'free',
  });
  await sdk('contactProperties.list');
  await sdk('contactProperties.get', property.id);
  await sdk('contactProperties.update', { id: property.id, fallbackValue: 'basic' });

  const segment = await sdk('segments.create', { name: 'Customers' });
  await sdk('segments.get', segment.id);
  await sdk('segments.list');
  await sdk('segments.update', segment.id, { name: 'Paying customers' });

  const topic = await sdk('topics.create', {
    name: 'Product news',
    description: 'What is new, once a month',
    defaultSubscription: 'opt_in',
  });
  await sdk('topics.list');
  await sdk('topics.get', topic.id);
  await sdk('topics.update', { id: topic.id, description: 'What is new, twice a month' });

  // ---- contacts -----------------------------------------------------------------------------------
  const contact = await sdk('contacts.create', {
    email: 'ada@recipient.test',
    firstName: 'Ada',
    lastName: 'Lovelace',
    properties: { plan: 'gold' },
    segments: [{ id: segment.id }],
    topics: [{ id: topic.id, subscription: 'opt_in' }],
  });
  await sdk('contacts.list');
  await sdk('contacts.list', { segmentId: segment.id });
  await sdk('contacts.get', contact.id);
  await sdk('contacts.update', {
    id: contact.id,
    lastName: 'King',
    properties: { plan: 'silver' },
  });
  const extra = await sdk('segments.create', { name: 'Beta testers' });
  await sdk('contacts.segments.add', { contactId: contact.id, segmentId: extra.id });
  await sdk('contacts.segments.list', { contactId: contact.id });
  await sdk('contacts.segments.remove', { contactId: contact.id, segmentId: extra.id });
  await sdk('contacts.topics.update', {
    id: contact.id,
    topics: [{ id: topic.id, subscription: 'opt_in' }],
  });
  await sdk('contacts.topics.list', { id: contact.id });
  const rows = ['Email,Given name,Plan', 'grace@recipient.test,Grace,gold', 'no address,,', ''];
  const imported = await sdk('contacts.imports.create', {
    file: new Blob([rows.join('\n')], { type: 'text/csv' }),
    columnMap: {
      email: 'Email',
      firstName: 'Given name',
      properties: { plan: { column: 'Plan', type: 'string' } },
    },
    onConflict: 'upsert',
    segments: [{ id: segment.id }],
  });
  const importPath = `/contacts/imports/${imported.id}`;
  await waitFor<{ status: string }>(importPath, ({ status }) => status === 'completed');
  await sdk('contacts.imports.get', imported.id);
  await sdk('contacts.imports.list', { status: 'completed' });

  // ---- audiences: segments by their older name ----------------------------------------------------
  const audience = await call('POST', '/audiences', { name: 'Newsletter' });
  await call('GET', '/audiences?limit=1');
  await call('GET', `/audiences/${audience.id}`);
  await call('PATCH', `/audiences/${audience.id}`, { name: 'Monthly newsletter' });
  const member = await sdk('contacts.create', {
    audienceId: audience.id,
    email: 'mary@recipient.test',
    firstName: 'Mary',
  });
  const at = { audienceId: audience.id, id: member.id };
  await call('GET', `/audiences/${audience.id}/contacts`);
  await sdk('contacts.get', at);
  await sdk('contacts.update', { ...at, lastName: 'Somerville' });
  await sdk('contacts.remove', at);
  await call('DELETE', `/audiences/${audience.id}`);

  // ---- templates ----------------------------------------------------------------------------------
  const template = await sdk('templates.create', {
    name: 'Welcome',
    alias: 'welcome',
    from: 'Ada <ada@mailstead.test>',
    subject: 'Welcome, {{{NAME}}}',
    html: '<p>Hello {{{NAME}}}, you are on plan {{{PLAN}}}.</p>',
    variables: [
      { key: 'NAME', type: 'string', fallbackValue: 'friend' },
      { key: 'PLAN', type: 'string' },
    ],
  });
  await sdk('templates.publish', template.id);
  await sdk('templates.get', 'welcome');
  await sdk('templates.list');
  await sdk('templates.update', template.id, { subject: 'Good to have you, {{{NAME}}}' });
  const copy = await sdk('templates.duplicate', template.id);
  await sdk('templates.remove', copy.id);

  // ---- events and automations ---------------------------------------------------------------------
  await sdk('events.create', { name: 'user.upgraded', schema: { plan: 'string' } });
  await sdk('events.list');
  await sdk('events.get', 'user.upgraded');
  await sdk('events.update', 'user.upgraded', { schema: { plan: 'string', seats: 'number' } });
  const automation = await sdk('automations.create', {
    name: 'Say thank you',
    status: 'enabled',
    steps: [
      { key: 'start', type: 'trigger', config: { eventName: 'user.upgraded' } },
      {
        key: 'is_gold',
        type: 'condition',
        config: { type: 'rule', field: 'event.plan', operator: 'eq', value: 'gold' },
      },
      {
        key: 'thanks',
        type: 'send_email',
        config: {
          template: {
            id: template.id,
            variables: { NAME: { var: 'contact.first_name' }, PLAN: { var: 'event.plan' } },
          },
        },
      },
    ],
    connections: [
      { from: 'start', to: 'is_gold' },
      { from: 'is_gold', to: 'thanks', type: 'condition_met' },
    ],
  });
  await sdk('automations.get', automation.id);
  await sdk('automations.list', { status: 'enabled' });
  await sdk('automations.update', automation.id, { name: 'Thank who upgrades' });
  await sdk('events.send', {
    event: 'user.upgraded',
    contactId: contact.id,
    payload: { plan: 'gold', seats: 3 },
  });
  const runsPath = `/automations/${automation.id}/runs`;
  await waitFor<List<{ status: string }>>(runsPath, ({ data }) => data[0]?.status === 'completed');
  const runs = await sdk<List>('automations.runs.list', {
    automationId: automation.id,
    status: ['completed'],
  });
  await sdk('automations.runs.get', { automationId: automation.id, runId: runs.data[0]!.id });
  const second = await sdk('automations.duplicate', automation.id);
  await sdk('automations.stop', automation.id);
  await sdk('automations.remove', second.id);
  const unused = await sdk('events.create', { name: 'user.left' });
  await sdk('events.remove', unused.id);

  const finish = await tourBroadcasts(app, { sdk, segment: segment.id, waitFor });

  // ---- what goes away -----------------------------------------------------------------------------
  const gone = await sdk('contacts.create', { email: 'left@recipient.test' });
  await sdk('contacts.remove', gone.id);
  await sdk('segments.remove', extra.id);
  const passing = await sdk('topics.create', { name: 'Passing', defaultSubscription: 'opt_out' });
  await sdk('topics.remove', passing.id);
  await sdk('contactProperties.remove', property.id);
  return { template: template.id, topic: topic.id, finish };
}

async function tourBroadcasts(
  app: App,
  {
    sdk,
    segment,
    waitFor,
  }: {
    readonly sdk: Recorder['sdk'];
    readonly segment: string;
    readonly waitFor: WaitFor;
  },
): Promise<() => Promise<void>> {
  const broadcast = await sdk('broadcasts.create', {
    name: 'May',
    segmentId: segment,
    from: 'Ada <ada@mailstead.test>',
    subject: 'News in May',
    previewText: 'Three things that are new',
    html:
      '<p>Hello {{{FIRST_NAME|there}}}, <a href="https://example.com/may">read on</a> or ' +
      '<a href="{{{RESEND_UNSUBSCRIBE_URL}}}">unsubscribe</a>.</p>',
  });
  await sdk('broadcasts.get', broadcast.id);
  await sdk('broadcasts.update', broadcast.id, { subject: 'Our news in May' });
  const later = await sdk('broadcasts.duplicate', broadcast.id);
  await sdk('broadcasts.send', later.id, { scheduledAt: 'in 1 hour' });
  await sdk('broadcasts.cancel', later.id);
  await sdk('broadcasts.remove', later.id);

  await sdk('broadcasts.send', broadcast.id);
  const path = `/broadcasts/${broadcast.id}`;
  await waitFor<{ status: string }>(path, ({ status }) => status === 'sent');
  type Recipients = List<{ status?: string; type?: string }>;
  await waitFor<Recipients>(`${path}/recipients?type=delivered`, ({ data }) => data.length === 2);
  await sdk('broadcasts.list');
  await openLink(app);
  return async () => {
    await waitFor<List>(`${path}/clicked-links`, ({ data }) => data.length > 0);
    await sdk('broadcasts.recipients', broadcast.id, { type: 'clicked' });
    await sdk('broadcasts.clickedLinks', broadcast.id);
  };
}

/** Reads the newest broadcast's mail to Grace in the sink and follows its link. */
async function openLink(app: App): Promise<void> {
  const { body } = await app.call<List<{ raw: string; rcpt_to: string[] }>>(
    'GET',
    '/sink/messages?limit=10',
  );
  const raw = body.data.find(({ rcpt_to }) => rcpt_to.includes('grace@recipient.test'))?.raw ?? '';
  const html = raw.replace(/=\r?\n/g, '').replaceAll('=3D', '=');
  const link = /href="(http[^"]*\/c\/[^"]+)"/.exec(html)?.[1];
  if (link === undefined) throw new Error(`no tracked link in ${raw}`);
  await fetch(link, {
    redirect: 'manual',
    headers: { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko Firefox/140.0' },
  });
}
