// When port 25 counts as blocked, judged from made-up dialling at made-up times; and what workers tell each other about
// it through the table.
import { createServer } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { SYSTEM_EGRESS, type Egress } from '../../src/delivery/egress.ts';
import {
  createPort25Detector,
  kindOfFailure,
  operatorOf,
  WINDOW_MS,
  type Dial,
  type DialKind,
} from '../../src/delivery/port25.ts';
import { watchPort25, type RunningPortWatch } from '../../src/delivery/port25-watch.ts';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createLogger } from '../../src/log.ts';
import { readBlockedEgresses, reportBlocked, takeProbe } from '../../src/queue/egress-state.ts';
import { until } from '../support/app.ts';
import { freePort } from '../support/program.ts';
import { openQueue, result, type Bench } from '../support/queue.ts';

const detecting = suite('port 25: the finding');

function atTime(): {
  readonly minutes: (count: number) => void;
  readonly dial: (host: string, kind: DialKind, about?: Partial<Dial>) => void;
  readonly finding: (egress?: string) => string | null;
  readonly clear: () => void;
} {
  let time = 0;
  const detector = createPort25Detector({ now: () => time });
  return {
    minutes: (count) => (time += count * 60_000),
    dial: (host, kind, about = {}) =>
      detector.note({ egress: 'default', site: host, host, kind, ...about }),
    finding: (egress = 'default') => detector.finding(egress),
    clear: () => detector.clear('default'),
  };
}

detecting('three operators that stay silent, and not two', () => {
  const { dial, finding } = atTime();
  dial('mx.one.test', 'timeout');
  dial('mx.two.test', 'timeout');
  assert.is(finding(), null);
  dial('mx.three.test', 'timeout');
  assert.match(
    finding() ?? '',
    /port 25 of mx\.one\.test, mx\.two\.test, mx\.three\.test did not answer/,
  );
  assert.is(finding('other'), null, 'another egress is another matter');
});

detecting('three that refuse at once', () => {
  const { dial, finding } = atTime();
  for (const name of ['one', 'two', 'three']) dial(`mx.${name}.test`, 'refused');
  assert.match(finding() ?? '', /refused or unreachable/);
});

detecting('a mix of silence and refusals is no block, nor is a failure of ours', () => {
  for (const odd of ['refused', 'other'] as const) {
    const { dial, finding } = atTime();
    for (const name of ['one', 'two', 'three']) dial(`mx.${name}.test`, 'timeout');
    dial('mx.four.test', odd);
    assert.is(finding(), null, odd);
  }
  const { dial, finding } = atTime();
  for (const name of ['one', 'two', 'three']) dial(`mx.${name}.test`, 'other');
  assert.is(finding(), null);
});

detecting('one success ends it, and for five minutes nothing is concluded', () => {
  const { dial, finding, minutes } = atTime();
  const fail = (): void => {
    for (const name of ['one', 'two', 'three']) dial(`mx.${name}.test`, 'timeout');
  };
  fail();
  assert.ok(finding());
  dial('mx.four.test', 'connected');
  assert.is(finding(), null);
  minutes(4.9);
  fail();
  assert.is(finding(), null);
  minutes(0.2);
  assert.ok(finding());
});

detecting('what failed more than five minutes ago is forgotten', () => {
  const { dial, finding, minutes } = atTime();
  dial('mx.one.test', 'timeout');
  dial('mx.two.test', 'timeout');
  minutes(5.1);
  dial('mx.three.test', 'timeout');
  assert.is(finding(), null);
  minutes(0.1);
  dial('mx.one.test', 'timeout');
  dial('mx.two.test', 'timeout');
  assert.ok(finding());
});

detecting('one operator under many names, or one machine under many domains, is one', () => {
  const names = atTime();
  for (let number = 1; number <= 9; number++) names.dial(`mx${number}.big.test`, 'timeout');
  assert.is(names.finding(), null);
  const machine = atTime();
  for (let number = 1; number <= 9; number++) {
    machine.dial(`mail.customer${number}.test`, 'timeout', { address: '192.0.2.1' });
  }
  assert.is(machine.finding(), null);
  machine.dial('mail.else.test', 'timeout', { address: '192.0.2.2' });
  machine.dial('mail.third.test', 'timeout', { address: '192.0.2.3' });
  assert.ok(machine.finding());
});

detecting(
  'no way to IPv6 hides no silence of IPv4, and is a finding where there is nothing else',
  () => {
    const { dial, finding } = atTime();
    for (const name of ['one', 'two', 'three']) {
      dial(`mx.${name}.test`, 'timeout', {
        address: `192.0.2.${name.length}${name.charCodeAt(0)}`,
      });
      dial(`mx.${name}.test`, 'refused', { address: `2001:db8::${name.length}` });
    }
    assert.ok(finding());
    const six = atTime();
    for (const [index, name] of ['one', 'two', 'three'].entries()) {
      six.dial(`mx.${name}.test`, 'refused', { address: `2001:db8::${index}` });
    }
    assert.ok(six.finding());
  },
);

