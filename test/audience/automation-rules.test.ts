// The pure parts of automations: durations, conditions, payloads and schemas, and what is wrong with steps and their graph.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Issue } from '../../src/access/refusal.ts';
import {
  readGraph,
  type GivenConnection,
  type GivenStep,
} from '../../src/audience/automation-config.ts';
import { parseDuration } from '../../src/audience/automation-duration.ts';
import { holds, readRule } from '../../src/audience/automation-rules.ts';
import type { Scope } from '../../src/audience/automation-values.ts';
import { eventNameIssues, fitIssues, payloadIssues } from '../../src/audience/event-payload.ts';

const test = suite('automation rules');
const MINUTE_MS = 60_000;

test('durations', () => {
  const good: readonly (readonly [string, number])[] = [
    ['30 minutes', 30],
    ['1 hour', 60],
    ['1h', 60],
    ['12 Hours', 720],
    ['1 week', 10_080],
    ['30 days', 43_200],
    ['1 day 6 hours', 1_800],
    ['1 day, 6 hours and 5 min', 1_805],
    [' 90 seconds ', 1.5],
  ];
  for (const [text, minutes] of good) {
    assert.equal(parseDuration(text), { ok: true, ms: minutes * MINUTE_MS }, text);
  }
  const bad = [
    '',
    'soon',
    '5',
    'days',
    '1.5 hours',
    '-1 day',
    '0 minutes',
    '31 days',
    '1 month',
    'and 1 day',
  ];
  for (const text of [...bad, '1 day 6', '1 constructor', 'in 1 hour', '9'.repeat(200), 5, null]) {
    assert.not.ok(parseDuration(text).ok, String(text));
  }
});

const scope: Scope = {
  event: {
    plan: 'gold',
    seats: 5,
    trial: false,
    tags: ['a', 'b'],
    none: null,
    'a.b': 1,
    deep: { er: { x: 'y' }, list: [7] },
    empty: '',
  },
  contact: {
    id: 'c',
    email: 'ann@x.test',
    first_name: 'Ann',
    last_name: null,
    unsubscribed: false,
    created_at: '2026-05-06T12:00:00.000Z',
    properties: { city: 'Berlin', age: 33 },
  },
  waits: new Map([
    ['paid', { amount: 1 }],
    ['paid.twice', { amount: 2 }],
  ]),
};

test('conditions', () => {
  const table: readonly (readonly [string, string, unknown, boolean])[] = [
    ['event.plan', 'eq', 'gold', true],
    ['event.plan', 'eq', 'Gold', false],
    ['event.plan', 'neq', 'tin', true],
    ['event.trial', 'eq', false, true],
    ['event.missing', 'eq', null, true],
    ['event.missing', 'neq', 'x', true],
    ['event.seats', 'eq', '5', false],
    ['event.seats', 'gt', 4, true],
    ['event.seats', 'gt', 5, false],
    ['event.seats', 'gte', 5, true],
    ['event.seats', 'lt', 5, false],
    ['event.seats', 'lte', 5, true],
    ['event.missing', 'lt', 5, false],
    ['event.plan', 'gt', 1, false],
    ['event.plan', 'contains', 'ol', true],
    ['event.tags', 'contains', 'b', true],
    ['event.tags', 'contains', 'c', false],
    ['event.plan', 'starts_with', 'go', true],
    ['event.plan', 'ends_with', 'ld', true],
    ['event.seats', 'starts_with', '5', false],
    ['event.plan', 'exists', undefined, true],
    ['event.none', 'exists', undefined, false],
    ['event.toString', 'exists', undefined, false],
    ['event.tags.length', 'exists', undefined, false],
    ['event.empty', 'is_empty', undefined, true],
    ['event.missing', 'is_empty', undefined, true],
    ['event.trial', 'is_empty', undefined, false],
    ['event.a.b', 'eq', 1, true],
    ['event.deep.er.x', 'eq', 'y', true],
    ['event.deep.list.0', 'eq', 7, true],
    ['contact.first_name', 'eq', 'Ann', true],
    ['contact.last_name', 'is_empty', undefined, true],
    ['contact.email', 'ends_with', '@x.test', true],
    ['contact.properties.city', 'eq', 'Berlin', true],
    ['contact.properties.age', 'gte', 33, true],
    ['contact.city', 'eq', 'Berlin', true],
    ['wait_events.paid.amount', 'eq', 1, true],
    ['wait_events.paid.twice.amount', 'eq', 2, true],
    ['wait_events.never.amount', 'exists', undefined, false],
  ];
  const read = (rule: unknown): ReturnType<typeof readRule> => {
    const issues: Issue[] = [];
    const found = readRule(rule, 'config', issues);
    assert.equal(issues, [], JSON.stringify(rule));
    return found;
  };
  for (const [field, operator, value, expected] of table) {
    const rule = read({ type: 'rule', field, operator, value });
    assert.is(holds(rule!, scope), expected, `${field} ${operator} ${String(value)}`);
  }
  const yes = { type: 'rule', field: 'event.plan', operator: 'exists' };
  const no = { type: 'rule', field: 'event.plan', operator: 'is_empty' };
  assert.is(holds(read({ type: 'and', rules: [yes, no] })!, scope), false);
  assert.is(holds(read({ type: 'or', rules: [no, { type: 'and', rules: [yes] }] })!, scope), true);
  assert.is(holds(read(yes)!, { event: null, contact: null, waits: new Map() }), false);
});

