// GET /emails with filters, over HTTP: what is sent is found by what it says, and a wrong filter is named.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';

interface List {
  data: { id: string; subject: string; last_event: string }[];
  has_more: boolean;
}

const test = suite('list filters');
let app: App;
const ids: Record<string, string> = {};

test.before(async () => {
  app = await startApp();
  ids['welcome'] = await app.send({
    subject: 'Welcome aboard, Größe 7',
    to: ['Zoë <Zoe.Quill@recipient.test>'],
    tags: [{ name: 'kind', value: 'welcome' }],
  });
  ids['invoice'] = await app.send({
    subject: 'Invoice 4711',
    cc: ['accounts@billing.test'],
    tags: [
      { name: 'kind', value: 'invoice' },
      { name: 'empty', value: '' },
    ],
  });
  ids['later'] = await app.send({ subject: 'Welcome later', scheduled_at: 'in 1 hour' });
  await app.untilEvent(ids['welcome'], 'delivered');
  await app.untilEvent(ids['invoice'], 'delivered');
});
test.after(() => app.stop());

const find = async (query: string): Promise<string[]> => {
  const { status, body } = await app.call<List>('GET', `/emails?${query}`);
  assert.is(status, 200, JSON.stringify(body));
  assert.is(body.has_more, false);
  return body.data.map(({ id }) => Object.keys(ids).find((name) => ids[name] === id) ?? id);
};

for (const [query, expected] of [
  ['', ['later', 'invoice', 'welcome']],
  ['search=welcome', ['later', 'welcome']],
  ['search=WELC%20abo', ['welcome']],
  ['search=gr%C3%B6%C3%9Fe', ['welcome']],
  ['search=zoe.quill@recipient.test', ['welcome']],
  ['search=quill', ['welcome']],
  ['search=billing', ['invoice']],
  ['search=elcome', []],
  ['status=scheduled', ['later']],
  ['status=delivered,scheduled&search=welcome', ['later', 'welcome']],
  ['status=bounced', []],
  ['tag_name=kind', ['invoice', 'welcome']],
  ['tagName=kind&tagValue=welcome', ['welcome']],
  ['tag_name=empty&tag_value=', ['invoice']],
  ['tag_name=kind&tag_value=', []],
  ['domain=mailstead.test', ['later', 'invoice', 'welcome']],
  ['domain=recipient.test', []],
  ['start_date=2020-01-01', ['later', 'invoice', 'welcome']],
  ['end_date=2020-01-01', []],
  ['tag_name=kind&status=delivered&domain=mailstead.test&search=invoice', ['invoice']],
] as const) {
  test(`?${query}`, async () => {
    assert.equal(await find(query), [...expected]);
  });
}

test('filters and pages go together', async () => {
  const page = async (query: string) =>
    (await app.call<List>('GET', `/emails?search=welcome&limit=1${query}`)).body;
  const first = await page('');
  assert.is(first.has_more, true);
  assert.is(first.data[0]?.id, ids['later']);
  const second = await page(`&after=${ids['later']}`);
  assert.is(second.has_more, false);
  assert.is(second.data[0]?.id, ids['welcome']);
  const back = await page(`&before=${ids['welcome']}`);
  assert.is(back.data[0]?.id, ids['later']);
});

test('nobody finds what is not theirs', async () => {
  const { key } = await secondTenant(app);
  for (const query of ['search=welcome', 'tag_name=kind', 'domain=mailstead.test', 'status=sent']) {
    const { body } = await app.call<List>('GET', `/emails?${query}`, { key });
    assert.equal(body.data, []);
  }
});

for (const [query, path] of [
  ['status=lost', 'status'],
  ['status=sent&status=lost', 'status'],
  ['tag_value=x', 'tag_name'],
  ['tagValue=', 'tag_name'],
  ['tag_name=%20', 'tag_name'],
  ['domain=-', 'domain'],
  ['start_date=now', 'start_date'],
  ['end_date=2026-13-01', 'end_date'],
  ['search=', 'search'],
  ['search=%00%00', 'search'],
  ['search=a&search=b', 'search'],
] as const) {
  test(`?${query} is refused`, async () => {
    const { status, body } = await app.call<{ details: { issues: { path: string }[] } }>(
      'GET',
      `/emails?${query}`,
    );
    assert.is(status, 422);
    assert.equal(
      body.details.issues.map((issue) => issue.path),
      [path],
    );
  });
}

test.run();
