// Tracking from the setting of a domain to what is told of a reader: links and the pixel as they arrive in the sink, what
// asking for them does, and what nobody can make them do.
import { once } from 'node:events';
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { simpleParser, type ParsedMail } from 'mailparser';
import express from 'express';
import { createTransport } from 'nodemailer';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createRateLimiter } from '../../src/access/rate-limit.ts';
import { addTracking } from '../../src/http/tracking.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertRefused } from './envelope.ts';

const PERSON = 'Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0';
const test = suite('tracking');
let app: App;
let dns: DnsServer;
let files: Server;
let domainId: string;

interface Fact {
  readonly type: string;
  readonly detail: Record<string, unknown>;
}

test.before(async () => {
  files = createServer((_request, response) => response.end('a file'));
  files.listen(0, '127.0.0.2');
  await once(files, 'listening');
  dns = await startDns({ 'files.test': { A: ['127.0.0.2'] } });
  app = await startApp({
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.2/32',
  });
  const { body } = await app.call<{ data: { id: string; name: string }[] }>('GET', '/domains');
  domainId = body.data.find(({ name }) => name === 'mailstead.test')!.id;
  await setTracking(true);
});
test.after(async () => {
  await app.stop();
  await dns.stop();
  files.close();
});

async function setTracking(isOn: boolean): Promise<void> {
  const { status } = await app.call('PATCH', `/domains/${domainId}`, {
    body: { open_tracking: isOn, click_tracking: isOn },
  });
  assert.is(status, 200);
}

/** The message as it arrived. */
async function arrived(id: string): Promise<ParsedMail> {
  await app.untilEvent(id, 'delivered', 'opened', 'clicked');
  const raw = await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ raw: Buffer }>(
      'select raw from sink_message where position($1::bytea in raw) > 0',
      [Buffer.from(`<${id}@`)],
    );
    return rows[0]!.raw;
  });
  return simpleParser(raw, { skipImageLinks: true });
}

const htmlOf = (mail: ParsedMail): string => mail.html || '';
/** Paths of what is tracked in it. */
const clicksIn = (html: string): string[] =>
  [...html.matchAll(/href="http:\/\/localhost:\d+(\/c\/[^"]+)"/g)].map(([, path]) => path!);
const pixelIn = (html: string): string =>
  /<img src="http:\/\/localhost:\d+(\/o\/[^"]+\.gif)"/.exec(html)?.[1] ?? '';

const ask = (
  path: string,
  headers: Record<string, string> = {},
  method = 'GET',
): Promise<Response> =>
  fetch(app.base + path, {
    method,
    redirect: 'manual',
    headers: { 'user-agent': PERSON, ...headers },
  });

async function factsOf(id: string, type: string): Promise<Fact[]> {
  const { body } = await app.call<{ events: Fact[] }>('GET', `/emails/${id}/timeline`);
  return body.events.filter((event) => event.type === type);
}
const untilFacts = (id: string, type: string, count: number): Promise<Fact[]> =>
  until(
    () => factsOf(id, type),
    (facts) => facts.length >= count,
  );

const HTML =
  '<html><body><p>Read <a class="b" href="https://x.example/read?a=1&amp;b=2#c">this</a>, ' +
  '<a href="https://y.example">that</a> or <a href="mailto:me@x.example">write</a></p></body></html>';

async function assertFound(id: string, status: string): Promise<void> {
  const { body } = await app.call<{ data: { id: string; last_event: string }[] }>(
    'GET',
    `/emails?status=${status}`,
  );
  assert.ok(body.data.some((email) => email.id === id));
  assert.ok(body.data.every((email) => email.last_event === status));
}

async function sendTracked(email: Record<string, unknown> = {}) {
  const id = await app.send({ html: HTML, text: null, ...email });
  const html = htmlOf(await arrived(id));
  const clicks = clicksIn(html);
  return { id, html, clicks, pixel: pixelIn(html) };
}

const begins: (() => void)[] = [];

/** Begins with the first of them, since most of its time is waiting: they share the app, and no email. */
function testTogether(name: string, work: () => Promise<void>): void {
  let running: Promise<void> | undefined;
  begins.push(() => {
    running ??= work();
    running.catch(() => undefined); // its own test says so
  });
  test(name, async () => {
    for (const begin of begins) begin();
    await running;
  });
}

