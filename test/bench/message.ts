// The message that both sides carry: 2 KB of 7-bit text in lines of 80, as smtp-source makes it, one recipient.
export const AUTHOR = 'bench@mailstead.test';
export const AUTHOR_DOMAIN = 'mailstead.test';
export const RECIPIENT = 'one@recipient.test';
export const TEXT_BYTES = 2_048;
const LINE_BYTES = 80;

export function makeText(): string {
  const line = `${'X'.repeat(LINE_BYTES - 2)}\r\n`;
  return line.repeat(Math.ceil(TEXT_BYTES / LINE_BYTES)).slice(0, TEXT_BYTES - 2) + '\r\n';
}

/** The bytes of one POST /emails. */
export function makeRequest(port: number, key: string, recipient = RECIPIENT): string {
  const body = JSON.stringify({
    from: `Bench <${AUTHOR}>`,
    to: [recipient],
    subject: 'A message of the benchmark',
    text: makeText(),
  });
  return [
    'POST /emails HTTP/1.1',
    `Host: 127.0.0.1:${port}`,
    `Authorization: Bearer ${key}`,
    'Content-Type: application/json',
    `Content-Length: ${Buffer.byteLength(body)}`,
    '',
    body,
  ].join('\r\n');
}
