// A mail host with STARTTLS for tests: one certificate, which may be changed, and what it heard before and after TLS.
//
// In: PEM and TLS options, or how its STARTTLS is broken. Out: a port, the sessions with their commands, and how many of
// them reached MAIL. Real sockets; the TLS server is Node's. A message is taken and thrown away.
import { once } from 'node:events';
import { createServer, type AddressInfo, type Socket } from 'node:net';
import { createSecureContext, TLSSocket, type SecureContextOptions } from 'node:tls';

export interface TlsHostOptions extends SecureContextOptions {
  /** `none`: not offered. `refuse`: offered, and answered with 454. `garbage`: 220, and then no TLS. */
  readonly starttls?: 'good' | 'none' | 'refuse' | 'garbage';
  /** Written in plaintext behind the 220, in the same segment. */
  readonly injected?: string;
  readonly host?: string;
  readonly port?: number;
}

export interface TlsHostSession {
  /** `C: EHLO x`, with `TLS` where the handshake was. */
  readonly transcript: string[];
  servername: string | null;
}

export interface TlsHost {
  readonly port: number;
  readonly sessions: readonly TlsHostSession[];
  /** Recipients of messages that were taken, and whether over TLS. */
  readonly taken: readonly { readonly rcpt: string; readonly isSecure: boolean }[];
  present(pair: SecureContextOptions): void;
  stop(): Promise<void>;
}

const LINE_MAX = 64 * 1024;

export async function startTlsHost(options: TlsHostOptions): Promise<TlsHost> {
  const { starttls = 'good', injected = '', host = '127.0.0.1', port = 0, ...pair } = options;
  let context = starttls === 'good' ? createSecureContext(pair) : null;
  const sessions: TlsHostSession[] = [];
  const taken: { rcpt: string; isSecure: boolean }[] = [];
  const sockets = new Set<Socket>();

  const server = createServer({ noDelay: true }, (plain) => {
    sockets.add(plain);
    plain.on('close', () => sockets.delete(plain));
    const session: TlsHostSession = { transcript: [], servername: null };
    sessions.push(session);
    converse(plain, session, null);
    plain.write('220 mx.test ESMTP\r\n');
  });

  function converse(socket: Socket, session: TlsHostSession, tls: TLSSocket | null): void {
    let pending = '';
    let rcpt = '';
    let isBody = false;
    socket.on('error', () => undefined);
    const say = (text: string): void => void (socket.writable && socket.write(text));
    const onData = (chunk: Buffer): void => {
      pending += chunk.toString('latin1');
      if (pending.length > LINE_MAX) socket.destroy();
      for (let end = pending.indexOf('\r\n'); end !== -1; end = pending.indexOf('\r\n')) {
        const line = pending.slice(0, end);
        pending = pending.slice(end + 2);
        if (isBody) {
          if (line !== '.') continue;
          isBody = false;
          taken.push({ rcpt, isSecure: tls !== null });
          say('250 2.0.0 taken\r\n');
          continue;
        }
        session.transcript.push(`C: ${line}`);
        const verb = line.split(' ')[0]?.toUpperCase();
        if (verb === 'EHLO') {
          const offers = tls === null && starttls !== 'none' ? '250-STARTTLS\r\n' : '';
          say(`250-mx.test\r\n${offers}250 ENHANCEDSTATUSCODES\r\n`);
        } else if (verb === 'STARTTLS') upgrade();
        else if (verb === 'RCPT') {
          rcpt = /<([^>]*)>/.exec(line)?.[1] ?? '';
          say('250 2.1.5 ok\r\n');
        } else if (verb === 'DATA') {
          isBody = true;
          say('354 go ahead\r\n');
        } else if (verb === 'QUIT') socket.end('221 2.0.0 bye\r\n');
        else say('250 2.0.0 ok\r\n');
      }
    };
    socket.on('data', onData);

    function upgrade(): void {
      if (starttls === 'none') return say('502 5.5.1 not here\r\n');
      if (starttls === 'refuse') return say('454 4.7.0 TLS not available\r\n');
      if (starttls === 'garbage') return void socket.end('220 go ahead\r\nthis is not TLS\r\n');
      socket.removeListener('data', onData);
      socket.write(`220 go ahead\r\n${injected}`);
      const secured = new TLSSocket(socket, {
        isServer: true,
        ...(context === null ? {} : { secureContext: context }),
        SNICallback(name, done) {
          session.servername = name;
          done(null);
        },
      });
      secured.on('error', () => socket.destroy());
      secured.once('secure', () => session.transcript.push('TLS'));
      converse(secured, session, secured);
    }
  }

  server.listen(port, host);
  await once(server, 'listening');
  return {
    port: (server.address() as AddressInfo).port,
    sessions,
    taken,
    present(next) {
      context = createSecureContext({ ...pair, ...next });
    },
    async stop() {
      for (const socket of sockets) socket.destroy();
      server.close();
      await once(server, 'close');
    },
  };
}
