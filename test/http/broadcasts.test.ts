// Broadcasts by the unmodified SDK: what drafts take and refuse, how they are planned, sent and canceled, what each
// contact gets, and what is told of the recipients.
import { Resend, type CreateBroadcastOptions } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type App } from '../support/app.ts';
import { arrived, dataOf, errorOf, newSegment, type Person } from '../support/broadcasts.ts';
import { onDatabase } from '../support/second-tenant.ts';

const FROM = 'Acme <news@mailstead.test>';
const test = suite('broadcasts');
let app: App;
let resend: Resend;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
});
test.after(() => app.stop());

const segmentOf = (people: readonly Person[]) => newSegment(app, people);

const draft = (segmentId: string, more: object = {}): CreateBroadcastOptions => ({
  segmentId,
  from: FROM,
  subject: 'News',
  html: '<p>Hello</p>',
  ...more,
});

const untilStatus = async (id: string, status: string): Promise<Record<string, unknown>> => {
  const { body } = await until(
    () => app.call('GET', `/broadcasts/${id}`),
    (answer) => answer.body['status'] === status,
  );
  return body;
};

test('a draft is created, read, changed, duplicated and deleted', async () => {
  const { segmentId } = await segmentOf([]);
  const { id } = dataOf(
    await resend.broadcasts.create(draft(segmentId, { replyTo: 'a@b.example' })),
  );
  const made = dataOf(await resend.broadcasts.get(id));
  assert.match(made.created_at, /^\d{4}-\d\d-\d\dT[\d:]+\.\d{3}Z$/);
  assert.equal(
    { ...made, created_at: '' },
    {
      object: 'broadcast',
      id,
      name: 'Untitled',
      segment_id: segmentId,
      audience_id: segmentId,
      topic_id: null,
      status: 'draft',
      created_at: '',
      scheduled_at: null,
      sent_at: null,
      from: FROM,
      subject: 'News',
      reply_to: ['a@b.example'],
      preview_text: null,
      html: '<p>Hello</p>',
      text: null,
      failure: null,
    },
  );
  const topic = dataOf(await resend.topics.create({ name: 'T', defaultSubscription: 'opt_in' }));
  dataOf(await resend.broadcasts.update(id, { name: 'Two', topicId: topic.id, previewText: 'p' }));
  dataOf(await resend.broadcasts.update(id, { topicId: null, replyTo: [] }));
  const copy = dataOf(await resend.broadcasts.duplicate(id));
  const copied = dataOf(await resend.broadcasts.get(copy.id));
  assert.is(copied.name, 'Two (Copy)');
  assert.is(copied.topic_id, null);
  assert.is(copied.reply_to, null);
  assert.is(copied.preview_text, 'p');
  assert.is(copied.status, 'draft');
  const page = dataOf(await resend.broadcasts.list({ limit: 1 }));
  assert.equal(
    page.data.map((one) => one.id),
    [copy.id],
  );
  assert.is(page.has_more, true);
  const next = dataOf(await resend.broadcasts.list({ after: copy.id }));
  assert.is(next.data[0]?.id, id);
  assert.is(errorOf(await resend.broadcasts.list({ after: newId() }))['statusCode'], 422);
  assert.equal(dataOf(await resend.broadcasts.remove(id)), {
    object: 'broadcast',
    id,
    deleted: true,
  });
  assert.is(errorOf(await resend.broadcasts.get(id))['statusCode'], 404);
  assert.is(errorOf(await resend.broadcasts.remove(id))['statusCode'], 404);
  assert.is(errorOf(await resend.broadcasts.send(id))['statusCode'], 404);
});

