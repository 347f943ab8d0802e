// Debian's `pebble`, an ACME authority for tests, as a child process on free loopback ports, with a certificate of a test authority.
// It asks the given DNS server and validates on the given port. Where the program is not installed there is none.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { access, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { request } from 'node:https';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { until } from './app.ts';
import { issue } from './certificates.ts';
import { freePort } from './program.ts';

/** What the DNS of a test has to lead to 127.0.0.1. */
export const ACME_HOST = 'acme.test';

export interface Pebble {
  /** At ACME_HOST. */
  readonly directory: string;
  /** PEM: who vouches for the directory. */
  readonly authority: string;
  /** PEM: the root of what it issues. */
  readonly root: string;
  stop(): Promise<void>;
}

/** The path of the program, or null. */
export async function findPebble(): Promise<string | null> {
  for (const folder of (process.env['PATH'] ?? '').split(delimiter)) {
    const path = join(folder, 'pebble');
    if (
      await access(path).then(
        () => true,
        () => false,
      )
    )
      return path;
  }
  return null;
}

export async function startPebble(d: {
  readonly program: string;
  /** `ip:port`. */
  readonly dns: string;
  /** Where HTTP-01 is validated. */
  readonly httpPort: number;
}): Promise<Pebble> {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-pebble-'));
  const own = issue({ commonName: 'pebble authority', isAuthority: true });
  const server = issue({ names: [ACME_HOST, 'localhost'], issuer: own });
  const [port, managementPort, tlsPort] = [await freePort(), await freePort(), await freePort()];
  const files = { certificate: join(folder, 'cert.pem'), privateKey: join(folder, 'key.pem') };
  await writeFile(files.certificate, server.cert);
  await writeFile(files.privateKey, server.key);
  const config = join(folder, 'config.json');
  const pebble = {
    listenAddress: `127.0.0.1:${port}`,
    managementListenAddress: `127.0.0.1:${managementPort}`,
    ...files,
    httpPort: d.httpPort,
    tlsPort,
    ocspResponderURL: '',
    externalAccountBindingRequired: false,
  };
  await writeFile(config, JSON.stringify({ pebble }));
  const child = spawn(d.program, ['-config', config, '-dnsserver', d.dns], {
    env: {
      ...process.env,
      PEBBLE_VA_NOSLEEP: '1',
      PEBBLE_WFE_NONCEREJECT: '10',
      PEBBLE_AUTHZREUSE: '0',
    },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let said = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => (said = (said + text).slice(-20_000)));
  }
  const get = (path: string): Promise<string | null> =>
    new Promise((resolve) => {
      const asked = request(
        { host: '127.0.0.1', port: managementPort, path, servername: 'localhost', ca: own.cert },
        (response) => {
          let body = '';
          response.setEncoding('utf8').on('data', (text: string) => (body += text));
          response.on('end', () => resolve(body));
        },
      );
      asked.on('error', () => resolve(null));
      asked.end();
    });
  const root = await until(
    async () => {
      if (child.exitCode !== null) throw new Error(`pebble ended: ${said}`);
      return get('/roots/0');
    },
    (pem) => pem?.includes('BEGIN CERTIFICATE') === true,
  );
  return {
    directory: `https://${ACME_HOST}:${port}/dir`,
    authority: own.cert,
    root: root!,
    async stop() {
      if (child.exitCode === null) {
        child.kill('SIGKILL');
        await once(child, 'exit');
      }
      await rm(folder, { recursive: true, force: true });
    },
  };
}
