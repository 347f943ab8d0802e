// Holds what was acknowledged against what the rows say and what the peer took: accepted = delivered + still queued +
// bounced + unknown, and nothing twice that is not told as possibly twice.
import type { Machine } from './machine.ts';
import type { Report } from './row.ts';
import type { Tally } from './tally.ts';

export interface Ledger {
  readonly accepted: number;
  /** Of what was acknowledged. */
  readonly byState: Readonly<Record<string, number>>;
  /** Stored without an answer that arrived, or not sent by the row: the program's first email. */
  readonly others: number;
  /** Acknowledged, and in no row. */
  readonly lost: readonly string[];
  /** Said to be delivered, and the peer never took it. */
  readonly imaginary: readonly string[];
  /** Taken more often than the rows admit. */
  readonly doubled: readonly string[];
  /** Taken twice, and told as `unknown` in between. */
  readonly admitted: number;
}

interface Row {
  readonly id: string;
  readonly message_id: string;
  readonly state: string;
  readonly unknowns: string;
}

const FACTS = `
  select e.id, e.message_id, d.state,
    (select count(*) from attempt a where a.tenant_id = d.tenant_id and a.email_id = d.email_id
      and a.position = d.position and a.outcome = 'unknown')::text as unknowns
  from email e join delivery d on d.tenant_id = e.tenant_id and d.email_id = e.id
  where e.recipient_count = 1 and e.id > $1
  order by e.id limit 20000`;
const FIRST_ID = '00000000-0000-0000-0000-000000000000';

/** Reads all rows; ids grow with time, so `after` leaves out what an earlier round has held against. */
export async function readLedger(
  machine: Pick<Machine, 'query'>,
  about: {
    readonly tally: Pick<Tally, 'counts'>;
    readonly accepted: ReadonlySet<string>;
    readonly after?: string;
  },
): Promise<Ledger & { readonly last: string }> {
  const found = new Set<string>();
  const byState: Record<string, number> = {};
  let others = 0;
  const imaginary: string[] = [];
  const doubled: string[] = [];
  let admitted = 0;
  let last = about.after ?? FIRST_ID;
  for (;;) {
    const rows = await machine.query<Row>(FACTS, [last]);
    if (rows.length === 0) break;
    for (const { id, message_id, state, unknowns } of rows) {
      found.add(id);
      last = id;
      if (about.accepted.has(id)) byState[state] = (byState[state] ?? 0) + 1;
      else others += 1;
      const taken = about.tally.counts.get(message_id) ?? 0;
      const may = Number(unknowns) + (state === 'delivered' ? 1 : 0);
      if (state === 'delivered' && taken === 0) imaginary.push(id);
      if (taken > may) doubled.push(`${id} (${state}, taken ${taken}, admitted ${may})`);
      else if (taken > 1) admitted += 1;
    }
  }
  const lost = [...about.accepted].filter((id) => !found.has(id));
  return {
    accepted: about.accepted.size,
    byState,
    others,
    lost,
    imaginary,
    doubled,
    admitted,
    last,
  };
}

/** The promise of every row that sends mail. */
export function promiseBalance(report: Report, ledger: Ledger): void {
  const { lost, imaginary, doubled } = ledger;
  report.promise(lost.length === 0, `${lost.length} acknowledged emails are lost: ${some(lost)}`);
  report.promise(
    imaginary.length === 0,
    `${imaginary.length} are said to be delivered and were never taken: ${some(imaginary)}`,
  );
  report.promise(
    doubled.length === 0,
    `${doubled.length} were taken more often than is told: ${some(doubled)}`,
  );
}

export const describeLedger = ({ accepted, byState, others, admitted }: Ledger): string =>
  `${accepted} accepted = ${
    Object.entries(byState)
      .map(([state, count]) => `${count} ${state}`)
      .join(' + ') || 'nothing'
  }; ${others} more stored; ${admitted} taken twice and told so`;

const some = (ids: readonly string[]): string => ids.slice(0, 3).join(', ');
