// `suppression list` and `suppression remove`: addresses that a tenant does not send to any more.
import { Option } from 'commander';
import { Refusal } from '../access/refusal.ts';
import { createSuppressionVerbs, type SuppressionOrigin } from '../suppressions/suppressions.ts';
import { suppressionOrigins } from '../store/suppression.ts';
import { CommandFailed, type AddCommands } from './command.ts';
import { pageOptions, withExample, type PageOptions } from './options.ts';
import { moreAfter, table } from './output.ts';
import { findTenantOrOnly, pageOf } from './tenants.ts';

interface TenantOption {
  readonly tenant?: string;
}

export const addSuppressionCommands: AddCommands = (program, run) => {
  const suppression = program
    .command('suppression')
    .description('Addresses that a tenant does not send to any more');
  const whose = 'whose: id or name (not needed with a single tenant)';

  withExample(
    pageOptions(
      suppression
        .command('list')
        .description('List suppressed addresses of a tenant, newest first')
        .option('--tenant <tenant>', whose)
        .addOption(
          new Option('--origin <origin>', 'only those with this reason').choices(
            suppressionOrigins,
          ),
        ),
    ),
    'suppression list --tenant acme --origin bounce',
  ).action(
    run(
      async (
        tools,
        options: PageOptions & TenantOption & { readonly origin?: SuppressionOrigin },
      ) => {
        const tenant = await findTenantOrOnly(tools, options.tenant);
        const verbs = createSuppressionVerbs(await tools.store());
        const page = await verbs.list(tenant.id, pageOf(options), options.origin ?? null);
        const data = page.items.map((one) => ({
          object: 'suppression',
          id: one.id,
          tenant_id: tenant.id,
          email: one.address,
          origin: one.origin,
          source_id: one.sourceId,
          created_at: one.createdAt,
        }));
        tools.out.result({ object: 'list', data, has_more: page.hasMore }, () => {
          const rows = data.map((one) => [
            one.id,
            one.email,
            one.origin,
            one.source_id,
            one.created_at,
          ]);
          const columns = ['id', 'address', 'origin', 'email', 'since'];
          const last = { hasMore: page.hasMore, lastId: data.at(-1)?.id };
          return table(columns, rows, 'No address is suppressed.') + moreAfter(last);
        });
      },
    ),
  );

  withExample(
    suppression
      .command('remove')
      .description('Let mail go to an address again')
      .argument('<address-or-id>', 'the address, or the id of its suppression')
      .option('--tenant <tenant>', whose),
    'suppression remove ada@example.com --tenant acme',
  ).action(
    run(async (tools, given: string, options: TenantOption) => {
      const tenant = await findTenantOrOnly(tools, options.tenant);
      const verbs = createSuppressionVerbs(await tools.store());
      const id = await verbs.remove(tenant.id, given).catch((error: unknown) => {
        if (!(error instanceof Refusal) || error.code !== 'not_found') throw error;
        throw new CommandFailed(
          `The tenant ${tenant.name} does not suppress "${given}". \`suppression list\` shows what it does.`,
        );
      });
      tools.out.result(
        { object: 'suppression', id, deleted: true },
        () => `Removed: mail of ${tenant.name} to ${given} is sent again.`,
      );
    }),
  );
};
