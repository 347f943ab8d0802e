// Links to preferences, and who wants mail of a topic or a broadcast.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createPreferenceLinks,
  type PreferenceTarget,
} from '../../src/audience/preference-links.ts';
import {
  findUnwanted,
  findWishes,
  unwantedAmong,
  UNSUBSCRIBED,
} from '../../src/audience/wanting.ts';
import { readQueue } from '../../src/queue/overview.ts';
import { releaseEmail } from '../../src/queue/release.ts';
import { settle } from '../../src/queue/settle.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, result, type Bench } from '../support/queue.ts';

const test = suite('wanting');
let bench: Bench;
let other: string;
const topics = { news: newId(), secret: newId() };
test.before(async () => {
  bench = await openQueue();
  other = newId();
  const { pool } = bench.store;
  await pool.query('insert into tenant (id, name, created_at) values ($1, $2, now())', [
    other,
    'other',
  ]);
  for (const tenantId of [bench.tenantId, other]) {
    for (const [id, kind] of [
      [topics.news, 'opt_in'],
      [topics.secret, 'opt_out'],
    ]) {
      await pool.query(
        `insert into topic (tenant_id, id, name, default_subscription, visibility, created_at, updated_at)
          values ($1, $2, 'T', $3, 'private', now(), now())`,
        [tenantId, id, kind],
      );
    }
  }
});
test.after(() => bench.stop());

async function contact(
  email: string,
  about: {
    readonly unsubscribed?: boolean;
    readonly choices?: Record<string, string>;
    readonly of?: string;
  },
): Promise<void> {
  const { pool } = bench.store;
  const [id, tenantId] = [newId(), about.of ?? bench.tenantId];
  await pool.query(
    `insert into contact (tenant_id, id, email, address, unsubscribed, created_at, updated_at)
      values ($1, $2, $3, lower($3), $4, now(), now())`,
    [tenantId, id, email, about.unsubscribed ?? false],
  );
  for (const [topic, subscription] of Object.entries(about.choices ?? {})) {
    await pool.query(
      `insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
        values ($1, $2, $3, $4, now())`,
      [tenantId, id, topic, subscription],
    );
  }
}

test('a topic: the choice decides, else the default, in one tenant only', async () => {
  await contact('Out@x.test', { choices: { [topics.news]: 'opt_out' } });
  await contact('in@x.test', { choices: { [topics.secret]: 'opt_in' }, unsubscribed: true });
  await contact('plain@x.test', {});
  await contact('plain@x.test', { of: other, choices: { [topics.news]: 'opt_out' } });
  const ask = async (topicId: string | null): Promise<readonly string[]> => {
    const addresses = ['out@x.test', 'in@x.test', 'plain@x.test', 'stranger@x.test'];
    const about = { addresses, topicId, isBroadcast: false };
    return [...(await unwantedAmong(bench.store.pool, bench.tenantId, about))];
  };
  assert.equal(await ask(topics.news), ['out@x.test']);
  assert.equal(await ask(topics.secret), ['out@x.test', 'plain@x.test', 'stranger@x.test']);
  assert.equal(await ask(null), []);
  assert.equal(await ask(newId()), [], 'a topic that never was keeps nobody out');
});

test('a broadcast: neither the unsubscribed nor who is no contact; with a topic that decides as well', async () => {
  const rows = (topicId: string | null) =>
    ['OUT@x.test', 'in@x.test', 'plain@x.test', 'stranger@x.test'].map((recipient) => ({
      tenantId: bench.tenantId,
      recipient,
      topicId,
      isBroadcast: true,
    }));
  assert.equal(
    [...(await findUnwanted(bench.store.pool, rows(null)))].toSorted((a, b) => a - b),
    [1, 3],
  );
  assert.equal(
    [...(await findUnwanted(bench.store.pool, rows(topics.news)))].toSorted((a, b) => a - b),
    [0, 1, 3],
  );
});

test('many tenants and emails at once; what has neither topic nor broadcast is not asked about', async () => {
  const one = { recipient: 'plain@x.test', topicId: topics.news, isBroadcast: false };
  const rows = [
    { ...one, tenantId: bench.tenantId },
    { ...one, tenantId: other },
    { ...one, tenantId: other, topicId: null },
  ];
  assert.equal([...(await findUnwanted(bench.store.pool, rows))], [1]);
  const wishes = await findWishes(bench.store.pool, rows);
  assert.equal(
    wishes.map(({ isUnwanted }) => isUnwanted),
    [false, true, false],
  );
  assert.ok(wishes[0]?.contactId !== null && wishes[1]?.contactId !== null);
  assert.not.equal(wishes[0]?.contactId, wishes[1]?.contactId);
  assert.is(wishes[2]?.contactId, null);
  const closed = { query: () => Promise.reject(new Error('asked')) };
  assert.is((await findUnwanted(closed as never, [rows[2]!])).size, 0);
});

const inState = async (emailId: string): Promise<unknown> =>
  (
    await bench.store.pool.query(
      `select e.last_event, e.provider_last_error ->> 'message' as message,
         e.provider_dead_lettered_at as dead, d.state, d.attempts, d.last_cause,
         (select count(*)::int from attempt a where a.email_id = e.id) as begun,
         (select json_agg(t.kind) from timeline t where t.email_id = e.id) as told
       from email e join delivery d on d.email_id = e.id and d.position = 0 where e.id = $1`,
      [emailId],
    )
  ).rows[0];

