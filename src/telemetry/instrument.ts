// How an instrument is made: what it is called, what it means, which labels it has. All of a process are in one registry;
// docs/metrics.md is written from the same table (reference.ts).
//
// Values of labels come from small closed sets: never an address, a tenant, or a domain of a recipient. A set that
// somebody else decides (a file of the operator's) goes through `boundedNames`.
import { Counter, Gauge, Histogram, Registry } from 'prom-client';

/** What all instruments of this process are in, but for those about the process itself (gathering.ts). */
export const registry = new Registry();

export interface Described {
  readonly section: string;
  readonly name: string;
  readonly type: 'counter' | 'gauge' | 'histogram';
  readonly help: string;
  readonly labels: readonly string[];
}

const table: Described[] = [];

/** Every instrument that was made, in order. */
export const describeInstruments = (): readonly Described[] => table;

interface About<L extends string> {
  /** Without the `mailstead_` in front; with its unit, and `_total` for a counter. */
  readonly name: string;
  /** A sentence. */
  readonly help: string;
  readonly labels?: readonly L[];
}

/** How values of several processes, or of several sources in one, become one. */
type Combine = 'sum' | 'max';

type Value<L extends string> = readonly [labels: Readonly<Record<L, string>>, value: number];
type Source<L extends string> = () => Iterable<Value<L>>;

/** Where the values of a gauge are read when somebody asks for them. */
export interface LiveGauge<L extends string> {
  /** Until the function that it returns is called. */
  read(source: Source<L>): () => void;
}

export interface Section {
  counter<L extends string = never>(about: About<L>): Counter<L>;
  histogram<L extends string = never>(
    about: About<L> & { readonly buckets: readonly number[] },
  ): Histogram<L>;
  /** Set by whoever knows. */
  gauge<L extends string = never>(about: About<L> & { readonly combine: Combine }): Gauge<L>;
  /** Read from its sources while it is asked for. */
  live<L extends string = never>(about: About<L> & { readonly combine: Combine }): LiveGauge<L>;
}

/** Instruments that belong together in the reference. */
export function section(title: string): Section {
  const settle = <L extends string>(type: Described['type'], about: About<L>) => {
    const name = `mailstead_${about.name}`;
    const { help, labels = [] } = about;
    table.push({ section: title, name, type, help, labels });
    return { name, help, labelNames: labels, registers: [registry] };
  };
  return {
    counter: (about) => new Counter(settle('counter', about)),
    histogram: (about) =>
      new Histogram({ ...settle('histogram', about), buckets: [...about.buckets] }),
    gauge: (about) => new Gauge({ ...settle('gauge', about), aggregator: about.combine }),
    live<L extends string>(about: About<L> & { readonly combine: Combine }): LiveGauge<L> {
      const sources = new Set<Source<L>>();
      const gauge: Gauge<L> = new Gauge<L>({
        ...settle('gauge', about),
        aggregator: about.combine,
        collect() {
          clear();
          for (const [labels, value] of joined([...sources].flatMap((read) => [...read()]))) {
            gauge.set(labels, value);
          }
        },
      });
      // Without labels prom-client begins with a zero, which would be a claim.
      const clear = (): void => {
        gauge.reset();
        if (about.labels === undefined) gauge.remove();
      };
      clear();
      const joined = joining<L>(about.combine);
      return {
        read(source) {
          sources.add(source);
          return () => void sources.delete(source);
        },
      };
    },
  };
}

/** One value for the same labels. */
const joining =
  <L extends string>(combine: Combine) =>
  (values: readonly Value<L>[]): Iterable<Value<L>> => {
    const byLabels = new Map<string, Value<L>>();
    for (const [labels, value] of values) {
      const key = JSON.stringify(labels);
      const before = byLabels.get(key)?.[1];
      const joined =
        before === undefined ? value : combine === 'sum' ? before + value : Math.max(before, value);
      byLabels.set(key, [labels, joined]);
    }
    return byLabels.values();
  };

/** What stands for the names that there is no room for. */
export const OTHER = 'other';

/** The first `max` different names as they are, every further one as `other`. */
export function boundedNames(max: number): (name: string) => string {
  const known = new Set<string>();
  return (name) => {
    if (known.has(name)) return name;
    if (known.size >= max) return OTHER;
    known.add(name);
    return name;
  };
}