test('every mistake in a draft is told', async () => {
  const { segmentId } = await segmentOf([]);
  const refused = async (body: object): Promise<readonly string[]> => {
    const answer = await app.call<{ details: { issues: { path: string }[] } }>(
      'POST',
      '/broadcasts',
      { body },
    );
    assert.is(answer.status, 422, JSON.stringify(answer.body));
    return answer.body.details.issues.map(({ path }) => path);
  };
  assert.equal(await refused({}), ['segment_id', 'from', 'subject']);
  assert.equal(
    await refused({
      segment_id: 'x',
      topic_id: 'y',
      name: 'a\nb',
      from: 'nobody',
      reply_to: ['a@b.example', 'c'],
      subject: 'a\r\nBcc: x@y.example',
      preview_text: '\u0000',
      html: '\u0000',
      scheduled_at: 'in 1 hour',
    }),
    [
      'name',
      'from',
      'reply_to.1',
      'subject',
      'preview_text',
      'html',
      'segment_id',
      'topic_id',
      'scheduled_at',
    ],
  );
  const good = { segment_id: segmentId, from: FROM, subject: 's', text: 't' };
  assert.equal(await refused({ ...good, segment_id: newId() }), ['segment_id']);
  assert.equal(await refused({ ...good, topic_id: newId() }), ['topic_id']);
  assert.equal(await refused({ ...good, send: true, scheduled_at: 'soon' }), ['scheduled_at']);
  assert.equal(await refused({ ...good, send: true, text: ' ' }), ['html']);
  const unknown = 'Hi {{{FIRST_NAME}}} {{{contact.last_name}}} {{{plan}}} {{{colour|red}}}';
  assert.equal(await refused({ ...good, send: true, text: unknown, html: '<p>{{{first-name}}}' }), [
    'html',
    'text',
  ]);
  // A draft may say so; it is refused when it is to be sent, and stays a draft.
  const { id } = dataOf(await resend.broadcasts.create(draft(segmentId, { text: unknown })));
  assert.match(String(errorOf(await resend.broadcasts.send(id))['message']), /\{\{\{plan\}\}\}/);
  assert.is(dataOf(await resend.broadcasts.get(id)).status, 'draft');
  assert.equal((await app.call('GET', '/broadcasts/no-uuid')).body['name'], 'invalid_parameter');
});