test('rules that are none', () => {
  const good = { type: 'rule', field: 'event.a', operator: 'eq', value: 1 };
  const nested = (depth: number): unknown =>
    depth === 0 ? good : { type: 'and', rules: [nested(depth - 1)] };
  const table: readonly (readonly [unknown, string])[] = [
    [null, 'c'],
    [[], 'c'],
    [{}, 'c.type'],
    [{ ...good, field: 'plan' }, 'c.field'],
    [{ ...good, field: 7 }, 'c.field'],
    [{ ...good, operator: 'like' }, 'c.operator'],
    [{ ...good, operator: 'toString' }, 'c.operator'],
    [{ ...good, value: {} }, 'c.value'],
    [{ ...good, value: undefined }, 'c.value'],
    [{ ...good, value: 'a\0' }, 'c.value'],
    [{ ...good, value: 'x'.repeat(2_001) }, 'c.value'],
    [{ ...good, operator: 'gt', value: '1' }, 'c.value'],
    [{ ...good, operator: 'contains', value: 1 }, 'c.value'],
    [{ type: 'and', rules: [] }, 'c.rules'],
    [{ type: 'or', rules: [good, { ...good, field: '' }] }, 'c.rules.1.field'],
    [nested(9), `c${'.rules.0'.repeat(8)}`],
    [{ type: 'or', rules: Array.from({ length: 101 }, () => good) }, 'c.rules.99'],
  ];
  for (const [rule, path] of table) {
    const issues: Issue[] = [];
    assert.is(readRule(rule, 'c', issues), null);
    assert.equal(
      issues.map((issue) => issue.path),
      [path],
      JSON.stringify(rule)?.slice(0, 100),
    );
  }
});

const start: GivenStep = { key: 'start', type: 'trigger', config: { event_name: 'e' } };
const pause = (key: string): GivenStep => ({ key, type: 'delay', config: { duration: '1h' } });
const check: GivenStep = {
  key: 'check',
  type: 'condition',
  config: { type: 'rule', field: 'event.a', operator: 'exists' },
};
const wait: GivenStep = { key: 'wait', type: 'wait_for_event', config: { event_name: 'e' } };
const link = (from: string, to: string, type?: GivenConnection['type']): GivenConnection => ({
  from,
  to,
  type,
});

function pathsOf(steps: readonly GivenStep[], connections: readonly GivenConnection[]): string[] {
  const issues: Issue[] = [];
  readGraph({ steps, connections }, issues);
  return issues.map(({ path }) => path);
}

