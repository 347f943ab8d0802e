// What webhooks are told of mail that comes in: on a real Postgres, with the rows themselves.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMessage } from '../../src/mail/parse.ts';
import { receive } from '../../src/receiving/receive.ts';
import { saveShown } from '../../src/receiving/shown.ts';
import { createCopyWriter } from '../../src/receiving/store-copies.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { arrivalOf, receiver } from '../support/arrival.ts';
import { listen, told } from '../support/outbox.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('received told');
test.before(async (context) => {
  context.q = await openQueue();
});
test.after(({ q }) => q.stop());

test('received: once, when there is something to say', async ({ q }) => {
  const deafId = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [deafId, 'x']);
  await listen(q.store, q.tenantId, ['email.received']);
  const raw = Buffer.from(
    'From: a@outside.test\r\nMessage-ID: <one@outside.test>\r\n\r\nWords\r\n',
  );
  const receivers = [q.tenantId, deafId].map((tenantId) => receiver(tenantId, 'in@here.test'));
  let isRead = true;
  const take = (message: Buffer) =>
    receive(
      {
        store: q.store,
        blobs: openDiskBlobs('/nonexistent'),
        write: createCopyWriter(q.store.pool),
        parse: async (bytes) => (isRead ? parseMessage(bytes) : null),
        onUnread: () => undefined,
        onForwards: () => undefined,
      },
      arrivalOf({ receivers, raw: message }),
    );
  const [id] = await take(raw);
  assert.is((await take(raw))[0], id, 'the same message again');
  assert.equal(
    (await told(q.store)).map(({ type, subject_id, tenant_id, detail }) => [
      type,
      subject_id,
      tenant_id,
      detail,
    ]),
    [['email.received', id, q.tenantId, {}]],
  );
  isRead = false;
  const later = Buffer.from(`${raw.toString()}more\r\n`);
  const [unread] = await take(later);
  assert.equal(await told(q.store, unread), []);
  const parsed = await parseMessage(later);
  for (const place of [1, 2]) {
    const isFirst = await q.store.transact((client) =>
      saveShown(client, { tenantId: q.tenantId, id: unread! }, parsed),
    );
    assert.is(isFirst, place === 1);
  }
  assert.equal(
    (await told(q.store, unread)).map(({ type }) => type),
    ['email.received'],
  );
});

test.run();
