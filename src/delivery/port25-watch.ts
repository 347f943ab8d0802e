// The watch over port 25 of one worker: what its own dialling finds out (port25.ts) and what other workers have found
// out, shared through the table `egress`. While an egress is blocked, its mail is not claimed, one probe a minute is
// let through, and the operator has been told once.
import { connect, isIPv6 } from 'node:net';
import type { AddressGuard } from '../dns/address-guard.ts';
import type { Resolver } from '../dns/resolver.ts';
import type { Logger } from '../log.ts';
import {
  giveBackUnconnected,
  keepBlocked,
  readBlockedEgresses,
  reportBlocked,
  reportOpen,
  takeProbe,
} from '../queue/egress-state.ts';
import type { Store } from '../store/orm.ts';
import type { DeliveryPolicy, Egress } from './egress.ts';
import {
  createPort25Detector,
  kindOfFailure,
  WINDOW_MS,
  type Block,
  type PortWatch,
} from './port25.ts';

export interface PortWatchOptions {
  readonly store: Store;
  readonly log: Logger;
  readonly policy: () => Pick<DeliveryPolicy, 'pools' | 'port25Probes'>;
  readonly resolver: Pick<Resolver, 'a' | 'aaaa'>;
  readonly guard: AddressGuard;
  readonly port: number;
  /** What cannot leave by port 25 goes elsewhere, so no delivery shows when the port opens. */
  readonly maySpill: () => boolean;
  /** An egress got blocked or opened: what waits may go, or go elsewhere. */
  readonly onChange: () => void;
}

export interface RunningPortWatch extends PortWatch {
  stop(): Promise<void>;
}

/** How often the table is looked at. */
const SYNC_MS = 2_000;
const PROBE_EVERY_MS = 60_000;
const ACTIVE_PROBE_EVERY_MS = 10 * 60_000;
/** At the start, of several workers one dials. */
const FIRST_PROBE_MS = 30_000;
/** A success is worth a row's update no more often than this. */
const SUCCESS_EVERY_MS = 60_000;
const DIAL_MAX_MS = 30_000;
/** A dial that was under way when the block was found out ends this much later at most. */
const LATE_DIALS_MS = 4 * DIAL_MAX_MS;
const CHANGES_MAX = 1_000;

interface Known extends Block {
  /** Monotonic, of this process. */
  readonly foundAt: number;
  readonly silent: readonly string[];
}

