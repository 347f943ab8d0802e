// What a signed link leads to, whoever reads it: bytes to download, or an email to look at.
import type { Readable } from 'node:stream';
import type { LinkKind, LinkTarget } from './signed-link.ts';

export interface LinkedFile {
  readonly kind: 'file';
  readonly filename: string;
  readonly contentType: string;
  readonly sizeBytes: number;
  /** To be read to its end or destroyed. */
  readonly content: Readable;
}

export interface LinkedEmail {
  readonly kind: 'email';
  readonly subject: string;
  readonly from: string;
  readonly to: readonly string[];
  readonly cc: readonly string[];
  readonly createdAt: Date;
  readonly html: string | null;
  readonly text: string | null;
}

/** Null: what the link named is gone. */
export type OpenLink = (target: LinkTarget) => Promise<LinkedFile | LinkedEmail | null>;

export type LinkOpeners = { readonly [kind in LinkKind]: OpenLink };
