/**
 * Writes the table of settings down for people: docs/config.md and config/mailstead.example.env; and that of metrics,
 * docs/metrics.md.
 *
 * In: the tables of src/config.ts and src/telemetry. Out: the texts; run with `--write` (npm run generate does), the files.
 */
import { mkdirSync, realpathSync, writeFileSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import { ROWS } from './config.ts';
import { defaultIn, describe } from './setting-row.ts';
import type { Mode, Setting } from './setting-row.ts';
import { renderMetricsPage } from './telemetry/reference.ts';

const GENERATED_BY = 'Generated from src/config.ts by npm run generate';

/** The reference page and the example file, as path from the root of the repository and content. */
export function renderGeneratedFiles(): readonly {
  readonly path: string;
  readonly text: string;
}[] {
  return [
    { path: 'docs/config.md', text: renderReference() },
    { path: 'config/mailstead.example.env', text: renderExample() },
    {
      path: 'docs/metrics.md',
      text: renderMetricsPage('Generated from src/telemetry/instruments.ts by npm run generate'),
    },
  ];
}

function defaultCell(setting: Setting<unknown>, mode: Mode): string {
  if (setting.required && mode === 'production') return 'required';
  const fallback = defaultIn(setting, mode);
  return fallback === null ? (setting.absent ?? 'absent') : `\`${fallback}\``;
}

function meaningOf(setting: Setting<unknown>): string {
  const note = setting.notYet === true ? '**Not in this release.** ' : '';
  const allowed = describe(setting);
  return `${note}${setting.meaning} Allowed: ${allowed}.`;
}

function renderReference(): string {
  const rows = [
    ['Setting', 'Default in development', 'Default in production', 'Meaning'],
    ...ROWS.map(([, setting]) => [
      `\`${setting.name}\``,
      defaultCell(setting, 'development'),
      defaultCell(setting, 'production'),
      meaningOf(setting),
    ]),
  ];
  // Prettier pads every column, so the generator does too.
  const widths = [0, 1, 2, 3].map((column) =>
    Math.max(...rows.map((row) => (row[column] ?? '').length)),
  );
  const lines = rows.map(
    (row) => `| ${row.map((cell, column) => cell.padEnd(widths[column] ?? 0)).join(' | ')} |`,
  );
  lines.splice(1, 0, `| ${widths.map((width) => '-'.repeat(width)).join(' | ')} |`);
  return `<!-- ${GENERATED_BY}. -->

# Settings

Every setting is an environment variable. An empty one counts as absent. Any of them can be read from a
file instead (Docker secrets): \`MAILSTEAD_SECRET_FILE=/run/secrets/mailstead\` holds the value of
\`MAILSTEAD_SECRET\`; one line break at the end of the file is dropped.

Unknown \`MAILSTEAD_*\` names, bad values, missing required ones and settings that are not in this release
stop the start, with all problems listed. \`config/mailstead.example.env\` has every setting to copy from.

${lines.join('\n')}
`;
}

function renderExample(): string {
  const rows = ROWS.map(([, setting]) => {
    const development = defaultCell(setting, 'development');
    const production = defaultCell(setting, 'production');
    const elsewhere = development === production ? '' : `, in development ${development}`;
    const fallback = setting.required
      ? `Required${elsewhere}`
      : `Default: ${production}${elsewhere}`;
    const value = setting.example ?? defaultIn(setting, 'production') ?? '';
    const comment = `${meaningOf(setting)} ${fallback}.`.replace(/[`*]/g, '');
    return `${wrap(comment)}\n#${setting.name}=${value}\n`;
  });
  return `# ${GENERATED_BY}\n#\n${wrap(
    'Every setting, with its default in production or an example. Remove the # in front of a line to set it. docs/config.md is the same as a table.',
  )}\n\n${rows.join('\n')}`;
}

/** Comment lines of at most 100 characters, as far as words allow. */
function wrap(sentences: string): string {
  return sentences.replace(/(?=\S)(.{1,98})(?:\s+|$)/g, '# $1\n').trimEnd();
}

if (
  process.argv[2] === '--write' &&
  realpathSync(process.argv[1] ?? '.') === import.meta.filename
) {
  for (const { path, text } of renderGeneratedFiles()) {
    const target = resolve(import.meta.dirname, '..', path);
    mkdirSync(dirname(target), { recursive: true });
    writeFileSync(target, text);
  }
}
