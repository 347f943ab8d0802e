// Checks who a message is from: SPF (RFC 7208), DKIM, ARC and DMARC (RFC 9989), by mailauth with our resolver, and says
// it twice: as Authentication, which is stored and shown, and as the field for the top of the message.
//
// It never throws and never takes longer than VERIFY_MS. What has no answer by then is `temperror`: no mail is refused
// or lost because the DNS, a thread or mailauth failed. The parts have times of their own, so that names which answer
// late cannot keep the author's policy from being heard.
import { spf } from 'mailauth/lib/spf/index.js';
import { domainToASCII } from 'node:url';
import type { Logger } from '../log.ts';
import {
  withoutForgedResults,
  writeAuthenticationResults,
  type MethodResult,
} from '../mail/authentication-results.ts';
import type { Authentication, SpfResult } from '../store/received-email.ts';
import type { InboundDmarc } from '../store/sending-domain.ts';
import type { ArrivalClient } from './arrival.ts';
import { createSignatureReader, type SignatureReader } from './verdicts-aside.ts';
import { BUSY, isOpenFor, judge, type Judgement } from './verdicts-policy.ts';
import { openQuestions, type Ask, type VerdictResolver } from './verdicts-questions.ts';
import {
  notRead,
  readAuthors,
  type CheckedSignature,
  type Signatures,
} from './verdicts-signatures.ts';

/** Of one message, with the wait for its turn. */
const VERIFY_MS = 5_000;
/** SPF, and the keys of signatures. */
const PROOF_MS = 3_000;
/** The keys of ARC seals. */
const SEALS_MS = 3_400;
/** Reading in a thread. */
const READING_MS = 3_800;
/** The author's policy. */
const POLICY_MS = 4_500;
const AT_ONCE_MAX = 100;
/** RFC 7208 §4.6.4. */
const SPF_LOOKUPS_MAX = 10;
const SPF_VOID_LOOKUPS_MAX = 2;
const REASON_CHARS_MAX = 300;
const NAME_CHARS_MAX = 255;

export interface Verified {
  readonly authentication: Authentication;
  /** Authentication-Results with its CRLF. */
  readonly field: string;
  /** Without fields that pretend to be ours. */
  readonly raw: Buffer;
}

export interface Verifier {
  /** Never rejects. `mailFrom` is empty for the null sender. */
  verify(message: {
    readonly raw: Buffer;
    readonly mailFrom: string;
    readonly client: ArrivalClient;
  }): Promise<Verified>;
  /** Whatever is being verified ends with what is known. */
  close(): Promise<void>;
}

type Message = Parameters<Verifier['verify']>[0];
type Spf = Authentication['spf'];

