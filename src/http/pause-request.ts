// What a request to pause may say.
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { NewPause, PauseKind } from '../queue/pauses.ts';

export interface CreatePauseRequest {
  /** What `name` names; `all` needs none. */
  kind: 'lane' | 'destination' | 'tenant' | 'all';
  /** A lane or a destination as `GET /queue` shows them, or the id of a tenant. */
  name?: string;
  /** For whoever asks why nothing moves, tenants included; at most 500 characters. */
  reason?: string;
  /** When it ends by itself, at most a year ahead; ISO 8601 with a time zone. Absent: when it is resumed. */
  until?: string;
}

const REASON_MAX = 500;
const NAME_MAX = 300;
const YEAR_MS = 366 * 86_400_000;
const TIME = /^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:?\d\d)$/;
const UUID = /^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$/i;
const NAMES: Readonly<Record<Exclude<PauseKind, 'all'>, { form: RegExp; words: string }>> = {
  lane: {
    form: /^(sink|sandbox|smarthost|home|[^\s/]+\/[^\s/]+)$/,
    words: 'the name of a lane, such as `default/mx.example.com` or `smarthost`',
  },
  destination: {
    form: /^(sink|sandbox|smarthost|mx:[^\s@/A-Z\u0080-\uffff]+(?<!\.)(@[a-z0-9_-]+)?)$/,
    words:
      'a destination, such as `mx:example.com` (in lower case, an IDN as `xn--…`) or `smarthost`',
  },
  tenant: { form: UUID, words: 'the id of a tenant' },
};

/** Throws a Refusal that names every field that is wrong. */
export function readPauseRequest(body: CreatePauseRequest, now: Date): NewPause {
  const issues: Issue[] = [];
  const complain = (path: string, message: string): void => void issues.push({ path, message });
  const { kind, name = '', reason = '', until } = body;
  const isMissing = kind !== 'all' && name === '';
  if (isMissing) complain('name', 'Missing `name` field.');
  else if (kind === 'all') {
    if (name !== '') complain('name', '`name` has no meaning for `all`; leave it out.');
  } else if (name.length > NAME_MAX || !NAMES[kind].form.test(name) || hasControls(name)) {
    complain('name', `\`name\` must be ${NAMES[kind].words}.`);
  }
  if (reason.length > REASON_MAX || hasControls(reason)) {
    complain('reason', `\`reason\` must be one line of at most ${REASON_MAX} characters.`);
  }
  const end = until === undefined ? null : new Date(TIME.test(until) ? until : NaN);
  if (end !== null && !(end.getTime() > now.getTime() && end.getTime() < now.getTime() + YEAR_MS)) {
    complain(
      'until',
      '`until` must be a time ahead, within a year, with a time zone, such as `2027-01-31T08:00:00Z`.',
    );
  }
  if (issues.length > 0) {
    throw refuseFields(issues, isMissing ? 'missing_required_field' : 'validation_error');
  }
  return {
    kind,
    name: kind === 'tenant' ? name.toLowerCase() : name,
    reason: reason === '' ? null : reason,
    until: end,
  };
}

// oxlint-disable-next-line no-control-regex -- they are what is looked for
const hasControls = (text: string): boolean => /[\u0000-\u001f\u007f]/.test(text);
