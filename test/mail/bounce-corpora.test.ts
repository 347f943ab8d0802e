// How well refusals are understood that others have collected and labelled: for each corpus the share that agrees and
// every miss. What is compared is whom the refusal speaks about (classOf); where a label's reason leaves that open,
// each class that fits is right. And no label about reputation, authentication, policy or content may suppress anybody.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { findBounceRule, readBounceRules } from '../../src/mail/bounce-rules.ts';
import { classOf, outcomeOfReply, type CauseClass } from '../../src/mail/outcome.ts';
import { parseReply } from '../../src/mail/reply.ts';
import { readReport, type Report } from '../../src/mail/report.ts';
import { verdictOfReport, type LateVerdict } from '../../src/mail/report-verdict.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));
const AGREEMENT_MIN = 0.95;
const TENANT = 'any';

const rules = readBounceRules(
  JSON.parse(readFileSync(new URL('../../config/bounces.json', import.meta.url), 'utf8')),
);

const PERMANENT = ['permanent'] as const;
const TRANSIENT = ['transient'] as const;
const BLOCK = ['block'] as const;

/** What each reason of the labels means for the three classes. */
const REASONS: Readonly<Record<string, readonly CauseClass[]>> = {
  userunknown: PERMANENT,
  hostunknown: PERMANENT,
  hasmoved: PERMANENT,
  notaccept: PERMANENT,
  filtered: PERMANENT,
  mesgtoobig: PERMANENT,
  exceedlimit: PERMANENT,
  syntaxerror: PERMANENT,
  mailboxfull: TRANSIENT,
  expired: TRANSIENT,
  toomanyconn: TRANSIENT,
  speeding: TRANSIENT,
  systemfull: TRANSIENT,
  failedstarttls: TRANSIENT,
  authfailure: BLOCK,
  badreputation: BLOCK,
  blocked: BLOCK,
  policyviolation: BLOCK,
  rejected: BLOCK,
  requireptr: BLOCK,
  securityerror: BLOCK,
  spamdetected: BLOCK,
  virusdetected: BLOCK,
  // The reason says what went wrong, not for how long or for whom.
  contenterror: ['permanent', 'block'],
  notcompliantrfc: ['permanent', 'block'],
  norelaying: ['permanent', 'block'],
  suspend: ['permanent', 'transient'],
  onhold: ['permanent', 'transient'],
  mailererror: ['permanent', 'transient'],
  networkerror: ['permanent', 'transient'],
  systemerror: ['permanent', 'transient'],
  undefined: ['permanent', 'transient'],
};
/** Labels of mail that is no refusal. */
const OTHER = ['feedback', 'delivered', 'vacation'];

/** A host that blocks for now does both. */
function wantedOf(reason: string, code: string): readonly CauseClass[] {
  const classes = REASONS[reason];
  if (classes === undefined) throw new Error(`a reason that is not known: ${reason}`);
  return classes === BLOCK && code.startsWith('4') ? ['block', 'transient'] : classes;
}

class Tally {
  private agreed = 0;
  private total = 0;
  private readonly misses: string[] = [];
  private readonly blocksThatSuppress: string[] = [];

  private readonly name: string;

  constructor(name: string) {
    this.name = name;
  }

  add(about: {
    readonly what: string;
    readonly wanted: readonly CauseClass[];
    readonly seen: CauseClass | null;
    readonly isDead: boolean;
  }): void {
    this.total += 1;
    if (about.seen !== null && about.wanted.includes(about.seen)) this.agreed += 1;
    else this.misses.push(`${about.seen ?? 'no report'}, not ${about.wanted[0]!}: ${about.what}`);
    if (about.isDead && about.wanted.includes('block')) this.blocksThatSuppress.push(about.what);
  }

  print(): void {
    const share = ((this.agreed / this.total) * 100).toFixed(1);
    console.log(`${this.name}: ${share} %, ${this.agreed} of ${this.total} agree`);
    for (const miss of this.misses) console.log(`  ${miss}`);
  }

  check(countMin: number, agreementMin = AGREEMENT_MIN): void {
    this.print();
    assert.equal(this.blocksThatSuppress, []);
    assert.ok(this.total >= countMin, `${this.total} labels`);
    assert.ok(this.agreed / this.total >= agreementMin, `${this.agreed} of ${this.total} agree`);
  }
}

