// kill -9 at a random moment while mail comes in: everything that was acknowledged is there, to the byte, and once, also when
// its sender did not hear the 250 and came again. MAILSTEAD_TEST_ROUNDS sets the number of rounds (default 2).
import { createHash } from 'node:crypto';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { inboundMessage, startInboundLoad, untilAcknowledged } from '../support/inbound-load.ts';
import { createProgram, freePort, type Program } from '../support/program.ts';

const ROUNDS = Number(process.env['MAILSTEAD_TEST_ROUNDS'] ?? 2);
const MESSAGES = 120;
const CONNECTIONS = 15;

const test = suite('kill: inbound');
let program: Program;
let port: number;

test.before(async () => {
  port = await freePort();
  program = await createProgram({ MAILSTEAD_MX_PORT: String(port), MAILSTEAD_LOG_LEVEL: 'warn' });
  await mkdir(join(program.dataDir, 'config'), { recursive: true });
  const connections = { per_client: 100, new_per_minute: 100_000 };
  await writeFile(
    join(program.dataDir, 'config', 'receiving.json'),
    JSON.stringify({ connections }),
  );
  await program.start();
});
test.after(async () => {
  await program.remove();
});

interface Listed {
  id: string;
  subject: string;
  parsing: string;
}

/** What the tenant has received, newest first. */
async function listAll(): Promise<readonly Listed[]> {
  const all: Listed[] = [];
  for (;;) {
    const after = all.length === 0 ? '' : `&after=${all.at(-1)!.id}`;
    const { body } = await program.call('GET', `/emails/receiving?limit=100${after}`);
    all.push(...(body['data'] as Listed[]));
    if (body['has_more'] !== true) return all;
  }
}

async function storedHash(id: string, sizeBytes: number): Promise<string> {
  const { body } = await program.call('GET', `/emails/receiving/${id}`);
  const { download_url: url } = body['raw'] as { download_url: string };
  const raw = Buffer.from(await (await fetch(program.base + new URL(url).pathname)).arrayBuffer());
  return createHash('sha256').update(raw.subarray(-sizeBytes)).digest('hex');
}

for (let round = 1; round <= ROUNDS; round++) {
  test(`round ${round}`, async () => {
    const messages = Array.from({ length: MESSAGES }, (_, n) =>
      inboundMessage(`round ${round}, number ${n}`, n),
    );
    const load = startInboundLoad(port, messages, CONNECTIONS);
    // Anywhere between the first and the last.
    const enough = Math.floor(Math.random() * MESSAGES * 0.9);
    await untilAcknowledged(load, enough);
    const before = load.acknowledged.size;
    await program.kill();
    await program.start();
    await load.ended;
    assert.is(load.acknowledged.size, MESSAGES);

    // A large one may be acknowledged before it was read: until then it shows no subject.
    const listed = await until(listAll, (all) => all.every(({ parsing }) => parsing !== 'pending'));
    const found = Map.groupBy(listed, ({ subject }) => subject);
    for (const { subject, bytes, sha256 } of messages) {
      const copies = found.get(subject) ?? [];
      assert.equal(
        copies.map(({ id }) => id),
        [load.acknowledged.get(subject)],
        `${subject} is there ${copies.length} times`,
      );
      // The large ones lie apart from their rows.
      if (bytes.length > 100_000) {
        assert.is(await storedHash(copies[0]!.id, bytes.length), sha256, subject);
      }
    }
    console.log(
      `round ${round}: ${before} of ${MESSAGES} acknowledged before the kill, all there once`,
    );
  });
}

test.run();
