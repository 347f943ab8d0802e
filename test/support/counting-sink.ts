// A peer outside of the program that counts what it acknowledged, by Message-ID. It is not killed with
// the program, so it can testify.
import { SMTPServer } from 'smtp-server';

export interface CountingSink {
  readonly port: number;
  /** How often each Message-ID was acknowledged with 250. */
  readonly counts: ReadonlyMap<string, number>;
  stop(): Promise<void>;
}

export async function startCountingSink(): Promise<CountingSink> {
  const counts = new Map<string, number>();
  const server = new SMTPServer({
    disabledCommands: ['AUTH', 'STARTTLS'],
    disableReverseLookup: true,
    logger: false,
    onData(stream, _session, callback) {
      const chunks: Buffer[] = [];
      stream.on('data', (chunk: Buffer) => chunks.push(chunk));
      stream.on('end', () => {
        const id = /^Message-ID: (<[^>]+>)/im.exec(Buffer.concat(chunks).toString('latin1'))?.[1];
        if (id !== undefined) counts.set(id, (counts.get(id) ?? 0) + 1);
        callback();
      });
    },
  });
  server.on('error', () => undefined); // a killed client is not news here
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return {
    port: (server.server.address() as { port: number }).port,
    counts,
    stop: () => new Promise((resolve) => server.close(resolve)),
  };
}
