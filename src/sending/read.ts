// Reads a tenant's emails: one of them, or a page of the list, newest first.
import { checkPage, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { Email, EmailContent } from '../store/email.ts';
import type { Store } from '../store/orm.ts';

export type EmailRecord = InstanceType<typeof Email.class> & {
  readonly content: InstanceType<typeof EmailContent.class>;
};
export interface EmailPage {
  readonly items: readonly InstanceType<typeof Email.class>[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A page of the tenant's emails. */
export async function listEmails(
  store: Store,
  tenantId: string,
  page: PageRequest,
): Promise<EmailPage> {
  const cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  if (at !== null && (await em.count(Email, { tenantId, id: at })) === 0) refuseCursor(cursor);
  const rows = await em.find(
    Email,
    {
      tenantId,
      ...(cursor.after === null ? {} : { id: { $lt: cursor.after } }),
      ...(cursor.before === null ? {} : { id: { $gt: cursor.before } }),
    },
    { orderBy: { id: cursor.before === null ? 'desc' : 'asc' }, limit: cursor.limit + 1 },
  );
  return toPage(rows, cursor);
}

/** The tenant's email with its content, or null: missing and foreign are the same. */
export async function findEmail(
  store: Store,
  tenantId: string,
  id: string,
): Promise<EmailRecord | null> {
  const em = store.em();
  const email = await em.findOne(Email, { tenantId, id });
  if (email === null) return null;
  const content = await em.findOneOrFail(
    EmailContent,
    { tenantId, emailId: id },
    { exclude: ['raw'] },
  );
  return Object.assign(email, { content }) as unknown as EmailRecord;
}
