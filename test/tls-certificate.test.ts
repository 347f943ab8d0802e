// The certificate of the SMTP listeners: made, kept, renewed, and taken from files that an operator replaces.
import { createPrivateKey, X509Certificate } from 'node:crypto';
import { mkdtemp, readFile, rm, stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect, createServer } from 'node:tls';
import { once } from 'node:events';
import type { AddressInfo } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../src/log.ts';
import { makeSelfSigned } from '../src/self-signed.ts';
import {
  CertificateUnusable,
  openCertificate,
  type CertificateSource,
} from '../src/tls-certificate.ts';

const DAY_MS = 86_400_000;
const certificate = suite('tls certificate');
const sources: CertificateSource[] = [];
let folder = '';
const said: string[] = [];
const log = createLogger({
  level: 'info',
  name: 'test',
  mode: 'development',
  write: (line) => said.push(line),
});

certificate.before.each(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-tls-'));
  said.length = 0;
});

certificate.after.each(async () => {
  for (const source of sources.splice(0)) source.stop();
  await rm(folder, { recursive: true, force: true });
});

async function open(
  options: Partial<Parameters<typeof openCertificate>[0]> = {},
): Promise<CertificateSource> {
  const source = await openCertificate({
    files: null,
    folder,
    hostname: 'mail.example.com',
    log,
    now: () => new Date(),
    ...options,
  });
  sources.push(source);
  return source;
}

certificate('self-signed: a client that trusts it accepts it for our names', async () => {
  const { cert, key } = makeSelfSigned('mail.example.com', new Date());
  const parsed = new X509Certificate(cert);
  assert.is(parsed.subjectAltName, 'DNS:mail.example.com, DNS:localhost, IP Address:127.0.0.1');
  assert.not.ok(parsed.ca);
  assert.ok(parsed.verify(parsed.publicKey), 'signed by its own key');
  assert.ok(parsed.checkPrivateKey(createPrivateKey(key)));
  const years = (Date.parse(parsed.validTo) - Date.now()) / DAY_MS / 365;
  assert.ok(years > 1.99 && years < 2.01);
  const server = createServer({ cert, key }, (socket) => socket.end('hello'));
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  for (const servername of ['mail.example.com', 'localhost']) {
    const socket = connect({ port, host: '127.0.0.1', servername, ca: cert });
    await once(socket, 'secureConnect');
    assert.ok(socket.authorized);
    socket.destroy();
  }
  const stranger = connect({ port, host: '127.0.0.1', servername: 'other.test', ca: cert });
  const [error] = (await once(stranger, 'error')) as [Error];
  assert.match(error.message, /altnames/);
  server.close();
  const later = new X509Certificate(makeSelfSigned('a.test', new Date('2051-01-01')).cert);
  assert.match(later.validTo, /2052/);
});

certificate('self-signed: kept from one start to the next, for our eyes only', async () => {
  const first = await open();
  const second = await open();
  assert.equal(second.current(), first.current());
  const { mode } = await stat(join(folder, 'smtp-tls.pem'));
  assert.is(mode & 0o777, 0o600);
  const renamed = await open({ hostname: 'other.example.com' });
  assert.is.not(renamed.current().cert, first.current().cert);
  await writeFile(join(folder, 'smtp-tls.pem'), 'damaged');
  assert.is.not((await open()).current().cert, first.current().cert);
});

certificate('self-signed: a new one a month before the end, also while we run', async () => {
  let at = new Date();
  const source = await open({ now: () => at });
  const { cert } = source.current();
  const seen: string[] = [];
  source.onChange((next) => seen.push(next.cert));
  at = new Date(at.getTime() + 690 * DAY_MS);
  await source.refresh();
  assert.equal(seen, []);
  at = new Date(at.getTime() + 15 * DAY_MS);
  await source.refresh();
  assert.is(seen.length, 1);
  assert.is.not(seen[0], cert);
});

certificate(
  'files: read again when they change; a pair that does not work is not taken',
  async () => {
    const files = { cert: join(folder, 'cert.pem'), key: join(folder, 'key.pem') };
    const [one, two] = [makeSelfSigned('a.test', new Date()), makeSelfSigned('b.test', new Date())];
    await writeFile(files.cert, one.cert);
    await writeFile(files.key, one.key);
    const source = await open({ files });
    const seen: string[] = [];
    source.onChange((next) => seen.push(next.cert));
    await writeFile(files.cert, two.cert);
    await source.refresh();
    await source.refresh();
    assert.equal(source.current(), one, 'half a pair');
    assert.is(said.filter((line) => line.includes('another certificate')).length, 1, 'said once');
    await writeFile(files.key, two.key);
    await source.refresh();
    assert.equal(source.current(), two);
    await writeFile(files.cert, 'nonsense');
    await source.refresh();
    await rm(files.key);
    await source.refresh();
    assert.equal(source.current(), two);
    assert.ok(said.some((line) => line.includes('MAILSTEAD_TLS_KEY') && line.includes('ENOENT')));
    assert.equal(seen, [two.cert]);
    assert.is((await readFile(files.cert)).toString(), 'nonsense');
  },
);

certificate('files that do not hold a pair: the start says why', async () => {
  const files = { cert: join(folder, 'cert.pem'), key: join(folder, 'key.pem') };
  const problem = async (): Promise<string> => {
    try {
      await open({ files });
      return 'none';
    } catch (error) {
      if (!(error instanceof CertificateUnusable)) throw error;
      return error.message;
    }
  };
  assert.match(await problem(), /MAILSTEAD_TLS_CERT .*cert\.pem cannot be read \(ENOENT\)/);
  const [one, two] = [makeSelfSigned('a.test', new Date()), makeSelfSigned('b.test', new Date())];
  await writeFile(files.cert, one.cert);
  await writeFile(files.key, two.key);
  assert.match(await problem(), /key of another certificate/);
  const noKey = /MAILSTEAD_TLS_KEY .*key\.pem cannot be used: .* no private key .*passphrase/;
  await writeFile(files.key, 'no key');
  assert.match(await problem(), noKey);
  await writeFile(
    files.key,
    createPrivateKey(one.key).export({
      type: 'pkcs8',
      format: 'pem',
      cipher: 'aes-128-cbc',
      passphrase: 'x',
    }),
  );
  assert.match(await problem(), noKey);
  await writeFile(files.key, one.key);
  await writeFile(files.cert, 'no certificate');
  assert.match(await problem(), /MAILSTEAD_TLS_CERT .*cert\.pem cannot be used: .* no certificate/);
});

certificate.run();
