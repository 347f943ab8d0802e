// The shape of the tree, held by a test: which room may import which, which package belongs where, and
// the habits that no compiler checks. Reads files, runs nothing of ours.
//
// A rule that looked at nothing fails: every test below counts what it looked at. A failing line is a
// sentence with a file in it. support/floor-plan.ts is the architecture (docs/architecture.md says why); when building
// shows a better one, change the table and say so there, do not work round it.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative, sep } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { MAY_IMPORT, PACKAGE_HOME } from './support/floor-plan.ts';

const NAMES_WITHOUT_MEANING = new Set(
  (
    'util utils helper helpers common shared lib core misc service services manager managers handler ' +
    'handlers type types interface interfaces constant constants index'
  ).split(' '),
);
const LINES_MAX = 500;
/** Rooms with a build of their own; they talk to the API only. */
const OWN_BUILD = ['dashboard'];
const GENERATED = 'http/routes.gen.ts';
/** What config.ts is made of: its table reads these, and they read nothing of ours but each other. */
const SETTING_FILES = ['setting-kinds.ts', 'setting-row.ts'];

interface SourceFile {
  /** Under src or test, with forward slashes. */
  readonly path: string;
  /** From the root of the tree. */
  readonly name: string;
  readonly text: string;
  /** Without comments. */
  readonly code: string;
  readonly imports: readonly Import[];
}

interface Import {
  /** A path under src for a file of ours, else the package. */
  readonly target: string;
  readonly isOurs: boolean;
  readonly isTypeOnly: boolean;
}

const root = join(import.meta.dirname, '..');
const sources = readTree('src').filter(({ path }) => path !== GENERATED);
const tests = readTree('test');

function readTree(folder: string): readonly SourceFile[] {
  const base = join(root, folder);
  return readdirSync(base, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith('.ts'))
    .map((entry) => relative(base, join(entry.parentPath, entry.name)).replaceAll(sep, '/'))
    .filter((path) => !OWN_BUILD.includes(roomOf(path)))
    .map((path) => {
      const text = readFileSync(join(base, path), 'utf8');
      const code = text.replace(/\/\*[\s\S]*?\*\/|(?<=^|\s)\/\/.*$/gm, '');
      return { path, name: `${folder}/${path}`, text, code, imports: readImports(path, code) };
    });
}

