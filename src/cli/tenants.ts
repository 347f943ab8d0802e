// `tenant create` and `tenant list`, and how the other commands name a tenant.
import { createTenant, findTenants, listTenants, type TenantRecord } from '../access/tenants.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { fields, moreAfter, table } from './output.ts';
import { pageOptions, withExample, type PageOptions } from './options.ts';

const present = (tenant: TenantRecord) => ({
  object: 'tenant',
  id: tenant.id,
  name: tenant.name,
  created_at: tenant.createdAt,
  is_operator: tenant.isOperator,
});

export const addTenantCommands: AddCommands = (program, run) => {
  const tenant = program
    .command('tenant')
    .description('Tenants: the owners of domains, keys and emails');

  withExample(
    tenant
      .command('create')
      .description('Make a tenant; give it a key with `key create`')
      .argument('<name>', 'up to 100 characters, different from all others'),
    'tenant create "Acme Inc."',
  ).action(
    run(async (tools, name: string) => {
      const made = await createTenant(await tools.store(), name);
      tools.out.result(present(made), () =>
        fields([
          ['id', made.id],
          ['name', made.name],
          ['created', made.createdAt],
        ]),
      );
      if (made.isOperator) {
        tools.out.say("It is the first tenant: its full-access keys are the operator's keys.");
      }
      tools.out.say(`It has no API key yet: key create ${made.id}`);
    }),
  );

  withExample(
    pageOptions(tenant.command('list').description('List tenants, newest first')),
    'tenant list --limit 50',
  ).action(
    run(async (tools, options: PageOptions) => {
      const page = await listTenants(await tools.store(), pageOf(options));
      const data = page.items.map(present);
      tools.out.result({ object: 'list', data, has_more: page.hasMore }, () => {
        const rows = page.items.map((one) => [one.id, one.name, one.isOperator, one.createdAt]);
        return (
          table(['id', 'name', 'operator', 'created'], rows, 'There is no tenant yet.') +
          moreAfter({ hasMore: page.hasMore, lastId: data.at(-1)?.id })
        );
      });
    }),
  );
};

/** The page that `--limit` and `--after` ask for. */
export const pageOf = ({ limit, after }: PageOptions) => ({ limit, after, before: undefined });

/** The tenant of that id or name. Throws CommandFailed where there is none, or several. */
export async function findTenantNamed(tools: Tools, idOrName: string): Promise<TenantRecord> {
  const [found, ...others] = await findTenants(await tools.store(), idOrName);
  if (found === undefined) {
    throw new CommandFailed(
      `There is no tenant "${idOrName}". \`tenant list\` shows their ids and names.`,
    );
  }
  if (others.length > 0) {
    const ids = [found, ...others].map(({ id }) => id).join(', ');
    throw new CommandFailed(`Several tenants are called "${idOrName}"; give the id: ${ids}.`);
  }
  return found;
}

/** The tenant that an option names, else the only one there is. */
export async function findTenantOrOnly(
  tools: Tools,
  named: string | undefined,
): Promise<TenantRecord> {
  if (named !== undefined) return findTenantNamed(tools, named);
  const { items } = await listTenants(await tools.store(), pageOf({ limit: 2 }));
  const [only, another] = items;
  if (only !== undefined && another === undefined) return only;
  throw new CommandFailed(
    only === undefined
      ? 'There is no tenant yet. `tenant create` makes one.'
      : 'There are several tenants: say whose with --tenant <id or name>. `tenant list` shows them.',
  );
}

/** Names by id, for lists over several tenants. */
export async function namesOfTenants(
  tools: Tools,
  ids: readonly string[],
): Promise<ReadonlyMap<string, string>> {
  const store = await tools.store();
  const found = await Promise.all([...new Set(ids)].map((id) => findTenants(store, id)));
  return new Map(found.flat().map(({ id, name }) => [id, name]));
}
