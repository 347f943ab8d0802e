// Where an endpoint may lead, when it is given and at every call. 127.0.0.2 plays the public internet here; 127.0.0.1 is
// inside, and nobody may be led there.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { until } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { HOSTILE_URLS } from '../support/hostile-urls.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';
import {
  startReceiver,
  startTeller,
  type Receiver,
  type Teller,
  type TellerOptions,
} from '../support/webhooks.ts';

const PUBLIC = '127.0.0.2';
const test = suite('webhook guard');
let bench: Bench;
let dns: DnsServer;
let production: Teller;
let outside: Receiver;
let inside: Receiver;
test.before(async () => {
  bench = await openQueue();
  dns = await startDns({
    'good.test': { A: [PUBLIC], ttlSeconds: 0 },
    'inside.test': { A: ['127.0.0.1'] },
    'mixed.test': { A: [PUBLIC, '127.0.0.1'] },
    'metadata.test': { A: ['169.254.169.254'] },
    'broken.test': 'SERVFAIL',
  });
  production = start({ allow: [`${PUBLIC}/32`], isDevelopment: false });
  outside = await startReceiver(
    ({ number }) =>
      (response) =>
        response
          .writeHead(number === 1 ? 200 : 302, { location: `http://127.0.0.1:${inside.port}/hook` })
          .end(),
    PUBLIC,
  );
  inside = await startReceiver();
});
test.after(async () => {
  await production.stop();
  await outside.stop();
  await inside.stop();
  await dns.stop();
  await bench.stop();
});

const start = (about: Pick<TellerOptions, 'allow' | 'isDevelopment'>): Teller =>
  startTeller({
    ...about,
    store: bench.store,
    log: silent,
    servers: [dns.server],
    callMaxMs: 3_000,
  });

/** Null where it was taken. */
async function refusal(teller: Teller, endpoint: string): Promise<string | null> {
  try {
    await teller.verbs.create(bench.tenantId, { endpoint, events: ['topic.created'] });
    return null;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    assert.is(error.status, 422);
    assert.equal(
      error.issues.map(({ path }) => path),
      ['endpoint'],
    );
    return error.message;
  }
}

test('what leads inside is refused when it is given, like what does not exist', async () => {
  // The name of this one is fine; only its fragment looks odd.
  const hostile = HOSTILE_URLS.filter((url) => !url.startsWith('http://good.test#'));
  assert.ok(hostile.length > 40);
  for (const url of [
    ...hostile,
    'http://169.254.169.254/latest/meta-data',
    'http://localhost:3000/',
    'http://user:password@good.test/',
    'ftp://good.test/',
    `http://good.test/${'x'.repeat(2_048)}`,
  ]) {
    assert.type(await refusal(production, url.replaceAll('PORT', '8080')), 'string', url);
  }
  const hosts = ['inside.test', 'mixed.test', 'metadata.test', 'no-such.test'];
  const said = new Set<string>();
  for (const host of hosts) {
    said.add(String(await refusal(production, `http://${host}/`)).replaceAll(host, 'HOST'));
  }
  assert.is(said.size, 1, [...said].join('\n'));
  assert.match([...said][0]!, /does not exist or has no public address/);
  // Nothing is known of a name that the DNS is silent about.
  assert.is(await refusal(production, 'https://broken.test/'), null);
  assert.is(await refusal(production, `http://good.test:${outside.port}/hook`), null);
});

test('in development loopback may be called, and a host may come later', async () => {
  // One at a time: each would take the events of the other.
  await production.stop();
  const development = start({ allow: ['127.0.0.0/8', '::1/128'], isDevelopment: true });
  for (const url of [
    `http://localhost:${inside.port}/`,
    `http://app.localhost:${inside.port}/`,
    inside.url,
    'http://[::1]:3000/',
    'https://not-yet.test/',
  ]) {
    assert.is(await refusal(development, url), null, url);
  }
  for (const url of ['http://metadata.test/', 'http://10.0.0.1/', 'http://169.254.169.254/']) {
    assert.type(await refusal(development, url), 'string', url);
  }
  const { id } = await development.verbs.create(bench.tenantId, {
    endpoint: `http://localhost:${inside.port}/named`,
    events: ['topic.deleted'],
  });
  await development.happen(bench.tenantId, 1, { type: 'topic.deleted' });
  await development.tell();
  await until(
    async () => inside.calls.length,
    (count) => count === 1,
  );
  assert.is(inside.calls.splice(0)[0]!.path, '/named');
  await development.verbs.remove(bench.tenantId, id);
  await development.stop();
  production = start({ allow: [`${PUBLIC}/32`], isDevelopment: false });
});

test('at every call the name is judged anew, and redirects are not followed', async () => {
  const { id: webhookId } = await production.verbs.create(bench.tenantId, {
    endpoint: `http://good.test:${outside.port}/hook`,
    events: ['topic.updated'],
  });
  const tell = async () => {
    const [eventId = ''] = await production.happen(bench.tenantId, 1, { type: 'topic.updated' });
    await production.tell();
    const { items } = await until(
      async () =>
        (await production.verbs.events.attempts(
          bench.tenantId,
          { webhookId, eventId },
          { limit: 1, after: undefined },
        ))!,
      ({ items }) => items.length > 0,
    );
    return items[0]!;
  };
  assert.is((await tell()).httpStatus, 200);
  const redirected = await tell();
  assert.is(redirected.httpStatus, 302);
  // The name leads inside from now on; connections that were kept are to a public address and no other.
  await outside.stop();
  (dns.zones as Record<string, unknown>)['good.test'] = { A: ['127.0.0.1'], ttlSeconds: 0 };
  const rebound = await tell();
  assert.is(rebound.httpStatus, null);
  assert.match(
    String(rebound.error),
    /does not exist or has no public address/,
    JSON.stringify(rebound),
  );
  assert.not.match(String(rebound.error), /127\.0\.0/);
  assert.equal(inside.calls, [], 'nobody was led inside');
});

test.run();
