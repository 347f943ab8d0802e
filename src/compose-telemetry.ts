// Metrics and traces of this process, from the settings to an open port: part of the composition root.
import { X509Certificate } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { statfs } from 'node:fs/promises';
import { forgetTracingVariables, type Config } from './config.ts';
import { listenOrExplain } from './listening.ts';
import type { Logger } from './log.ts';
import { openOperatorFile } from './operator-files.ts';
import { readQueueSummary, type QueueSummary } from './queue/summary.ts';
import type { Store } from './store/orm.ts';
import { openMetricsEndpoint } from './telemetry/endpoint.ts';
import { createGathering, type Gathering } from './telemetry/gathering.ts';
import * as measured from './telemetry/instruments.ts';
import { readTelemetryPolicy } from './telemetry/policy.ts';
import { useTracer } from './telemetry/trace.ts';
import type { Tracing } from './telemetry/tracing.ts';
import type { Certificate } from './tls-certificate.ts';
import { readWebhookBacklog, type WebhookBacklog } from './webhooks/backlog.ts';

export interface Telemetry {
  /** Null: the port is off. */
  readonly port: number | null;
  /** Where workers are asked for what they counted. */
  readonly gathering: Gathering;
  /** Measured from now on, until the stop; `missing` as `GET /health/ready` has it. */
  watch(about: {
    readonly store: Store;
    readonly dataDir: string;
    readonly certificate: () => Certificate;
    readonly missing: () => Promise<readonly unknown[]>;
  }): void;
  stop(): Promise<void>;
}

/** The database is asked no more often than this, however often Prometheus asks us. */
const LOOK_EVERY_MS = 15_000;
/** What was read longer ago is not told. */
const STALE_MS = 60_000;

/** Throws PortUnusable. */
export async function composeTelemetry(config: Config, log: Logger): Promise<Telemetry> {
  const gathering = createGathering();
  const listening = await listenOrExplain({
    what: 'the metrics port',
    mode: config.mode,
    ports: [{ port: config.metricsPort, setting: 'MAILSTEAD_METRICS_PORT' }],
    log,
    start: () =>
      openMetricsEndpoint({
        port: config.metricsPort,
        host: config.mode === 'development' ? '127.0.0.1' : null,
        gathering,
        onError: (error) => log.warn({ err: error }, 'metrics could not be told'),
      }),
  });
  const stops: (() => void)[] = [];
  const roles = [...config.roles].toSorted().join(',');
  const build = { version: readVersion(), node: process.version, roles };
  stops.push(measured.buildInfo.read(() => [[build, 1]]));
  return {
    port: listening.listener?.port ?? null,
    gathering,
    watch({ store, dataDir, certificate, missing }) {
      const live = <T>(read: () => Promise<T>, everyMs: number): (() => T | null) => {
        const look = createLook(read, everyMs);
        stops.push(gathering.before(look.refresh));
        return look.latest;
      };
      const isReady = live(async () => (await missing()).length === 0, 0);
      const disk = live(() => statfs(dataDir), LOOK_EVERY_MS);
      stops.push(
        measured.ready.read(() => [[{}, Number(isReady() === true)]]),
        measured.diskBytes.read(() => {
          const found = disk();
          if (found === null) return [];
          return [
            [{ kind: 'size' }, found.blocks * found.bsize],
            [{ kind: 'free' }, found.bavail * found.bsize],
          ];
        }),
        measured.certificateExpiry.read(createExpiry(certificate)),
      );
      if (!config.roles.has('jobs')) return;
      const queue = live(() => readQueueSummary(store.pool), LOOK_EVERY_MS);
      const backlog = live(() => readWebhookBacklog(store.pool), LOOK_EVERY_MS);
      stops.push(...tellQueue(queue), ...tellBacklog(backlog));
    },
    async stop() {
      await listening.listener?.stop();
      for (const stop of stops.splice(0)) stop();
    },
  };
}

/** Reads again when what it knows is older than `everyMs`; forgets it when that fails for long. */
function createLook<T>(
  read: () => Promise<T>,
  everyMs: number,
): { readonly refresh: () => Promise<void>; readonly latest: () => T | null } {
  let known: { readonly value: T; readonly atMs: number } | null = null;
  let reading: Promise<void> | null = null;
  const look = async (): Promise<void> => {
    const atMs = performance.now();
    // Where it fails, what is not told says so; the log has the fault from others.
    const value = await read().catch(() => null);
    if (value !== null) known = { value, atMs };
  };
  return {
    async refresh() {
      if (known !== null && performance.now() - known.atMs < everyMs) return;
      reading ??= look().finally(() => {
        reading = null;
      });
      await reading;
    },
    latest: () =>
      known === null || performance.now() - known.atMs > STALE_MS ? null : known.value,
  };
}

