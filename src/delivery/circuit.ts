// Whether a lane may be used at all. Failures to reach any host open the circuit for a while; then one attempt tells
// whether it closes, or opens for twice as long. A peer that asks for a pause opens it too. Pure: the clock and the
// jitter are passed in.
//
//   closed ──failures in a row, or a pause asked for──► open ──its time is over──► half open
//     ▲                                                  ▲                            │
//     └──────────────── the probe talked ────────────────┼────────────────────────────┤
//                                                        └──the probe failed: twice as long
import type { Circuit as CircuitState } from '../queue/lanes.ts';

export interface CircuitRules {
  /** In a row, and each over all hosts that were tried. */
  readonly failuresMax: number;
  readonly openMs: number;
  /** Where the doubling ends. */
  readonly openMaxMs: number;
}

/** What an attempt said about the hosts: `nothing` was tried, or it ended over something of our own. */
export type Contact = 'talked' | 'unreachable' | 'nothing';

export interface CircuitView {
  readonly state: CircuitState;
  readonly openedAtMs: number | null;
  readonly openUntilMs: number | null;
  /** In a row. */
  readonly opens: number;
  readonly reason: string | null;
}

export interface Circuit {
  view(nowMs: number): CircuitView;
  state(nowMs: number): CircuitState;
  /** Half open: the one probe, while none is under way. */
  admits(nowMs: number): boolean;
  /** An attempt begins; give what it returns to `end`. */
  begin(nowMs: number): { readonly isProbe: boolean };
  end(
    attempt: { readonly isProbe: boolean },
    about: { readonly contact: Contact; readonly why: string; readonly nowMs: number },
  ): void;
  /** The peer asked for quiet, or it is known from before the start. */
  open(about: {
    readonly forMs: number;
    readonly reason: string;
    readonly nowMs: number;
    readonly opens?: number;
  }): void;
  /** What opened it is over: the way out was blocked, not the hosts. */
  close(): void;
  /** From the next failure on. */
  use(rules: CircuitRules): void;
}

/** Lanes that opened together are not probed together. */
const JITTER = 0.1;

/** `random` is in [0, 1). */
export function createCircuit(options: {
  readonly rules: CircuitRules;
  readonly random: () => number;
}): Circuit {
  let { rules } = options;
  let failures = 0;
  let opens = 0;
  let openedAtMs: number | null = null;
  let openUntilMs: number | null = null;
  let reason: string | null = null;
  let isProbing = false;

  const stateAt = (nowMs: number): CircuitState =>
    openUntilMs === null ? 'closed' : nowMs < openUntilMs ? 'open' : 'half_open';

  const openFor = (forMs: number, why: string, nowMs: number): void => {
    openedAtMs ??= nowMs;
    openUntilMs = nowMs + forMs;
    reason = why;
    failures = 0;
    isProbing = false;
  };

  const fail = (why: string, nowMs: number): void => {
    const plannedMs = Math.min(rules.openMs * 2 ** Math.min(opens, 30), rules.openMaxMs);
    opens += 1;
    openFor(plannedMs * (1 - JITTER + 2 * JITTER * options.random()), why, nowMs);
  };

  const close = (): void => {
    failures = 0;
    opens = 0;
    openedAtMs = null;
    openUntilMs = null;
    reason = null;
    isProbing = false;
  };

  return {
    state: stateAt,
    view: (nowMs) => ({ state: stateAt(nowMs), openedAtMs, openUntilMs, opens, reason }),
    admits(nowMs) {
      const state = stateAt(nowMs);
      return state === 'closed' || (state === 'half_open' && !isProbing);
    },
    begin(nowMs) {
      const isProbe = stateAt(nowMs) === 'half_open';
      if (isProbe) isProbing = true;
      return { isProbe };
    },
    end({ isProbe }, { contact, why, nowMs }) {
      if (isProbe) isProbing = false;
      const state = stateAt(nowMs);
      // What began before it opened says nothing about now: only the probe decides.
      if (state !== 'closed' && !isProbe) return;
      if (contact === 'nothing') return;
      if (contact === 'talked') {
        // A pause that was asked for while the probe was under way holds.
        if (state !== 'open') close();
        return;
      }
      failures += 1;
      if (isProbe || failures >= rules.failuresMax) fail(why, nowMs);
    },
    open({ forMs, reason: why, nowMs, opens: before }) {
      opens = before ?? Math.max(1, opens);
      openFor(forMs, why, nowMs);
    },
    close,
    use(next) {
      rules = next;
    },
  };
}
