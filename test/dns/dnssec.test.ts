// The DNSSEC stub against a real DNS server on loopback, and against sockets that answer what they like.
import { createSocket, type Socket } from 'node:dgram';
import { once } from 'node:events';
import dnsPacket from 'dns-packet';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createSecureResolver } from '../../src/dns/dnssec.ts';
import { startDns, type DnsServer } from '../support/dns.ts';

const test = suite('dnssec');
let dns: DnsServer;
const digest = 'ab'.repeat(32);

test.before(async () => {
  dns = await startDns({
    'signed.test': { MX: ['10 MX.signed.test', '20 other.test'] },
    'mx.signed.test': { A: ['192.0.2.1'], AAAA: ['2001:db8::1'] },
    '_25._tcp.mx.signed.test': { TLSA: [`3 1 1 ${digest}`, `2 0 2 ${digest}${digest}`] },
    'null.signed.test': { MX: ['0 .'] },
    'plain.test': { MX: ['10 mx.plain.test'] },
    'alias.signed.test': { CNAME: 'mx.signed.test' },
    'away.signed.test': { CNAME: 'mx.plain.test' },
    'mx.plain.test': { A: ['192.0.2.2'] },
    'bogus.signed.test': 'SERVFAIL',
    'silent.signed.test': 'TIMEOUT',
    'rude.signed.test': 'GARBAGE',
    'hung.signed.test': { TLSA: 'HANGUP' },
    'loop.signed.test': { CNAME: 'loop.signed.test', loneCname: true },
    'many.signed.test': { MX: Array.from({ length: 90 }, (_, i) => `10 mx${i}.many.signed.test`) },
  });
  dns.secure.add('signed.test');
});
test.after(() => dns.stop());

const resolver = (timeoutMs = 2_000) => createSecureResolver({ server: dns.server, timeoutMs });

test('AD is told for records, for absence, and not for what is not signed', async () => {
  const ask = resolver();
  assert.equal(await ask.mx('Signed.test.'), {
    kind: 'found',
    secure: true,
    records: ['mx.signed.test', 'other.test'],
    cnames: [],
  });
  assert.equal(await ask.tlsa('_25._tcp.mx.signed.test'), {
    kind: 'found',
    secure: true,
    records: [
      { usage: 3, selector: 1, matching: 1, data: Buffer.from(digest, 'hex') },
      { usage: 2, selector: 0, matching: 2, data: Buffer.from(digest + digest, 'hex') },
    ],
    cnames: [],
  });
  assert.equal(await ask.tlsa('signed.test'), { kind: 'absent', secure: true, cnames: [] });
  assert.equal(await ask.tlsa('none.signed.test'), { kind: 'absent', secure: true, cnames: [] });
  assert.equal(await ask.mx('null.signed.test'), {
    kind: 'found',
    secure: true,
    records: [''],
    cnames: [],
  });
  const plain = await ask.mx('plain.test');
  assert.is(plain.kind === 'found' && plain.secure, false);
  assert.equal(await ask.a('nowhere.test'), { kind: 'absent', secure: false, cnames: [] });
});

test('the question has DO and AD, so that the answer may have AD', async () => {
  const seen = await new Promise<{ flags: number; isDo: boolean }>((resolve) => {
    void answering((query) => {
      const { flags, additionals = [] } = query;
      resolve({ flags, isDo: additionals.some((extra) => extra.flag_do === true) });
      return null;
    }).then(async ({ server, socket }) => {
      await createSecureResolver({ server, timeoutMs: 50 }).a('x.test');
      socket.close();
    });
  });
  assert.ok(seen.isDo);
  assert.ok((seen.flags & dnsPacket.AUTHENTIC_DATA) !== 0);
});

test('CNAMEs are followed; the chain is as secure as its weakest link', async () => {
  const ask = resolver();
  assert.equal(await ask.a('alias.signed.test'), {
    kind: 'found',
    secure: true,
    records: ['192.0.2.1'],
    cnames: ['mx.signed.test'],
  });
  const away = await ask.a('away.signed.test');
  assert.is(away.kind === 'found' && away.secure, false);
  const alias = await ask.cname('alias.signed.test');
  assert.equal(alias.kind === 'found' && alias.records, ['mx.signed.test']);
  assert.is((await ask.a('loop.signed.test')).kind, 'failed');
  dns.zones['odd.signed.test'] = { CNAME: 'a"b.signed.test', loneCname: true };
  assert.is((await ask.a('odd.signed.test')).kind, 'failed', 'it leads to no name of a host');
});

