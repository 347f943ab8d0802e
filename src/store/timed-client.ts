// A connection to Postgres that gives up on a statement without an answer. pg has an option for that, but with it
// everything that a statement held, its parameters and rows, outlives young garbage collections (a function is made
// and stored for every statement, and V8 takes such functions for old): the process then needs twice the memory.
import { Client } from 'pg';
import { noteStatement } from './measured-pool.ts';

type Done = (error: Error | null | undefined, result?: unknown) => void;
type Query = (this: Client, config: unknown, values?: unknown, done?: Done) => unknown;

/**
 * The class for a pool's `Client`. A statement that is not answered in time fails with `Query read timeout`, and its
 * connection ends: whatever else waits on it fails, too. Time starts when the statement is given, not when it is sent;
 * `maxMs` is asked then.
 */
export function clientWithTimeout(maxMs: () => number): typeof Client {
  const plain = Client.prototype.query as unknown as Query;

  const timed = (client: Client, statement: readonly [unknown, unknown], done: Done): void => {
    let isDone = false;
    let timer: NodeJS.Timeout | null = null;
    const begunAt = performance.now();
    const answered: Done = (error, result) => {
      if (isDone) return;
      isDone = true;
      if (timer !== null) clearTimeout(timer);
      noteStatement(begunAt, error);
      done(error, result);
    };
    plain.call(client, ...statement, answered);
    timer = setTimeout(() => {
      answered(new Error('Query read timeout'));
      void client.end().catch(() => undefined); // it may have ended by itself
    }, maxMs());
  };

  const query: Query = function query(config, values, done) {
    // A cursor reads for as long as its reader does.
    if (typeof (config as { submit?: unknown } | null)?.submit === 'function') {
      return plain.call(this, config, values, done);
    }
    const callback = typeof values === 'function' ? (values as Done) : done;
    const parameters = typeof values === 'function' ? undefined : values;
    if (callback !== undefined) return timed(this, [config, parameters], callback);
    return new Promise((resolve, reject) => {
      timed(this, [config, parameters], (error, result) => {
        if (error) reject(error);
        else resolve(result);
      });
    });
  };

  class TimedClient extends Client {}
  TimedClient.prototype.query = query as unknown as Client['query'];
  return TimedClient;
}
