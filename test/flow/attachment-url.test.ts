// Attachments by URL, from the request to the message in the sink: fetched after acceptance, composed in their order,
// tried again, given up with words that help; and never fetched from where the guard says no.
import { once } from 'node:events';
import { createServer, type Server } from 'node:http';
import { createServer as createTcp, type AddressInfo, type Server as TcpServer } from 'node:net';
import { simpleParser } from 'mailparser';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string; last_code: string | null; last_reply: string | null }[];
}

const test = suite('attachment-url');
let app: App;
let dns: DnsServer;
let web: Server;
let trap: TcpServer;
let base: string;
let trapPort: number;
let knocks = 0;
const hits: Record<string, number> = {};
const large = Buffer.alloc(9 * 1024 * 1024, 'large file ');

test.before(async () => {
  web = createServer((request, response) => {
    const path = request.url ?? '';
    hits[path] = (hits[path] ?? 0) + 1;
    if (path === '/logo.png') response.setHeader('content-type', 'image/png').end('PNG bytes');
    else if (path === '/typed') response.setHeader('content-type', 'text/csv').end('a,b\r\n');
    else if (path === '/large.bin') response.end(large);
    else if (path === '/too-large') response.setHeader('content-length', '99999999').end();
    else if (path === '/flaky' && hits[path] === 1) response.writeHead(503).end();
    else if (path === '/flaky') response.end('second time');
    else if (path === '/broken') response.writeHead(500).end();
    else if (path === '/inside') {
      response.writeHead(302, { location: `http://127.0.0.3:${trapPort}/secret` }).end();
    } else response.writeHead(404).end();
  });
  web.listen(0, '127.0.0.2');
  await once(web, 'listening');
  trap = createTcp((socket) => {
    knocks += 1;
    socket.destroy();
  });
  trap.listen(0, '127.0.0.3');
  await once(trap, 'listening');
  trapPort = (trap.address() as AddressInfo).port;
  dns = await startDns({
    'files.test': { A: ['127.0.0.2'] },
    'inside.test': { A: ['127.0.0.3'] },
  });
  base = `http://files.test:${(web.address() as AddressInfo).port}`;
  app = await startApp({
    MAILSTEAD_DNS_SERVERS: dns.server,
    // In development, too, only what the operator opened.
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.2/32',
  });
});
test.after(async () => {
  await app.stop();
  await dns.stop();
  web.closeAllConnections();
  for (const server of [web, trap]) await new Promise((resolve) => server.close(resolve));
});

