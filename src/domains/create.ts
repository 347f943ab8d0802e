// Makes a sending domain and the DKIM keys that sign for it: RSA-2048, which every receiver
// verifies, and Ed25519 (RFC 8463) beside it. Private keys are stored sealed and never leave.
import type { KeyObject } from 'node:crypto';
import type { PoolClient } from 'pg';
import { refuseFields, type Refusal, type RefusalCode } from '../access/refusal.ts';
import { generateKeyPair, publicKeyRecord } from '../mail/dkim.ts';
import { newId } from '../store/id.ts';
import { seal } from '../store/seal.ts';
import {
  recordKinds,
  type DomainStatus,
  type InboundDmarc,
  type RecordChecks,
  type StsHosting,
  type TlsMode,
} from '../store/sending-domain.ts';
import { RETURN_PATH_DEFAULT } from './records.ts';
import type { Queryable } from './rows.ts';

/** The label before `._domainkey` for each algorithm. */
export const selectors = {
  'rsa-sha256': 'mailstead',
  'ed25519-sha256': 'mailstead-ed25519',
} as const;

/** What a sealed DKIM key is bound to. */
export const sealContext = (domainId: string, selector: string): string =>
  `dkim ${domainId} ${selector}`;

export interface NewDomain {
  readonly tenantId: string;
  /** A-labels, lower case. */
  readonly name: string;
  /** `verified`: without looking at the DNS, for the domain of development mode. */
  readonly status: DomainStatus;
  readonly receiving: boolean;
  readonly sending?: boolean;
  readonly region?: string;
  readonly returnPathLabel?: string;
  readonly trackingSubdomain?: string | null;
  readonly openTracking?: boolean;
  readonly clickTracking?: boolean;
  readonly tls?: TlsMode;
  readonly inboundDmarc?: InboundDmarc;
  readonly mtaSts?: StsHosting;
}

/** RSA keys cost time and every domain is checked daily; far above what one tenant sends from. */
const DOMAINS_MAX = 1_000;
const UNIQUE_VIOLATION = '23505';

export type DkimKeys = Awaited<ReturnType<typeof generateDkimKeys>>;

/** Generated apart from `createDomain`: RSA takes up to a second, too long for a transaction. */
export async function generateDkimKeys(): Promise<
  readonly { algorithm: keyof typeof selectors; privateKey: KeyObject; record: string }[]
> {
  const algorithms = ['rsa-sha256', 'ed25519-sha256'] as const;
  return Promise.all(
    algorithms.map(async (algorithm) => {
      const { privateKey, publicKey } = await generateKeyPair(algorithm);
      return { algorithm, privateKey, record: publicKeyRecord(publicKey) };
    }),
  );
}

/** Stores the domain with its keys; the id. A name that the tenant has already is a unique violation. */
export async function createDomain(
  client: PoolClient,
  domain: NewDomain,
  dkim: {
    readonly sealingKey: Buffer;
    readonly keys: DkimKeys;
  },
): Promise<string> {
  const id = newId();
  const isVerified = domain.status === 'verified';
  await client.query(
    `insert into sending_domain (tenant_id, id, name, status, receiving, sending, region, return_path_label,
       tracking_subdomain, open_tracking, click_tracking, tls, inbound_dmarc, sending_verified, receiving_verified,
       record_checks, mta_sts)
     values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)`,
    [
      domain.tenantId,
      id,
      domain.name,
      domain.status,
      domain.receiving,
      domain.sending ?? true,
      domain.region ?? 'us-east-1',
      domain.returnPathLabel ?? RETURN_PATH_DEFAULT,
      domain.trackingSubdomain ?? null,
      domain.openTracking ?? false,
      domain.clickTracking ?? false,
      domain.tls ?? 'opportunistic',
      domain.inboundDmarc ?? 'reject',
      isVerified && domain.sending !== false,
      isVerified && domain.receiving,
      JSON.stringify(isVerified ? allVerified() : {}),
      domain.mtaSts ?? 'off',
    ],
  );
  for (const { algorithm, privateKey, record } of dkim.keys) {
    const selector = selectors[algorithm];
    const plain = privateKey.export({ type: 'pkcs8', format: 'der' });
    await client.query(
      `insert into dkim_key (tenant_id, domain_id, selector, algorithm, private_key_sealed, public_record)
       values ($1, $2, $3, $4, $5, $6)`,
      [
        domain.tenantId,
        id,
        selector,
        algorithm,
        seal(dkim.sealingKey, sealContext(id, selector), plain),
        record,
      ],
    );
  }
  return id;
}

function allVerified(): RecordChecks {
  const verified = { status: 'verified', detail: null, since: null } as const;
  return Object.fromEntries(recordKinds.map((kind) => [kind, verified]));
}

const refuse = (code: RefusalCode, message: string): Refusal =>
  refuseFields([{ path: 'name', message }], code);

const refuseExisting = (name: string): Refusal =>
  refuse('domain_exists', `You have the domain ${name} already; \`name\` must be new.`);

/** Throws a Refusal when the tenant has the name already, or as many domains as are allowed. */
export async function refuseOwnName(db: Queryable, tenantId: string, name: string): Promise<void> {
  const { rows } = await db.query<{ isOwn: boolean; count: number }>(
    `select count(*)::int as count, coalesce(bool_or(name = $2), false) as "isOwn"
     from sending_domain where tenant_id = $1`,
    [tenantId, name],
  );
  const { isOwn, count } = rows[0]!;
  if (isOwn) throw refuseExisting(name);
  if (count < DOMAINS_MAX) return;
  const message = `There are ${count} domains; at most ${DOMAINS_MAX} are allowed. Remove one before this \`name\` is added.`;
  throw refuse('validation_error', message);
}

/** As `createDomain`, for a caller: a name that the tenant has is a Refusal. */
export async function addDomain(
  client: PoolClient,
  domain: NewDomain,
  dkim: Parameters<typeof createDomain>[2],
): Promise<string> {
  try {
    return await createDomain(client, domain, dkim);
  } catch (error) {
    if ((error as { code?: unknown }).code !== UNIQUE_VIOLATION) throw error;
    throw refuseExisting(domain.name);
  }
}
