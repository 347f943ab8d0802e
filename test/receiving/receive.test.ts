// Mail that comes in, over real sockets into the real appliance: whose it is, when it is acknowledged, what
// is refused, and how it is read back.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Pool, type QueryConfig } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { receive } from '../../src/receiving/receive.ts';
import { findPostmaster } from '../../src/receiving/resolve.ts';
import { createCopyWriter } from '../../src/receiving/store-copies.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { assertRefused } from '../http/envelope.ts';
import { startApp, type App } from '../support/app.ts';
import { arrivalOf, receiver } from '../support/arrival.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { closeAll, dial, failure, open, send } from '../support/sink-session.ts';

interface Received {
  id: string;
  from: string;
  to: string[];
  received_for: string[];
  subject: string;
  message_id: string | null;
  html: string | null;
  text: string | null;
  headers: Record<string, string>;
  raw: { download_url: string; expires_at: string };
  attachments: { id: string; filename: string | null; size: number; content_id: string | null }[];
  route_decisions: { recipient: string; status: string }[];
}
interface List {
  data: Received[];
  has_more: boolean;
}

const test = suite<{ app: App; port: number }>('receiving');

test.before(async (context) => {
  context.app = await startApp();
  context.port = context.app.appliance.mxPort!;
});
test.after.each(closeAll);
test.after(async ({ app }) => {
  await app.stop();
});

const PIXEL = Buffer.from('not really a picture');
const mime = [
  'From: =?utf-8?q?J=C3=BCrgen?= <j@outside.test>',
  'To: Someone <someone@mailstead.test>',
  'Subject: Two parts',
  'Message-ID: <one@outside.test>',
  'MIME-Version: 1.0',
  'Content-Type: multipart/related; boundary=b',
  '',
  '--b',
  'Content-Type: text/html; charset=utf-8',
  '',
  '<p>See <img src="cid:pixel@x"> and <img src="cid:missing"> and <img src="cid:pixel%40x"> and <img src="cid:%"></p>',
  '--b',
  'Content-Type: image/png; name="../pixel.png"',
  'Content-Disposition: inline; filename="pixel.png"',
  'Content-ID: <pixel@x>',
  'Content-Transfer-Encoding: base64',
  '',
  PIXEL.toString('base64'),
  '--b--',
  '',
].join('\r\n');

const newest = async (app: App): Promise<Received> => {
  const { body } = await app.call<List>('GET', '/emails/receiving?limit=1');
  const { body: email } = await app.call<Received>('GET', `/emails/receiving/${body.data[0]!.id}`);
  return email;
};

test('a message is stored before it is acknowledged and read back whole', async ({ app, port }) => {
  const sent = await send(port, {
    from: 'j@outside.test',
    to: ['some.one+x@Mailstead.test'],
    raw: mime,
  });
  const email = await newest(app);
  assert.is(sent.response, `250 2.0.0 Ok: stored as ${email.id}`);
  assert.is(email.from, 'Jürgen <j@outside.test>');
  assert.equal(email.received_for, ['some.one+x@Mailstead.test']);
  assert.equal(
    email.route_decisions.map(({ recipient, status }) => [recipient, status]),
    [['some.one+x@Mailstead.test', 'unrouteable']],
  );
  assert.is(email.message_id, '<one@outside.test>');
  const image = `data:image/png;base64,${PIXEL.toString('base64')}`;
  assert.is(
    email.html?.trim(),
    `<p>See <img src="${image}"> and <img src="cid:missing"> and <img src="${image}"> and <img src="cid:%"></p>`,
  );
  assert.is(email.headers['subject'], 'Two parts');
  assert.match(email.headers['received'] ?? '', /^from client\.test .*by localhost with ESMTP id /);
  const { body } = await app.call<Received>('GET', `/emails/receiving/${email.id}?html_format=cid`);
  assert.match(body.html ?? '', /src="cid:pixel@x"/);
});

