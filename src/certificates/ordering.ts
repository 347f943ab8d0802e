/**
 * Orders the certificates that are wanted and due, one at a time, and keeps what came of it: the renewal loop.
 *
 * Any number of processes may run it. A name is leased in its row (rows.ts) before anything is asked of the world; a failure puts
 * off that name alone, but for one: an authority that says that there were too many orders is left alone for an hour. As shipped
 * (no directory) it does nothing.
 */
import { randomBytes } from 'node:crypto';
import { X509Certificate } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import type { AddressGuard } from '../dns/address-guard.ts';
import type { Resolver } from '../dns/resolver.ts';
import type { Logger } from '../log.ts';
import type { Store } from '../store/orm.ts';
import type * as Acme from './acme.ts';
import { AcmeFailure } from './failure.ts';
import { findObstacle } from './reach.ts';
import {
  dropChallenge,
  keepIssued,
  noteAccount,
  noteWanted,
  openAccount,
  pauseAccount,
  putChallenge,
  putOff,
  releaseLease,
  takeDue,
  takeOrder,
  type Account,
  type Due,
} from './rows.ts';
import type { AcmeSettings } from './settings.ts';
import { nextTryAt, renewalAt } from './timing.ts';
import { wantedNames } from './wanted.ts';

export interface OrderingOptions {
  readonly store: Store;
  readonly log: Logger;
  readonly sealingKey: Buffer;
  /** As they are now; null: off. */
  readonly settings: () => AcmeSettings | null;
  /** The appliance's own names, and whether those of domains are served here. */
  readonly names: () => { readonly own: readonly string[]; readonly servesDomains: boolean };
  /** The operator's own files hold a certificate for it. */
  readonly isCovered: (name: string) => boolean;
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** A certificate was stored. */
  readonly onIssued: () => Promise<void>;
  readonly now: () => Date;
  /** In [0, 1). */
  readonly random: () => number;
  /** See Acme.AcmeAuthority. */
  readonly pollMs?: number;
  /** See ReachDependencies. */
  readonly reachPort?: number;
}

export interface Ordering {
  /** Orders what is due; resolves when nothing is any more. Rejects when the database is away. */
  run(): Promise<void>;
  /** From now on by itself. */
  start(): void;
  stop(): Promise<void>;
}

const LOOK_MS = 30_000;
/** Of one look; the rest is due at the next. */
const ORDERS_PER_LOOK = 25;
const LIMITED_PAUSE_MS = 3_600_000;
const PUT_OFF_SPREAD_MS = 60_000;
/** Of a stop; an order takes longer, and is taken up by who comes next. */
const STOP_MAX_MS = 1_000;

