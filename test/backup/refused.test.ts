// Files that must not be restored and places that must not be restored into: refused, and nothing has changed. Backups and
// restores that were killed: begun again. An earlier release's file, an upgrade and its rehearsal.
import { spawn, type ChildProcess } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdir, mkdtemp, readdir, readFile, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client, Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { backUp, type BackupOptions } from '../../src/backup/backup.ts';
import { BackupDamaged, BackupFailed } from '../../src/backup/container.ts';
import { rehearseMigrations } from '../../src/backup/rehearse.ts';
import { restore, type RestoreOptions, type RestoreReport } from '../../src/backup/restore.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { keepWhileBackedUp, BACKUP_LOCK } from '../../src/store/backup-lock.ts';
import { newId } from '../../src/store/id.ts';
import { openStore } from '../../src/store/orm.ts';
import { startApp, until, type App } from '../support/app.ts';
import { command } from '../support/command-line.ts';
import { LOADER } from '../support/loader.ts';
import { freshDatabase, migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const BLOB_BYTES = 1_500_000;
const OLDER = '0010-audience';

const test = suite('backups refused, killed, of an earlier release');
let app: App;
let folder: string;
let file: string;
const targets: FreshDatabase[] = [];

test.before(async () => {
  app = await startApp();
  folder = await mkdtemp(join(tmpdir(), 'mailstead-refused-'));
  file = join(folder, 'good');
  await app.send({
    attachments: [{ filename: 'a.bin', content: randomBytes(BLOB_BYTES).toString('base64') }],
  });
  await backUp(await describe(file));
});
test.after(async () => {
  await app.stop();
  await Promise.all(targets.map((one) => one.drop()));
  await rm(folder, { recursive: true, force: true });
});

const blobsOf = (dataDir: string) => openDiskBlobs(join(dataDir, 'blobs'));
const secretOf = async (dataDir: string): Promise<string> =>
  (await readFile(join(dataDir, 'secrets', 'master'), 'utf8')).trim();

async function describe(to: string): Promise<BackupOptions> {
  return {
    file: to,
    databaseUrl: app.databaseUrl,
    blobs: blobsOf(app.dataDir),
    secret: await secretOf(app.dataDir),
    isSecretGenerated: true,
    dataDir: app.dataDir,
  };
}

interface Target {
  readonly url: string;
  readonly dataDir: string;
  restore(from: string, about?: Partial<RestoreOptions>): Promise<RestoreReport>;
  /** Tables, and names in the data directory. */
  contents(): Promise<readonly string[]>;
  ask(sql: string): Promise<Record<string, unknown>[]>;
}

async function newTarget(database?: FreshDatabase): Promise<Target> {
  const made = database ?? (await migratedDatabase());
  targets.push(made);
  const dataDir = await mkdtemp(join(folder, 'target-'));
  const ask = async (sql: string): Promise<Record<string, unknown>[]> => {
    const client = new Client({ connectionString: made.url });
    await client.connect();
    try {
      return (await client.query<Record<string, unknown>>(sql)).rows;
    } finally {
      await client.end();
    }
  };
  return {
    url: made.url,
    dataDir,
    ask,
    restore: (from, about = {}) =>
      restore({
        file: from,
        databaseUrl: made.url,
        blobs: blobsOf(dataDir),
        secret: null,
        dataDir,
        log: silent,
        ...about,
      }),
    async contents() {
      const rows = await ask(`select relname from pg_class
        where relnamespace = 'public'::regnamespace and relkind = 'r'`);
      return [...rows.map((row) => String(row['relname'])), ...(await readdir(dataDir))];
    },
  };
}

async function refusal(work: Promise<unknown>, name = 'it'): Promise<Error> {
  const error = await work.then(
    () => null,
    (thrown: Error) => thrown,
  );
  if (error === null) throw new Error(`${name} was not refused`);
  return error;
}

test('a file that is cut off or damaged anywhere, or is none', async () => {
  const good = await readFile(file);
  assert.is((await stat(file)).mode & 0o777, 0o600);
  const target = await newTarget(await freshDatabase());
  const cases: (readonly [string, Buffer])[] = [
    ['empty', Buffer.alloc(0)],
    ['something else', Buffer.from('not a backup at all, but long enough to be read as one')],
    ...[1, 5, 10, 40, 2_000, good.length - 50].map(
      (cut) => [`cut by ${cut}`, good.subarray(0, good.length - cut)] as const,
    ),
    ...[1, 30, 60, 0.0001, 0.1, 0.5, 0.9].map((at) => {
      const bytes = Buffer.from(good);
      const place = at < 1 ? Math.floor(good.length * at) : good.length - at;
      bytes[place]! ^= 0x10;
      return [`changed at ${place}`, bytes] as const;
    }),
  ];
  const bad = join(folder, 'bad');
  for (const [name, bytes] of cases) {
    await writeFile(bad, bytes);
    const error = await refusal(target.restore(bad), name);
    assert.instance(error, BackupDamaged, `${name}: ${error.message}`);
    assert.match(error.message, /Nothing was changed|is not a backup/, name);
  }
  assert.equal(await target.contents(), []);
  assert.match((await refusal(target.restore(join(folder, 'nothing')))).message, /does not exist/);
});

test('a secret that is not the one, a database that is used, a file that is there', async () => {
  const target = await newTarget();
  const other = await refusal(target.restore(file, { secret: 'x'.repeat(64) }));
  assert.match(other.message, /MAILSTEAD_SECRET is not the secret .*Unset it/s);
  const given = join(folder, 'given');
  await backUp({ ...(await describe(given)), isSecretGenerated: false });
  assert.match((await refusal(target.restore(given))).message, /Set MAILSTEAD_SECRET/);
  assert.not.ok((await readFile(given)).includes(await secretOf(app.dataDir)));
  await target.ask(`insert into tenant (id, name) values ('${newId()}', 'there')`);
  assert.match((await refusal(target.restore(file))).message, /not empty \(tenant has rows\)/);
  await target.ask('delete from tenant');
  const again = await refusal(backUp(await describe(file)));
  assert.instance(again, BackupFailed);
  assert.match(again.message, /exists already/);
  // A link to nowhere cannot be replaced, and must not be taken for a file that was written.
  const link = join(folder, 'link');
  await symlink(join(folder, 'nowhere'), link);
  assert.match((await refusal(backUp(await describe(link)))).message, /exists already/);
});

test('an appliance that starts in the middle of a restore', async () => {
  const target = await newTarget();
  const secrets = join(target.dataDir, 'secrets');
  await mkdir(secrets);
  let generated: Promise<void> | null = null;
  const other = await refusal(
    target.restore(file, {
      onProgress: (step) => {
        if (step === 'blobs') generated ??= writeFile(join(secrets, 'master'), 'f'.repeat(64));
      },
    }),
  );
  assert.match(other.message, /is another secret than that of the backup/);
  assert.equal(await target.ask('select from email'), []);
  await rm(secrets, { recursive: true });
  // What its start left behind before it failed.
  await target.ask(`insert into appliance_fact (name, value) values ('secret_check', 'other')`);
  let asked: Promise<Record<string, unknown>[]> | null = null;
  await target.restore(file, {
    onProgress: (step) => {
      if (step === 'rows') asked ??= target.ask('select id from tenant');
    },
  });
  // It would have made a first tenant, if it had been told that there is none.
  assert.is((await asked!).length, 1);
  assert.equal(await target.ask('select from email').then(({ length }) => length), 1);
  assert.equal(await target.ask(`select from appliance_fact where name = 'secret_check'`), []);
});

test('a schema that is changed in the middle of a backup', async () => {
  const holder = new Client({ connectionString: app.databaseUrl });
  await holder.connect();
  try {
    await holder.query('begin; lock table timeline in access exclusive mode');
    const backup = refusal(describe(join(folder, 'migrated')).then(backUp));
    await untilWaits(app.databaseUrl);
    await holder.query(`insert into migration (name) values ('9999-later'); commit`);
    assert.match((await backup).message, /migrated in the middle/);
    await holder.query(`delete from migration where name = '9999-later'`);
  } finally {
    await holder.end();
  }
});

/** For a copy that waits for a lock; asked on a connection of its own, since a transaction sees who was there at first. */
async function untilWaits(url: string): Promise<void> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    await until(
      () =>
        client.query(`select pid from pg_stat_activity where datname = current_database()
          and application_name = 'mailstead backup' and wait_event_type = 'Lock'`),
      ({ rowCount }) => rowCount === 1,
    );
  } finally {
    await client.end();
  }
}

