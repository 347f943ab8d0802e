// Fetching from URLs that a tenant named: what is refused without a packet, what rebinding gains, how redirects,
// sizes, times and certificates end. 127.0.0.2 plays the public internet here; everything else on loopback is a
// trap that counts who knocks.
import { once } from 'node:events';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import {
  createServer as createHttp,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from 'node:http';
import { createServer as createHttps } from 'node:https';
import { createServer as createTcp, type AddressInfo, type Server as TcpServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import type { Fault } from '../../src/dns/guarded-http.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { fetchToFile, type Fetched } from '../../src/sending/fetch.ts';
import { makeSelfSigned } from '../../src/self-signed.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { HOSTILE_URLS } from '../support/hostile-urls.ts';

const PUBLIC = '127.0.0.2';
const test = suite('fetch');
const traps: TcpServer[] = [];
let knocks = 0;
let dns: DnsServer;
let resolver: Resolver;
let web: Server;
let folder: string;
/** The same on every address: traps and web server. */
let port: number;
const requests: { path: string; headers: IncomingMessage['headers'] }[] = [];
/** By path, without its query. */
const pages: Record<string, (request: IncomingMessage, response: ServerResponse) => void> = {
  '/file': (_request, response) => {
    response.setHeader('content-type', 'text/x-file; charset=utf-8').end('the file');
  },
  '/redirect': (request, response) => {
    const to = new URL(request.url ?? '', 'http://x').searchParams.get('to') ?? '';
    response.writeHead(302, { location: to, 'set-cookie': 'a=b' }).end();
  },
  '/hops': (request, response) => {
    const left = Number(new URL(request.url ?? '', 'http://x').searchParams.get('left'));
    response.writeHead(307, { location: left > 1 ? `/hops?left=${left - 1}` : '/file' }).end();
  },
  '/circle': (_request, response) => response.writeHead(301, { location: '/circle#x' }).end(),
  '/nowhere': (_request, response) => response.writeHead(302).end(),
};
const guard = createAddressGuard({ allow: [`${PUBLIC}/32`] });

const listen = async (server: TcpServer | Server, host: string, at = 0): Promise<number> => {
  server.listen(at, host);
  await once(server, 'listening');
  return (server.address() as AddressInfo).port;
};

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-fetch-'));
  web = createHttp((request, response) => {
    const [path = ''] = (request.url ?? '').split('?');
    requests.push({ path: request.url ?? '', headers: request.headers });
    const page = pages[path];
    if (page === undefined) response.writeHead(404).end();
    else page(request, response);
  });
  port = await listen(web, PUBLIC);
  for (const host of ['127.0.0.1', '127.1.2.3', '::1']) {
    const trap = createTcp((socket) => {
      knocks += 1;
      socket.destroy();
    });
    traps.push(trap);
    await listen(trap, host, port);
  }
  dns = await startDns({
    'good.test': { A: [PUBLIC] },
    'other.test': { A: [PUBLIC] },
    'xn--bcher-kva.test': { A: [PUBLIC] },
    'loopback.test': { A: ['127.0.0.1'] },
    'loopback6.test': { AAAA: ['::1'] },
    'mapped.test': { AAAA: ['::ffff:127.0.0.1'] },
    'mixed.test': { A: [PUBLIC, '127.0.0.1'] },
    'mixed6.test': { A: [PUBLIC], AAAA: ['::1'] },
    'alias.test': { CNAME: 'loopback.test' },
    'metadata.test': { A: ['169.254.169.254'] },
    'ula.test': { AAAA: ['fd00::1'] },
    'nat64.test': { AAAA: ['64:ff9b::7f00:1'] },
    'zero.test': { A: ['0.0.0.0'] },
    'xn--lcalhost-v3a.test': { A: ['127.0.0.1'] },
    'broken.test': 'SERVFAIL',
    'empty.test': { TXT: ['nothing else'] },
    'silent.test': 'TIMEOUT',
  });
  resolver = createResolver({ servers: [dns.server] });
});
test.after(async () => {
  resolver.close();
  web.closeAllConnections();
  for (const server of [web, ...traps]) await new Promise((resolve) => server.close(resolve));
  await dns.stop();
  await rm(folder, { recursive: true });
});

