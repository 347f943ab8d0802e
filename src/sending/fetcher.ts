// Fetches the attachments that emails name by URL, after acceptance, then composes the message and lets it go.
//
// In: emails on the work list of queue/prepare.ts, a few at a time, each under a lease. Out: a stored message and
// deliveries that are ready; or, when the files cannot be had, deliveries that failed with a sentence that says which
// file, which host and what to fix. Trouble that may pass is tried again, and each failed try is a fact of the
// timeline. A crash costs a try at most: the lease ends, somebody else claims, and only the first to finish counts.
import { AsyncLocalStorage } from 'node:async_hooks';
import { mkdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { Refusal } from '../access/refusal.ts';
import type { Fault, GuardedDependencies } from '../dns/guarded-http.ts';
import type { Logger } from '../log.ts';
import {
  claimFetches,
  deferFetch,
  failPrepared,
  makeReady,
  type ClaimedFetch,
} from '../queue/prepare.ts';
import type { BlobStore } from '../store/blob.ts';
import { isBlobsUnavailable } from '../store/blobs-unavailable.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { TrackingTokens } from '../tracking/tokens.ts';
import { ATTACHMENTS_MAX_BYTES, base64Size, type SpooledFile } from './attachments.ts';
import { FETCH_MAX_MS, fetchToFile, type ByteBudget } from './fetch.ts';
import { storeMessage } from './message.ts';
import { countFailedTries, readPrepared, type Awaited, type Prepared } from './prepared-email.ts';

export interface FetcherOptions extends GuardedDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly log: Logger;
  /** A folder of its own: it is emptied first. */
  readonly spoolFolder: string;
  /** For html that is tracked. */
  readonly trackingTokens: TrackingTokens;
  /** Deliveries became ready. */
  readonly onReady: () => void;
  /** The pauses between tries; after the last one the email has failed. */
  readonly retryDelaysMs?: readonly number[];
}

export interface Fetcher {
  /** An email may be waiting: look soon. */
  nudge(): void;
  /** Begins nothing new and gives back what is under way. */
  stop(): Promise<void>;
}

/** Emails at a time; their files lie in the spool meanwhile. */
const EMAILS_MAX = 8;
/** Of one tenant, so that one dead host does not hold up everybody. */
const PER_TENANT_MAX = 4;
/** Files of one email at a time. */
const FILES_MAX = 4;
const SWEEP_MS = 2_000;
/** Between two looks, however often it is nudged. */
const LOOK_EVERY_MS = 250;
/** Fetching takes FETCH_MAX_MS at most; composing and writing 60 MB takes seconds. */
const LEASE_MS = 90_000;
const RETRY_DELAYS_MS = [10_000, 60_000, 300_000];
/** Leases that ended without a word, in a row with the tries: it may be what ends the process. */
const CLAIMS_MAX = 20;
const URL_CHARS_SHOWN = 200;

