// `key create`, `key list` and `key revoke`: API keys of any tenant.
import { Option } from 'commander';
import { createApiKeyVerbs, findKey, listKeys, type ApiKeyRecord } from '../access/api-keys.ts';
import type { Permission } from '../access/keys.ts';
import { readNamed } from '../domains/rows.ts';
import { isUuid } from '../store/id.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { operatorFor } from './domains.ts';
import { pageOptions, withExample, type PageOptions } from './options.ts';
import { fields, moreAfter, table } from './output.ts';
import { findTenantNamed, namesOfTenants, pageOf } from './tenants.ts';

const present = (key: ApiKeyRecord) => ({
  object: 'api_key',
  id: key.id,
  tenant_id: key.tenantId,
  name: key.name,
  prefix: key.prefix,
  permission: key.permission,
  domain_id: key.domainId,
  created_at: key.createdAt,
  last_used_at: key.lastUsedAt,
});

interface CreateOptions {
  readonly name: string;
  readonly permission?: Permission;
  readonly domain?: string;
}

export const addKeyCommands: AddCommands = (program, run) => {
  const key = program.command('key').description('API keys of tenants');

  withExample(
    key
      .command('create')
      .description('Make an API key and show its token, once')
      .argument('<tenant>', 'id or name of the tenant')
      .option('--name <name>', 'what it is for, up to 50 characters', 'made by the operator')
      .addOption(
        new Option(
          '--permission <permission>',
          'what it may do (default: full_access, with --domain sending_access)',
        ).choices(['full_access', 'sending_access']),
      )
      .option('--domain <domain>', 'the only domain it may send from: id or name'),
    'key create acme --name "the shop" --domain shop.example',
  ).action(
    run(async (tools, tenantGiven: string, options: CreateOptions) => {
      const tenant = await findTenantNamed(tools, tenantGiven);
      const domainId =
        options.domain === undefined ? null : await findDomainId(tools, tenant.id, options.domain);
      const fallback = domainId === null ? 'full_access' : 'sending_access';
      const made = await createApiKeyVerbs(await tools.store()).create(operatorFor(tenant.id), {
        name: options.name,
        permission: options.permission ?? fallback,
        domain_id: domainId,
      });
      tools.out.result({ ...present(made.key), token: made.token }, () =>
        fields([
          ['id', made.key.id],
          ['tenant', `${tenant.name} (${tenant.id})`],
          ['name', made.key.name],
          ['permission', made.key.permission],
          ['domain', options.domain ?? 'all of the tenant'],
          ['token', made.token],
        ]),
      );
      tools.out.say('The token is shown only now and stored nowhere: keep it.');
    }),
  );

  withExample(
    pageOptions(
      key
        .command('list')
        .description('List API keys, newest first, without revoked ones')
        .option('--tenant <tenant>', 'only those of this tenant: id or name'),
    ),
    'key list --tenant acme',
  ).action(
    run(async (tools, options: PageOptions & { readonly tenant?: string }) => {
      const { tenant } = options;
      const of =
        tenant === undefined ? {} : { tenantId: (await findTenantNamed(tools, tenant)).id };
      const { items, hasMore } = await listKeys(await tools.store(), of, pageOf(options));
      const names = await namesOfTenants(
        tools,
        items.map(({ tenantId }) => tenantId),
      );
      const data = items.map(present);
      tools.out.result({ object: 'list', data, has_more: hasMore }, () => {
        const rows = items.map((one) => [
          one.id,
          names.get(one.tenantId),
          one.name,
          `${one.prefix}...`,
          one.permission,
          one.lastUsedAt,
        ]);
        const columns = ['id', 'tenant', 'name', 'token', 'permission', 'last used'];
        const last = { hasMore, lastId: data.at(-1)?.id };
        return table(columns, rows, 'There is no key.') + moreAfter(last);
      });
    }),
  );

  withExample(
    key
      .command('revoke')
      .description('Revoke an API key: it stops working at once, everywhere, for good')
      .argument('<id>', 'id of the key; `key list` shows it'),
    'key revoke 019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  ).action(
    run(async (tools, given: string) => {
      const id = given.toLowerCase();
      const store = await tools.store();
      const found = isUuid(id) ? await findKey(store, id) : null;
      const isDone =
        found !== null && (await createApiKeyVerbs(store).revoke(operatorFor(found.tenantId), id));
      if (!isDone) {
        throw new CommandFailed(
          `There is no key with the id "${given}", or it is revoked already. \`key list\` shows the ids of keys that work.`,
        );
      }
      tools.out.result(
        { object: 'api_key', id, deleted: true },
        () => `Revoked ${found.prefix}... (${id}).`,
      );
    }),
  );
};

async function findDomainId(tools: Tools, tenantId: string, idOrName: string): Promise<string> {
  const { pool } = await tools.store();
  const [own] = await readNamed(pool, idOrName.replace(/\.$/, ''), tenantId);
  if (own !== undefined) return own.id;
  throw new CommandFailed(
    `The tenant has no domain "${idOrName}". \`domain list --tenant ${tenantId}\` shows those it has.`,
  );
}
