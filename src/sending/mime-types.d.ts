// The part of mime-types 3 that attachments.ts uses; the package brings no types.
declare module 'mime-types' {
  /** The type of a file name's extension, or false. */
  export function lookup(filename: string): string | false;
  /** The usual extension of a type, without the dot, or false. */
  export function extension(contentType: string): string | false;
}
