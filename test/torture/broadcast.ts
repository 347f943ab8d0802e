// Row 24: kill -9 twice in the middle of a broadcast. Everyone who wants it gets it once, whoever does not never.
import { insertPeople, readReached } from '../support/broadcast-people.ts';
import { signalTo, startMachine } from './machine.ts';
import { readTree } from '../bench/processes.ts';
import { firstTenantId } from './seed.ts';
import { sleep, untilSo, type Row } from './row.ts';
import { startTally } from './tally.ts';

const KILLS = 2;
const DONE_MAX_MS = 300_000;

export const broadcastKill: Row = {
  name: 'broadcast-kill',
  number: 24,
  title: 'kill -9 twice in the middle of a broadcast',
  async run(torture) {
    const contacts = torture.short ? 2_000 : 10_000;
    const { promise } = torture.report;
    const tally = await startTally();
    torture.undo.add(() => tally.stop());
    const machine = await startMachine(torture, {
      MAILSTEAD_DELIVERY: 'smarthost',
      MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${tally.port}`,
    });
    const tenantId = await firstTenantId(machine);
    const domain = 'recipient.test';
    const people = await insertPeople(machine.query, { tenantId, contacts, domain });
    const made = await machine.program.call('POST', '/broadcasts', {
      segment_id: people.segmentId,
      topic_id: people.topicId,
      from: 'News <news@mailstead.test>',
      subject: 'For {{{FIRST_NAME}}}',
      html: '<p>Hello {{{FIRST_NAME}}}, <a href="{{{RESEND_UNSUBSCRIBE_URL}}}">unsubscribe</a></p>',
      send: true,
    });
    const id = String(made.body['id']);
    const moments: number[] = [];
    for (let kill = 1; kill <= KILLS; kill++) {
      const wanted = Math.floor(contacts * (kill / (KILLS + 1)) * (0.8 + Math.random() * 0.4));
      await untilSo(`${wanted} contacts`, DONE_MAX_MS, async () =>
        ((await readReached(machine.query, id).catch(() => null))?.contacts ?? 0) >= wanted
          ? true
          : null,
      );
      await sleep(Math.random() * 50);
      const pid = machine.program.pid();
      const tree = pid === null ? [] : readTree(pid);
      const seen = await readReached(machine.query, id);
      await machine.forget();
      await machine.program.kill();
      // Its Postgres, too, every second time.
      for (const one of tree) {
        if (one.pid !== pid && (one.name !== 'postgres' || kill % 2 === 0)) {
          signalTo(one.pid, 'SIGKILL');
        }
      }
      moments.push(seen.contacts);
      promise(seen.status === 'queued', `it was ${seen.status} when it was killed`);
      await machine.program.start();
    }
    const done = await untilSo('all of it', DONE_MAX_MS, async () => {
      const reached = await readReached(machine.query, id).catch(() => null);
      return reached?.status === 'sent' && reached.open === 0 ? reached : null;
    });
    const rows = await machine.query<{ message_id: string; state: string; unknowns: string }>(
      `select e.message_id, d.state, (select count(*) from attempt a where a.tenant_id = d.tenant_id
         and a.email_id = d.email_id and a.outcome = 'unknown') as unknowns
       from email e join delivery d on d.tenant_id = e.tenant_id and d.email_id = e.id
       where e.broadcast_id = $1`,
      [id],
    );
    let twice = 0;
    let missing = 0;
    let admitted = 0;
    for (const { message_id: messageId, state, unknowns } of rows) {
      const taken = tally.counts.get(messageId) ?? 0;
      const may = Number(unknowns) + (state === 'delivered' ? 1 : 0);
      if (taken > may) twice += 1;
      else if (taken > 1) admitted += 1;
      if (state === 'delivered' && taken === 0) missing += 1;
    }
    torture.report.did(
      `a broadcast to ${contacts} contacts, killed after ${moments.join(' and ')} of them`,
    );
    torture.report.counted(
      `${done.rows} contacts reached, ${done.emails} emails to ${done.addresses} addresses, ${done.left_out} left out, ${done.forbidden} to who must not get it; ${twice} taken more often than told, ${admitted} twice and told as possible, ${done.unknown} unknown`,
    );
    promise(
      done.rows === contacts && done.contacts === contacts,
      `${done.contacts} contacts reached`,
    );
    promise(
      done.emails === people.wanted && done.addresses === people.wanted,
      `${done.emails} emails to ${done.addresses} addresses, not ${people.wanted}`,
    );
    promise(done.forbidden === 0, `${done.forbidden} emails to who must not get any`);
    promise(done.left_out === contacts - people.wanted, `${done.left_out} left out`);
    promise(twice === 0, `${twice} arrived more often than the rows say`);
    promise(missing === 0, `${missing} are said to be delivered and never arrived`);
  },
};
