// A process that tells endpoints what happens, until it is killed: the database's URL is its argument.
import { openStore } from '../../src/store/orm.ts';
import { silent } from './queue.ts';
import { startTeller } from './webhooks.ts';

const OUTBOX_MS = 20;

const [url = ''] = process.argv.slice(2);
const store = await openStore({ url, log: silent, connectionsMax: 3, migrate: false });
const teller = startTeller({ store, log: silent });
for (;;) {
  await teller.tell();
  await new Promise((resolve) => setTimeout(resolve, OUTBOX_MS));
}