test('each contact gets its own, and nobody who does not want it', async () => {
  const topic = dataOf(await resend.topics.create({ name: 'N', defaultSubscription: 'opt_in' }));
  for (const property of [
    { key: 'company', type: 'string', fallback_value: 'your company' },
    { key: 'seats', type: 'number' },
  ]) {
    assert.is((await app.call('POST', '/contact-properties', { body: property })).status, 201);
  }
  const hostile = `<img src=x onerror="alert(1)">&amp; {{{EMAIL}}} 'q'`;
  const { segmentId, ids } = await segmentOf([
    { email: 'ada@one.test', first_name: 'Ada', properties: { company: 'A & B', seats: 3 } },
    { email: 'Bob@two.test' },
    { email: 'eve@three.test', first_name: hostile, properties: { company: hostile } },
    { email: 'gone@four.test', unsubscribed: true },
    { email: 'out@five.test', topics: [{ id: topic.id, subscription: 'opt_out' }] },
    { email: 'dead@six.test' },
  ]);
  await app.call('POST', '/suppressions', { body: { email: 'Dead@six.test' } });
  const { id } = dataOf(
    await resend.broadcasts.create(
      draft(segmentId, {
        subject: 'For {{{FIRST_NAME|you}}}',
        previewText: 'Look & see, {{{contact.first_name|friend}}}',
        topicId: topic.id,
        html:
          '<html><body class="a>b"><p title={{{company}}}>Hello {{{ FIRST_NAME | <i>there</i> }}} of {{{contact.company}}}, ' +
          '{{{seats|no}}} seats</p><a href="{{{RESEND_UNSUBSCRIBE_URL}}}">leave</a></body></html>',
      }),
    ),
  );
  // What the seed's sample carries is taken.
  const { status } = await app.call('POST', `/broadcasts/${id}/send`, {
    body: { name: 'x', subject: 'y', from: 'z' },
  });
  assert.is(status, 200);
  const sent = await untilStatus(id, 'sent');
  assert.ok(new Date(String(sent['sent_at'])).getTime() > 0);
  const messages = await arrived(app, ['ada@one.test', 'Bob@two.test', 'eve@three.test']);
  for (const nobody of ['gone@four.test', 'out@five.test', 'dead@six.test']) {
    assert.not(messages.has(nobody), nobody);
  }
  const ada = messages.get('ada@one.test')!;
  assert.is(ada.parsed.subject, 'For Ada');
  const adaHtml = String(ada.parsed.html);
  assert.match(adaHtml, '<p title=A &amp; B>Hello Ada of A &amp; B, 3 seats</p>');
  assert.match(adaHtml, /<body class="a>[^<]*<div style="display:none[^>]*>Look &amp; see, Ada/);
  assert.match(String(ada.parsed.text), 'Hello Ada of A & B, 3 seats');
  assert.not.match(String(ada.parsed.text), 'Look');
  const head = ada.raw.toString().replace(/\r\n[ \t]+/g, ' ');
  const [, url] = /^List-Unsubscribe: ?<([^>]+)>\r?$/m.exec(head)!;
  assert.match(head, /^List-Unsubscribe-Post: List-Unsubscribe=One-Click\r?$/m);
  assert.match(adaHtml, `<a href="${url}">leave</a>`);
  assert.match(String(ada.parsed.text), `leave <${url}>`);

  const bob = messages.get('Bob@two.test')!.parsed;
  assert.is(bob.subject, 'For you');
  assert.match(String(bob.html), 'Hello <i>there</i> of your company, no seats');
  assert.match(String(bob.html), 'Look &amp; see, friend');

  const eve = messages.get('eve@three.test')!.parsed;
  assert.is(eve.subject, `For ${hostile}`);
  assert.not.match(String(eve.html), '<img');
  assert.not.match(String(eve.html), 'onerror="');
  assert.match(String(eve.html), '{{{EMAIL}}}', 'a value is not looked at for variables');
  assert.match(String(eve.text), hostile);

  const { body } = await app.call<{ data: { id: string; to: string[] }[] }>('GET', '/emails');
  const email = body.data.find(({ to }) => to[0] === 'ada@one.test')!;
  const trace = await app.call<{ facts?: unknown }>('GET', `/emails/${email.id}/timeline`);
  assert.match(JSON.stringify(trace.body), `"via":"broadcast"`);
  assert.match(JSON.stringify(trace.body), `"broadcast_id":"${id}"`);

  const listed = async (filter: object): Promise<readonly unknown[]> =>
    dataOf(await resend.broadcasts.recipients(id, filter as never)).data.map(
      (one) => one.contact_id,
    );
  await until(
    () => listed({ type: 'delivered' }),
    (found) => found.length === 3,
  );
  assert.equal(await listed({ type: 'sent' }), [ids[2], ids[1], ids[0]]);
  assert.equal(await listed({ type: 'sent', email: 'BOB@two.test' }), [ids[1]]);
  assert.equal(await listed({ type: 'suppressed' }), [ids[5]]);
  for (const type of ['opened', 'clicked', 'bounced', 'complained', 'unsubscribed']) {
    assert.equal(await listed({ type }), [], type);
  }
  const first = dataOf(await resend.broadcasts.recipients(id, { type: 'sent', limit: 2 }));
  assert.is(first.has_more, true);
  const last = dataOf(
    await resend.broadcasts.recipients(id, { type: 'sent', after: first.data[1]!.id }),
  );
  assert.equal(
    last.data.map((one) => one.contact_id),
    [ids[0]],
  );
  const back = dataOf(
    await resend.broadcasts.recipients(id, { type: 'sent', before: last.data[0]!.id }),
  );
  assert.equal(back.data, first.data);
  assert.is(back.has_more, false);
  for (const query of [
    '',
    'type=all',
    'type=sent&bounce_type=permanent',
    'type=bounced&bounce_type=x',
    `type=sent&after=${newId()}`,
    'type=sent&after=AZ5u-4KZcACNOhhPO3hVkg',
    'type=sent&limit=0',
    'type=sent&email=',
  ]) {
    const answer = await app.call('GET', `/broadcasts/${id}/recipients?${query}`);
    assert.is(answer.status, 422, query);
  }
  assert.equal(
    dataOf(await resend.broadcasts.recipients(id, { type: 'bounced', bounceType: 'permanent' }))
      .data,
    [],
  );

  // It is over: nothing can be done with it any more.
  assert.is(errorOf(await resend.broadcasts.cancel(id))['name'], 'validation_error');
  assert.is(errorOf(await resend.broadcasts.send(id))['name'], 'validation_error');
  assert.is(errorOf(await resend.broadcasts.update(id, { name: 'x' }))['name'], 'validation_error');
  assert.is(errorOf(await resend.broadcasts.remove(id))['name'], 'validation_error');
});

