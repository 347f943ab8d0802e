// The program: reads the settings, starts the appliance, tells a newcomer what to do, stops on a signal.
import { ConfigError, readEnvironment, type Config } from './config.ts';
import { startAppliance, type Appliance } from './appliance.ts';
import { DatabaseUnusable } from './database.ts';
import { tellFirstStory } from './first-story.ts';
import { PortUnusable } from './http/front-door.ts';
import { createLogger, type Logger } from './log.ts';
import { NotThisAppliance } from './store/appliance-facts.ts';
import { BlobsUnavailable } from './store/blobs-unavailable.ts';
import { DataDirInUse, DataDirUnusable } from './store/data-dir.ts';
import { EmbeddedPostgresFailed } from './store/embedded-failure.ts';
import { NewerSchema } from './store/orm.ts';
import { traceFields } from './telemetry/trace.ts';
import { CertificateUnusable } from './tls-certificate.ts';

/** operate.md: what is in flight finishes or is released within this time. */
const STOP_MAX_MS = 30_000;

/** What may be expected to go wrong; its message is all that an operator needs. */
const EXPECTED = [
  PortUnusable,
  DataDirInUse,
  DataDirUnusable,
  EmbeddedPostgresFailed,
  DatabaseUnusable,
  NewerSchema,
  NotThisAppliance,
  BlobsUnavailable,
  CertificateUnusable,
];

function settings(): Config {
  try {
    return readEnvironment();
  } catch (error) {
    if (!(error instanceof ConfigError)) throw error;
    console.error(error.message);
    process.exit(78); // EX_CONFIG
  }
}

async function main(): Promise<void> {
  const config = settings();
  const log: Logger = createLogger({
    level: config.logLevel,
    name: 'mailstead',
    mode: config.mode,
    fields: traceFields,
  });
  process.on('unhandledRejection', (error) => {
    log.fatal({ err: error }, 'a fault that nothing handles');
    process.exit(1);
  });

  let stopping: Promise<void> | null = null;
  let starting: Promise<Appliance> | null = null;
  const starts = new AbortController();
  const stop = (signal: string): void => {
    if (stopping !== null) return; // a terminal's Ctrl-C arrives twice
    log.info({ signal }, 'stopping');
    stopping = (async () => {
      setTimeout(() => {
        log.error('not everything stopped in time; the next start takes over');
        process.exit(1);
      }, STOP_MAX_MS).unref();
      starts.abort();
      // A start that is cut short has stopped what it started.
      await (await starting?.catch(() => null))?.stop();
      log.info('stopped');
      process.exit(0);
    })();
  };
  process.on('SIGINT', () => stop('SIGINT'));
  process.on('SIGTERM', () => stop('SIGTERM'));
  process.on('SIGHUP', () => stop('SIGHUP'));

  starting = startAppliance(config, log, {
    signal: starts.signal,
    onFirstKey(token) {
      if (config.mode !== 'production') return;
      // Said once and not through the logger: it must be readable, and it is not stored.
      console.log(`\nThe first API key, shown only now: ${token}\n`);
    },
    onFatal(reason) {
      log.fatal(reason);
      process.exit(1);
    },
  });
  try {
    const appliance = await starting;
    log.info(
      { port: appliance.httpPort, delivery: config.delivery, roles: [...config.roles].join(',') },
      'ready',
    );
    if (config.mode === 'development' && appliance.localUrl !== null && stopping === null) {
      await tellFirstStory({ ...appliance, localUrl: appliance.localUrl }, console.log);
    }
  } catch (error) {
    if (stopping !== null) return;
    if (!EXPECTED.some((kind) => error instanceof kind)) log.fatal({ err: error }, 'cannot start');
    console.error(`Mailstead cannot start: ${(error as Error).message}`);
    process.exit(1);
  }
}

await main();
