// Fills the queue of a running product: copies of an email that it accepted, straight into its database, since a
// million requests would take longer than anything that is measured. Whatever columns there are, they are copied.
import { Client } from 'pg';
import { BenchFailed } from './children.ts';

export interface Rows {
  /** Of the tenant that the API key belongs to. */
  readonly ownTenantId: string;
  /** Makes a tenant and gives its id. */
  addTenant(): Promise<string>;
  /** Nothing for this destination is to be claimed. */
  pause(destination: string): Promise<void>;
  /** Puts so many copies of the newest email into the queue. */
  add(about: {
    readonly tenantId: string;
    readonly count: number;
    /** A destination; null: as the copied one's. */
    readonly lane: string | null;
    readonly state: 'ready' | 'deferred';
    /** From now. */
    readonly dueInS: number;
  }): Promise<void>;
  /** How long deliveries of a tenant took from accept to the end of the attempt, in ms; those accepted since. */
  latenciesMs(tenantId: string, since: Date): Promise<readonly number[]>;
  count(state: string): Promise<number>;
  now(): Promise<Date>;
  end(): Promise<void>;
}

const BATCH = 50_000;
const TABLES = ['email', 'email_content', 'delivery'] as const;

export async function openRows(url: string): Promise<Rows> {
  const client = new Client({ connectionString: url });
  await client.connect();
  const columns = new Map<string, readonly string[]>();
  for (const table of TABLES) columns.set(table, await columnsOf(client, table));
  const one = async (text: string, values: unknown[] = []): Promise<Record<string, unknown>> => {
    const { rows } = await client.query<Record<string, unknown>>(text, values);
    const [row] = rows;
    if (row === undefined) throw new BenchFailed(`no row: ${text}`);
    return row;
  };
  const insert = (table: string, values: Readonly<Record<string, string>>): string => {
    const names = columns.get(table) ?? [];
    const unknown = Object.keys(values).find((name) => !names.includes(name));
    if (unknown !== undefined) throw new BenchFailed(`${table} has no column ${unknown}`);
    const id = table === 'email' ? 'id' : 'email_id';
    return `insert into ${table} (${names.join(', ')})
      select ${names.map((name) => values[name] ?? `t.${name}`).join(', ')}
      from ids, ${table} t where t.tenant_id = $1 and t.${id} = $2`;
  };

  const ownTenantId = String(
    (await one('select id from tenant order by created_at, id limit 1'))['id'],
  );
  return {
    ownTenantId,
    async addTenant() {
      const text = `insert into tenant (id, name, created_at) values (uuidv7(), 'other', now())
        returning id`;
      return String((await one(text))['id']);
    },
    async pause(destination) {
      await client.query(
        `insert into pause (id, kind, name, reason, paused_at)
          values (uuidv7(), 'destination', $1, 'benchmark', now())`,
        [destination],
      );
    },
    async add({ tenantId, count, lane, state, dueInS }) {
      const like = await one('select id from email where tenant_id = $1 order by id desc limit 1', [
        ownTenantId,
      ]);
      const from = { tenant_id: '$3::uuid' };
      const due = `now() + $6::float8 * interval '1 second'`;
      for (let left = count; left > 0; left -= BATCH) {
        await client.query(
          `with ids as materialized (select uuidv7() as id from generate_series(1, $4::integer)),
          emails as (${insert('email', { ...from, id: 'ids.id', created_at: 'now()', last_event: `'queued'` })}),
          contents as (${insert('email_content', { ...from, email_id: 'ids.id' })})
          ${insert('delivery', {
            ...from,
            email_id: 'ids.id',
            lane: 'coalesce($5::text, t.lane)',
            state: '$7::text',
            due_at: due,
            expires_at: `${due} + interval '1 day'`,
            attempts: '0',
            lease_epoch: 'null',
            last_cause: 'null',
            last_reply: 'null',
          })}`,
          [ownTenantId, like['id'], tenantId, Math.min(BATCH, left), lane, dueInS, state],
        );
      }
      // What the server would do by itself, but not at a time that is measured.
      for (const table of TABLES) await client.query(`vacuum (analyze) ${table}`);
      await client.query('checkpoint');
    },
    async latenciesMs(tenantId, since) {
      const { rows } = await client.query<{ ms: number }>(
        `select (extract(epoch from a.finished_at - e.created_at) * 1000)::float8 as ms
          from email e join attempt a on a.tenant_id = e.tenant_id and a.email_id = e.id
          where e.tenant_id = $1 and e.created_at >= $2 and a.outcome = 'delivered'`,
        [tenantId, since],
      );
      return rows.map(({ ms }) => ms);
    },
    async count(state) {
      return Number(
        (await one('select count(*) as n from delivery where state = $1', [state]))['n'],
      );
    },
    async now() {
      return (await one('select now() as now'))['now'] as Date;
    },
    end: () => client.end(),
  };
}

async function columnsOf(client: Client, table: string): Promise<readonly string[]> {
  const { rows } = await client.query<{ column_name: string }>(
    `select column_name from information_schema.columns
      where table_schema = 'public' and table_name = $1 and is_generated = 'NEVER'
      order by ordinal_position`,
    [table],
  );
  if (rows.length === 0) throw new BenchFailed(`no table ${table}`);
  return rows.map(({ column_name }) => column_name);
}
