// The connection to Postgres: MikroORM for the nouns, its own pg pool for the hot statements, so both
// share one set of connections. Migrates forward under an advisory lock and refuses a schema that is
// newer than this program.
import { MikroORM, type SqlEntityManager } from '@mikro-orm/postgresql';
import { Migrator } from '@mikro-orm/migrations';
import type { Pool, PoolClient } from 'pg';
import type { Logger } from '../log.ts';
import { ApiKey } from './api-key.ts';
import { AttachmentRow } from './attachment.ts';
import { Automation, AutomationRun, AutomationRunStep, EventDefinition } from './automation.ts';
import { Broadcast, BroadcastRecipient } from './broadcast.ts';
import {
  Contact,
  ContactImport,
  ContactProperty,
  ContactTopic,
  Segment,
  SegmentContact,
} from './contact.ts';
import { Attempt, Delivery } from './delivery.ts';
import { DomainClaim } from './domain-claim.ts';
import { Email, EmailContent } from './email.ts';
import { FirstHouse } from './migrations/0001-first-house.ts';
import { WholeSending } from './migrations/0002-whole-sending.ts';
import { Domains } from './migrations/0004-domains.ts';
import { Templates } from './migrations/0003-templates.ts';
import { RequestLogs } from './migrations/0005-request-logs.ts';
import { ReceivedEmails } from './migrations/0006-received-emails.ts';
import { ReceivedReading } from './migrations/0007-received-reading.ts';
import { Lanes } from './migrations/0008-lanes.ts';
import { ReceivingRoutes } from './migrations/0009-receiving.ts';
import { Audience } from './migrations/0010-audience.ts';
import { ApplianceTables } from './migrations/0011-appliance.ts';
import { ReceivedContent, ReceivedEmail } from './received-email.ts';
import { ReceivingReplay } from './receiving-replay.ts';
import { ForwardingAttempt, ForwardingRule, ReceivingRoute } from './receiving-route.ts';
import { RequestLog, RequestLogBody } from './request-log.ts';
import { DkimKeyRow, SendingDomain } from './sending-domain.ts';
import { SinkMessage } from './sink-message.ts';
import { Suppression } from './suppression.ts';
import { Template, TemplateVersion } from './template.ts';
import { Tenant } from './tenant.ts';
import { measurePool } from './measured-pool.ts';
import { clientWithTimeout } from './timed-client.ts';
import { TimelineEntry } from './timeline-entry.ts';
import { Topic } from './topic.ts';
import { Webhook, WebhookAttempt, WebhookEvent } from './webhook.ts';

/** Any constant that no other program uses in the same database. Held while the schema or all rows are written. */
export const MIGRATION_LOCK = 7_245_178_301;
const CONNECT_TIMEOUT_MS = 5_000;
/** A statement that takes longer than this is given up; nothing of ours takes a tenth of it. */
const QUERY_TIMEOUT_MS = 15_000;
/** An index over the mail of years, or the wait for another process that makes it. */
const MIGRATION_TIMEOUT_MS = 6 * 3_600_000;
const MIGRATION_TABLE = 'migration';
const migrations = [
  { name: '0001-first-house', class: FirstHouse },
  { name: '0002-whole-sending', class: WholeSending },
  { name: '0003-templates', class: Templates },
  { name: '0004-domains', class: Domains },
  { name: '0005-request-logs', class: RequestLogs },
  { name: '0006-received-emails', class: ReceivedEmails },
  { name: '0007-received-reading', class: ReceivedReading },
  { name: '0008-lanes', class: Lanes },
  { name: '0009-receiving', class: ReceivingRoutes },
  { name: '0010-audience', class: Audience },
  { name: '0011-appliance', class: ApplianceTables },
];

/** The names of this program's migrations, in their order. */
export const SCHEMA: readonly string[] = migrations.map(({ name }) => name);

export interface Store {
  readonly pool: Pool;
  /** A fresh entity manager: one per request, never shared. */
  em(): SqlEntityManager;
  /** Runs `work` in one transaction and returns what it returns; rolls back when it throws. */
  transact<T>(work: (client: PoolClient) => Promise<T>): Promise<T>;
  close(): Promise<void>;
}

/** The database's schema was written by a newer Mailstead. */
export class NewerSchema extends Error {
  override name = 'NewerSchema';
}