test('what readers really do is told: opened, clicked, unsubscribed', async () => {
  const { body: domains } = await app.call<{ data: { id: string; name: string }[] }>(
    'GET',
    '/domains',
  );
  const domain = domains.data.find(({ name }) => name === 'mailstead.test')!;
  const track = (isOn: boolean) =>
    app.call('PATCH', `/domains/${domain.id}`, {
      body: { open_tracking: isOn, click_tracking: isOn },
    });
  assert.is((await track(true)).status, 200);
  const { segmentId, ids } = await segmentOf([
    { email: 'opens@nine.test' },
    { email: 'clicks@nine.test' },
    { email: 'leaves@nine.test' },
  ]);
  const html =
    '<a href="https://x.example/?who={{{EMAIL}}}&amp;a=1">one</a> <a href="https://y.example/">two</a> ' +
    '<a href="{{{RESEND_UNSUBSCRIBE_URL}}}">leave</a>';
  const { id } = dataOf(
    await resend.broadcasts.create({
      ...draft(segmentId, { html }),
      send: true,
    }),
  );
  const messages = await arrived(app, ['opens@nine.test', 'clicks@nine.test', 'leaves@nine.test']);
  assert.is((await track(false)).status, 200);
  const person = { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Firefox/140.0' };
  /** Where the links of a message lead by now: three links, then the pixel. */
  const pathsOf = (address: string): readonly string[] => {
    const page = String(messages.get(address)!.parsed.html);
    return [...page.matchAll(/(?:href|src)="https?:\/\/localhost:\d+([^"]+)"/g)].map(
      ([, path]) => path!,
    );
  };
  const visit = (path: string, method = 'GET') =>
    fetch(app.base + path, {
      method,
      redirect: 'manual',
      headers: { ...person, 'content-type': 'application/x-www-form-urlencoded' },
      ...(method === 'POST' ? { body: 'List-Unsubscribe=One-Click' } : {}),
    });
  const opened = pathsOf('opens@nine.test');
  assert.equal(
    opened.map((path) => path.split('/')[1]),
    ['c', 'c', 'unsubscribe', 'o'],
    'the way out is nobody’s statistics',
  );
  assert.is((await visit(opened[3]!)).status, 200);
  const clicked = await visit(pathsOf('clicks@nine.test')[0]!);
  assert.is(clicked.headers.get('location'), 'https://x.example/?who=clicks@nine.test&a=1');
  const leave = pathsOf('leaves@nine.test')[2]!;
  const [, listed] = /^List-Unsubscribe: ?<https?:\/\/[^/]+([^>]+)>/m.exec(
    messages
      .get('leaves@nine.test')!
      .raw.toString()
      .replace(/\r\n[ \t]+/g, ' '),
  )!;
  assert.is(listed, leave);
  assert.is((await visit(leave)).status, 200);
  const of = async (type: string) =>
    dataOf(await resend.broadcasts.recipients(id, { type } as never)).data;
  assert.equal(await of('unsubscribed'), [], 'reading changes nothing');
  assert.is((await visit(leave, 'POST')).status, 200);
  assert.equal(
    (await of('unsubscribed')).map((one) => one.contact_id),
    [ids[2]],
  );
  const readers = await until(
    async () => [await of('opened'), await of('clicked')],
    (lists) => lists.every(({ length }) => length > 0),
  );
  assert.equal(
    readers.map((list) => list.map((one) => [one.contact_id, one.count])),
    [[[ids[0], 1]], [[ids[1], 1]]],
  );
  assert.equal(readers[1]![0]!.clicked_links, [
    { url: 'https://x.example/?who=clicks@nine.test&a=1', clicks: 1 },
  ]);
  assert.equal(
    dataOf(await resend.broadcasts.clickedLinks(id)).data.map((one) => [one.url, one.clicks]),
    [['https://x.example/?who=clicks@nine.test&a=1', 1]],
  );
});