let number = 0;
async function get(
  url: string,
  about: Partial<{
    bytesMax: number;
    signal: AbortSignal;
    resolver: Parameters<typeof fetchToFile>[0]['resolver'];
    authorities: readonly string[];
  }> = {},
): Promise<(Fetched | Fault) & { readonly text?: string; readonly left: number }> {
  const path = join(folder, String(number++));
  const budget = { left: about.bytesMax ?? 1_000_000 };
  const { authorities } = about;
  const got = await fetchToFile(
    {
      resolver: about.resolver ?? resolver,
      guard,
      ...(authorities === undefined ? {} : { authorities }),
    },
    { url, path, budget, signal: about.signal ?? new AbortController().signal },
  );
  if (got.kind !== 'fetched') return { ...got, left: budget.left };
  return { ...got, text: await readFile(path, 'latin1'), left: budget.left };
}

/** By what it says, or because its name leads inside, which looks as if there were no such name. */
const isRefused = (got: Fetched | Fault): boolean =>
  got.kind === 'refused' || (got.kind === 'permanent' && /no public address/.test(got.reason));

test('a name that leads inside cannot be told from one that does not exist', async () => {
  const hosts = ['no-such.test', 'empty.test', 'loopback.test', 'loopback6.test', 'mixed.test'];
  const faults = new Set<string>();
  for (const host of [...hosts, 'alias.test', 'metadata.test', 'ula.test']) {
    for (const url of [
      `http://${host}:${port}/`,
      `http://good.test:${port}/redirect?to=${encodeURIComponent(`http://${host}:${port}/`)}`,
    ]) {
      faults.add(JSON.stringify(await get(url)).replaceAll(host, 'HOST'));
    }
  }
  assert.is(faults.size, 1, [...faults].join('\n'));
  assert.match([...faults][0]!, /"kind":"permanent".*does not exist or has no public address/);
  assert.is((await get(`http://127.0.0.1:${port}/`)).kind, 'refused', 'an address is no secret');
});

test('no hostile URL makes a packet leave', async () => {
  requests.length = 0;
  assert.ok(HOSTILE_URLS.length >= 40);
  for (const url of HOSTILE_URLS) {
    const written = url.replaceAll('PORT', String(port));
    const got = await get(written);
    // The name is fine here; only its fragment looks odd. Nobody listens at port 80 of 127.0.0.2.
    if (url.startsWith('http://good.test#')) {
      assert.is(got.kind, 'transient', url);
      continue;
    }
    assert.ok(isRefused(got), `${url}: ${JSON.stringify(got)}`);
    const { reason } = got as Fault;
    // What the DNS said stays here.
    if (/^https?:\/\/[^/]*\.test/.test(url)) assert.not.match(reason, /\d\.\d+\.\d|::/);
    assert.ok(reason.length > 20, reason);
  }
  assert.is(knocks, 0);
  assert.equal(requests, []);
});

test('no redirect leads where the URL itself may not', async () => {
  let tried = 0;
  for (const url of HOSTILE_URLS) {
    const to = url.replaceAll('PORT', String(port));
    // What is no URL by itself leads to the same server, which is fine.
    if (!/^[a-z]+:|^\/\//.test(to) || to.includes('good.test') || !URL.canParse(to, 'http://x')) {
      continue;
    }
    // oxlint-disable-next-line no-control-regex
    if (/[^\u0021-\u00ff]/.test(to) || /^http:(?!\/\/)|^http:\/\/unix:/.test(to)) continue;
    tried += 1;
    const got = await get(`http://good.test:${port}/redirect?to=${encodeURIComponent(to)}`);
    assert.ok(isRefused(got), `${url}: ${JSON.stringify(got)}`);
  }
  assert.ok(tried > 40, `${tried} were tried`);
  assert.is(knocks, 0);
});

