// Fetching MTA-STS policies over real HTTPS on loopback: what counts as a policy, what does not, and where it may lead.
import { once } from 'node:events';
import { createServer, type Server } from 'node:https';
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { fetchStsPolicy } from '../../src/dns/mta-sts-fetch.ts';
import type { FetchedSts } from '../../src/dns/mta-sts.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { chainOf, issue } from '../support/certificates.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

const test = suite('mta-sts-fetch');
const POLICY = 'version: STSv1\r\nmode: enforce\r\nmx: mx.a.test\r\nmax_age: 86400\r\n';
const root = issue({ commonName: 'root', isAuthority: true });
const servers: Server[] = [];
let dns: DnsServer;
let resolver: Resolver;
let port: number;
let answer: (request: IncomingMessage, response: ServerResponse) => void;
let requests: { path: string; host: string }[] = [];

const plain = (
  response: ServerResponse,
  status = 200,
  body = POLICY,
  type = 'text/plain',
): void => {
  response.writeHead(status, { 'content-type': type }).end(body);
};

async function serve(pair: { cert: string; key: string }, host: string, at = 0): Promise<number> {
  const server = createServer(pair, (request, response) => {
    requests.push({ path: request.url ?? '', host: request.headers.host ?? '' });
    answer(request, response);
  });
  server.on('tlsClientError', () => undefined);
  servers.push(server);
  server.listen(at, host);
  await once(server, 'listening');
  return (server.address() as AddressInfo).port;
}

test.before(async () => {
  dns = await startDns({
    'mta-sts.a.test': { A: ['127.0.0.1'] },
    'mta-sts.wild.test': { A: ['127.0.0.2'] },
    'mta-sts.old.test': { A: ['127.0.0.3'] },
    'mta-sts.self.test': { A: ['127.0.0.4'] },
    'mta-sts.cn.test': { A: ['127.0.0.5'] },
    'mta-sts.wrong.test': { A: ['127.0.0.1'] },
    'mta-sts.inside.test': { A: ['10.0.0.1'] },
    'mta-sts.mixed.test': { A: ['127.0.0.1', '10.0.0.1'] },
    'mta-sts.second.test': { A: ['127.0.0.9', '127.0.0.6'] },
    'mta-sts.dead.test': { A: ['127.0.0.9'] },
    'mta-sts.alias.test': { CNAME: 'host.elsewhere.test' },
    'host.elsewhere.test': { A: ['127.0.0.7'] },
  });
  resolver = createResolver({ servers: [dns.server] });
  const of = (names: readonly string[], more: Parameters<typeof issue>[0] = {}) =>
    chainOf(issue({ names, issuer: root, ...more }));
  port = await serve(of(['mta-sts.a.test', 'mta-sts.mixed.test']), '127.0.0.1');
  await serve(of(['*.wild.test']), '127.0.0.2', port);
  await serve(of(['mta-sts.old.test'], { from: -9, to: -1 }), '127.0.0.3', port);
  await serve(of(['mta-sts.self.test'], { issuer: null }), '127.0.0.4', port);
  await serve(of([], { commonName: 'mta-sts.cn.test' }), '127.0.0.5', port);
  await serve(of(['mta-sts.second.test']), '127.0.0.6', port);
  await serve(of(['mta-sts.alias.test']), '127.0.0.7', port);
});
test.after(async () => {
  resolver.close();
  await dns.stop();
  for (const server of servers) {
    server.closeAllConnections();
    server.close();
    await once(server, 'close');
  }
});
test.before.each(() => {
  requests = [];
  answer = (_request, response) => plain(response);
});

const fetch = (domain: string, timeoutMs?: number): Promise<FetchedSts> =>
  fetchStsPolicy(
    {
      resolver,
      guard: createAddressGuard({ allow: ['127.0.0.0/8'] }),
      authorities: [root.cert],
      port,
      ...(timeoutMs === undefined ? {} : { timeoutMs }),
    },
    domain,
  );
const failure = async (domain: string, timeoutMs?: number): Promise<string> => {
  const got = await fetch(domain, timeoutMs);
  return got.kind === 'policy' ? 'a policy' : `${got.failure}: ${got.reason}`;
};