test('its files and its bytes can be downloaded without a key', async ({ app, port }) => {
  await send(port, { to: ['files@mailstead.test'], raw: mime });
  const email = await newest(app);
  const path = `/emails/receiving/${email.id}/attachments`;
  const { body: list } = await app.call<{ data: { id: string; download_url: string }[] }>(
    'GET',
    path,
  );
  assert.is(list.data.length, 1);
  const noId = { status: 422, code: 'invalid_parameter', paths: ['attachmentId'] };
  assertRefused(await app.call('GET', `${path}/x`), noId);
  const { body: one } = await app.call('GET', `${path}/${list.data[0]!.id}`);
  assert.is(one['object'], 'attachment');
  assert.is(one['size'], PIXEL.length);
  assert.is(one['content_disposition'], 'inline');
  const onThis = (url: string): string => app.base + new URL(url).pathname;
  const file = await fetch(onThis(String(one['download_url'])));
  assert.is(file.headers.get('content-type'), 'image/png');
  assert.equal(Buffer.from(await file.arrayBuffer()), PIXEL);
  const raw = await fetch(onThis(email.raw.download_url));
  assert.ok((await raw.text()).endsWith(mime), 'the bytes are as they came');
  const forged = await fetch(
    onThis(email.raw.download_url).replace(/.$/, 'A').replace(/..$/, 'BB'),
  );
  assert.is(forged.status, 404);
});

test('a recipient that is nobody of ours is refused, and the others are not', async ({
  app,
  port,
}) => {
  const wire = await dial(port);
  await wire.say('MAIL FROM:<a@outside.test>');
  assert.match(await wire.say('RCPT TO:<x@elsewhere.test>'), /^550 5\.7\.1 /);
  assert.match(await wire.say('RCPT TO:<x@sub.mailstead.test>'), /^550 5\.7\.1 /);
  assert.match(await wire.say('RCPT TO:<y@mailstead.test>'), /^250 /);
  await wire.say('DATA');
  assert.match(await wire.say('Subject: mixed\r\n\r\nx\r\n.'), /^250 2\.0\.0 /);
  const email = await newest(app);
  assert.is(email.subject, 'mixed');
  assert.equal(email.received_for, ['y@mailstead.test']);
});

test('the postmaster needs no domain', async ({ app, port }) => {
  const wire = await dial(port);
  await wire.say('MAIL FROM:<>');
  assert.match(await wire.say('RCPT TO:<Postmaster>'), /^250 /);
  await wire.say('DATA');
  assert.match(await wire.say('Subject: complaint\r\n\r\nx\r\n.'), /^250 2\.0\.0 /);
  const email = await newest(app);
  assert.is(email.subject, 'complaint');
  assert.equal(email.received_for, ['postmaster@mailstead.test']);
});

test('the postmaster is who owns the domain of the host', async ({ app, port }) => {
  const { tenantId } = await secondTenant(app);
  await onDatabase(app, async (pool) => {
    await pool.query(
      `insert into sending_domain (tenant_id, id, name, status, receiving, receiving_verified)
       values ($1, $2, 'host.test', 'verified', true, true)`,
      [tenantId, newId()],
    );
    const recipientAt = async (hostname: string, homeDomain: string | null) =>
      (await findPostmaster(pool, { hostname, homeDomain }))?.recipient ?? null;
    assert.is(await recipientAt('host.test', null), 'postmaster@host.test');
    assert.is(await recipientAt('mx.eu.host.test', 'mailstead.test'), 'postmaster@host.test');
    assert.is(await recipientAt('another.test', 'mailstead.test'), 'postmaster@mailstead.test');
    assert.is(await recipientAt('nothost.test', null), null);

    const setReceiving = (isOn: boolean) =>
      pool.query(`update sending_domain set receiving = $1 where name = 'mailstead.test'`, [isOn]);
    await setReceiving(false);
    try {
      const wire = await dial(port);
      await wire.say('MAIL FROM:<a@outside.test>');
      assert.match(await wire.say('RCPT TO:<postmaster>'), /^550 5\.1\.1 Nobody reads /);
    } finally {
      await setReceiving(true);
    }
  });
});

