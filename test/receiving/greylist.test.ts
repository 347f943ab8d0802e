// Greylisting on a real database: who is a stranger, and when no more.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { forgetGreylisted, isProven, passesGreylist } from '../../src/receiving/greylist.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite<{ bench: Bench }>('greylist');
const POLICY = { enabled: true, delayMs: 60_000, forgetAfterMs: 36 * 86_400_000 };
const START = Date.UTC(2026, 10, 21);
const SECOND = 1_000;
const DAY = 86_400_000;

test.before(async (context) => {
  context.bench = await openQueue();
});
test.before.each(async ({ bench }) => {
  await bench.store.pool.query('delete from greylist');
});
test.after(({ bench }) => bench.stop());

interface Try {
  readonly address?: string;
  readonly mailFrom?: string;
  readonly recipients?: readonly string[];
}

const ask = (bench: Bench, afterMs: number, about: Try = {}): Promise<boolean> =>
  passesGreylist(
    bench.store.pool,
    {
      address: '192.0.2.1',
      mailFrom: 'b@else.test',
      recipients: ['a@here.test'],
      now: new Date(START + afterMs),
      ...about,
    },
    POLICY,
  );

test('a stranger passes when it comes again late enough, and from then on', async ({ bench }) => {
  assert.not.ok(await ask(bench, 0));
  assert.not.ok(await ask(bench, 59 * SECOND));
  assert.ok(await ask(bench, 60 * SECOND));
  assert.ok(await ask(bench, 61 * SECOND));
  assert.ok(await ask(bench, 36 * DAY));
});

test('the network, the domain of the sender and the recipient count, and no more', async ({
  bench,
}) => {
  await ask(bench, 0);
  const late = 60 * SECOND;
  assert.ok(await ask(bench, late, { address: '192.0.2.200' }));
  assert.ok(await ask(bench, late, { mailFrom: 'other@ELSE.test' }));
  assert.ok(await ask(bench, late, { recipients: ['A@HERE.test', 'a@here.test'] }));
  assert.not.ok(await ask(bench, late, { address: '192.0.3.1' }));
  assert.not.ok(await ask(bench, late, { mailFrom: 'b@third.test' }));
  assert.not.ok(await ask(bench, late, { mailFrom: '' }));
  assert.not.ok(await ask(bench, late, { recipients: ['c@here.test'] }));
  assert.not.ok(await ask(bench, late, { address: '2001:db8::1' }));
  assert.ok(await ask(bench, 2 * late, { address: '2001:db8:0:0:ffff::1' }));
  assert.not.ok(await ask(bench, 2 * late, { address: '2001:db8:0:1::1' }));
});

test('one recipient that is new is enough to be asked again', async ({ bench }) => {
  await ask(bench, 0);
  assert.not.ok(await ask(bench, 60 * SECOND, { recipients: ['a@here.test', 'c@here.test'] }));
  assert.ok(await ask(bench, 120 * SECOND, { recipients: ['a@here.test', 'c@here.test'] }));
});

test('who does not come again, or does not write for long, is a stranger anew', async ({
  bench,
}) => {
  await ask(bench, 0);
  assert.not.ok(await ask(bench, 3 * DAY));
  assert.ok(await ask(bench, 3 * DAY + 60 * SECOND));
  assert.not.ok(await ask(bench, 40 * DAY));
  assert.ok(await ask(bench, 40 * DAY + 60 * SECOND));
});

test('two clients that ask at once with many recipients do not wait for each other', async ({
  bench,
}) => {
  const recipients = Array.from({ length: 100 }, (_, at) => `r${at}@here.test`);
  const answers = await Promise.all(
    Array.from({ length: 8 }, (_, at) =>
      ask(bench, at, { recipients: at % 2 ? recipients : recipients.toReversed() }),
    ),
  );
  assert.equal(
    answers,
    Array.from({ length: 8 }, () => false),
  );
});

test('rows go when they mean nothing any more', async ({ bench }) => {
  const { pool } = bench.store;
  await ask(bench, 0); // never came again
  await ask(bench, 0, { mailFrom: 'x@known.test' });
  await ask(bench, 60 * SECOND, { mailFrom: 'x@known.test' });
  const forget = (afterMs: number, max = 10): Promise<number> =>
    forgetGreylisted(pool, {
      now: new Date(START + afterMs),
      forgetAfterMs: POLICY.forgetAfterMs,
      max,
    });
  assert.is(await forget(DAY), 0);
  assert.is(await forget(3 * DAY, 0), 0);
  assert.is(await forget(3 * DAY), 1);
  assert.is(await forget(36 * DAY), 0);
  assert.is(await forget(37 * DAY), 1);
});

test('a pass of SPF or of one signature proves enough', () => {
  const spf = (result: 'pass' | 'softfail') => ({ result, domain: 'else.test', reason: null });
  const dkim = (result: 'pass' | 'fail') => ({
    result,
    domain: 'else.test',
    selector: 's',
    aligned: false,
    reason: null,
  });
  assert.ok(isProven({ spf: spf('pass'), dkim: [] }));
  assert.ok(isProven({ spf: spf('softfail'), dkim: [dkim('fail'), dkim('pass')] }));
  assert.not.ok(isProven({ spf: spf('softfail'), dkim: [dkim('fail')] }));
});

test.run();
