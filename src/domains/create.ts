// Makes a sending domain and the DKIM keys that sign for it: RSA-2048, which every receiver
// verifies, and Ed25519 (RFC 8463) beside it. Private keys are stored sealed and never leave.
import type { KeyObject } from 'node:crypto';
import type { PoolClient } from 'pg';
import { generateKeyPair, publicKeyRecord } from '../mail/dkim.ts';
import { newId } from '../store/id.ts';
import { seal } from '../store/seal.ts';
import type { domainStatuses } from '../store/sending-domain.ts';

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
  readonly status: (typeof domainStatuses)[number];
  readonly receiving: boolean;
}

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
    readonly keys: Awaited<ReturnType<typeof generateDkimKeys>>;
  },
): Promise<string> {
  const id = newId();
  await client.query(
    `insert into sending_domain (tenant_id, id, name, status, receiving) values ($1, $2, $3, $4, $5)`,
    [domain.tenantId, id, domain.name, domain.status, domain.receiving],
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