// `import type` counts as a type; with verbatimModuleSyntax, `import { type X }` still loads the file.
function readImports(path: string, code: string): readonly Import[] {
  const found = [
    ...code.matchAll(/^(?:import|export)\s+(type\s)?(?:[^'";]*?\sfrom\s+)?'([^']+)'/gm),
    ...code.matchAll(/\bimport\((type\s)?\s*'([^']+)'\s*[,)]/g),
  ];
  return found.map(([, type, specifier = '']) => {
    const isOurs = specifier.startsWith('.');
    return {
      target: isOurs ? join(dirname(path), specifier).replaceAll(sep, '/') : specifier,
      isOurs,
      isTypeOnly: type !== undefined,
    };
  });
}

/** The first folder of a path under src; empty for the files of the composition root. */
function roomOf(path: string): string {
  return path.includes('/') ? (path.split('/')[0] ?? '') : '';
}

function importsOf(
  files: readonly SourceFile[],
): readonly (Import & { readonly file: SourceFile })[] {
  return files.flatMap((file) => file.imports.map((one) => ({ ...one, file })));
}

/** Fails with every complaint on its own line, and when there was nothing to look at. */
function expectNone(complaints: readonly string[], lookedAt: number): void {
  assert.ok(lookedAt > 0, 'this rule looked at nothing');
  assert.ok(complaints.length === 0, `\n    ${complaints.join('\n    ')}`);
}

const rooms = Object.keys(MAY_IMPORT);
/** What counts and traces may be called from every room. */
const EVERYWHERE = 'telemetry';
const tidy = suite('tidy');

tidy('the table is a line, not a web: a row lists rows above it only', () => {
  const bad = rooms.flatMap((room, index) =>
    (MAY_IMPORT[room] ?? [])
      .filter((other) => !rooms.slice(0, index).includes(other))
      .map((other) => `${room} lists ${other}, which does not stand above it`),
  );
  expectNone(bad, rooms.length);
});

tidy('every folder of src is a row of the table, and flat', () => {
  const folders = [...new Set(sources.map(({ path }) => dirname(path)))].filter(
    (folder) => folder !== '.' && folder !== 'store/migrations',
  );
  const bad = folders.filter((folder) => !rooms.includes(folder));
  expectNone(
    bad.map((folder) => `src/${folder} is not in the table`),
    folders.length,
  );
});

tidy('every import between rooms is one the table allows', () => {
  const crossing = importsOf(sources).filter(
    ({ file, isOurs, target }) => isOurs && roomOf(file.path) !== '' && roomOf(target) !== '',
  );
  const bad = crossing.filter(({ file, target }) => {
    const [from, to] = [roomOf(file.path), roomOf(target)];
    return from !== to && to !== EVERYWHERE && !MAY_IMPORT[from]?.includes(to);
  });
  expectNone(
    bad.map(({ file, target }) => `src/${file.path} imports ${target}`),
    crossing.length,
  );
});

tidy('the composition root is imported by nobody, config.ts only by the root', () => {
  const upward = importsOf(sources).filter(({ isOurs, target }) => isOurs && roomOf(target) === '');
  const bad = upward.filter(({ file, target, isTypeOnly }) => {
    if (roomOf(file.path) === '') return false;
    return !isTypeOnly || !['config.ts', 'log.ts'].includes(target);
  });
  const leaves = importsOf(
    sources.filter(({ path }) => ['config.ts', 'log.ts', ...SETTING_FILES].includes(path)),
  ).filter(
    ({ file, isOurs, target }) =>
      isOurs && !(file.path !== 'log.ts' && SETTING_FILES.includes(target)),
  );
  expectNone(
    [
      ...bad.map(({ file, target }) => `src/${file.path} imports ${target}`),
      ...leaves.map(
        ({ file, target }) => `src/${file.path} imports ${target}; it must stand alone`,
      ),
    ],
    upward.length,
  );
});

tidy('no value imports go round in a circle', () => {
  const next = new Map(
    sources.map(({ path, imports }) => [
      path,
      imports.filter(({ isOurs, isTypeOnly }) => isOurs && !isTypeOnly).map((one) => one.target),
    ]),
  );
  const done = new Set<string>();
  const circles: string[] = [];
  const visit = (path: string, trail: readonly string[]): void => {
    if (trail.includes(path)) {
      circles.push([...trail.slice(trail.indexOf(path)), path].join(' -> '));
      return;
    }
    if (done.has(path)) return;
    for (const target of next.get(path) ?? []) visit(target, [...trail, path]);
    done.add(path);
  };
  for (const path of next.keys()) visit(path, []);
  expectNone(circles, [...next.values()].flat().length);
});

tidy('http sees tables as types only', () => {
  const seen = importsOf(sources).filter(
    ({ file, target }) => roomOf(file.path) === 'http' && target.startsWith('store/'),
  );
  const bad = seen.filter(({ isTypeOnly }) => !isTypeOnly);
  expectNone(
    bad.map(({ file, target }) => `src/${file.path} imports ${target} as a value`),
    sources.filter(({ path }) => roomOf(path) === 'http').length,
  );
});

tidy('packages stay in their rooms', () => {
  const foreign = importsOf(sources).filter(({ isOurs }) => !isOurs);
  const bad = foreign.filter(({ file, target }) => {
    const home = Object.entries(PACKAGE_HOME).find(([name]) =>
      name.endsWith('/')
        ? target.startsWith(name)
        : target === name || target.startsWith(`${name}/`),
    )?.[1];
    return (
      home !== undefined && !home.some((place) => [file.path, roomOf(file.path)].includes(place))
    );
  });
  expectNone(
    bad.map(({ file, target }) => `src/${file.path} imports ${target}`),
    foreign.length,
  );
});

tidy('only config.ts reads the environment', () => {
  const bad = sources.filter(
    ({ path, code }) => path !== 'config.ts' && /\bprocess\s*(\?\.|\.)\s*env\b/.test(code),
  );
  expectNone(
    bad.map(({ path }) => `src/${path} reads process.env`),
    sources.length,
  );
});

tidy('only queue/ changes a delivery', () => {
  const writes =
    /\b(update|insert\s+into|delete\s+from)\s+(only\s+)?"?delivery"?(?![\w"])|\.native(Update|Delete)\(\s*Delivery\b/i;
  const writers = sources.filter(
    ({ path, code }) => !path.startsWith('store/migrations/') && writes.test(code),
  );
  const bad = writers.filter(({ path }) => roomOf(path) !== 'queue');
  expectNone(
    bad.map(({ path }) => `src/${path} writes the delivery table`),
    writers.length,
  );
});

// What hangs on a domain or a route is told in the same transaction by whoever ends it: no trigger sees it.
tidy('stored domains and routes are changed in one place each', () => {
  const literals = sources
    .filter(({ path }) => !path.startsWith('store/migrations/'))
    .flatMap(({ path, code }) =>
      [...code.matchAll(/`[^`]*`|'[^'\n]*'/g)].map(([text]) => ({ path, text })),
    );
  const find = (statement: RegExp) => literals.filter(({ text }) => statement.test(text));
  const updates = find(/\bupdate\s+(only\s+)?"?sending_domain\b/i);
  const inserts = find(/\b(insert|merge)\s+into\s+"?sending_domain\b/i);
  const deletes = find(/\bdelete\s+from\s+(only\s+)?"?sending_domain\b/i);
  const routeDeletes = find(/\bdelete\s+from\s+(only\s+)?"?receiving_route\b/i);
  const mapped = sources.filter(({ code }) =>
    /\.(native(Update|Delete)|upsert(Many)?|assign|remove)\(\s*(SendingDomain|ReceivingRoute)\b/.test(
      code,
    ),
  );
  const telling = updates.filter(({ text }) => text.includes('${to.set}'));
  const bad = [
    ...updates
      .filter(({ path }) => path !== 'domains/changes.ts')
      .map(({ path }) => `src/${path} changes a domain`),
    ...updates
      .filter(({ text }) => !text.includes('${to.set}') && /\breceiving/.test(text))
      .map(({ path }) => `src/${path} changes what a domain receives, and tells nobody`),
    ...inserts
      .filter(({ path, text }) => path !== 'domains/create.ts' || /on\s+conflict|merge/i.test(text))
      .map(({ path }) => `src/${path} writes a domain that may be there`),
    ...[...deletes.slice(1), ...deletes.filter(({ path }) => path !== 'domains/changes.ts')].map(
      ({ path }) => `src/${path} deletes a domain`,
    ),
    ...[
      ...routeDeletes.slice(1),
      ...routeDeletes.filter(({ path }) => path !== 'receiving/routes.ts'),
    ].map(({ path }) => `src/${path} deletes a route`),
    ...mapped.map(({ path }) => `src/${path} changes a domain or a route by its entity`),
  ];
  assert.equal([telling.length, inserts.length, deletes.length, routeDeletes.length], [1, 1, 1, 1]);
  expectNone(bad, updates.length);
});

tidy('no file or folder has a name without meaning', () => {
  const all = [...sources, ...tests];
  const bad = all.filter(({ path }) =>
    path.split('/').some((part) => NAMES_WITHOUT_MEANING.has(part.replace(/\..*$/, ''))),
  );
  expectNone(
    bad.map(({ name }) => name),
    all.length,
  );
});

tidy(`no file is longer than ${LINES_MAX} lines`, () => {
  const all = [...sources, ...tests].map(({ name, text }) => ({
    name,
    lines: text.split('\n').length - 1,
  }));
  const bad = all.filter(({ lines }) => lines > LINES_MAX);
  expectNone(
    bad.map(({ name, lines }) => `${name} has ${lines} lines`),
    all.length,
  );
});

tidy('nothing is left for later, and no test is switched on alone', () => {
  const markers = new RegExp(
    ['TO', 'FIX'].map((start) => `\\b${start}DO\\b|\\b${start}ME\\b`).join('|'),
  );
  const all = [...sources, ...tests];
  const bad = all.flatMap(({ path, name, text, code }) => [
    ...(markers.test(text) ? [`${name} has a marker of unfinished work`] : []),
    ...(path.endsWith('.test.ts') && /^\w+\.only\(/m.test(code) ? [`${name} uses .only()`] : []),
  ]);
  expectNone(bad, all.length);
});

tidy('every test file runs its tests', () => {
  const files = tests.filter(({ path }) => path.endsWith('.test.ts'));
  const bad = files.filter(({ code }) => !/\.run\(\);/.test(code));
  expectNone(
    bad.map(({ path }) => `test/${path} never calls .run()`),
    files.length,
  );
});

tidy('every folder is in docs/architecture.md, every cited RFC in docs/rfcs.md', () => {
  const folders = new Set(sources.map(({ path }) => roomOf(path)).filter((room) => room !== ''));
  const cited = new Set(
    sources.flatMap(({ text }) => [...text.matchAll(/\bRFC[ -]?(\d{3,5})\b/g)].map(([, n]) => n)),
  );
  const plan = readDocument('docs/architecture.md');
  const rfcs = readDocument('docs/rfcs.md');
  expectNone(
    [
      ...[...folders]
        .filter((folder) => plan !== null && !plan.includes(`${folder}/`))
        .map((folder) => `${folder}/ is not in docs/architecture.md`),
      ...[...cited]
        .filter((rfc) => rfcs !== null && !new RegExp(`\\b${rfc}\\b`).test(rfcs))
        .map((rfc) => `RFC ${rfc} is not in docs/rfcs.md`),
    ],
    folders.size,
  );
});

tidy('no description in docs/openapi.json ends in the middle: JSDoc takes an @ for a tag', () => {
  const text = readDocument('docs/openapi.json');
  if (text === null) return;
  const descriptions: string[] = [];
  JSON.parse(text, (key, value: unknown) => {
    if (key === 'description' && typeof value === 'string') descriptions.push(value.trim());
    return value;
  });
  const cut = descriptions.filter((words) => /\b(?:the|a|an|of|before|to)$/.test(words));
  expectNone(cut, descriptions.length);
});

function readDocument(path: string): string | null {
  const file = join(root, path);
  return existsSync(file) ? readFileSync(file, 'utf8') : null;
}

tidy.run();
