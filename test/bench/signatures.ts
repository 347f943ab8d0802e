// Whether both sides really sign: reads the messages that the sink kept of a sample. OpenDKIM's key is ours, so
// its signatures are verified; of the product's it is looked at which algorithms sign (its own tests verify).
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import { BenchFailed } from './children.ts';

/** Dumped messages, with CRLF and without what smtp-sink puts on top. */
function readMessages(folder: string): readonly string[] {
  return readdirSync(folder).map((name) =>
    readFileSync(join(folder, name), 'latin1')
      .replace(/^(?:X-[^\n]*\n)*/, '')
      // smtp-sink adds one blank line at the end; a canonical body has none.
      .replaceAll('\n', '\r\n'),
  );
}

/** The algorithms of the DKIM-Signature fields that every message carries. Throws where one has none. */
export function signedWith(folder: string): readonly string[] {
  const perMessage = readMessages(folder).map((message) => {
    const header = message.split('\r\n\r\n')[0]?.replace(/\r\n[ \t]+/g, ' ') ?? '';
    return [...header.matchAll(/^DKIM-Signature:.*?\ba=([\w-]+)/gm)].map(([, name]) => name ?? '');
  });
  const [first] = perMessage;
  if (first === undefined || perMessage.some((names) => names.join() !== first.join())) {
    throw new BenchFailed(`the sample is not signed alike: ${JSON.stringify(perMessage)}`);
  }
  if (first.length === 0) throw new BenchFailed('the sample is not signed');
  return first;
}

/** Throws BenchFailed unless every message has a valid signature by the key. */
export async function verifySamples(folder: string, publicKey: string): Promise<void> {
  for (const message of readMessages(folder)) {
    const { results } = await dkimVerify(message, {
      resolver: () => Promise.resolve([[`v=DKIM1; k=rsa; p=${publicKey}`]]),
    });
    const words = results.map(({ status }) => `${status.result} ${status.comment ?? ''}`);
    if (!words.some((word) => word.startsWith('pass'))) {
      throw new BenchFailed(
        `a sample has no valid signature: ${words.join(', ') || 'none at all'}`,
      );
    }
  }
}