testTogether('the message is tracked, what the API shows is as it was submitted', async () => {
  const id = await app.send({ html: HTML, text: undefined });
  const mail = await arrived(id);
  const html = htmlOf(mail);
  assert.is(clicksIn(html).length, 2);
  assert.match(html, /<a class="b" href="http:\/\/localhost:\d+\/c\/[\w-]+">this<\/a>/);
  assert.match(html, /<a href="mailto:me@x.example">.*<img [^>]*><\/body><\/html>/);
  assert.match(mail.text ?? '', /https:\/\/x\.example\/read\?a=1&b=2#c/);
  assert.not.match(mail.text ?? '', /localhost/);
  const { body } = await app.call('GET', `/emails/${id}`);
  assert.is(body['html'], HTML);
  const [accepted] = await factsOf(id, 'accepted');
  assert.equal(accepted?.detail['tracking'], { opens: true, links: 2 });
});

testTogether('the pixel: opened is shown, told, and found', async () => {
  const { id, pixel } = await sendTracked();
  const answer = await ask(pixel, {
    host: 'links.anything.example',
    'x-forwarded-for': '192.0.2.7',
  });
  assert.is(answer.status, 200);
  assert.is(answer.headers.get('content-type'), 'image/gif');
  assert.match(answer.headers.get('cache-control') ?? '', /no-store/);
  assert.is(answer.headers.get('cross-origin-resource-policy'), 'cross-origin');
  assert.is(answer.headers.get('referrer-policy'), 'no-referrer');
  assert.is(answer.headers.get('x-robots-tag'), 'noindex, nofollow');
  assert.is(answer.headers.get('ratelimit-limit'), null);
  const gif = Buffer.from(await answer.arrayBuffer());
  assert.equal(
    [gif.toString('latin1', 0, 6), gif.readUInt16LE(6), gif.readUInt16LE(8)],
    ['GIF89a', 1, 1],
  );
  await app.untilEvent(id, 'opened');
  const [opened] = await untilFacts(id, 'opened', 1);
  assert.equal(opened?.detail, { ip_address: '192.0.2.7', user_agent: PERSON });
  await assertFound(id, 'opened');
});

testTogether('a click: redirected at once, shown over opened, found', async () => {
  const { id, clicks, pixel } = await sendTracked();
  assert.is((await ask(pixel)).status, 200);
  const answer = await ask(clicks[0]!);
  assert.equal(
    [answer.status, answer.headers.get('location'), await answer.text()],
    [302, 'https://x.example/read?a=1&b=2#c', ''],
  );
  assert.is(answer.headers.get('referrer-policy'), 'no-referrer');
  assert.match(answer.headers.get('content-security-policy') ?? '', /default-src 'none'/);
  assert.is((await ask(clicks[1]!)).headers.get('location'), 'https://y.example/');
  await app.untilEvent(id, 'clicked');
  const facts = await untilFacts(id, 'clicked', 2);
  assert.equal(
    facts.map(({ detail }) => detail['link']),
    ['https://x.example/read?a=1&b=2#c', 'https://y.example'],
  );
  assert.is((await ask(pixel)).status, 200);
  await assertFound(id, 'clicked');
});

testTogether(
  'machines are redirected, noted as such, and change nothing that is shown',
  async () => {
    const { id, clicks, pixel } = await sendTracked();
    const [link = ''] = clicks;
    for (const [headers, method] of [
      [{}, 'HEAD'],
      [{ 'sec-purpose': 'prefetch;prerender' }, 'GET'],
      [{ 'user-agent': 'Mozilla/5.0 (compatible; Somebot/1.0; +http://bot.example)' }, 'GET'],
    ] as const) {
      assert.is(
        (await ask(link, headers, method)).headers.get('location'),
        'https://x.example/read?a=1&b=2#c',
      );
      assert.is((await ask(pixel, headers, method)).status, 200);
    }
    const clicked = await untilFacts(id, 'clicked', 3);
    assert.equal(
      clicked.map(({ detail }) => detail['suspect']),
      ['head', 'prefetch', 'scanner'],
    );
    await untilFacts(id, 'opened', 3);
    const { body } = await app.call('GET', `/emails/${id}`);
    assert.is(body['last_event'], 'delivered');
    // Gmail loads it when its reader opens the mail.
    await ask(pixel, {
      'user-agent':
        'Mozilla/5.0 (Windows NT 5.1; rv:11.0) Gecko Firefox/11.0 (via ggpht.com GoogleImageProxy)',
    });
    await app.untilEvent(id, 'opened');
    assert.is((await factsOf(id, 'opened')).at(-1)?.detail['suspect'], 'proxy');
  },
);

testTogether('a scanner that follows every link is found out by its pace', async () => {
  const html = [1, 2, 3, 4].map((number) => `<a href="https://x.example/${number}">`).join('');
  const { id, clicks } = await sendTracked({ html });
  const answers = await Promise.all(
    clicks.map((path, index) => ask(path, { 'x-forwarded-for': `192.0.2.${index}` })),
  );
  assert.equal(
    answers.map(({ status }) => status),
    [302, 302, 302, 302],
  );
  const facts = await untilFacts(id, 'clicked', 4);
  assert.equal(
    facts.map(({ detail }) => detail['suspect']),
    ['burst', 'burst', 'burst', 'burst'],
  );
  assert.is((await app.call('GET', `/emails/${id}`)).body['last_event'], 'delivered');
});

testTogether('who repeats a link is redirected each time and noted once', async () => {
  const { id, clicks, pixel } = await sendTracked();
  for (let round = 0; round < 10; round++) {
    const answers = await Promise.all(Array.from({ length: 10 }, () => ask(clicks[0]!)));
    assert.ok(answers.every(({ status }) => status === 302));
    await ask(pixel);
  }
  await untilFacts(id, 'clicked', 1);
  const stored = await onDatabase(app, (pool) =>
    pool.query('select kind from engagement where email_id = $1 order by kind', [id]),
  );
  assert.equal(stored.rows, [{ kind: 'clicked' }, { kind: 'opened' }]);
});

test('nobody makes a link of ours lead elsewhere', async () => {
  const { clicks, pixel } = await sendTracked();
  const [link = ''] = clicks;
  const token = link.slice('/c/'.length);
  const open = pixel.slice('/o/'.length, -'.gif'.length);
  const evil = Buffer.from('https://evil.example/').toString('base64url');
  const bytes = Buffer.from(token, 'base64url');
  const elsewhere = Buffer.concat([bytes.subarray(0, 48), Buffer.from('https://evil.example/')]);
  const flipped = Array.from({ length: 64 }, (_, bit) => {
    const copy = Buffer.from(bytes);
    const at = bit % copy.length;
    copy[at] = copy[at]! ^ (1 << (bit % 8));
    return copy.toString('base64url');
  });
  const bad = [
    evil,
    token + evil,
    evil + token,
    elsewhere.toString('base64url'),
    token.slice(0, -1),
    `${token}A`,
    `${token}=`,
    `${token}.gif`,
    token.toUpperCase(),
    open,
    'https:%2F%2Fevil.example',
    '%2F%2Fevil.example',
    '%0d%0alocation:%20https:%2F%2Fevil.example',
    'a'.repeat(9_000),
    '.',
    ...flipped,
  ];
  for (const one of bad) {
    const answer = await app.call('GET', `/c/${one}?url=https://evil.example`, { key: null });
    assertRefused(answer, { status: 404, code: 'not_found' });
    assert.is(answer.headers.get('location'), null);
  }
  for (const one of [token, `${open}A`, open.slice(1), evil]) {
    assertRefused(await app.call('GET', `/o/${one}.gif`, { key: null }), {
      status: 404,
      code: 'not_found',
    });
  }
  assert.is(
    (await ask(`/c/${token}?url=https://evil.example`)).headers.get('location'),
    'https://x.example/read?a=1&b=2#c',
  );
  for (const path of ['/c/', '/c', '/o/', '/o/x', `/api${link}`]) {
    assert.is((await ask(path)).status, 404, path);
  }
  for (const path of [link, pixel]) assert.is((await ask(path, {}, 'POST')).status, 405);
});

test('a person with a broken link gets a page', async () => {
  const answer = await ask('/c/broken', { accept: 'text/html,application/xhtml+xml,*/*;q=0.8' });
  assert.equal(
    [answer.status, answer.headers.get('content-type')],
    [404, 'text/html; charset=utf-8'],
  );
  assert.match(await answer.text(), /<h1>This link is not valid<\/h1>/);
});

test('who guesses is told to wait, and the readers behind his address are not', async () => {
  const { clicks, pixel } = await sendTracked();
  const limiter = createRateLimiter({ requests: 5, windowMs: 3_600_000 });
  const web = express();
  addTracking(web, {
    limiter,
    tracking: {
      open: (token) => pixel === `/o/${token}.gif`,
      click: (token) => (clicks[0] === `/c/${token}` ? 'https://x.example/' : null),
    },
  });
  const server = web.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const base = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const get = async (path: string): Promise<number> =>
    (await fetch(base + path, { redirect: 'manual', headers: { connection: 'close' } })).status;
  const guesses: number[] = [];
  for (const _ of Array.from({ length: 7 })) guesses.push(await get('/c/AAAA'));
  assert.equal(guesses, [404, 404, 404, 404, 404, 429, 429]);
  assert.is(await get('/o/AAAA.gif'), 429);
  for (const _ of Array.from({ length: 20 })) {
    assert.equal([await get(clicks[0]!), await get(pixel)], [302, 200]);
  }
  server.close();
});

testTogether(
  'batch, template, schedule, attachments to fetch: whatever way it is composed',
  async () => {
    const { body: template } = await app.call('POST', '/templates', {
      body: {
        name: 'T',
        subject: 'T',
        html: '<a href="{{{LINK}}}">go</a>',
        variables: [{ key: 'LINK', type: 'string' }],
      },
    });
    await app.call('POST', `/templates/${String(template['id'])}/publish`);
    const { body: batch } = await app.call<{ data: { id: string }[] }>('POST', '/emails/batch', {
      body: [1, 2].map((number) => ({
        from: 'a@mailstead.test',
        to: `b${number}@r.test`,
        subject: 'x',
        html: HTML,
      })),
    });
    const ids = [
      ...batch.data.map(({ id }) => id),
      await app.send({
        text: undefined,
        template: { id: template['id'], variables: { LINK: 'https://x.example/read?a=1&b=2#c' } },
      }),
      await app.send({ html: HTML, scheduled_at: new Date(Date.now() + 1_000).toISOString() }),
      await app.send({
        html: HTML,
        attachments: [
          {
            filename: 'f.txt',
            path: `http://files.test:${(files.address() as AddressInfo).port}/f`,
          },
        ],
      }),
    ];
    for (const id of ids) {
      const html = htmlOf(await arrived(id));
      assert.is(
        (await ask(clicksIn(html)[0]!)).headers.get('location'),
        'https://x.example/read?a=1&b=2#c',
        id,
      );
      assert.is((await ask(pixelIn(html))).status, 200, id);
    }
  },
);

test('what comes by SMTP goes out as it is', async () => {
  const transport = createTransport({
    host: '127.0.0.1',
    port: app.appliance.submissionPort!,
    auth: { user: 'resend', pass: app.key },
    tls: { rejectUnauthorized: false },
  });
  await transport.sendMail({
    from: 'a@mailstead.test',
    to: 'b@recipient.test',
    subject: 'By SMTP',
    html: HTML,
  });
  const { data } = await until(
    async () =>
      (await app.call<{ data: { raw: string }[] }>('GET', '/sink/messages?limit=100')).body,
    (page) => page.data.some(({ raw }) => raw.includes('Subject: By SMTP')),
  );
  const raw = data.find((message) => message.raw.includes('Subject: By SMTP'))!.raw;
  const mail = await simpleParser(Buffer.from(raw), { skipImageLinks: true });
  assert.is(htmlOf(mail).trim(), HTML);
});

test('links outlive the setting, the email and the domain; another tenant learns nothing', async () => {
  const other = await secondTenant(app);
  const { id, clicks, pixel } = await sendTracked();
  const works = async (): Promise<void> => {
    assert.is((await ask(clicks[1]!)).headers.get('location'), 'https://y.example/');
    assert.is((await ask(pixel)).status, 200);
  };
  assert.is((await app.call('GET', `/emails/${id}/timeline`, { key: other.key })).status, 404);
  await setTracking(false);
  const plain = await until(
    async () => htmlOf(await arrived(await app.send({ html: HTML }))),
    (html) => !html.includes('localhost'),
  );
  assert.is(plain.trim(), HTML);
  await works();
  assert.is((await app.call('DELETE', `/domains/${domainId}`)).status, 200);
  await onDatabase(app, (pool) => pool.query('delete from email where id = $1', [id]));
  await works();
  assert.equal(app.complaints, []);
});

test.run();
