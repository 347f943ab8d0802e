// Emails put into the queue behind the API's back, as many as a row needs: by SQL, in the form that accepting gives them.
import type { Machine } from './machine.ts';

const CHUNK = 50_000;

// Times, states and counts as queue/enqueue.ts writes them. The message is small, whole, and signed like any other.
const SEED = `
  with one as materialized (
    select uuidv7() as id, n, 'd' || (n % $3) || '.' || $4 as domain from generate_series($5::int, $6::int) as n
  ), home as (
    select tenant_id, id from sending_domain where name = 'mailstead.test' order by created_at limit 1
  ), emails as (
    insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given, subject,
      last_event, recipient_count)
    select $1, one.id, now(), '<' || one.id || '@mailstead.test>', 'Ada <ada@mailstead.test>', 'mailstead.test',
      jsonb_build_array('r' || n || '@' || domain), 'Seeded ' || n, 'queued', 1 from one
  ), contents as (
    insert into email_content (tenant_id, email_id, text, raw, raw_size_bytes, needs_smtp_utf8,
      signing_tenant_id, signing_domain_id)
    select $1, one.id, 'x', m.raw, octet_length(m.raw), false, home.tenant_id, home.id
    from one cross join home cross join lateral (select convert_to(
      E'From: Ada <ada@mailstead.test>\\r\\nTo: r' || n || '@' || domain || E'\\r\\nSubject: Seeded ' || n
      || E'\\r\\nMessage-ID: <' || one.id || E'@mailstead.test>\\r\\nDate: Sat, 21 Nov 2026 12:00:00 +0000'
      || E'\\r\\nMIME-Version: 1.0\\r\\nContent-Type: text/plain\\r\\n\\r\\n' || repeat('x', 300) || E'\\r\\n',
      'UTF8') as raw) m
  ), facts as (
    insert into timeline (tenant_id, email_id, id, at, kind, detail)
    select $1, one.id, uuidv7(), now(), 'accepted', '{"via": "http"}' from one
  )
  insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at)
  select $1, one.id, 0, 'r' || n || '@' || domain, 'mx:' || domain, 'ready', now(), now() + $2 * interval '1 second'
  from one`;
const LIFETIME_S = 4 * 86_400;

/** `count` emails of one recipient each, spread evenly over `d0.<under>` … of so many domains. */
export async function seed(
  machine: Machine,
  about: {
    readonly tenantId: string;
    readonly count: number;
    readonly domains: number;
    readonly under: string;
  },
): Promise<void> {
  const { tenantId, count, domains, under } = about;
  for (let from = 0; from < count; from += CHUNK) {
    const to = Math.min(from + CHUNK, count) - 1;
    await machine.query(SEED, [tenantId, LIFETIME_S, domains, under, from, to]);
  }
}

export async function firstTenantId(machine: Machine): Promise<string> {
  const [row] = await machine.query<{ id: string }>(
    'select id from tenant order by created_at limit 1',
  );
  if (row === undefined) throw new Error('there is no tenant');
  return row.id;
}
