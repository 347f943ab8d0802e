// What the doctor sees of the world: addresses and their names, block lists, port 25 both ways, the resolver, certificates.
// For each a good and a bad case, over real DNS packets and real sockets.
import { once } from 'node:events';
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createServer } from 'node:tls';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readDeliveryPolicy } from '../../src/delivery/egress.ts';
import { checkHelo, checkReverse, findOwnAddresses } from '../../src/doctor/addresses.ts';
import { checkBlockList } from '../../src/doctor/block-lists.ts';
import { checkCertificates, checkHttps } from '../../src/doctor/certificates.ts';
import { readDoctorPolicy, readOperatorFiles } from '../../src/doctor/policy.ts';
import { checkPort25In, checkPort25Out } from '../../src/doctor/port25.ts';
import { checkResolver } from '../../src/doctor/resolver.ts';
import { runChecks } from '../../src/doctor/run.ts';
import { issue } from '../support/certificates.ts';
import { HOST, openWorld, severitiesOf, startGreeter, type World } from '../support/doctor.ts';
import { silent } from '../support/queue.ts';

const test = suite('doctor outside');
let world: World;
test.before(async () => {
  world = await openWorld();
});
test.before.each(() => {
  for (const name of Object.keys(world.dns.zones)) delete world.dns.zones[name];
});
test.after(() => world.stop());

const V4 = '192.0.2.7';
const V6 = '2001:db8::7';
const PTR4 = '7.2.0.192.in-addr.arpa';
const PTR6 = '7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa';
const own = (address: string) => ({ address, helo: HOST, egresses: ['default'] });

test('addresses come from the egresses, else from the host name', async () => {
  const delivery = readDeliveryPolicy({
    egresses: { a: { ipv4: V4, ipv6: V6, helo: 'a.host.test' }, nat: { ipv4: '10.0.0.2' } },
    pools: { default: ['a', 'nat'] },
  });
  world.dns.zones[HOST] = { A: ['192.0.2.9'] };
  const found = await findOwnAddresses(world.at({ delivery }));
  assert.equal(found.list, [
    { address: V4, helo: 'a.host.test', egresses: ['a'] },
    { address: V6, helo: 'a.host.test', egresses: ['a'] },
    { address: '192.0.2.9', helo: HOST, egresses: ['nat'] },
  ]);
  assert.equal(severitiesOf(found.findings), { [`egress_address ${HOST}`]: 'info' });

  delete world.dns.zones[HOST];
  const none = await findOwnAddresses(world.at());
  assert.equal(none.list, []);
  assert.equal(severitiesOf(none.findings), { [`egress_address ${HOST}`]: 'error' });
  world.dns.zones[HOST] = 'SERVFAIL';
  const silence = await findOwnAddresses(world.at());
  assert.equal(severitiesOf(silence.findings), { [`egress_address ${HOST}`]: 'unknown' });
});

test('nothing is asked where it does not matter', async () => {
  for (const config of [
    { delivery: 'sink' as const },
    { delivery: 'smarthost' as const },
    { mode: 'development' as const, dnsServers: null },
  ]) {
    world.dns.questions.length = 0;
    const s = world.at({ isActive: true }, config);
    assert.equal((await findOwnAddresses(s)).list, []);
    const [finding] = await checkPort25Out(s);
    assert.is(finding?.severity, 'info');
    assert.match(finding!.message, 'Not applicable');
    assert.is(world.dns.questions.length, 0);
  }
  const s = world.at({ isActive: true }, { mode: 'development', dnsServers: null });
  assert.match((await checkResolver(s))[0]!.message, 'Not applicable');
  assert.match((await checkPort25In(s))[0]!.message, 'Not applicable');
  assert.equal(await checkHttps(s), []);
  assert.is(world.dns.questions.length, 0);
});