test('the second answer of the DNS is never used', async () => {
  let asked = 0;
  const rebinding: Pick<Resolver, 'a' | 'aaaa' | 'cname'> = {
    a(name) {
      asked += 1;
      const records = [asked === 1 ? PUBLIC : '127.0.0.1'];
      return name === 'rebind.test'
        ? Promise.resolve({ kind: 'found', records })
        : Promise.resolve({ kind: 'no_name' });
    },
    aaaa: () => Promise.resolve({ kind: 'no_data' }),
    cname: () => Promise.resolve({ kind: 'no_data' }),
  };
  const url = `http://rebind.test:${port}`;
  const got = await get(`${url}/file`, { resolver: rebinding });
  assert.is(got.text, 'the file');
  assert.is(asked, 1);
  // The next hop asks again, and that answer is judged as well.
  asked = 0;
  const hop = await get(`${url}/redirect?to=${encodeURIComponent('/file')}`, {
    resolver: rebinding,
  });
  assert.ok(isRefused(hop));
  assert.is(asked, 2);
  assert.is(knocks, 0);
});

test('the DNS is asked once, over the wire too', async () => {
  dns.questions.length = 0;
  const fresh = createResolver({ servers: [dns.server] });
  dns.zones['once.test'] = { A: [PUBLIC], ttlSeconds: 0 };
  assert.is((await get(`http://once.test:${port}/file`, { resolver: fresh })).text, 'the file');
  fresh.close();
  const asked = dns.questions.filter(({ name }) => name === 'once.test').map(({ type }) => type);
  assert.equal(asked.toSorted(), ['A', 'AAAA']);
});

test('what is asked, and what is given back', async () => {
  requests.length = 0;
  const got = await get(`http://Good.TEST:${port}/file?a=%20b&c=d#fragment`);
  assert.equal(got, {
    kind: 'fetched',
    sizeBytes: 8,
    contentType: 'text/x-file; charset=utf-8',
    text: 'the file',
    left: 1_000_000 - 8,
  });
  const [request] = requests;
  assert.is(request?.path, '/file?a=%20b&c=d');
  assert.equal(Object.keys(request?.headers ?? {}).toSorted(), [
    'accept',
    'accept-encoding',
    'connection',
    'host',
    'user-agent',
  ]);
  assert.is(request?.headers.host, `good.test:${port}`);
  assert.is(request?.headers['accept-encoding'], 'identity');
});

test('a plainly written address and an internationalized name are fine', async () => {
  assert.is((await get(`http://${PUBLIC}:${port}/file`)).text, 'the file');
  assert.is((await get(`http://bücher.test:${port}/file`)).text, 'the file');
  assert.is((await get(`http://xn--bcher-kva.test:${port}/file`)).text, 'the file');
});

test('five redirects are followed, a sixth is not; cookies stay behind', async () => {
  requests.length = 0;
  const base = `http://good.test:${port}`;
  assert.is((await get(`${base}/hops?left=5`)).text, 'the file');
  assert.is((await get(`${base}/hops?left=6`)).kind, 'permanent');
  const other = encodeURIComponent(`http://other.test:${port}/file`);
  requests.length = 0;
  assert.is((await get(`${base}/redirect?to=${other}`)).text, 'the file');
  assert.equal(
    requests.map(({ headers }) => [headers.host, headers.cookie, headers.referer]),
    [
      [`good.test:${port}`, undefined, undefined],
      [`other.test:${port}`, undefined, undefined],
    ],
  );
  for (const path of ['/circle', '/nowhere']) {
    assert.is((await get(`${base}${path}`)).kind, 'permanent', path);
  }
});

