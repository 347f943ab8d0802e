// MTA-STS (RFC 8461): whether a domain publishes a policy, what it says, and which of its hosts it lets us send to.
//
// In: a domain, the DNS, a cache that outlives us, a way to fetch. Out: the policy that is in force, or none; never an
// exception for what the world said. A policy that was seen holds until its max_age: neither a record that is gone nor a
// fetch that fails ends it earlier, and only a new id in the record lets it be fetched again. At first contact a failure
// means that there is no policy, and the next try is five minutes away; a policy that another process stores by then
// holds all the same. Certificates are judged in tls-policy.ts.

import { createAnswerCache } from './answer-cache.ts';
import type { Resolver } from './resolver.ts';

export type StsMode = 'enforce' | 'testing' | 'none';

/** A policy as its domain wrote it. */
export interface StsPolicy {
  readonly mode: StsMode;
  /** Lower case; `*.` stands for one label. Empty only in mode `none`. */
  readonly mx: readonly string[];
  /** At most a year. */
  readonly maxAgeSeconds: number;
  /** The file, for reports. */
  readonly raw: string;
}

export interface KnownPolicy extends StsPolicy {
  readonly id: string;
  /** How long it still holds; above 0. */
  readonly leftMs: number;
  readonly unusedMs: number;
}

/** Where policies are kept for as long as they hold. */
export interface StsStore {
  /** The policy of the domain that has not expired, or null. */
  find(domain: string): Promise<KnownPolicy | null>;
  keep(domain: string, policy: StsPolicy & { readonly id: string }): Promise<void>;
  /** It was used now. */
  touch(domain: string): Promise<void>;
  /** It could not be fetched anew; the one that is kept stays. */
  noteFailure(domain: string, reason: string): Promise<void>;
}

/** RFC 8460 §4.3.2.2. */
export type StsFailure = 'sts-policy-fetch-error' | 'sts-policy-invalid' | 'sts-webpki-invalid';

export type FetchedSts =
  | { readonly kind: 'policy'; readonly policy: StsPolicy }
  | { readonly kind: 'failed'; readonly failure: StsFailure; readonly reason: string };

export type StsAnswer =
  | {
      readonly kind: 'known';
      /** Null: no policy holds. */
      readonly policy: StsPolicy | null;
      /** Why the policy that the domain has now could not be had. */
      readonly trouble: { readonly failure: StsFailure; readonly reason: string } | null;
    }
  /** Our own store did not answer: a policy may hold that we do not see. */
  | { readonly kind: 'unknown'; readonly reason: string };

export interface StsPolicies {
  /** `domain`: of the recipient, in A-labels, before any CNAME. */
  find(domain: string): Promise<StsAnswer>;
}

export interface StsOptions {
  readonly resolver: Pick<Resolver, 'txt'>;
  readonly store: StsStore;
  readonly fetch: (domain: string) => Promise<FetchedSts>;
  readonly now: () => Date;
  /** A policy could not be kept: it holds all the same, as long as we remember it. */
  readonly onUnkept: (error: unknown) => void;
}

export const MAX_AGE_MAX_SECONDS = 31_557_600;
/** How long an answer stands before the record is asked for again. */
const LOOK_MS = 60_000;
/** After a fetch that failed. */
const BACKOFF_MS = 300_000;
const REMEMBERED_MAX = 10_000;
/** Of the files of policies: most have 200, one may have 64 KB. */
const REMEMBERED_CHARS_MAX = 4_000_000;
const TROUBLE_CHARS = 200;
/** Open lookups; each may hold one HTTPS request. */
const OPEN_MAX = 500;
const TOUCH_MS = 86_400_000;

export function createStsPolicies(options: StsOptions): StsPolicies {
  const { now } = options;
  const bounds = { now, entriesMax: REMEMBERED_MAX, weightMax: REMEMBERED_CHARS_MAX };
  const remembered = createAnswerCache<StsAnswer>(bounds);
  const troubles = createAnswerCache<Trouble>(bounds);
  const open = new Map<string, Promise<StsAnswer>>();

  const look = async (domain: string): Promise<StsAnswer> => {
    const { answer, lifeMs, isTried } = await lookUp(options, domain, troubles.get(domain));
    const { policy, trouble } = answer;
    remembered.set(domain, answer, { lifeMs, weight: policy?.raw.length ?? 0 });
    if (isTried && trouble !== null) {
      troubles.set(domain, trouble, { lifeMs: BACKOFF_MS, weight: TROUBLE_CHARS });
    }
    return answer;
  };

  return {
    find(domain) {
      const kept = remembered.get(domain);
      if (kept !== null) return Promise.resolve(kept);
      const asked = open.get(domain);
      if (asked !== undefined) return asked;
      if (open.size >= OPEN_MAX) {
        return Promise.resolve({
          kind: 'unknown',
          reason: 'too many policies are being looked up at this moment',
        });
      }
      const asking = look(domain)
        .catch((error: unknown): StsAnswer => {
          const code = (error as { code?: string }).code ?? 'unknown error';
          return { kind: 'unknown', reason: `the stored policies cannot be read now (${code})` };
        })
        .finally(() => open.delete(domain));
      open.set(domain, asking);
      return asking;
    },
  };
}

type Known = Extract<StsAnswer, { kind: 'known' }>;
type Trouble = NonNullable<Known['trouble']>;
interface Looked {
  readonly answer: Known;
  readonly lifeMs: number;
  /** It was fetched, or that failed now. */
  readonly isTried: boolean;
}

