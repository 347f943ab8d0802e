// Mail that comes back: bounces and complaints find the delivery that they are about by its return path, which
// nobody else can make (mail/return-path.ts). What is no report (vacation programs, people who answer to
// the envelope) is taken and dropped.
import type { Pool } from 'pg';
import type { Logger } from '../log.ts';
import type { BounceRule } from '../mail/bounce-rules.ts';
import { parseDomain } from '../mail/address.ts';
import { readReport, type Report } from '../mail/report.ts';
import { readReturnPathLocal, type ReturnPathSubject } from '../mail/return-path.ts';
import { settleReport } from '../queue/late.ts';
import type { Store } from '../store/orm.ts';

export interface ReturnPaths {
  /** By key id. */
  readonly keys: Readonly<Record<string, Buffer>>;
  /** The domain of return paths of mail that is signed by another domain than its author's. */
  readonly hostname: string;
}

/** The delivery whose return path this is, or null. */
export function readReturnPath(
  { keys }: Pick<ReturnPaths, 'keys'>,
  address: string,
): ReturnPathSubject | null {
  const at = address.lastIndexOf('@');
  return at === -1 ? null : readReturnPathLocal(address.slice(0, at), keys);
}

/** Whether bounces come home at this address's domain; then whoever is not known there does not exist. */
export async function isReturnPathDomain(
  pool: Pool,
  { hostname }: Pick<ReturnPaths, 'hostname'>,
  address: string,
): Promise<boolean> {
  const parsed = parseDomain(address.slice(address.lastIndexOf('@') + 1));
  if (!parsed.ok) return false;
  const { domain } = parsed;
  if (domain === hostname) return true;
  const ends = domain.split('.').map((_, index, labels) => labels.slice(index).join('.'));
  const { rows } = await pool.query({
    name: 'is-return-path-domain',
    text: `select 1 from sending_domain
      where name = any ($1::text[]) and return_path_label || '.' || name = $2 limit 1`,
    values: [ends.slice(1), domain],
  });
  return rows.length > 0;
}

export interface TakingReports {
  readonly store: Store;
  readonly log: Logger;
  readonly returnPaths: ReturnPaths;
  readonly bounceRules: readonly BounceRule[];
}

/**
 * Applies what the message reports to the deliveries of the return paths that it was sent to; where it was sent to
 * somebody else (feedback loops have an address of their own), to the delivery whose return path the report
 * names. False: not now, a delivery is under way. Rejects when the database is away.
 */
export async function takeReport(
  d: TakingReports,
  message: { readonly raw: Buffer; readonly subjects: readonly ReturnPathSubject[] },
): Promise<boolean> {
  if (message.subjects.length === 0 && !saysReport(message.raw)) return true;
  const report = readReport(message.raw);
  if (report === null) {
    d.log.debug('mail to a return path that is no report');
    return true;
  }
  const named = message.subjects.length > 0 ? null : subjectOf(d.returnPaths, report);
  let isNow = true;
  for (const subject of named === null ? message.subjects : [named]) {
    const result = await settleReport(d.store, subject, { report, rules: d.bounceRules });
    d.log.debug({ email_id: subject.emailId, report: report.kind, result }, 'a report came back');
    if (result === 'not_now') isNow = false;
  }
  return isNow;
}

function subjectOf(returnPaths: ReturnPaths, report: Report): ReturnPathSubject | null {
  const found = report.returnPaths.map((address) => readReturnPath(returnPaths, address));
  return found.find((subject) => subject !== null) ?? null;
}

const HEADER_LOOK_BYTES = 64 * 1024;

/** RFC 6522: cheap to see, so that ordinary mail is not read twice. */
function saysReport(raw: Buffer): boolean {
  const start = raw.toString('latin1', 0, HEADER_LOOK_BYTES);
  return /^content-type:[ \t\r\n]{0,20}multipart\/report\b/im.test(
    start.split('\r\n\r\n', 1)[0] ?? '',
  );
}
