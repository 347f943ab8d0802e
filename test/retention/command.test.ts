// Retention as an operator has it beside an appliance that runs: the file in the data directory, the command, and what
// the API says of mail that is gone.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { firstIdAt } from '../../src/access/request-log.ts';
import { startApp, type App } from '../support/app.ts';
import { command, commandJson } from '../support/command-line.ts';
import { DAY_MS } from '../support/retention.ts';
import { onDatabase } from '../support/second-tenant.ts';

interface Answer {
  readonly dry_run: boolean;
  readonly data: readonly {
    readonly kind: string;
    readonly count: number;
    readonly unsent: number;
  }[];
}

const test = suite<{ app: App; settings: Record<string, string> }>('retention command');
test.before(async (context) => {
  context.app = await startApp();
  const { databaseUrl, dataDir } = context.app;
  context.settings = { MAILSTEAD_DATABASE_URL: databaseUrl, MAILSTEAD_DATA_DIR: dataDir };
});
test.after(({ app }) => app.stop());

const shown = ({ data }: Answer) =>
  data.map(({ kind, count, unsent }) => ({ kind, count, unsent }));

test('it shows what would go, removes one kind, then the rest; the API follows', async ({
  app,
  settings,
}) => {
  const keep = (file: unknown): void => {
    mkdirSync(join(app.dataDir, 'config'), { recursive: true });
    writeFileSync(join(app.dataDir, 'config', 'retention.json'), JSON.stringify(file));
  };
  const sent = await app.call('POST', '/emails', {
    body: { from: 'a@mailstead.test', to: 'ok@b.test', subject: 's', html: '<p>h</p>' },
  });
  const before = (sent.body as { id: string }).id;
  const until = async (): Promise<void> => {
    for (let tries = 0; tries < 200; tries += 1) {
      const { body } = await app.call('GET', `/emails/${before}`);
      if ((body as { last_event: string }).last_event === 'delivered') return;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    throw new Error('it is not delivered');
  };
  await until();
  // As if it had been sent long ago.
  const ms = Date.now() - 100 * DAY_MS;
  const id = firstIdAt(ms);
  await onDatabase(app, async (pool) => {
    for (const [table, column] of [
      ['email', 'id'],
      ...['email_content', 'delivery', 'attempt', 'timeline', 'email_search'].map((name) => [
        name,
        'email_id',
      ]),
    ]) {
      await pool.query(`update ${table} set ${column} = $2 where ${column} = $1`, [before, id]);
    }
    await pool.query(
      `update email set created_at = $2, provider_last_attempted_at = $2 where id = $1`,
      [id, new Date(ms)],
    );
  });

  keep({ default: { emails: '5d' } });
  const refused = await command(settings, ['retention']);
  assert.is(refused.code, 1);
  assert.match(refused.err, /retention\.json: default\.emails: must be at least 11d/);

  keep({ default: { emails: '30d', email_bodies: '1d' } });
  const dry = await commandJson<Answer>(settings, ['retention']);
  assert.ok(dry.dry_run);
  assert.equal(shown(dry), [
    { kind: 'email_bodies', count: 1, unsent: 0 },
    { kind: 'emails', count: 1, unsent: 0 },
  ]);
  const bodies = await commandJson<Answer>(settings, [
    'retention',
    'run',
    '--kind',
    'email_bodies',
  ]);
  assert.equal(shown(bodies), [{ kind: 'email_bodies', count: 1, unsent: 0 }]);
  const found = (await app.call('GET', `/emails/${id}`)).body;
  assert.equal([found['html'], found['text'], found['last_event']], [null, null, 'delivered']);
  assert.ok(Date.parse(String(found['content_removed_at'])) > Date.now() - 60_000);
  const files = await app.call('GET', `/emails/${id}/attachments`);
  assert.equal([files.status, (files.body as { data: unknown[] }).data], [200, []]);
  const released = await app.call('POST', `/emails/${id}/release`, { body: {} });
  assert.is(released.status, 422);
  assert.match((released.body as { message: string }).message, /was removed on .* as old as/);

  const text = await command(settings, ['retention', 'run']);
  assert.is(text.code, 0);
  assert.match(text.out, /emails +1 .* 0\n/);
  assert.is((await app.call('GET', `/emails/${id}`)).status, 404);
  assert.is((await app.call('GET', `/emails/${id}/timeline`)).status, 404);
  assert.is((await app.call('POST', `/emails/${id}/release`, { body: {} })).status, 404);
  const page = (await app.call('GET', '/emails')).body as { data: { id: string }[] };
  assert.not(page.data.some((one) => one.id === id));
  const nothing = await command(settings, ['retention']);
  assert.match(nothing.out, /^Nothing is older than it is to be kept\./);
});

test.run();
