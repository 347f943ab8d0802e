// kill -9 while an endpoint has not answered yet: after the lease it is called again with the same id and the same bytes,
// and what was acknowledged before is not.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { LOADER } from '../support/loader.ts';
import { openQueue, silent } from '../support/queue.ts';
import { startReceiver, startTeller } from '../support/webhooks.ts';

const ENTRY = fileURLToPath(new URL('../support/webhook-process.ts', import.meta.url));
const test = suite('webhook crash');

test('a call that a crash cut off is made again under the same id', async () => {
  const bench = await openQueue();
  const { store, tenantId } = bench;
  // It is silent about the third event, until its caller has died.
  let isSilent = true;
  const seen = new Set<string>();
  const endpoint = await startReceiver(({ id }) => {
    seen.add(id);
    return seen.size === 3 && isSilent ? null : 200;
  });
  const caller = spawn(process.execPath, [...LOADER, ENTRY, bench.url], { stdio: 'inherit' });
  const ended = once(caller, 'exit');
  const teller = startTeller({ store, log: silent });
  const happen = async (): Promise<string> => (await teller.happen(tenantId, 1))[0]!;
  const states = async (): Promise<string> => {
    const { rows } = await store.pool.query<{ status: string }>(
      'select status from webhook_event order by id',
    );
    return rows.map(({ status }) => status).join();
  };
  try {
    const events = ['contact.created'];
    await teller.verbs.create(tenantId, { endpoint: endpoint.url, events });
    await teller.stop();
    await happen();
    await happen();
    await until(states, (text) => text === 'success,success');
    const cutOff = await happen();
    await until(
      async () => endpoint.calls.length,
      (count) => count === 3,
    );
    caller.kill('SIGKILL');
    await ended;
    isSilent = false;
    assert.is(await states(), 'success,success,attempting');
    const late = await happen(); // while nobody runs
    const next = startTeller({ store, log: silent });
    try {
      await next.tell();
      await until(states, (text) => text === 'success,success,attempting,success');
      next.advance(61_000); // the minute of the lease
      await until(states, (text) => text === 'success,success,success,success');
    } finally {
      await next.stop();
    }
    const ids = endpoint.calls.map(({ id }) => id);
    assert.equal(ids.slice(2), [cutOff, late, cutOff]);
    assert.is(new Set(ids).size, 4);
    assert.is(endpoint.calls[2]!.body, endpoint.calls[4]!.body);
  } finally {
    caller.kill('SIGKILL');
    await endpoint.stop();
    await bench.stop();
  }
});

test.run();
