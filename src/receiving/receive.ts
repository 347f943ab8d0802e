// Takes a complete message: stores it once for every tenant that it is for, before it is acknowledged, with the forwards
// that follow from it and the sent email that it answers. No tenant sees another's recipients. A second arrival is
// acknowledged with the ids of the first. A message that cannot be read at once is stored all the same, and read later
// (late-reader.ts).
import { DatabaseError } from 'pg';
import { normalizedAddress } from '../mail/address.ts';
import type { Parser } from '../mail/parse-aside.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { DatabaseBusy } from '../store/unavailable.ts';
import type { Arrival, Receiver } from './arrival.ts';
import { digestOf } from './digest.ts';
import { findAnswered, readAnswering } from './replies.ts';
import { NotAsked, type Copy, type CopyWriter } from './store-copies.ts';

export interface Receiving {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly write: CopyWriter;
  /** Null after a second or two: the client and those behind it wait for this. */
  readonly parse: Parser;
  /** A message was stored that has not been read. */
  readonly onUnread: () => void;
  /** A message was stored that is to be forwarded. */
  readonly onForwards: () => void;
}

/**
 * Stores the message for every tenant that it is for; its ids, of a second arrival those of the first. Durable once it
 * resolves. Rejects when the database or the disk is away, and then the client must come again.
 */
export async function receive(d: Receiving, arrival: Arrival): Promise<readonly string[]> {
  const copies = await copiesOf(d, arrival);
  const blobs = copies.flatMap(({ blobKey }) => blobKey ?? []);
  const removeBlobs = (keys: readonly string[]): Promise<unknown> =>
    Promise.allSettled(keys.map((key) => d.blobs.remove(key)));
  let ids: readonly string[];
  // Until the rows are written nothing can name the blobs; after a lost commit nobody knows, so they stay.
  let isCertainlyLost = true;
  try {
    for (const key of blobs) await d.blobs.put(key, arrival.raw);
    isCertainlyLost = false;
    ids = await d.write(copies);
  } catch (error) {
    if (isCertainlyLost || isRefused(error)) await removeBlobs(blobs);
    throw error;
  }
  const stored = copies.filter(({ id }, at) => ids[at] === id);
  await removeBlobs(copies.flatMap((copy) => (stored.includes(copy) ? [] : (copy.blobKey ?? []))));
  if (stored.some(({ parsed }) => parsed === null)) d.onUnread();
  if (stored.some(({ forwards }) => forwards.length > 0)) d.onForwards();
  return ids;
}

async function copiesOf(d: Receiving, arrival: Arrival): Promise<readonly Copy[]> {
  const { raw, traceSizeBytes } = arrival;
  const parsed = await d.parse(raw);
  const digest = digestOf(arrival);
  const answering = readAnswering(raw.subarray(traceSizeBytes));
  const byTenant = Map.groupBy(arrival.receivers, ({ tenantId }) => tenantId);
  return Promise.all(
    [...byTenant].map(async ([tenantId, all]): Promise<Copy> => {
      const receivers = distinct(all);
      const refused = distinct(arrival.unrouteable.filter((one) => one.tenantId === tenantId));
      const recipients = receivers.map(({ recipient }) => recipient);
      const emailId =
        answering === null ? null : await findAnswered(d.store.pool, tenantId, answering.named);
      return {
        tenantId,
        id: newId(),
        digest: digest(recipients),
        mailFrom: arrival.mailFrom,
        receivedFor: recipients,
        decisions: [...receivers, ...refused].map(({ decision }) => decision),
        authentication: arrival.authentication,
        client: arrival.client,
        receivedAt: arrival.receivedAt,
        raw: raw.length <= INLINE_MAX_BYTES ? raw : null,
        blobKey: raw.length <= INLINE_MAX_BYTES ? null : newId(),
        rawSizeBytes: raw.length,
        traceSizeBytes,
        parsed,
        forwards: forwardsOf(receivers),
        answers: emailId === null ? null : { emailId, isAutomatic: answering!.isAutomatic },
      };
    }),
  );
}

/** Each rule once, for the first recipient that leads to it. */
function forwardsOf(receivers: readonly Receiver[]): Copy['forwards'] {
  const byRule = new Map<string, string>();
  for (const { recipient, decision } of receivers) {
    const ruleId = decision.forwarding_rule_id;
    if (ruleId !== null && !byRule.has(ruleId)) byRule.set(ruleId, recipient);
  }
  return [...byRule].map(([ruleId, recipient]) => ({ ruleId, recipient }));
}

/** The database was not asked, or said no itself, and not because it was ending. */
const isRefused = (error: unknown): boolean =>
  error instanceof DatabaseBusy ||
  error instanceof NotAsked ||
  (error instanceof DatabaseError && !/^(08|57P)/.test(error.code ?? '08'));

function distinct(receivers: readonly Receiver[]): readonly Receiver[] {
  const keyed = receivers.map((one) => [normalizedAddress(one.recipient), one] as const);
  return [...new Map(keyed.toReversed()).values()].toReversed();
}
