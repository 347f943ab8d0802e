// Rows for tests of the queue: a store on a fresh database, a tenant, emails without bodies worth reading.
import { randomUUID } from 'node:crypto';
import { ensureFirstTenant } from '../../src/access/first-tenant.ts';
import { createLogger } from '../../src/log.ts';
import { claim, type ClaimedDelivery, type ClaimOptions } from '../../src/queue/claim.ts';
import { enqueue, type NewAttachment, type NewEmail } from '../../src/queue/enqueue.ts';
import { beat } from '../../src/queue/lease.ts';
import type { Evidence, Settlement, Verdict } from '../../src/queue/settle.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { migratedDatabase } from './postgres.ts';

export const silent = createLogger({ level: 'silent', name: 'test' });

export interface Bench {
  readonly store: Store;
  readonly tenantId: string;
  readonly url: string;
  enqueue(count: number, about?: Partial<NewEmail>): Promise<readonly string[]>;
  run(): Promise<string>;
  claim(
    epoch: string,
    max: number,
    about?: Partial<Omit<ClaimOptions, 'epoch' | 'max'>>,
  ): Promise<readonly ClaimedDelivery[]>;
  states(): Promise<Record<string, number>>;
  stop(): Promise<void>;
}

export async function openQueue(): Promise<Bench> {
  const database = await migratedDatabase();
  const store = await openStore({
    url: database.url,
    log: silent,
    connectionsMax: 10,
    migrate: true,
  });
  const { tenantId } = await ensureFirstTenant(store, null);
  return {
    store,
    tenantId,
    url: database.url,
    async enqueue(count, about = {}) {
      const emails = Array.from({ length: count }, () => newEmail({ tenantId, ...about }));
      await enqueue(store.pool, emails);
      return emails.map(({ id }) => id);
    },
    async run() {
      const epoch = randomUUID();
      await beat(store.pool, epoch);
      return epoch;
    },
    async claim(epoch, max, about = {}) {
      const { deliveries } = await claim(store, {
        epoch,
        max,
        perTenant: 1_000,
        exceptLanes: [],
        exceptTenants: [],
        rooms: new Map(),
        roomOfOthers: 1_000,
        cursors: {},
        ...about,
      });
      return deliveries;
    },
    async states() {
      const { rows } = await store.pool.query<{ state: string; count: string }>(
        'select state, count(*) from delivery group by state order by state',
      );
      return Object.fromEntries(rows.map(({ state, count }) => [state, Number(count)]));
    },
    async stop() {
      await store.close();
      await database.drop();
    },
  };
}

export function newEmail(about: Partial<NewEmail> & { tenantId: string }): NewEmail {
  const id = newId();
  return {
    id,
    createdAt: new Date(),
    messageId: `<${id}@sender.test>`,
    fromGiven: 'a@sender.test',
    fromDomain: 'sender.test',
    toGiven: ['b@recipient.test'],
    ccGiven: null,
    bccGiven: null,
    replyToGiven: null,
    subject: 'Test',
    tags: null,
    lastEvent: 'queued',
    scheduledAt: null,
    topicId: null,
    templateId: null,
    attachments: [],
    searchTerms: [],
    html: null,
    text: 'x',
    headers: null,
    raw: Buffer.from('Subject: Test\r\n\r\nx\r\n'),
    blobKey: null,
    rawSizeBytes: 20,
    needsSmtpUtf8: false,
    signingTenantId: null,
    signingDomainId: null,
    deliveries: [{ recipient: 'b@recipient.test', lane: 'sink' }],
    isBulk: (about.deliveries?.length ?? 1) > 1,
    lifetimeMs: 4 * 86_400_000,
    timelineId: newId(),
    accepted: { via: 'http' },
    ...about,
  };
}

/** A file that lies nowhere yet. */
export const file = (about: Partial<NewAttachment>): NewAttachment => ({
  id: newId(),
  filename: 'a.pdf',
  contentType: 'application/octet-stream',
  contentId: null,
  disposition: 'attachment',
  sizeBytes: null,
  url: null,
  blobKey: null,
  rawOffset: null,
  rawLength: null,
  ...about,
});

export const recipients = (count: number): NewEmail['deliveries'] =>
  Array.from({ length: count }, (_, index) => ({
    recipient: `r${index}@recipient.test`,
    lane: 'sink',
  }));

const proof: Evidence = {
  cause: null,
  stage: 'dot',
  host: 'mx.recipient.test',
  address: '127.0.0.1',
  port: 25,
  tls: null,
  tlsPolicy: null,
  source: null,
  code: 250,
  enhanced: '2.0.0',
  reply: '250 2.0.0 Ok',
};

export function result(
  delivery: Omit<ClaimedDelivery, 'raw'> | ClaimedDelivery,
  epoch: string,
  about: { verdict: Verdict; delayMs?: number; evidence?: Partial<Evidence> },
): Settlement {
  return {
    tenantId: delivery.tenantId,
    emailId: delivery.emailId,
    position: delivery.position,
    attempt: delivery.attempt,
    recipientCount: delivery.recipientCount,
    epoch,
    verdict: about.verdict,
    delayMs: about.delayMs ?? 60_000,
    isLaneFault: false,
    evidence: { ...proof, ...about.evidence },
  };
}