const HOSTILE: readonly (readonly [string, string, RegExp])[] = [
  ['a bare LF', 'Subject: x\r\n\r\na\nb\r\n', /550 5\.5\.2 /],
  ['a bare CR', 'Subject: x\r\n\r\na\rb\r\n', /550 5\.5\.2 /],
  ['a smuggled end', 'Subject: x\r\n\r\na\n.\nMAIL FROM:<a@b.test>\r\n', /550 5\.5\.2 /],
  ['a NUL', 'Subject: x\r\n\r\na\0b\r\n', /550 5\.6\.0 /],
  ['a header bomb', `${`X: ${'y'.repeat(900)}\r\n`.repeat(300)}\r\nx\r\n`, /552 5\.3\.4 /],
  [
    'a loop',
    `${'Received: from a by b; now\r\n'.repeat(101)}Subject: x\r\n\r\nx\r\n`,
    /554 5\.4\.6 /,
  ],
];
for (const [name, raw, reply] of HOSTILE) {
  test(`refuses ${name}`, async ({ app, port }) => {
    const { body: before } = await app.call<List>('GET', '/emails/receiving?limit=1');
    const wire = await open(port, 'hostile@mailstead.test');
    wire.socket.write(raw, 'latin1');
    assert.match(await wire.say('.'), reply);
    const { body: after } = await app.call<List>('GET', '/emails/receiving?limit=1');
    assert.is(after.data[0]?.id, before.data[0]?.id);
  });
}

test('a message that cannot be read is stored all the same', async ({ app, port }) => {
  const deep = Array.from({ length: 60 }, (_, n) => [
    `--b${n}`,
    `Content-Type: multipart/mixed; boundary=b${n + 1}`,
    '',
  ]).flat();
  const raw = ['Subject: deep', 'Content-Type: multipart/mixed; boundary=b0', '', ...deep, ''].join(
    '\r\n',
  );
  assert.match((await send(port, { to: ['deep@mailstead.test'], raw })).response, /^250 /);
  assert.equal((await newest(app)).received_for, ['deep@mailstead.test']);
});

test('a large message lies in the blob store and reads back', async ({ app, port }) => {
  const line = `${'0123456789'.repeat(7)}\r\n`;
  const raw = `Subject: large\r\n\r\n${line.repeat(20_000)}`;
  assert.match((await send(port, { to: ['large@mailstead.test'], raw })).response, /^250 /);
  const email = await newest(app);
  const url = new URL(email.raw.download_url).pathname;
  const read = await (await fetch(app.base + url)).text();
  assert.ok(read.endsWith(raw));
});

/** Hands over a large message of two tenants; the blobs that are there after it failed. */
async function blobsAfter(
  pool: Pick<Pool, 'connect'>,
  put?: (blobs: BlobStore) => BlobStore['put'],
): Promise<number> {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-test-'));
  try {
    const blobs = openDiskBlobs(folder);
    const receivers = [newId(), newId()].map((tenantId) => receiver(tenantId, 'a@x.test'));
    await receive(
      {
        store: { pool } as Store,
        blobs: { ...blobs, put: put?.(blobs) ?? blobs.put },
        write: createCopyWriter(pool),
        parse: () => Promise.resolve(null),
        onUnread: () => assert.unreachable('nothing is there to be read'),
        onForwards: () => assert.unreachable('nothing is there to be forwarded'),
      },
      arrivalOf({ receivers, raw: Buffer.alloc(200_000, 'x\r\n') }),
    ).then(
      () => assert.unreachable('it is not stored'),
      () => undefined,
    );
    let count = 0;
    for await (const key of blobs.list(new Date(Date.now() + 60_000))) count += key === '' ? 0 : 1;
    return count;
  } finally {
    await rm(folder, { recursive: true });
  }
}

test('what certainly was not stored leaves no blob', async ({ app }) => {
  const pool = new Pool({
    connectionString: app.databaseUrl,
    options: '-c default_transaction_read_only=on',
  });
  assert.is(await blobsAfter(pool), 0, 'the database refused the rows');
  await pool.end();
  const nowhere = new Pool({ host: '127.0.0.1', port: 1 });
  assert.is(await blobsAfter(nowhere), 0, 'there was no database');
  await nowhere.end();
  let puts = 0;
  const full = await blobsAfter(
    { connect: () => assert.unreachable('nothing to store') as never },
    (blobs) => (key, bytes) =>
      (puts += 1) === 1 ? blobs.put(key, bytes) : Promise.reject(new Error('disk full')),
  );
  assert.is(full, 0, 'the second blob did not fit');
});

