// What the authors of a message want done with it (DMARC, RFC 9989), and what that comes to here.
//
// In: what SPF and the signatures showed, and the names the operator trusts to seal. Out: the dmarc part of
// Authentication and the verdict. Nothing is held against a message that only the DNS kept from being proven: where a
// check that may have made it pass has no answer, the result is `temperror`. A seal counts only along an unbroken row
// of trusted sealers from the newest set down.
import type { DMARCResult } from 'mailauth';
import { evaluateDmarc } from 'mailauth/lib/dmarc/index.js';
import type { Authentication } from '../store/received-email.ts';
import type { Ask } from './verdicts-questions.ts';
import type { CheckedChain, CheckedSignature, Signatures } from './verdicts-signatures.ts';

/** Of a message that names several, each could be the one that is forged. */
const AUTHORS_MAX = 10;

const LATE = 'the signatures could not be read in time';

export interface Evidence {
  readonly spf: Authentication['spf'];
  readonly signatures: Signatures;
  /** The message took too long: there may be more signatures, and any of them may be valid. */
  readonly isLate: boolean;
}

export interface Judgement {
  readonly dmarc: Authentication['dmarc'];
  readonly verdict: Authentication['verdict'];
  /** Whether each signature is of the author's organization, in their order. */
  readonly alignment: readonly boolean[];
}

interface Identities {
  readonly spf: readonly string[];
  readonly dkim: readonly { readonly domain: string; readonly underSized?: number }[];
}

type Dmarc = Authentication['dmarc'];
type Evaluation = Awaited<ReturnType<typeof evaluateDmarc>>;

/** Throws where mailauth does. */
export async function judge(
  evidence: Evidence,
  { ask, trustedSealers }: { readonly ask: Ask; readonly trustedSealers: readonly string[] },
): Promise<Judgement> {
  const { signatures } = evidence;
  const evaluation = await evaluate(ask, signatures, identitiesOf(evidence, ['pass']));
  if (evaluation.response === false) {
    const dmarc = await judgeMany(evidence, evaluation, ask);
    return { dmarc, verdict: verdictOf(dmarc), alignment: near(signatures.dkim) };
  }
  const alignment = await alignmentOf(evidence, evaluation, ask);
  const dmarc = await settle(evidence, dmarcOf(evaluation.response), ask);
  if (verdictOf(dmarc) === 'accepted') return { dmarc, verdict: 'accepted', alignment };
  const { arc } = signatures;
  if (arc === null || !isVouchedFor(arc, dmarc.domain, trustedSealers)) {
    return { dmarc, verdict: 'tagged', alignment };
  }
  if (arc.result === 'pass') {
    const reason = `the trusted sealer ${arc.sets.at(-1)?.sealer ?? ''} saw it pass`;
    return { dmarc: { ...dmarc, reason }, verdict: 'accepted', alignment };
  }
  if (!arc.isUnknown) return { dmarc, verdict: 'tagged', alignment };
  const reason = 'the key of a trusted ARC seal could not be looked up';
  return { dmarc: { ...dmarc, result: 'temperror', reason }, verdict: 'accepted', alignment };
}

/**
 * The message may be forged, and what would show it could not be learned: it should come again. Whoever forges could
 * else name what has no answer: a selector, or a subdomain whose name servers are dead (RFC 6376 §6.1.2).
 */
export const isOpenFor = ({ policy, result, reason }: Dmarc): boolean =>
  result === 'temperror' && (policy === 'reject' || reason === BUSY.dmarc.reason);

/** Nobody looked: whoever sends enough at once must not get a forged message in with it. */
export const BUSY: Judgement = {
  dmarc: {
    result: 'temperror',
    domain: null,
    policy: null,
    aligned: { spf: false, dkim: false },
    reason: 'too many messages came at once',
  },
  verdict: 'accepted',
  alignment: [],
};

const verdictOf = ({ result, policy }: Dmarc): Authentication['verdict'] =>
  result === 'fail' && policy === 'reject' ? 'tagged' : 'accepted';

const near = (all: readonly CheckedSignature[]): boolean[] => all.map(({ isNear }) => isNear);

/** What would speak for the author if every result of `spf` and `dkim` named here counted. */
function identitiesOf(
  { spf, signatures }: Evidence,
  results: readonly ('pass' | 'temperror')[],
): Identities {
  const counts = (result: string): boolean => results.some((one) => one === result);
  return {
    spf: counts(spf.result) && spf.domain !== null ? [spf.domain] : [],
    dkim: signatures.dkim.flatMap(({ result, domain, unsignedBytes }) => {
      if (domain === null || !counts(result)) return [];
      return [{ domain, ...(unsignedBytes > 0 ? { underSized: unsignedBytes } : {}) }];
    }),
  };
}

