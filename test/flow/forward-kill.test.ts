// kill -9 in the middle of forwarding: every message that was acknowledged is forwarded once, and leaves once or is
// reported unknown. MAILSTEAD_TEST_ROUNDS sets the number of rounds (default 1).
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { startCountingSink, type CountingSink } from '../support/counting-sink.ts';
import { handIn } from '../support/hand-in.ts';
import { createProgram, freePort, type Program } from '../support/program.ts';

const ROUNDS = Number(process.env['MAILSTEAD_TEST_ROUNDS'] ?? 1);
const MESSAGES = 150;
const CONNECTIONS = 6;
/** Killed when at least so many, and at most twice as many, were acknowledged. */
const KILLED_AFTER = 20;

interface Attempt {
  readonly status: string;
  readonly email_id: string | null;
}

const test = suite('forward, killed');
let sink: CountingSink;
let program: Program;
let mxPort: number;

test.before(async () => {
  sink = await startCountingSink();
  mxPort = await freePort();
  program = await createProgram({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${sink.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1s',
    MAILSTEAD_LOG_LEVEL: 'warn',
    MAILSTEAD_MX_PORT: String(mxPort),
  });
  await program.start();
  const post = async (path: string, body: unknown): Promise<string> => {
    const answer = await program.call('POST', path, body);
    assert.is(answer.status, 201, JSON.stringify(answer.body));
    return String(answer.body['id']);
  };
  const { body } = await program.call('GET', '/domains');
  const [domain] = body['data'] as { id: string }[];
  const route = { domain_id: domain!.id, type: 'exact', local_part: 'in', target_local_part: 'in' };
  await post('/api/receiving/forwarding-rules', {
    route_id: await post('/api/receiving/routes', route),
    destinations: ['out@far.test'],
    status: 'active',
  });
});
test.after(async () => {
  await program.remove();
  await sink.stop();
});

/** Hands in until all are in or nobody listens; the Message-IDs that were acknowledged. */
async function handInMany(round: number, acknowledged: Set<string>): Promise<void> {
  let next = 0;
  const connection = async (): Promise<void> => {
    while (next < MESSAGES) {
      const id = `<${round}.${next++}@author.test>`;
      const message = `From: a@author.test\nSubject: x\nMessage-ID: ${id}\n\n${'words '.repeat(200)}`;
      const { code } = await handIn(mxPort, { recipient: 'in@mailstead.test', message });
      if (code !== 250) return;
      acknowledged.add(id);
    }
  };
  await Promise.all(Array.from({ length: CONNECTIONS }, connection));
}

async function listAll<T extends { id: string }>(path: string): Promise<readonly T[]> {
  const all: T[] = [];
  for (let after = ''; ;) {
    const { body } = await program.call('GET', `${path}?limit=100${after}`);
    all.push(...(body['data'] as T[]));
    if (body['has_more'] !== true) return all;
    after = `&after=${all.at(-1)?.id}`;
  }
}

for (let round = 1; round <= ROUNDS; round++) {
  test(`round ${round}`, async () => {
    const acknowledged = new Set<string>();
    const handing = handInMany(round, acknowledged);
    const enough = KILLED_AFTER + Math.floor(Math.random() * KILLED_AFTER);
    await until(
      () => Promise.resolve(acknowledged.size),
      (count) => count >= enough,
    );
    await program.kill();
    await handing;
    await program.start();
    const received = await listAll<{ id: string; message_id: string }>('/emails/receiving');
    const attempts = new Map<string, readonly Attempt[]>();
    for (const { id } of received) {
      const found = await until(
        async () =>
          (await program.call('GET', `/emails/receiving/${id}`)).body[
            'forwarding_attempts'
          ] as Attempt[],
        ({ length }) => length > 0,
      );
      attempts.set(id, found);
    }
    const ids = received.map((one) => one.message_id);
    assert.is(new Set(ids).size, ids.length, 'nothing is stored twice');
    for (const id of acknowledged) assert.ok(ids.includes(id), `${id} is lost`);
    for (const [id, found] of attempts) {
      assert.equal(
        found.map(({ status }) => status),
        ['queued'],
        id,
      );
    }
    // Beside what each start of development mode sends.
    const emails = (await listAll<{ id: string; message_id: string }>('/emails')).filter((one) =>
      one.message_id.endsWith('@author.test>'),
    );
    assert.equal(
      emails.map(({ id }) => id).toSorted((a, b) => a.localeCompare(b)),
      [...attempts.values()]
        .flatMap((found) => found.map((one) => String(one.email_id)))
        .toSorted((a, b) => a.localeCompare(b)),
      'one outbound email for each',
    );
    const unknown = new Set<string>();
    for (const { id, message_id: messageId } of emails) {
      await until(
        async () => {
          const { body } = await program.call('GET', `/emails/${id}/timeline`);
          const [{ state } = { state: '' }] = body['recipients'] as { state: string }[];
          if (state === 'unknown') unknown.add(messageId);
          return state;
        },
        (state) => state === 'delivered' || state === 'unknown',
      );
    }
    for (const id of ids) {
      const count = sink.counts.get(id) ?? 0;
      if (unknown.has(id)) assert.ok(count <= 1, `${id} is unknown and arrived ${count} times`);
      else assert.is(count, 1, `${id} arrived ${count} times`);
    }
    console.log(
      `round ${round}: ${acknowledged.size} acknowledged, ${received.length} in all, ${unknown.size} unknown, ${sink.counts.size} arrived`,
    );
  });
}

test.run();
