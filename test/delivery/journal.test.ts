// The journal: what a run wrote before it was killed is what the next start reads.
import { spawnSync } from 'node:child_process';
import { appendFileSync, mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openJournal, readJournal } from '../../src/delivery/journal.ts';
import type { Settlement } from '../../src/queue/settle.ts';
import { LOADER } from '../support/loader.ts';

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
  isLaneFault: false,
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
    tlsPolicy: null,
    source: null,
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

test('a number that was given back and came again: its new dot counts, not its old answer', ({
  folder,
}) => {
  const journal = openJournal(folder, RUN);
  journal.result({ ...settlement(1), verdict: 'deferred' });
  journal.settled([settlement(1)]);
  journal.dot(held(1));
  assert.equal(readJournal(pathIn(folder))!.traceOf(held(1)), { phase: 'dot' });
  journal.result(settlement(1));
  assert.is(readJournal(pathIn(folder))!.traceOf(held(1)).phase, 'settled');
});

test('what an earlier version wrote can be settled by this one', ({ folder }) => {
  openJournal(folder, RUN);
  const { isLaneFault, evidence, ...earlier } = settlement(1);
  const { tlsPolicy, source, ...proof } = evidence;
  assert.equal([isLaneFault, tlsPolicy, source], [false, null, null]);
  appendFileSync(pathIn(folder), `R ${JSON.stringify({ ...earlier, evidence: proof })}\n`);
  assert.equal(readJournal(pathIn(folder))!.traceOf(held(1)), {
    phase: 'settled',
    settlement: settlement(1),
  });
});

test('a file without a whole header tells nothing', ({ folder }) => {
  const path = join(folder, 'x.journal');
  appendFileSync(path, '{"epoch":"0000');
  assert.is(readJournal(path), null);
});

test('it stays small: what is settled is dropped when the file is rewritten', async ({
  folder,
}) => {
  const journal = openJournal(folder, RUN);
  journal.dot(held(0)); // stays open all the time
  let largest = 0;
  for (let number = 1; number <= 30_000; number++) {
    journal.dot(held(number));
    journal.result(settlement(number));
    journal.settled([settlement(number)]);
    if (number % 200 !== 0) continue;
    await new Promise((resolve) => setImmediate(resolve)); // as a worker lives, from turn to turn
    largest = Math.max(largest, statSync(pathIn(folder)).size);
  }
  await journal.synced();
  assert.ok(largest < 8 * 1024 * 1024, `${largest} bytes`);
  assert.ok(statSync(pathIn(folder)).size < 5 * 1024 * 1024);
  const run = readJournal(pathIn(folder))!;
  assert.equal(run.traceOf(held(0)), { phase: 'dot' });
  journal.end();
  assert.equal(readdirSync(folder), []);
});

test('while it is rewritten nothing is lost, and what is read at any moment is whole', async ({
  folder,
}) => {
  const journal = openJournal(folder, RUN);
  const path = join(folder, `${RUN.epoch}.journal`);
  const seen = new Set<number>();
  const KEEP = 50;
  for (let number = 1; number <= 20_000; number++) {
    journal.dot(held(number));
    journal.result(settlement(number));
    if (number > KEEP) journal.settled([settlement(number - KEEP)]);
    if (number % 97 !== 0) continue;
    await new Promise((resolve) => setImmediate(resolve));
    seen.add(statSync(path).ino);
    if (number % 970 !== 0) continue;
    const run = readJournal(path)!; // as after kill -9 right now
    for (let open = number - KEEP + 1; open <= number; open++) {
      assert.is(run.traceOf(held(open)).phase, 'settled', `${open} of ${number}`);
    }
  }
  assert.ok(seen.size > 1, 'it was rewritten');
  await journal.synced();
  journal.end();
});

test('an end in the middle of a sync leaves no file and breaks nothing', async ({ folder }) => {
  const troubles: unknown[] = [];
  for (let round = 0; round < 20; round++) {
    const journal = openJournal(folder, RUN, (error) => troubles.push(error));
    journal.dot(held(1));
    journal.result(settlement(1));
    if (round % 2 === 0) await new Promise((resolve) => setTimeout(resolve, 2));
    journal.settled([settlement(1)]);
    journal.end();
    await journal.synced();
    assert.equal(readdirSync(folder), []);
  }
  assert.equal(troubles, []);
});

// A limit on the size of files is what a process can have of a full disk without being root: the kernel refuses a
// write in the middle of a line.
const hasPrlimit = spawnSync('prlimit', ['--version']).status === 0;
if (!hasPrlimit) console.log('skipped: a journal on a full disk: there is no prlimit here');
(hasPrlimit ? test : test.skip)(
  'no room: what cannot be written throws, leaves no half line, and goes on when there is room',
  ({ folder }) => {
    const source = `
      import { spawnSync } from 'node:child_process';
      import { openJournal } from ${JSON.stringify(new URL('../../src/delivery/journal.ts', import.meta.url).href)};
      const journal = openJournal(process.argv[1], ${JSON.stringify(RUN)});
      const wrote = [];
      let refused = 0;
      const write = (emailId) => {
        try {
          journal.dot({ emailId, position: 0, attempt: 1 });
          wrote.push(emailId);
        } catch {
          refused += 1;
        }
      };
      for (let number = 0; number < 200; number++) write('email-' + number);
      const before = refused;
      spawnSync('prlimit', ['--pid', String(process.pid), '--fsize=unlimited']);
      write('last');
      console.log(JSON.stringify({ wrote, before, after: refused }));
    `;
    const child = spawnSync(
      'prlimit',
      ['--fsize=1000:unlimited', process.execPath, ...LOADER, '--input-type=module'].concat(
        '-e',
        source,
        folder,
      ),
      { encoding: 'utf8', cwd: join(import.meta.dirname, '../..') },
    );
    assert.is(child.status, 0, child.stderr);
    const said = JSON.parse(child.stdout) as { wrote: string[]; before: number; after: number };
    assert.ok(said.before > 100 && said.wrote.length > 10, child.stdout);
    assert.is(said.after, said.before, 'with room it is written again');
    assert.is(said.wrote.at(-1), 'last');
    const run = readJournal(pathIn(folder))!;
    for (let number = 0; number < 200; number++) {
      const emailId = `email-${number}`;
      const phase = said.wrote.includes(emailId) ? 'dot' : 'before_dot';
      assert.is(run.traceOf({ ...held(0), emailId }).phase, phase, emailId);
    }
    assert.is(run.traceOf({ ...held(0), emailId: 'last' }).phase, 'dot');
  },
);

test.run();