for (const [address, reverse, type] of [
  [V4, PTR4, 'A'],
  [V6, PTR6, 'AAAA'],
] as const) {
  test(`reverse DNS and HELO of ${address}`, async () => {
    const s = world.at();
    const { zones } = world.dns;
    const severity = async () => (await checkReverse(s, own(address))).severity;
    const none = await checkReverse(s, own(address));
    assert.is(none.severity, 'error');
    assert.match(none.advice ?? '', `PTR record to ${HOST}`);
    zones[reverse] = { PTR: [HOST] };
    assert.is(await severity(), 'error', 'it leads nowhere');
    zones[HOST] = { [type]: [type === 'A' ? '192.0.2.99' : '2001:db8::99'] };
    assert.is(await severity(), 'error', 'it leads elsewhere');
    assert.is((await checkHelo(s, own(address))).severity, 'warning');
    zones[HOST] = { [type]: [type === 'A' ? V4 : '2001:DB8:0:0::7'] };
    assert.is(await severity(), 'ok');
    assert.is((await checkHelo(s, own(address))).severity, 'ok');
    zones[reverse] = { PTR: ['other.host.test'] };
    zones['other.host.test'] = { [type]: [address] };
    assert.is(await severity(), 'info', 'confirmed, by another name');
    zones['other.host.test'] = 'SERVFAIL';
    assert.is(await severity(), 'unknown');
    zones[reverse] = 'REFUSED';
    assert.is(await severity(), 'unknown');
    zones[HOST] = 'SERVFAIL';
    assert.is((await checkHelo(s, own(address))).severity, 'unknown');
    delete zones[HOST];
    assert.is((await checkHelo(s, own(address))).severity, 'error');
  });
}

test('block lists: listed, clean, refused, dead, silent', async () => {
  const { zones } = world.dns;
  const s = world.at();
  const check = () => checkBlockList(s, own(V4), 'bl.test');
  const name = '7.2.0.192.bl.test';
  assert.is((await check()).severity, 'ok');
  zones[name] = { A: ['127.0.0.2'], TXT: ['https://bl.test/query?ip=192.0.2.7'] };
  const listed = await check();
  assert.is(listed.severity, 'error');
  assert.match(listed.message, 'https://bl.test/query');
  for (const code of ['127.255.255.254', '127.255.255.252', '127.0.0.1']) {
    zones[name] = { A: [code] };
    const refused = await check();
    assert.is(refused.severity, 'info');
    assert.match(refused.message, 'refuses to answer our resolver');
  }
  zones['7.2.0.192.zen.spamhaus.org'] = { A: ['127.0.0.10'] };
  const policy = await checkBlockList(s, own(V4), 'zen.spamhaus.org');
  assert.is(policy.severity, 'error');
  assert.match(policy.advice ?? '', 'not meant to send mail itself');
  zones[name] = { A: ['192.0.2.200'] };
  assert.match((await check()).message, 'no answer of a block list');
  zones[name] = { A: ['127.0.0.2'] };
  zones['1.0.0.127.bl.test'] = { A: ['127.0.0.2'] };
  assert.match((await check()).message, 'lists every address');
  zones[name] = 'SERVFAIL';
  assert.is((await check()).severity, 'unknown');
  zones['7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.bl.test'] = {
    A: ['127.0.0.3'],
  };
  delete zones['1.0.0.127.bl.test'];
  assert.is((await checkBlockList(s, own(V6), 'bl.test')).severity, 'error');
});

test('port 25 out is dialled only when asked, and through the guard', async () => {
  const greeter = await startGreeter('220 mx.big.test ESMTP');
  const { zones } = world.dns;
  zones['big.test'] = { MX: ['10 mx.big.test'] };
  zones['mx.big.test'] = { A: ['127.0.0.1'] };
  const policy = { dnsblZones: [], port25Domains: ['big.test'], signedName: null };
  const about = { policy, port: greeter.port };
  assert.is((await checkPort25Out(world.at(about)))[0]?.severity, 'info', 'nobody asked');
  const [open] = await checkPort25Out(world.at({ ...about, isActive: true }));
  assert.is(open?.severity, 'ok');
  await greeter.stop();
  const [blocked] = await checkPort25Out(world.at({ ...about, isActive: true }));
  assert.is(blocked?.severity, 'error');
  assert.match(blocked?.advice ?? '', 'cloud providers');
  // What the guard refuses is not dialled, so nothing is known.
  zones['mx.big.test'] = { A: ['10.0.0.1'] };
  assert.is((await checkPort25Out(world.at({ ...about, isActive: true })))[0]?.severity, 'info');
  const development = world.at({ ...about, isActive: true }, { mode: 'development' });
  world.dns.questions.length = 0;
  assert.is((await checkPort25Out(development))[0]?.severity, 'info');
  assert.is(world.dns.questions.length, 0, 'in development mode not even when asked');
});