/** `before`: why it could not be fetched a short while ago. */
async function lookUp(
  options: StsOptions,
  domain: string,
  before: Trouble | null,
): Promise<Looked> {
  const [known, id] = await Promise.all([
    options.store.find(domain),
    readStsId(options.resolver, domain),
  ]);
  const keepKnown = async (trouble: Trouble | null, isTried = false): Promise<Looked> => {
    if (known === null) {
      return { answer: { kind: 'known', policy: null, trouble }, lifeMs: LOOK_MS, isTried };
    }
    if (known.unusedMs > TOUCH_MS) await options.store.touch(domain).catch(options.onUnkept);
    const policy = known.mode === 'none' ? null : known;
    const lifeMs = Math.min(LOOK_MS, known.leftMs);
    return { answer: { kind: 'known', policy, trouble }, lifeMs, isTried };
  };
  // RFC 8461 §5.1: without a record, and without an answer, the policy that is kept holds on.
  if (id === null || id === known?.id) return keepKnown(null);
  if (before !== null) return keepKnown(before);
  const fetched = await options.fetch(domain);
  if (fetched.kind === 'failed') {
    const { failure, reason } = fetched;
    if (known !== null) await options.store.noteFailure(domain, reason).catch(options.onUnkept);
    return keepKnown({ failure, reason }, true);
  }
  const { policy } = fetched;
  await options.store.keep(domain, { ...policy, id }).catch(options.onUnkept);
  return {
    answer: { kind: 'known', policy: policy.mode === 'none' ? null : policy, trouble: null },
    // Also where its max_age is shorter: it must not be fetched for every message.
    lifeMs: LOOK_MS,
    isTried: true,
  };
}

/** The id that the domain's record has now; null: no record, several, one that breaks the rules, or no answer. */
export async function readStsId(
  resolver: Pick<Resolver, 'txt'>,
  domain: string,
): Promise<string | null> {
  const answer = await resolver.txt(`_mta-sts.${domain}`);
  return answer.kind === 'found' ? stsIdOf(answer.records) : null;
}

const FIELD_NAME = /^[a-z0-9][a-z0-9_.-]{0,31}$/i;
const EXTENSION = /^[!-:<>-~]+$/;

/** RFC 8461 §3.1: what does not begin as a record is passed over; of what does there must be exactly one. */
export function stsIdOf(records: readonly string[]): string | null {
  const [record, ...more] = records.filter((text) => /^v=STSv1[ \t]*;/.test(text));
  if (record === undefined || more.length > 0) return null;
  const [, ...fields] = record.split(';').map(trimmed);
  if (fields.at(-1) === '') fields.pop();
  let id: string | null = null;
  for (const field of fields) {
    const [, name = '', value = ''] = /^([^=]+)=(.*)$/s.exec(field) ?? [];
    if (name === 'id' && id === null) {
      if (!/^[a-z0-9]{1,32}$/i.test(value)) return null;
      id = value;
    } else if (!FIELD_NAME.test(name) || !EXTENSION.test(value)) {
      return null;
    }
  }
  return id;
}

/** Without the blanks around it; in one pass, however many somebody put there. */
function trimmed(text: string): string {
  const isBlank = (at: number): boolean => text[at] === ' ' || text[at] === '\t';
  let from = 0;
  let to = text.length;
  while (from < to && isBlank(from)) from += 1;
  while (from < to && isBlank(to - 1)) to -= 1;
  return text.slice(from, to);
}

const MODES: readonly StsMode[] = ['enforce', 'testing', 'none'];
/** Of one policy; the largest in use have a dozen. */
const PATTERNS_MAX = 500;
// ["*."] Domain, as in RFC 5321 §4.1.2.
const PATTERN = /^(?:\*\.)?(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$/;

/** RFC 8461 §3.2. Returns the fault in words where it is none. */
export function parseStsPolicy(text: string): StsPolicy | string {
  const fields = new Map<string, string>();
  const mx = new Set<string>();
  for (const line of text.split(/\r?\n/)) {
    const colon = line.indexOf(':');
    const name = line.slice(0, Math.max(colon, 0));
    if (!FIELD_NAME.test(name)) continue;
    const value = trimmed(line.slice(colon + 1));
    if (name === 'mx') {
      const pattern = value.toLowerCase();
      if (!PATTERN.test(pattern)) return 'it names a mail host that no mail host can have';
      mx.add(pattern);
    } else if (!fields.has(name)) {
      fields.set(name, value); // only the first of a name counts
    }
  }
  if (fields.get('version') !== 'STSv1') return 'its version is not STSv1';
  const mode = MODES.find((one) => one === fields.get('mode'));
  if (mode === undefined) return 'its mode is none of enforce, testing and none';
  const age = fields.get('max_age') ?? '';
  if (!/^\d{1,10}$/.test(age)) return 'its max_age is not a number of seconds';
  if (mode !== 'none' && mx.size === 0) return 'it names no mail host';
  if (mx.size > PATTERNS_MAX) return `it names more than ${PATTERNS_MAX} mail hosts`;
  const maxAgeSeconds = Math.min(Number(age), MAX_AGE_MAX_SECONDS);
  return { mode, mx: [...mx], maxAgeSeconds, raw: text };
}

/** RFC 8461 §4.1: `*.` is exactly one label, the left-most. `host`: lower-case A-labels. */
export function isHostOf({ mx }: Pick<StsPolicy, 'mx'>, host: string): boolean {
  const parent = host.slice(host.indexOf('.') + 1);
  return mx.some((pattern) =>
    pattern.startsWith('*.')
      ? host.includes('.') && !host.startsWith('.') && parent === pattern.slice(2)
      : pattern === host,
  );
}