/** Null where there is no such corpus here. */
function folderOf(corpus: string): string | null {
  const folder = `${corpora}/${corpus}`;
  if (existsSync(folder)) return folder;
  console.log(`skipped: no corpus at ${folder}`);
  return null;
}

const classOfVerdict = (verdict: LateVerdict | null): CauseClass | null =>
  verdict?.kind === 'failed'
    ? classOf(verdict.cause)
    : verdict?.kind === 'delayed'
      ? 'transient'
      : null;

interface Labelled {
  readonly file: string;
  readonly firm: boolean;
  readonly labels: readonly {
    readonly reason: string;
    readonly reply_code: string;
  }[];
  readonly recipients: readonly { readonly recipient: string }[];
}

test('bounces that came by mail', () => {
  const folder = folderOf('bounces-sisimai');
  if (folder === null) return;
  const all = JSON.parse(readFileSync(`${folder}/expected.json`, 'utf8')) as Labelled[];
  const firm = new Tally('bounce mails, firm labels');
  const doubtful = new Tally('bounce mails, labels that two programs disagree about');
  for (const { file, labels, recipients, firm: isFirm } of all) {
    const raw = readFileSync(`${folder}/${file}`);
    const report = readReport(raw);
    // Whatever the reason for a delay is, it speaks about the moment.
    const isDelay = /^action: *delayed/im.test(raw.toString('latin1'));
    for (const [index, { reason, reply_code }] of labels.entries()) {
      if (OTHER.includes(reason)) continue;
      const recipient = recipients[index]?.recipient ?? '';
      const verdict =
        report === null ? null : verdictOfReport(report, { recipient, tenantId: TENANT, rules });
      (isFirm ? firm : doubtful).add({
        what: `${file}: ${reason} ${reply_code}`,
        wanted: isDelay ? TRANSIENT : wantedOf(reason, reply_code),
        seen: classOfVerdict(verdict),
        isDead: verdict?.kind === 'failed' && verdict.isDead,
      });
    }
  }
  doubtful.print();
  firm.check(250);
});

/** One line as a reporter that says nothing else would pass it on. */
const passedOn = (diagnostic: string): Report => ({
  kind: 'dsn',
  reporter: null,
  returnPaths: [],
  recipients: [
    {
      address: 'a@r.test',
      originalAddress: null,
      action: 'failed',
      status: null,
      diagnostic,
      stage: null,
    },
  ],
});