test('no blob is removed while a backup is taken, and one backup at a time', async () => {
  const pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
  const holder = new Client({ connectionString: app.databaseUrl });
  await holder.connect();
  try {
    const blobs = keepWhileBackedUp(blobsOf(app.dataDir), () => pool);
    const key = newId();
    await blobs.put(key, Buffer.from('bytes'));
    await holder.query('select pg_advisory_lock($1)', [BACKUP_LOCK]);
    await blobs.remove(key);
    assert.ok(await blobs.get(key));
    const second = await refusal(backUp(await describe(join(folder, 'second'))));
    assert.match(second.message, /Another backup/);
    await holder.query('select pg_advisory_unlock($1)', [BACKUP_LOCK]);
    await blobs.remove(key);
    assert.is(await blobs.get(key), null);
  } finally {
    await holder.end();
    await pool.end();
  }
});

/** What the room does, in a process that can be killed and whose files can end early: what a command does, and less to load. */
function inProcess(
  code: string,
  about: { readonly given: unknown; readonly blobsDir: string; readonly shell?: string },
): ChildProcess {
  const from = (path: string): string => JSON.stringify(import.meta.resolve(`../../src/${path}`));
  const program = `
    import { openDiskBlobs } from ${from('store/blob.ts')};
    const given = { ...JSON.parse(process.env.GIVEN), blobs: openDiskBlobs(process.env.BLOBS) };
    ${code.replace(/import\('(.+?)'\)/g, (_, path: string) => `import(${from(path)})`)}`;
  const line = [process.execPath, ...LOADER, '--input-type=module', '-e', program];
  return spawn('/bin/sh', ['-c', `${about.shell ?? ''} exec "$@"`, 'sh', ...line], {
    env: {
      PATH: process.env['PATH'],
      HOME: process.env['HOME'],
      NODE_COMPILE_CACHE: process.env['NODE_COMPILE_CACHE'],
      GIVEN: JSON.stringify(about.given),
      BLOBS: about.blobsDir,
    },
    stdio: ['pipe', 'pipe', 'inherit'],
  });
}

