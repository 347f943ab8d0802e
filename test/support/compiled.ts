// Loads our TypeScript from what `tsc` made of it before the tests began (test/run.ts), under the names of the sources:
// several times cheaper than translating it anew in each of hundreds of processes. A file that has changed since is translated by
// tsx as ever.
import { readFileSync, statSync } from 'node:fs';
import { registerHooks } from 'node:module';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

const root = join(import.meta.dirname, '../..');
const SOURCES = ['src/', 'test/'].map((folder) => pathToFileURL(join(root, folder)).href);
const BUILT = join(root, 'dist-test');

const isOurs = (url: string | undefined): boolean =>
  url !== undefined && SOURCES.some((source) => url.startsWith(source));

registerHooks({
  resolve(specifier, context, next) {
    // What tsc writes names the compiled files.
    const isRelative = specifier.startsWith('.') && specifier.endsWith('.js');
    return isRelative && isOurs(context.parentURL)
      ? next(`${specifier.slice(0, -3)}.ts`, context)
      : next(specifier, context);
  },
  load(url, context, next) {
    if (!isOurs(url) || !url.endsWith('.ts')) return next(url, context);
    const source = builtOf(fileURLToPath(url));
    return source === null ? next(url, context) : { format: 'module', source, shortCircuit: true };
  },
});

function builtOf(file: string): string | null {
  const built = join(BUILT, `${file.slice(root.length, -3)}.js`);
  try {
    return statSync(built).mtimeMs >= statSync(file).mtimeMs ? readFileSync(built, 'utf8') : null;
  } catch {
    return null;
  }
}
