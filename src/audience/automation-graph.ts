// The form of an automation: which steps follow which. A graph is one trigger from which every step can be reached, without
// circles; a step has one way on, a condition and a wait one for each way they can end. Pure.
import type { Issue } from '../access/refusal.ts';
import type { AutomationConnection, AutomationStep, StepType } from '../store/automation.ts';

export type ConnectionType = AutomationConnection['type'];

export const STEPS_MAX = 150;
/** No step has more than two ways on. */
const CONNECTIONS_MAX = 2 * STEPS_MAX;

/** How a step can end. */
const ends = (type: StepType): readonly ConnectionType[] =>
  type === 'condition'
    ? ['condition_met', 'condition_not_met']
    : type === 'wait_for_event'
      ? ['event_received', 'timeout']
      : ['default'];

/** The key of the step that follows; null: the run ends here. */
export const nextKey = (
  connections: readonly AutomationConnection[],
  from: string,
  type: ConnectionType,
): string | null => connections.find((one) => one.from === from && one.type === type)?.to ?? null;

/** The step itself and all that may follow it. */
export function reachableFrom(
  connections: readonly AutomationConnection[],
  key: string,
): ReadonlySet<string> {
  const reached = new Set([key]);
  for (const at of reached) {
    for (const { from, to } of connections) if (from === at) reached.add(to);
  }
  return reached;
}

/** What is wrong with the graph. Keys are texts by now, types are known. */
export function graphIssues(
  steps: readonly Pick<AutomationStep, 'key' | 'type'>[],
  connections: readonly AutomationConnection[],
): Issue[] {
  if (steps.length === 0 || steps.length > STEPS_MAX) {
    return [{ path: 'steps', message: `\`steps\` must have 1 to ${STEPS_MAX} steps.` }];
  }
  if (connections.length > CONNECTIONS_MAX) {
    const message = `\`connections\` must have at most ${CONNECTIONS_MAX} connections.`;
    return [{ path: 'connections', message }];
  }
  const issues: Issue[] = [];
  const types = new Map<string, StepType>();
  for (const [index, { key, type }] of steps.entries()) {
    if (types.has(key)) {
      const path = `steps.${index}.key`;
      issues.push({ path, message: `The key \`${key}\` is used by another step, too.` });
    }
    types.set(key, type);
  }
  const triggers = steps.filter(({ type }) => type === 'trigger');
  if (triggers.length !== 1) {
    const message = `\`steps\` must have exactly one step of type \`trigger\`; there are ${triggers.length}.`;
    issues.push({ path: 'steps', message });
  }
  issues.push(
    ...connections.flatMap((one, index) => endIssues(one, index, { types, connections })),
  );
  const [trigger] = triggers;
  if (issues.length > 0 || trigger === undefined) return issues;

  const circle = findCircle(connections, trigger.key);
  if (circle !== null) {
    const message = `The connections go round in a circle: ${circle.join(' -> ')}.`;
    return [{ path: 'connections', message }];
  }
  const reached = reachableFrom(connections, trigger.key);
  return steps.flatMap(({ key }, index) =>
    reached.has(key)
      ? []
      : [
          {
            path: `steps.${index}`,
            message: `No connection leads from the trigger to the step \`${key}\`.`,
          },
        ],
  );
}

function endIssues(
  { from, to, type }: AutomationConnection,
  index: number,
  all: {
    readonly types: ReadonlyMap<string, StepType>;
    readonly connections: readonly AutomationConnection[];
  },
): Issue[] {
  const path = `connections.${index}`;
  const issues: Issue[] = [];
  const fromType = all.types.get(from);
  if (fromType === undefined) {
    issues.push({ path: `${path}.from`, message: `There is no step with the key \`${from}\`.` });
  } else if (!ends(fromType).includes(type)) {
    const wanted = ends(fromType)
      .map((one) => `\`${one}\``)
      .join(' or ');
    const message = `A connection from a step of type \`${fromType}\` has the type ${wanted}, not \`${type}\`.`;
    issues.push({ path: `${path}.type`, message });
  }
  if (!all.types.has(to)) {
    issues.push({ path: `${path}.to`, message: `There is no step with the key \`${to}\`.` });
  } else if (all.types.get(to) === 'trigger') {
    issues.push({ path: `${path}.to`, message: 'No connection leads to the trigger.' });
  }
  if (all.connections.findIndex((one) => one.from === from && one.type === type) < index) {
    const message = `Another connection of the type \`${type}\` leaves the step \`${from}\` already.`;
    issues.push({ path, message });
  }
  return issues;
}

/** The keys of one circle, the first again at the end; null: there is none. */
function findCircle(
  connections: readonly AutomationConnection[],
  start: string,
): readonly string[] | null {
  const done = new Set<string>();
  const trail: string[] = [];
  const visit = (key: string): readonly string[] | null => {
    const before = trail.indexOf(key);
    if (before !== -1) return [...trail.slice(before), key];
    if (done.has(key)) return null;
    trail.push(key);
    for (const { from, to } of connections) {
      const circle = from === key ? visit(to) : null;
      if (circle !== null) return circle;
    }
    trail.pop();
    done.add(key);
    return null;
  };
  return visit(start);
}