export function createVerifier({
  resolver,
  hostname,
  trustedSealers,
  log,
  reader = createSignatureReader(),
  atOnceMax = AT_ONCE_MAX,
}: {
  readonly resolver: VerdictResolver;
  /** Our authserv-id. */
  readonly hostname: string;
  /** Domains whose ARC seals the operator trusts; asked for each message. */
  readonly trustedSealers: () => readonly string[];
  readonly log: Logger;
  readonly reader?: SignatureReader;
  readonly atOnceMax?: number;
}): Verifier {
  const turns = createTurns(atOnceMax);

  /** Its result stands even if it comes late: the DNS may be silent for a part only. */
  async function check(message: Message, startMs: number): Promise<Checked> {
    const proofs = openQuestions(resolver, startMs + PROOF_MS);
    const seals = openQuestions(resolver, startMs + SEALS_MS);
    const policies = openQuestions(resolver, startMs + POLICY_MS);
    try {
      const asks = { askKeys: proofs.ask, askSeals: seals.ask };
      const reading = reader.read(message.raw, asks, startMs + READING_MS);
      const [sender, read] = await Promise.all([
        noteFailure(checkSpf(message, proofs.ask, hostname), 'SPF'),
        noteFailure(
          reading.then((found) => found ?? readLate(message.raw)),
          'the signatures',
        ),
      ]);
      const signatures = read ?? unread('the signatures could not be read');
      const isLate = read !== null && 'isLate' in read;
      const evidence = { spf: sender ?? SPF_UNKNOWN, signatures, isLate };
      const about = { ask: policies.ask, trustedSealers: trustedSealers() };
      // Who the authors are was not read either: nothing is known of their policy.
      const judgement =
        read === null ? null : await noteFailure(judge(evidence, about), 'the policy');
      return { spf: evidence.spf, signatures, judgement };
    } finally {
      proofs.end();
      seals.end();
      policies.end();
    }
  }

  const noteFailure = async <T>(work: Promise<T>, what: string): Promise<T | null> => {
    try {
      return await work;
    } catch (err) {
      log.warn({ err, what }, 'a message could not be verified');
      return null;
    }
  };

  async function checkInTime(message: Message): Promise<Checked> {
    const startMs = performance.now();
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(() => resolve(null), VERIFY_MS);
    });
    const turn = turns.enter();
    const leave = await Promise.race([turn, late]);
    if (leave === null) {
      void turn.then((leaveUnused) => leaveUnused());
      log.warn({}, 'too many messages at once: one was not verified');
      return { ...NOTHING_KNOWN, judgement: BUSY };
    }
    try {
      const work = noteFailure(check(message, startMs), 'all');
      const checked = work.then((result) => result ?? NOTHING_KNOWN);
      return (await Promise.race([checked, late])) ?? { ...NOTHING_KNOWN, judgement: BUSY };
    } finally {
      clearTimeout(timer);
      leave();
    }
  }

  return {
    async verify(given) {
      const raw = withoutForgedResults(given.raw, hostname);
      const message = { ...given, raw };
      const checked = await checkInTime(message);
      const authentication = authenticationOf(checked);
      const results = resultsOf(authentication, checked.signatures.dkim, message);
      return { authentication, field: writeAuthenticationResults(hostname, results), raw };
    },
    close: () => reader.close(),
  };
}

/**
 * The reply to a message that its author's DMARC policy says to refuse, for a domain that follows such policies; null:
 * take it. `5.7.26`: RFC 7372 §3.2. What took too long to be read is asked for again: a message can be made to.
 */
export function dmarcRefusal(
  { dmarc, verdict }: Authentication,
  inboundDmarc: InboundDmarc,
): { readonly code: number; readonly text: string } | null {
  if (inboundDmarc !== 'reject') return null;
  if (isOpenFor(dmarc)) {
    return {
      code: 451,
      text: '4.4.5 It could not be checked in time whether this message is from its author, try again later',
    };
  }
  if (verdict !== 'tagged') return null;
  const domain = (dmarc.domain ?? '').replace(/[^!-~]/g, '?').slice(0, NAME_CHARS_MAX);
  return {
    code: 550,
    text: `5.7.26 The DMARC policy of ${domain} rejects this message: it has neither an SPF pass nor a valid DKIM signature of that domain. Send it from a host in its SPF record or sign it with its DKIM key`,
  };
}

interface Checked {
  readonly spf: Spf;
  readonly signatures: Signatures;
  readonly judgement: Judgement | null;
}

const SPF_UNKNOWN: Spf = { result: 'temperror', domain: null, reason: 'not checked in time' };

const unread = (reason: string): Signatures => {
  return { authors: [], fromFields: 0, dkim: [notRead('temperror', reason)], arc: null };
};

const readLate = async (raw: Buffer): Promise<Signatures & { readonly isLate: true }> => {
  return { ...unread('not read in time'), ...(await readAuthors(raw)), isLate: true };
};

const NOTHING_KNOWN: Checked = {
  spf: SPF_UNKNOWN,
  signatures: unread('not checked in time'),
  judgement: null,
};

/** The HELO name for the null sender (RFC 7208 §2.4). */
async function checkSpf({ mailFrom, client }: Message, ask: Ask, mta: string): Promise<Spf> {
  const result = await spf({
    sender: mailFrom,
    ip: client.address,
    helo: client.helo === '' ? `[${client.address}]` : client.helo,
    mta,
    resolver: ask,
    maxResolveCount: SPF_LOOKUPS_MAX,
    maxVoidCount: SPF_VOID_LOOKUPS_MAX,
    strict: true,
  });
  const { comment } = result.status;
  const reason = result.status.result === 'pass' || comment === undefined ? null : comment;
  return {
    result: result.status.result as SpfResult,
    domain: domainOf(result.domain),
    reason: reason?.replace(`${mta}: `, '') ?? null,
  };
}

