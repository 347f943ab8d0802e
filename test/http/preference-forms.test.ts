// /unsubscribe/{token}: what sloppy mail programs send, and forms at both ends of their size.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createPreferenceLinks,
  type PreferenceTarget,
} from '../../src/audience/preference-links.ts';
import { newId } from '../../src/store/id.ts';
import { deriveKey } from '../../src/store/seal.ts';
import { startApp, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { ask, type WireAnswer } from './wire.ts';

const SECRET = 'preferences'.repeat(6);
const test = suite('preference forms');
let app: App;
let tenantId: string;
let links: ReturnType<typeof createPreferenceLinks>;
test.before(async () => {
  app = await startApp({ MAILSTEAD_SECRET: SECRET });
  links = createPreferenceLinks({
    key: deriveKey(SECRET, 'preference links'),
    publicUrl: app.appliance.publicUrl,
  });
  [{ id: tenantId }] = await rows<{ id: string }>('select id from tenant');
});
test.after(() => app.stop());

const rows = <T>(text: string, values: readonly unknown[] = []): Promise<[T, ...T[]]> =>
  onDatabase(app, async (pool) => (await pool.query(text, [...values])).rows as [T, ...T[]]);

let count = 0;
async function contact(body: Record<string, unknown> = {}): Promise<{ id: string; email: string }> {
  const email = `reader${++count}@recipient.test`;
  const answer = await app.call<{ id: string }>('POST', '/contacts', { body: { email, ...body } });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return { id: answer.body.id, email };
}
const tokenFor = (contactId: string, about: Partial<PreferenceTarget> = {}): string =>
  links
    .url({ tenantId, contactId, topicId: null, broadcastId: null, emailId: null, ...about })
    .slice(`${app.appliance.publicUrl}/unsubscribe/`.length);

/** As a mail program would: no cookie, no credential, nothing that it got before. */
const post = (
  token: string,
  body: string,
  type = 'application/x-www-form-urlencoded',
  headers: readonly string[] = [],
): Promise<WireAnswer> =>
  ask(app.base, {
    line: `POST /unsubscribe/${token} HTTP/1.1`,
    headers: [`Content-Type: ${type}`, `Content-Length: ${Buffer.byteLength(body)}`, ...headers],
    body: [body],
  });
const ONE_CLICK = 'List-Unsubscribe=One-Click';
const pageOf = async (token: string): Promise<string> =>
  (await fetch(`${app.base}/unsubscribe/${token}`, { headers: { accept: 'text/html' } })).text();
const isUnsubscribed = async (email: string): Promise<unknown> =>
  (await app.call('GET', `/contacts/${email}`)).body['unsubscribed'];

/** The fields that a browser would send for the `index`th form of a page, as they stand. */
function formOf(html: string, index = 0): URLSearchParams {
  const form = html.split('<form').slice(1)[index]!.split('</form>')[0]!;
  const fields = new URLSearchParams();
  for (const [input] of form.matchAll(/<input [^>]*>/g)) {
    const name = /name="([^"]*)"/.exec(input)![1]!;
    const isOff = input.includes('type="checkbox"') && !input.includes(' checked');
    if (!isOff) fields.append(name, /value="([^"]*)"/.exec(input)![1]!);
  }
  return fields;
}

test('one click as sloppy programs send it', async () => {
  for (const [body, type] of [
    [`${ONE_CLICK}\r\n`, 'application/x-www-form-urlencoded'],
    ['list-unsubscribe=one-click', 'application/x-www-form-urlencoded; charset=UTF-8'],
    ['List-Unsubscribe = One-Click', 'Application/X-WWW-Form-Urlencoded'],
    [ONE_CLICK, null],
  ] as const) {
    const { id, email } = await contact();
    const answer = await ask(app.base, {
      line: `POST /unsubscribe/${tokenFor(id)} HTTP/1.0`,
      headers: [
        ...(type === null ? [] : [`Content-Type: ${type}`]),
        `Content-Length: ${body.length}`,
      ],
      body: [body],
    });
    assert.equal([answer.status, answer.text], [200, 'Unsubscribed.\n'], body);
    assert.is(await isUnsubscribed(email), true, body);
  }
});

test('without topics the form says yes, no, and yes again', async () => {
  const { tenantId: own } = await secondTenant(app);
  const [id, email] = [newId(), `only-${newId()}@recipient.test`];
  await rows(
    `insert into contact (tenant_id, id, email, address, created_at, updated_at)
      values ($1, $2, $3, $3, now(), now())`,
    [own, id, email],
  );
  const token = tokenFor(id, { tenantId: own });
  const isOut = async (): Promise<boolean> =>
    (
      await rows<{ unsubscribed: boolean }>('select unsubscribed from contact where id = $1', [id])
    )[0].unsubscribed;
  const fields = formOf(await pageOf(token));
  assert.equal(fields.getAll('shown'), []);
  assert.is((await post(token, fields.toString())).status, 200);
  fields.append('all', '1');
  const saved = await post(token, fields.toString());
  assert.is(await isOut(), true);
  assert.is((await post(token, formOf(saved.text, 0).toString())).status, 200, 'undo');
  assert.is(await isOut(), false);
  await post(token, ONE_CLICK);
  const ticked = formOf(await pageOf(token));
  ticked.delete('all');
  assert.is((await post(token, ticked.toString())).status, 200);
  assert.is(await isOut(), false);
});

test('however many topics there are: none is left of all of them, and undo brings them back', async () => {
  const { tenantId: own } = await secondTenant(app);
  const [id, email] = [newId(), `many-${newId()}@recipient.test`];
  await rows(
    `insert into contact (tenant_id, id, email, address, created_at, updated_at)
      values ($1, $2, $3, $3, now(), now())`,
    [own, id, email],
  );
  await rows(
    `insert into topic (tenant_id, id, name, default_subscription, visibility, created_at, updated_at)
      select $1, gen_random_uuid(), 'T' || n, 'opt_in', 'public', now(), now()
      from generate_series(1, 1000) n`,
    [own],
  );
  const token = tokenFor(id, { tenantId: own });
  const choices = async (): Promise<unknown> =>
    rows(
      'select subscription, count(*)::integer from contact_topic where contact_id = $1 group by 1',
      [id],
    );
  const fields = formOf(await pageOf(token));
  fields.append('all', '1');
  const saved = await post(token, fields.toString());
  assert.is(saved.status, 200);
  assert.equal(await choices(), [{ subscription: 'opt_out', count: 1_000 }]);
  assert.is((await post(token, formOf(saved.text, 0).toString())).status, 200);
  assert.equal(await choices(), [{ subscription: 'opt_in', count: 1_000 }]);
});

test.run();
