// `retention` and `retention run`: what is older than the operator keeps it, shown or removed. The permanent job of the
// appliance removes the same; both may run at once.
import { Option, type Command } from 'commander';
import {
  earlierNow,
  retain,
  type RetentionOptions,
  type RetentionRun,
} from '../retention/retain.ts';
import { retentionKinds, type RetentionKind, type RetentionPolicy } from '../retention/policy.ts';
import { keepWhileBackedUp } from '../store/backup-lock.ts';
import { isUuid } from '../store/id.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { withExample } from './options.ts';
import { table } from './output.ts';
import { findTenantOrOnly } from './tenants.ts';

export interface RetentionCommands {
  /** As the operator's file in the data directory says; throws an Error that says what is wrong with it. */
  readonly readPolicy: (tools: Pick<Tools, 'config' | 'dataDir' | 'log'>) => RetentionPolicy;
}

interface Given {
  readonly tenant?: string;
  readonly kind?: RetentionKind;
  readonly dryRun?: boolean;
}

const UNKNOWN_SHOWN_MAX = 10;

export const retentionCommands =
  (d: RetentionCommands): AddCommands =>
  (program, run) => {
    const options = (command: Command): Command =>
      command
        .option('--tenant <tenant>', 'only of this tenant: id or name')
        .addOption(new Option('--kind <kind>', 'only this kind').choices(retentionKinds));
    const show = (isShowing: boolean) =>
      run(async (tools, _given: Given, command: Command) => {
        // What stands behind `run` may be taken for an option of `retention`, which has the same.
        const given = command.optsWithGlobals<Given>();
        const isDry = isShowing || given.dryRun === true;
        const { run: found, unknown } = await carryOut(d, tools, { ...given, isDry });
        for (const id of unknown.slice(0, UNKNOWN_SHOWN_MAX)) {
          tools.out.say(`config/retention.json names the tenant ${id}, which does not exist.`);
        }
        tools.out.result(asValue(found, isDry), () => asText(found, isDry));
      });

    const retention = withExample(
      options(
        program
          .command('retention')
          .description(
            'Show what is older than config/retention.json keeps it, and would be removed',
          )
          .option('--dry-run', 'only look, which is what happens without it, too'),
      ),
      'retention',
      'retention run --kind email_bodies',
    ).action(show(true));
    withExample(
      options(
        retention.command('run').description('Remove it now, and not when the appliance does'),
      ),
      'retention run --tenant acme',
    ).action(show(false));
  };

async function carryOut(
  d: RetentionCommands,
  tools: Tools,
  { tenant, kind, isDry }: Given & { readonly isDry: boolean },
): Promise<{ readonly run: RetentionRun; readonly unknown: readonly string[] }> {
  let policy: RetentionPolicy;
  try {
    policy = d.readPolicy(tools);
  } catch (error) {
    throw new CommandFailed((error as Error).message);
  }
  const store = await tools.store();
  const only = tenant === undefined ? null : await findTenantOrOnly(tools, tenant);
  const { rows } = await store.pool.query<{ id: string }>(
    `select id from unnest($1::uuid[]) as k (id) where id not in (select id from tenant)`,
    [policy.tenants.filter(isUuid)],
  );
  const progress = tools.out.progress(isDry ? 'Looking' : 'Removing', null);
  const options: RetentionOptions = {
    isDry,
    signal: tools.signal,
    tenantId: only?.id ?? null,
    kind: kind ?? null,
    onStep: (count) => progress.at(count),
  };
  try {
    const blobs = keepWhileBackedUp(await tools.blobs(), () => store.pool);
    const done = await retain(
      { store, blobs, log: tools.log, policy: () => policy, now: earlierNow(store.pool) },
      options,
    );
    return { run: done, unknown: rows.map(({ id }) => id) };
  } finally {
    progress.end();
  }
}

const asValue = ({ rows, isCut }: RetentionRun, isDry: boolean) => ({
  object: 'retention',
  dry_run: isDry,
  complete: !isCut,
  data: rows.map((row) => ({
    tenant_id: row.tenantId,
    kind: row.kind,
    before: row.before,
    count: row.count,
    bytes: row.bytes,
    oldest: row.oldest,
    newest: row.newest,
    unsent: row.unsent,
  })),
});

function asText({ rows, isCut }: RetentionRun, isDry: boolean): string {
  const shown = rows.map((row) => [
    row.tenantId,
    row.kind,
    String(row.count),
    inUnits(row.bytes),
    row.oldest,
    row.newest,
    String(row.unsent),
  ]);
  const columns = [
    'tenant',
    'kind',
    isDry ? 'would go' : 'removed',
    'about',
    'oldest',
    'newest',
    'unsent',
  ];
  const body = table(columns, shown, 'Nothing is older than it is to be kept.');
  const end = isDry && rows.length > 0 ? '\nNothing was removed. `retention run` removes it.' : '';
  return `${body}${end}${isCut ? '\nThis was interrupted: there is more.' : ''}`;
}

function inUnits(bytes: number): string {
  const units = ['B', 'KB', 'MB', 'GB', 'TB'];
  let [value, unit] = [bytes, 0];
  while (value >= 1_000 && unit < units.length - 1) [value, unit] = [value / 1_000, unit + 1];
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
}
