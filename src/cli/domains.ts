// `domain list` and `domain verify`: which names tenants send and receive with, and what the DNS says of them now.
import type { Caller } from '../access/keys.ts';
import type { DomainVerbs, DomainView } from '../domains/domains.ts';
import { readNamed, readPage, type DomainRow } from '../domains/rows.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { pageOptions, withExample, type PageOptions } from './options.ts';
import { fields, moreAfter, printable, table } from './output.ts';
import { findTenantNamed, namesOfTenants, pageOf } from './tenants.ts';

/** The operator acting for a tenant. */
export function operatorFor(tenantId: string): Caller {
  return { tenantId, keyId: '', permission: 'full_access', domainId: null };
}

export interface DomainParts {
  /** What the API does with domains, with a resolver that `close` closes. */
  readonly openDomains: (
    tools: Tools,
  ) => Promise<{ readonly verbs: Pick<DomainVerbs, 'verify'>; close(): void }>;
}

const present = (domain: DomainRow | DomainView) => ({
  object: 'domain',
  id: domain.id,
  tenant_id: domain.tenantId,
  name: domain.name,
  status: domain.status,
  sending: domain.sending,
  receiving: domain.receiving,
  checked_at: domain.checkedAt,
  created_at: domain.createdAt,
});

interface TenantOption {
  readonly tenant?: string;
}

export const domainCommands =
  (parts: DomainParts): AddCommands =>
  (program, run) => {
    const domain = program
      .command('domain')
      .description('Domains that tenants send and receive with');

    withExample(
      pageOptions(
        domain
          .command('list')
          .description('List domains, newest first')
          .option('--tenant <tenant>', 'only those of this tenant: id or name'),
      ),
      'domain list --tenant acme',
    ).action(
      run(async (tools, options: PageOptions & TenantOption) => {
        const { tenant } = options;
        const tenantId = tenant === undefined ? null : (await findTenantNamed(tools, tenant)).id;
        const { pool } = await tools.store();
        const { items, hasMore } = await readPage(pool, tenantId, pageOf(options));
        const names = await namesOfTenants(
          tools,
          items.map((one) => one.tenantId),
        );
        tools.out.result({ object: 'list', data: items.map(present), has_more: hasMore }, () => {
          const rows = items.map((one) => [
            one.id,
            one.name,
            one.status,
            names.get(one.tenantId),
            [one.sending ? 'send' : '', one.receiving ? 'receive' : ''].filter(Boolean).join(', '),
            one.checkedAt,
          ]);
          const columns = ['id', 'name', 'status', 'tenant', 'for', 'checked'];
          const last = { hasMore, lastId: items.at(-1)?.id };
          return table(columns, rows, 'There is no domain.') + moreAfter(last);
        });
      }),
    );

    withExample(
      domain
        .command('verify')
        .description(
          'Ask the DNS for every record of a domain now; exit code 1 unless it is verified',
        )
        .argument('<domain>', 'name or id of the domain')
        .option('--tenant <tenant>', 'whose it is, where several tenants have it: id or name'),
      'domain verify example.com',
    ).action(
      run(async (tools, given: string, options: TenantOption) => {
        const found = await findDomain(tools, given, options.tenant);
        tools.out.say(`Asking the DNS about ${found.name}`);
        const domains = await parts.openDomains(tools);
        let verified: DomainView | null;
        try {
          verified = await domains.verbs.verify(operatorFor(found.tenantId), found.id);
        } finally {
          domains.close();
        }
        if (verified === null)
          throw new CommandFailed(`The domain ${found.name} was just removed.`);
        tools.out.result(
          { ...present(verified), records: verified.records.map(presentRecord) },
          () => describe(verified),
        );
        if (verified.status !== 'verified') throw new CommandFailed('');
      }),
    );
  };

const presentRecord = (record: DomainView['records'][number]) => ({
  record: record.record,
  type: record.type,
  name: record.name,
  status: record.status,
  expected: record.value,
  priority: record.priority,
  /** Null: what is expected. */
  found: record.detail,
});

async function findDomain(
  tools: Tools,
  nameOrId: string,
  tenant: string | undefined,
): Promise<DomainRow> {
  const tenantId = tenant === undefined ? null : (await findTenantNamed(tools, tenant)).id;
  const { pool } = await tools.store();
  const [found, ...others] = await readNamed(pool, nameOrId.replace(/\.$/, ''), tenantId);
  if (found === undefined) {
    throw new CommandFailed(
      `There is no domain "${nameOrId}". \`domain list\` shows those there are; a tenant adds one with POST /domains.`,
    );
  }
  if (others.length > 0) {
    const ids = [found, ...others].map(({ id, tenantId: of }) => `${id} (tenant ${of})`);
    throw new CommandFailed(
      `Several tenants have ${found.name}; give the id, or --tenant: ${ids.join(', ')}.`,
    );
  }
  return found;
}

function describe(domain: DomainView): string {
  const head = fields([
    ['domain', domain.name],
    ['id', domain.id],
    ['status', domain.status],
  ]);
  const records = domain.records.map(({ record, type, name, status, value, priority, detail }) => {
    const mark = status === 'verified' ? 'ok ' : '-- ';
    const expected = priority === null ? value : `${priority} ${value}`;
    return [
      `${mark} ${record} ${type} ${printable(name)}: ${status}`,
      `      expected  ${printable(expected)}`,
      `      found     ${printable(detail ?? (status === 'verified' ? 'as expected' : 'not looked at yet'))}`,
    ].join('\n');
  });
  return [head, '', ...records].join('\n');
}
