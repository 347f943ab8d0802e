// Ties what comes in to what was sent: a message names those that it answers in In-Reply-To and References (RFC 5322
// §3.6.4), and a sent email of the same tenant has one of these Message-IDs. It is about the ids alone: who wrote the
// answer, they do not say.
import type { Pool } from 'pg';
import { findHeaders, splitHeader } from '../mail/header.ts';
import { messageIdTerm } from '../sending/search.ts';
import { isUuid } from '../store/id.ts';

/** A message names its direct parent first or last; who names hundreds of others gets no look-up for them. */
const NAMED_MAX = 20;
const FIELD_CHARACTERS_MAX = 16_384;
/** RFC 5322 §2.1.1: no longer one fits into a line. */
const NAMED = /<[^<>\s]{1,996}>/g;

/** What a message says of those that it answers. */
export interface Answering {
  /** Message-IDs with angle brackets, the direct parent first, without repeats. */
  readonly named: readonly string[];
  /** Made by a program, as it says itself (RFC 3834 §5): a vacation notice. */
  readonly isAutomatic: boolean;
}

/** Null: it answers nothing. A report about a message (RFC 6522) is no answer to it. */
export function readAnswering(message: Buffer): Answering | null {
  const { fields } = splitHeader(message);
  const of = (name: string): string[] =>
    findHeaders(fields, name).join(' ').slice(-FIELD_CHARACTERS_MAX).match(NAMED) ?? [];
  // References goes from the beginning of the thread to the parent.
  const named = new Set([...of('in-reply-to'), ...of('references').toReversed()]);
  if (named.size === 0) return null;
  const [type = ''] = findHeaders(fields, 'content-type');
  if (/^multipart\/report\b/i.test(type)) return null;
  const [automatic = 'no'] = findHeaders(fields, 'auto-submitted');
  return {
    named: [...named].slice(0, NAMED_MAX),
    isAutomatic: !/^no\b/i.test(automatic),
  };
}

/** The sent email of the tenant that is named first, or null. Of several with one Message-ID the newest. */
export async function findAnswered(
  pool: Pool,
  tenantId: string,
  named: readonly string[],
): Promise<string | null> {
  // Ours begin with the email's id; those that came by SMTP may have one of their client's.
  const ours = named.map((id) => id.slice(1, id.indexOf('@'))).filter(isUuid);
  const { rows } = await pool.query<{ id: string; message_id: string }>({
    name: 'find-answered',
    text: `select id, message_id from email
      where tenant_id = $1 and id = any ($2::uuid[]) and message_id = any ($3::text[])
      union all
      select e.id, e.message_id from email_search s
      join email e on e.tenant_id = s.tenant_id and e.id = s.email_id
      where s.tenant_id = $1 and s.terms @@ $4::tsquery and e.message_id = any ($3::text[])
      order by id desc limit ${NAMED_MAX * NAMED_MAX}`,
    values: [
      tenantId,
      ours,
      named,
      named.map((id) => `'${messageIdTerm(tenantId, id)}'`).join(' | '),
    ],
  });
  for (const id of named) {
    const found = rows.find((row) => row.message_id === id);
    if (found !== undefined) return found.id;
  }
  return null;
}
