// A job process that does nothing but retention, to be killed: it says each step before it takes the next.
import { openStore } from '../../src/store/orm.ts';
import { silent } from './queue.ts';
import { runRetention } from './retention.ts';

const [url = '', inDays = ''] = process.argv.slice(2);
const store = await openStore({ url, log: silent, connectionsMax: 2, migrate: false });
await runRetention(store, {
  keep: { emails: '30d' },
  inDays: Number(inDays),
  onStep: (count) => process.stdout.write(`${count}\n`),
});
await store.close();
