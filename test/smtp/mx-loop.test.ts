// A message that goes round in a circle stops at the MX listener: its trace fields are counted (RFC 5321 §6.3).
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { handIn } from '../support/hand-in.ts';

const test = suite('mx: loops');
let app: App;

test.before(async () => {
  app = await startApp();
});
test.after(() => app.stop());

const withTraces = (count: number, body = 'x'): string =>
  [
    ...Array.from(
      { length: count },
      (_, hop) => `Received: from a${hop}.test by b.test; Sat, 21 Nov 2026 16:00:00 +0000`,
    ),
    'From: someone@else.test',
    `Subject: ${count} hops`,
    '',
    body,
  ].join('\r\n');
const code = async (message: string): Promise<string> => {
  const { reply } = await handIn(app.appliance.mxPort!, { recipient: 'x@mailstead.test', message });
  return reply.slice(0, 9);
};

test('a hundred hops are many, one more is a loop', async () => {
  assert.is(await code(withTraces(100)), '250 2.0.0');
  assert.is(await code(withTraces(101)), '554 5.4.6');
  assert.is(await code(withTraces(101).replaceAll('Received', 'RECEIVED')), '554 5.4.6');
});

test('only the header counts, and only that field', async () => {
  const quoted = withTraces(101);
  assert.is(await code(withTraces(1, quoted)), '250 2.0.0');
  assert.is(await code(withTraces(101).replaceAll('Received:', 'X-Received:')), '250 2.0.0');
});

test('our own trace field is added on every way round, so any circle ends', async () => {
  let message = withTraces(98);
  let hops = 0;
  for (;;) {
    const { reply } = await handIn(app.appliance.mxPort!, {
      recipient: 'x@mailstead.test',
      message,
    });
    if (!reply.startsWith('250')) {
      assert.match(reply, /^554 5\.4\.6 /);
      break;
    }
    hops += 1;
    const id = /stored as (\S+)/.exec(reply)?.[1];
    const { body } = await app.call<{ raw: { download_url: string } }>(
      'GET',
      `/emails/receiving/${id}`,
    );
    message = await (await fetch(body.raw.download_url)).text();
    assert.ok(hops < 10, 'it goes on');
  }
  assert.is(hops, 3);
});

test.run();
