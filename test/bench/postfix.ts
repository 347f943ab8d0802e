// The other side: a private Postfix with OpenDKIM in a folder of its own, both from the machine's packages, set
// as their manuals say for throughput, nothing of the machine's own configuration used or touched. Every
// message is signed by a milter while it comes in (RSA-2048, relaxed/relaxed, From oversigned), stored
// and fsynced in the queue, and relayed to the sink. Needs root: Postfix's master does.
import { spawn } from 'node:child_process';
import { generateKeyPairSync } from 'node:crypto';
import { once } from 'node:events';
import { chmodSync, chownSync, existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import {
  BenchFailed,
  endChild,
  findFreePort,
  runProgram,
  startProgram,
  until,
  untilListening,
  type Cleanup,
} from './children.ts';
import { AUTHOR, AUTHOR_DOMAIN, RECIPIENT, TEXT_BYTES } from './message.ts';
import { cpuOf, readTree, reapedCpuS } from './processes.ts';

export const PROGRAMS = {
  postfix: '/usr/sbin/postfix',
  postconf: '/usr/sbin/postconf',
  source: '/usr/sbin/smtp-source',
  sink: '/usr/sbin/smtp-sink',
  opendkim: '/usr/sbin/opendkim',
} as const;

export const SELECTOR = 'bench';

export interface Postfix {
  readonly smtpPort: number;
  /** Base64 of the public key's SubjectPublicKeyInfo, as in a DKIM record. */
  readonly publicKey: string;
  cpu(): ReadonlyMap<string, number>;
  /** Hands `count` messages over `connections` kept connections; resolves when the last was accepted. */
  send(load: {
    readonly count: number;
    readonly connections: number;
    readonly maxMs: number;
  }): Promise<SourceRun>;
  tail(): string;
  stop(): Promise<void>;
}

/** Null: it can be measured here. Else why not, and what to do. */
export function whyNoPostfix(): string | null {
  const missing = Object.values(PROGRAMS).filter((path) => !existsSync(path));
  if (missing.length > 0) {
    return `${missing.join(', ')} not installed (Debian: apt-get install postfix opendkim opendkim-tools)`;
  }
  return process.getuid?.() === 0 ? null : 'Postfix can only be started by root';
}

export async function describePostfix(): Promise<string> {
  const version = await runProgram(PROGRAMS.postconf, ['-d', '-h', 'mail_version']);
  const milter = /v\S+/.exec(await runProgram(PROGRAMS.opendkim, ['-V']))?.[0] ?? '';
  return `Postfix ${version} + OpenDKIM ${milter}`;
}

export async function startPostfix(options: {
  readonly folder: string;
  readonly sinkPort: number;
  /** Takes mail into its queue and does nothing more: no milter, no delivery. */
  readonly isQueueOnly?: boolean;
  readonly cleanup: Cleanup;
}): Promise<Postfix> {
  const { folder, cleanup, isQueueOnly = false } = options;
  mkdirSync(folder);
  chmodSync(folder, 0o755);
  const milter = isQueueOnly ? null : await startMilter(folder, cleanup);
  const smtpPort = await findFreePort();
  const mailLog = join(folder, 'mail.log');
  const daemons = await runProgram(PROGRAMS.postconf, ['-d', '-h', 'daemon_directory']);
  const config = join(folder, 'config');
  await configure({ ...options, config, smtpPort, mailLog, milterSocket: milter?.socket ?? null });
  // Makes the folders of the queue.
  await runProgram(PROGRAMS.postfix, ['-c', config, 'check']);
  const master = await startProgram({
    command: join(daemons, 'master'),
    args: ['-c', config, '-s'],
    log: join(folder, 'master.log'),
    cleanup,
  });
  await untilListening(smtpPort, master);
  const tail = (): string =>
    master.tail() + (existsSync(mailLog) ? readFileSync(mailLog, 'utf8').slice(-2_000) : '');
  return {
    smtpPort,
    publicKey: milter?.publicKey ?? '',
    tail,
    cpu: () =>
      new Map([
        ['postfix', cpuOf(readTree(master.pid))],
        ...(milter === null ? [] : [['opendkim', cpuOf(readTree(milter.pid))] as const]),
      ]),
    async stop() {
      await master.stop();
      await milter?.stop();
    },
    send: (load) => runSource({ ...load, port: smtpPort, cleanup, tail }),
  };
}

export interface SourceRun {
  readonly startedAt: number;
  readonly seconds: number;
  /** Of smtp-source. */
  readonly cpuS: number;
}

/** Hands messages to any SMTP server with Postfix's own load generator; resolves when the last was accepted. */
export async function runSource(of: {
  readonly port: number;
  readonly count: number;
  readonly connections: number;
  readonly maxMs: number;
  readonly author?: string;
  readonly recipient?: string;
  readonly cleanup: Cleanup;
  /** What the server said last, for who has to find out why it failed. */
  readonly tail: () => string;
}): Promise<SourceRun> {
  const cpuBefore = reapedCpuS();
  const startedAt = performance.now();
  const source = spawn(PROGRAMS.source, [...sourceOptions(of), `127.0.0.1:${of.port}`], {
    stdio: ['ignore', 'ignore', 'inherit'],
  });
  const stopper = of.cleanup.add(() => endChild(source));
  const timer = setTimeout(() => source.kill('SIGKILL'), of.maxMs);
  const [code] = (await once(source, 'exit')) as [number | null];
  clearTimeout(timer);
  await stopper.stop();
  if (code !== 0) throw new BenchFailed(`smtp-source ended with ${code}:\n${of.tail()}`);
  const seconds = (performance.now() - startedAt) / 1000;
  return { startedAt, seconds, cpuS: reapedCpuS() - cpuBefore };
}

/** `-d`: connections are kept for the next message. */
const sourceOptions = (of: Parameters<typeof runSource>[0]): readonly string[] =>
  Object.entries({
    '-s': Math.min(of.connections, of.count),
    '-m': of.count,
    '-l': TEXT_BYTES,
    '-f': of.author ?? AUTHOR,
    '-t': of.recipient ?? RECIPIENT,
  }).reduce((all, [name, value]) => [...all, name, String(value)], ['-d']);

async function startMilter(
  folder: string,
  cleanup: Cleanup,
): Promise<{
  readonly pid: number;
  readonly socket: string;
  readonly publicKey: string;
  readonly stop: () => Promise<void>;
}> {
  const { privateKey, publicKey } = generateKeyPairSync('rsa', { modulusLength: 2_048 });
  const keyFile = join(folder, 'dkim.pem');
  writeFileSync(keyFile, privateKey.export({ type: 'pkcs8', format: 'pem' }), { mode: 0o600 });
  const socket = join(folder, 'milter');
  const config = join(folder, 'opendkim.conf');
  const settings = {
    Mode: 's',
    Canonicalization: 'relaxed/relaxed',
    SignatureAlgorithm: 'rsa-sha256',
    OversignHeaders: 'From',
    Domain: AUTHOR_DOMAIN,
    Selector: SELECTOR,
    KeyFile: keyFile,
    Socket: `local:${socket}`,
    UMask: '000',
    InternalHosts: '127.0.0.1',
    Background: 'no',
    AutoRestart: 'no',
    RequireSafeKeys: 'no',
    Syslog: 'no',
  };
  writeFileSync(config, toLines(settings, ' '));
  const running = await startProgram({
    command: PROGRAMS.opendkim,
    args: ['-f', '-x', config],
    log: join(folder, 'opendkim.log'),
    cleanup,
  });
  await until(`the milter: ${running.tail()}`, { maxMs: 10_000 }, () => {
    if (running.hasEnded()) throw new BenchFailed(`opendkim ended: ${running.tail()}`);
    return existsSync(socket) ? true : null;
  });
  return {
    pid: running.pid,
    socket,
    publicKey: publicKey.export({ type: 'spki', format: 'der' }).toString('base64'),
    stop: running.stop,
  };
}

async function configure(at: {
  readonly folder: string;
  readonly config: string;
  readonly smtpPort: number;
  readonly sinkPort: number;
  readonly mailLog: string;
  /** Null: what comes is held in the queue. */
  readonly milterSocket: string | null;
}): Promise<void> {
  const data = join(at.folder, 'data');
  mkdirSync(at.config);
  mkdirSync(data);
  mkdirSync(join(at.folder, 'queue'));
  const owner = await runProgram('id', ['-u', 'postfix']);
  chownSync(data, Number(owner), 0);
  const settings = {
    compatibility_level: '3.6',
    queue_directory: join(at.folder, 'queue'),
    data_directory: data,
    mail_owner: 'postfix',
    maillog_file: at.mailLog,
    maillog_file_prefixes: at.folder,
    myhostname: 'postfix.mailstead.test',
    mydestination: '',
    local_recipient_maps: '',
    alias_maps: '',
    alias_database: '',
    inet_interfaces: '127.0.0.1',
    inet_protocols: 'ipv4',
    mynetworks: '127.0.0.0/8',
    relayhost: `[127.0.0.1]:${at.sinkPort}`,
    // Nothing asks DNS.
    smtp_dns_support_level: 'disabled',
    smtpd_peername_lookup: 'no',
    ...(at.milterSocket === null
      ? { smtpd_data_restrictions: 'check_sender_access static:HOLD' }
      : {
          smtpd_milters: `unix:${at.milterSocket}`,
          // An unsigned message would be cheaper: it is not taken.
          milter_default_action: 'tempfail',
        }),
    smtp_tls_security_level: 'none',
    smtpd_tls_security_level: 'none',
    // As fast as two cores let it: no brake between queue and input, no counting of clients, connections
    // enough at once and kept.
    in_flow_delay: '0',
    default_process_limit: '100',
    initial_destination_concurrency: '20',
    default_destination_concurrency_limit: '50',
    smtp_destination_concurrency_limit: '50',
    smtpd_client_connection_count_limit: '0',
    smtpd_client_connection_rate_limit: '0',
    smtpd_client_message_rate_limit: '0',
    smtpd_client_recipient_rate_limit: '0',
    // A process that ends after its 100th message costs more than what it might leak here.
    max_use: '10000',
  };
  writeFileSync(join(at.config, 'main.cf'), toLines(settings, ' = '));
  writeFileSync(
    join(at.config, 'master.cf'),
    SERVICES.map((line) => line.replace('<smtp>', `127.0.0.1:${at.smtpPort}`)).join('\n') + '\n',
  );
}

/** The usual master.cf, without chroot and without what nothing here uses. */
const SERVICES: readonly string[] = [
  '<smtp>    inet n - n - -    smtpd',
  'cleanup   unix n - n - 0    cleanup',
  'qmgr      unix n - n 300 1  qmgr',
  'rewrite   unix - - n - -    trivial-rewrite',
  'bounce    unix - - n - 0    bounce',
  'defer     unix - - n - 0    bounce',
  'trace     unix - - n - 0    bounce',
  'verify    unix - - n - 1    verify',
  'flush     unix n - n 1000? 0 flush',
  'proxymap  unix - - n - -    proxymap',
  'proxywrite unix - - n - 1   proxymap',
  'smtp      unix - - n - -    smtp',
  'relay     unix - - n - -    smtp',
  'error     unix - - n - -    error',
  'retry     unix - - n - -    error',
  'discard   unix - - n - -    discard',
  'anvil     unix - - n - 1    anvil',
  'scache    unix - - n - 1    scache',
  'postlog   unix-dgram n - n - 1 postlogd',
];

function toLines(settings: Readonly<Record<string, string>>, between: string): string {
  return Object.entries(settings)
    .map(([name, value]) => `${name}${between}${value}\n`)
    .join('');
}
