// Pages of what belongs to receiving domains: of one of them, or of all of a tenant's.
import { checkId, checkPage, refuseCursor, type Cursor, type PageRequest } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { Store } from '../store/orm.ts';

/**
 * The page request with its defaults. Throws a Refusal for a bad limit, a domain that is not the tenant's, and a cursor
 * that `find` does not find in the list.
 */
export async function checkDomainPage(
  store: Store,
  asked: {
    readonly tenantId: string;
    readonly page: PageRequest;
    /** Null: all. */
    readonly domainId: string | null;
  },
  find: (id: string) => Promise<{ readonly domainId: string } | null>,
): Promise<Cursor> {
  const { tenantId, page, domainId } = asked;
  const cursor = checkPage(page);
  if (domainId !== null) await checkDomain(store, tenantId, domainId);
  const at = cursor.after ?? cursor.before;
  if (at !== null) {
    const found = await find(at);
    if (found === null || (domainId !== null && found.domainId !== domainId.toLowerCase())) {
      refuseCursor(cursor);
    }
  }
  return cursor;
}

async function checkDomain(store: Store, tenantId: string, domainId: string): Promise<void> {
  const { rowCount } = await store.pool.query(
    'select 1 from sending_domain where tenant_id = $1 and id = $2',
    [tenantId, checkId(domainId, 'domain_id')],
  );
  if (rowCount === 0) throw new Refusal('not_found', 'Domain not found');
}