test('graphs', () => {
  const [a, b, c] = ['a', 'b', 'c'].map(pause) as [GivenStep, GivenStep, GivenStep];
  const many = Array.from({ length: 149 }, (_, index) => pause(`d${index}`));
  const line = (steps: readonly GivenStep[]): GivenConnection[] =>
    steps.slice(1).map(({ key }, index) => link(steps[index]!.key, key));
  const table: readonly (readonly [GivenStep[], GivenConnection[], string[]])[] = [
    [[start], [], []],
    [[start, ...many], line([start, ...many]), []],
    // Two ways may meet again.
    [
      [start, check, a, b, c],
      [
        link('start', 'check'),
        link('check', 'a', 'condition_met'),
        link('check', 'b', 'condition_not_met'),
        link('a', 'c'),
        link('b', 'c'),
      ],
      [],
    ],
    [[start, check], [link('start', 'check')], []],
    [[start, wait, a], [link('start', 'wait'), link('wait', 'a', 'timeout')], []],
    [[], [], ['steps']],
    [[start, ...many, pause('last')], line([start, ...many]), ['steps']],
    [[a], [], ['steps']],
    [[start, { ...start, key: 'again' }], [], ['steps']],
    [[start, a, { ...b, key: 'a' }], [link('start', 'a')], ['steps.2.key']],
    [[start, a], [], ['steps.1']],
    [[start, a, b], [link('start', 'a'), link('b', 'b')], ['steps.2']],
    [
      [start, a, b, c],
      [link('start', 'a'), link('b', 'c'), link('c', 'b')],
      ['steps.2', 'steps.3'],
    ],
    [[start, a, b], [link('start', 'a'), link('a', 'b'), link('b', 'a')], ['connections']],
    [[start, a], [link('start', 'a'), link('a', 'start')], ['connections.1.to']],
    [
      [start, a],
      [link('start', 'x'), link('y', 'a')],
      ['connections.0.to', 'connections.1.from'],
    ],
    [[start, a, b], [link('start', 'a'), link('start', 'b')], ['connections.1']],
    [[start, a], [link('start', 'a', 'timeout')], ['connections.0.type']],
    [[start, check, a], [link('start', 'check'), link('check', 'a')], ['connections.1.type']],
    [[start, wait, a], [link('start', 'wait'), link('wait', 'a')], ['connections.1.type']],
    [
      [start, wait, a],
      [link('start', 'wait'), link('wait', 'a', 'condition_met')],
      ['connections.1.type'],
    ],
    [[start], Array.from({ length: 301 }, () => link('start', 'start')), ['connections']],
  ];
  for (const [steps, connections, paths] of table) assert.equal(pathsOf(steps, connections), paths);
});

