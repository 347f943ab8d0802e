// What a check of the doctor says: one fact about one subject, how bad it is, and one sentence of what to do.

/** `unknown`: it could not be looked at, which proves nothing. */
export const severities = ['error', 'warning', 'unknown', 'info', 'ok'] as const;
export type Severity = (typeof severities)[number];

export interface Finding {
  /** What was looked at, such as `reverse_dns`; stable, for programs. */
  readonly code: string;
  /** An address, a domain, a table, a folder. */
  readonly subject: string;
  readonly severity: Severity;
  /** What is so, in one sentence. */
  readonly message: string;
  /** What to do, in one sentence; null where there is nothing to do. */
  readonly advice: string | null;
  readonly detail: Readonly<Record<string, unknown>>;
  /** Of an `unknown` one: what it means when the next look brings no answer either. Default: `unknown`. */
  readonly whenLasting?: Severity;
}

type About = readonly [code: string, subject: string];
type Detail = Readonly<Record<string, unknown>>;

export const ok = (about: About, message: string, detail: Detail = {}): Finding => ({
  code: about[0],
  subject: about[1],
  severity: 'ok',
  message,
  advice: null,
  detail,
});

export const info = (
  about: About,
  message: string,
  d: { readonly advice?: string; readonly detail?: Detail } = {},
): Finding => ({
  code: about[0],
  subject: about[1],
  severity: 'info',
  message,
  advice: d.advice ?? null,
  detail: d.detail ?? {},
});

export const bad = (
  severity: 'warning' | 'error',
  about: About,
  d: { readonly message: string; readonly advice: string; readonly detail?: Detail },
): Finding => ({
  code: about[0],
  subject: about[1],
  severity,
  message: d.message,
  advice: d.advice,
  detail: d.detail ?? {},
});

export const unknown = (
  about: About,
  d: { readonly message: string; readonly advice: string; readonly whenLasting?: Severity },
): Finding => ({
  code: about[0],
  subject: about[1],
  severity: 'unknown',
  message: d.message,
  advice: d.advice,
  detail: {},
  ...(d.whenLasting === undefined ? {} : { whenLasting: d.whenLasting }),
});

const rank = ({ severity }: Pick<Finding, 'severity'>): number => severities.indexOf(severity);

/** The worst first; of the same severity by code and subject. */
export function worstFirst<T extends Pick<Finding, 'severity' | 'code' | 'subject'>>(
  findings: readonly T[],
): readonly T[] {
  return findings.toSorted(
    (a, b) =>
      rank(a) - rank(b) ||
      (a.code < b.code ? -1 : a.code > b.code ? 1 : a.subject < b.subject ? -1 : 1),
  );
}

export const worstOf = (findings: readonly Pick<Finding, 'severity'>[]): Severity =>
  severities.find((one) => findings.some(({ severity }) => severity === one)) ?? 'ok';

/** A text of somebody else's as it may be shown. */
export function shown(text: string, max = 200): string {
  const plain = text.replace(/[^\x20-\x7e]/g, '?');
  return plain.length > max ? `${plain.slice(0, max)}…` : plain;
}