for (const [status, kind] of [
  [400, 'permanent'],
  [401, 'permanent'],
  [403, 'permanent'],
  [404, 'permanent'],
  [410, 'permanent'],
  [204, 'permanent'],
  [206, 'permanent'],
  [304, 'permanent'],
  [408, 'transient'],
  [429, 'transient'],
  [500, 'transient'],
  [503, 'transient'],
] as const) {
  test(`status ${status} is ${kind}`, async () => {
    pages['/status'] = (_request, response) => response.writeHead(status).end();
    const got = await get(`http://good.test:${port}/status`);
    assert.is(got.kind, kind);
    assert.match((got as Fault).reason, String(status));
  });
}

test('too many bytes: seen in the announcement, or when they come', async () => {
  let sent = 0;
  pages['/announced'] = (_request, response) => {
    response.writeHead(200, { 'content-length': '1001' });
    response.flushHeaders();
  };
  pages['/endless'] = (request, response) => {
    const more = (): void => {
      while (!request.destroyed && response.write(Buffer.alloc(1_000))) sent += 1_000;
    };
    response.on('drain', more);
    more();
  };
  for (const path of ['/announced', '/endless']) {
    const got = await get(`http://good.test:${port}${path}`, { bytesMax: 1_000 });
    assert.is(got.kind, 'permanent', path);
    assert.match((got as Fault).reason, '40 MB');
  }
  assert.ok(sent > 0);
  const got = await get(`http://good.test:${port}/file`, { bytesMax: 8 });
  assert.is(got.text, 'the file');
  assert.is(got.left, 0);
});

test('nothing is unpacked', async () => {
  pages['/bomb'] = (_request, response) => {
    response.writeHead(200, { 'content-encoding': 'gzip' }).end(gzipSync(Buffer.alloc(10_000_000)));
  };
  const got = await get(`http://good.test:${port}/bomb`);
  assert.is(got.kind, 'permanent');
  assert.match((got as Fault).reason, 'compressed');
  // A file that is an archive is just a file.
  const archive = gzipSync('x');
  pages['/archive'] = (_request, response) => response.end(archive);
  assert.is((await get(`http://good.test:${port}/archive`)).text, archive.toString('latin1'));
});

test('who drips, hangs or hides in the DNS is ended by the signal', async () => {
  pages['/drip'] = (request, response) => {
    const timer = setInterval(() => response.write('x'), 10);
    request.on('close', () => clearInterval(timer));
  };
  pages['/hang'] = () => undefined;
  for (const url of [`good.test:${port}/drip`, `good.test:${port}/hang`, 'silent.test/file']) {
    const got = await get(`http://${url}`, { signal: AbortSignal.timeout(200) });
    assert.is(got.kind, 'transient', url);
    assert.match((got as Fault).reason, /longer than/, url);
  }
  const before = new AbortController();
  before.abort();
  const got = await get(`http://good.test:${port}/file`, { signal: before.signal });
  assert.is(got.kind, 'transient');
});

test('a reset is no end of a file, and a coded transfer is no file', async () => {
  const answers = {
    reset: 'HTTP/1.1 200 OK\r\n\r\nhalf',
    coded: 'HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n',
    closed: 'HTTP/1.0 200 OK\r\n\r\nwhole',
  };
  const server = createTcp((socket) => {
    socket.on('error', () => undefined);
    socket.once('data', (request) => {
      const path = /GET \/(\w+)/.exec(String(request))?.[1] as keyof typeof answers;
      socket.write(answers[path]);
      if (path === 'reset') setTimeout(() => socket.resetAndDestroy(), 30);
      else socket.end();
    });
  });
  const at = await listen(server, PUBLIC);
  assert.is((await get(`http://good.test:${at}/reset`)).kind, 'transient');
  assert.match(((await get(`http://good.test:${at}/coded`)) as Fault).reason, 'compressed');
  assert.is((await get(`http://good.test:${at}/closed`)).text, 'whole');
  server.close();
});