/** Connects, migrates when `migrate` is set, and resolves once the database answered. */
export async function openStore(options: {
  url: string;
  log: Logger;
  connectionsMax: number;
  migrate: boolean;
  /** Called as each migration ends; they hold together, once all have ended. */
  onMigrated?: (name: string) => void;
  /** The last migration to run; absent: all. For rows of an older release. */
  migrateTo?: string;
}): Promise<Store> {
  let timeoutMs = options.migrate ? MIGRATION_TIMEOUT_MS : QUERY_TIMEOUT_MS;
  const orm = await MikroORM.init({
    clientUrl: options.url,
    entities: [
      Tenant,
      ApiKey,
      SendingDomain,
      DkimKeyRow,
      DomainClaim,
      Email,
      EmailContent,
      Delivery,
      Attempt,
      TimelineEntry,
      AttachmentRow,
      Suppression,
      Topic,
      Template,
      TemplateVersion,
      ReceivedEmail,
      ReceivedContent,
      ReceivingReplay,
      ReceivingRoute,
      ForwardingRule,
      ForwardingAttempt,
      RequestLog,
      RequestLogBody,
      SinkMessage,
      Contact,
      ContactProperty,
      ContactTopic,
      ContactImport,
      Segment,
      SegmentContact,
      Broadcast,
      BroadcastRecipient,
      Webhook,
      WebhookEvent,
      WebhookAttempt,
      EventDefinition,
      Automation,
      AutomationRun,
      AutomationRunStep,
    ],
    extensions: [Migrator],
    // A typo in the URL must not make a second, empty appliance.
    ensureDatabase: false,
    migrations: {
      migrationsList: migrations,
      tableName: MIGRATION_TABLE,
      snapshot: false,
      transactional: true,
      allOrNothing: true,
    },
    pool: { min: 0, max: options.connectionsMax, idleTimeoutMillis: 30_000 },
    driverOptions: {
      connectionTimeoutMillis: CONNECT_TIMEOUT_MS,
      Client: clientWithTimeout(() => timeoutMs),
      keepAlive: true,
      application_name: 'mailstead',
    },
    logger: (message: string) => options.log.debug(message),
  });
  try {
    const pool = await orm.em.getConnection().getNativeClient();
    if (options.migrate) await migrate(orm, pool, options);
    timeoutMs = QUERY_TIMEOUT_MS;
    const unmeasure = measurePool(pool);
    return {
      pool,
      em: () => orm.em.fork({ useContext: false }),
      transact: (work) => transact(pool, work),
      async close() {
        unmeasure();
        await orm.close(true);
        // MikroORM leaves a pool alone that it never queried itself.
        if (!pool.ending) await pool.end();
      },
    };
  } catch (error) {
    await orm.close(true);
    throw error;
  }
}

async function migrate(
  orm: MikroORM,
  pool: Pool,
  d: Pick<Parameters<typeof openStore>[0], 'log' | 'onMigrated' | 'migrateTo'>,
): Promise<void> {
  const client = await pool.connect();
  let broken: Error | undefined;
  try {
    // Several processes may start together: one migrates, the others wait and find nothing to do.
    await client.query('select pg_advisory_lock($1)', [MIGRATION_LOCK]);
    const gap = await readSchemaGap(client);
    refuseNewerSchema(gap);
    warnOfUpgrade(gap, d.log);
    orm.migrator.on('migrated', ({ name }) => d.onMigrated?.(name));
    const done = await orm.migrator.up(d.migrateTo === undefined ? undefined : { to: d.migrateTo });
    if (done.length > 0)
      d.log.info({ migrations: done.map(({ name }) => name) }, 'schema migrated');
    await client.query('select pg_advisory_unlock($1)', [MIGRATION_LOCK]);
  } catch (error) {
    broken = error as Error; // the lock goes with the connection
    throw error;
  } finally {
    client.release(broken);
  }
}

/** A database that is used already is told apart: what runs now cannot be undone by starting the old program again. */
function warnOfUpgrade({ pending }: SchemaGap, log: Logger): void {
  if (pending.length === 0 || pending.length === migrations.length) return;
  log.warn(
    { migrations: pending },
    'this start brings the database to a newer schema, which an older Mailstead refuses; the way back is to ' +
      'restore a backup made before, with the version that made it',
  );
}

/** How the schema of a database and this program go together. */
export interface SchemaGap {
  /** Migrations of this program that have not run there. */
  readonly pending: readonly string[];
  /** Migrations that ran there and that this program does not know. */
  readonly unknown: readonly string[];
}

/** Changes nothing. */
export async function readSchemaGap(db: Pick<PoolClient, 'query'>): Promise<SchemaGap> {
  const { rows: tables } = await db.query<{ found: boolean }>(
    'select to_regclass($1) is not null as found',
    [MIGRATION_TABLE],
  );
  const known = migrations.map(({ name }) => name);
  if (tables[0]?.found !== true) return { pending: known, unknown: [] };
  const { rows } = await db.query<{ name: string }>(`select name from ${MIGRATION_TABLE}`);
  const done = rows.map(({ name }) => name);
  return {
    pending: known.filter((name) => !done.includes(name)),
    unknown: done.filter((name) => !known.includes(name)),
  };
}

/** Throws NewerSchema where a newer program has migrated the database. */
export function refuseNewerSchema({ unknown }: SchemaGap): void {
  if (unknown.length === 0) return;
  throw new NewerSchema(
    `the database was migrated by a newer Mailstead (${unknown.join(', ')}); ` +
      'start that version again, or restore a backup made before the upgrade',
  );
}

async function transact<T>(pool: Pool, work: (client: PoolClient) => Promise<T>): Promise<T> {
  const client = await pool.connect();
  let broken: Error | undefined;
  try {
    await client.query('begin');
    const result = await work(client);
    await client.query('commit');
    return result;
  } catch (error) {
    await client.query('rollback').catch((rollbackError: Error) => {
      broken = rollbackError; // a connection that cannot roll back must not go back to the pool
    });
    throw error;
  } finally {
    client.release(broken);
  }
}
