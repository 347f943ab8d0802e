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
  let used = 0;
  let isBlank = true;
  let afterCr = false;
  /** Held back until an octet follows: at the end of a line and of the body they do not count. */
  let heldWhite = false;
  let heldLineEnds = 0;

  const flush = (): void => {
    sha256.update(scratch.subarray(0, used));
    used = 0;
  };
  const releaseLineEnds = (): void => {
    for (; heldLineEnds > 0; heldLineEnds -= 1) {
      if (used + emittedOctetsMax > scratch.length) flush();
      scratch[used++] = cr;
      scratch[used++] = lf;
    }
  };

  return {
    update(piece) {
      for (let i = 0; i < piece.length; i += 1) {
        const octet = piece[i] as number;
        if (octet === cr || octet === lf) {
          if (octet === cr || !afterCr) heldLineEnds += 1;
          afterCr = octet === cr;
          heldWhite = false;
          continue;
        }
        afterCr = false;
        // RFC 6376 §2.8: WSP is space and tab, not NBSP, form feed or vertical tab.
        if (octet === space || octet === tab) {
          heldWhite = true;
          continue;
        }
        if (heldLineEnds > 0) releaseLineEnds();
        if (used + emittedOctetsMax > scratch.length) flush();
        if (heldWhite) {
          scratch[used++] = space;
          heldWhite = false;
        }
        scratch[used++] = octet;
        isBlank = false;
      }
    },
    digest() {
      // RFC 6376 §3.4.4: no body and a blank body are nothing; any other ends with one CRLF.
      heldLineEnds = isBlank ? 0 : 1;
      releaseLineEnds();
      flush();
      return sha256.digest('base64');
    },
  };
}
