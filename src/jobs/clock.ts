// Agenda, the clock: alarms that wake lanes and recurring upkeep. Its store never holds a message: every
// alarm follows from rows, and a sweep sets again whatever is missing, so losing the store (or
// dropping its tables while we run) costs at most one sweep interval. Jobs live in MongoDB when a
// URL is given, else in Postgres.
import { PostgresBackend } from '@agendajs/postgres-backend';
import { Agenda, type AgendaBackend } from 'agenda';
import { Pool } from 'pg';
import type { Logger } from '../log.ts';
import { runJob } from '../telemetry/counted.ts';
import { alarmLag, jobInterval } from '../telemetry/instruments.ts';

export interface Recurring {
  readonly name: string;
  readonly everyMs: number;
  readonly run: () => Promise<void>;
}

export interface Clock {
  /** Asks for `onAlarm(lane)` at or soon after `dueAt`. Never throws: the sweep is the fallback. */
  alarm(lane: string, dueAt: Date): void;
  /** Makes sure that Agenda works and its recurring jobs exist; starts it anew when it does not. */
  ensure(): Promise<void>;
  stop(): Promise<void>;
}

/** Alarms of one lane within this time are one job. */
export const BUCKET_MS = 2_000;
const LANE_JOB = 'wake-lane';
const POLL_MS = 1_000;
/** A job that takes longer may run twice, which harms nothing; Agenda sleeps half of it after each job. */
const LOCK_MS = 10_000;
const LOCK_LIMIT = 50;
const POOL_MAX = 3;
/** A store that is silent for longer does not work. */
const ANSWER_MAX_MS = 10_000;
/** Alarms set recently, so that a thousand deferrals of one lane are one write. */
const REMEMBERED_MAX = 20_000;
const STOP_MAX_MS = 5_000;

