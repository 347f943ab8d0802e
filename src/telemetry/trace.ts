// Traces, for the rooms: spans that cost nothing while nobody asked for traces. What sends them is loaded only then
// (tracing.ts).
//
// A request has the trace that its caller names in `traceparent` (W3C), or one of its own. An email has a trace of its own,
// whose id is the email's id: the process that accepts it and the one that attempts it, which share nothing but the
// database, agree on it without a word. The span of the acceptance links the two. Attributes are ids and outcomes: no
// address, body, subject or secret.
import { AsyncLocalStorage } from 'node:async_hooks';

/** Names a span to others. */
export interface SpanPlace {
  /** 32 hexadecimal digits. */
  readonly traceId: string;
  /** 16 of them. */
  readonly spanId: string;
  readonly isSampled: boolean;
  /** It is, or may be, of another process. */
  readonly isRemote?: true;
}

export type SpanAttributes = Readonly<Record<string, string | number | boolean>>;

export interface Span {
  readonly place: SpanPlace;
  set(attributes: SpanAttributes): void;
  /** `problem`: a short code of what went wrong. */
  end(problem?: string): void;
}

export interface SpanOptions {
  readonly kind?: 'server' | 'client' | 'consumer';
  readonly attributes?: SpanAttributes;
  /** Null: a trace of its own. Absent: the span that is under way here. */
  readonly parent?: SpanPlace | null;
  readonly links?: readonly SpanPlace[];
  /** This span gets this place. */
  readonly as?: SpanPlace;
  /** When it began, where that is over: milliseconds as `Date.now()` tells it. */
  readonly startedAtMs?: number;
}

export interface Tracer {
  begin(name: string, options: SpanOptions): Span;
  isSampled(traceId: string): boolean;
  /** By lot, for a trace whose id somebody else chose. */
  draws(): boolean;
}

let tracer: Tracer | null = null;
const underWay = new AsyncLocalStorage<Span>();

/** Null: nothing is traced from now on. */
export function useTracer(next: Tracer | null): void {
  tracer = next;
}

export const isTracing = (): boolean => tracer !== null;

/** Null while nothing is traced. */
export function beginSpan(name: string, options: SpanOptions = {}): Span | null {
  if (tracer === null) return null;
  const { parent = underWay.getStore()?.place ?? null } = options;
  return tracer.begin(name, { ...options, parent });
}

/** Spans that `work` begins are inside this one, and its log lines name it. */
export const inside = <T>(span: Span | null, work: () => T): T =>
  span === null ? work() : underWay.run(span, work);

/** A span around `work`, which fails when that does. */
export async function traced<T>(
  name: string,
  options: SpanOptions,
  work: (span: Span | null) => Promise<T>,
): Promise<T> {
  const span = beginSpan(name, options);
  if (span === null) return work(null);
  try {
    const result = await inside(span, () => work(span));
    span.end();
    return result;
  } catch (error) {
    span.end((error as Error).name);
    throw error;
  }
}

/** For log lines: the trace of what is under way. */
export function traceFields(): Readonly<Record<string, string>> {
  const place = tracer === null ? undefined : underWay.getStore()?.place;
  return place === undefined ? {} : { trace_id: place.traceId, span_id: place.spanId };
}

/** Where the trace of an email begins. */
export function placeOfEmail(emailId: string): SpanPlace {
  const traceId = emailId.replaceAll('-', '');
  // The last half of a UUIDv7 is random.
  const isSampled = tracer?.isSampled(traceId) ?? false;
  return { traceId, spanId: traceId.slice(-16), isSampled, isRemote: true };
}

/** Of later versions, more may follow. */
const TRACEPARENT =
  /^(?:00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$|(?!00|ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:$|-))/;

/** W3C Trace Context §3.2; null: none, or one that is not valid. */
export function readTraceparent(header: string | undefined): SpanPlace | null {
  const [traceId, spanId, flags] = (TRACEPARENT.exec(header ?? '') ?? [])
    .slice(1)
    .filter((part) => part !== undefined);
  if (traceId === undefined || spanId === undefined || flags === undefined) return null;
  if (/^0+$/.test(traceId) || /^0+$/.test(spanId)) return null;
  const isSampled = (Number.parseInt(flags, 16) & 1) === 1;
  return { traceId, spanId, isSampled, isRemote: true };
}

/**
 * Where a caller's trace is, for the span of its request. It may ask for less than the operator's ratio and not for more:
 * neither the flag nor a trace id that the ratio would pick gets a request traced.
 */
export function placeOfCaller(header: string | undefined): SpanPlace | null {
  const place = readTraceparent(header);
  return place?.isSampled === true ? { ...place, isSampled: tracer?.draws() ?? false } : place;
}
