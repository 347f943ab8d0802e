// When the next try comes: the schedule and its jitter, what greylisting hosts ask for, and whose fault counts.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { askedPauseMs, nextDelayMs, pauseMs } from '../../src/queue/backoff.ts';
import { outcomeOfReply } from '../../src/mail/outcome.ts';
import { parseReply } from '../../src/mail/reply.ts';

const MINUTE = 60_000;
const SCHEDULE = [1, 5, 10, 20, 40, 60, 120, 240].map((minutes) => minutes * MINUTE);
const test = suite('backoff');

const putOff = (about: Partial<Parameters<typeof pauseMs>[1]> = {}) => ({
  attempt: 1,
  laneFaults: 0,
  cause: 'peer_transient',
  reply: '451 4.3.0 later',
  ...about,
});

test('the schedule, then its last entry, within 20 %', () => {
  for (const [index, planned] of [...SCHEDULE, 240 * MINUTE, 240 * MINUTE].entries()) {
    assert.is(nextDelayMs(SCHEDULE, index + 1, 0.5), planned);
    assert.is(nextDelayMs(SCHEDULE, index + 1, 0), planned * 0.8);
    assert.ok(nextDelayMs(SCHEDULE, index + 1, 0.999_999) <= planned * 1.2);
  }
});

test("a lane's faults do not make the pauses longer", () => {
  assert.is(pauseMs(SCHEDULE, putOff({ attempt: 6, laneFaults: 5 }), 0.5), MINUTE);
  assert.is(pauseMs(SCHEDULE, putOff({ attempt: 1, laneFaults: 1 }), 0.5), MINUTE);
  assert.is(pauseMs(SCHEDULE, putOff({ attempt: 6, laneFaults: 3 }), 0.5), 10 * MINUTE);
});

test('a host that never stops answering 421 is not asked every minute for days', () => {
  const after = (faults: number): number =>
    pauseMs(SCHEDULE, putOff({ attempt: faults, laneFaults: faults }), 0.5);
  assert.equal(
    [9, 10, 20, 30, 400].map((faults) => after(faults) / MINUTE),
    [1, 5, 10, 20, 20],
  );
  assert.is(pauseMs(SCHEDULE, putOff({ attempt: 17, laneFaults: 10 }), 0.5), 120 * MINUTE);
});

test('greylisted: after five to six minutes, and after more of it no sooner than the schedule says', () => {
  const greylisted = { cause: 'greylisted', reply: '450 4.2.0 Greylisted, see http://x.test/' };
  for (const attempt of [1, 2, 3]) {
    assert.is(pauseMs(SCHEDULE, putOff({ ...greylisted, attempt }), 0), 5 * MINUTE);
    assert.ok(pauseMs(SCHEDULE, putOff({ ...greylisted, attempt }), 0.999) <= 6 * MINUTE);
  }
  assert.is(pauseMs(SCHEDULE, putOff({ ...greylisted, attempt: 7 }), 0.5), 120 * MINUTE);
});

test('what the reply asks for, and never a moment less', () => {
  const table: readonly (readonly [string, number | null])[] = [
    ['450 4.7.1 Greylisted, try again in 300 seconds', 300],
    ['451 4.7.1 Greylisting in action, please come back in 00:04:59', 299],
    ['451 Greylisted, please try again in 5 minutes.', 300],
    ['450 4.2.0 Greylisted for 2 minutes and 30 seconds', 150],
    ['450 Greylisted. Retry after 600s', 600],
    ['450 4.7.0 wait at least 1 hour', 3_600],
    ['450 try again in 5 seconds', 60],
    ['450 try again in 9 hours', 3_600],
    ['450 4.7.1 Please try again later', null],
    ['450 4.2.0 see http://postgrey.schweikert.ch/help/example.org.html', null],
    ['450 Mailbox in use by 3 users', null],
  ];
  for (const [reply, seconds] of table) {
    assert.is(askedPauseMs(reply), seconds === null ? null : seconds * 1_000, reply);
  }
  const pauses = [0, 0.5, 0.999].map((random) =>
    pauseMs(SCHEDULE, putOff({ cause: 'greylisted', reply: table[0]![0] }), random),
  );
  assert.is(pauses[0], 5 * MINUTE);
  assert.ok(pauses.every((pause) => pause >= 5 * MINUTE && pause <= 5.5 * MINUTE));
  // Who limits rates is obeyed where it asks for more than the schedule has.
  const limited = putOff({ cause: 'rate_limited', reply: '450 4.7.0 wait 20 minutes' });
  assert.is(pauseMs(SCHEDULE, limited, 0), 20 * MINUTE);
  assert.is(pauseMs(SCHEDULE, { ...limited, attempt: 8 }, 0.5), 240 * MINUTE);
});

test('a hostile reply costs nothing', () => {
  const begun = performance.now();
  for (let round = 0; round < 100; round++) askedPauseMs(`450 ${'in '.repeat(20_000)}`);
  assert.ok(performance.now() - begun < 1_000);
});

test('which replies count as greylisting', () => {
  const via = { host: 'mx.peer.test', address: '192.0.2.1', port: 25, tls: null };
  const causeOf = (text: string): string | null => {
    const outcome = outcomeOfReply({ reply: parseReply(text)!, stage: 'rcpt', via });
    return outcome.kind === 'delivered' ? null : `${outcome.kind} ${outcome.cause}`;
  };
  for (const greylisting of [
    '450 4.2.0 Recipient address rejected: Greylisted',
    '451 4.7.1 Please try again later',
    '450 4.7.0 Service unavailable',
    '451 Greylisting in action, please come back in 00:05:00',
  ]) {
    assert.is(causeOf(greylisting), 'deferred greylisted', greylisting);
  }
  for (const other of [
    '451 4.3.0 Temporary lookup failure',
    '450 4.7.1 Client host rejected: cannot find your reverse DNS name',
    '451 4.7.1 Too many messages from your address, slow down',
    '450 4.2.2 Mailbox full',
  ]) {
    assert.not.match(String(causeOf(other)), /greylisted/, other);
  }
});

test.run();
