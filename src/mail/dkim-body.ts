/**
 * The relaxed canonical form of a body (RFC 6376 §3.4.4), octet by octet, into SHA-256.
 *
 * In: a body in pieces of any size, any octets. Out: its hash. One pass, a fixed scratch buffer, time linear in the
 * size whatever the octets are. Imports nothing of ours, so that a thread of its own can load it quickly.
 *
 * A bare CR and a bare LF are line ends here, because the SMTP engine sends each as CRLF: what is signed is what
 * will be on the wire (RFC 6376 §5.3). It refuses nothing.
 */
import { Buffer } from 'node:buffer';
import { createHash } from 'node:crypto';

export interface BodyHasher {
  /** Reads the piece before it returns; the memory may be used again. */
  update(piece: Uint8Array): void;
  /** Ends the body: base64, as in `bh=`. */
  digest(): string;
}

const scratchOctetsMax = 65_536;
/** A line end, a space and the octet itself. */
const emittedOctetsMax = 4;

const tab = 0x09;
const lf = 0x0a;
const cr = 0x0d;
const space = 0x20;

/** The hash of a whole body. */
export function hashBodyOctets(body: Uint8Array): string {
  const hasher = createBodyHasher(Math.min(body.length + emittedOctetsMax, scratchOctetsMax));
  hasher.update(body);
  return hasher.digest();
}

/** `scratchOctets`: canonical octets collected before they are hashed, at least 4. */
export function createBodyHasher(scratchOctets = scratchOctetsMax): BodyHasher {
  const sha256 = createHash('sha256');
  const scratch = Buffer.allocUnsafe(scratchOctets);
  const fullAt = scratchOctets - emittedOctetsMax;
  let state: State = { isBlank: true, isAfterCr: false, hasWhite: false, lineEnds: 0 };

  const flush = (used: number): number => {
    sha256.update(scratch.subarray(0, used));
    return 0;
  };

  return {
    update(piece) {
      // In variables of this call, not of the closure, and words by a loop of their own: 6.3 ns an octet become 2.8.
      let { isBlank, isAfterCr, hasWhite, lineEnds } = state;
      let used = 0;
      for (let i = 0; i < piece.length; i += 1) {
        const octet = piece[i] as number;
        if (octet === cr || octet === lf) {
          if (octet === cr || !isAfterCr) lineEnds += 1;
          isAfterCr = octet === cr;
          hasWhite = false;
          continue;
        }
        isAfterCr = false;
        // RFC 6376 §2.8: WSP is space and tab, not NBSP, form feed or vertical tab.
        if (octet === space || octet === tab) {
          hasWhite = true;
          continue;
        }
        for (; lineEnds > 0; lineEnds -= 1) {
          if (used > fullAt) used = flush(used);
          scratch[used++] = cr;
          scratch[used++] = lf;
        }
        if (used > fullAt) used = flush(used);
        if (hasWhite) scratch[used++] = space;
        hasWhite = false;
        isBlank = false;
        scratch[used++] = octet;
        const wordEnd = Math.min(piece.length - 1, i + fullAt - used);
        for (; i < wordEnd; i += 1) {
          const next = piece[i + 1] as number;
          if (next <= space) break;
          scratch[used++] = next;
        }
      }
      flush(used);
      state = { isBlank, isAfterCr, hasWhite, lineEnds };
    },
    digest() {
      // RFC 6376 §3.4.4: no body and a blank body are nothing; any other ends with one CRLF.
      if (!state.isBlank) sha256.update('\r\n');
      return sha256.digest('base64');
    },
  };
}

/** What is held back until an octet follows: at the end of a line and of the body it does not count. */
interface State {
  readonly isBlank: boolean;
  readonly isAfterCr: boolean;
  readonly hasWhite: boolean;
  readonly lineEnds: number;
}
