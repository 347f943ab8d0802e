// What a reader decides through the link in an email: which topics, or nothing at all. The link is the credential: who
// has it got the mail. Reading changes nothing, since scanners follow every link; the same decision twice changes nothing
// the second time. A decision is stored by contact-changes.ts, so webhooks hear of it, and noted at the email
// and the broadcast whose link it was.
import type { Pool, PoolClient } from 'pg';
import { normalizedAddress } from '../mail/address.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { noteLateChanges } from '../timeline/late-changes.ts';
import { changeContact, setSubscriptions, upsertContact } from './contact-changes.ts';
import { lockContact } from './contact-rows.ts';
import type { PreferenceLinks, PreferenceTarget } from './preference-links.ts';
import { TOPICS_MAX } from './topics.ts';

export interface TopicPreference {
  readonly id: string;
  readonly name: string;
  readonly description: string | null;
  /** By choice, else by the topic's default. */
  readonly isWanted: boolean;
  /** Public, or wanted. */
  readonly isShown: boolean;
}

export interface Preferences {
  /** Null: the contact was removed, and nothing says any more whom the link was made for. */
  readonly address: string | null;
  /** The contact was removed, and the address is no contact now. */
  readonly isGone: boolean;
  readonly isUnsubscribed: boolean;
  readonly topics: readonly TopicPreference[];
}

/** What a form says. */
export interface PreferenceChoice {
  /** No broadcasts and none of the topics, whatever `topics` says. */
  readonly isUnsubscribed: boolean;
  /** Of these and no others; what the reader cannot see is passed over. */
  readonly topics: readonly { readonly id: string; readonly isWanted: boolean }[];
}

/** From where a decision came. */
export interface Reader {
  readonly address: string | null;
  readonly userAgent: string | null;
}

export interface SavedPreferences {
  readonly before: Preferences;
  readonly after: Preferences;
}

/** All of them answer null for a token that we did not make. */
export interface PreferenceVerbs {
  /** The same text for all links of a contact. */
  nameOf(token: string): string | null;
  read(token: string): Promise<Preferences | null>;
  save(token: string, choice: PreferenceChoice, reader: Reader): Promise<SavedPreferences | null>;
  /** RFC 8058: out of the topic that the link names, else out of all broadcasts. */
  unsubscribe(token: string, reader: Reader): Promise<SavedPreferences | null>;
}

/** Topics that one page shows and one form changes, by name: all of a tenant, so that nothing is left of "all". */
export const PREFERENCE_TOPICS_MAX = TOPICS_MAX;
const USER_AGENT_MAX_CHARACTERS = 500;

export function createPreferenceVerbs(d: {
  readonly store: Store;
  readonly links: Pick<PreferenceLinks, 'open'>;
  readonly now: () => Date;
}): PreferenceVerbs {
  const { store, links } = d;
  const change = async (
    token: string,
    reader: Reader,
    choose: (before: Preferences, target: PreferenceTarget) => PreferenceChoice,
  ): Promise<SavedPreferences | null> => {
    const target = links.open(token);
    if (target === null) return null;
    return store.transact((client) => decide(client, { target, choose, reader, at: d.now() }));
  };
  return {
    nameOf(token) {
      const target = links.open(token);
      return target === null ? null : `${target.tenantId} ${target.contactId}`;
    },

    async read(token) {
      const target = links.open(token);
      if (target === null) return null;
      return readPreferences(store.pool, target, await findPerson(store.pool, target));
    },

    save: (token, choice, reader) =>
      change(token, reader, ({ topics }) =>
        choice.isUnsubscribed
          ? { isUnsubscribed: true, topics: topics.map(({ id }) => ({ id, isWanted: false })) }
          : choice,
      ),

    unsubscribe: (token, reader) =>
      change(token, reader, ({ isUnsubscribed, isGone, topics }, { topicId }) => {
        const topic = topics.find(({ id }) => id === topicId);
        // Of a topic that is gone, or where nothing says any more what else they get: whoever clicks wants no more of it.
        return topic === undefined || isGone
          ? {
              isUnsubscribed: true,
              topics: topic === undefined ? [] : [{ ...topic, isWanted: false }],
            }
          : { isUnsubscribed, topics: [{ ...topic, isWanted: false }] };
      }),
  };
}

interface Person {
  /** Null: no contact, not any more. */
  readonly contactId: string | null;
  /** As it is shown and mailed to. */
  readonly address: string | null;
}

type Queryable = Pick<Pool | PoolClient, 'query'>;

/**
 * Whom the link was made for. A contact that was removed may be there again as another one, by an import for instance: the
 * broadcast and the email of the link still know the address.
 */
async function findPerson(db: Queryable, target: PreferenceTarget): Promise<Person> {
  const { tenantId, contactId, broadcastId, emailId } = target;
  const { rows } = await db.query<{ email: string }>({
    text: 'select email from contact where tenant_id = $1 and id = $2',
    values: [tenantId, contactId],
  });
  if (rows[0] !== undefined) return { contactId, address: rows[0].email };
  const { rows: sent } = await db.query<{ address: string | null }>({
    text: `select coalesce(
        (select address from broadcast_recipient
          where tenant_id = $1 and broadcast_id = $2 and contact_id = $3),
        (select d.recipient from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
          where d.tenant_id = $1 and d.email_id = $4 and d.position = 0 and e.recipient_count = 1)) as address`,
    values: [tenantId, broadcastId, contactId, emailId],
  });
  const address = sent[0]?.address ?? null;
  if (address === null) return { contactId: null, address: null };
  const { rows: again } = await db.query<{ id: string; email: string }>({
    text: 'select id, email from contact where tenant_id = $1 and address = $2',
    values: [tenantId, normalizedAddress(address)],
  });
  return { contactId: again[0]?.id ?? null, address: again[0]?.email ?? address };
}

