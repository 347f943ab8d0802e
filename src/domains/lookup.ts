// Answers, from short-lived caches, what accepting and delivering ask about domains on every email:
// may this tenant send from that name, and with which keys is it signed.
import { createPrivateKey } from 'node:crypto';
import type { Pool } from 'pg';
import type { DkimKey } from '../mail/dkim.ts';
import { unseal } from '../store/seal.ts';
import type { DomainStatus, TlsMode } from '../store/sending-domain.ts';
import { sealContext } from './create.ts';
import { TRACKING_DEFAULT } from './records.ts';

export interface SendingDomainFacts {
  readonly id: string;
  readonly name: string;
  readonly status: DomainStatus;
  readonly sending: boolean;
  /** Sending is on, and what it needs in the DNS is verified, or was less than 72 h ago. */
  readonly canSend: boolean;
  readonly tls: TlsMode;
  readonly openTracking: boolean;
  readonly clickTracking: boolean;
  /** Where tracked links lead: only while its CNAME is verified. */
  readonly trackingHost: string | null;
}

export interface Signer {
  readonly domain: string;
  /** The label in front of `domain` where bounces come home. */
  readonly returnPathLabel: string;
  /** RSA first. */
  readonly keys: readonly DkimKey[];
  /** Not a second older than the question. */
  readonly canSend: boolean;
  readonly tls: TlsMode;
}

/** How long a domain that was just verified, changed or deleted may still be seen as it was. */
const DOMAIN_CACHE_MS = 1_000;
/** Names, labels and keys of a domain do not change. */
const KEY_CACHE_MS = 60_000;
const ENTRIES_MAX = 10_000;

/** A bounded cache of promises: equal questions at one time are asked once; failures are not kept. */
function remember<T>(
  ageMaxMs: number,
  ask: (key: string) => Promise<T>,
): { get(key: string): Promise<T>; forget(): void } {
  const entries = new Map<string, { until: number; value: Promise<T> }>();
  return {
    get(key) {
      const now = Date.now();
      const entry = entries.get(key);
      if (entry !== undefined && entry.until > now) return entry.value;
      entries.delete(key);
      if (entries.size >= ENTRIES_MAX) entries.delete(entries.keys().next().value!);
      const value = ask(key);
      entries.set(key, { until: now + ageMaxMs, value });
      value.catch(() => entries.delete(key));
      return value;
    },
    forget: () => entries.clear(),
  };
}

export interface DomainLookup {
  /** The tenant's domain of this name (A-labels, lower case), or null. */
  sendingDomain(tenantId: string, name: string): Promise<SendingDomainFacts | null>;
  /** The same by id. */
  domainState(tenantId: string, domainId: string): Promise<SendingDomainFacts | null>;
  /** Who signs for a domain, or null when the domain is gone. */
  signer(tenantId: string, domainId: string): Promise<Signer | null>;
  /** The same for the tenant's domain of this name (A-labels, lower case). */
  signerByName(tenantId: string, name: string): Promise<Signer | null>;
  /**
   * Whether our inbound listener takes mail for this domain (A-labels, lower case), whoever's it is: one that receives,
   * or one where bounces come home.
   */
  takesMail(name: string): Promise<boolean>;
  /** A domain was changed here: what comes next sees it as it is. Other processes see it within a second. */
  forget(): void;
}

const FACTS = `
  select id, name, status, sending, sending and sending_verified as "canSend", tls,
    open_tracking as "openTracking", click_tracking as "clickTracking",
    case when record_checks -> 'tracking_cname' ->> 'status' = 'verified'
      then coalesce(tracking_subdomain, '${TRACKING_DEFAULT}') || '.' || name end as "trackingHost"
  from sending_domain`;

