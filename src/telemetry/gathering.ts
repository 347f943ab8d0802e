// One answer for all processes of an appliance: what this process counts, and what its workers say over IPC when they are
// asked. A worker that does not answer in time counts as it last said; one that is gone stays in what only grows, so that
// no total goes down.
import { AggregatorRegistry, collectDefaultMetrics, Registry } from 'prom-client';
import type { MetricObjectWithValues, MetricValue, RegistryContentType } from 'prom-client';
import { registry } from './instrument.ts';

/** What one process has to say; survives JSON. */
export interface Snapshot {
  readonly ours: readonly Metric[];
  /** Of the process itself: memory, event loop, garbage collection. */
  readonly process: readonly Metric[];
}
type Metric = MetricObjectWithValues<MetricValue<string>>;

/** The place of one worker process. */
export interface Seat {
  heard(number: number, snapshot: Snapshot): void;
  /** Its process has ended. */
  left(): void;
}

export interface Gathering {
  /** `ask` tells the worker to answer with this number. */
  join(ask: (number: number) => void): Seat;
  /** Brings up to date what `live` gauges read, before each gathering; must not reject, and end soon. */
  before(refresh: () => Promise<void>): () => void;
  /** One at a time: whoever asks meanwhile gets the same. */
  metrics(type: MetricsType): Promise<string>;
}

export type MetricsType = 'prometheus' | 'openmetrics';
export const CONTENT_TYPES: Readonly<Record<MetricsType, RegistryContentType>> = {
  prometheus: Registry.PROMETHEUS_CONTENT_TYPE,
  openmetrics: Registry.OPENMETRICS_CONTENT_TYPE,
};

const ANSWER_MAX_MS = 1_000;
const REFRESH_MAX_MS = 3_000;

const aboutProcess = new Registry();
let isCollecting = false;

/** What this process says. */
export async function takeSnapshot(): Promise<Snapshot> {
  if (!isCollecting) collectDefaultMetrics({ register: aboutProcess });
  isCollecting = true;
  const [ours, process] = await Promise.all([
    registry.getMetricsAsJSON(),
    aboutProcess.getMetricsAsJSON(),
  ]);
  return { ours, process };
}

export function createGathering(): Gathering {
  const seats = new Set<SeatState>();
  const refreshers = new Set<() => Promise<void>>();
  /** What processes that are gone have counted. */
  let gone: readonly Metric[] = [];
  let number = 0;
  let gathering: Promise<readonly Metric[]> | null = null;
  const texts = new Map<MetricsType, Promise<string>>();

  const gather = async (): Promise<readonly Metric[]> => {
    number += 1;
    const asked = [...seats].map((seat) => answerOf(seat, number));
    await within(REFRESH_MAX_MS, Promise.all([...refreshers].map((refresh) => refresh())));
    const own = await takeSnapshot();
    await Promise.all(asked);
    const workers = [...seats].flatMap((seat) => (seat.last === null ? [] : [seat]));
    return [
      ...gone,
      ...own.ours,
      ...workers.flatMap(({ last }) => last!.ours),
      ...own.process.map((metric) => labelled(metric, 'main')),
      ...workers.flatMap(({ last, name }) => last!.process.map((metric) => labelled(metric, name))),
    ];
  };

  return {
    join(ask) {
      const taken = new Set([...seats].map(({ name }) => name));
      let place = 1;
      while (taken.has(`delivery-${place}`)) place += 1;
      const seat: SeatState = { name: `delivery-${place}`, ask, last: null, waiting: null };
      seats.add(seat);
      return {
        heard(answered, snapshot) {
          seat.last = snapshot;
          if (seat.waiting?.number === answered) seat.waiting.done();
        },
        left() {
          if (!seats.delete(seat)) return;
          seat.waiting?.done();
          const counted = (seat.last?.ours ?? []).filter(({ type }) => GROWING.has(String(type)));
          gone = joined([...gone, ...counted]);
        },
      };
    },
    before(refresh) {
      refreshers.add(refresh);
      return () => void refreshers.delete(refresh);
    },
    metrics(type) {
      gathering ??= gather().finally(() => {
        gathering = null;
      });
      let text = texts.get(type);
      if (text === undefined) {
        text = gathering.then((metrics) => write(metrics, type)).finally(() => texts.delete(type));
        texts.set(type, text);
      }
      return text;
    },
  };
}

function write(metrics: readonly Metric[], type: MetricsType): Promise<string> {
  // prom-client adds the ending that OpenMetrics wants to a name that has it already.
  const named = type === 'prometheus' ? metrics : metrics.map(withoutTotal);
  const all = AggregatorRegistry.aggregate([[...named]]);
  all.setContentType(CONTENT_TYPES[type]);
  return all.metrics();
}

/** prom-client's types have numbers, its values words. */
const GROWING: ReadonlySet<string> = new Set(['counter', 'histogram']);

interface SeatState {
  readonly name: string;
  readonly ask: (number: number) => void;
  last: Snapshot | null;
  waiting: { readonly number: number; readonly done: () => void } | null;
}

/** Resolves when it has answered, or will not. */
async function answerOf(seat: SeatState, number: number): Promise<void> {
  const answered = new Promise<void>((resolve) => {
    seat.waiting = { number, done: resolve };
  });
  seat.ask(number);
  await within(ANSWER_MAX_MS, answered);
  seat.waiting = null;
}

async function within(maxMs: number, work: Promise<unknown>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, maxMs);
  });
  await Promise.race([work, late]);
  clearTimeout(timer);
}

/** The processes have values of their own, which no sum would mean anything of. */
const labelled = (metric: Metric, process: string): Metric => ({
  ...metric,
  aggregator: 'sum',
  values: metric.values.map((value) => ({ ...value, labels: { ...value.labels, process } })),
});

const withoutTotal = (metric: Metric): Metric =>
  String(metric.type) === 'counter'
    ? { ...metric, name: metric.name.replace(/_total$/, '') }
    : metric;

/** Each metric once. */
function joined(metrics: readonly Metric[]): readonly Metric[] {
  const all = AggregatorRegistry.aggregate([[...metrics]]).getMetricsAsArray();
  return all.map((metric) => (metric as unknown as { get(): Metric }).get());
}
