// The body of a call: `{type, created_at, data}` with the fields that Resend sends. Of an email the data is what is known
// of it now and what the event adds; when it is gone meanwhile, what the event says is told all the same.
import type { PoolClient } from 'pg';
import type { Tag } from '../store/email.ts';
import { fromJson } from '../store/json.ts';
import type { ReceivedAttachment } from '../store/received-email.ts';

/** A row of the outbox. */
export interface Happened {
  readonly tenantId: string;
  readonly id: string;
  readonly type: string;
  readonly subjectId: string;
  readonly detail: Readonly<Record<string, unknown>>;
  readonly at: Date;
}

type Data = Readonly<Record<string, unknown>>;

/** The bodies, in the order of what happened; null for a row that nothing can be made of. */
export async function writePayloads(
  client: Pick<PoolClient, 'query'>,
  happened: readonly Happened[],
): Promise<readonly (string | null)[]> {
  const received = happened.filter(({ type }) => type === 'email.received');
  const sent = happened.filter(
    ({ type }) => type.startsWith('email.') && type !== 'email.received',
  );
  const known = new Map([
    ...(await readEmails(client, sent)),
    ...(await readReceived(client, received)),
  ]);
  return happened.map(({ tenantId, type, subjectId, detail, at }) => {
    if (Number.isNaN(at.getTime()) || typeof detail !== 'object') return null;
    const own: Data = type.startsWith('email.')
      ? (known.get(keyOf(tenantId, subjectId)) ?? { email_id: subjectId })
      : {};
    return JSON.stringify({ type, created_at: at.toISOString(), data: { ...own, ...detail } });
  });
}

const keyOf = (tenantId: string, id: string): string => `${tenantId} ${id}`;

interface EmailRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly created_ms: number;
  readonly message_id: string;
  readonly from_given: string;
  readonly to_given: readonly string[] | string;
  readonly subject: string;
  readonly tags: readonly Tag[] | string | null;
  readonly template_id: string | null;
  readonly broadcast_id: string | null;
  readonly headers: Readonly<Record<string, string>> | string | null;
}

async function readEmails(
  client: Pick<PoolClient, 'query'>,
  about: readonly Happened[],
): Promise<readonly (readonly [string, Data])[]> {
  if (about.length === 0) return [];
  const { rows } = await client.query<EmailRow>({
    name: 'webhook-emails',
    text: `select e.tenant_id, e.id, (extract(epoch from e.created_at) * 1000)::float8 as created_ms,
        e.message_id, e.from_given, e.to_given, e.subject, e.tags, e.template_id, e.broadcast_id,
        c.headers
      from (select distinct tenant_id, id from unnest($1::uuid[], $2::uuid[]) as a (tenant_id, id)) w
      join email e on e.tenant_id = w.tenant_id and e.id = w.id
      left join email_content c on c.tenant_id = e.tenant_id and c.email_id = e.id`,
    values: columnsOf(about),
  });
  return rows.map((row) => [keyOf(row.tenant_id, row.id), emailData(row)] as const);
}

function emailData(row: EmailRow): Data {
  const tags = row.tags === null ? [] : fromJson<readonly Tag[]>(row.tags);
  const headers =
    row.headers === null
      ? []
      : Object.entries(fromJson<Readonly<Record<string, string>>>(row.headers));
  return {
    created_at: new Date(row.created_ms).toISOString(),
    email_id: row.id,
    message_id: row.message_id,
    from: row.from_given,
    to: fromJson<readonly string[]>(row.to_given),
    subject: row.subject,
    ...(row.broadcast_id === null ? {} : { broadcast_id: row.broadcast_id }),
    ...(row.template_id === null ? {} : { template_id: row.template_id }),
    ...(tags.length === 0
      ? {}
      : { tags: Object.fromEntries(tags.map(({ name, value }) => [name, value])) }),
    ...(headers.length === 0 ? {} : { headers: headers.map(([name, value]) => ({ name, value })) }),
  };
}

interface ReceivedRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly created_ms: number;
  readonly from_shown: string;
  readonly to_shown: readonly string[] | string;
  readonly cc_shown: readonly string[] | string;
  readonly bcc_shown: readonly string[] | string;
  readonly received_for: readonly string[] | string;
  readonly message_id: string | null;
  readonly subject: string;
  readonly attachments: readonly ReceivedAttachment[] | string;
}

async function readReceived(
  client: Pick<PoolClient, 'query'>,
  about: readonly Happened[],
): Promise<readonly (readonly [string, Data])[]> {
  if (about.length === 0) return [];
  const { rows } = await client.query<ReceivedRow>({
    name: 'webhook-received',
    text: `select e.tenant_id, e.id, (extract(epoch from e.created_at) * 1000)::float8 as created_ms,
        e.from_shown, e.to_shown, e.cc_shown, e.bcc_shown, e.received_for, e.message_id, e.subject,
        e.attachments
      from (select distinct tenant_id, id from unnest($1::uuid[], $2::uuid[]) as a (tenant_id, id)) w
      join received_email e on e.tenant_id = w.tenant_id and e.id = w.id`,
    values: columnsOf(about),
  });
  return rows.map((row) => [keyOf(row.tenant_id, row.id), receivedData(row)] as const);
}

/** Metadata only: what it says is to be had over the API. */
const receivedData = (row: ReceivedRow): Data => ({
  email_id: row.id,
  created_at: new Date(row.created_ms).toISOString(),
  from: row.from_shown,
  to: fromJson<readonly string[]>(row.to_shown),
  cc: fromJson<readonly string[]>(row.cc_shown),
  bcc: fromJson<readonly string[]>(row.bcc_shown),
  received_for: fromJson<readonly string[]>(row.received_for),
  message_id: row.message_id,
  subject: row.subject,
  attachments: fromJson<readonly ReceivedAttachment[]>(row.attachments).map(
    ({ id, filename, content_type, content_disposition, content_id }) => ({
      id,
      filename,
      content_type,
      content_disposition,
      content_id,
    }),
  ),
});

const columnsOf = (about: readonly Happened[]): (readonly string[])[] => [
  about.map(({ tenantId }) => tenantId),
  about.map(({ subjectId }) => subjectId),
];