const evaluate = (ask: Ask, of: Signatures, { spf, dkim }: Identities): Promise<Evaluation> =>
  evaluateDmarc({
    headerFrom: [...of.authors],
    fromFields: of.fromFields,
    spfDomains: [...spf],
    dkimDomains: [...dkim],
    resolver: ask,
    strict: true,
  });

async function alignmentOf(
  { signatures }: Evidence,
  known: Evaluation,
  ask: Ask,
): Promise<boolean[]> {
  const { dkim } = signatures;
  if (dkim.length === 0 || known.dkimAligned === undefined) return near(dkim);
  const domains = dkim.flatMap(({ domain }) => (domain === null ? [] : [{ domain }]));
  const all = dkim.every(({ result }) => result === 'pass')
    ? known
    : await evaluate(ask, signatures, { spf: [], dkim: domains });
  const aligned = all.dkimAligned ?? new Set();
  return dkim.map(({ domain }) => domain !== null && aligned.has(plain(domain)));
}

const plain = (domain: string): string => domain.trim().toLowerCase().replace(/\.$/, '');

/** A failure stands only when no open question could have made it a pass. */
async function settle(evidence: Evidence, dmarc: Dmarc, ask: Ask): Promise<Dmarc> {
  if (dmarc.result !== 'fail') return dmarc;
  if (evidence.isLate) return { ...dmarc, result: 'temperror', reason: LATE };
  const { signatures } = evidence;
  const possible = identitiesOf(evidence, ['pass', 'temperror']);
  const isOpen =
    evidence.spf.result === 'temperror' ||
    signatures.dkim.some(({ result }) => result === 'temperror');
  if (!isOpen) return dmarc;
  const { response } = await evaluate(ask, signatures, possible);
  if (response === false || response.status.result !== 'pass') return dmarc;
  const reason = 'a check that could have made it pass has no answer from the DNS';
  return { ...dmarc, result: 'temperror', reason };
}

function dmarcOf(response: DMARCResult): Dmarc {
  const { status, alignment, policy } = response;
  const known = ['pass', 'fail', 'none', 'temperror'] as const;
  return {
    result: known.find((one) => one === status.result) ?? 'permerror',
    domain: typeof status.header?.['from'] === 'string' ? status.header['from'] : null,
    policy: policyOf(policy),
    aligned: {
      spf: typeof alignment?.spf?.result === 'string',
      dkim: typeof alignment?.dkim?.result === 'string',
    },
    reason: status.result === 'temperror' ? 'the policy could not be looked up' : null,
  };
}

function policyOf(policy: unknown): Dmarc['policy'] {
  return policy === 'none' || policy === 'quarantine' || policy === 'reject' ? policy : null;
}

const WHY_NONE = {
  'no-author-domain': 'the message has no author',
  'multiple-author-domains': 'the authors are of several domains',
  'invalid-author-domain': 'the author has no valid domain',
  'multiple-from-fields': 'the message has several From fields',
} as const;

/**
 * DMARC says nothing about a message with several authors' domains (RFC 9989 §5.3.1), and a reader may show any of them:
 * one that says `reject` and does not pass decides.
 */
async function judgeMany(
  { spf, signatures, isLate }: Evidence,
  { reason, authorDomains = [] }: Evaluation,
  ask: Ask,
): Promise<Dmarc> {
  const aligned = { spf: false, dkim: false };
  const why = WHY_NONE[reason ?? 'no-author-domain'];
  const none: Dmarc = { result: 'permerror', domain: null, policy: null, aligned, reason: why };
  if (reason === 'no-author-domain' && signatures.authors.length === 0) {
    return { ...none, result: 'none' };
  }
  for (const domain of [...new Set(authorDomains)].slice(0, AUTHORS_MAX)) {
    const about = { ...signatures, authors: [`author@${domain}`], fromFields: 1 };
    const evidence = { spf, signatures: about, isLate };
    const { response } = await evaluate(ask, about, identitiesOf(evidence, ['pass']));
    if (response === false) continue;
    const dmarc = await settle(evidence, dmarcOf(response), ask);
    if (verdictOf(dmarc) === 'tagged') return { ...dmarc, reason: why };
    if (isOpenFor(dmarc)) return dmarc;
  }
  return none;
}

/** Whether a trusted sealer says that it saw the message pass for this author (RFC 8617 §7.2.1). */
function isVouchedFor(
  { sets, coversBody }: CheckedChain,
  author: string | null,
  trustedSealers: readonly string[],
): boolean {
  if (author === null || !coversBody) return false;
  const trusted = new Set(trustedSealers.map(plain));
  for (const { sealer, dmarc, author: sealed } of sets.toReversed()) {
    if (sealer === null || !trusted.has(plain(sealer))) return false;
    if (dmarc === 'pass' && sealed !== null && plain(sealed) === plain(author)) return true;
  }
  return false;
}
