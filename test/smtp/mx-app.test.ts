// The rules of arrival on the whole program: config/receiving.json, real routes, a real database, real block lists.
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { dialMx, endMxSessions, enterMx, MESSAGE } from '../support/mx-session.ts';

const test = suite<{ app: App; dns: DnsServer }>('mx: the whole program');
const HERE = 'a@mailstead.test';
const file = {
  proxy_from: ['127.0.0.1'],
  dnsbl: ['list.test'],
  connections: { new_per_minute: 100_000 },
};
const proxied = (address: string): { first: string } => ({
  first: `PROXY TCP4 ${address} 127.0.0.1 4000 25\r\n`,
});

test.before(async (context) => {
  context.dns = await startDns({
    '1.8.8.8.list.test': { A: ['127.0.0.2'] },
    'proven.test': { TXT: ['v=spf1 ip4:8.8.4.4 -all'] },
    'strict.test': { TXT: ['v=spf1 -all'] },
    '_dmarc.strict.test': { TXT: ['v=DMARC1; p=reject'] },
  });
  context.app = await startApp({ MAILSTEAD_DNS_SERVERS: context.dns.server }, { receiving: file });
});
test.after.each(endMxSessions);
test.after(async ({ app, dns }) => {
  await app.stop();
  await dns.stop();
});

interface Stored {
  readonly id: string;
  readonly to: readonly string[];
}

const stored = async (app: App): Promise<readonly Stored[]> =>
  (await app.call<{ data: readonly Stored[] }>('GET', '/emails/receiving?limit=100')).body.data;

test('what was acknowledged is there, with the client that the proxy named', async ({ app }) => {
  const client = await enterMx(app.appliance.mxPort!, proxied('8.8.4.4'));
  const reply = await client.send(MESSAGE, HERE);
  const id = /^250 2\.0\.0 Ok: stored as (\S+)$/.exec(reply)?.[1];
  const { body } = await app.call<{ raw: { download_url: string } }>(
    'GET',
    `/emails/receiving/${id}`,
  );
  const raw = await (await fetch(body.raw.download_url)).text();
  assert.match(raw, /^Return-Path: <b@else\.test>\r\nAuthentication-Results: /);
  assert.match(raw, /\r\nReceived: from client\.test \(\[8\.8\.4\.4\]\)\r\n\tby /);
});

test('a listed client stays outside', async ({ app }) => {
  const reply = await dialMx(app.appliance.mxPort!, proxied('8.8.8.1')).reply();
  assert.match(reply, /^554 5\.7\.1 .*list\.test/);
});

test('an author who wants forgeries refused is heard at the dot', async ({ app }) => {
  const before = (await stored(app)).length;
  const client = await enterMx(app.appliance.mxPort!, proxied('8.8.4.4'));
  const forged = 'From: boss@strict.test\r\nSubject: x\r\n\r\npay';
  assert.match(await client.send(forged, HERE, 'boss@strict.test'), /^550 5\.7\.26 .*strict\.test/);
  assert.is((await stored(app)).length, before);
});

test('the operator turns greylisting on while it runs: strangers come again, who proves something does not', async ({
  app,
}) => {
  const path = join(app.dataDir, 'config', 'receiving.json');
  await writeFile(path, JSON.stringify({ ...file, greylisting: { enabled: true, delay: '1ms' } }));
  const port = app.appliance.mxPort!;
  let tries = 0;
  const reply = await until(
    async () => {
      const client = await enterMx(port, proxied('8.8.4.4'));
      tries += 1;
      const said = await client.send(MESSAGE, HERE, `b@stranger${tries}.test`);
      client.socket.destroy();
      return said;
    },
    (said) => !said.startsWith('250'),
  );
  assert.match(reply, /^451 4\.7\.1 /);
  const client = await enterMx(port, proxied('8.8.4.4'));
  assert.match(await client.send(MESSAGE, HERE, 'b@proven.test'), /^250 /);
  const again = await until(
    () => client.send(MESSAGE, HERE, `b@stranger${tries}.test`),
    (said) => !said.startsWith('451'),
  );
  assert.match(again, /^250 /);
});

test.run();
