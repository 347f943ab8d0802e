// A recipient's complaint: the email shows it for good, and its timeline says who complained and how. One
// fact for each recipient, however often it is reported.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';
import { noteLateChanges } from '../timeline/late-changes.ts';
import { tellWebhooks } from '../timeline/outbox.ts';

export interface Complaint {
  readonly tenantId: string;
  readonly emailId: string;
  readonly recipient: string;
  readonly detail: Readonly<Record<string, unknown>>;
}

/** Stores the complaint inside the caller's transaction; false: it was known. */
export async function recordComplaint(
  client: PoolClient,
  { tenantId, emailId, recipient, detail }: Complaint,
): Promise<boolean> {
  // First, since it locks the row: two reports of one complaint come one after the other.
  await client.query({
    text: `update email set last_event = 'complained' where tenant_id = $1 and id = $2`,
    values: [tenantId, emailId],
  });
  await noteLateChanges(client, [{ tenantId, emailId }]);
  const { rowCount } = await client.query({
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      select $1, $2, $3, now(), 'complained', $4::jsonb
      where not exists (select 1 from timeline t where t.tenant_id = $1 and t.email_id = $2
        and t.kind = 'complained' and t.detail -> 'recipients' ? $5)`,
    values: [
      tenantId,
      emailId,
      newId(),
      JSON.stringify({ recipients: [recipient], ...detail }),
      recipient,
    ],
  });
  if (rowCount !== 1) return false;
  const complaint = { type: detail['feedback_type'] ?? null };
  const told = { recipient, complaint };
  await tellWebhooks(client, [
    { tenantId, type: 'email.complained', subjectId: emailId, detail: told },
  ]);
  return true;
}
