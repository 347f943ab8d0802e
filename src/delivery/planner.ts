// Finds the way of what was claimed: its address of departure, the hosts that take it, the lane that both make. Questions
// are asked of the DNS a bounded number at a time, and one destination is asked about once, however many wait. Whoever
// waits for too long goes back to the queue, and its destination is left alone until the answer is there: a name server
// that says nothing holds up nobody else's mail.
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { Egress } from './egress.ts';
import type { NextHops } from './next-hop.ts';

export interface Way {
  readonly egress: Egress;
  readonly hops: NextHops;
}

export interface Planner {
  add(deliveries: readonly ClaimedDelivery[]): void;
  /** Deliveries that wait for an answer. */
  waiting(): number;
  /** So much is asked already that no destination should be claimed that is not known. */
  isBusy(): boolean;
  /** Destinations whose answer has been waited for too long. */
  slow(): readonly string[];
  /** Takes back what waits for those. */
  takeSlow(): readonly ClaimedDelivery[];
  takeWaiting(which: (delivery: ClaimedDelivery) => boolean): readonly ClaimedDelivery[];
}

/**
 * Of destinations that are asked about for the first time, so that known ones never wait behind them: how many, beside
 * those whose answer takes long (a policy host may say nothing for a minute), and how many with those.
 */
const STRANGERS_AT_ONCE = 50;
const STRANGERS_MAX = 400;
const AT_ONCE_MAX = 500;
const WAITING_MAX = 200;
const SLOW_MS = 5_000;
/** What took long is remembered until its mail has been claimed again. */
const ANSWER_LIFE_MS = 60_000;
const ANSWERS_MAX = 1_000;

interface Question {
  readonly destination: string;
  readonly egress: Egress;
  readonly isStranger: boolean;
  readonly since: number;
  /** Null: not yet. */
  askedAt: number | null;
  deliveries: ClaimedDelivery[];
}

/** `find` and `onFound` never reject or throw; `onFound` is not called for what was taken back. */
export function createPlanner(options: {
  readonly now: () => number;
  /** Where it leaves; many emails of one destination may differ. */
  readonly egressFor: (delivery: ClaimedDelivery) => Egress;
  readonly find: (destination: string, egress: Egress) => Promise<NextHops>;
  /** Its lane is known, so its answer should be near. */
  readonly isKnown: (destination: string) => boolean;
  readonly onFound: (deliveries: readonly ClaimedDelivery[], way: Way) => void;
}): Planner {
  const { now } = options;
  /** Asked or to be asked, by destination and egress. */
  const open = new Map<string, Question>();
  const line: { readonly key: string; readonly question: Question }[] = [];
  const answers = new Map<string, { readonly way: Way; readonly untilMs: number }>();
  let asked = 0;

  const next = (): void => {
    const strangers = [...open.values()].filter((one) => one.isStranger && one.askedAt !== null);
    let strangersAsked = strangers.length;
    let holding = strangers.filter(({ askedAt }) => now() - (askedAt ?? 0) <= SLOW_MS).length;
    for (let at = 0; at < line.length && asked < AT_ONCE_MAX;) {
      const { key, question } = line[at]!;
      if (question.isStranger) {
        if (holding >= STRANGERS_AT_ONCE || strangersAsked >= STRANGERS_MAX) {
          at += 1;
          continue;
        }
        holding += 1;
        strangersAsked += 1;
      }
      line.splice(at, 1);
      void ask(key, question);
    }
  };

  const ask = async (key: string, question: Question): Promise<void> => {
    asked += 1;
    question.askedAt = now();
    const { egress } = question;
    const hops = await options.find(question.destination, egress);
    asked -= 1;
    open.delete(key);
    const way = { egress, hops };
    if (now() - question.since > SLOW_MS) {
      if (answers.size >= ANSWERS_MAX) answers.clear();
      answers.set(key, { way, untilMs: now() + ANSWER_LIFE_MS });
    }
    if (question.deliveries.length > 0) options.onFound(question.deliveries, way);
    next();
  };

  const answered = (key: string): Way | null => {
    const answer = answers.get(key);
    if (answer === undefined) return null;
    if (answer.untilMs > now()) return answer.way;
    answers.delete(key);
    return null;
  };

  const isSlow = ({ since }: Question): boolean => now() - since > SLOW_MS;

  const take = (
    which: (delivery: ClaimedDelivery, question: Question) => boolean,
  ): ClaimedDelivery[] => {
    const taken: ClaimedDelivery[] = [];
    for (const question of open.values()) {
      const kept = question.deliveries.filter((one) => !which(one, question));
      taken.push(...question.deliveries.filter((one) => which(one, question)));
      question.deliveries = kept;
    }
    return taken;
  };

  return {
    add(deliveries) {
      const found = new Map<string, { way: Way; deliveries: ClaimedDelivery[] }>();
      for (const delivery of deliveries) {
        const destination = delivery.lane;
        const egress = options.egressFor(delivery);
        const key = `${egress.name} ${destination}`;
        const way = answered(key);
        if (way !== null) {
          const group = found.get(key) ?? { way, deliveries: [] };
          group.deliveries.push(delivery);
          found.set(key, group);
          continue;
        }
        const known = open.get(key);
        if (known !== undefined) {
          known.deliveries.push(delivery);
          continue;
        }
        const question: Question = {
          destination,
          egress,
          isStranger: !options.isKnown(destination),
          since: now(),
          askedAt: null,
          deliveries: [delivery],
        };
        open.set(key, question);
        line.push({ key, question });
      }
      for (const group of found.values()) options.onFound(group.deliveries, group.way);
      next();
    },
    waiting: () => [...open.values()].reduce((sum, { deliveries }) => sum + deliveries.length, 0),
    isBusy: () =>
      open.size >= AT_ONCE_MAX ||
      [...open.values()].reduce((sum, { deliveries }) => sum + deliveries.length, 0) >= WAITING_MAX,
    slow: () => [...open.values()].filter(isSlow).map(({ destination }) => destination),
    takeSlow() {
      next(); // those that have become slow have made room
      return take((_, question) => isSlow(question));
    },
    takeWaiting: (which) => take((delivery) => which(delivery)),
  };
}
