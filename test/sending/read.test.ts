// Pages of filtered emails on a real Postgres, more of them than the window that is looked through first: every
// walk, in both directions, meets exactly the emails that match.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { PageRequest } from '../../src/access/page.ts';
import { listEmails } from '../../src/sending/read.ts';
import { NO_FILTERS, searchTermsOf } from '../../src/sending/search.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

interface Row {
  readonly id: string;
  readonly at: number;
  readonly subject: string;
  readonly fromDomain: string;
  readonly event: string;
  readonly tag: string | null;
}

const test = suite<{ q: Bench; rows: readonly Row[] }>('filtered pages');
const EMAILS = 25_000;
const START_MS = Date.parse('2026-05-01T00:00:00Z');
const STEP_MS = 10_000;

/** newId() does not go back in time. */
const idAt = (ms: number): string =>
  ms.toString(16).padStart(12, '0').replace(/^.{8}/, '$&-') + newId().slice(13);

/** Most wait; what is delayed and failed is old, so that no window reaches it. */
function eventAt(index: number): string {
  if (index % 1_000 === 3) return 'bounced';
  if (index === 4_000) return 'delivery_delayed';
  if (index % 9_000 === 21) return 'complained';
  return [54, 104, 152].includes(index) ? 'failed' : 'queued';
}
const STATE_OF: Readonly<Record<string, string>> = {
  queued: 'ready',
  delivery_delayed: 'ready',
  complained: 'delivered',
};

/** Filled in bulk: through enqueue() it would take half a minute. */
async function fill(q: Bench, tenantId: string): Promise<readonly Row[]> {
  const rows = Array.from({ length: EMAILS }, (_, index): Row => {
    const at = START_MS + index * STEP_MS;
    return {
      id: idAt(at),
      at,
      // Old ones say "legacy" all, one in 2,000 says "unicorn", everyone "report".
      subject: `Report ${index}${index < 3_000 ? ' legacy' : ''}${index % 2_000 === 7 ? ' unicorn' : ''}`,
      fromDomain: index % 5 === 2 || index % 5 === 4 ? 'one.test' : 'two.test',
      event: eventAt(index),
      tag: index % 3_000 === 5 ? 'rare' : null,
    };
  });
  for (let from = 0; from < EMAILS; from += 5_000) {
    const part = rows.slice(from, from + 5_000);
    const columns = [
      part.map(({ id }) => id),
      part.map(({ at }) => new Date(at)),
      part.map(({ subject }) => subject),
      part.map(({ fromDomain }) => fromDomain),
      part.map(({ event }) => event),
    ];
    await q.store.pool.query(
      `insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given,
         subject, last_event, recipient_count)
       select $1, id, at, '<x>', 'a@' || domain, domain, '[]', subject, event, 1
       from unnest($2::uuid[], $3::timestamptz[], $4::text[], $5::text[], $6::text[])
         as r (id, at, subject, domain, event)`,
      [tenantId, ...columns],
    );
    await q.store.pool.query(
      `insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at)
       select $1, id, position, 'b@recipient.test', 'sink', state, now(), now()
       from unnest($2::uuid[], $3::text[]) as r (id, state), unnest('{0,1}'::smallint[]) as position
       where position = 0 or state <> 'ready'`,
      [tenantId, columns[0], part.map(({ event }) => STATE_OF[event] ?? event)],
    );
    await q.store.pool.query(
      `insert into timeline (tenant_id, email_id, id, at, kind)
       select $1, id, gen_random_uuid(), now(), event
       from unnest($2::uuid[], $3::text[]) as r (id, event) where event = 'complained'`,
      [tenantId, columns[0], columns[4]],
    );
    await q.store.pool.query(
      `insert into email_search (tenant_id, email_id, terms)
       select $1, id, array_to_tsvector(string_to_array(terms, ' '))
       from unnest($2::uuid[], $3::text[]) as r (id, terms)`,
      [
        tenantId,
        columns[0],
        part.map(({ subject, fromDomain, tag }) =>
          searchTermsOf({
            tenantId,
            subject,
            fromDomain,
            from: `a@${fromDomain}`,
            recipients: ['bob@recipient.test'],
            tags: tag === null ? null : [{ name: 'kind', value: tag }],
          }).join(' '),
        ),
      ],
    );
  }
  return rows;
}

test.before(async (context) => {
  context.q = await openQueue();
  context.rows = await fill(context.q, context.q.tenantId);
  // The same for a second tenant, who must not be seen.
  const other = newId();
  await context.q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [other, 'x']);
  await context.q.store.pool.query(
    `insert into email select $2, id, created_at, message_id, from_given, from_domain, to_given,
       cc_given, bcc_given, reply_to_given, subject, tags, last_event, recipient_count
     from email where tenant_id = $1 limit 100`,
    [context.q.tenantId, other],
  );
});
test.after(({ q }) => q.stop());

