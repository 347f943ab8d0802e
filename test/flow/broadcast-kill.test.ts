// kill -9 twice in the middle of a broadcast and of an import: everyone who wants it gets it once, the others never; every
// row is read once.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { insertPeople, readReached, type Ask } from '../support/broadcast-people.ts';
import { startCountingSink, type CountingSink } from '../support/counting-sink.ts';
import { migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { API_KEY, createProgram, type Program } from '../support/program.ts';

const CONTACTS = 600;
/** Of the file; one of a hundred is no contact, one is a contact that was there. */
const ROWS = 10_000;

const test = suite('broadcast, killed');
let sink: CountingSink;
let program: Program;
let database: FreshDatabase;
let pool: Pool;
const ask: Ask = async <T extends object>(sql: string, values: readonly unknown[] = []) =>
  (await pool.query<T>(sql, [...values])).rows;

test.before(async () => {
  sink = await startCountingSink();
  database = await migratedDatabase();
  pool = new Pool({ connectionString: database.url, max: 2 });
  pool.on('error', () => undefined);
  program = await createProgram({
    MAILSTEAD_DATABASE_URL: database.url,
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${sink.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1s',
    MAILSTEAD_LOG_LEVEL: 'warn',
  });
  await program.start();
});
test.after(async () => {
  await program.remove();
  await pool.end();
  await database.drop();
  await sink.stop();
});

/** A file on its way into a segment of its own. */
async function beginImport(): Promise<{ readonly id: string; readonly segmentId: string }> {
  const segment = await program.call('POST', '/segments', { name: 'Imported' });
  const segmentId = String(segment.body['id']);
  const rows = Array.from({ length: ROWS }, (_, row) => {
    if (row % 100 === 7) return 'nobody,x';
    return row % 100 === 9 ? 'Row-0@rows.test,"twice"' : `row-${row}@rows.test,"Name\r\n${row}"`;
  });
  const form = new FormData();
  form.append('segments', JSON.stringify([{ id: segmentId }]));
  form.append('file', new Blob([['email,note', ...rows].join('\r\n')]), 'rows.csv');
  const response = await fetch(`${program.base}/contacts/imports`, {
    method: 'POST',
    body: form,
    headers: { authorization: `Bearer ${API_KEY}` },
  });
  assert.is(response.status, 201);
  const { id } = (await response.json()) as { id: string };
  await until(
    () => ask('select 1 from contact_import where id = $1 and created > 0', [id]),
    ({ length }) => length > 0,
  );
  return { id, segmentId };
}

test('everyone once, who does not want it never; every row once', async () => {
  const [tenant] = await ask<{ id: string }>('select id from tenant');
  const people = await insertPeople(ask, {
    tenantId: tenant!.id,
    contacts: CONTACTS,
    domain: 'people.test',
  });
  const file = await beginImport();
  const made = await program.call('POST', '/broadcasts', {
    segment_id: people.segmentId,
    topic_id: people.topicId,
    from: 'News <news@mailstead.test>',
    subject: 'For {{{FIRST_NAME}}}',
    html: '<p>Hello {{{FIRST_NAME}}}, <a href="{{{RESEND_UNSUBSCRIBE_URL}}}">unsubscribe</a></p>',
    send: true,
  });
  assert.is(made.status, 201, JSON.stringify(made.body));
  const id = String(made.body['id']);
  const seen: number[] = [];
  const read: { readonly at: string; readonly of: string }[] = [];
  const killAfter = async (contacts: number): Promise<void> => {
    const reached = await until(
      async () => (await readReached(ask, id)).contacts,
      (count) => count >= contacts,
    );
    await program.kill();
    seen.push(reached);
    // Whoever takes it for dead waits for a while.
    read.push(
      ...(await ask<{ at: string; of: string }>(
        'update contact_import set leased_until = null where id = $1 returning read_bytes as at, size_bytes as of',
        [file.id],
      )),
    );
  };
  await killAfter(1);
  // The fan-out goes on before anybody is told that the program is ready.
  const killed = program.start();
  await killAfter(Math.min(seen[0]! + 1, CONTACTS));
  await program.start();
  await killed; // it sees the next one answer
  const done = await until(
    () => readReached(ask, id),
    ({ status, open }) => status === 'sent' && open === 0,
  );
  assert.ok(seen[0]! < CONTACTS, 'it was not in the middle');
  assert.ok(Number(read[0]!.at) < Number(read[0]!.of), 'the import was not in the middle');
  assert.equal(
    { ...done, unknown: 0 },
    {
      status: 'sent',
      recipients: people.wanted,
      left_out: CONTACTS - people.wanted,
      rows: CONTACTS,
      contacts: CONTACTS,
      emails: people.wanted,
      addresses: people.wanted,
      forbidden: 0,
      open: 0,
      unknown: 0,
    },
  );
  const emails = await ask<{ message_id: string; state: string }>(
    `select e.message_id, d.state from email e join delivery d on d.email_id = e.id where e.broadcast_id = $1`,
    [id],
  );
  for (const { message_id: messageId, state } of emails) {
    const count = sink.counts.get(messageId) ?? 0;
    if (state === 'unknown') assert.ok(count <= 1, `${messageId} arrived ${count} times`);
    else assert.is(count, 1, `${messageId} arrived ${count} times`);
  }
  const imported = await until(
    () => program.call('GET', `/contacts/imports/${file.id}`),
    ({ body }) => body['status'] !== 'in_progress',
  );
  const part = ROWS / 100;
  const fresh = ROWS - 2 * part;
  assert.equal(
    [imported.body['status'], imported.body['counts'], imported.body['read']],
    [
      'completed',
      { total: ROWS, created: fresh, updated: part, skipped: 0, failed: part },
      imported.body['size'],
    ],
  );
  const [members] = await ask<{ count: number }>(
    'select count(*)::integer as count from segment_contact where segment_id = $1',
    [file.segmentId],
  );
  assert.is(members!.count, fresh);
  const errors = imported.body['errors'] as readonly { readonly row: number }[];
  assert.equal(
    errors.map(({ row }) => row),
    Array.from({ length: part }, (_, index) => 100 * index + 9),
  );
});

test.run();