test('port 25 in: our greeting, a stranger, nobody', async () => {
  world.dns.zones[HOST] = { A: ['127.0.0.1'] };
  const look = async (port: number) => (await checkPort25In(world.at({ port })))[0]!;
  const ours = await startGreeter(`220 ${HOST} ESMTP`);
  assert.is((await look(ours.port)).severity, 'ok');
  await ours.stop();
  const nobody = await look(ours.port);
  assert.is(nobody.severity, 'info', 'a router may not let us');
  assert.match(nobody.advice ?? '', 'another network');
  const stranger = await startGreeter('220 else.test ESMTP');
  const found = await look(stranger.port);
  assert.is(found.severity, 'warning');
  assert.match(found.message, 'else.test');
  await stranger.stop();
  const closing = await startGreeter(null);
  assert.is((await look(closing.port)).severity, 'info');
  await closing.stop();
  world.dns.zones[HOST] = 'SERVFAIL';
  assert.is((await look(1)).severity, 'unknown');
  delete world.dns.zones[HOST];
  assert.match((await look(1)).message, 'no public address');
});

test('the resolver answers, or not; DANE needs one that validates', async () => {
  world.dns.zones[HOST] = { A: ['127.0.0.1'] };
  assert.equal(severitiesOf(await checkResolver(world.at())), {
    [`resolver ${world.dns.server}`]: 'ok',
  });
  world.dns.zones[HOST] = { A: ['127.0.0.1'], MX: 'SERVFAIL' };
  assert.is((await checkResolver(world.at()))[0]?.severity, 'warning');
  world.dns.zones[HOST] = 'SERVFAIL';
  const [dead] = await checkResolver(world.at());
  assert.equal([dead?.severity, dead?.whenLasting], ['unknown', 'error']);
  const delivery = readDeliveryPolicy({ dane: { resolver: world.dns.server } });
  const policy = { dnsblZones: [], port25Domains: [], signedName: 'signed.test' };
  const dnssec = async () =>
    (await checkResolver(world.at({ delivery, policy }))).find(({ code }) => code === 'dnssec');
  world.dns.zones['signed.test'] = { A: ['192.0.2.1'], ttlSeconds: 0 };
  assert.is((await dnssec())?.severity, 'error');
  world.dns.secure.add('signed.test');
  assert.is((await dnssec())?.severity, 'ok');
  world.dns.zones['signed.test'] = 'SERVFAIL';
  assert.is((await dnssec())?.whenLasting, 'error');
});

test('the certificate of SMTP: name, end, who signed it', async () => {
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-doctor-'));
  const file = join(dataDir, 'chain.pem');
  const authority = issue({ commonName: 'authority', isAuthority: true });
  const look = async (pem: string | null, config = {}) => {
    if (pem !== null) await writeFile(file, pem);
    const about = { dataDir, ownAuthorities: [authority.cert] };
    const [found] = await checkCertificates(world.at(about, { tlsCert: file, ...config }));
    return found!;
  };
  const good = issue({ names: [HOST], issuer: authority, to: 60 });
  assert.is((await look(good.cert)).severity, 'ok');
  assert.is(
    (await look(issue({ names: [HOST], issuer: authority, from: -70, to: 20 }).cert)).severity,
    'warning',
  );
  assert.is(
    (await look(issue({ names: [HOST], issuer: authority, from: -84, to: 6 }).cert)).severity,
    'error',
  );
  const short = async (to: number): Promise<string> =>
    (await look(issue({ names: [HOST], issuer: authority, from: to - 6, to }).cert)).severity;
  assert.equal(
    [await short(3), await short(1), await short(0.4)],
    ['ok', 'warning', 'error'],
    'one of six days is renewed two days before its end',
  );
  const ended = await look(issue({ names: [HOST], issuer: authority, to: -1, from: -9 }).cert);
  assert.match(ended.message, 'ended on');
  const other = await look(issue({ names: ['else.test'], issuer: authority, to: 60 }).cert);
  assert.is(other.severity, 'error');
  assert.match(other.message, 'not for mail.host.test');
  const middle = issue({ commonName: 'middle', isAuthority: true, issuer: authority });
  const leaf = issue({ names: [HOST], issuer: middle, to: 60 });
  assert.is((await look(`${leaf.cert}${middle.cert}`)).severity, 'ok');
  const cut = await look(leaf.cert);
  assert.is(cut.severity, 'warning');
  assert.match(cut.advice ?? '', 'intermediate certificates');
  const self = issue({ names: [HOST], commonName: HOST, to: 60 });
  assert.is((await look(self.cert)).severity, 'warning');
  assert.is((await look(self.cert, { mode: 'development' })).severity, 'info');
  assert.is((await look('no certificate')).severity, 'error');
  await rm(file);
  assert.is((await look(null)).severity, 'error');
  assert.is((await look(null, { tlsCert: null })).severity, 'info', 'none was made yet');
  await mkdir(join(dataDir, 'secrets'));
  await writeFile(join(dataDir, 'secrets', 'smtp-tls.pem'), `${self.key}\n${self.cert}`);
  assert.is((await look(null, { tlsCert: null })).severity, 'warning', 'ours, self-signed');
  await rm(dataDir, { recursive: true });
});

