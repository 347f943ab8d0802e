// The part of libmime 5.4 that we use; the package brings no types.
declare module 'libmime' {
  const libmime: {
    parseHeaderValue(text: string): { value: string; params: Record<string, string> };
    buildHeaderValue(structured: { value: string; params: Record<string, string> }): string;
    /** RFC 2047; words that cannot be read stay as they are. */
    decodeWords(text: string): string;
  };
  export default libmime;
}
declare module 'libmime/lib/charset.js' {
  const charset: {
    /** Throws on a charset that it does not know. */
    decode(bytes: Buffer, charset: string): string;
  };
  export default charset;
}
