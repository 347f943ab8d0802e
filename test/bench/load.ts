// Drives the load generator (load-process.ts), one order at a time.
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { BenchFailed, endChild, type Cleanup } from './children.ts';
import type { Load, Order } from './load-process.ts';

export type { Load };

export interface Generator {
  /** Throws BenchFailed when an answer was not a 200 or `maxMs` are over. */
  send(order: Order, maxMs: number): Promise<Load>;
  stop(): Promise<void>;
}

type Answer = { readonly load: Load } | { readonly failed: string };

export function startGenerator(cleanup: Cleanup): Generator {
  const child = fork(join(import.meta.dirname, 'load-process.ts'), [], { execArgv: [] });
  const { stop } = cleanup.add(() => endChild(child));
  return {
    stop,
    async send(order, maxMs) {
      child.send(order);
      const timer = setTimeout(() => child.kill('SIGKILL'), maxMs);
      const answer = await Promise.race([
        once(child, 'message').then(([message]) => message as Answer),
        once(child, 'exit').then((): Answer => ({ failed: `no end within ${maxMs} ms` })),
      ]);
      clearTimeout(timer);
      if ('failed' in answer) throw new BenchFailed(`load generator: ${answer.failed}`);
      const { load } = answer;
      if (load.refused > 0) {
        throw new BenchFailed(`${load.refused} requests were refused: ${load.firstRefusal}`);
      }
      return load;
    },
  };
}
