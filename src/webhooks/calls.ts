// Calls endpoints: claims events that are due, whoever's turn it is (turns.ts), signs the stored bytes, calls, and stores
// what came of it in groups. An event whose process dies between claim and result is called again with the same id when
// its lease is over: at least once, and receivers tell copies apart by the id.
import { AsyncLocalStorage } from 'node:async_hooks';
import type { Logger } from '../log.ts';
import { LOWEST_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { webhookCalls, webhookDuration } from '../telemetry/instruments.ts';
import { beginSpan } from '../telemetry/trace.ts';
import { createCaller, CALL_MAX_MS, type Answer } from './call.ts';
import {
  claimDue,
  closeWaiting,
  lookAround,
  settle,
  type ClaimedEvent,
  type Ended,
} from './due-events.ts';
import type { EndpointRules } from './endpoint.ts';
import { showEventId } from './event-id.ts';
import type { EndpointKey } from './fan-out.ts';
import { signatureHeaders, unsealSecret } from './secrets.ts';
import { createTurns, type Endpoint } from './turns.ts';

export interface CallsOptions extends EndpointRules {
  readonly store: Store;
  readonly log: Logger;
  /** Secrets are sealed with it. */
  readonly key: Buffer;
  /** What is due, and the time of a call. */
  readonly now: () => Date;
  /** In [0, 1). */
  readonly random: () => number;
  /** Of one call, in all; 15 s unless a test is in a hurry. */
  readonly callMaxMs?: number;
  /** Between two looks at what is due; 1 s unless a test is in a hurry. */
  readonly lookMs?: number;
}

export interface Calls {
  /** These have something new. */
  tell(endpoints: readonly EndpointKey[]): void;
  /** Something is due that nobody told of. */
  nudge(): void;
  /** Begins nothing new and gives back what does not end soon. */
  stop(): Promise<void>;
}

/** After the first call, the second and so on; after the last one the event has failed. */
export const RETRY_DELAYS_MS: readonly number[] = [
  5_000, 300_000, 1_800_000, 7_200_000, 18_000_000, 36_000_000, 36_000_000,
];
/** So that what failed together does not come back together. */
const JITTER = 0.1;
/** What a process that died had claimed is due again after so long. */
const LEASE_MS = 60_000;
/** A call begins only while so much more than its time is left of the lease. */
const LEASE_MARGIN_MS = 10_000;
const LOOK_MS = 1_000;
/** Endpoints in one look; the next one goes on behind them. */
const LOOK_MAX = 500;
/** After the database was away. */
const RETRY_MS = 2_000;
/** What ended within so long is stored together. */
const SETTLE_MS = 5;
const SETTLE_MAX = 200;
/** A fault of this machine, such as too many open files, is nothing against an event. */
const OWN_FAULT_DELAY_MS = 5_000;
const STOP_GRACE_MS = 2_000;
const HTTP_GONE = 410;
const SECRET_LOST =
  'its signing secret cannot be read any more, since the key of the appliance is another one: rotate it';

interface Held {
  readonly event: ClaimedEvent;
  readonly endpoint: Endpoint;
  /** Of the lease, on the clock of `performance.now()`. */
  readonly endsAtMs: number;
}

export function startCalls(d: CallsOptions): Calls {
  const callMaxMs = d.callMaxMs ?? CALL_MAX_MS;
  const lookMs = d.lookMs ?? LOOK_MS;
  const caller = createCaller(d, { callMaxMs });
  const turns = createTurns();
  /** Claimed, and waiting for a place of their endpoint. */
  const waiting = new Map<Endpoint, Held[]>();
  const stopping = new AbortController();
  const underWay = new Set<Promise<void>>();
  const ended: { readonly held: Held; readonly result: Ended }[] = [];
  let behind: EndpointKey = { tenantId: LOWEST_ID, webhookId: LOWEST_ID };
  let lookedAtMs = -Infinity;
  let isStopped = false;
  let isWanted = false;
  let running: Promise<void> | null = null;
  let settling: Promise<void> | null = null;
  let timer: NodeJS.Timeout | undefined;

  const markDue = (key: EndpointKey): void => {
    const endpoint = turns.find(key);
    if (endpoint !== null) endpoint.due += 1;
  };

  const look = async (): Promise<void> => {
    lookedAtMs = performance.now();
    const seen = await lookAround(d.store, { behind, max: LOOK_MAX, now: d.now() });
    behind = (seen.length < LOOK_MAX ? undefined : seen.at(-1)) ?? {
      tenantId: LOWEST_ID,
      webhookId: LOWEST_ID,
    };
    for (const one of seen) {
      if (one.state === 'enabled') {
        if (one.isDue) markDue(one);
      } else if (await closeWaiting(d.store, one, d.now())) lookedAtMs = -Infinity;
    }
  };

  const turn = async (): Promise<void> => {
    if (performance.now() - lookedAtMs >= lookMs) await look();
    while (!isStopped) {
      const wanted = turns.shareOut();
      if (wanted.length === 0) return;
      const marks = new Map(wanted.map((key) => [key.webhookId, turns.find(key)?.due ?? 0]));
      const endsAtMs = performance.now() + LEASE_MS;
      const events = await claimDue(d.store, wanted, { now: d.now(), leaseMs: LEASE_MS });
      const counts = new Map<string, number>();
      for (const event of events) {
        counts.set(event.webhookId, (counts.get(event.webhookId) ?? 0) + 1);
        take(event, endsAtMs);
      }
      for (const { room, ...key } of wanted) {
        const endpoint = turns.find(key);
        // What was told meanwhile stays to be looked for.
        if (endpoint !== null && (counts.get(key.webhookId) ?? 0) < room) {
          endpoint.exhausted = marks.get(key.webhookId) ?? 0;
        }
      }
    }
  };

  const take = (event: ClaimedEvent, endsAtMs: number): void => {
    const endpoint = turns.find(event);
    if (endpoint === null) return; // it was there a moment ago; else the lease ends by itself
    endpoint.held += 1;
    if (event.isFailing) turns.suspect(endpoint);
    const line = waiting.get(endpoint);
    if (line === undefined) waiting.set(endpoint, [{ event, endpoint, endsAtMs }]);
    else line.push({ event, endpoint, endsAtMs });
    begin(endpoint);
  };

  /** Calls what waits for this endpoint, as far as it has places. */
  const begin = (endpoint: Endpoint): void => {
    const line = waiting.get(endpoint) ?? [];
    const isProbed = turns.isProbed(endpoint);
    while (line.length > 0 && endpoint.calls < (isProbed ? 1 : endpoint.places)) {
      const held = line.shift()!;
      const isLate = held.endsAtMs - performance.now() < callMaxMs + LEASE_MARGIN_MS;
      if (isLate || isStopped) {
        release(held);
        continue;
      }
      endpoint.calls += 1;
      const work = carryOut(held).finally(() => {
        endpoint.calls -= 1;
        underWay.delete(work);
        if (turns.isProbed(endpoint)) giveBack(endpoint);
        begin(endpoint);
      });
      underWay.add(work);
    }
    if (line.length === 0) waiting.delete(endpoint);
  };

  /** All that waits for it. */
  const giveBack = (endpoint: Endpoint): void => {
    for (const held of waiting.get(endpoint)?.splice(0) ?? []) release(held);
  };

  const release = (held: Held, nextAt: Date | null = null): void =>
    finish(held, { event: held.event, outcome: 'released', attempt: null, nextAt });

  /** Never rejects. */
  const carryOut = async (held: Held): Promise<void> => {
    const { event, endpoint } = held;
    const sentAt = d.now();
    const startedMs = performance.now();
    const span = beginSpan('webhook call', {
      kind: 'client',
      parent: null,
      attributes: {
        'mailstead.webhook_id': event.webhookId,
        'mailstead.tenant_id': event.tenantId,
        'mailstead.webhook_event_id': showEventId(event.id),
        'mailstead.attempt': event.attempts + 1,
      },
    });
    let answer: Answer;
    try {
      const secrets = secretsOf(event);
      answer =
        secrets === null
          ? { httpStatus: null, response: null, error: SECRET_LOST }
          : await caller.call({
              webhookId: event.webhookId,
              endpoint: event.endpoint,
              headers: {
                ...signatureHeaders(secrets, {
                  id: showEventId(event.id),
                  at: sentAt,
                  body: event.payload,
                }),
                'content-type': 'application/json',
                'user-agent': 'Mailstead',
                accept: '*/*',
              },
              body: event.payload,
              signal: stopping.signal,
            });
    } catch (error) {
      noteCall('not_called', startedMs);
      span?.end('not_called');
      d.log.error({ err: error, ...aboutEvent(event) }, 'an endpoint could not be called');
      release(held, new Date(sentAt.getTime() + OWN_FAULT_DELAY_MS));
      return;
    }
    const { httpStatus } = answer;
    if (httpStatus === null && stopping.signal.aborted) {
      span?.end('aborted');
      release(held);
      return;
    }
    const attempt = { ...answer, sentAt, durationMs: Math.round(performance.now() - startedMs) };
    const isAcknowledged = httpStatus !== null && httpStatus >= 200 && httpStatus < 300;
    if (isAcknowledged) turns.acknowledged(endpoint);
    else turns.failed(endpoint);
    const isGone = httpStatus === HTTP_GONE;
    const outcome = isAcknowledged ? 'acknowledged' : isGone ? 'gone' : 'failed';
    noteCall(outcome, startedMs);
    span?.set({ 'http.response.status_code': httpStatus ?? 0, 'mailstead.outcome': outcome });
    span?.end(isAcknowledged ? undefined : outcome);
    if (isGone) giveBack(endpoint);
    finish(held, {
      event,
      outcome,
      attempt,
      nextAt: isAcknowledged || isGone ? null : nextCall(event.attempts, d),
    });
  };

  const secretOf = (event: ClaimedEvent, sealed: Buffer): string | null => {
    try {
      return unsealSecret(d.key, event, sealed);
    } catch (error) {
      d.log.error({ err: error, ...aboutEvent(event) }, 'a signing secret cannot be read');
      return null;
    }
  };

  /** Null: it was sealed with another key. So may be the one before, which a rotation replaced for that reason. */
  const secretsOf = (event: ClaimedEvent): readonly string[] | null => {
    const secret = secretOf(event, event.secretSealed);
    if (secret === null) return null;
    const sealed = event.secretPreviousSealed;
    const previous = sealed === null ? null : secretOf(event, sealed);
    return previous === null ? [secret] : [secret, previous];
  };

  const finish = (held: Held, result: Ended): void => {
    ended.push({ held, result });
    settling ??= settleSoon();
  };

  /** Stores what ended until nothing is left; while the database is away, as long as the leases last. */
  const settleSoon = async (): Promise<void> => {
    await new Promise((resolve) => setTimeout(resolve, SETTLE_MS));
    while (ended.length > 0) {
      const group = ended.splice(0, SETTLE_MAX);
      await storeGroup(group);
      for (const { held } of group) held.endpoint.held -= 1;
      wake();
    }
    settling = null;
  };

  const storeGroup = async (group: typeof ended): Promise<void> => {
    const results = group.map(({ result }) => result);
    const endsAtMs = Math.max(...group.map(({ held }) => held.endsAtMs));
    for (;;) {
      try {
        for (const { reason, ...key } of await settle(d.store, results, d.now())) {
          d.log.warn(
            { tenant_id: key.tenantId, webhook_id: key.webhookId, reason },
            'a webhook endpoint was disabled',
          );
        }
        return;
      } catch (error) {
        d.log.warn({ err: error, calls: group.length }, 'what came of calls could not be stored');
        if (isStopped || performance.now() > endsAtMs) return; // they are made again
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  };

  // In the context of the start, as in jobs/turns.ts.
  const run = AsyncLocalStorage.bind(async (): Promise<void> => {
    while (isWanted && !isStopped) {
      isWanted = false;
      try {
        await turn();
        plan(lookMs);
      } catch (error) {
        isWanted = false;
        if (isStopped) return;
        d.log.warn({ err: error }, 'webhooks wait');
        plan(RETRY_MS);
      }
    }
  });

  const plan = (ms: number): void => {
    clearTimeout(timer);
    if (!isStopped) timer = setTimeout(wake, ms).unref();
  };

  const wake = (): void => {
    isWanted = true;
    if (isStopped) return;
    running ??= run().finally(() => {
      running = null;
      if (isWanted) wake(); // while it ended
    });
  };

  wake();
  return {
    tell(endpoints) {
      for (const key of endpoints) markDue(key);
      if (endpoints.length > 0) wake();
    },
    nudge() {
      lookedAtMs = -Infinity;
      wake();
    },
    async stop() {
      isStopped = true;
      clearTimeout(timer);
      await running;
      for (const endpoint of waiting.keys()) giveBack(endpoint);
      const grace = setTimeout(() => stopping.abort(), STOP_GRACE_MS);
      await Promise.all(underWay);
      clearTimeout(grace);
      await settling;
      await caller.close();
    },
  };
}

function noteCall(outcome: string, startedMs: number): void {
  webhookCalls.inc({ outcome });
  webhookDuration.observe((performance.now() - startedMs) / 1_000);
}

/** For the log. */
const aboutEvent = ({ tenantId, webhookId, id }: ClaimedEvent) => ({
  tenant_id: tenantId,
  webhook_id: webhookId,
  event_id: showEventId(id),
});

/** Null: that was the last one. */
function nextCall(attempts: number, d: Pick<CallsOptions, 'now' | 'random'>): Date | null {
  const delayMs = RETRY_DELAYS_MS[attempts];
  if (delayMs === undefined) return null;
  return new Date(d.now().getTime() + Math.round(delayMs * (1 + d.random() * JITTER)));
}