const timelineOf = async (id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;

/** The next try is now. */
async function retryNow(id: string): Promise<void> {
  const client = new Client({ connectionString: app.databaseUrl });
  await client.connect();
  await client.query(
    'update attachment_fetch set due_at = now() where email_id = $1 and leased_until is null',
    [id],
  );
  await client.end();
}

async function receivedBy(recipient: string): Promise<Awaited<ReturnType<typeof simpleParser>>> {
  const { body } = await until(
    () => app.call<{ data: { rcpt_to: string[]; raw: string }[] }>('GET', '/sink/messages'),
    (answer) => answer.body.data.some(({ rcpt_to: to }) => to.includes(recipient)),
  );
  const found = body.data.find(({ rcpt_to: to }) => to.includes(recipient));
  return simpleParser(Buffer.from(found?.raw ?? ''), {});
}

test('given and fetched files arrive together, in their order', async () => {
  const id = await app.send({
    to: 'together@recipient.test',
    html: '<img src="cid:logo">',
    attachments: [
      { filename: 'first.txt', content: Buffer.from('given').toString('base64') },
      { filename: 'logo.png', path: `${base}/logo.png`, content_id: 'logo' },
      { filename: 'table', path: `${base}/typed` },
      { filename: 'named.bin', path: `${base}/typed`, content_type: 'application/x-own' },
    ],
  });
  await app.untilEvent(id, 'delivered');
  const message = await receivedBy('together@recipient.test');
  assert.equal(
    message.attachments
      .map((one) => `${one.filename} ${one.contentType} ${one.content.toString()}`)
      .toSorted(),
    [
      'first.txt text/plain given',
      'logo.png image/png PNG bytes',
      'named.bin application/x-own a,b\r\n',
      'table text/csv a,b\r\n',
    ].toSorted(),
  );
  const { events } = await timelineOf(id);
  const fact = events.find(({ type }) => type === 'attachments_fetched');
  assert.is(fact?.detail['attachments'], 3);
  assert.is(hits['/logo.png'], 1);
});

test('a large file is streamed through', async () => {
  const id = await app.send({
    to: 'large@recipient.test',
    attachments: [{ filename: 'large.bin', path: `${base}/large.bin` }],
  });
  await app.untilEvent(id, 'delivered');
  const message = await receivedBy('large@recipient.test');
  assert.ok(message.attachments[0]?.content.equals(large));
});

test('a server that is busy is asked again', async () => {
  const id = await app.send({
    to: 'flaky@recipient.test',
    attachments: [{ filename: 'f.txt', path: `${base}/flaky` }],
  });
  const { events } = await until(
    () => timelineOf(id),
    (timeline) => timeline.events.some(({ type }) => type === 'attachment_fetch_failed'),
  );
  const fact = events.find(({ type }) => type === 'attachment_fetch_failed');
  assert.is(fact?.detail['attempt'], 1);
  assert.match(String(fact?.detail['message']), /f\.txt.*files\.test.*503/);
  await retryNow(id);
  await app.untilEvent(id, 'delivered');
});

test('four failed tries are enough', async () => {
  const id = await app.send({
    attachments: [{ filename: 'b.txt', path: `${base}/broken` }],
  });
  for (let tries = 1; tries <= 3; tries += 1) {
    await until(
      () => timelineOf(id),
      ({ events }) =>
        events.filter(({ type }) => type === 'attachment_fetch_failed').length === tries,
    );
    await retryNow(id);
  }
  const email = await app.untilEvent(id, 'failed');
  assert.is(hits['/broken'], 4);
  const error = email['provider_last_error'] as { code: string; message: string };
  assert.is(error.code, 'attachment_unavailable');
  assert.match(error.message, /b\.txt.*files\.test.*500/);
});

for (const [name, path, code, words] of [
  ['a missing file', '/missing?token=secret', 'attachment_unavailable', /m\.txt.*files\.test.*404/],
  ['too many bytes', '/too-large', 'attachment_unavailable', /40 MB/],
  ['a redirect inside', '/inside', 'attachment_refused', /not a public address/],
] as const) {
  test(`${name} fails at once`, async () => {
    const id = await app.send({ attachments: [{ filename: 'm.txt', path: `${base}${path}` }] });
    await app.untilEvent(id, 'failed');
    const { recipients, events } = await timelineOf(id);
    assert.is(recipients[0]?.state, 'failed');
    assert.is(recipients[0]?.last_code, code);
    assert.match(recipients[0]?.last_reply ?? '', words);
    assert.not.match(recipients[0]?.last_reply ?? '', 'secret');
    assert.ok(events.some(({ type, detail }) => type === 'failed' && detail['code'] === code));
  });
}

test('a name that leads inside fails at once, without a packet', async () => {
  const urls = [
    [`http://inside.test:${trapPort}/`, 'attachment_unavailable'],
    [`http://127.0.0.3:${trapPort}/`, 'attachment_refused'],
    ['http://169.254.169.254/latest/meta-data/', 'attachment_refused'],
  ] as const;
  for (const [path, code] of urls) {
    const id = await app.send({ attachments: [{ filename: 'm.txt', path }] });
    const email = await app.untilEvent(id, 'failed');
    const error = email['provider_last_error'] as { code: string; message: string };
    assert.is(error.code, code, path);
    assert.match(error.message, 'MAILSTEAD_PRIVATE_HOSTS');
  }
  assert.is(knocks, 0);
});

test('what no fetch could ever follow is refused at the door', async () => {
  for (const path of [
    'http://localhost/x',
    'http://0x7f.1/x',
    'file:///etc/passwd',
    'http://u@a.test/',
  ]) {
    const { status, body } = await app.call('POST', '/emails', {
      body: {
        from: 'ada@mailstead.test',
        to: 'b@recipient.test',
        subject: 's',
        text: 't',
        attachments: [{ filename: 'x.txt', path }],
      },
    });
    assert.is(status, 422, path);
    assert.match(JSON.stringify(body), 'attachments.0.path');
  }
});

test('a lease that nobody holds any more is taken again', async () => {
  hits['/flaky'] = 0;
  const id = await app.send({ attachments: [{ filename: 'f.txt', path: `${base}/flaky` }] });
  await until(
    () => timelineOf(id),
    ({ events }) => events.some(({ type }) => type === 'attachment_fetch_failed'),
  );
  const client = new Client({ connectionString: app.databaseUrl });
  await client.connect();
  // As a process leaves it that was killed while it fetched.
  await client.query(
    `update attachment_fetch set attempts = attempts + 1, due_at = now() - interval '1 second',
      leased_until = now() - interval '1 second' where email_id = $1`,
    [id],
  );
  await client.end();
  await app.untilEvent(id, 'delivered');
});

test('nothing is left: no staged blob, no fetch, no complaint', async () => {
  const client = new Client({ connectionString: app.databaseUrl });
  await client.connect();
  const { rows } = await client.query(
    `select (select count(*)::int from attachment_fetch) as fetches,
      (select count(*)::int from attachment where blob_key is not null) as staged`,
  );
  await client.end();
  assert.equal(rows, [{ fetches: 0, staged: 0 }]);
  assert.equal(
    app.complaints.filter((line) => line.includes('error')),
    [],
  );
});

test.run();
