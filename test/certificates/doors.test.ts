// What certificates change of the edges, without an authority: the well-known paths on the ordinary door, the settings of a domain
// and its records, and what happens where submission can never have a certificate.
import { connect } from 'node:net';
import { once } from 'node:events';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseStsPolicy } from '../../src/dns/mta-sts.ts';
import { findHost } from '../../src/dns/records.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { findSts, findTlsReporting } from '../../src/dns/sts-record.ts';
import { openStore } from '../../src/store/orm.ts';
import { startApp, type App } from '../support/app.ts';
import { startDns } from '../support/dns.ts';
import { HOUR_MS, openDomains, publish } from '../support/domains.ts';
import { freePort } from '../support/program.ts';
import { silent } from '../support/queue.ts';

const test = suite('doors and certificates');
let app: App;
let challengePort = 0;
test.before(async () => {
  challengePort = await freePort();
  app = await startApp({}, { tls: { http_challenge_port: challengePort } });
});
test.after(() => app.stop());

async function ask(
  port: number,
  request: string,
): Promise<{ status: number; head: string; body: string }> {
  const socket = connect(port, '127.0.0.1');
  socket.write(`${request}\r\nconnection: close\r\n\r\n`);
  let text = '';
  socket.on('data', (piece: Buffer) => (text += piece.toString()));
  await once(socket, 'close');
  const [head = '', body = ''] = text.split('\r\n\r\n');
  return { status: Number(head.slice(9, 12)), head: head.toLowerCase(), body };
}

test('challenges: on the ordinary door and on their own, before any key is asked for', async () => {
  const token = 'a'.repeat(43);
  const store = await openStore({
    url: app.databaseUrl,
    log: silent,
    connectionsMax: 1,
    migrate: false,
  });
  await store.pool.query(
    `insert into acme_challenge values ($1, 'an answer', now() + interval '1 hour')`,
    [token],
  );
  await store.close();
  for (const port of [app.appliance.httpPort, challengePort]) {
    const path = `/.well-known/acme-challenge/${token}`;
    const found = await ask(port, `GET ${path} HTTP/1.1\r\nhost: any.test`);
    assert.equal([found.status, found.body], [200, 'an answer']);
    assert.match(found.head, /content-type: application\/octet-stream/);
    assert.is((await ask(port, `GET ${path}b HTTP/1.1\r\nhost: any.test`)).status, 404);
    assert.is(
      (await ask(port, `POST ${path} HTTP/1.1\r\nhost: a.test\r\ncontent-length: 0`)).status,
      405,
    );
  }
  // Nothing else is there, and without HTTPS there is nowhere to lead to.
  assert.is((await ask(challengePort, 'GET /emails HTTP/1.1\r\nhost: localhost')).status, 404);
  assert.is(
    (await ask(challengePort, 'GET http://evil.test/ HTTP/1.1\r\nhost: localhost')).status,
    404,
  );
});

test('a policy is served at the host of a verified receiving domain only', async () => {
  const capabilities = { sending: 'enabled', receiving: 'enabled' };
  const made = await app.call('POST', '/domains', {
    body: { name: 'sts.test', mta_sts: 'testing', capabilities },
  });
  assert.is(made.body['mta_sts'], 'testing');
  const policyOf = (host: string) =>
    ask(app.appliance.httpPort, `GET /.well-known/mta-sts.txt HTTP/1.1\r\nhost: ${host}`);
  assert.is((await policyOf('mta-sts.sts.test')).status, 404, 'not verified yet');
  await app.call('POST', `/domains/${String(made.body['id'])}/verify`);
  const found = await policyOf('MTA-STS.sts.test:8443');
  assert.is(found.status, 200);
  assert.match(found.head, /content-type: text\/plain/);
  const policy = parseStsPolicy(found.body);
  assert.ok(typeof policy !== 'string');
  assert.equal([policy.mode, policy.mx, policy.maxAgeSeconds], ['testing', ['localhost'], 86_400]);
  for (const host of ['sts.test', 'mta-sts.other.test', 'x.mta-sts.sts.test', 'mta-sts.']) {
    assert.is((await policyOf(host)).status, 404, host);
  }
  const url = `/domains/${String(made.body['id'])}`;
  const enforced = await app.call('PATCH', url, { body: { mta_sts: 'enforce' } });
  assert.is(enforced.status, 422);
  assert.match(
    JSON.stringify(enforced.body),
    /cannot be 'enforce': the certificate of localhost is self-signed, so senders would keep/,
  );
  const wrong = await app.call('PATCH', url, { body: { mta_sts: 'strict' } });
  assert.is(wrong.status, 422);
  assert.is((await app.call('PATCH', url, { body: { mta_sts: 'off' } })).status, 200);
  assert.is((await policyOf('mta-sts.sts.test')).status, 404);
});

