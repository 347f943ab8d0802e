// The journal: what a run wrote before it was killed is what the next start reads.
import { appendFileSync, mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openJournal, readJournal } from '../../src/delivery/journal.ts';
import type { Settlement } from '../../src/queue/settle.ts';

const test = suite<{ folder: string }>('journal');
test.before.each((context) => {
  context.folder = mkdtempSync(join(tmpdir(), 'mailstead-journal-'));
});
test.after.each(({ folder }) => rmSync(folder, { recursive: true, force: true }));

const RUN = { epoch: '00000000-0000-4000-8000-000000000001', pid: 42, startTime: '77' };
const held = (number: number) => ({
  tenantId: 't',
  emailId: `email-${number}`,
  position: 0,
  attempt: 1,
  recipientCount: 1,
});
const settlement = (number: number): Settlement => ({
  ...held(number),
  epoch: RUN.epoch,
  verdict: 'delivered',
  delayMs: 0,
  evidence: {
    cause: null,
    stage: 'dot',
    host: 'h',
    address: '127.0.0.1',
    port: 25,
    tls: null,
    code: 250,
    enhanced: '2.0.0',
    reply: '250 2.0.0 ok',
  },
});
const pathIn = (folder: string): string => join(folder, readdirSync(folder)[0]!);

test('before the dot, after the dot, answered', ({ folder }) => {
  const journal = openJournal(folder, RUN);
  journal.dot(held(2));
  journal.dot(held(3));
  journal.result(settlement(3));
  const run = readJournal(pathIn(folder))!; // as after kill -9: nobody closed it
  assert.equal([run.epoch, run.pid, run.startTime], [RUN.epoch, RUN.pid, RUN.startTime]);
  assert.equal(run.traceOf(held(1)), { phase: 'before_dot' });
  assert.equal(run.traceOf(held(2)), { phase: 'dot' });
  assert.equal(run.traceOf(held(3)), { phase: 'settled', settlement: settlement(3) });
  assert.equal(run.traceOf({ ...held(2), attempt: 2 }), { phase: 'before_dot' });
});

test('a torn last line is as if it had not been written', ({ folder }) => {
  const journal = openJournal(folder, RUN);
  journal.dot(held(1));
  appendFileSync(pathIn(folder), 'R {"emailId":"email-1","posi');
  assert.equal(readJournal(pathIn(folder))!.traceOf(held(1)), { phase: 'dot' });
});

test('a file without a whole header tells nothing', ({ folder }) => {
  const path = join(folder, 'x.journal');
  appendFileSync(path, '{"epoch":"0000');
  assert.is(readJournal(path), null);
});

test('it stays small: what is settled is dropped when the file is rewritten', ({ folder }) => {
  const journal = openJournal(folder, RUN);
  journal.dot(held(0)); // stays open all the time
  for (let number = 1; number <= 30_000; number++) {
    journal.dot(held(number));
    journal.result(settlement(number));
    journal.settled([settlement(number)]);
  }
  assert.ok(statSync(pathIn(folder)).size < 6 * 1024 * 1024);
  const run = readJournal(pathIn(folder))!;
  assert.equal(run.traceOf(held(0)), { phase: 'dot' });
  journal.end();
  assert.equal(readdirSync(folder), []);
});

test.run();
