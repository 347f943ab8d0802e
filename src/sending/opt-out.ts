// What the topic of an email means for its recipients at acceptance: who does not want it, and the link by which the only
// recipient can say so.
import type { PreferenceLinks } from '../audience/preference-links.ts';
import { findWishes } from '../audience/wanting.ts';
import { normalizedAddress, type Mailbox } from '../mail/address.ts';
import type { Store } from '../store/orm.ts';
import type { UnsubscribeLink } from '../templates/render.ts';
import type { CompleteEmail } from './complete.ts';
import type { PlannedEmail } from './request.ts';

export interface OptOut {
  /** Of the recipients: those that do not want this topic, normalized. */
  readonly unwanted: ReadonlySet<string>;
  /** The contact that is the only recipient; null: there is none, or no topic. */
  readonly contactId: string | null;
}

/** In the order of the emails; no statement where none has a topic. */
export async function findOptOuts(
  store: Store,
  tenantId: string,
  emails: readonly { readonly recipients: readonly Mailbox[]; readonly topicId: string | null }[],
): Promise<readonly OptOut[]> {
  const asked = emails.flatMap(({ recipients, topicId }, number) =>
    topicId === null ? [] : recipients.map(({ address }) => ({ number, topicId, address })),
  );
  const wishes = await findWishes(
    store.pool,
    asked.map(({ topicId, address }) => ({
      tenantId,
      recipient: address,
      topicId,
      isBroadcast: false,
    })),
  );
  const all = emails.map(() => ({ unwanted: new Set<string>(), contactId: null as string | null }));
  for (const [index, { number, address }] of asked.entries()) {
    const of = all[number]!;
    const { isUnwanted, contactId } = wishes[index]!;
    if (isUnwanted) of.unwanted.add(normalizedAddress(address));
    if (emails[number]!.recipients.length === 1) of.contactId = contactId;
  }
  return all;
}

/** Two names, as in broadcasts. */
const PLACEHOLDER = /\{\{\{\s*(?:RESEND_)?UNSUBSCRIBE_URL\s*\}\}\}/g;

/** The link of an email by which its only recipient opts out of its topic. */
export function optOutLink(
  links: PreferenceLinks,
  { topicId, recipients }: Pick<PlannedEmail, 'topicId' | 'recipients'>,
  about: { readonly tenantId: string; readonly id: string; readonly contactId: string | null },
): UnsubscribeLink {
  const { tenantId, id: emailId, contactId } = about;
  if (topicId === null) return { whyNot: 'the email has no `topic_id`' };
  if (recipients.length > 1) return { whyNot: 'the email has several recipients' };
  if (contactId === null) return { whyNot: 'its recipient is not a contact' };
  return { url: links.url({ tenantId, contactId, topicId, broadcastId: null, emailId }) };
}

/**
 * The email with its link: in its bodies where they have the placeholder, and in the headers of RFC 2369 and RFC 8058
 * unless the caller wrote List-Unsubscribe himself. As it was where it has none; the bodies as well where a template made
 * them, which had the link, and values that are not looked at for placeholders.
 */
export function offerOptOut(email: CompleteEmail, link: UnsubscribeLink): CompleteEmail {
  if (!('url' in link)) return email;
  const { url } = link;
  const fill = (body: string | null): string | null =>
    email.template === null ? (body?.replace(PLACEHOLDER, url) ?? null) : body;
  const isSet = email.headers.some(([name]) => /^list-unsubscribe(-post)?$/i.test(name));
  return {
    ...email,
    html: fill(email.html),
    text: fill(email.text),
    headers: isSet ? email.headers : [...email.headers, ...optOutHeaders(url)],
  };
}

/** One click without a page (RFC 8058), or the page. */
export const optOutHeaders = (url: string): readonly (readonly [string, string])[] => [
  ['List-Unsubscribe', `<${url}>`],
  ['List-Unsubscribe-Post', 'List-Unsubscribe=One-Click'],
];