const isThere = (path: string): Promise<boolean> =>
  stat(path).then(
    () => true,
    () => false,
  );

test('a disk that is full leaves no file; a backup that was killed is taken again', async () => {
  const full = join(folder, 'full');
  const killed = join(folder, 'killed');
  const child = inProcess(
    `const { backUp } = await import('backup/backup.ts');
     await backUp(given).catch((error) => console.log(error.message));
     process.stdin.once('data', () => void backUp({ ...given, file: ${JSON.stringify(killed)} }));`,
    {
      given: await describe(full),
      blobsDir: join(app.dataDir, 'blobs'),
      shell: `trap '' XFSZ; ulimit -f 2048;`, // files end at 1 MiB
    },
  );
  const [said] = (await once(child.stdout!, 'data')) as [Buffer];
  assert.match(said.toString(), /cannot be written/);
  assert.equal(
    (await readdir(folder)).filter((name) => name.startsWith('full')),
    [],
  );

  const holder = new Client({ connectionString: app.databaseUrl });
  await holder.connect();
  try {
    // Its copy waits for this, in the middle of the file.
    await holder.query('begin; lock table email in access exclusive mode');
    child.stdin!.write('on\n');
    await untilWaits(app.databaseUrl);
    assert.ok(await isThere(`${killed}.part`));
    child.kill('SIGKILL');
    await once(child, 'exit');
  } finally {
    await holder.end();
  }
  assert.not.ok(await isThere(killed));
  // The killed one's connection may still hold its lock for a moment.
  await until(
    async () => {
      await backUp(await describe(killed)).catch((error: Error) => {
        if (!error.message.startsWith('Another backup')) throw error;
      });
      return isThere(killed);
    },
    (there) => there,
  );
  assert.not.ok(await isThere(`${killed}.part`));
});

test('a restore that was killed in the middle of the rows is begun again', async () => {
  const target = await newTarget();
  const holder = new Client({ connectionString: target.url });
  await holder.connect();
  try {
    await holder.query('begin; lock table timeline in exclusive mode');
    const child = inProcess(
      `const { restore } = await import('backup/restore.ts');
       const { createLogger } = await import('log.ts');
       await restore({ ...given, log: createLogger({ level: 'silent', name: 'test' }) });`,
      {
        given: { file, databaseUrl: target.url, secret: null, dataDir: target.dataDir },
        blobsDir: join(target.dataDir, 'blobs'),
      },
    );
    await untilWaits(target.url);
    child.kill('SIGKILL');
    await once(child, 'exit');
  } finally {
    await holder.end();
  }
  await until(
    () => target.ask(`select from pg_stat_activity where application_name = 'mailstead backup'`),
    ({ length }) => length === 0, // the killed one's transaction ends in a moment
  );
  assert.equal(await target.ask('select from email'), []);
  // Paused, as long as the original may still run.
  const { code, err } = await command(
    { MAILSTEAD_DATABASE_URL: target.url, MAILSTEAD_DATA_DIR: target.dataDir },
    ['restore', '--paused', file],
  );
  assert.is(code, 0, err);
  assert.is((await target.ask('select from email')).length, 1);
  assert.ok((await readdir(join(target.dataDir, 'blobs'))).length > 0);
  assert.equal(await target.ask('select kind, name from pause'), [{ kind: 'all', name: '' }]);
});

