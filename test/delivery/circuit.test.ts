// When a lane is closed and opened again, and how many connections it trusts itself to use: with a clock of our own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createCircuit, type Circuit, type Contact } from '../../src/delivery/circuit.ts';
import { createConcurrency } from '../../src/delivery/concurrency.ts';

const MINUTE = 60_000;
const rules = { failuresMax: 5, openMs: 5 * MINUTE, openMaxMs: 60 * MINUTE };
/** In the middle of the jitter. */
const open = (): Circuit => createCircuit({ rules, random: () => 0.5 });
const attempt = (circuit: Circuit, contact: Contact, nowMs = 0): void =>
  circuit.end(circuit.begin(nowMs), { contact, why: 'greeting: 554 no', nowMs });
const fail = (circuit: Circuit, count: number, nowMs = 0): void => {
  for (let number = 0; number < count; number++) attempt(circuit, 'unreachable', nowMs);
};

const test = suite('circuit');

test('five failures in a row open it, four do not, and a success between begins anew', () => {
  const circuit = open();
  fail(circuit, 4);
  attempt(circuit, 'talked');
  fail(circuit, 4);
  attempt(circuit, 'nothing');
  assert.is(circuit.state(0), 'closed');
  fail(circuit, 1);
  assert.equal(circuit.view(0), {
    state: 'open',
    openedAtMs: 0,
    openUntilMs: 5 * MINUTE,
    opens: 1,
    reason: 'greeting: 554 no',
  });
  assert.not.ok(circuit.admits(0));
});

test('half open lets one probe through; its failure doubles the pause up to the most', () => {
  const circuit = open();
  fail(circuit, 5);
  let nowMs = 0;
  for (const minutes of [10, 20, 40, 60, 60]) {
    nowMs = circuit.view(nowMs).openUntilMs ?? 0;
    assert.not.ok(circuit.admits(nowMs - 1));
    assert.is(circuit.state(nowMs), 'half_open');
    assert.ok(circuit.admits(nowMs));
    const probe = circuit.begin(nowMs);
    assert.ok(probe.isProbe);
    assert.not.ok(circuit.admits(nowMs), 'one at a time');
    circuit.end(probe, { contact: 'unreachable', why: 'connect: refused', nowMs });
    assert.is((circuit.view(nowMs).openUntilMs ?? 0) - nowMs, minutes * MINUTE);
  }
});

test('a probe that talks closes it, one that tried nothing leaves the place to the next', () => {
  const circuit = open();
  fail(circuit, 5);
  const nowMs = 5 * MINUTE;
  attempt(circuit, 'nothing', nowMs);
  assert.is(circuit.state(nowMs), 'half_open');
  assert.ok(circuit.admits(nowMs));
  attempt(circuit, 'talked', nowMs);
  assert.is(circuit.state(nowMs), 'closed');
  fail(circuit, 5, nowMs);
  assert.is(circuit.view(nowMs).openUntilMs, nowMs + 5 * MINUTE, 'the doubling began anew');
});

test('what began before it opened decides nothing afterwards', () => {
  const circuit = open();
  const early = [circuit.begin(0), circuit.begin(0), circuit.begin(0)];
  fail(circuit, 5);
  const { openUntilMs } = circuit.view(0);
  circuit.end(early[0]!, { contact: 'unreachable', why: '', nowMs: MINUTE });
  circuit.end(early[1]!, { contact: 'talked', why: '', nowMs: MINUTE });
  assert.is(circuit.state(MINUTE), 'open');
  circuit.end(early[2]!, { contact: 'talked', why: '', nowMs: 6 * MINUTE });
  assert.is(circuit.state(6 * MINUTE), 'half_open');
  assert.is(circuit.view(MINUTE).openUntilMs, openUntilMs);
});

test('a pause that a peer asks for holds, also against a probe under way', () => {
  const circuit = open();
  circuit.open({ forMs: 120 * MINUTE, reason: '421 [TSS04]', nowMs: 0 });
  assert.is(circuit.view(0).reason, '421 [TSS04]');
  assert.is(circuit.state(119 * MINUTE), 'open');
  const nowMs = 120 * MINUTE;
  const probe = circuit.begin(nowMs);
  circuit.open({ forMs: 120 * MINUTE, reason: 'again', nowMs });
  circuit.end(probe, { contact: 'talked', why: '', nowMs });
  assert.is(circuit.state(nowMs), 'open');
});

test('a restart goes on where the last run was', () => {
  const circuit = open();
  circuit.open({ forMs: MINUTE, reason: 'connect: refused', nowMs: 0, opens: 3 });
  attempt(circuit, 'unreachable', MINUTE);
  assert.is(circuit.view(MINUTE).openUntilMs, 41 * MINUTE);
});

test('lanes that open together are not probed together', () => {
  const ends = [0, 0.25, 0.999].map((random) => {
    const circuit = createCircuit({ rules, random: () => random });
    fail(circuit, 5);
    return circuit.view(0).openUntilMs ?? 0;
  });
  assert.is(new Set(ends).size, 3);
  assert.ok(ends.every((at) => at >= 4.5 * MINUTE && at < 5.5 * MINUTE));
});

test('concurrency: one more after as many good ones, one less at the first bad one', () => {
  const concurrency = createConcurrency({ max: 10 });
  assert.is(concurrency.value(), 5);
  for (let number = 0; number < 4; number++) concurrency.good(true);
  assert.is(concurrency.value(), 5);
  concurrency.good(true);
  assert.is(concurrency.value(), 6);
  concurrency.bad();
  assert.is(concurrency.value(), 5, 'at the first of a series');
  for (let number = 0; number < 4; number++) concurrency.bad();
  assert.is(concurrency.value(), 5, 'and once for as many more');
  concurrency.bad();
  assert.is(concurrency.value(), 4);
});

test('concurrency: never below one, never above the limit, nothing learned from idle places', () => {
  const concurrency = createConcurrency({ max: 6 });
  for (let number = 0; number < 100; number++) concurrency.good(false);
  assert.is(concurrency.value(), 5);
  for (let number = 0; number < 100; number++) concurrency.good(true);
  assert.is(concurrency.value(), 6);
  for (let number = 0; number < 100; number++) concurrency.bad();
  assert.is(concurrency.value(), 1);
  concurrency.restart();
  concurrency.limit(2);
  assert.is(concurrency.value(), 2);
});

test('a peer that never takes more than five is asked for more ever more rarely', () => {
  const concurrency = createConcurrency({ max: 10 });
  const refusals: number[] = [];
  for (let number = 1; number <= 2_000; number++) {
    if (concurrency.value() > 5) {
      concurrency.bad();
      refusals.push(number);
    } else concurrency.good(true);
  }
  // With a step up after every five good ones it would be one in six.
  assert.ok(refusals.length < 2_000 / 20, `${refusals.length} of 2000`);
  const last = refusals.at(-1)! - refusals.at(-2)!;
  assert.ok(last > refusals[1]! - refusals[0]!);
});

test('a limit that is gone is found out', () => {
  const concurrency = createConcurrency({ max: 10 });
  for (let number = 0; number < 500; number++) {
    if (concurrency.value() > 5) concurrency.bad();
    else concurrency.good(true);
  }
  for (let number = 0; number < 1_000; number++) concurrency.good(true);
  assert.is(concurrency.value(), 10);
});

test.run();
