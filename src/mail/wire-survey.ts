/**
 * What the bytes of a message are, found while they arrive.
 *
 * In: the message in pieces, cut anywhere. Out: whether lines end as they must (a bare CR or LF is where servers
 * disagree about the end of a message), and whether it is 7-bit text with lines that every host takes.
 */
import { lineOctetsMax } from './header.ts';

export interface Survey {
  /** A CR without LF or an LF without CR (RFC 5321 §2.3.8). */
  readonly hasBareLineEnd: boolean;
  readonly hasNul: boolean;
  /** 7-bit, and no line of more than 998 octets (RFC 5322 §2.1.1). */
  readonly isPlain: boolean;
  /** Without its end. */
  readonly longestLineOctets: number;
}

const CR = 0x0d;
const LF = 0x0a;

export class WireSurvey implements Survey {
  hasNul = false;
  #bare = false;
  #isAscii = true;
  #longest = 0;
  #lineOctets = 0;
  #endsInCr = false;

  get hasBareLineEnd(): boolean {
    return this.#bare || this.#endsInCr;
  }

  get isPlain(): boolean {
    return this.#isAscii && this.longestLineOctets <= lineOctetsMax;
  }

  get longestLineOctets(): number {
    return Math.max(this.#longest, this.#lineOctets);
  }

  push(piece: Uint8Array): void {
    let lineOctets = this.#lineOctets;
    let afterCr = this.#endsInCr;
    let longest = this.#longest;
    let high = 0;
    for (let i = 0; i < piece.length; i += 1) {
      const octet = piece[i]!;
      high |= octet;
      if (octet === LF) {
        if (!afterCr) this.#bare = true;
        afterCr = false;
        if (lineOctets > longest) longest = lineOctets;
        lineOctets = 0;
        continue;
      }
      if (afterCr) this.#bare = true;
      afterCr = octet === CR;
      if (afterCr) continue;
      if (octet === 0) this.hasNul = true;
      lineOctets += 1;
    }
    if (high > 0x7f) this.#isAscii = false;
    this.#longest = longest;
    this.#lineOctets = lineOctets;
    this.#endsInCr = afterCr;
  }
}

/** The survey of bytes that are all there. */
export function surveyWire(bytes: Uint8Array): Survey {
  const survey = new WireSurvey();
  survey.push(bytes);
  return survey;
}