test('after a lost commit the blobs stay: the rows may be there', async ({ app }) => {
  const left = await onDatabase(app, (pool) => {
    const connect = async () => {
      const client = await pool.connect();
      const query = async (config: QueryConfig) => {
        await client.query(config);
        throw new Error('Connection terminated unexpectedly');
      };
      return { query, release: () => client.release() };
    };
    return blobsAfter({ connect } as unknown as Pool);
  });
  assert.is(left, 2);
});

test('one message for two tenants is stored once for each, and neither sees the other', async ({
  app,
  port,
}) => {
  const { tenantId, key: token } = await secondTenant(app);
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into sending_domain (tenant_id, id, name, status, receiving, receiving_verified)
       values ($1, $2, 'second.test', 'verified', true, true)`,
      [tenantId, newId()],
    ),
  );
  await send(port, { to: ['a@second.test', 'b@mailstead.test', 'c@second.test'], raw: mime });
  const mine = await newest(app);
  assert.equal(mine.received_for, ['b@mailstead.test']);
  const { body: theirs } = await app.call<List>('GET', '/emails/receiving', { key: token });
  assert.is(theirs.data.length, 1);
  assert.equal(theirs.data[0]!.received_for, ['a@second.test', 'c@second.test']);
  const foreign = await app.call('GET', `/emails/receiving/${mine.id}`, { key: token });
  const missing = await app.call('GET', `/emails/receiving/${newId()}`, { key: token });
  assert.is(foreign.status, 404);
  assert.equal({ ...foreign.body, id: 0 }, { ...missing.body, id: 0 });
  const part = await app.call(
    'GET',
    `/emails/receiving/${mine.id}/attachments/${mine.attachments[0]!.id}`,
    { key: token },
  );
  assert.is(part.status, 404);
});

test('a page of the list and bad questions', async ({ app }) => {
  const { body: first } = await app.call<List>('GET', '/emails/receiving?limit=2');
  assert.is(first.data.length, 2);
  assert.is(first.has_more, true);
  const after = first.data[1]!.id;
  const { body: second } = await app.call<List>('GET', `/emails/receiving?limit=2&after=${after}`);
  assert.ok(second.data.every(({ id }) => id < after));
  for (const [path, status] of [
    ['/emails/receiving?limit=0', 422],
    ['/emails/receiving?after=x', 422],
    ['/emails/receiving/x', 422],
    [`/emails/receiving/${newId()}`, 404],
    [`/emails/receiving/${newId()}/attachments`, 404],
    [`/emails/receiving/${after}?html_format=x`, 422],
  ] as const) {
    assert.is((await app.call('GET', path)).status, status, path);
  }
  assert.is((await app.call('GET', '/emails/receiving', { key: null })).status, 401);
});

test('a client that leaves before the final dot leaves nothing', async ({ app, port }) => {
  const { body: before } = await app.call<List>('GET', '/emails/receiving?limit=1');
  const wire = await open(port, 'gone@mailstead.test');
  wire.socket.write('Subject: never\r\n\r\nhalf');
  wire.socket.destroy();
  assert.match((await send(port, { to: ['next@mailstead.test'] })).response, /^250 /);
  const { body: after } = await app.call<List>('GET', '/emails/receiving?limit=2');
  assert.equal(after.data[0]!.received_for, ['next@mailstead.test']);
  assert.is(after.data[1]!.id, before.data[0]!.id);
});

test('too many recipients, and a message above the limit', async ({ port }) => {
  const many = Array.from({ length: 101 }, (_, n) => `u${n}@mailstead.test`);
  const sent = await send(port, { to: many });
  assert.is(sent.rejected.length, 1);
  assert.match(
    await failure(
      send(port, { to: ['big@mailstead.test'], raw: Buffer.alloc(53_000_000, 'x\r\n') }),
    ),
    /^552 5\.3\.4 |^552 /,
  );
});

test.run();