test('what cannot be validated, or is not answered, is a failure and never an absence', async () => {
  const ask = resolver(80);
  assert.equal(await ask.mx('bogus.signed.test'), { kind: 'failed', cause: 'SERVFAIL' });
  assert.equal(await ask.mx('silent.signed.test'), { kind: 'failed', cause: 'timeout' });
  assert.is((await ask.mx('rude.signed.test')).kind, 'failed');
  assert.is((await ask.tlsa('hung.signed.test')).kind, 'failed');
  assert.is((await ask.mx('no name')).kind, 'failed');
  assert.is((await ask.mx('a..b')).kind, 'failed');
  const nobody = createSecureResolver({ server: '127.0.0.1:9', timeoutMs: 500 });
  assert.equal(await nobody.mx('x.test'), { kind: 'failed', cause: 'no resolver listens' });
});

test('an answer that does not fit into UDP comes over TCP', async () => {
  const answer = await resolver().mx('many.signed.test');
  assert.is(answer.kind === 'found' && answer.secure && answer.records.length, 90);
  const transports = dns.questions
    .filter(({ name }) => name === 'many.signed.test')
    .map(({ transport }) => transport);
  assert.equal(transports, ['udp', 'tcp']);
});

test('equal questions at one time, and again within the TTL, are asked once', async () => {
  const ask = resolver();
  dns.questions.length = 0;
  await Promise.all(Array.from({ length: 20 }, () => ask.mx('plain.test')));
  await ask.mx('plain.test');
  assert.is(dns.questions.length, 1);
  let now = new Date();
  const later = createSecureResolver({ server: dns.server, now: () => now });
  await later.mx('plain.test');
  now = new Date(now.getTime() + 301_000);
  await later.mx('plain.test');
  assert.is(dns.questions.length, 3);
});

type Query = ReturnType<typeof dnsPacket.decode>;
async function answering(
  reply: (query: Query) => readonly Buffer[] | null,
): Promise<{ server: string; socket: Socket }> {
  const socket = createSocket('udp4');
  socket.on('message', (bytes, peer) => {
    for (const answer of reply(dnsPacket.decode(bytes)) ?? []) {
      socket.send(answer, peer.port, peer.address);
    }
  });
  socket.bind(0, '127.0.0.1');
  await once(socket, 'listening');
  return { server: `127.0.0.1:${socket.address().port}`, socket };
}

test('an answer with another id, name, type or without the response bit is not taken', async () => {
  const { server, socket } = await answering((query) => {
    const good = {
      ...query,
      type: 'response' as const,
      flags: 0,
      additionals: [],
      answers: [{ name: 'x.test', type: 'A', ttl: 60, data: '192.0.2.66' }],
    };
    const encode = (change: object): Buffer => dnsPacket.encode({ ...good, ...change });
    return [
      encode({ id: (query.id + 1) & 0xffff }),
      encode({ questions: [{ name: 'y.test', type: 'A' }] }),
      encode({ questions: [{ name: 'x.test', type: 'AAAA' }] }),
      encode({ questions: [] }),
      encode({ type: 'query' }),
      Buffer.from('nonsense'),
      encode({ answers: [{ name: 'x.test', type: 'A', ttl: 60, data: '192.0.2.1' }] }),
    ];
  });
  const answer = await createSecureResolver({ server }).a('x.test');
  assert.equal(answer.kind === 'found' && answer.records, ['192.0.2.1']);
  socket.close();
});

test('ids and ports differ from question to question', async () => {
  const ids = new Set<number>();
  const ports = new Set<number>();
  const { server, socket } = await answering((query) => {
    ids.add(query.id);
    return [dnsPacket.encode({ ...query, type: 'response', flags: 0, additionals: [] })];
  });
  socket.on('message', (_bytes, peer) => ports.add(peer.port));
  const ask = createSecureResolver({ server });
  await Promise.all(Array.from({ length: 40 }, (_, i) => ask.a(`n${i}.test`)));
  assert.ok(ids.size > 35 && ports.size > 35, `${ids.size} ids, ${ports.size} ports`);
  socket.close();
});

test('a server that is no address with a port is refused', () => {
  for (const server of ['localhost:53', '127.0.0.1', '127.0.0.1:0', '[::1]', '::1:53']) {
    assert.throws(() => createSecureResolver({ server }), /address with a port/);
  }
  createSecureResolver({ server: '[::1]:53' });
});

test.run();
