// Messages that are stored before they are read: shown at once, and filled in later, also by the next process.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMessage } from '../../src/mail/parse.ts';
import { startLateReader } from '../../src/receiving/late-reader.ts';
import { receive } from '../../src/receiving/receive.ts';
import { findPostmaster } from '../../src/receiving/resolve.ts';
import { createCopyWriter } from '../../src/receiving/store-copies.ts';
import { saveShown } from '../../src/receiving/shown.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { startApp, until, type App } from '../support/app.ts';
import { arrivalOf } from '../support/arrival.ts';
import { silent } from '../support/queue.ts';

interface Shown {
  subject: string;
  from: string;
  text: string | null;
  headers: Record<string, string> | null;
  attachments: { id: string; filename: string; size: number }[];
}

const test = suite<{ app: App; store: Store; blobs: BlobStore }>('late reader');

test.before(async (context) => {
  context.app = await startApp();
  const { databaseUrl: url, dataDir } = context.app;
  context.store = await openStore({ url, log: silent, connectionsMax: 2, migrate: false });
  context.blobs = openDiskBlobs(`${dataDir}/test-blobs`);
});
test.after(async ({ app, store }) => {
  await store.close();
  await app.stop();
});

const raw = (subject: string): Buffer =>
  Buffer.from(
    [
      'From: a@outside.test',
      `Subject: ${subject}`,
      'Content-Type: multipart/mixed; boundary=b',
      '',
      '--b',
      '',
      'Words',
      '--b',
      'Content-Type: application/pdf; name="a.pdf"',
      '',
      'file',
      '--b--',
      '',
    ].join('\r\n'),
  );

/** Stores a message that could not be read in time. */
async function storeUnread(d: { store: Store; blobs: BlobStore }, subject: string) {
  const host = { hostname: 'mailstead.test', homeDomain: null };
  const receiver = await findPostmaster(d.store.pool, host);
  let unread = 0;
  const [id] = await receive(
    {
      ...d,
      write: createCopyWriter(d.store.pool),
      parse: () => Promise.resolve(null),
      onUnread: () => (unread += 1),
      onForwards: () => assert.unreachable(),
    },
    arrivalOf({ receivers: [receiver!], raw: raw(subject) }),
  );
  assert.is(unread, 1, 'the reader hears of it');
  return { id: id!, tenantId: receiver!.tenantId };
}

const shownOf = async (app: App, id: string): Promise<Shown> =>
  (await app.call<Shown>('GET', `/emails/receiving/${id}`)).body;
const untilRead = (app: App, id: string): Promise<Shown> =>
  until(
    () => shownOf(app, id),
    ({ subject }) => subject !== '',
  );

test('what earlier processes left is read at the start, what comes later after a nudge', async ({
  app,
  store,
  blobs,
}) => {
  const left = [
    await storeUnread({ store, blobs }, 'one'),
    await storeUnread({ store, blobs }, 'two'),
  ];
  const before = await shownOf(app, left[0]!.id);
  assert.is(before.subject, '');
  assert.is(before.headers, null);
  assert.equal(before.attachments, []);

  const reader = startLateReader({ store, blobs, parse: parseMessage, log: silent });
  try {
    const one = await untilRead(app, left[0]!.id);
    assert.is(one.subject, 'one');
    assert.is(one.from, 'a@outside.test');
    assert.is(one.text?.trim(), 'Words');
    assert.is(one.attachments[0]!.filename, 'a.pdf');
    assert.is((await untilRead(app, left[1]!.id)).subject, 'two');

    const third = await storeUnread({ store, blobs }, 'three');
    reader.nudge();
    assert.is((await untilRead(app, third.id)).subject, 'three');
  } finally {
    await reader.stop();
  }
});

test('what cannot be read shows its header, and does not stop the others', async ({
  app,
  store,
  blobs,
}) => {
  const slow = await storeUnread({ store, blobs }, 'slow');
  const good = await storeUnread({ store, blobs }, 'good');
  const parse = async (message: Buffer) =>
    message.includes('Subject: slow') ? null : parseMessage(message);
  const reader = startLateReader({ store, blobs, parse, log: silent });
  try {
    const header = await untilRead(app, slow.id);
    assert.is(header.subject, 'slow');
    assert.is(header.text, null);
    assert.is((await untilRead(app, good.id)).text?.trim(), 'Words');
  } finally {
    await reader.stop();
  }
});

test('two processes that read the same message fill it in once', async ({ app, store, blobs }) => {
  const place = await storeUnread({ store, blobs }, 'twice');
  const parsed = await parseMessage(raw('twice'));
  const save = () => store.transact((client) => saveShown(client, place, parsed));
  assert.equal((await Promise.all([save(), save()])).toSorted(), [false, true]);
  const { attachments } = await shownOf(app, place.id);
  assert.is(await save(), false);
  assert.equal((await shownOf(app, place.id)).attachments, attachments);
});

test('a stop leaves what is being read to the next start', async ({ app, store, blobs }) => {
  const { id } = await storeUnread({ store, blobs }, 'interrupted');
  let finish = (): void => undefined;
  const reading = new Promise<void>((begun) => {
    const reader = startLateReader({
      store,
      blobs,
      log: silent,
      parse: async (message) => {
        const stopped = reader.stop();
        await new Promise<void>((resolve) => {
          finish = resolve;
          void stopped.then(begun);
        });
        return parseMessage(message);
      },
    });
  });
  await reading;
  finish();
  assert.is((await shownOf(app, id)).subject, '');
  const next = startLateReader({ store, blobs, parse: parseMessage, log: silent });
  assert.is((await untilRead(app, id)).subject, 'interrupted');
  await next.stop();
});

test.run();