detecting('another worker that succeeds clears it', () => {
  const { dial, finding, clear } = atTime();
  for (const name of ['one', 'two', 'three']) dial(`mx.${name}.test`, 'timeout');
  clear();
  assert.is(finding(), null);
});

detecting('memory is bounded: the newest of many hosts decide', () => {
  const { dial, finding } = atTime();
  for (let number = 0; number < 10_000; number++) dial(`mx.d${number}.test`, 'refused');
  for (let number = 0; number < 60; number++) dial(`mx.e${number}.test`, 'timeout');
  assert.match(finding() ?? '', /did not answer/);
});

detecting('an operator is the registered domain', () => {
  for (const [host, operator] of [
    ['mx1.big.test', 'big.test'],
    ['a.b.c.Big.TEST', 'big.test'],
    ['mail.shop.co.uk', 'shop.co.uk'],
    ['mail.uni.ac.at', 'uni.ac.at'],
    ['mx.web.de', 'web.de'],
    ['localhost', 'localhost'],
  ] as const) {
    assert.is(operatorOf(host), operator);
  }
});

detecting('kinds of failures', () => {
  assert.is(kindOfFailure('connect_timeout', 'no connection within 30 s'), 'timeout');
  assert.is(kindOfFailure('connect_failed', 'connection failed: ETIMEDOUT'), 'timeout');
  assert.is(kindOfFailure('connect_refused', ''), 'refused');
  assert.is(kindOfFailure('connect_failed', 'connection failed: ENETUNREACH'), 'refused');
  assert.is(kindOfFailure('connect_failed', 'connection failed: EADDRNOTAVAIL'), 'other');
});
detecting.run();

const watching = suite('port 25: the watch');
let bench: Bench;
const watches: RunningPortWatch[] = [];
const EGRESS: Egress = { ...SYSTEM_EGRESS, name: 'here' };

watching.before(async () => {
  bench = await openQueue();
});
watching.after.each(async () => {
  for (const watch of watches.splice(0)) await watch.stop();
  await bench.store.pool.query('delete from egress');
});
watching.after(async () => bench.stop());

let spills = false;
function watch(probes: readonly string[] = [], port = 25): RunningPortWatch & { said: string[] } {
  const said: string[] = [];
  const log = createLogger({ level: 'error', name: 'test', write: (line) => void said.push(line) });
  const one = watchPort25({
    store: bench.store,
    log,
    policy: () => ({ pools: new Map([['default', [EGRESS]]]), port25Probes: probes }),
    resolver: {
      a: async (name) => ({ kind: 'found', records: [`127.0.0.${name.length}`] }),
      aaaa: async () => ({ kind: 'no_data' }),
    },
    guard: createAddressGuard({ allow: ['127.0.0.0/8'] }),
    port,
    maySpill: () => spills,
    onChange: () => undefined,
  });
  watches.push(one);
  return Object.assign(one, { said });
}

const fail = (one: RunningPortWatch): void => {
  for (const name of ['one', 'two', 'three']) {
    one.note({ egress: 'here', site: name, host: `mx.${name}.test`, kind: 'timeout' });
  }
};
const tableSays = async (): Promise<string[]> =>
  (await readBlockedEgresses(bench.store.pool)).map(({ name }) => name);

watching(
  'one worker finds out, both know, the operator is told once; one success and it is over',
  async () => {
    const [first, second] = [watch(), watch()];
    fail(first);
    assert.ok(first.isBlocked('here'), 'at once');
    await until(
      async () => second.isBlocked('here'),
      (block) => block !== null,
    );
    assert.equal(await tableSays(), ['here']);
    fail(second);
    assert.is(first.said.length + second.said.length, 1);
    assert.match(first.said[0] ?? '', /MAILSTEAD_DELIVERY=smarthost/);
    second.note({ egress: 'here', site: 's', host: 'mx.s.test', kind: 'connected' });
    assert.is(second.isBlocked('here'), null, 'at once');
    await until(
      async () => first.isBlocked('here'),
      (block) => block === null,
    );
    assert.equal(await tableSays(), []);
    // Only after five minutes without a success may it be said again.
    fail(first);
    assert.is(first.isBlocked('here'), null);
  },
);

watching('a worker that fails while another one succeeds is not believed', async () => {
  const [lucky, unlucky] = [watch(), watch()];
  lucky.note({ egress: 'here', site: 's', host: 'mx.s.test', kind: 'connected' });
  const success = 'select 1 from egress where last_success_at is not null';
  await until(
    async () => (await bench.store.pool.query(success)).rowCount,
    (count) => count === 1,
  );
  fail(unlucky);
  await until(
    async () => unlucky.isBlocked('here'),
    (block) => block === null,
  );
  assert.equal(await tableSays(), []);
  assert.equal(unlucky.said, []);
});

