// Broadcasts on a real database: made by SQL, ready to be fanned out, and what became of them.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import * as assert from 'uvu/assert';
import { createPreferenceLinks } from '../../src/audience/preference-links.ts';
import { createDomainLookup } from '../../src/domains/lookup.ts';
import type { FanOutDependencies } from '../../src/sending/fan-out.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, silent } from './queue.ts';

export interface Made {
  readonly tenantId: string;
  readonly segmentId: string;
  /** In their order. */
  readonly contacts: readonly string[];
  readonly broadcastId: string;
}

export interface State {
  readonly status: string;
  readonly failure: string | null;
  readonly recipients: number;
  readonly left_out: number;
}

export async function openFanOut() {
  const bench = await openQueue();
  const query = async <T extends object>(
    sql: string,
    values: readonly unknown[] = [],
  ): Promise<readonly T[]> => (await bench.store.pool.query<T>(sql, [...values])).rows;

  const newDomain = (tenantId: string): Promise<unknown> =>
    query(
      `insert into sending_domain (tenant_id, id, name, status, sending_verified)
       values ($1, $2, $3, 'verified', true)`,
      [tenantId, newId(), `${tenantId}.test`],
    );

  const folder = await mkdtemp(join(tmpdir(), 'mailstead-fan-out-'));
  await newDomain(bench.tenantId);
  const d: FanOutDependencies = {
    store: bench.store,
    log: silent,
    blobs: openDiskBlobs(folder),
    domains: createDomainLookup(bench.store.pool, Buffer.alloc(32)),
    preferenceLinks: createPreferenceLinks({ key: Buffer.alloc(32), publicUrl: 'https://m.test' }),
    now: () => new Date(),
    laneOf: (domain) => `mx:${domain}`,
    lifetimeMs: 60_000,
    standIn: null,
    onReady: () => undefined,
  };

  /** A broadcast on its way, to so many new contacts. */
  async function queued(
    count: number,
    about: {
      readonly tenantId?: string;
      readonly html?: string;
      readonly topicId?: string;
      readonly from?: string;
    } = {},
  ): Promise<Made> {
    const { tenantId = bench.tenantId } = about;
    const segmentId = newId();
    const broadcastId = newId();
    const contacts = Array.from({ length: count }, () => newId());
    await query(
      `insert into segment (tenant_id, id, name, created_at, updated_at) values ($1, $2, 's', now(), now())`,
      [tenantId, segmentId],
    );
    await query(
      `insert into contact (tenant_id, id, email, address, first_name, created_at, updated_at)
       select $1, id, id || '@people.test', id || '@people.test', 'Name', now(), now() from unnest($2::uuid[]) as i (id)`,
      [tenantId, contacts],
    );
    await query(
      `insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
       select $1, $2, id, now() from unnest($3::uuid[]) as i (id)`,
      [tenantId, segmentId, contacts],
    );
    await query(
      `insert into broadcast (tenant_id, id, name, segment_id, topic_id, from_given, subject, html, status, queued_at,
         created_at, updated_at)
       values ($1, $2, 'b', $3, $4, $5, 'Hello', $6, 'queued', now(), now(), now())`,
      [
        tenantId,
        broadcastId,
        segmentId,
        about.topicId ?? null,
        about.from ?? `a@${tenantId}.test`,
        about.html ?? '<p>Hi {{{FIRST_NAME}}}</p>',
      ],
    );
    return { tenantId, segmentId, contacts, broadcastId };
  }

  const stateOf = async ({ broadcastId }: Made): Promise<State> =>
    (
      await query<State>(
        'select status, failure, recipients, left_out from broadcast where id = $1',
        [broadcastId],
      )
    )[0]!;

  /** What each contact got: how many emails, or why none. */
  async function outcomes({ contacts, broadcastId }: Made): Promise<readonly (string | number)[]> {
    const rows = await query<{ contact_id: string; left_out: string | null; emails: string }>(
      `select r.contact_id, r.left_out,
         (select count(*) from email e join delivery d on d.tenant_id = e.tenant_id and d.email_id = e.id
          where e.broadcast_id = r.broadcast_id and d.recipient = r.address) as emails
       from broadcast_recipient r where r.broadcast_id = $1`,
      [broadcastId],
    );
    assert.ok(rows.length <= contacts.length);
    const of = new Map(rows.map((row) => [row.contact_id, row.left_out ?? Number(row.emails)]));
    return contacts.map((id) => of.get(id) ?? 'missing');
  }

  const stop = async (): Promise<void> => {
    await bench.stop();
    await rm(folder, { recursive: true, force: true });
  };
  return { bench, folder, d, query, newDomain, queued, stateOf, outcomes, stop };
}