export function createClock(options: {
  readonly databaseUrl: string;
  readonly mongodbUrl: string | null;
  readonly log: Logger;
  readonly onAlarm: (lane: string) => Promise<void>;
  readonly recurring: readonly Recurring[];
}): Clock {
  const { log } = options;
  const remembered = new Set<string>();
  let running: Agenda | null = null;
  let starting: Promise<void> | null = null;
  let stopped = false;

  // A pool of its own: MikroORM's reads times as text, which Agenda does not expect.
  let pool: Pool | null = null;
  const openPool = (): Pool => {
    const opened = new Pool({
      connectionString: options.databaseUrl,
      max: POOL_MAX,
      connectionTimeoutMillis: ANSWER_MAX_MS,
      query_timeout: ANSWER_MAX_MS,
      keepAlive: true,
    });
    // Without a listener a connection that Postgres closes would end the whole process.
    opened.on('error', (error) => {
      if (!stopped) log.warn({ err: error }, 'the clock lost a connection');
    });
    opened.on('connect', (client) => client.on('error', () => undefined));
    return opened;
  };
  const backend = async (): Promise<AgendaBackend> => {
    if (options.mongodbUrl === null) {
      return new PostgresBackend({
        pool: (pool ??= openPool()),
        disableNotifications: true, // NOTIFY takes a database-wide lock at commit
      });
    }
    // Read only where it is used: it brings a hundred files.
    const { MongoBackend } = await import('@agendajs/mongo-backend');
    return new MongoBackend({
      address: options.mongodbUrl,
      options: {
        serverSelectionTimeoutMS: ANSWER_MAX_MS,
        connectTimeoutMS: ANSWER_MAX_MS,
        socketTimeoutMS: ANSWER_MAX_MS,
      },
    });
  };

  const repeat = async (agenda: Agenda, { name, everyMs }: Recurring): Promise<void> => {
    // A number: as text, Agenda reads "milliseconds" as seconds.
    const job = await agenda.every(everyMs, name);
    // Further away than it can be: the clock of the machine was set back, or the interval has become shorter.
    const { nextRunAt } = job.attrs;
    if (nextRunAt === null || nextRunAt.getTime() <= Date.now() + everyMs + POLL_MS) return;
    // What is due already would not be stored.
    await job.schedule(new Date(Date.now() + POLL_MS)).save();
  };

  /** Agenda connects in its constructor and leaves a failure to nobody, which would end this process. */
  const connected = async (): Promise<AgendaBackend> => {
    const opened = await backend();
    try {
      await opened.connect();
    } catch (error) {
      await opened.disconnect().catch(() => undefined);
      throw error;
    }
    opened.connect = () => Promise.resolve();
    return opened;
  };

  const start = async (): Promise<void> => {
    const agenda = new Agenda({
      backend: await connected(),
      processEvery: POLL_MS,
      lockLimit: LOCK_LIMIT,
      defaultLockLimit: LOCK_LIMIT,
      defaultLockLifetime: LOCK_MS,
      removeOnComplete: true,
    });
    agenda.on('error', (error) => {
      if (!stopped) log.warn({ err: error }, 'the clock has trouble');
    });
    agenda.on('fail', (error: Error, job) =>
      log.warn({ err: error, job: job.attrs.name }, 'a job failed'),
    );
    // Agenda takes callbacks too, and the rule looks at that form only.
    // oxlint-disable typescript/no-misused-promises
    agenda.define<{ lane: string; at: number }>(LANE_JOB, async (job) => {
      const { lane, at } = job.attrs.data;
      alarmLag.observe(Math.max(0, (Date.now() - at) / 1_000));
      await runJob(LANE_JOB, () => options.onAlarm(lane));
    });
    for (const { name, run, everyMs } of options.recurring) {
      jobInterval.set({ task: name }, everyMs / 1_000);
      agenda.define(name, () => runJob(name, run));
    }
    // oxlint-enable typescript/no-misused-promises
    try {
      await agenda.start();
      for (const one of options.recurring) await repeat(agenda, one);
      running = agenda;
    } catch (error) {
      await stopQuietly(agenda);
      throw error;
    }
  };

  const stopQuietly = async (agenda: Agenda): Promise<void> => {
    const given = new Promise((resolve) => setTimeout(resolve, STOP_MAX_MS).unref());
    await Promise.race([agenda.stop(true).catch(() => undefined), given]);
  };

  const check = async (agenda: Agenda): Promise<void> => {
    // Also recreates what was deleted: `every` is an upsert by name.
    for (const one of options.recurring) await repeat(agenda, one);
  };

  const ensure = async (): Promise<void> => {
    if (stopped) return;
    const before = running;
    try {
      if (before !== null) return await check(before);
    } catch (error) {
      log.warn({ err: error }, 'the clock does not work any more; starting it again');
      running = null;
      remembered.clear();
      if (before !== null) await stopQuietly(before);
    }
    await start().catch((error: unknown) => {
      log.warn({ err: error }, 'the clock does not start; retries wait for the sweep meanwhile');
    });
  };

  return {
    alarm(lane, dueAt) {
      // The end of the bucket: everything in it is due by then. What is due already gets the one that is running, since
      // an earlier one may have had its alarm.
      const at = Math.ceil(Math.max(dueAt.getTime(), Date.now()) / BUCKET_MS) * BUCKET_MS;
      const key = `${lane} ${at}`;
      if (running === null || remembered.has(key)) return;
      if (remembered.size >= REMEMBERED_MAX) remembered.clear();
      remembered.add(key);
      running
        .create(LANE_JOB, { lane, at })
        .unique({ 'data.lane': lane, 'data.at': at })
        .schedule(new Date(at))
        .save()
        .catch((error: unknown) => {
          remembered.delete(key);
          log.warn({ err: error, lane }, 'an alarm could not be set; the sweep sets it again');
        });
    },
    ensure() {
      starting ??= ensure().finally(() => {
        starting = null;
      });
      return starting;
    },
    async stop() {
      stopped = true;
      await Promise.race([
        starting,
        new Promise((resolve) => setTimeout(resolve, STOP_MAX_MS).unref()),
      ]);
      const agenda = running;
      running = null;
      if (agenda !== null) await stopQuietly(agenda);
      void pool?.end().catch(() => undefined);
    },
  };
}
