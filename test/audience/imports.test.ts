// Files of contacts: what is read from them, whatever program wrote them; that nothing is lost or doubled when the reading
// ends anywhere and is begun again; that a file that cannot be read ends and keeps nobody waiting.
import { existsSync, mkdtempSync, rmSync, utimesSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { PoolClient } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { createImporter, type ImporterOptions } from '../../src/audience/importer.ts';
import { createImportVerbs, OPEN_IMPORTS_MAX } from '../../src/audience/imports.ts';
import { collectBlobs } from '../../src/sending/collect-blobs.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const folder = mkdtempSync(join(tmpdir(), 'mailstead-imports-'));
const blobs = openDiskBlobs(folder);

const test = suite('imports');
let bench: Bench;
let store: Store;
let verbs: ReturnType<typeof createImportVerbs>;
test.before(async () => {
  bench = await openQueue();
  store = bench.store;
  verbs = createImportVerbs({ store, blobs, now: () => new Date(), onImport: () => undefined });
});
test.after(async () => {
  await bench.stop();
  rmSync(folder, { recursive: true, force: true });
});

async function tenant(): Promise<string> {
  const id = newId();
  await store.pool.query(`insert into tenant (id, name) values ($1, 'test')`, [id]);
  return id;
}

// oxlint-disable-next-line typescript/require-await -- what arrives is a stream
async function* inPieces(file: string | Buffer): AsyncGenerator<Uint8Array> {
  const bytes = Buffer.from(file);
  for (let at = 0; at < bytes.length; at += 7) yield bytes.subarray(at, at + 7);
}

type Fields = Readonly<Record<string, unknown>>;

async function begin(
  tenantId: string,
  file: string | Buffer,
  fields: Fields = {},
): Promise<string> {
  const texts = Object.entries(fields).map(
    ([name, value]) => [name, typeof value === 'string' ? value : JSON.stringify(value)] as const,
  );
  return verbs.create(tenantId, await verbs.receive(inPieces(file)), new Map(texts));
}

const importer = (about: Partial<ImporterOptions> = {}) =>
  createImporter({ store, blobs, log: silent, ...about });

/** Until nothing is due any more. */
async function run(about: Partial<ImporterOptions> = {}): Promise<void> {
  const one = importer(about);
  while ((await one.turn()) === 0);
}

async function look(tenantId: string, id: string) {
  const found = await verbs.find(tenantId, id);
  assert.ok(found);
  const { total, ...counts } = found.record.counts;
  assert.is(total, counts.created + counts.updated + counts.skipped + counts.failed);
  return { ...found.record, errors: found.errors, ...counts };
}

interface Person {
  readonly email: string;
  readonly first: string | null;
  readonly last: string | null;
  readonly unsubscribed: boolean;
  readonly properties: Readonly<Record<string, unknown>>;
}

async function people(tenantId: string): Promise<readonly Person[]> {
  const { rows } = await store.pool.query<Person>(
    `select c.email, c.first_name as first, c.last_name as last, c.unsubscribed, coalesce((
       select jsonb_object_agg(p.key, held.value) from jsonb_each(c.properties) held
       join contact_property p on p.tenant_id = c.tenant_id and p.id = held.key::uuid), '{}') as properties
     from contact c where c.tenant_id = $1 order by c.address`,
    [tenantId],
  );
  return rows.map((row) => ({
    ...row,
    properties:
      typeof row.properties === 'string'
        ? (JSON.parse(row.properties) as Person['properties'])
        : row.properties,
  }));
}

const refusal = async (work: Promise<unknown>): Promise<Refusal> => {
  try {
    await work;
  } catch (error) {
    if (error instanceof Refusal) return error;
    throw error;
  }
  throw new Error('it was not refused');
};

test('a file as programs write it: BOM, all ends of lines, quotes, ragged and empty rows', async () => {
  const tenantId = await tenant();
  const file = [
    '\ufeffemail,first_name,last_name,unsubscribed,notes\r\n',
    'ada@recipient.test,Ada,"Love""lace, Countess",yes,\r\n',
    '\r\n',
    'grace@recipient.test,Grace\n',
    ',,,,\r',
    '"Zoë@recipient.test","Zo\u00eb O""Hara",Bar "Baz" Qux,FALSE,"a\r\nb"\r',
    ' bob@recipient.test ,,, ,,,\n',
    'no-address,x\n',
    ',Nobody,,\n',
    'eve@recipient.test,Eve,E,maybe\n',
    'mal@recipient.test,a,b,,c,d\n',
    'kurt@recipient.test,"two\nlines"\n',
    'last@recipient.test,Last',
  ].join('');
  const id = await begin(tenantId, file);
  await run();
  assert.equal(
    (await people(tenantId)).map(({ email, first, last, unsubscribed }) => [
      email,
      first,
      last,
      unsubscribed,
    ]),
    [
      ['ada@recipient.test', 'Ada', 'Love"lace, Countess', true],
      ['bob@recipient.test', null, null, false],
      ['grace@recipient.test', 'Grace', null, false],
      ['last@recipient.test', 'Last', null, false],
      ['Zoë@recipient.test', 'Zoë O"Hara', 'Bar "Baz" Qux', false],
    ],
  );
  const done = await look(tenantId, id);
  assert.is(done.status, 'completed');
  assert.is(done.readBytes, Buffer.byteLength(file));
  assert.equal([done.created, done.updated, done.skipped, done.failed], [5, 0, 0, 5]);
  assert.equal(
    done.errors.map(({ row }) => row),
    [8, 9, 10, 11, 12],
  );
  const said = done.errors.map(({ message }) => message);
  assert.match(said[0]!, /needs an @/);
  assert.match(said[1]!, /no address/);
  assert.match(said[2]!, /true or false/);
  assert.match(said[3]!, /6 cells, but there are 5 columns/);
  assert.match(said[4]!, /line break/);
});

test('semicolons, tabs, and a map to columns of any name; properties are made and typed', async () => {
  const tenantId = await tenant();
  const map = {
    email: 'E-Mail; privat',
    first_name: 'Vorname',
    properties: {
      seats: { column: 'Plätze', type: 'number' },
      vip: { column: 'VIP', type: 'boolean' },
      plan: { column: 'Plan' },
    },
  };
  for (const [delimiter, name] of [
    [';', 'one'],
    ['\t', 'two'],
  ] as const) {
    const rows = [
      ['"E-Mail; privat"', 'Vorname', 'Plätze', 'VIP', 'Plan'],
      [`${name}@recipient.test`, 'A, B', '6', 'yes', 'gold'],
      [`${name}-bad@recipient.test`, 'C', 'six', '', ''],
      [`${name}-few@recipient.test`, '', '1.5', '0', ''],
    ];
    const file = rows.map((row) => row.join(delimiter)).join('\n');
    const id = await begin(tenantId, file, { column_map: map });
    await run();
    const done = await look(tenantId, id);
    assert.equal([done.created, done.failed], [2, 1]);
    assert.match(done.errors[0]!.message, /properties\.seats/);
  }
  const found = await people(tenantId);
  assert.equal(
    found.map(({ email, first, properties }) => [email, first, properties]),
    [
      ['one-few@recipient.test', null, { seats: 1.5, vip: false }],
      ['one@recipient.test', 'A, B', { seats: 6, vip: true, plan: 'gold' }],
      ['two-few@recipient.test', null, { seats: 1.5, vip: false }],
      ['two@recipient.test', 'A, B', { seats: 6, vip: true, plan: 'gold' }],
    ],
  );
  // Without a map a column with the key of a property is read, one that is nothing's is not.
  const id = await begin(tenantId, 'email,plan,Seats\none@recipient.test,silver,9\n');
  await run();
  assert.is((await look(tenantId, id)).updated, 1);
  const [, one] = await people(tenantId);
  assert.equal(one!.properties, { seats: 6, vip: true, plan: 'silver' });
});

test('a contact that is there is changed or left alone; empty cells say nothing; webhooks hear nothing', async () => {
  const tenantId = await tenant();
  const [segment, topic] = [newId(), newId()];
  await store.pool.query(
    `with one as (insert into segment (tenant_id, id, name, created_at, updated_at)
       values ($1, $2, 's', now(), now()))
     insert into topic (tenant_id, id, name, default_subscription, visibility, created_at, updated_at)
     values ($1, $3, 't', 'opt_out', 'public', now(), now())`,
    [tenantId, segment, topic],
  );
  await store.pool.query(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
     values ($1, $2, 'https://hook.test', '{contact.created,contact.updated}', 'enabled', '', now(), now())`,
    [tenantId, newId()],
  );
  await begin(tenantId, 'email,first_name,unsubscribed\nada@recipient.test,Ada,true\n');
  await run();
  const file = [
    'email,first_name,unsubscribed',
    'ADA@Recipient.test,,',
    'new@recipient.test,New,',
    'New@recipient.test,Newer,',
    'ada@recipient.test,Augusta,',
    '',
  ].join('\n');
  const skipped = await begin(tenantId, file, { on_conflict: 'skip', segments: [segment] });
  await run();
  const skip = await look(tenantId, skipped);
  assert.equal([skip.created, skip.updated, skip.skipped], [1, 0, 3]);
  const names = async () =>
    (await people(tenantId)).map(({ first, unsubscribed }) => [first, unsubscribed]);
  assert.equal(await names(), [
    ['Ada', true],
    ['New', false],
  ]);
  const upserted = await begin(tenantId, file, {
    segments: [{ id: segment }],
    topics: [{ id: topic, subscription: 'opt_in' }],
  });
  await run();
  const upsert = await look(tenantId, upserted);
  assert.equal([upsert.created, upsert.updated, upsert.skipped], [0, 4, 0]);
  assert.equal(await names(), [
    ['Augusta', true],
    ['Newer', false],
  ]);
  const { rows } = await store.pool.query<Record<string, string>>(
    `select (select count(*) from segment_contact where tenant_id = $1) as members,
       (select count(*) from contact_topic where tenant_id = $1 and subscription = 'opt_in') as choices,
       (select count(*) from outbox where tenant_id = $1) as told`,
    [tenantId],
  );
  assert.equal(Object.values(rows[0]!).map(Number), [2, 2, 0]);
});

/** Transactions from the nth on end before or after their commit, as a killed process' do. */
function dying(transactions: number, isCommitted: boolean): Store {
  let count = 0;
  return {
    ...store,
    async transact<T>(work: (client: PoolClient) => Promise<T>): Promise<T> {
      count += 1;
      if (count < transactions) return store.transact(work);
      if (isCommitted) await store.transact(work);
      throw new Error('killed');
    },
  };
}

test('a reader that dies anywhere loses no row and doubles none', async () => {
  const tenantId = await tenant();
  const rows = Array.from({ length: 40 }, (_, index) =>
    index % 10 === 3 ? `bad-${index},x` : `p${index % 30}@recipient.test,"N\r\n${index}"`,
  );
  const file = ['email,note', ...rows].join('\r\n');
  const id = await begin(tenantId, file);
  const due = () =>
    store.pool.query('update contact_import set leased_until = null where id = $1', [id]);
  const seen: number[] = [];
  for (let step = 0; step < 12; step += 1) {
    const dead = importer({
      store: dying(2 + (step % 3), step % 2 === 0),
      batchRows: 3,
      sliceMs: 1e9,
    });
    await dead.turn();
    await due();
    const { readBytes, status } = await look(tenantId, id);
    seen.push(readBytes);
    if (status !== 'in_progress') break;
  }
  assert.ok(new Set(seen).size > 3, `it stopped at ${seen.join(', ')}`);
  await store.pool.query('update contact_import set tries = 0 where id = $1', [id]);
  await run({ batchRows: 3 });
  const done = await look(tenantId, id);
  assert.is(done.status, 'completed', String(done.failure));
  assert.equal([done.created, done.updated, done.failed], [27, 9, 4]);
  assert.equal(
    done.errors.map(({ row }) => row),
    [5, 15, 25, 35],
  );
  assert.is((await people(tenantId)).length, 27);
});

test('who took it too late stores nothing', async () => {
  const tenantId = await tenant();
  const rows = Array.from({ length: 30 }, (_, index) => `p${index}@recipient.test`);
  const id = await begin(tenantId, ['email', ...rows].join('\n'));
  let isOvertaken = false;
  const slow = importer({
    batchRows: 10,
    sliceMs: 1e9,
    store: {
      ...store,
      async transact<T>(work: (client: PoolClient) => Promise<T>): Promise<T> {
        const [held] = (await verbs.list(tenantId, page, null)).items;
        if (held!.counts.total === 10 && !isOvertaken) {
          isOvertaken = true;
          await store.pool.query('update contact_import set leased_until = null where id = $1', [
            id,
          ]);
          await run({ batchRows: 7 });
        }
        return store.transact(work);
      },
    },
  });
  assert.is(await slow.turn(), 0);
  assert.ok(isOvertaken);
  const done = await look(tenantId, id);
  assert.equal([done.status, done.created, done.updated], ['completed', 30, 0]);
});

const page = { limit: 10, after: undefined, before: undefined };

test('tenants take turns, and an import that is broken keeps nobody waiting', async () => {
  const tenants = [await tenant(), await tenant(), await tenant()];
  const rows = Array.from({ length: 20 }, (_, index) => `p${index}@recipient.test`);
  const file = ['email', ...rows].join('\n');
  const ids: string[] = [];
  for (const tenantId of tenants) ids.push(await begin(tenantId, file));
  const gone = await begin(tenants[0]!, file);
  const broken = await begin(tenants[1]!, `${file}\n"never closed,x\n${rows.join('\n')}`);
  const { rows: keys } = await store.pool.query<{ blob_key: string }>(
    'select blob_key from contact_import where id = $1',
    [gone],
  );
  await blobs.remove(keys[0]!.blob_key);
  const one = importer({ batchRows: 5, sliceMs: 0 });
  const turns: number[][] = [];
  for (let turn = 0; turn < 6; turn += 1) {
    assert.is(await one.turn(), 0);
    const read = tenants.map(
      async (tenantId, index) => (await look(tenantId, ids[index]!)).created,
    );
    turns.push(await Promise.all(read));
  }
  assert.equal(turns[2], [5, 5, 5]);
  assert.equal(turns[5], [10, 10, 10]);
  while ((await one.turn()) === 0);
  for (const [index, tenantId] of tenants.entries()) {
    assert.is((await look(tenantId, ids[index]!)).status, 'completed');
  }
  const lost = await look(tenants[0]!, gone);
  assert.equal([lost.status, lost.created], ['failed', 0]);
  assert.match(lost.failure!, /gone/);
  const torn = await look(tenants[1]!, broken);
  assert.equal([torn.status, torn.created + torn.updated], ['failed', 20]);
  assert.match(torn.failure!, /^Row 22 .*not closed/);
  assert.ok(torn.completedAt !== null);
});

test('what fails again and again is given up in the end', async () => {
  const tenantId = await tenant();
  const id = await begin(tenantId, 'email\na@recipient.test\n');
  for (let tries = 1; tries <= 8; tries += 1) {
    await importer({ store: dying(2, false) }).turn();
    const { rows } = await store.pool.query<{ waits: boolean }>(
      'select leased_until > now() as waits from contact_import where id = $1',
      [id],
    );
    assert.is(rows[0]!.waits, tries < 8 ? true : null);
    const isDue = 'update contact_import set leased_until = null where id = $1';
    await store.pool.query(isDue, [id]);
  }
  const done = await look(tenantId, id);
  assert.is(done.status, 'failed');
  assert.match(done.failure!, /our side/);
});

test('what the first line shows is refused at once, and the file does not stay', async () => {
  const tenantId = await tenant();
  const cases: readonly [string | Buffer, Fields, RegExp][] = [
    ['', {}, /is empty/],
    ['\n\n', {}, /is empty/],
    ['Email,name\na@b.test,x', {}, /no column `email`; its columns are `Email`, `name`/],
    ['email,email\n', {}, /more than one column `email`/],
    ['email\n', { column_map: { email: 'Mail' } }, /no column `Mail`/],
    ['email\n', { column_map: { last_name: 'Name' } }, /no column `Name`/],
    [Buffer.from('\ufeffemail\n', 'utf16le'), {}, /UTF-8/],
    [Buffer.from('email,stra\xdfe\n', 'latin1'), {}, /UTF-8/],
    [Buffer.from('PK\x03\x04whatever'), {}, /not a CSV file/],
    [`email,${'x'.repeat(70_000)}\n`, {}, /first line is longer/],
    ['"email\na@b.test\n', {}, /quote in the first line/],
    ['email\n', { column_map: 'x' }, /must be JSON/],
    ['email\n', { column_map: [] }, /must be an object/],
    ['email\n', { column_map: { email: 7 } }, /column_map\.email/],
    ['email\n', { column_map: { properties: { 'a b': { column: 'x' } } } }, /letters, digits/],
    ['email\n', { column_map: { properties: { a: {} } } }, /Missing .*a\.column/],
    ['email\n', { column_map: { properties: { a: { column: 'email', type: 'date' } } } }, /type/],
    ['email\n', { on_conflict: 'replace' }, /upsert/],
    ['email\n', { segments: {} }, /must be an array/],
    ['email\n', { segments: [{ id: newId() }] }, /no segment/],
    ['email\n', { segments: ['x'] }, /id of a segment/],
    ['email\n', { topics: [{ id: newId(), subscription: 'opt_in' }] }, /no topic/],
    ['email\n', { topics: [{ id: newId() }] }, /opt_out/],
  ];
  const nameless = async (): Promise<number> => {
    let count = 0;
    for await (const key of blobs.list(new Date(Date.now() + 60_000))) {
      const { rowCount } = await store.pool.query(
        'select 1 from contact_import where blob_key = $1',
        [key],
      );
      if (rowCount === 0) count += 1;
    }
    return count;
  };
  const before = await nameless();
  for (const [file, fields, words] of cases) {
    const refused = await refusal(begin(tenantId, file, fields));
    assert.is(refused.status, 422);
    assert.match(refused.message, words);
  }
  await begin(tenantId, 'email,n\n', {
    column_map: { properties: { seats: { column: 'n', type: 'number' } } },
  });
  const other = { column_map: { properties: { seats: { column: 'n', type: 'string' } } } };
  assert.match((await refusal(begin(tenantId, 'email,n\n', other))).message, /is a number/);
  assert.is(await nameless(), before);
  for (let open = 1; open < OPEN_IMPORTS_MAX; open += 1) await begin(tenantId, 'email\n');
  assert.match((await refusal(begin(tenantId, 'email\n'))).message, /not done/);
  await run();
  await begin(tenantId, 'email\n');
  await run();
});

test('bytes that are not UTF-8 fail their row; at most a thousand errors are kept', async () => {
  const tenantId = await tenant();
  const latin = Buffer.from('z@recipient.test,M\xfcller\n', 'latin1');
  const id = await begin(
    tenantId,
    Buffer.concat([
      Buffer.from('email,first_name\na@recipient.test,Ok\n'),
      latin,
      Buffer.from('nul\0@recipient.test,x\nb@recipient.test,a\0b\n'),
      Buffer.from('nobody\n'.repeat(1_200)),
    ]),
  );
  await run();
  const done = await look(tenantId, id);
  assert.equal([done.status, done.created, done.failed], ['completed', 1, 1_203]);
  assert.is(done.errors.length, 100);
  assert.match(done.errors[0]!.message, /UTF-8/);
  assert.is(done.errors[0]!.row, 3);
  const { rows } = await store.pool.query<{ count: number }>(
    'select count(*)::integer as count from contact_import_error where import_id = $1',
    [id],
  );
  assert.is(rows[0]!.count, 1_000);
});

test('the file of an open import is not collected, and goes when the import is done', async () => {
  const tenantId = await tenant();
  const id = await begin(tenantId, 'email\na@recipient.test\n');
  const { rows } = await store.pool.query<{ key: string }>(
    'select blob_key as key from contact_import where id = $1',
    [id],
  );
  const { key } = rows[0]!;
  const path = join(folder, key.slice(-2), key);
  const orphan = newId();
  await blobs.put(orphan, Buffer.from('x'));
  const old = new Date(Date.now() - 2 * 86_400_000);
  for (const name of [key, orphan]) utimesSync(join(folder, name.slice(-2), name), old, old);
  assert.is(await collectBlobs(store, blobs, new Date()), 1);
  assert.ok(existsSync(path));
  await run();
  assert.is((await look(tenantId, id)).status, 'completed');
  assert.not(existsSync(path));
});

test.run();