/** A database as the release before left it, with a row of each kind that later migrations touch. */
async function olderDatabase(): Promise<Target> {
  const target = await newTarget(await freshDatabase());
  const store = await openStore({
    url: target.url,
    log: silent,
    connectionsMax: 2,
    migrate: true,
    migrateTo: OLDER,
  });
  await store.close();
  const [tenant, email, domain] = [newId(), newId(), newId()];
  await target.ask(`
    insert into tenant (id, name) values ('${tenant}', 'first');
    insert into sending_domain (tenant_id, id, name, status, region, return_path_label, created_at)
      values ('${tenant}', '${domain}', 'old.test', 'verified', 'us-east-1', 'send', now());
    insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given, subject, last_event, recipient_count)
      values ('${tenant}', '${email}', now(), '<old@old.test>', 'a@old.test', 'old.test', '["b@there.test"]', 'Old\ttabs\\and\nlines', 'delivered', 1);
    insert into email_content (tenant_id, email_id, raw, raw_size_bytes, needs_smtp_utf8) values ('${tenant}', '${email}', '\\x00ff0a09', 4, false);
    insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at)
      values ('${tenant}', '${email}', 0, 'b@there.test', 'mx:there.test', 'deferred', now(), now() + interval '1 day')`);
  return target;
}

const OLD_ROWS = `select e.subject, encode(c.raw, 'hex') as raw, d.state, s.status
  from email e join email_content c on c.email_id = e.id join delivery d on d.email_id = e.id
  join sending_domain s on s.tenant_id = e.tenant_id`;
const EXPECTED = [
  { subject: 'Old\ttabs\\and\nlines', raw: '00ff0a09', state: 'deferred', status: 'verified' },
];

test('an upgrade is rehearsed on a copy, and runs; a file of the release before is restored', async () => {
  const old = await olderDatabase();
  const oldFile = join(folder, 'old');
  const dataDir = old.dataDir;
  await backUp({
    file: oldFile,
    databaseUrl: old.url,
    blobs: blobsOf(dataDir),
    secret: 's'.repeat(64),
    isSecretGenerated: false,
    dataDir,
  });
  const quiet = await rehearseMigrations({ databaseUrl: old.url, log: silent });
  assert.equal(quiet.differences, []);
  assert.is(quiet.copiedBy, 'database');
  assert.ok(quiet.migrations.length > 0);
  const user = new Client({ connectionString: old.url });
  await user.connect();
  const busy = await rehearseMigrations({ databaseUrl: old.url, log: silent });
  await user.end();
  assert.is(busy.copiedBy, 'rows');
  assert.is(busy.rows, 5);
  assert.equal(busy.differences, []);
  const migrated = 'select name from migration order by id desc limit 1';
  assert.equal(await old.ask(migrated), [{ name: OLDER }], 'the real one was changed');
  assert.equal(
    await old.ask(`select from pg_database where datname like 'mailstead%rehearsal%'`),
    [],
  );

  const warned: string[] = [];
  const store = await openStore({
    url: old.url,
    log: {
      ...silent,
      info: () => undefined,
      debug: () => undefined,
      warn: (about: unknown, text: string) => warned.push(text),
    } as never,
    connectionsMax: 2,
    migrate: true,
  });
  await store.close();
  assert.match(warned.join(), /restore a backup made before/);
  assert.equal(await old.ask(OLD_ROWS), EXPECTED);

  const target = await newTarget(await freshDatabase());
  const report = await target.restore(oldFile, { secret: 's'.repeat(64) });
  assert.equal(
    report.migrated,
    quiet.migrations.map(({ name }) => name),
  );
  assert.equal(await target.ask(OLD_ROWS), EXPECTED);
});

test.run();
