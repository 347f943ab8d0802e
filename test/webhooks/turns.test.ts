// Who is called next, and with how much: whoever takes all it can leaves a place for the one that comes after.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { createTurns, type Endpoint, type Turns } from '../../src/webhooks/turns.ts';

const test = suite('webhook turns');

/** Endpoints of a new tenant, each with more events than it can be called with. */
function crowd(turns: Turns, count: number): readonly Endpoint[] {
  const tenantId = newId();
  return Array.from({ length: count }, () => {
    const endpoint = turns.find({ tenantId, webhookId: newId() })!;
    endpoint.due += 1;
    return endpoint;
  });
}

/** Claims what is shared out until nothing more is, and no call ever ends. How many are held. */
function claimAll(turns: Turns): number {
  let count = 0;
  for (;;) {
    const shared = turns.shareOut();
    if (shared.length === 0) return count;
    for (const { room, ...key } of shared) {
      turns.find(key)!.held += room;
      count += room;
    }
  }
}

const heldBy = (endpoints: readonly Endpoint[]): number =>
  endpoints.reduce((sum, { held }) => sum + held, 0);

test('ten tenants whose endpoints all hang leave a place for the eleventh', () => {
  const turns = createTurns();
  const greedy = Array.from({ length: 10 }, () => crowd(turns, 100));
  for (const endpoints of greedy) {
    for (const one of endpoints) for (let call = 0; call < 10; call++) turns.acknowledged(one);
  }
  assert.ok(claimAll(turns) > 400);
  assert.ok(greedy.every((endpoints) => heldBy(endpoints) > 20));
  const late = crowd(turns, 1);
  claimAll(turns);
  assert.is(heldBy(late), 3, 'as many as a new one gets');
});

test('a new endpoint that hangs takes few of the places of its tenant', () => {
  const turns = createTurns();
  const hanging = crowd(turns, 30);
  const [good] = crowd(turns, 1);
  claimAll(turns);
  assert.is(heldBy(hanging), 30 * 3);
  // Whoever acknowledges has more claimed than calls, until it fails.
  good!.held = 0;
  turns.acknowledged(good!);
  good!.due += 1;
  claimAll(turns);
  assert.is(good!.held, 16);
  good!.held = 0;
  for (let call = 0; call < 3; call++) turns.failed(good!);
  claimAll(turns);
  assert.is(good!.held, 4);
});

test('a thousand dead endpoints of others do not keep one that is well again from being called', () => {
  const turns = createTurns();
  const fail = (one: Endpoint): void => {
    for (let call = 0; call < 10; call++) turns.failed(one);
    one.pausedUntilMs = 0;
  };
  const dead = Array.from({ length: 10 }, () => crowd(turns, 100));
  for (const endpoints of dead) endpoints.forEach(fail);
  claimAll(turns);
  for (const endpoints of dead) {
    const probes = heldBy(endpoints);
    assert.ok(probes > 0 && probes <= 25, String(probes));
  }
  const [recovered] = crowd(turns, 1);
  fail(recovered!);
  claimAll(turns);
  assert.is(recovered!.held, 1);
  // Of one tenant each has its turn, though only so many are called at a time.
  const [first] = dead;
  const seen = new Set<Endpoint>();
  for (let round = 0; round < 200; round++) {
    for (const one of first!) {
      if (one.held > 0) seen.add(one);
      one.held = 0;
    }
    claimAll(turns);
  }
  assert.is(seen.size, 100);
});

test.run();