test('records of a policy: advice that is looked for soon, with an id that follows the policy', async () => {
  const d = await openDomains();
  try {
    const named = { name: 'sts.test', capabilities: { receiving: 'enabled' } } as const;
    const made = await d.verbs.create(d.one, named);
    publish(d.dns, made);
    assert.is((await d.verbs.verify(d.one, made.id))?.status, 'verified');
    await d.verbs.update(d.one, made.id, { mta_sts: 'testing' });
    const read = async () => (await d.verbs.find(d.one, made.id))!;
    const advised = async () =>
      (await read()).records.filter(({ record }) => /^(MTA-STS|TLS-RPT)$/.test(record));
    const shown = await advised();
    assert.equal(
      shown.map(({ name, type, value }) => `${name} ${type} ${value.replace(/id=\w+/, 'id=…')}`),
      [
        'mta-sts.sts.test CNAME track.host.test',
        '_mta-sts.sts.test TXT v=STSv1; id=…;',
        '_smtp._tls.sts.test TXT v=TLSRPTv1; rua=mailto:tls-reports@sts.test',
      ],
    );
    assert.is((await read()).status, 'verified');
    await d.verbs.verify(d.one, made.id);
    assert.equal(
      (await advised()).map(({ status }) => status),
      ['pending', 'pending', 'pending'],
    );
    assert.ok(((await d.recheckWhenDue(made.id)) ?? 999) < 61, 'not only tomorrow');
    publish(d.dns, await read());
    await d.recheckWhenDue(made.id);
    assert.equal(
      (await advised()).map(({ status }) => status),
      ['verified', 'verified', 'verified'],
    );
    d.clock.now = new Date(d.clock.now.getTime() + 25 * HOUR_MS);
    d.certificate.fault = 'is self-signed';
    for (const change of [{ mta_sts: 'enforce' }] as const) {
      await d.verbs.update(d.one, made.id, change).then(
        () => assert.unreachable(),
        (error: Error) => assert.match(error.message, /cannot be 'enforce'/),
      );
    }
    d.certificate.fault = null;
    await d.verbs.update(d.one, made.id, { mta_sts: 'enforce' });
    const [host, txt, reports] = await advised();
    assert.equal(
      [host?.status, txt?.status, reports?.status],
      ['verified', 'not_started', 'verified'],
    );
    // The record still has the id of the policy before: it is looked at until it has the new one.
    for (const minutes of [2, 6]) {
      assert.ok(((await d.recheckWhenDue(made.id)) ?? 999) <= minutes);
      assert.is((await advised())[1]?.status, 'failed');
    }
    publish(d.dns, await read());
    await d.recheckWhenDue(made.id);
    assert.is((await advised())[1]?.status, 'verified');
    // A certificate that ends later takes nothing back by itself.
    d.certificate.fault = 'ended';
    await d.verbs.update(d.one, made.id, { mta_sts: 'enforce', inbound_dmarc: 'tag' });
    for (const clash of [{ tracking_subdomain: 'mta-sts' }]) {
      await d.verbs.update(d.one, made.id, clash).then(
        () => assert.unreachable(),
        (error: Error) => assert.match(error.message, /the policy of `mta_sts` is there/),
      );
    }
  } finally {
    await d.stop();
  }
});

test('what is found of them in the DNS', async () => {
  const dns = await startDns({
    'us.test': { A: ['192.0.2.1'], AAAA: ['2001:db8::1'] },
    'same.test': { A: ['192.0.2.1'] },
    'mixed.test': { A: ['192.0.2.1', '192.0.2.2'] },
    'alias.test': { CNAME: 'us.test' },
    '_mta-sts.old.test': { TXT: ['v=STSv1; id=old;'] },
    '_mta-sts.two.test': { TXT: ['v=STSv1; id=a;', 'v=STSv1; id=b;'] },
    '_mta-sts.bad.test': { TXT: ['v=STSv1; id=;'] },
    '_mta-sts.good.test': { TXT: ['other', 'v=STSv1;id=new'] },
    'rpt.test': { TXT: ['v=TLSRPTv1; rua=https://reports.test/'] },
  });
  const resolver = createResolver({ servers: [dns.server], keepsAnswers: false });
  try {
    const kinds = ['same.test', 'alias.test', 'mixed.test', 'none.test'].map(
      async (name) => (await findHost(resolver, { name, target: 'us.test' })).kind,
    );
    assert.equal(await Promise.all(kinds), ['right', 'right', 'wrong', 'absent']);
    const value = 'v=STSv1; id=new;';
    const sts = ['good', 'old', 'two', 'bad', 'none'].map(
      async (one) => (await findSts(resolver, { name: `_mta-sts.${one}.test`, value })).kind,
    );
    assert.equal(await Promise.all(sts), ['right', 'wrong', 'wrong', 'wrong', 'absent']);
    assert.is((await findTlsReporting(resolver, 'rpt.test')).kind, 'right');
    assert.is((await findTlsReporting(resolver, '_mta-sts.good.test')).kind, 'absent');
  } finally {
    resolver.close();
    await dns.stop();
  }
});

test('submission that is asked for and can never have a certificate ends the start', async () => {
  const production = {
    MAILSTEAD_MODE: 'production',
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_PUBLIC_URL: 'http://mail.host.test',
    MAILSTEAD_SECRET: 'a secret of a test that is long enough to be one',
    MAILSTEAD_DELIVERY: 'sink',
  };
  await startApp({ ...production, MAILSTEAD_ROLES: 'api,submission' }).then(
    async (started) => {
      await started.stop();
      assert.unreachable();
    },
    (error: Error) => assert.match(error.message, /needs a certificate: set MAILSTEAD_TLS_CERT/),
  );
});

test.run();
