// What every SMTP listener of ours shares: smtp-server speaks the protocol, and the two subclasses here are the
// only code that touches its inside, which package.json pins. A listener greets at once, says its own
// enhanced status codes, keeps addresses as they were written, and can say goodbye to each of its clients.
import { once } from 'node:events';
import type { AddressInfo, Socket } from 'node:net';
import { SMTPServer, type SMTPServerOptions } from 'smtp-server';
import { SMTPConnection } from 'smtp-server/lib/smtp-connection.js';
import type { SMTPConnectionOptions } from 'smtp-server/lib/smtp-connection.js';

/** A reply with its enhanced status code in front of the text (RFC 2034 §4). */
export interface Reply {
  readonly code: number;
  readonly text: string;
}

/** smtp-server takes refusals as errors. */
export function refusal({ code, text }: Reply): Error {
  return Object.assign(new Error(text), { responseCode: code });
}

/** Whom a listener does not serve, and what it says when it ends. */
export interface ListenerRules {
  /** Connections served at a time; one more is told `tooMany` and closed. */
  readonly connectionsMax: number;
  readonly tooMany: Reply;
  readonly stopping: Reply;
  /** Other words for a reply of smtp-server's own; absent: its words. */
  readonly reword?: (reply: Said, isSecure: boolean) => Said['data'];
}

/** What is about to be said. */
export interface Said {
  readonly code: number;
  readonly data: string | readonly string[] | null;
}

/** Makes our connections and can reach each of them. */
export class Listener extends SMTPServer {
  readonly rules: ListenerRules;
  /** By session id, until the socket is closed. `connections` forgets them when closing begins. */
  readonly #live = new Map<string, ListenerConnection>();

  constructor(options: SMTPServerOptions, rules: ListenerRules) {
    super(options);
    this.rules = rules;
  }

  override connect(socket: Socket, options?: SMTPConnectionOptions | null): void {
    const connection = new ListenerConnection(this, socket, options);
    this.connections.add(connection);
    this.#live.set(connection.id, connection);
    connection.on('error', (error: Error) => this.emit('error', error));
    connection.on('closed', () => this.#live.delete(connection.id));
    connection.init();
  }

  /** Opens the port (0: any free one), on all interfaces where `host` is null; the port. Rejects when it cannot. */
  async open(port: number, host: string | null): Promise<number> {
    const listening = once(this.server, 'listening');
    this.listen(port, ...(host === null ? [] : [host]));
    await listening;
    return (this.server.address() as AddressInfo).port;
  }

  /** Resolves when no socket is left: idle clients are dismissed at once, a running transaction has `graceMs`. */
  async end(graceMs: number): Promise<void> {
    const closed = once(this.server, 'close');
    this.server.close();
    this.dismissIdle();
    const timer = setTimeout(() => this.destroyAll(), graceMs);
    await closed;
    clearTimeout(timer);
  }

  /** Says goodbye, and closes. */
  dismiss(id: string): void {
    this.#live.get(id)?.send(this.rules.stopping.code, this.rules.stopping.text);
  }

  /** Also those whose TLS handshake is not over: nothing can be said to them, so they are closed. */
  dismissIdle(): void {
    for (const topmost of this._pendingSockets.values()) topmost.destroy();
    for (const connection of this.#live.values()) {
      if (!connection.isInTransaction()) this.dismiss(connection.id);
    }
  }

  /** Ends a TLS handshake that is still under way; the topmost socket goes, as smtp-server does it. */
  dropHandshake(socket: Socket): void {
    this._pendingSockets.get(socket)?.destroy();
  }

  /** Closes without a word. */
  drop(id: string): void {
    this.#live.get(id)?._socket.destroy();
  }

  destroyAll(): void {
    for (const id of this.#live.keys()) this.drop(id);
  }
}

const ENHANCED_CODE = /^[245]\.\d{1,3}\.\d{1,3} /;
/** A path whose local part is quoted, which may hold spaces, `@` and brackets (RFC 5321 §4.1.2). */
const QUOTED_PATH = /^([^:<]*:\s*<)("(?:[^"\\\p{Cc}]|\\\P{Cc})*")(@[^<>@\s]+>.*)$/su;
/** The address in a path, without the source route. */
const PATH = /^[^<]*<(?:@[^<>:]*:)?([^<>\s]+)>/u;

class ListenerConnection extends SMTPConnection {
  isInTransaction(): boolean {
    // There is no session before the greeting.
    return Boolean(this.session.envelope?.mailFrom);
  }

  // Greets at once: smtp-server waits 100 ms here, to catch clients that talk too early.
  override init(): void {
    this._setListeners(() => {
      const { connectionsMax, tooMany } = (this._server as Listener).rules;
      if (this._server.connections.size <= connectionsMax) return this.connectionReady();
      this.send(tooMany.code, tooMany.text);
    });
  }

  // smtp-server derives the enhanced code from the reply code alone; ours stands in the text.
  override send(code: number, data?: string | string[] | null, context?: string | false): void {
    const { reword } = (this._server as Listener).rules;
    const said = reword?.({ code, data: data ?? null }, this.secure) ?? data;
    const carriesOwn = typeof said === 'string' && ENHANCED_CODE.test(said);
    super.send(
      code,
      typeof said === 'object' && said ? [...said] : said,
      carriesOwn ? false : context,
    );
  }

  // Keeps the address as it was written: smtp-server turns A-labels into Unicode and knows no quotes.
  override _parseAddressCommand(
    name: string,
    command: Buffer | string,
  ): ReturnType<SMTPConnection['_parseAddressCommand']> {
    const line = command.toString();
    const [, before, quoted, after] = QUOTED_PATH.exec(line) ?? [];
    const plain = quoted === undefined ? line : `${before}quoted${after}`;
    const parsed = super._parseAddressCommand(name, plain);
    const written = PATH.exec(plain)?.[1];
    if (parsed === false || written === undefined) return parsed;
    const address = quoted === undefined ? written : `${quoted}${written.slice('quoted'.length)}`;
    return { ...parsed, address };
  }

  override _onClose(): void {
    super._onClose();
    this.emit('closed');
  }
}
