// API keys: made once, stored as a hash, looked up on every request, so that a revoked key stops at
// once in every process. A token has 24 secret characters (about 143 bits): SHA-256 is enough, since
// there is nothing to guess from.
import { createHash } from 'node:crypto';
import type { Pool, PoolClient } from 'pg';
import { newId, randomText } from '../store/id.ts';
import { askTogether } from '../store/together.ts';

export type Permission = 'full_access' | 'sending_access';

/** Who is calling: everything that a request may do follows from this. */
export interface Caller {
  readonly tenantId: string;
  readonly keyId: string;
  readonly permission: Permission;
  /** The only domain that may be in `from`; null: every domain of the tenant. */
  readonly domainId: string | null;
}

const TOKEN = /^re_[A-Za-z0-9]{8}_[A-Za-z0-9]{24}$/;
const PREFIX_LENGTH = 're_'.length + 8;
/** Requests that arrive together ask in one statement. */
const LOOKUPS_PER_QUERY = 100;

export function newToken(): string {
  return `re_${randomText(8)}_${randomText(24)}`;
}

const hashOf = (token: string): Buffer => createHash('sha256').update(token).digest();

/** Stores a key. The token cannot be read back later: this is the only time it is known. */
export async function createKey(
  db: Pool | PoolClient,
  key: {
    readonly tenantId: string;
    readonly name: string;
    readonly token: string;
    readonly permission: Permission;
    readonly domainId: string | null;
  },
): Promise<string> {
  const id = newId();
  await db.query(
    `insert into api_key (tenant_id, id, name, prefix, hash, permission, domain_id)
     values ($1, $2, $3, $4, $5, $6, $7)`,
    [
      key.tenantId,
      id,
      key.name,
      key.token.slice(0, PREFIX_LENGTH),
      hashOf(key.token),
      key.permission,
      key.domainId,
    ],
  );
  return id;
}

interface KeyRow {
  hash: Buffer;
  tenant_id: string;
  id: string;
  permission: Permission;
  domain_id: string | null;
}

const callerOf = (row: KeyRow): Caller => ({
  tenantId: row.tenant_id,
  keyId: row.id,
  permission: row.permission,
  domainId: row.domain_id,
});

/**
 * Looks tokens up. The index is asked for the hash, so no comparison of ours can leak by its time
 * how much of a token was right. A token of the wrong form costs no query. A key that is bound to a
 * domain works as long as the domain is there. `onUse` hears of every token that was right.
 */
export function createAuthenticator(
  pool: Pool,
  onUse: (caller: Caller) => void = () => undefined,
): (token: string) => Promise<Caller | null> {
  const ask = askTogether<Buffer, Caller | null>(LOOKUPS_PER_QUERY, async (hashes) => {
    const { rows } = await pool.query<KeyRow>({
      name: 'authenticate',
      // Not `any ($1)`: its plan is thrown away and made again with every request.
      text: `select k.hash, k.tenant_id, k.id, k.permission, k.domain_id
        from unnest ($1::bytea[]) as asked (hash) join api_key k on k.hash = asked.hash
        where k.revoked_at is null and (k.domain_id is null or exists (
          select 1 from sending_domain d where d.tenant_id = k.tenant_id and d.id = k.domain_id))`,
      values: [[...new Map(hashes.map((hash) => [hash.toString('hex'), hash])).values()]],
    });
    const found = new Map(rows.map((row) => [row.hash.toString('hex'), callerOf(row)]));
    return hashes.map((hash) => {
      const caller = found.get(hash.toString('hex')) ?? null;
      if (caller !== null) onUse(caller);
      return caller;
    });
  });

  return (token) => (TOKEN.test(token) ? ask(hashOf(token)) : Promise.resolve(null));
}