async function readPreferences(
  db: Queryable,
  { tenantId, topicId }: PreferenceTarget,
  { contactId, address }: Person,
): Promise<Preferences> {
  const { rows: contacts } = await db.query<{ unsubscribed: boolean }>({
    text: 'select unsubscribed from contact where tenant_id = $1 and id = $2',
    values: [tenantId, contactId],
  });
  // Beside what is shown: what was chosen once, so that a decision can be undone, and what the link is about.
  const { rows: topics } = await db.query<TopicPreference>({
    text: `select * from (
        select t.id, t.name, t.description,
          coalesce(s.subscription, t.default_subscription) = 'opt_in' as "isWanted",
          t.visibility = 'public'
            or coalesce(s.subscription, t.default_subscription) = 'opt_in' as "isShown",
          s.topic_id is not null or t.id is not distinct from $3::uuid as is_known
        from topic t left join contact_topic s
          on s.tenant_id = t.tenant_id and s.topic_id = t.id and s.contact_id = $2
        where t.tenant_id = $1) k
      where "isShown" or is_known
      order by "isShown" desc, lower(name), id limit ${PREFERENCE_TOPICS_MAX}`,
    values: [tenantId, contactId, topicId],
  });
  const [contact] = contacts;
  return {
    address,
    isGone: contact === undefined,
    isUnsubscribed: contact?.unsubscribed === true,
    topics: topics.map(({ id, name, description, isWanted, isShown }) => ({
      id,
      name,
      description,
      isWanted,
      isShown,
    })),
  };
}

async function decide(
  client: PoolClient,
  about: {
    readonly target: PreferenceTarget;
    readonly choose: (before: Preferences, target: PreferenceTarget) => PreferenceChoice;
    readonly reader: Reader;
    readonly at: Date;
  },
): Promise<SavedPreferences> {
  const { target, reader, at } = about;
  const { tenantId } = target;
  let person = await findPerson(client, target);
  if (person.contactId !== null) {
    const held = await lockContact(client, tenantId, person.contactId);
    if (held === null) person = { ...person, contactId: null }; // removed a moment ago
  }
  const before = await readPreferences(client, target, person);
  const choice = about.choose(before, target);
  const wanted = new Map(choice.topics.map(({ id, isWanted }) => [id, isWanted]));
  const topics = before.topics
    .filter(({ id, isWanted }) => wanted.has(id) && wanted.get(id) !== isWanted)
    .map(({ id, isWanted }) => ({
      id,
      subscription: isWanted ? ('opt_out' as const) : ('opt_in' as const),
    }));
  if (person.contactId !== null) {
    if (choice.isUnsubscribed !== before.isUnsubscribed) {
      const change = { unsubscribed: choice.isUnsubscribed };
      await changeContact(client, tenantId, person.contactId, change, at);
    }
    if (topics.length > 0) await setSubscriptions(client, tenantId, person.contactId, topics, at);
  } else if (person.address !== null && choice.isUnsubscribed) {
    // Kept as a contact that wants nothing: the next file with this address must not bring it back as one that does.
    const contact = { email: person.address, unsubscribed: true, topics };
    const { id } = await upsertContact(client, tenantId, contact, { at, tells: true });
    person = { ...person, contactId: id };
  }
  const after = await readPreferences(client, target, person);
  const isLess =
    (after.isUnsubscribed && !before.isUnsubscribed) ||
    topics.some(({ subscription }) => subscription === 'opt_out');
  if (isLess) await note(client, { target, reader, at });
  return { before, after };
}

/** Once for each email and for each recipient of a broadcast, whatever is undone later. */
async function note(
  client: PoolClient,
  {
    target,
    reader,
    at,
  }: { readonly target: PreferenceTarget; readonly reader: Reader; readonly at: Date },
): Promise<void> {
  const { tenantId, contactId, broadcastId, emailId } = target;
  if (broadcastId !== null) {
    await client.query({
      text: `update broadcast_recipient set unsubscribed_at = $4
        where tenant_id = $1 and broadcast_id = $2 and contact_id = $3 and unsubscribed_at is null`,
      values: [tenantId, broadcastId, contactId, at],
    });
  }
  if (emailId === null) return;
  // The lock on the contact keeps a second one away; an email that is gone has nothing to note.
  await client.query({
    text: `insert into engagement
        (tenant_id, email_id, id, kind, at, remote_address, user_agent, broadcast_id)
      select $1, $2, $3, 'unsubscribed', $4, $5, $6, $7
      where exists (select 1 from email where tenant_id = $1 and id = $2 for key share)
        and not exists (select 1 from engagement
          where tenant_id = $1 and email_id = $2 and kind = 'unsubscribed')`,
    values: [
      tenantId,
      emailId,
      newId(),
      at,
      reader.address,
      reader.userAgent?.slice(0, USER_AGENT_MAX_CHARACTERS).toWellFormed() ?? null,
      broadcastId,
    ],
  });
  await noteLateChanges(client, [{ tenantId, emailId }]);
}
