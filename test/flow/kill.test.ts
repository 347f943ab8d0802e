// kill -9 at a random moment under load: everything that was acknowledged arrives exactly once or is
// reported unknown. MAILSTEAD_TEST_ROUNDS sets the number of rounds (default 2).
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { startCountingSink, type CountingSink } from '../support/counting-sink.ts';
import { createProgram, type Program } from '../support/program.ts';

const ROUNDS = Number(process.env['MAILSTEAD_TEST_ROUNDS'] ?? 2);
const EMAILS = 200;
const CONNECTIONS = 20;
const KILL_WITHIN_MS = 500;

const test = suite('kill');
let sink: CountingSink;
let program: Program;

test.before(async () => {
  sink = await startCountingSink();
  program = await createProgram({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${sink.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1s',
    MAILSTEAD_LOG_LEVEL: 'warn',
  });
  await program.start();
});
test.after(async () => {
  await program.remove();
  await sink.stop();
});

/** Sends until all are sent or the program is gone; the ids that were acknowledged. */
async function sendMany(round: number): Promise<Set<string>> {
  const accepted = new Set<string>();
  let next = 0;
  const connection = async (): Promise<void> => {
    while (next < EMAILS) {
      const number = next++;
      try {
        const { status, body } = await program.call('POST', '/emails', {
          from: 'Ada <ada@mailstead.test>',
          to: `r${number}@recipient.test`,
          subject: `Round ${round}, number ${number}`,
          text: 'x'.repeat(1_500),
        });
        if (status === 200) accepted.add(String(body['id']));
      } catch {
        return; // killed
      }
    }
  };
  await Promise.all(Array.from({ length: CONNECTIONS }, connection));
  return accepted;
}

interface Listed {
  id: string;
  message_id: string;
  last_event: string;
}

/** All emails of the tenant by id. */
async function listAll(): Promise<Map<string, Listed>> {
  const all = new Map<string, Listed>();
  let after = '';
  for (;;) {
    const { body } = await program.call('GET', `/emails?limit=100${after}`);
    const data = body['data'] as Listed[];
    for (const email of data) all.set(email.id, email);
    if (body['has_more'] !== true) return all;
    after = `&after=${data.at(-1)?.id}`;
  }
}

async function isUnknown(id: string): Promise<boolean> {
  const { body } = await program.call('GET', `/emails/${id}/timeline`);
  return (body['recipients'] as { state: string }[]).some(({ state }) => state === 'unknown');
}

for (let round = 1; round <= ROUNDS; round++) {
  test(`round ${round}`, async () => {
    const sending = sendMany(round);
    await new Promise((resolve) => setTimeout(resolve, Math.random() * KILL_WITHIN_MS));
    await program.kill();
    const accepted = await sending;
    await program.start();
    const unknown = new Set<string>();
    const all = await listAll();
    for (const { id, last_event } of all.values()) {
      if (last_event === 'delivered') continue;
      const isDecided = async (): Promise<boolean> => {
        const { body } = await program.call('GET', `/emails/${id}`);
        if (body['last_event'] === 'delivered') return true;
        if (!(await isUnknown(id))) return false;
        unknown.add(id);
        return true;
      };
      await until(isDecided, (decided) => decided);
    }
    for (const id of accepted) {
      assert.ok(all.has(id), `${id} was acknowledged and is lost`);
      const count = sink.counts.get(all.get(id)!.message_id) ?? 0;
      if (unknown.has(id)) assert.ok(count <= 1, `${id} is unknown and arrived ${count} times`);
      else assert.is(count, 1, `${id} arrived ${count} times`);
    }
    for (const [messageId, count] of sink.counts)
      assert.is(count, 1, `${messageId} arrived ${count} times`);
    console.log(
      `round ${round}: ${accepted.size} acknowledged, ${all.size} in all, ${unknown.size} unknown, ${sink.counts.size} arrived`,
    );
  });
}

test.run();
