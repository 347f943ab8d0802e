/**
 * Why the embedded Postgres did not start, in words for whoever has to mend it.
 *
 * In: whatever was thrown on the way. Out: EmbeddedPostgresFailed with a cause and advice.
 */
import { describeHolder, LockHeld } from './lock.ts';

/** The embedded Postgres cannot be started; the message says why and what to do. */
export class EmbeddedPostgresFailed extends Error {
  override name = 'EmbeddedPostgresFailed';
}

/** What to say where the programs are missing or do not run; `output` is what they printed. */
export function noBinaries(output?: string, cause?: unknown): EmbeddedPostgresFailed {
  return new EmbeddedPostgresFailed(
    `There are no Postgres binaries that run on this machine (${process.platform}-${process.arch})` +
      `${output === undefined ? '' : `: ${output.trim()}`}. ` +
      'Install without --omit=optional, or set MAILSTEAD_DATABASE_URL to a Postgres of your own.',
    { cause },
  );
}

/** What is thrown in place of `error`, which ended the start of the cluster in `dir`. */
export function explain(error: unknown, dir: string): EmbeddedPostgresFailed {
  if (error instanceof EmbeddedPostgresFailed) return error;
  const text = error instanceof Error ? error.message : String(error);
  let advice = 'Set MAILSTEAD_DATABASE_URL to use a Postgres of your own.';
  if (error instanceof LockHeld) {
    return new EmbeddedPostgresFailed(
      `The database in ${dir} is in use by ${describeHolder(error.holder)}. Stop that one first.`,
      { cause: error },
    );
  }
  if (/ENOSPC|No space left|Check free disk space/i.test(text))
    advice = 'The disk is full: free some space.';
  else if (/EDQUOT|quota/i.test(text)) advice = 'The disk quota is used up.';
  else if (/EROFS|Read-only file/i.test(text)) advice = 'The file system is read-only.';
  else if (/look up effective user/.test(text)) {
    advice = `User id ${process.getuid?.()} has no name: give it one in /etc/passwd, or run as root.`;
  } else if (/spawn .*(EPERM|EINVAL)/.test(text)) {
    advice = 'Root may not become another user here: run as an ordinary user (docker run --user).';
  } else if (/EACCES|EPERM|Permission denied/i.test(text)) {
    advice = 'The user that runs Mailstead must own the data directory and be able to enter it.';
  }
  return new EmbeddedPostgresFailed(`The embedded Postgres did not start. ${advice} (${text})`, {
    cause: error,
  });
}
