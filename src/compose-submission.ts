// SMTP submission and its certificate from plain parts: part of the composition root.
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Config } from './config.ts';
import { listenOrExplain, type Listening } from './listening.ts';
import type { Logger } from './log.ts';
import {
  startSubmission,
  type SubmissionListener,
  type SubmissionOptions,
} from './smtp/submission.ts';
import { openCertificate, type CertificateSource } from './tls-certificate.ts';

/** The certificate of our SMTP listeners: the operator's, or a self-signed one in the folder of secrets. */
export function composeCertificate(
  config: Config,
  d: { readonly dataDir: string; readonly log: Logger },
): Promise<CertificateSource> {
  const { tlsCert, tlsKey, hostname } = config;
  return openCertificate({
    files: tlsCert === null || tlsKey === null ? null : { cert: tlsCert, key: tlsKey },
    folder: join(d.dataDir, 'secrets'),
    hostname,
    log: d.log,
    now: () => new Date(),
  });
}

/** Off when this process does not run the role, or has no certificate that clients could verify. */
export async function composeSubmission(
  config: Config,
  d: Pick<SubmissionOptions, 'authenticate' | 'limiter' | 'submit' | 'log'> & {
    readonly dataDir: string;
    readonly certificate: CertificateSource;
  },
): Promise<Listening<SubmissionListener>> {
  const off = { listener: null, missing: null };
  if (!config.roles.has('submission')) return off;
  if (config.mode === 'production' && config.tlsCert === null) {
    d.log.warn(
      'SMTP submission is off: it needs a certificate, MAILSTEAD_TLS_CERT and MAILSTEAD_TLS_KEY',
    );
    return off;
  }
  const spoolFolder = join(d.dataDir, 'submission-spool');
  // What a crash left: the directory is ours alone, and none of it was accepted.
  await rm(spoolFolder, { recursive: true, force: true });
  const { submissionPort: port, submissionsPort: tlsPort } = config;
  const listening = await listenOrExplain({
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
        tls: d.certificate.current(),
        spoolFolder,
      }),
  });
  d.certificate.onChange((certificate) => listening.listener?.updateCertificate(certificate));
  return listening;
}
