// The part of mailauth 7.1.0 that verdicts-signatures.ts builds on; the package brings types for what is around it.
declare module 'mailauth/lib/dkim/dkim-verifier.js' {
  import type { Writable } from 'node:stream';
  import type { ARCData, DKIMResult, DKIMVerifyOptions } from 'mailauth';

  export interface SignatureHeader {
    readonly type: 'DKIM' | 'ARC';
    readonly signingDomain?: string;
    readonly selector?: string;
    readonly parsed?: Readonly<Record<string, { readonly value?: unknown } | undefined>>;
    /** Why it is left alone. */
    skip?: string;
  }

  export interface ParsedHeaders {
    readonly parsed: { readonly key: string; readonly casedKey: string; readonly line: Buffer }[];
    readonly original: Buffer;
  }

  /** Written to like a file; the results are there when it has finished. */
  export class DkimVerifier extends Writable {
    constructor(options: DKIMVerifyOptions);
    headers: ParsedHeaders;
    readonly headerFrom: string[];
    readonly fromFields: number;
    readonly results: DKIMResult[];
    /** In the order of the message; the newest ARC-Message-Signature comes last. */
    readonly signatureHeaders: SignatureHeader[];
    readonly arc: ARCData;
    readonly bodyHashes: Map<string, unknown>;
    messageHeaders(headers: ParsedHeaders): Promise<void>;
    prepareSignature(header: SignatureHeader): void;
    addBodyHash(canonicalization: string, hash: string, lengthMax: number | ''): string;
  }
}