function authenticationOf({ spf: sender, signatures, judgement }: Checked): Authentication {
  const { dkim, arc } = signatures;
  const dmarc: Authentication['dmarc'] = judgement?.dmarc ?? {
    result: 'temperror',
    domain: null,
    policy: null,
    aligned: { spf: false, dkim: false },
    reason: 'not checked in time',
  };
  return {
    spf: { ...sender, reason: shown(sender.reason) },
    dkim: dkim.map(({ result, domain, selector, reason, isNear }, index) => ({
      result,
      domain: domainOf(domain),
      selector: domainOf(selector),
      aligned: judgement?.alignment[index] ?? isNear,
      reason: shown(reason),
    })),
    dmarc: { ...dmarc, domain: domainOf(dmarc.domain), reason: shown(dmarc.reason) },
    arc: {
      result: arc?.result ?? 'none',
      sealer: domainOf(arc?.sets.at(-1)?.sealer ?? null),
      instances: arc?.sets.length ?? 0,
    },
    verdict: judgement?.verdict ?? 'accepted',
  };
}

/** RFC 8601 §2.7; ARC: RFC 8617 §10.2. */
function resultsOf(
  { spf: sender, dkim, dmarc, arc }: Authentication,
  signatures: readonly CheckedSignature[],
  { mailFrom, client }: Message,
): MethodResult[] {
  const identity = mailFrom === '' ? 'smtp.helo' : 'smtp.mailfrom';
  const [none]: MethodResult[] = [{ method: 'dkim', result: 'none', reason: null, properties: [] }];
  const signed = dkim.map(({ result, domain, selector, reason }, index): MethodResult => {
    const { algorithm = null, start = null } = signatures[index] ?? {};
    return {
      method: 'dkim',
      result,
      reason,
      properties: [
        ['header.d', domain],
        ['header.s', selector],
        ['header.a', algorithm],
        ['header.b', start],
      ],
    };
  });
  return [
    {
      method: 'spf',
      result: sender.result,
      reason: sender.result === 'permerror' || sender.result === 'temperror' ? sender.reason : null,
      properties: [[identity, sender.domain]],
    },
    ...(signed.length === 0 && none !== undefined ? [none] : signed),
    {
      method: 'dmarc',
      result: dmarc.result,
      reason: dmarc.reason,
      properties: [
        ['header.from', dmarc.domain],
        ['policy.dmarc', dmarc.policy],
      ],
    },
    {
      method: 'arc',
      result: arc.result,
      reason: null,
      properties: [['smtp.remote-ip', client.address]],
    },
  ];
}

/** Any words of a stranger as JSON in the database can hold them. */
function shown(text: string | null): string | null {
  if (text === null) return null;
  const plain = text.toWellFormed().replace(/\p{Cc}+/gu, ' ');
  return plain.slice(0, REASON_CHARS_MAX).toWellFormed().trim();
}

/** A name in A-labels, lower case; null for what cannot be one. */
function domainOf(name: string | null): string | null {
  if (name === null) return null;
  const lower = name.trim().toLowerCase().replace(/\.$/, '');
  if (/[\p{Cc}\s]/u.test(lower)) return null;
  const ascii = /^[ -~]*$/.test(lower) ? lower : domainToASCII(lower);
  return /^[!-~]+$/.test(ascii) && ascii.length <= NAME_CHARS_MAX ? ascii : null;
}

/** Lets so many in at a time; the others wait in order. */
function createTurns(max: number): { enter(): Promise<() => void> } {
  const waiting: (() => void)[] = [];
  let inside = 0;
  const leave = (): void => {
    inside -= 1;
    waiting.shift()?.();
  };
  return {
    async enter() {
      if (inside >= max) await new Promise<void>((resolve) => waiting.push(resolve));
      inside += 1;
      return leave;
    },
  };
}
