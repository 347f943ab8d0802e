// What becomes of an SMTP listener whose port cannot be opened: part of the composition root.
//
//   in use, a default port of development mode   the listener is off, with a warning: two clones run side by side
//   no right to open it                          the listener is off and the process is not ready, with a warning
//   anything else                                the start ends with one sentence
import { PortUnusable } from './http/front-door.ts';
import type { Logger } from './log.ts';
import type { Mode } from './setting-row.ts';

export interface Listening<T> {
  /** Null: it is off. */
  readonly listener: T | null;
  /** What an operator should do; null when nothing is missing. */
  readonly missing: { readonly what: string; readonly why: string } | null;
}

/** The ports that `npm start` takes when nobody chose others. */
const DEVELOPMENT_PORTS: readonly number[] = [2525, 2587, 2465, 9464];

/** Starts a listener, or says why not. Throws PortUnusable, and whatever else `start` throws. */
export async function listenOrExplain<T>(d: {
  readonly what: string;
  readonly mode: Mode;
  readonly ports: readonly { readonly port: number; readonly setting: string }[];
  readonly log: Logger;
  readonly start: () => Promise<T>;
}): Promise<Listening<T>> {
  try {
    return { listener: await d.start(), missing: null };
  } catch (error) {
    const { syscall, code, port } = error as NodeJS.ErrnoException & { port?: number };
    if (syscall !== 'listen') throw error;
    const setting = d.ports.find((one) => one.port === port)?.setting ?? '';
    if (code === 'EACCES') {
      const why = `Port ${port} needs rights that this user does not have; set ${setting}, or leave the role out of MAILSTEAD_ROLES.`;
      d.log.warn(`${d.what} is off. ${why}`);
      return { listener: null, missing: { what: d.what, why } };
    }
    if (code === 'EADDRINUSE' && d.mode === 'development' && DEVELOPMENT_PORTS.includes(port!)) {
      d.log.warn(`${d.what} is off: port ${port} is in use by another program; see ${setting}`);
      return { listener: null, missing: null };
    }
    throw new PortUnusable(
      code === 'EADDRINUSE'
        ? `port ${port} is in use by another program; stop it or set ${setting}`
        : `port ${port} cannot be listened on (${code}); set ${setting}`,
      { cause: error },
    );
  }
}