test('the certificate of HTTPS as a client sees it', async () => {
  const authority = issue({ commonName: 'authority', isAuthority: true });
  const serve = async (pair: { cert: string; key: string }) => {
    const server = createServer({ cert: pair.cert, key: pair.key }, (socket) => {
      socket.on('error', () => undefined);
    });
    server.listen(0, '127.0.0.1');
    await once(server, 'listening');
    const httpsPort = (server.address() as AddressInfo).port;
    const [found] = await checkHttps(world.at({ httpsPort, authorities: [authority.cert] }));
    server.close();
    return found!;
  };
  world.dns.zones[HOST] = { A: ['127.0.0.1'] };
  const about = { names: [HOST], issuer: authority };
  assert.is((await serve(issue({ ...about, to: 60 }))).severity, 'ok');
  assert.is((await serve(issue({ ...about, from: -75, to: 15 }))).severity, 'warning');
  assert.is((await serve(issue({ names: ['else.test'], issuer: authority }))).severity, 'error');
  assert.is((await serve(issue({ names: [HOST] }))).severity, 'error', 'nobody knows who signed');
  assert.is((await checkHttps(world.at()))[0]?.severity, 'info', 'nobody answers');
  const [plain] = await checkHttps(world.at({}, { publicUrl: `http://${HOST}` }));
  assert.is(plain?.severity, 'warning');
});

test('a check that fails or hangs is unknown, and the others go on', async () => {
  const checked = await runChecks(
    [
      { name: 'throws', run: () => Promise.reject(new Error('secret of the house')) },
      { name: 'hangs', run: () => new Promise(() => undefined) },
      { name: 'works', run: async () => [] },
    ],
    { log: silent, timeMs: 60_000, checkMs: 50 },
  );
  assert.equal(
    checked.map(({ name, isMissed, findings }) => [name, isMissed, findings[0]?.severity]),
    [
      ['throws', true, 'unknown'],
      ['hangs', true, 'unknown'],
      ['works', false, undefined],
    ],
  );
  assert.not.match(JSON.stringify(checked), 'secret of the house');
});

test('a stop waits for no check', async () => {
  const stopping = new AbortController();
  let isBegun = false;
  const hangs = {
    name: 'hangs',
    run: () => {
      isBegun = true;
      setImmediate(() => stopping.abort());
      return new Promise<never>(() => undefined);
    },
  };
  const checked = await runChecks([hangs], {
    log: silent,
    timeMs: 600_000,
    checkMs: 600_000,
    signal: stopping.signal,
  });
  assert.equal([isBegun, checked[0]?.isMissed], [true, true]);
});

test('the files of the operator', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-doctor-'));
  const shipped = await readOperatorFiles(folder);
  assert.equal(shipped.problems, []);
  assert.ok(shipped.doctor.dnsblZones.length > 0);
  await writeFile(join(folder, 'doctor.json'), '{"dnsbl_zones": ["bl.test"]}');
  await writeFile(join(folder, 'delivery.json'), '{"egress": 1}');
  const own = await readOperatorFiles(folder);
  assert.equal(own.doctor.dnsblZones, ['bl.test']);
  assert.equal(
    own.problems.map(({ path }) => path),
    [join(folder, 'delivery.json')],
  );
  await writeFile(join(folder, 'tls.json'), '{"https_port": "443"}');
  assert.is((await readOperatorFiles(folder)).problems.length, 2);
  assert.throws(() => readDoctorPolicy({ dnsbl: [] }), /"dnsbl" is not known/);
  assert.throws(() => readDoctorPolicy({ dnsbl_zones: ['a b'] }), /dnsbl_zones\[0\]/);
  await rm(folder, { recursive: true });
});

test.run();
