// What operators can do with the queue, and who is one: part of the composition root.
import type { Caller } from './access/keys.ts';
import { refuseFields } from './access/refusal.ts';
import type { QueueVerbs } from './http/verbs.ts';
import { readQueue } from './queue/overview.ts';
import { createPause, listPauses, PAUSES_MAX, removePause } from './queue/pauses.ts';
import type { Store } from './store/orm.ts';

/** `nudge`: workers look for what is ready now. */
export function composeQueue(d: {
  readonly store: Store;
  readonly firstTenantId: string;
  readonly nudge: () => void;
}): QueueVerbs {
  const { pool } = d.store;
  return {
    isOperator: (caller: Caller) =>
      caller.tenantId === d.firstTenantId && caller.permission === 'full_access',
    read: () => readQueue(pool),
    listPauses: () => listPauses(pool),
    async pause(wanted) {
      if (wanted.kind === 'tenant') {
        const { rowCount } = await pool.query('select 1 from tenant where id = $1', [wanted.name]);
        if (rowCount === 0) {
          throw refuseFields([{ path: 'name', message: '`name` is the id of no tenant.' }]);
        }
      }
      const pause = await createPause(pool, wanted);
      if (pause === null) {
        const message = `There are ${PAUSES_MAX} pauses already; resume some, or pause \`all\`.`;
        throw refuseFields([{ path: 'body', message }]);
      }
      d.nudge();
      return pause;
    },
    async resume(id) {
      const pause = await removePause(pool, id);
      d.nudge();
      return pause !== null;
    },
  };
}
