// Accepting a batch: every email is checked and completed as if it came alone, then all of them are stored in one
// transaction. Strict, one wrong email refuses the batch and every issue is told with its place; permissive, the right
// ones are stored and the wrong ones are named beside them.
import type { Caller } from '../access/keys.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import type { NewEmail } from '../queue/enqueue.ts';
import { replayOf, type AcceptDependencies, type Sending } from './accept.ts';
import type { Spooled } from './attachments.ts';
import { completeEmail, type CompleteEmail } from './complete.ts';
import { newId } from '../store/id.ts';
import { contentBytes } from './filled-budget.ts';
import { hashRequest, type IdempotentRequest } from './idempotency.ts';
import { findSuppressed, makeEmail } from './new-email.ts';
import type { UnsubscribeLink } from '../templates/render.ts';
import { findOptOuts, offerOptOut, optOutLink } from './opt-out.ts';
import {
  meaningOf,
  planRequest,
  readRequest,
  type PlannedEmail,
  type ReadRequest,
  type SendEmailRequest,
} from './request.ts';
import { removeBlobs, storeEmails, type Accepted } from './store-emails.ts';

/** An item whose fields are not even of the right types. */
export interface Misshapen {
  readonly refusal: Refusal;
  readonly given: unknown;
}

export interface BatchSending extends Sending {
  readonly requests: readonly SendEmailRequest[];
  /** By their index; something empty stands for them in `requests`. */
  readonly misshapen: ReadonlyMap<number, Misshapen>;
  readonly isPermissive: boolean;
  readonly spooled: Spooled;
}

/** One email that was left out of a permissive batch. */
export interface BatchError {
  readonly index: number;
  readonly message: string;
}

export const BATCH_MAX = 100;
/** Of `html` and `text` of all its emails: what a body can hold, which templates could make a hundred times as much of. */
const CONTENTS_MAX_BYTES = 48 * 1024 * 1024;
const SCOPE = '/emails/batch';

/**
 * Accepts a batch of 1 to 100 emails. The answer is `{data: [{object, id}]}` in the order of the requests, and
 * `errors` when permissive. Throws a Refusal that says what to fix.
 */
export async function acceptBatch(
  d: AcceptDependencies,
  caller: Caller,
  send: BatchSending,
): Promise<Accepted> {
  const { requests, misshapen } = send;
  if (requests.length === 0 || requests.length > BATCH_MAX) {
    const message = `The \`body\` is an array of ${requests.length} emails; 1 to ${BATCH_MAX} are allowed.`;
    throw refuseFields([{ path: 'body', message }]);
  }
  const reads = requests.map((request, index) => {
    const wrong = misshapen.get(index);
    return wrong === undefined ? readRequest(request, send.spooled) : wrong.refusal;
  });
  const key = keyOf(caller, send, reads);
  const replay = await replayOf(d, key);
  return replay ?? d.filled.share((hold) => acceptAll(d, caller, { send, reads, key, hold }));
}

async function acceptAll(
  d: AcceptDependencies,
  caller: Caller,
  about: {
    readonly send: BatchSending;
    readonly reads: readonly (ReadRequest | Refusal)[];
    readonly key: IdempotentRequest | null;
    readonly hold: (email: CompleteEmail) => void;
  },
): Promise<Accepted> {
  const { send, reads, key, hold } = about;
  const { isPermissive } = send;
  const refusals = new Map<number, Refusal>();
  let contentsBytes = 0;
  const planned = await planAll(d, caller, reads, refusals);
  const complete = await attemptEach(planned, refusals, async (one): Promise<Complete | null> => {
    if (one === null) return null;
    const email = await completeEmail(d, caller, one.email, one.link);
    const sizeBytes = contentBytes(email);
    if (contentsBytes + sizeBytes > CONTENTS_MAX_BYTES) throw tooMuchContent();
    hold(email);
    contentsBytes += sizeBytes;
    return { ...one, email };
  });
  if (!isPermissive) refuseAll(refusals);

  const emails = await makeAll(d, caller, { send, complete, refusals });
  const data = emails.map(({ id }) => ({ object: 'email', id }));
  const errors = [...refusals]
    .toSorted(([a], [b]) => a - b)
    .map(([index, { message }]): BatchError => ({ index, message }));
  const body = isPermissive ? { data, errors } : { data };
  return storeEmails(d, emails, { key, answer: { status: 200, body } });
}

interface Planned {
  readonly id: string;
  readonly email: PlannedEmail;
  readonly unwanted: ReadonlySet<string>;
  readonly link: UnsubscribeLink;
}

interface Complete extends Planned {
  readonly email: CompleteEmail;
}

