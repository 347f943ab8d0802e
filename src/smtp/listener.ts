// What every SMTP listener of ours shares: smtp-server speaks the protocol, and the two subclasses here are the
// only code that touches its inside, which package.json pins. A listener greets at once, says its own
// enhanced status codes, keeps addresses as they were written, sees what each of its clients owes it, and can say
// goodbye to each of them.
import { once } from 'node:events';
import type { AddressInfo, Socket } from 'node:net';
import { SMTPServer, type SMTPServerOptions, type SMTPServerSession } from 'smtp-server';
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
  /** Before anything is kept for a client: why it may not come in, or null; absent: `connectionsMax` decides. */
  readonly admit?: (address: string) => Reply | null;
  /** Whoever was admitted is gone; the address as `admit` heard it. */
  readonly onGone?: (address: string) => void;
  /** Whether a peer with this address begins with a PROXY header; absent: nobody does. */
  readonly isProxy?: (address: string) => boolean;
  /** Before a command is run: what is said instead of running it; a 421 closes. */
  readonly judge?: (session: SMTPServerSession, verb: string) => Reply | null;
  /** Each reply that was said. */
  readonly onReply?: (session: SMTPServerSession, code: number) => void;
  /** Whatever stands behind EHLO and HELO is a name, cleaned and shortened. */
  readonly takesAnyName?: boolean;
  /** Senders that old systems have and RFC 5321 §4.1.2 does not: `a..b@`, `a.@`, and domains with an underscore. */
  readonly takesOldSenders?: boolean;
}