test('configs: all that is wrong is said, by its path', () => {
  const uuid = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
  const at = (path: string): string => `steps.0.config.${path}`;
  const table: readonly (readonly [GivenStep['type'], Record<string, unknown>, string[]])[] = [
    ['trigger', { event_name: 'user.joined' }, []],
    ['trigger', {}, [at('event_name')]],
    ['trigger', { event_name: 'resend:x' }, [at('event_name')]],
    ['trigger', { event_name: 'a\nb' }, [at('event_name')]],
    ['delay', { duration: '31 days' }, [at('duration')]],
    ['delay', {}, [at('duration')]],
    ['wait_for_event', { event_name: 'e', timeout: '1 day', filter_rule: check.config }, []],
    [
      'wait_for_event',
      { event_name: 7, timeout: 'x', filter_rule: {} },
      [at('event_name'), at('timeout'), at('filter_rule.type')],
    ],
    ['send_email', { template: { id: 'welcome' }, topic_id: null, subject: null }, []],
    [
      'send_email',
      { template: { id: uuid, variables: { A: { var: 'event.a' }, B: 1, C: [1] } } },
      [],
    ],
    ['send_email', {}, [at('template')]],
    ['send_email', { template: 'welcome' }, [at('template')]],
    [
      'send_email',
      { template: { id: 'a b' }, from: 'x', reply_to: [], subject: 'a\nb', topic_id: 'x' },
      [at('template.id'), at('subject'), at('from'), at('reply_to'), at('topic_id')],
    ],
    [
      'send_email',
      { template: { id: 'a', variables: { A: { var: 'a' }, 'B-': 1, C: null } } },
      [at('template.variables.A.var'), at('template.variables'), at('template.variables.C')],
    ],
    ['contact_update', { first_name: null, properties: { a: null, b: { var: 'event.b' } } }, []],
    ['contact_update', {}, ['steps.0.config']],
    [
      'contact_update',
      { first_name: 7, last_name: 'x'.repeat(256), unsubscribed: 'no', properties: [] },
      [at('first_name'), at('last_name'), at('unsubscribed'), at('properties')],
    ],
    ['contact_update', { properties: { a: {} } }, [at('properties.a')]],
    ['contact_delete', {}, []],
    ['add_to_segment', { segment_id: uuid }, []],
    ['add_to_segment', { segment_id: 'all' }, [at('segment_id')]],
  ];
  for (const [type, config, paths] of table) {
    const found = pathsOf([{ key: 'k', type, config }], []);
    const own = found.filter((path) => path !== 'steps');
    assert.equal(own, paths, `${type} ${JSON.stringify(config).slice(0, 100)}`);
  }
  assert.equal(pathsOf([{ ...start, key: '' }], []), ['steps.0.key']);
  assert.equal(pathsOf([{ ...start, key: 'x'.repeat(101) }], []), ['steps.0.key']);
  const heavy = {
    template: {
      id: 'a',
      variables: Object.fromEntries(
        Array.from({ length: 50 }, (_, index) => [`V${index}`, 'x'.repeat(2_000)]),
      ),
    },
  };
  const three: GivenStep[] = [1, 2, 3].map((n) => ({
    key: `m${n}`,
    type: 'send_email',
    config: heavy,
  }));
  const links = [link('start', 'm1'), link('m1', 'm2'), link('m2', 'm3')];
  assert.equal(pathsOf([start, ...three], links), ['steps']);
  // What nobody knows is not stored.
  const graph = readGraph(
    { steps: [{ ...start, config: { event_name: 'e', other: 1 } }], connections: [] },
    [],
  );
  assert.equal(graph.steps, [{ key: 'start', type: 'trigger', config: { event_name: 'e' } }]);
});

test('payloads', () => {
  const schema = { s: 'string', n: 'number', b: 'boolean', d: 'date' } as const;
  assert.equal(fitIssues(null, schema), []);
  assert.equal(fitIssues({ s: '', n: 0, b: false, d: '2026-02-03', other: {} }, schema), []);
  assert.equal(fitIssues({ s: null, d: '2026-02-03T10:11:12.5+02:00' }, schema), []);
  const wrong = fitIssues({ s: 1, n: '1', b: 'true', d: 'tomorrow' }, schema);
  assert.equal(
    wrong.map(({ path }) => path),
    ['payload.s', 'payload.n', 'payload.b', 'payload.d'],
  );
  // Days that no month has.
  for (const d of [
    '2030-02-31',
    '2030-02-29T10:00:00Z',
    '2030-04-31T00:00:00+02:00',
    '2030-13-01',
  ]) {
    assert.equal(fitIssues({ d }, schema).length, 1, d);
  }
  assert.equal(fitIssues({ d: '2028-02-29' }, schema), []);
  assert.equal(fitIssues({ d: 5 }, { d: 'date', toString: 'string' } as never).length, 1);

  const deep = (depth: number): Record<string, unknown> =>
    depth === 0 ? {} : { a: deep(depth - 1) };
  assert.equal(payloadIssues(deep(15)), []);
  assert.is(payloadIssues(deep(16)).length, 1);
  assert.is(payloadIssues(deep(60)).length, 1);
  assert.equal(payloadIssues({ a: 'x'.repeat(65_528) }), []);
  assert.is(payloadIssues({ a: 'x'.repeat(65_529) }).length, 1);
  for (const bad of [{ a: 'x\0' }, { '\ud800': 1 }, { a: [{ b: '\udc00' }] }]) {
    assert.is(payloadIssues(bad).length, 1, JSON.stringify(bad));
  }
  for (const name of ['', ' ', '.', '..', 'RESEND:x', 'a\u0000', 'x'.repeat(101), '\ud800']) {
    assert.is(eventNameIssues('event', name).length, 1, JSON.stringify(name));
  }
  for (const name of ['user.joined', 'Ein Ereignis / 100 %', '😀'])
    assert.equal(eventNameIssues('event', name), []);
});

test.run();
