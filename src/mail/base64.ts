/**
 * Reads base64 (RFC 4648 §4 and §5) piece by piece and strictly: Buffer.from drops what it does not know, and so
 * would make another file of a damaged one.
 *
 * In: text, cut anywhere. Out: the octets, and at the end what was wrong. White space is read over and both alphabets
 * are taken, since programs write either; padding may be missing, but not be wrong.
 */
import { Buffer } from 'node:buffer';

const PLAIN = /^[A-Za-z0-9+/]*$/;
const EITHER_ALPHABET = /^[A-Za-z0-9+/_-]*$/;
const WHITE_SPACE = /[ \t\r\n\f]+/g;
const EMPTY = Buffer.alloc(0);

export class Base64Reader {
  #rest = '';
  #padding = 0;
  #problem: string | null = null;

  /** What is wrong, as the end of a sentence about the text; null while nothing is. */
  get problem(): string | null {
    return this.#problem;
  }

  /** The octets that are complete; empty once there was a problem. */
  push(text: string): Buffer {
    if (this.#problem !== null) return EMPTY;
    const symbols = this.#padding === 0 && PLAIN.test(text) ? text : this.#symbolsOf(text);
    const all = this.#rest + symbols;
    const whole = all.length - (all.length % 4);
    this.#rest = all.slice(whole);
    return Buffer.from(whole === all.length ? all : all.slice(0, whole), 'base64');
  }

  /** The last octets. */
  end(): Buffer {
    if (this.#problem === null) {
      if (this.#rest.length === 1) this.#problem = 'ends in the middle of a group of four';
      else if (
        this.#padding > 0 &&
        (this.#padding > 2 || this.#rest.length + this.#padding !== 4)
      ) {
        this.#problem = 'has the wrong number of `=` at its end';
      }
    }
    return this.#problem === null ? Buffer.from(this.#rest, 'base64') : EMPTY;
  }

  /** Without white space and padding; both are rare in large texts. */
  #symbolsOf(text: string): string {
    const dense = text.replace(WHITE_SPACE, '');
    const first = dense.indexOf('=');
    const symbols = first === -1 ? dense : dense.slice(0, first);
    const rest = dense.slice(symbols.length);
    if (this.#padding > 0 && symbols !== '') this.#problem = 'goes on after its padding';
    else if (/[^=]/.test(rest)) {
      this.#problem = /^=*[A-Za-z0-9+/_-]/.test(rest)
        ? 'goes on after its padding'
        : 'has characters that are not base64';
    } else if (!EITHER_ALPHABET.test(symbols)) this.#problem = 'has characters that are not base64';
    this.#padding += rest.length;
    return this.#problem === null ? symbols : '';
  }
}

/** All of a text at once. */
export function readBase64(
  text: string,
): { readonly bytes: Buffer; readonly problem: null } | { readonly problem: string } {
  const reader = new Base64Reader();
  const start = reader.push(text);
  const end = reader.end();
  if (reader.problem !== null) return { problem: reader.problem };
  return { bytes: end.length === 0 ? start : Buffer.concat([start, end]), problem: null };
}