watching('one probe a minute, whoever asks', async () => {
  const [first, second] = [watch(), watch()];
  assert.is(first.mayProbe('here'), false, 'what is not blocked needs none');
  fail(first);
  await until(
    async () => second.isBlocked('here'),
    (block) => block !== null,
  );
  assert.is(first.mayProbe('here') || second.mayProbe('here'), false, 'not in the first minute');
  await bench.store.pool.query(`update egress set probed_at = now() - interval '61 s'`);
  let probes = 0;
  const ask = async (): Promise<number> => {
    for (const one of [first, second]) if (one.mayProbe('here')) probes += 1;
    return probes;
  };
  await until(ask, (count) => count === 1);
  assert.is(await takeProbe(bench.store.pool, { name: 'here', everyMs: 60_000 }), false);
  assert.is(await ask(), 1);
});

watching('what nobody repeats does not hold any more', async () => {
  const about = { name: 'gone', reason: 'r', silent: [], windowMs: WINDOW_MS };
  assert.is((await reportBlocked(bench.store.pool, about))?.isNew, true);
  assert.is((await reportBlocked(bench.store.pool, about))?.isNew, false);
  assert.equal(await tableSays(), ['gone']);
  await bench.store.pool.query(`update egress set reported_at = now() - interval '11 min',
    blocked_since = now() - interval '11 min'`);
  assert.equal(await tableSays(), []);
  assert.is((await reportBlocked(bench.store.pool, about))?.isNew, true, 'a new episode');
});

watching('the attempts that found out do not count', async () => {
  const ids = await bench.enqueue(3, {
    deliveries: [{ recipient: 'b@one.test', lane: 'mx:one.test' }],
  });
  const [other] = await bench.enqueue(1, {
    deliveries: [{ recipient: 'b@two.test', lane: 'mx:two.test' }],
  });
  const epoch = await bench.run();
  const { settle } = await import('../../src/queue/settle.ts');
  const unconnected = { stage: 'connect', cause: 'connect_timeout', code: null } as const;
  // A first attempt that was answered stays in the history.
  const before = await bench.claim(epoch, 10);
  assert.is(before.length, 4);
  await settle(
    bench.store,
    before.map((one) =>
      result(one, epoch, {
        verdict: 'deferred',
        delayMs: 0,
        evidence: { cause: 'greylisted', stage: 'rcpt', enhanced: '4.7.1' },
      }),
    ),
  );
  await bench.store.pool.query(`update delivery set state = 'ready', due_at = now()`);
  const second = await bench.claim(epoch, 10);
  await settle(
    bench.store,
    second.map((one) =>
      result(one, epoch, {
        verdict: 'deferred',
        delayMs: 3_600_000,
        evidence: one.emailId === other ? { cause: 'peer_transient', stage: 'rcpt' } : unconnected,
      }),
    ),
  );
  fail(watch());
  const { rows } = await until(
    async () =>
      bench.store.pool.query<{
        email_id: string;
        state: string;
        attempts: number;
        last_cause: string;
      }>('select email_id, state, attempts, last_cause from delivery order by email_id'),
    (answer) => answer.rows.filter(({ state }) => state === 'ready').length === 3,
  );
  for (const { email_id, state, attempts, last_cause } of rows) {
    const isOther = email_id === other;
    assert.is(state, isOther ? 'deferred' : 'ready');
    assert.is(attempts, isOther ? 2 : 1);
    if (!isOther) assert.is(last_cause, '4.7.1', 'as it was before');
  }
  const { rowCount } = await bench.store.pool.query(
    'select 1 from attempt where email_id = any ($1)',
    [ids],
  );
  assert.is(rowCount, 3);
  // And they can be claimed again as the same attempt.
  assert.equal(
    (await bench.claim(epoch, 10)).map(({ attempt }) => attempt),
    [2, 2, 2],
  );
});

watching('named hosts are dialled at the start; closed ports of three of them tell', async () => {
  const probing = watch(['a.one.test', 'aa.two.test', 'aaa.three.test'], 1);
  await until(
    async () => probing.isBlocked('here'),
    (block) => block !== null,
  );
  assert.match(probing.isBlocked('here')?.reason ?? '', /aaa\.three\.test/);
});

watching('where no mail tries the port, who could not be reached is dialled again', async () => {
  spills = true;
  const port = await freePort();
  const [first] = [watch([], port), watch([], port)];
  for (const number of [1, 2, 3]) {
    const host = `mx.d${number}.test`;
    first.note({ egress: 'here', site: host, host, address: `127.0.9.${number}`, kind: 'refused' });
  }
  await until(tableSays, (names) => names.length === 1);
  const peer = createServer((socket) => socket.destroy());
  await new Promise<void>((resolve) => peer.listen(port, '127.0.9.2', resolve));
  const turn = `update egress set probed_at = now() - interval '61 s'`;
  assert.is(first.mayProbe('here'), false);
  await bench.store.pool.query(turn);
  await until(tableSays, (names) => names.length === 0);
  await until(
    async () => first.isBlocked('here'),
    (block) => block === null,
  );
  await new Promise((resolve) => peer.close(resolve));
  spills = false;
});

watching.run();