test('replies of one line, by way of a report and as the answer to RCPT', () => {
  const folder = folderOf('bounces-sisimai');
  if (folder === null) return;
  const all = JSON.parse(readFileSync(`${folder}/reason-strings.json`, 'utf8')) as {
    text: string;
    reason: string;
  }[];
  const reported = new Tally('replies of one line, reported');
  const said = new Tally('replies of one line, answered to RCPT');
  const via = { host: 'mx.r.test', address: '192.0.2.1', port: 25, tls: null };
  for (const { text, reason } of all) {
    if (OTHER.includes(reason)) continue;
    const verdict = verdictOfReport(passedOn(text), {
      recipient: 'a@r.test',
      tenantId: TENANT,
      rules,
    });
    const line = text.replace(/^[:#\s]+/, '');
    const reply = parseReply(line);
    const code = reply === null ? '' : String(reply.code);
    const about = { what: `${reason}: ${text.slice(0, 120)}`, wanted: wantedOf(reason, code) };
    const isDead = verdict?.kind === 'failed' && verdict.isDead;
    reported.add({ ...about, seen: classOfVerdict(verdict), isDead });
    if (reply === null) continue;
    const facts = { reply, stage: 'rcpt', host: null, tenantId: TENANT } as const;
    const outcome = outcomeOfReply({ ...facts, via, rule: findBounceRule(rules, facts) });
    said.add({
      ...about,
      seen: 'cause' in outcome ? classOf(outcome.cause) : null,
      isDead: outcome.kind === 'bounced' && outcome.cause === 'no_mailbox',
    });
  }
  // Some of these are no replies, and some stand under a reason that is another one's.
  reported.check(75, 0.9);
  said.check(50, 0.9);
});

/** Their classes as far as ours speak of the same; the others are about neither. */
const THEIR_CLASSES: Readonly<Record<string, readonly CauseClass[]>> = {
  InvalidRecipient: PERMANENT,
  BadDomain: PERMANENT,
  InactiveMailbox: PERMANENT,
  QuotaIssues: ['transient', 'permanent'],
  TransientFailure: TRANSIENT,
  AuthenticationFailed: BLOCK,
  PolicyRelated: BLOCK,
  SpamBlock: BLOCK,
  SpamContent: BLOCK,
  InvalidSender: BLOCK,
};

/** A reply that the pattern finds: its words, without what makes it a pattern; null where too much is left open. */
function replyFor(pattern: string): string | null {
  const text = pattern
    .replace(/^\^/, '')
    .replace(/\$$/, '')
    .replaceAll('\\\\', '\\')
    .replace(/\(([^()|\\]+)\|[^()]*\)/g, '$1')
    .replace(/\[([45])[45]\]/g, '$1')
    .replace(/\[0?[0-9]*([0-9])\]/g, '$1')
    .replaceAll('\\d{3}', '550')
    .replace(/(\d)\\d\{2\}/g, '$150')
    .replaceAll(/\.[+*]/g, ' ')
    .replaceAll('\\.', '.')
    .trim();
  if (!/^[45]\d\d /.test(text) || /[[\]{}\\^|]/.test(text)) return null;
  return new RegExp(pattern.replaceAll('\\\\', '\\'), 'i').test(`${text} `) ? text : null;
}

test('patterns of another classifier', () => {
  const folder = folderOf('bounce-rules-kumomta');
  if (folder === null) return;
  for (const name of ['bounces.toml', 'iana.toml']) {
    const tally = new Tally(`${name}, as replies to RCPT`);
    let theirs: readonly CauseClass[] | undefined;
    for (const line of readFileSync(`${folder}/${name}`, 'utf8').split('\n')) {
      const section = /^(\w+) = \[/.exec(line)?.[1];
      if (section !== undefined) theirs = THEIR_CLASSES[section];
      const pattern = /^\s*"(.*)",/.exec(line)?.[1];
      const said = pattern === undefined || theirs === undefined ? null : replyFor(pattern);
      const reply = said === null ? null : parseReply(said);
      if (said === null || reply === null || theirs === undefined) continue;
      const facts = { reply, stage: 'rcpt', host: null, tenantId: TENANT } as const;
      const via = { host: 'mx.r.test', address: '192.0.2.1', port: 25, tls: null };
      const outcome = outcomeOfReply({ ...facts, via, rule: findBounceRule(rules, facts) });
      tally.add({
        what: said,
        wanted: reply.code < 500 ? [...theirs, 'transient'] : theirs,
        seen: 'cause' in outcome ? classOf(outcome.cause) : null,
        isDead: outcome.kind === 'bounced' && outcome.cause === 'no_mailbox',
      });
    }
    // Facts to compare with: two tables that sort the same words differently are both of use.
    tally.check(name === 'iana.toml' ? 8 : 60, 0.7);
  }
});

test('feedback reports: what kind, and about whom', () => {
  const folder = folderOf('arf-stalwart');
  if (folder === null) return;
  const names = readdirSync(folder).filter((name) => name.endsWith('.eml'));
  assert.ok(names.length >= 5);
  let agreed = 0;
  for (const name of names) {
    const label = JSON.parse(
      readFileSync(`${folder}/${name.replace('.eml', '.json')}`, 'utf8'),
    ) as { feedback_type: string; original_rcpt_to: string | null };
    const report = readReport(readFileSync(`${folder}/${name}`));
    if (report?.kind !== 'arf') throw new Error(`${name} is read as ${String(report?.kind)}`);
    assert.is(report.feedbackType.replaceAll('-', ''), label.feedback_type.toLowerCase(), name);
    const wanted = label.original_rcpt_to?.replace(/[<>]/g, '') ?? null;
    assert.is(report.recipients[0]?.address ?? null, wanted, name);
    const verdict = verdictOfReport(report, { recipient: 'a@r.test', tenantId: TENANT, rules });
    const isComplaint = ['abuse', 'fraud', 'virus'].includes(label.feedback_type.toLowerCase());
    assert.is(verdict?.kind ?? null, isComplaint ? 'complained' : null, name);
    agreed += 1;
  }
  console.log(`feedback reports: ${agreed} of ${names.length} agree`);
});

test.run();
