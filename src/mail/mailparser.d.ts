// The part of mailparser 3.9 that parse.ts uses; the package brings no types.
declare module 'mailparser' {
  export interface ParsedAddress {
    /** Empty for a group. */
    readonly address?: string;
    readonly name: string;
    readonly group?: readonly ParsedAddress[];
  }
  interface AddressField {
    readonly value: readonly ParsedAddress[];
  }
  export interface ParsedMail {
    readonly headerLines?: readonly { readonly key: string; readonly line: string }[];
    readonly from?: AddressField;
    /** A list when the field occurs more than once. */
    readonly to?: AddressField | readonly AddressField[];
    readonly cc?: AddressField | readonly AddressField[];
    readonly bcc?: AddressField | readonly AddressField[];
    readonly replyTo?: AddressField | readonly AddressField[];
    readonly subject?: string;
    readonly messageId?: string;
    readonly inReplyTo?: string;
    readonly references?: string | readonly string[];
    readonly text?: string;
    readonly html?: string | false;
    readonly attachments: readonly {
      readonly filename?: string;
      /** False for a field that has no value. */
      readonly contentType?: string | false;
      readonly contentDisposition?: string;
      readonly cid?: string;
      readonly related?: boolean;
      readonly content: Buffer;
    }[];
  }
  export function simpleParser(source: Buffer, options: object): Promise<ParsedMail>;
}