test('a flood of what is no file is ended at once', async () => {
  const head = 'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n';
  const floods: readonly [string, string][] = [
    ['', 'HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n'.repeat(500)],
    [head, '1\r\na\r\n'.repeat(5_000)],
    [`${head}3;`, 'a=b;'.repeat(5_000)],
    ['HTTP/1.1 200 ', 'a'.repeat(60_000)],
  ];
  for (const [first, then] of floods) {
    const server = createTcp((socket) => {
      const more = (): void => {
        while (!socket.destroyed && socket.write(then));
      };
      socket.on('error', () => undefined).on('drain', more);
      socket.write(first);
      more();
    });
    const at = await listen(server, PUBLIC);
    const got = await get(`http://good.test:${at}/`, { signal: AbortSignal.timeout(5_000) });
    assert.is(got.kind, 'permanent', then.slice(0, 10));
    assert.match((got as Fault).reason, 'much that is not the file', then.slice(0, 10));
    server.close();
  }
});

test('half a file is no file', async () => {
  pages['/half'] = (_request, response) => {
    response.writeHead(200, { 'content-length': '100' });
    response.write('only this');
    setImmediate(() => response.destroy());
  };
  const got = await get(`http://good.test:${port}/half`);
  assert.is(got.kind, 'transient');
});

test('DNS and connections that fail', async () => {
  const gone = createTcp();
  const closed = await listen(gone, PUBLIC);
  await new Promise((resolve) => gone.close(resolve));
  const cases: readonly [string, Fault['kind']][] = [
    ['http://broken.test/file', 'transient'],
    ['http://unknown.test/file', 'permanent'],
    ['http://empty.test/file', 'permanent'],
    [`http://good.test:${closed}/file`, 'transient'],
  ];
  for (const [url, kind] of cases) assert.is((await get(url)).kind, kind, url);
});

test('garbage instead of HTTP, and a header without end', async () => {
  const answers = ['SSH-2.0-OpenSSH_9.9\r\n', `HTTP/1.1 200 OK\r\nx: ${'y'.repeat(100_000)}`];
  for (const answer of answers) {
    const server = createTcp((socket) => {
      socket.on('error', () => undefined);
      socket.end(answer);
    });
    const at = await listen(server, PUBLIC);
    const got = await get(`http://good.test:${at}/file`);
    assert.not.equal(got.kind, 'fetched', answer.slice(0, 20));
    server.close();
  }
});

test('a certificate must be valid and for this name', async () => {
  const { cert, key } = makeSelfSigned('good.test', new Date());
  const names: (string | false)[] = [];
  const server = createHttps({ cert, key }, (_request, response) => response.end('secret'));
  server.on('secureConnection', (socket) => names.push(socket.servername as string | false));
  const at = await listen(server, PUBLIC);
  const trusted = await get(`https://good.test:${at}/`, { authorities: [cert] });
  assert.is(trusted.text, 'secret', JSON.stringify(trusted));
  assert.equal(names, ['good.test']);
  const untrusted = await get(`https://good.test:${at}/`);
  const otherName = await get(`https://other.test:${at}/`, { authorities: [cert] });
  const address = await get(`https://${PUBLIC}:${at}/`, { authorities: [cert] });
  for (const got of [untrusted, otherName, address]) {
    assert.is(got.kind, 'permanent', JSON.stringify(got));
    assert.match((got as Fault).reason, 'certificate');
  }
  // https to a server without TLS.
  assert.not.equal((await get(`https://good.test:${port}/file`)).kind, 'fetched');
  server.closeAllConnections();
  server.close();
});

test('a disk that fails is no fault of the far end', async () => {
  const order = {
    url: `http://good.test:${port}/file`,
    path: join(folder, 'missing', 'file'),
    budget: { left: 100 },
    signal: new AbortController().signal,
  };
  const error = await fetchToFile({ resolver, guard }, order).then(
    () => null,
    (thrown: NodeJS.ErrnoException) => thrown,
  );
  assert.is(error?.code, 'ENOENT');
});

test('nobody knocked at a trap', () => {
  assert.is(knocks, 0);
});

test.run();
