// SMTP submission from plain parts: part of the composition root.
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { ComposedCertificates } from './compose-certificates.ts';
import { ROLES, type Config } from './config.ts';
import { listenOrExplain, type Listening } from './listening.ts';
import {
  startSubmission,
  type SubmissionListener,
  type SubmissionOptions,
} from './smtp/submission.ts';
import { CertificateUnusable, type Certificate } from './tls-certificate.ts';

export interface ComposedSubmission extends Listening<SubmissionListener> {
  /** Why it does not listen yet; null when it does, or never will. */
  readonly waiting: { readonly what: string; readonly why: string } | null;
  stop(): Promise<void>;
}

/**
 * Off when this process does not run the role. In production it listens from when there is a certificate that clients can verify:
 * at once, or as soon as an authority has issued one. Throws CertificateUnusable where the role is named and none can come.
 */
export async function composeSubmission(
  config: Config,
  d: Pick<SubmissionOptions, 'authenticate' | 'limiter' | 'submit' | 'log'> & {
    readonly dataDir: string;
    readonly certificates: Pick<ComposedCertificates, 'source' | 'isOrdering'>;
  },
): Promise<ComposedSubmission> {
  const { source, isOrdering } = d.certificates;
  let listening: Listening<SubmissionListener> = { listener: null, missing: null };
  let opening: Promise<void> | null = null;
  let isStopped = false;
  const isOn = config.roles.has('submission');
  const lacks = (): boolean => config.mode === 'production' && source.kind() === 'self_signed';
  const open = async (): Promise<void> => {
    listening = await listen(config, { ...d, tls: () => source.current() });
  };
  if (isOn && !lacks()) await open();
  else if (isOn && !isOrdering()) {
    if (config.roles.size < ROLES.length) throw new CertificateUnusable(NO_CERTIFICATE);
    d.log.warn(`SMTP submission is off: ${NO_CERTIFICATE}`);
  }
  source.onChange((certificate) => {
    if (listening.listener !== null) listening.listener.updateCertificate(certificate);
    else if (isOn && !isStopped && !lacks()) {
      opening ??= open().then(
        () => {
          if (listening.listener === null) return; // said by whoever found out why
          d.log.info('SMTP submission is open: there is a certificate now');
        },
        (err: unknown) => {
          opening = null;
          d.log.error({ err }, 'SMTP submission cannot be opened');
        },
      );
    }
  });
  return {
    get listener() {
      return listening.listener;
    },
    get missing() {
      return listening.missing;
    },
    get waiting() {
      const isWaiting = isOn && listening.listener === null && lacks() && isOrdering();
      return isWaiting ? { what: 'submission', why: WAITING } : null;
    },
    async stop() {
      isStopped = true;
      await opening;
      await listening.listener?.stop();
    },
  };
}

const NO_CERTIFICATE =
  'submission in production needs a certificate: set MAILSTEAD_TLS_CERT and MAILSTEAD_TLS_KEY, or acme.directory in config/tls.json of the data folder.';
const WAITING =
  'SMTP submission opens when the certificate of MAILSTEAD_HOSTNAME has been issued; the log says what is in the way.';

async function listen(
  config: Config,
  d: Pick<SubmissionOptions, 'authenticate' | 'limiter' | 'submit' | 'log'> & {
    readonly dataDir: string;
    readonly tls: () => Certificate;
  },
): Promise<Listening<SubmissionListener>> {
  const spoolFolder = join(d.dataDir, 'submission-spool');
  // What a crash left: the directory is ours alone, and none of it was accepted.
  await rm(spoolFolder, { recursive: true, force: true });
  const { submissionPort: port, submissionsPort: tlsPort } = config;
  return listenOrExplain({
    what: 'SMTP submission',
    mode: config.mode,
    ports: [
      { port, setting: 'MAILSTEAD_SUBMISSION_PORT' },
      { port: tlsPort, setting: 'MAILSTEAD_SUBMISSIONS_PORT' },
    ],
    log: d.log,
    start: () =>
      startSubmission({
        ...d,
        host: null,
        port,
        tlsPort,
        hostname: config.hostname,
        tls: d.tls(),
        spoolFolder,
      }),
  });
}