export async function startFetcher(options: FetcherOptions): Promise<Fetcher> {
  const { store, log, retryDelaysMs = RETRY_DELAYS_MS } = options;
  await rm(options.spoolFolder, { recursive: true, force: true });
  await mkdir(options.spoolFolder, { recursive: true, mode: 0o700 });
  const stopping = new AbortController();
  const active = new Map<Promise<void>, ClaimedFetch>();
  let timer: NodeJS.Timeout | undefined;
  let looking: Promise<void> | null = null;
  let lookedAt = -Infinity;
  let isAway = false;

  const plan = (ms: number): void => {
    clearTimeout(timer);
    if (!stopping.signal.aborted) timer = setTimeout(look, ms);
  };
  // In the context of the start, as in jobs/turns.ts.
  const look = AsyncLocalStorage.bind((): void => {
    if (looking !== null) return;
    lookedAt = performance.now();
    looking = claimMore().finally(() => {
      looking = null;
      plan(SWEEP_MS);
    });
  });
  const claimMore = async (): Promise<void> => {
    const room = EMAILS_MAX - active.size;
    if (room === 0 || stopping.signal.aborted) return;
    try {
      const due = await claimFetches(store.pool, {
        max: room,
        leaseMs: LEASE_MS,
        perTenant: PER_TENANT_MAX,
        active: [...active.values()].map(({ tenantId }) => tenantId),
      });
      for (const claimed of due) {
        const work = prepare(claimed).finally(() => {
          active.delete(work);
          nudge(); // there is room again
        });
        active.set(work, claimed);
      }
      isAway = false;
    } catch (error) {
      if (!isAway) log.warn({ err: error }, 'attachments cannot be fetched now; trying again');
      isAway = true;
    }
  };
  const nudge = (): void => plan(Math.max(0, lookedAt + LOOK_EVERY_MS - performance.now()));

  /** Never rejects: what the database did not take is left to the lease. */
  const prepare = async (claimed: ClaimedFetch): Promise<void> => {
    const folder = join(options.spoolFolder, `${claimed.emailId}-${claimed.attempt}`);
    try {
      await mkdir(folder, { mode: 0o700 });
      await prepareIn(claimed, folder);
    } catch (error) {
      if (!stopping.signal.aborted) {
        log.error(
          { err: error, email_id: claimed.emailId, tenant_id: claimed.tenantId },
          'an email could not be prepared',
        );
      }
      await setAside(claimed, isBlobsUnavailable(error)).catch((late: unknown) =>
        log.warn({ err: late }, 'a lease is left to end by itself'),
      );
    }
    await rm(folder, { recursive: true, force: true }).catch((error: unknown) =>
      log.warn({ err: error, folder }, 'the spool of a fetch could not be emptied'),
    );
  };

  /** Nothing that speaks against the email: it is tried again, the next time later, since a full disk takes a while. */
  const setAside = (claimed: ClaimedFetch, isStoreAway = false): Promise<boolean> =>
    deferFetch(store.pool, claimed, {
      delayMs: stopping.signal.aborted
        ? 0
        : (retryDelaysMs[Math.min(claimed.attempt, retryDelaysMs.length) - 1] ?? 0),
      error: 'interrupted',
      // It may be away for longer than an email is tried.
      isCounted: !isStoreAway,
    });

  const prepareIn = async (claimed: ClaimedFetch, folder: string): Promise<void> => {
    const email = await readPrepared(store, claimed, options.trackingTokens);
    if (claimed.attempt > CLAIMS_MAX || email === null) {
      await giveUp(claimed, {
        kind: 'permanent',
        reason: 'The attachments of this email could not be fetched: it was interrupted too often.',
      });
      return;
    }
    const fetched = await fetchAll(email, folder);
    if (stopping.signal.aborted) {
      await setAside(claimed);
      return;
    }
    if ('kind' in fetched) await putOff(claimed, fetched);
    else
      await finish(claimed, { email, attachments: fetched }).catch(async (error: unknown) => {
        if (!(error instanceof Refusal)) throw error;
        await giveUp(claimed, { kind: 'permanent', reason: error.message });
      });
  };

  /** The attachments with their bytes, or the first fault. When it settles, nothing is written to the folder any more. */
  const fetchAll = async (email: Prepared, folder: string): Promise<readonly Awaited[] | Fault> => {
    const given = email.attachments.reduce(
      (sum, { content }) =>
        sum + (content !== null && 'sizeBytes' in content ? base64Size(content.sizeBytes) : 0),
      0,
    );
    const budget: ByteBudget = { left: Math.floor((ATTACHMENTS_MAX_BYTES - given) / 4) * 3 };
    // The first fault ends the other files as well.
    const fault = new AbortController();
    const signal = AbortSignal.any([
      stopping.signal,
      fault.signal,
      AbortSignal.timeout(FETCH_MAX_MS),
    ]);
    const attachments = [...email.attachments];
    const open = [...attachments.entries()].filter(([, { content }]) => content === null);
    let first: Fault | null = null;
    const fetchNext = async (): Promise<void> => {
      for (let next = open.shift(); next !== undefined; next = open.shift()) {
        const [index, one] = next;
        if (one.url === null || first !== null) return;
        const path = join(folder, String(index));
        const got = await fetchToFile(options, { url: one.url, path, budget, signal });
        if (got.kind === 'fetched') {
          const content: SpooledFile = { path, sizeBytes: got.sizeBytes };
          attachments[index] = one.withContent(content, got.contentType);
        } else {
          first ??= { kind: got.kind, reason: describe(one, got.reason) };
          fault.abort();
        }
      }
    };
    const lines = Array.from({ length: FILES_MAX }, () =>
      fetchNext().catch((error: unknown) => {
        fault.abort();
        throw error;
      }),
    );
    for (const line of await Promise.allSettled(lines)) {
      if (line.status === 'rejected') throw line.reason as Error;
    }
    return first ?? attachments;
  };

  const putOff = async (claimed: ClaimedFetch, fault: Fault): Promise<void> => {
    const failed = await countFailedTries(store.pool, claimed);
    const delayMs = retryDelaysMs[failed];
    if (fault.kind !== 'transient' || delayMs === undefined) {
      await giveUp(claimed, fault);
      return;
    }
    await store.transact(async (client) => {
      const delay = Math.round(delayMs * (1 + Math.random() / 5));
      if (!(await deferFetch(client, claimed, { delayMs: delay, error: fault.reason }))) return;
      await client.query({
        text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
          values ($1, $2, $3, now(), 'attachment_fetch_failed', $4)`,
        values: [
          claimed.tenantId,
          claimed.emailId,
          newId(),
          JSON.stringify({
            attempt: failed + 1,
            message: fault.reason,
            next_attempt_at: new Date(Date.now() + delay).toISOString(),
          }),
        ],
      });
    });
  };

  const giveUp = async (claimed: ClaimedFetch, fault: Fault): Promise<void> => {
    const cause = fault.kind === 'refused' ? 'attachment_refused' : 'attachment_unavailable';
    const staged = await store.transact((client) =>
      failPrepared(client, claimed, { cause, reply: fault.reason }),
    );
    for (const key of staged ?? []) await options.blobs.remove(key);
  };

  const finish = async (
    claimed: ClaimedFetch,
    { email, attachments }: { readonly email: Prepared; readonly attachments: readonly Awaited[] },
  ): Promise<void> => {
    const { tenantId, emailId } = claimed;
    const stored = await storeMessage(options.blobs, { ...email.message, attachments });
    // Under their ids of before: the API has shown them.
    const named = stored.attachments.map((one, index) => ({
      ...one,
      id: attachments[index]?.id ?? one.id,
    }));
    const isOurs = await store.transact(async (client) => {
      if (!(await makeReady(client, tenantId, emailId, { ...stored, attachments: named }))) {
        return false;
      }
      await client.query({
        text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
          values ($1, $2, $3, now(), 'attachments_fetched', $4)`,
        values: [
          tenantId,
          emailId,
          newId(),
          JSON.stringify({
            attachments: attachments.filter(({ url }) => url !== null).length,
            size_bytes: stored.rawSizeBytes,
          }),
        ],
      });
      return true;
    });
    if (!isOurs) {
      if (stored.blobKey !== null) await options.blobs.remove(stored.blobKey);
      return;
    }
    options.onReady();
    for (const { content } of email.attachments) {
      if (content !== null && 'blobKey' in content) await options.blobs.remove(content.blobKey);
    }
  };

  look();
  return {
    nudge,
    async stop() {
      stopping.abort();
      clearTimeout(timer);
      await looking;
      await Promise.all(active.keys());
    },
  };
}

/** What the tenant reads: the file, where it was to come from, what is wrong. */
function describe({ filename, url }: Awaited, reason: string): string {
  const shown = url === null ? '' : shownUrl(url);
  return `The attachment ${JSON.stringify(filename ?? 'without a name')} could not be fetched from ${shown}: ${reason}.`;
}

/** Without the query, which may hold a signature that nobody else should read. */
function shownUrl(url: string): string {
  return url.replace(/[?#].*$/s, '').slice(0, URL_CHARS_SHOWN);
}