test('the well-known file of the policy host, by its name', async () => {
  const got = await fetch('a.test');
  assert.equal(got, {
    kind: 'policy',
    policy: { mode: 'enforce', mx: ['mx.a.test'], maxAgeSeconds: 86_400, raw: POLICY },
  });
  assert.equal(requests, [{ path: '/.well-known/mta-sts.txt', host: 'mta-sts.a.test' }]);
  assert.is((await fetch('wild.test')).kind, 'policy');
  assert.is((await fetch('second.test')).kind, 'policy', 'the second address');
  assert.is((await fetch('alias.test')).kind, 'policy', 'a hosted policy');
});

test('the certificate must be valid for the name', async () => {
  for (const domain of ['old.test', 'self.test', 'cn.test', 'wrong.test']) {
    assert.match(await failure(domain), /^sts-webpki-invalid: https:\/\/mta-sts\./, domain);
  }
  assert.equal(requests, []);
});

test('only 200 counts, and no redirect is followed', async () => {
  for (const status of [201, 204, 206, 301, 302, 307, 404, 500]) {
    answer = (_request, response) => {
      response
        .writeHead(status, {
          location: `https://mta-sts.wild.test:${port}/.well-known/mta-sts.txt`,
          'content-type': 'text/plain',
        })
        .end(status === 204 ? undefined : POLICY);
    };
    assert.match(await failure('a.test'), new RegExp(`fetch-error: .*status ${status}`));
  }
  assert.is(requests.length, 8);
});

test('text/plain, with any parameter, and nothing else', async () => {
  for (const type of ['text/plain', 'text/plain; charset=utf-8', 'TEXT/PLAIN ;x=y']) {
    answer = (_request, response) => plain(response, 200, POLICY, type);
    assert.is((await fetch('a.test')).kind, 'policy', type);
  }
  for (const type of ['text/html', 'application/octet-stream', '']) {
    answer = (_request, response) => plain(response, 200, POLICY, type);
    assert.match(await failure('a.test'), /not of type text\/plain/, type);
  }
  answer = (_request, response) =>
    void response
      .writeHead(200, { 'content-type': 'text/plain', 'content-encoding': 'gzip' })
      .end('x');
  assert.match(await failure('a.test'), /compressed/);
});

test('a file that is no policy', async () => {
  answer = (_request, response) => plain(response, 200, 'hello');
  assert.match(await failure('a.test'), /^sts-policy-invalid: .*version/);
});

test('64 KiB and no more', async () => {
  const full = POLICY.padEnd(64 * 1024, 'x');
  answer = (_request, response) => plain(response, 200, full);
  assert.is((await fetch('a.test')).kind, 'policy');
  let written = 0;
  answer = (_request, response) => {
    response.writeHead(200, { 'content-type': 'text/plain' });
    const more = (): void => {
      written += 16_384;
      if (!response.destroyed && written < 1e8) response.write('x'.repeat(16_384), more);
    };
    more();
  };
  assert.match(await failure('a.test'), /more than 65536 bytes/);
  assert.ok(written < 1e8);
});

test('a server that breaks off, drips, or says nothing', async () => {
  answer = (_request, response) => {
    response.writeHead(200, { 'content-type': 'text/plain', 'content-length': '1000' });
    response.write(POLICY, () => response.destroy());
  };
  assert.match(await failure('a.test'), /^sts-policy-fetch-error/);
  answer = (_request, response) => {
    response.writeHead(200, { 'content-type': 'text/plain' });
    const timer = setInterval(() => response.write('x'), 20);
    response.on('close', () => clearInterval(timer));
  };
  assert.match(await failure('a.test', 300), /did not answer in time/);
  answer = () => undefined;
  assert.match(await failure('a.test', 300), /did not answer in time/);
  assert.match(await failure('dead.test'), /ECONNREFUSED/);
  dns.zones['mta-sts.silent.test'] = 'TIMEOUT';
  assert.match(await failure('silent.test', 300), /the DNS gave no answer .* in time/);
});

test('addresses that the guard refuses are not dialled, nor their good neighbours', async () => {
  assert.match(await failure('inside.test'), /may not be dialled/);
  assert.match(await failure('mixed.test'), /may not be dialled/);
  assert.match(await failure('nowhere.test'), /has no address/);
  assert.equal(requests, []);
});

test.run();
