// How a process that a test starts reads our TypeScript: as the test does.
import { fileURLToPath } from 'node:url';

/** Arguments of node. */
export const LOADER: readonly string[] = process.execArgv.some((argument) =>
  argument.endsWith('compiled.ts'),
)
  ? ['--import', fileURLToPath(new URL('./compiled.ts', import.meta.url))]
  : ['--import', 'tsx'];