test('opens, clicks and bounces are told by recipient and by link', async () => {
  const { segmentId, ids } = await segmentOf([
    { email: 'reader@seven.test' },
    { email: 'robot@seven.test' },
    { email: 'bounced@resend.dev' },
  ]);
  const { id } = dataOf(await resend.broadcasts.create({ ...draft(segmentId), send: true }));
  await until(
    async () => dataOf(await resend.broadcasts.recipients(id, { type: 'bounced' })).data,
    (found) => found.length === 1,
  );
  const [bounced] = dataOf(await resend.broadcasts.recipients(id, { type: 'bounced' })).data;
  assert.is(bounced?.contact_id, ids[2]);
  assert.is(bounced?.bounce_type, 'permanent');
  await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ tenant_id: string; email_id: string; address: string }>(
      'select tenant_id, email_id, address from broadcast_recipient where broadcast_id = $1',
      [id],
    );
    const did = async (
      address: string,
      kind: string,
      link: string | null,
      suspect: string | null,
    ) => {
      const row = rows.find((one) => one.address === address)!;
      await pool.query(
        `insert into engagement (tenant_id, email_id, id, kind, at, link, suspect, broadcast_id)
         values ($1, $2, $3, $4, now(), $5, $6, $7)`,
        [row.tenant_id, row.email_id, newId(), kind, link, suspect, id],
      );
    };
    await did('reader@seven.test', 'opened', null, 'proxy');
    await did('reader@seven.test', 'opened', null, null);
    await did('reader@seven.test', 'clicked', 'https://a.example/', null);
    await did('reader@seven.test', 'clicked', 'https://b.example/', null);
    await did('reader@seven.test', 'clicked', 'https://b.example/', null);
    await did('robot@seven.test', 'opened', null, 'scanner');
    await did('robot@seven.test', 'clicked', 'https://a.example/', 'scanner');
  });
  const [opened, ...noMore] = dataOf(
    await resend.broadcasts.recipients(id, { type: 'opened' }),
  ).data;
  assert.is(opened?.contact_id, ids[0]);
  assert.is(opened?.count, 2);
  assert.equal(noMore, [], 'machines do not count');
  const [clicked] = dataOf(await resend.broadcasts.recipients(id, { type: 'clicked' })).data;
  assert.is(clicked?.count, 3);
  assert.equal(clicked?.clicked_links, [
    { url: 'https://b.example/', clicks: 2 },
    { url: 'https://a.example/', clicks: 1 },
  ]);
  const links = dataOf(await resend.broadcasts.clickedLinks(id, { limit: 1 }));
  assert.is(links.has_more, true);
  assert.equal(
    { ...links.data[0], id: '' },
    { id: '', url: 'https://b.example/', clicks: 2, unique_clicks: 1 },
  );
  const more = dataOf(await resend.broadcasts.clickedLinks(id, { after: links.data[0]!.id }));
  assert.equal(
    { ...more.data[0], id: '' },
    { id: '', url: 'https://a.example/', clicks: 1, unique_clicks: 1 },
  );
  assert.is(more.has_more, false);
  assert.is(
    errorOf(await resend.broadcasts.clickedLinks(id, { after: 'AZ5u-4KZcACNOhhPO3hVkg' }))[
      'statusCode'
    ],
    422,
  );
  // The contact may go; what it got is still told.
  dataOf(await resend.contacts.remove({ id: ids[0]! }));
  const [deleted] = dataOf(await resend.broadcasts.recipients(id, { type: 'clicked' })).data;
  assert.is(deleted?.contact_id, null);
  assert.is(deleted?.email, 'reader@seven.test');
});

test('planned ones are drafts again when they are canceled, and start when their time has come', async () => {
  const { segmentId } = await segmentOf([{ email: 'later@eight.test' }]);
  const { id } = dataOf(
    await resend.broadcasts.create({
      ...draft(segmentId),
      send: true,
      scheduledAt: 'in 1 hour',
    }),
  );
  const planned = dataOf(await resend.broadcasts.get(id));
  assert.is(planned.status, 'scheduled');
  const inMs = new Date(String(planned.scheduled_at)).getTime() - Date.now();
  assert.ok(inMs > 3_500_000 && inMs <= 3_600_000);
  assert.is(errorOf(await resend.broadcasts.update(id, { subject: 'x' }))['statusCode'], 422);
  dataOf(await resend.broadcasts.cancel(id));
  const again = dataOf(await resend.broadcasts.get(id));
  assert.is(again.status, 'draft');
  assert.is(again.scheduled_at, null);
  dataOf(await resend.broadcasts.update(id, { subject: 'Changed' }));
  dataOf(await resend.broadcasts.send(id, { scheduledAt: 'in 2 days' }));
  await onDatabase(app, (pool) =>
    pool.query(`update broadcast set scheduled_at = now() where id = $1`, [id]),
  );
  // Any other one makes them look, sooner than by themselves.
  dataOf(
    await resend.broadcasts.create({
      ...draft((await segmentOf([])).segmentId),
      send: true,
    }),
  );
  await untilStatus(id, 'sent');
  const messages = await arrived(app, ['later@eight.test']);
  assert.is(messages.get('later@eight.test')?.parsed.subject, 'Changed');
});

test('only from a verified domain', async () => {
  // Where mail could leave the machine, nothing stands in for a domain that is unknown.
  const strict = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: 'smtp://127.0.0.1:9',
  });
  try {
    const post = (path: string, body: object = {}) =>
      strict.call<{ id: string; code: string }>('POST', path, { body });
    const segment = await post('/segments', { name: 's' });
    const made = await post('/broadcasts', {
      segment_id: segment.body.id,
      from: 'a@unknown.test',
      subject: 's',
      text: 't',
    });
    assert.is(made.status, 201, JSON.stringify(made.body));
    const sent = await post(`/broadcasts/${made.body.id}/send`);
    assert.is(sent.status, 422);
    assert.is(sent.body.code, 'domain_not_verified');
  } finally {
    await strict.stop();
  }
});

test.run();