/** One connection, as it is now. */
export interface Life {
  readonly id: string;
  /** Null: nothing, we owe the client an answer, or it is on its way out. */
  readonly owes: 'command' | 'message' | null;
  /** Of our last reply, as `performance.now()` tells it. */
  readonly saidAtMs: number;
  readonly isInTransaction: boolean;
  /** Of the message that is under way. */
  readonly messageBytes: number;
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
    if (socket.destroyed) return;
    // A proxy may write an address in another way than the session has it.
    const address = (options?.remoteAddress ?? socket.remoteAddress ?? '').replace(/^::ffff:/i, '');
    const refused = this.#admit(address);
    if (refused !== null) return showOut(socket, refused);
    const connection = new ListenerConnection(this, socket, options);
    this.connections.add(connection);
    this.#live.set(connection.id, connection);
    connection.on('error', (error: Error) => this.emit('error', error));
    connection.once('closed', () => {
      this.#live.delete(connection.id);
      this.rules.onGone?.(address);
    });
    connection.init();
  }

  #admit(address: string): Reply | null {
    const { connectionsMax, tooMany, admit } = this.rules;
    if (admit !== undefined) return admit(address);
    return this.connections.size >= connectionsMax ? tooMany : null;
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
  dismiss(id: string, reply: Reply = this.rules.stopping): void {
    const connection = this.#live.get(id);
    connection?.send(reply.code, reply.text);
    connection?.leave();
  }

  *lives(): Iterable<Life> {
    for (const connection of this.#live.values()) yield connection.life();
  }

  override _expectsProxyHeader({ remoteAddress = '' }: Socket): boolean {
    return this.rules.isProxy?.(remoteAddress.replace(/^::ffff:/i, '')) ?? false;
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

/** RFC 5321 §4.5.3.1.3, where smtp-server sees only a part of it: a path less its angle brackets. */
const ADDRESS_OCTETS_MAX = 254;
/** As long as it was, in a form that smtp-server knows. */
const modern = (path: string): string =>
  path.replace(
    /([^<>@:]+)@([^<>@:]+)>$/u,
    (_, local: string, domain: string) =>
      `${local.replaceAll('.', 'x')}@${domain.replaceAll('_', 'x')}>`,
  );

/** Behind EHLO and HELO; more than RFC 1035 gives a name is cut off. */
const GREETED_AS = /^(EHLO|HELO)\s+(\S.*)$/is;
const CLIENT_NAME_MAX = 255;
/** Whoever is shown out has this long to hear why; at the door, where many may stand, less. */
const LEAVING_MAX_MS = 1_000;
const TURNED_AWAY_MAX_MS = 200;

/** Costs no more than its socket. */
function showOut(socket: Socket, { code, text }: Reply): void {
  socket.on('error', ignore);
  socket.resume().end(`${code} ${text}\r\n`);
  setTimeout(destroy, TURNED_AWAY_MAX_MS, socket).unref();
}

const ignore = (): void => undefined;
const destroy = (socket: Socket): void => void socket.destroy();

class ListenerConnection extends SMTPConnection {
  #saidAtMs = performance.now();

  get #rules(): ListenerRules {
    return (this._server as Listener).rules;
  }

  life(): Life {
    const isOurTurn =
      !this._ready ||
      this._handlerPending ||
      (Boolean(this._dataStream) && this._parser !== false && !this._parser._dataMode);
    return {
      id: this.id,
      owes: this._closing || isOurTurn ? null : this._dataStream ? 'message' : 'command',
      saidAtMs: this.#saidAtMs,
      isInTransaction: this.isInTransaction(),
      messageBytes: this._dataStream && this._parser ? this._parser.dataBytes : 0,
    };
  }

  /** Closes, and does not wait long for the client to do the same. */
  leave(): void {
    this.close();
    setTimeout(destroy, LEAVING_MAX_MS, this._socket).unref();
  }

  isInTransaction(): boolean {
    // There is no session before the greeting.
    return Boolean(this.session.envelope?.mailFrom);
  }

  // Greets at once: smtp-server waits 100 ms here, to catch clients that talk too early.
  override init(): void {
    this._setListeners(() => this.connectionReady());
  }

  override _refuse(error: Error, context?: string | false): void {
    super._refuse(error, context);
    this.leave();
  }

  override _onCommand(command: Buffer, callback?: () => void): void {
    const { judge, takesAnyName } = this.#rules;
    const verb = command.toString('latin1').split(' ', 1)[0]?.toUpperCase() ?? '';
    const refused = this._ready && !this._upgrading ? judge?.(this.session, verb) : null;
    if (refused) {
      this.send(refused.code, refused.text);
      if (refused.code === 421) return this.leave();
      if (callback) setImmediate(callback);
      return;
    }
    const [, greeting, name] =
      takesAnyName === true ? (GREETED_AS.exec(command.toString()) ?? []) : [];
    super._onCommand(
      name === undefined
        ? command
        : Buffer.from(
            `${greeting} ${name
              .trim()
              .replace(/[\p{Cc}\s]/gu, '?')
              .slice(0, CLIENT_NAME_MAX)}`,
          ),
      callback,
    );
  }

  // smtp-server derives the enhanced code from the reply code alone; ours stands in the text.
  override send(code: number, data?: string | string[] | null, context?: string | false): void {
    const { reword, onReply } = this.#rules;
    const said = reword?.({ code, data: data ?? null }, this.secure) ?? data;
    const carriesOwn = typeof said === 'string' && ENHANCED_CODE.test(said);
    super.send(
      code,
      typeof said === 'object' && said ? [...said] : said,
      carriesOwn ? false : context,
    );
    this.#saidAtMs = performance.now();
    onReply?.(this.session, code);
  }

  // Keeps the address as it was written: smtp-server turns A-labels into Unicode and knows no quotes.
  override _parseAddressCommand(
    name: string,
    command: Buffer | string,
  ): ReturnType<SMTPConnection['_parseAddressCommand']> {
    const line = command.toString();
    const [, before, quoted, after] = QUOTED_PATH.exec(line) ?? [];
    const plain = quoted === undefined ? line : `${before}quoted${after}`;
    const isOld = this.#rules.takesOldSenders === true && name === 'mail from';
    const parsed = super._parseAddressCommand(name, isOld ? plain.replace(PATH, modern) : plain);
    const written = PATH.exec(plain)?.[1];
    if (parsed === false || written === undefined) return parsed;
    const address = quoted === undefined ? written : `${quoted}${written.slice('quoted'.length)}`;
    return Buffer.byteLength(address) > ADDRESS_OCTETS_MAX ? false : { ...parsed, address };
  }

  override _onClose(): void {
    super._onClose();
    this.emit('closed');
  }
}