type Filters = Partial<typeof NO_FILTERS>;
const first: PageRequest = { limit: undefined, after: undefined, before: undefined };

async function walk(q: Bench, filters: Filters, limit: number): Promise<readonly string[]> {
  const ids: string[] = [];
  let after: string | undefined;
  for (;;) {
    const page = await listEmails(
      q.store,
      q.tenantId,
      { ...first, limit, after },
      { ...NO_FILTERS, ...filters },
    );
    ids.push(...page.items.map(({ id }) => id));
    if (!page.hasMore) return ids;
    assert.is(page.items.length, limit, 'a page with more behind it is full');
    after = page.items.at(-1)?.id;
  }
}

async function walkBack(q: Bench, filters: Filters, limit: number): Promise<readonly string[]> {
  const pages: string[][] = [];
  const { rows } = await q.store.pool.query<{ id: string }>(
    'select id from email where tenant_id = $1 order by id limit 1',
    [q.tenantId],
  );
  let before = rows[0]?.id;
  for (;;) {
    const page = await listEmails(
      q.store,
      q.tenantId,
      { ...first, limit, before },
      { ...NO_FILTERS, ...filters },
    );
    pages.unshift(page.items.map(({ id }) => id));
    if (!page.hasMore) return pages.flat();
    before = page.items[0]?.id;
  }
}

for (const [name, filters, matches] of [
  ['a frequent word', { search: 'repo', status: 'bounced' }, (row) => row.event === 'bounced'],
  ['a rare word', { search: 'UNICORN' }, (row) => row.subject.includes('unicorn')],
  ['a word of old emails only', { search: 'legacy' }, (row) => row.subject.includes('legacy')],
  [
    'two words',
    { search: 'unicorn legacy' },
    (row) => row.subject.includes('unicorn') && row.subject.includes('legacy'),
  ],
  ['no such word', { search: 'nowhere' }, () => false],
  ['a tag', { tagName: 'kind', tagValue: 'rare' }, (row) => row.tag === 'rare'],
  ['a tag name', { tagNameAlias: 'kind' }, (row) => row.tag !== null],
  ['a tag with another value', { tagName: 'kind', tagValue: 'rar' }, () => false],
  ['one status', { status: 'bounced' }, (row) => row.event === 'bounced'],
  [
    'two statuses',
    { status: 'failed,bounced' },
    (row) => row.event === 'failed' || row.event === 'bounced',
  ],
  [
    'statuses beyond every window',
    { status: 'failed,delivery_delayed' },
    (row) => row.event === 'failed' || row.event === 'delivery_delayed',
  ],
  [
    'a status beyond every window and a word of nearly all',
    { status: 'failed,delivery_delayed', search: 'report' },
    (row) => row.event === 'failed' || row.event === 'delivery_delayed',
  ],
  ['complaints', { status: 'complained' }, (row) => row.event === 'complained'],
  ['a status that nothing has', { status: 'clicked,failed' }, (row) => row.event === 'failed'],
  [
    'a domain and a rare word',
    { domain: 'ONE.test', search: 'unicorn' },
    (row) => row.fromDomain === 'one.test' && row.subject.includes('unicorn'),
  ],
  [
    'a domain, a status and a date',
    { domain: 'two.test', status: 'bounced', startDate: '2026-05-02' },
    (row) =>
      row.fromDomain === 'two.test' && row.event === 'bounced' && row.at >= START_MS + 86_400_000,
  ],
  [
    'a range of times',
    { startDate: '2026-05-02T00:00:00Z', endDate: '2026-05-02T00:30:00Z' },
    (row) => row.at >= START_MS + 86_400_000 && row.at <= START_MS + 86_400_000 + 1_800_000,
  ],
] as const satisfies readonly (readonly [string, Filters, (row: Row) => boolean])[]) {
  test(`${name}: all of them, newest first, both ways`, async ({ q, rows }) => {
    const expected = rows
      .filter(matches)
      .map(({ id }) => id)
      .toReversed();
    if (!['no such word', 'a tag with another value'].includes(name)) {
      assert.ok(expected.length > 0, 'the filter has something to find');
    }
    const oldest = rows[0]!.id;
    for (const limit of expected.length > 500 ? [100] : expected.length > 10 ? [7] : [7, 1]) {
      assert.equal(await walk(q, filters, limit), expected);
      assert.equal(
        await walkBack(q, filters, limit),
        expected.filter((id) => id !== oldest),
      );
    }
  });
}

test('a page that ends with the last match has no more', async ({ q, rows }) => {
  const count = rows.filter(({ tag }) => tag === 'rare').length;
  const ask = async (limit: number) => {
    const page = await listEmails(
      q.store,
      q.tenantId,
      { ...first, limit },
      { ...NO_FILTERS, tagName: 'kind' },
    );
    return [page.items.length, page.hasMore];
  };
  assert.equal(await ask(count), [count, false]);
  assert.equal(await ask(count - 1), [count - 1, true]);
});

test.run();