function tellQueue(read: () => QueueSummary | null): readonly (() => void)[] {
  const of =
    <T>(pick: (summary: QueueSummary) => readonly T[]) =>
    () => {
      const summary = read();
      return summary === null ? [] : pick(summary);
    };
  return [
    measured.queueDeliveries.read(
      of(({ states }) => states.map(({ state, count }) => [{ state }, count] as const)),
    ),
    measured.queueCapped.read(
      of(({ states }) =>
        states.map(({ state, isCapped }) => [{ state }, Number(isCapped)] as const),
      ),
    ),
    measured.queueLanes.read(
      of(({ lanes }) =>
        lanes.flatMap(({ lane, ready, deferred }) => [
          [{ lane, state: 'ready' }, ready] as const,
          [{ lane, state: 'deferred' }, deferred] as const,
        ]),
      ),
    ),
    measured.queueAge.read(of(({ oldestReadyS }) => [[{}, oldestReadyS] as const])),
    measured.queuePauses.read(of(({ pauses }) => [[{}, pauses] as const])),
    measured.queueWorkers.read(of(({ workers }) => [[{}, workers] as const])),
    measured.blockedEgresses.read(
      of(({ blocked }) => blocked.map((egress) => [{ egress }, 1] as const)),
    ),
  ];
}

function tellBacklog(read: () => WebhookBacklog | null): readonly (() => void)[] {
  const of = (pick: (backlog: WebhookBacklog) => number) => () => {
    const backlog = read();
    return backlog === null ? [] : [[{}, pick(backlog)] as const];
  };
  return [
    measured.webhookLag.read(of(({ oldestDueS }) => oldestDueS)),
    measured.outboxRows.read(of(({ outbox }) => outbox)),
  ];
}

/** Reads a certificate once. */
function createExpiry(certificate: () => Certificate) {
  let known = { cert: '', atS: 0 };
  return () => {
    const { cert } = certificate();
    if (cert !== known.cert)
      known = { cert, atS: Date.parse(new X509Certificate(cert).validTo) / 1_000 };
    return [[{}, known.atS] as const];
  };
}

export function readVersion(): string {
  const text = readFileSync(new URL('../package.json', import.meta.url), 'utf8');
  return (JSON.parse(text) as { version: string }).version;
}

const TRACE_LOOK_MS = 5_000;

/**
 * Traces as config/telemetry.json says, or the operator's own; looked at again when that changes. `name` tells the
 * processes of an appliance apart.
 */
export async function startTraces(d: {
  readonly configFolder: string;
  readonly hostname: string;
  readonly name: string;
  readonly log: Logger;
}): Promise<{ stop(): Promise<void> }> {
  const { log } = d;
  const policy = openOperatorFile('telemetry', {
    folder: d.configFolder,
    read: readTelemetryPolicy,
    log,
  });
  let used: ReturnType<typeof policy.current> = null;
  let tracing: Tracing | null = null;
  const apply = async (): Promise<void> => {
    const wanted = policy.current();
    if (wanted === used) return;
    used = wanted;
    const before = tracing;
    tracing = null;
    if (wanted !== null) {
      forgetTracingVariables();
      const { openTracing } = await import('./telemetry/tracing.ts');
      tracing = openTracing(wanted, {
        resource: {
          'service.name': 'mailstead',
          'service.version': readVersion(),
          'service.instance.id': `${d.hostname} ${d.name} ${process.pid}`,
        },
        onTrouble: (what) => log.warn({ reason: what }, 'traces could not be sent'),
      });
      log.info({ url: withoutQuery(wanted.url), ratio: wanted.ratio }, 'traces are sent');
    }
    useTracer(tracing);
    await before?.stop();
  };
  let applying: Promise<void> | null = null;
  const timer = setInterval(() => {
    applying ??= apply().finally(() => {
      applying = null;
    });
  }, TRACE_LOOK_MS);
  timer.unref();
  await apply();
  return {
    async stop() {
      clearInterval(timer);
      policy.stop();
      await applying;
      useTracer(null);
      await tracing?.stop();
    },
  };
}

/** A token may stand there. */
const withoutQuery = (url: string): string => url.replace(/\?.*$/s, '');