export function createOrdering(d: OrderingOptions): Ordering {
  let isStopping = false;
  let running: Promise<void> | null = null;
  let timer: NodeJS.Timeout | null = null;
  let held: Due | null = null;
  let wasAway = false;

  const run = (): Promise<void> =>
    (running ??= lookOnce().finally(() => {
      running = null;
    }));

  async function lookOnce(): Promise<void> {
    const settings = d.settings();
    if (settings === null) return;
    const { pool } = d.store;
    const wanted = await wantedNames(pool, d.names());
    const names = wanted.filter((name) => !d.isCovered(name));
    await noteWanted(pool, names, d.now());
    for (let count = 0; count < ORDERS_PER_LOOK && !isStopping; count += 1) {
      const account = await openAccount(pool, settings.directory, {
        sealingKey: d.sealingKey,
        newKey: async () => (await orders()).newKey(),
      });
      if (account.pausedUntil !== null && account.pausedUntil > d.now()) return;
      const due = await takeDue(pool, names, d.now());
      if (due === null) return;
      held = due;
      await take(due, settings, account);
      held = null;
    }
  }

  /** Rejects when the database is away; the lease ends by itself then. */
  async function take(due: Due, settings: AcmeSettings, account: Account): Promise<void> {
    const { name } = due;
    try {
      const obstacle = await probe(name);
      if (obstacle !== null) throw new AcmeFailure(obstacle, { kind: 'not_ready' });
      const authority: Acme.AcmeAuthority = {
        directory: settings.directory,
        eab: settings.eab,
        authorities: await readAuthorities(settings.caFile),
        resolver: d.resolver,
        ...(d.pollMs === undefined ? {} : { pollMs: d.pollMs }),
      };
      const url = await register(authority, account, settings.email);
      const at = await takeOrder(d.store, name, d.now());
      if (at !== null) {
        const error =
          'As many certificates as may be were ordered within an hour; it waits its turn.';
        const later = new Date(at.getTime() + PUT_OFF_SPREAD_MS * d.random());
        await putOff(d.store.pool, due, { at: later, error, counts: false });
        return;
      }
      await order(due, authority, { key: account.key, url });
    } catch (error) {
      if (!(error instanceof AcmeFailure)) throw error;
      await fail(due, settings, { account, failure: error });
    }
  }

  async function probe(name: string): Promise<string | null> {
    const token = randomBytes(32).toString('base64url');
    const answer = `${token}.self-check`;
    await putChallenge(d.store.pool, { token, keyAuthorization: answer }, d.now());
    try {
      const { resolver, guard, reachPort } = d;
      const via = { resolver, guard, ...(reachPort === undefined ? {} : { port: reachPort }) };
      return await findObstacle(via, name, { token, answer });
    } finally {
      await dropChallenge(d.store.pool, token);
    }
  }

  async function register(
    authority: Acme.AcmeAuthority,
    account: Account,
    email: string | null,
  ): Promise<string> {
    if (account.url !== null && account.contact === email) return account.url;
    const url = await (await orders()).registerAccount(authority, account, email);
    await noteAccount(d.store.pool, authority.directory, { url, contact: email });
    return url;
  }

  async function order(
    due: Due,
    authority: Acme.AcmeAuthority,
    account: { readonly key: string; readonly url: string },
  ): Promise<void> {
    const { pool } = d.store;
    const { orderCertificate } = await orders();
    const pair = await orderCertificate(authority, account, {
      name: due.name,
      put: (challenge) => putChallenge(pool, challenge, d.now()),
      drop: (token) => dropChallenge(pool, token),
    });
    const certificate = new X509Certificate(pair.cert);
    const notBefore = new Date(certificate.validFrom);
    const notAfter = new Date(certificate.validTo);
    const renewAt = renewalAt({ notBefore, notAfter }, d.random());
    const { sealingKey } = d;
    const kept = await keepIssued(pool, due, { pair, notBefore, notAfter, renewAt, sealingKey });
    if (!kept) return;
    d.log.info({ name: due.name, notAfter, renewAt }, 'a certificate was issued');
    await d.onIssued();
  }

  async function fail(
    due: Due,
    settings: AcmeSettings,
    { account, failure }: { readonly account: Account; readonly failure: AcmeFailure },
  ): Promise<void> {
    const { pool } = d.store;
    const [now, random] = [d.now(), d.random()];
    const { kind, askedMs } = failure;
    const count = due.failures + 1;
    const at = nextTryAt({ kind, count, askedMs }, { now, notAfter: due.notAfter, random });
    d.log.warn({ name: due.name, nextTryAt: at }, `no certificate: ${failure.message}`);
    if (kind === 'rate_limited') {
      await pauseAccount(pool, settings.directory, new Date(now.getTime() + LIMITED_PAUSE_MS));
    }
    if (failure.isAccountGone) {
      await noteAccount(pool, settings.directory, { url: null, contact: account.contact });
    }
    await putOff(pool, due, { at, error: failure.message, counts: true });
  }

  return {
    run,
    start() {
      const look = (): void =>
        void run().then(
          () => {
            wasAway = false;
          },
          (error: unknown) => {
            if (!wasAway && !isStopping) {
              d.log.warn({ err: error }, 'certificates cannot be ordered now');
            }
            wasAway = true;
          },
        );
      timer = setInterval(look, LOOK_MS);
      timer.unref();
      look();
    },
    async stop() {
      isStopping = true;
      if (timer !== null) clearInterval(timer);
      if (running === null) return;
      const late = new Promise<void>((resolve) => setTimeout(resolve, STOP_MAX_MS));
      await Promise.race([running.catch(() => undefined), late]);
      if (held !== null) await releaseLease(d.store.pool, held).catch(() => undefined);
    },
  };
}

/** Read only where certificates are ordered: it brings eight hundred files. */
const orders = (): Promise<typeof Acme> => import('./acme.ts');

/** Throws an AcmeFailure. */
async function readAuthorities(path: string | null): Promise<readonly string[]> {
  if (path === null) return [];
  try {
    return [await readFile(path, 'utf8')];
  } catch (error) {
    const { code = 'unreadable' } = error as NodeJS.ErrnoException;
    throw new AcmeFailure(`acme.ca_file of config/tls.json, ${path}, cannot be read (${code}).`, {
      kind: 'not_ready',
      cause: error,
    });
  }
}