export function createDomainLookup(pool: Pool, sealingKey: Buffer): DomainLookup {
  const domains = remember(DOMAIN_CACHE_MS, async (key) => {
    const [tenantId, name] = key.split(' ') as [string, string];
    const { rows } = await pool.query<SendingDomainFacts>({
      name: 'sending-domain',
      text: `${FACTS} where tenant_id = $1 and name = $2`,
      values: [tenantId, name],
    });
    return rows[0] ?? null;
  });
  const states = remember(DOMAIN_CACHE_MS, async (key) => {
    const { rows } = await pool.query<SendingDomainFacts>({
      name: 'sending-domain-state',
      text: `${FACTS} where tenant_id = $1 and id = $2`,
      values: key.split(' '),
    });
    return rows[0] ?? null;
  });
  const signers = remember(KEY_CACHE_MS, async (key) => {
    const [tenantId, domainId] = key.split(' ') as [string, string];
    const { rows } = await pool.query<{
      name: string;
      return_path_label: string;
      selector: string;
      algorithm: DkimKey['algorithm'];
      private_key_sealed: Buffer;
    }>({
      name: 'dkim-keys',
      text: `select d.name, d.return_path_label, k.selector, k.algorithm, k.private_key_sealed
        from dkim_key k join sending_domain d on d.tenant_id = k.tenant_id and d.id = k.domain_id
        where k.tenant_id = $1 and k.domain_id = $2 order by k.algorithm desc`,
      values: [tenantId, domainId],
    });
    const [first] = rows;
    if (first === undefined) return null;
    const keys = rows.map((row) => ({
      domain: row.name,
      selector: row.selector,
      algorithm: row.algorithm,
      privateKey: createPrivateKey({
        key: unseal(sealingKey, sealContext(domainId, row.selector), row.private_key_sealed),
        type: 'pkcs8',
        format: 'der',
      }),
    }));
    return { domain: first.name, returnPathLabel: first.return_path_label, keys };
  });
  // As the listener decides at RCPT (receiving/).
  const takers = remember(DOMAIN_CACHE_MS, async (name) => {
    const ends = name.split('.').map((_, at, labels) => labels.slice(at).join('.'));
    const { rows } = await pool.query({
      name: 'takes-mail',
      text: `select 1 from sending_domain where name = any ($2::text[])
        and ((name = $1 and receiving and receiving_verified) or return_path_label || '.' || name = $1) limit 1`,
      values: [name, ends],
    });
    return rows.length > 0;
  });
  const findSigner: DomainLookup['signer'] = async (tenantId, domainId) => {
    const key = `${tenantId} ${domainId}`;
    const [state, signer] = await Promise.all([states.get(key), signers.get(key)]);
    if (state === null || signer === null) return null;
    return { ...signer, canSend: state.canSend, tls: state.tls };
  };
  return {
    sendingDomain: (tenantId, name) => domains.get(`${tenantId} ${name}`),
    domainState: (tenantId, domainId) => states.get(`${tenantId} ${domainId}`),
    signer: findSigner,
    takesMail: (name) => takers.get(name),
    async signerByName(tenantId, name) {
      const domain = await domains.get(`${tenantId} ${name}`);
      return domain === null ? null : findSigner(tenantId, domain.id);
    },
    forget() {
      domains.forget();
      states.forget();
      takers.forget();
    },
  };
}

/** Of the domains that were added last; who lost the secret may have begun anew with others. */
const OPENED_MAX = 100;

/** Whether any DKIM key can be opened with it; also where there is none. */
export async function opensKeys(db: Pick<Pool, 'query'>, sealingKey: Buffer): Promise<boolean> {
  const { rows } = await db.query<{ domain_id: string; selector: string; sealed: Buffer }>(
    `select domain_id, selector, private_key_sealed as sealed from dkim_key
     order by domain_id desc limit ${OPENED_MAX}`,
  );
  const isOpened = (row: (typeof rows)[number]): boolean => {
    try {
      unseal(sealingKey, sealContext(row.domain_id, row.selector), row.sealed);
      return true;
    } catch {
      return false;
    }
  };
  return rows.length === 0 || rows.some(isOpened);
}
