// What a broadcast needs is deleted while it is sent: topics with their choices, segments with their members.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createSegmentVerbs } from '../../src/audience/segments.ts';
import { createTopicVerbs } from '../../src/audience/topics.ts';
import { createFanOut } from '../../src/sending/fan-out.ts';
import { openFanOut } from '../support/fan-out.ts';
import { until } from '../support/app.ts';

const test = suite('fan-out, deleted meanwhile');
const { bench, d, query, queued, stateOf, outcomes, stop } = await openFanOut();
test.after(stop);

test('a topic or a segment that is deleted while a batch reads waits for it: nobody is taken for another', async () => {
  const { store, tenantId } = bench;
  const now = (): Date => new Date();
  const topics = createTopicVerbs(store, now);
  const segments = createSegmentVerbs(store, now);
  const isWaiting = (count: number): Promise<unknown> =>
    until(
      () =>
        query(`select 1 from pg_stat_activity
          where datname = current_database() and wait_event_type = 'Lock'`),
      ({ length }) => length >= count,
    );
  for (const deleted of ['topic', 'segment'] as const) {
    const topicId = await topics.create(tenantId, { name: 't', default_subscription: 'opt_in' });
    const made = await queued(3, { topicId });
    await query(
      `insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
       values ($1, $2, $3, 'opt_out', now())`,
      [tenantId, made.contacts[0], topicId],
    );
    const { both } = await store.transact(async (client) => {
      await client.query('lock table contact in access exclusive mode');
      const turn = createFanOut(d).turn();
      await isWaiting(1);
      const removal =
        deleted === 'topic'
          ? topics.remove(tenantId, topicId)
          : segments.remove(tenantId, made.segmentId);
      await Promise.race([removal, isWaiting(2)]);
      return { both: Promise.all([turn, removal]) };
    });
    await both;
    assert.equal(await outcomes(made), ['unsubscribed', 1, 1], deleted);
    assert.is((await stateOf(made)).status, 'sent');
  }
});

test.run();
