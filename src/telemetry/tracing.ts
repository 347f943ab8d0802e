// What makes spans and sends them by OTLP, loaded by whoever turns traces on: OpenTelemetry's own packages, which cost
// a process that does not trace nothing.
import {
  diag,
  DiagLogLevel,
  ROOT_CONTEXT,
  SpanKind,
  SpanStatusCode,
  trace,
  TraceFlags,
} from '@opentelemetry/api';
import type { Span as OpenSpan, SpanContext } from '@opentelemetry/api';
import { OTLPTraceExporter } from '@opentelemetry/exporter-trace-otlp-http';
import { resourceFromAttributes } from '@opentelemetry/resources';
import {
  BatchSpanProcessor,
  ParentBasedSampler,
  RandomIdGenerator,
  SamplingDecision,
  TraceIdRatioBasedSampler,
  TracerProvider,
} from '@opentelemetry/sdk-trace';
import type { TracePolicy } from './policy.ts';
import type { Span, SpanPlace, Tracer } from './trace.ts';

export interface Tracing extends Tracer {
  /** Sends what is left, for a bounded time. */
  stop(): Promise<void>;
}

/** What waits to be sent; more is dropped. */
const WAITING_MAX = 4_096;
const SENT_AT_ONCE_MAX = 512;
const SEND_EVERY_MS = 1_000;
const SEND_MAX_MS = 5_000;
const SENDS_MAX = 4;

export function openTracing(
  policy: TracePolicy,
  d: {
    /** `service.name`, `service.version`, and what else names this process. */
    readonly resource: Readonly<Record<string, string>>;
    readonly onTrouble: (what: string) => void;
  },
): Tracing {
  tellTrouble(d.onTrouble);
  const ids = new Ids();
  const ratio = new TraceIdRatioBasedSampler(policy.ratio);
  const provider = new TracerProvider({
    resource: resourceFromAttributes({ ...d.resource }),
    idGenerator: ids,
    // Places in other processes have been decided about where they were read (trace.ts).
    sampler: new ParentBasedSampler({ root: ratio }),
    spanLimits: { attributeCountLimit: 32, linkCountLimit: 128, eventCountLimit: 1 },
    spanProcessors: [
      new BatchSpanProcessor({
        exporter: new OTLPTraceExporter({
          url: policy.url,
          headers: { ...policy.headers },
          timeoutMillis: SEND_MAX_MS,
          concurrencyLimit: SENDS_MAX,
        }),
        maxQueueSize: WAITING_MAX,
        maxExportBatchSize: SENT_AT_ONCE_MAX,
        scheduledDelayMillis: SEND_EVERY_MS,
        exportTimeoutMillis: SEND_MAX_MS,
      }),
    ],
  });
  const tracer = provider.getTracer('mailstead');
  const isSampled = (traceId: string): boolean =>
    ratio.shouldSample(ROOT_CONTEXT, traceId).decision !== SamplingDecision.NOT_RECORD;
  return {
    isSampled,
    draws: () => isSampled(ids.generateTraceId()),
    begin(name, options) {
      const { as, parent = null } = options;
      ids.next = as ?? null;
      const span = tracer.startSpan(
        name,
        {
          kind: KINDS[options.kind ?? 'internal'],
          attributes: { ...options.attributes },
          links: (options.links ?? []).map((place) => ({ context: contextOf(place) })),
          ...(options.startedAtMs === undefined ? {} : { startTime: options.startedAtMs }),
        },
        parent === null || as !== undefined
          ? ROOT_CONTEXT
          : trace.setSpanContext(ROOT_CONTEXT, contextOf(parent)),
      );
      ids.next = null;
      return spanOf(span);
    },
    stop: () =>
      provider.shutdown().catch((error: unknown) => d.onTrouble((error as Error).message)),
  };
}

const KINDS = {
  internal: SpanKind.INTERNAL,
  server: SpanKind.SERVER,
  client: SpanKind.CLIENT,
  consumer: SpanKind.CONSUMER,
} as const;

const contextOf = ({ traceId, spanId, isSampled, isRemote }: SpanPlace): SpanContext => ({
  traceId,
  spanId,
  traceFlags: isSampled ? TraceFlags.SAMPLED : TraceFlags.NONE,
  ...(isRemote === undefined ? {} : { isRemote }),
});

function spanOf(span: OpenSpan): Span {
  const { traceId, spanId, traceFlags } = span.spanContext();
  return {
    place: { traceId, spanId, isSampled: (traceFlags & TraceFlags.SAMPLED) !== 0 },
    set: (attributes) => void span.setAttributes({ ...attributes }),
    end(problem) {
      if (problem !== undefined) span.setStatus({ code: SpanStatusCode.ERROR, message: problem });
      span.end();
    },
  };
}

/** Random ids, but for a span whose place is given. */
class Ids {
  readonly #random = new RandomIdGenerator();
  next: SpanPlace | null = null;

  generateTraceId(): string {
    return this.next?.traceId ?? this.#random.generateTraceId();
  }

  generateSpanId(): string {
    return this.next?.spanId ?? this.#random.generateSpanId();
  }
}

/** A receiver that is away is told at every try: once a minute is enough. */
const TROUBLE_EVERY_MS = 60_000;
const TROUBLE_CHARS_MAX = 300;

function tellTrouble(onTrouble: (what: string) => void): void {
  let toldAtMs = -Infinity;
  const tell = (message: string): void => {
    if (performance.now() - toldAtMs < TROUBLE_EVERY_MS) return;
    toldAtMs = performance.now();
    onTrouble(message.slice(0, TROUBLE_CHARS_MAX));
  };
  const ignore = (): void => undefined;
  diag.disable();
  diag.setLogger(
    { error: tell, warn: tell, info: ignore, debug: ignore, verbose: ignore },
    { logLevel: DiagLogLevel.WARN, suppressOverrideMessage: true },
  );
}