export function watchPort25(options: PortWatchOptions): RunningPortWatch {
  const { store, log } = options;
  const now = (): number => performance.now();
  const detector = createPort25Detector({ now });
  const blocked = new Map<string, Known>();
  /** Turns that nobody has used yet, and since when. */
  const turns = new Map<string, number>();
  const succeededAt = new Map<string, number>();
  /** What has to be written down, in order; never the same twice. */
  const changes = new Map<string, 'blocked' | 'open'>();
  let activeProbeAt = -Infinity;
  let stopped = false;

  const open = (egress: string): void => {
    detector.clear(egress);
    turns.delete(egress);
    if (blocked.delete(egress)) options.onChange();
  };

  const tell = (egress: string, reason: string): void => {
    log.error(
      { egress, reason },
      'port 25 is blocked: no connection to a mail host succeeds, so mail waits and no attempt is counted. ' +
        'Many cloud providers block port 25; ask yours to open it, or send through a relay: MAILSTEAD_DELIVERY=smarthost, ' +
        'or MAILSTEAD_SMARTHOST_URL with "spill": { "smarthost": true } in delivery.json',
    );
  };

  const writeDown = async (egress: string, change: 'blocked' | 'open'): Promise<void> => {
    if (change === 'open') {
      if (await reportOpen(store.pool, egress)) log.info({ egress }, 'port 25 is open again');
      return;
    }
    const known = blocked.get(egress);
    if (known === undefined) return;
    const told = await reportBlocked(store.pool, {
      name: egress,
      reason: known.reason,
      silent: known.silent,
      windowMs: WINDOW_MS,
    });
    if (told === null) return open(egress); // another worker's connections succeed
    blocked.set(egress, { ...known, since: told.since });
    if (told.isNew) tell(egress, known.reason);
    await giveBack(egress);
  };

  const giveBack = async (egress: string): Promise<void> => {
    const count = await giveBackUnconnected(store, {
      withinMs: WINDOW_MS,
      sources: addressesOf(egress),
    });
    if (count > 0) log.info({ egress, count }, 'attempts that met the blocked port do not count');
  };

  const addressesOf = (name: string): readonly string[] =>
    egresses()
      .filter((egress) => egress.name === name)
      .flatMap(({ ipv4, ipv6 }) => [ipv4, ipv6])
      .filter((address) => address !== null);

  const egresses = (): readonly Egress[] => {
    const byName = new Map(
      [...options.policy().pools.values()].flat().map((egress) => [egress.name, egress]),
    );
    return [...byName.values()];
  };

  const sync = async (): Promise<void> => {
    for (const [egress, change] of changes) {
      await writeDown(egress, change);
      if (changes.get(egress) === change) changes.delete(egress);
    }
    const found = new Map((await readBlockedEgresses(store.pool)).map((one) => [one.name, one]));
    for (const egress of blocked.keys()) {
      // Somebody's connection succeeded since.
      if (!found.has(egress) && !changes.has(egress)) open(egress);
    }
    const ours = new Set(egresses().map(({ name }) => name));
    for (const { name, since, reason, silent } of found.values()) {
      if (changes.has(name) || !ours.has(name)) continue;
      const known = blocked.get(name);
      if (known === undefined) options.onChange();
      blocked.set(name, { since, reason, silent, foundAt: known?.foundAt ?? now() });
    }
    await keepBlocked(store.pool, [...blocked.keys()]);
    for (const [egress, { foundAt }] of blocked) {
      if (now() - foundAt < LATE_DIALS_MS) await giveBack(egress);
      if (changes.has(egress)) continue;
      const unusedMs = now() - (turns.get(egress) ?? now());
      if (turns.has(egress) && unusedMs < PROBE_EVERY_MS) continue;
      if (!(await takeProbe(store.pool, { name: egress, everyMs: PROBE_EVERY_MS }))) continue;
      if (turns.has(egress) || options.maySpill()) dialSilent(egress);
      else {
        turns.set(egress, now());
        options.onChange();
      }
    }
  };

  /** Where no mail may or will try the port: a connection to who could not be reached, closed at once. */
  const dialSilent = (name: string): void => {
    const egress = egresses().find((one) => one.name === name);
    const silent = blocked.get(name)?.silent ?? [];
    for (const address of silent.filter((one) => options.guard.check(one).ok)) {
      const localAddress = isIPv6(address) ? egress?.ipv6 : egress?.ipv4;
      void dial({ host: address, port: options.port, localAddress: localAddress ?? null }).then(
        (kind) => {
          if (stopped) return;
          watch.note({ egress: name, site: address, host: address, address, kind });
        },
      );
    }
  };

  /** Dials the hosts that the operator named, from every egress that nothing has succeeded from for a while. */
  const probe = async (): Promise<void> => {
    const hosts = options.policy().port25Probes;
    const isFirst = activeProbeAt === -Infinity;
    const everyMs = isFirst ? FIRST_PROBE_MS : ACTIVE_PROBE_EVERY_MS;
    if (hosts.length === 0 || (!isFirst && now() - activeProbeAt < everyMs)) return;
    activeProbeAt = now();
    for (const egress of egresses()) {
      const last = succeededAt.get(egress.name) ?? -Infinity;
      if (now() - last < WINDOW_MS) continue;
      if (!(await takeProbe(store.pool, { name: egress.name, everyMs }))) continue;
      await Promise.all(hosts.map((host) => probeHost(egress, host)));
    }
  };

  const probeHost = async (egress: Egress, host: string): Promise<void> => {
    const family = egress.ipv4 === null && egress.ipv6 !== null ? 6 : 4;
    const answer = await (family === 6 ? options.resolver.aaaa(host) : options.resolver.a(host));
    if (answer.kind !== 'found') return; // the DNS is another matter
    const address = answer.records.find((one) => options.guard.check(one).ok);
    if (address === undefined || stopped) return;
    const kind = await dial({
      host: address,
      port: options.port,
      localAddress: family === 6 ? egress.ipv6 : egress.ipv4,
    });
    watch.note({ egress: egress.name, site: host, host, address, kind });
  };

  let running: Promise<void> | null = null;
  let probing: Promise<void> | null = null;
  let isAway = false;
  const tick = (): void => {
    running ??= sync()
      .then(
        () => {
          isAway = false;
        },
        (error: unknown) => {
          if (!isAway) log.warn({ err: error }, 'what is known of port 25 cannot be shared now');
          isAway = true;
        },
      )
      .finally(() => {
        running = null;
        if (changes.size > 0 && !isAway && !stopped) tick(); // noted on its way out
      });
    probing ??= probe()
      .catch((error: unknown) => log.debug({ err: error }, 'port 25 cannot be probed now'))
      .finally(() => {
        probing = null;
      });
  };

  const watch: RunningPortWatch = {
    isBlocked(egress) {
      const known = blocked.get(egress);
      return known === undefined ? null : { since: known.since, reason: known.reason };
    },
    note(seen) {
      const { egress } = seen;
      detector.note(seen);
      if (seen.kind === 'connected') {
        const isNews = blocked.has(egress);
        const last = succeededAt.get(egress) ?? -Infinity;
        if (!isNews && now() - last < SUCCESS_EVERY_MS) return;
        succeededAt.set(egress, now());
        if (isNews) open(egress);
        change(egress, 'open');
        return;
      }
      if (blocked.has(egress)) return;
      const reason = detector.finding(egress);
      if (reason === null) return;
      blocked.set(egress, {
        since: new Date(),
        reason,
        foundAt: now(),
        silent: detector.silent(egress),
      });
      options.onChange();
      change(egress, 'blocked');
    },
    mayProbe: (egress) => blocked.has(egress) && turns.delete(egress),
    async stop() {
      stopped = true;
      clearInterval(timer);
      await running;
    },
  };

  const change = (egress: string, what: 'blocked' | 'open'): void => {
    if (changes.size >= CHANGES_MAX) changes.clear();
    changes.set(egress, what);
    if (!stopped) tick();
  };

  const timer = setInterval(tick, SYNC_MS);
  tick();
  return watch;
}

/** Whether a connection can be made; it is closed at once. */
function dial(to: {
  readonly host: string;
  readonly port: number;
  readonly localAddress: string | null;
}): Promise<'connected' | 'timeout' | 'refused' | 'other'> {
  return new Promise((resolve) => {
    const { host, port, localAddress } = to;
    const socket = connect({ host, port, ...(localAddress === null ? {} : { localAddress }) });
    const timer = setTimeout(() => {
      socket.destroy();
      resolve('timeout');
    }, DIAL_MAX_MS);
    timer.unref();
    socket.once('connect', () => {
      clearTimeout(timer);
      socket.destroy();
      resolve('connected');
    });
    socket.on('error', (error: NodeJS.ErrnoException) => {
      clearTimeout(timer);
      resolve(kindOfFailure(null, error.code ?? ''));
    });
  });
}