/** With what their topics mean, asked in one statement. */
async function planAll(
  d: AcceptDependencies,
  { tenantId }: Caller,
  reads: readonly (ReadRequest | Refusal)[],
  refusals: Map<number, Refusal>,
): Promise<readonly (Planned | null)[]> {
  const emails = await attemptEach(reads, refusals, (read) => {
    if (read instanceof Refusal) throw read;
    return planRequest(read, d.now());
  });
  const wanted = emails.filter((email) => email !== null);
  const optOuts = await findOptOuts(d.store, tenantId, wanted);
  const optOutOf = new Map(wanted.map((email, index) => [email, optOuts[index]!]));
  return emails.map((email) => {
    if (email === null) return null;
    const { unwanted, contactId } = optOutOf.get(email)!;
    const id = newId();
    const link = optOutLink(d.preferenceLinks, email, { tenantId, id, contactId });
    return { id, email, unwanted, link };
  });
}

const tooMuchContent = (): Refusal =>
  refuseFields([
    {
      path: 'template',
      message: `The \`template\` makes the batch too large: \`html\` and \`text\` of its emails have more than ${CONTENTS_MAX_BYTES} bytes together; send fewer at once.`,
    },
  ]);

/** Composes one after the other, so that only one message is held at a time. */
async function makeAll(
  d: AcceptDependencies,
  caller: Caller,
  about: {
    readonly send: BatchSending;
    readonly complete: readonly (Complete | null)[];
    readonly refusals: Map<number, Refusal>;
  },
): Promise<readonly NewEmail[]> {
  const { send, complete, refusals } = about;
  const emails = complete.flatMap((one) => (one === null ? [] : [one.email]));
  const suppressed = await findSuppressed(d.store, caller.tenantId, emails);
  const made: NewEmail[] = [];
  try {
    await attemptEach(complete, refusals, async (one) => {
      if (one === null) return null;
      const email = await makeEmail(d, offerOptOut(one.email, one.link), {
        ...send,
        id: one.id,
        isOfBatch: true,
        caller,
        suppressed,
        unwanted: one.unwanted,
      });
      made.push(email);
      return email;
    });
    if (!send.isPermissive) refuseAll(refusals);
    return made;
  } catch (error) {
    await removeBlobs(d.blobs, made); // nothing was stored yet
    throw error;
  }
}

/** Does the work for each; null where it was refused, and why, by its index. Every other error ends it. */
async function attemptEach<T, R>(
  items: readonly T[],
  refusals: Map<number, Refusal>,
  work: (item: T) => R | Promise<R>,
): Promise<(R | null)[]> {
  const results: (R | null)[] = [];
  for (const [index, item] of items.entries()) {
    try {
      results.push(await work(item));
    } catch (error) {
      if (!(error instanceof Refusal) || error.status >= 500) throw error;
      refusals.set(index, error);
      results.push(null);
    }
  }
  return results;
}

/** Every issue of every email, each with its place in the batch; returns when there is none. */
function refuseAll(refusals: ReadonlyMap<number, Refusal>): void {
  const [first] = [...refusals].toSorted(([a], [b]) => a - b);
  if (first === undefined) return;
  const issues = [...refusals]
    .toSorted(([a], [b]) => a - b)
    .flatMap(([index, refusal]) => placed(index, refusal));
  // What has another status alone (a template that does not exist) is a wrong field of a batch.
  throw refuseFields(issues, first[1].status === 422 ? first[1].code : 'validation_error');
}

function placed(index: number, { code, message, issues }: Refusal): readonly Issue[] {
  if (issues.length === 0) {
    const path = code === 'not_found' ? `${index}.template.id` : String(index);
    return [{ path, message: `\`${path}\`: ${message.replace(/\.?$/, '.')}` }];
  }
  return issues.map((issue) => {
    const path = `${index}.${issue.path}`;
    return { path, message: issue.message.replaceAll(`\`${issue.path}\``, `\`${path}\``) };
  });
}

/** Null without a key, and where no answer can have been stored for such a batch. */
function keyOf(
  caller: Caller,
  { idempotencyKey, requests, misshapen, isPermissive }: BatchSending,
  reads: readonly (ReadRequest | Refusal)[],
): IdempotentRequest | null {
  if (idempotencyKey === null) return null;
  const meanings = reads.map((read, index) => {
    const email = read instanceof Refusal ? null : read.email;
    if (email !== null) return meaningOf(email);
    // Spooled content has another placeholder every time; what is wrong about it is among the issues.
    const given = misshapen.has(index) ? misshapen.get(index)?.given : requests[index];
    const isObject = typeof given === 'object' && given !== null && !Array.isArray(given);
    return { refused: isObject ? { ...given, attachments: null } : given, issues: issuesOf(read) };
  });
  const isHopeless = reads.some((read) => read instanceof Refusal || read.email === null);
  if (isHopeless && !isPermissive) return null;
  const hash = hashRequest({ isPermissive, emails: meanings });
  return { tenantId: caller.tenantId, scope: SCOPE, key: idempotencyKey, hash };
}

const issuesOf = (read: ReadRequest | Refusal): readonly Issue[] =>
  read instanceof Refusal ? read.issues : [...read.missing, ...read.issues];