test('whoever opts out while mail waits is held back at the claim; other mail is not asked about', async () => {
  await contact('waits@x.test', {});
  const to = (recipient: string) => [{ recipient, lane: 'sink' }];
  const deliveries = to('Waits@x.test');
  const [about] = await bench.enqueue(1, { deliveries, topicId: topics.news });
  const [broadcast] = await bench.enqueue(1, { deliveries, broadcastId: newId() });
  const [gone] = await bench.enqueue(1, { deliveries: to('gone@x.test'), broadcastId: newId() });
  const [plain] = await bench.enqueue(1, { deliveries });
  const [wanted] = await bench.enqueue(1, {
    deliveries: to('plain@x.test'),
    topicId: topics.news,
    broadcastId: newId(),
  });
  const [partly] = await bench.enqueue(1, {
    deliveries: [...deliveries, ...to('plain@x.test')],
    topicId: topics.news,
  });
  await bench.store.pool.query(
    `with opted as (insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
      select tenant_id, id, $2, 'opt_out', now() from contact where tenant_id = $1 and address = 'waits@x.test')
    update contact set unsubscribed = true where tenant_id = $1 and address = 'waits@x.test'`,
    [bench.tenantId, topics.news],
  );
  const epoch = await bench.run();
  const claimed = await bench.claim(epoch, 100);
  assert.equal(
    claimed.map(({ emailId }) => emailId).toSorted(),
    [plain!, wanted!, partly!].toSorted(),
  );
  const ended = {
    last_event: 'failed',
    dead: null,
    state: 'failed',
    attempts: 0,
    last_cause: 'unsubscribed',
    begun: 0,
    told: ['accepted', 'unsubscribed'],
  };
  assert.equal(await inState(about!), { ...ended, message: UNSUBSCRIBED.ofTopic });
  assert.equal(await inState(broadcast!), { ...ended, message: UNSUBSCRIBED.ofBroadcast });
  assert.equal(await inState(gone!), { ...ended, message: UNSUBSCRIBED.ofBroadcast });
  for (const { emailId } of claimed) assert.not.equal(emailId, about);

  await settle(
    bench.store,
    claimed.map((one) => result(one, epoch, { verdict: 'delivered' })),
  );
  const { rows } = await bench.store.pool.query<{ id: string; last_event: string }>(
    `select id, last_event from email where id = any ($1::uuid[])`,
    [[plain, wanted, partly]],
  );
  assert.equal(
    rows.map((row) => row.last_event),
    ['delivered', 'delivered', 'delivered'],
    'who did not want it does not make an email that arrived a failure',
  );
  const overview = await readQueue(bench.store.pool);
  assert.is(overview.totals.dead_lettered, 0);
  for (const emailId of [about!, broadcast!, partly!]) {
    const release = await releaseEmail(
      bench.store,
      { tenantId: bench.tenantId, emailId },
      { includeUnknown: true, lifetimeMs: 60_000 },
    );
    assert.equal(release, { outcome: 'nothing', why: 'unsubscribed' });
  }
});

test('links: short, the same again, and what they name comes back', () => {
  const links = createPreferenceLinks({ key: Buffer.alloc(32, 'k'), publicUrl: 'https://m.test/' });
  const full: PreferenceTarget = {
    tenantId: newId(),
    contactId: newId(),
    topicId: newId(),
    broadcastId: newId(),
    emailId: newId(),
  };
  const none = { topicId: null, broadcastId: null, emailId: null };
  const targets = [full, { ...full, ...none }];
  for (const name of ['topicId', 'broadcastId', 'emailId'] as const) {
    targets.push({ ...full, ...none, [name]: full[name] }, { ...full, [name]: null });
  }
  const urls = targets.map((target) => links.url(target));
  assert.is(new Set(urls).size, targets.length);
  for (const [index, url] of urls.entries()) {
    assert.match(url, /^https:\/\/m\.test\/unsubscribe\/[A-Za-z0-9_-]+$/);
    assert.ok(url.length < 200, url);
    assert.is(url, links.url(targets[index]!));
    assert.equal(links.open(url.split('/').at(-1)!), targets[index]);
  }
});

test('links: no bit can be changed, nothing else is a token', () => {
  const make = (byte: string) =>
    createPreferenceLinks({ key: Buffer.alloc(32, byte), publicUrl: 'https://m.test' });
  const links = make('k');
  const ids = { tenantId: newId(), contactId: newId(), topicId: newId() };
  const token = links
    .url({ ...ids, broadcastId: null, emailId: null })
    .split('/')
    .at(-1)!;
  const bytes = Buffer.from(token, 'base64url');
  for (let bit = 0; bit < bytes.length * 8; bit++) {
    const forged = Buffer.from(bytes);
    forged[bit >> 3] = forged[bit >> 3]! ^ (1 << (bit & 7));
    assert.is(links.open(forged.toString('base64url')), null, `bit ${bit}`);
  }
  assert.ok(links.open(token) !== null);
  assert.is(make('x').open(token), null);
  for (const text of ['', 'x', `${token}A`, token.slice(1), `${token}=`, 'A'.repeat(88), '../x']) {
    assert.is(links.open(text), null, text);
  }
  // 1 + 3 × 16 + 16 bytes leave unused bits in the last character.
  const spelled = [...'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_']
    .map((last) => token.slice(0, -1) + last)
    .filter((text) => links.open(text) !== null);
  assert.equal(spelled, [token]);
});

test.run();
