// How long a broadcast to many contacts takes until the email of each is stored, its deliveries going on beside it, and
// what the API's callers feel of it meanwhile.
import { Client } from 'pg';
import { insertPeople, readReached, type Ask } from '../support/broadcast-people.ts';
import { BenchFailed, until } from './children.ts';
import { renderPeaks, startSide, type CasePlan } from './side.ts';

/** For CONTACTS; the limit of another number is in proportion. */
const SECONDS_MAX = 120;
const CONTACTS = 100_000;
const FAN_OUT_MAX_MS = 1_200_000;
/** A caller of the API beside it. */
const RATE_PER_S = 20;
const SAMPLE_S = 10;

const HTML = `<!doctype html><html><body><h1>What is new in May</h1>
<p>Hello {{{FIRST_NAME|there}}},</p>
${'<p>Three things that you can do now, each of them with <a href="https://acme.example/may">a link</a> to its page.</p>\n'.repeat(12)}
<p>You get this as {{{EMAIL}}}. <a href="{{{RESEND_UNSUBSCRIBE_URL}}}">Unsubscribe</a></p></body></html>`;

export async function benchFanOut(plan: CasePlan): Promise<string> {
  const side = await startSide(plan, { name: 'fan-out' });
  const client = new Client({ connectionString: await side.product.databaseUrl() });
  await client.connect();
  const ask: Ask = async <T extends object>(sql: string, values: readonly unknown[] = []) =>
    (await client.query<T>(sql, [...values])).rows;
  const [tenant] = await ask<{ id: string }>('select id from tenant order by created_at limit 1');
  const contacts = Math.max(10, Math.round(plan.rows / 10) * 10);
  const people = await insertPeople(ask, {
    tenantId: tenant!.id,
    contacts,
    domain: 'recipient.example',
  });
  await client.query('analyze contact, segment_contact, contact_topic, suppression');
  const sample = { count: RATE_PER_S * SAMPLE_S, ratePerS: RATE_PER_S };
  const idle = await side.post(sample);

  const call = async (method: string, path: string, body?: object): Promise<string> => {
    const answer = await fetch(`http://127.0.0.1:${side.product.httpPort}${path}`, {
      method,
      headers: { authorization: `Bearer ${side.product.key}`, 'content-type': 'application/json' },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    const { id } = (await answer.json()) as { id?: string };
    if (!answer.ok || id === undefined) throw new BenchFailed(`${path} answered ${answer.status}`);
    return id;
  };
  const id = await call('POST', '/broadcasts', {
    segment_id: people.segmentId,
    topic_id: people.topicId,
    from: 'Acme <news@mailstead.test>',
    subject: 'What is new in May, {{{FIRST_NAME|friend}}}',
    preview_text: 'Three things that you can do now',
    html: HTML,
  });
  const mainBeforeMb = Math.max(
    ...side.product.memory().flatMap(({ part, peakMb }) => (part === 'main' ? [peakMb] : [])),
  );
  const before = side.product.cpu();
  const startedAt = performance.now();
  await call('POST', `/broadcasts/${id}/send`);
  const beside = await side.post(sample);
  const isStillOn = performance.now();
  const sentAt = await until('the fan-out', { maxMs: FAN_OUT_MAX_MS, pollMs: 50 }, async () => {
    const [row] = await ask<{ status: string; failure: string | null }>(
      'select status, failure from broadcast where id = $1',
      [id],
    );
    if (row?.status === 'failed') throw new BenchFailed(`it failed: ${row.failure}`);
    return row?.status === 'sent' ? performance.now() : null;
  });
  const seconds = (sentAt - startedAt) / 1_000;
  const cpu = [...side.product.cpu()].map(
    ([part, s]) => `${part} ${(s - (before.get(part) ?? 0)).toFixed(1)} s`,
  );
  const done = await readReached(ask, id);
  const peaks = side.product.memory();
  const delivered = done.emails - done.open;
  await client.end();
  await side.stop();
  if (done.emails !== people.wanted || done.addresses !== people.wanted || done.forbidden > 0) {
    throw new BenchFailed(`the wrong ones were reached: ${JSON.stringify(done)}`);
  }
  if (isStillOn > sentAt) throw new BenchFailed('it was over before the sample: more --rows');
  const max = (SECONDS_MAX * contacts) / CONTACTS;
  return [
    `A broadcast to ${contacts.toLocaleString('en-US')} contacts, ${people.wanted.toLocaleString('en-US')} of whom want it (the others are left out):`,
    `  every email composed and stored after ${seconds.toFixed(1)} s (${Math.round(contacts / seconds)} contacts a second), ${delivered} of them delivered by then; less than ${max.toFixed(0)} s: ${seconds < max ? 'kept' : 'BROKEN'}`,
    `  processor time meanwhile: ${cpu.join(', ')}`,
    `  POST /emails, ${RATE_PER_S} a second: p95 ${idle.p95Ms.toFixed(1)} ms before, ${beside.p95Ms.toFixed(1)} ms beside it`,
    `${renderPeaks(peaks)} (main ${mainBeforeMb.toFixed(0)} MB before)`,
  ].join('\n');
}
