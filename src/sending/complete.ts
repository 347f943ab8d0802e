// From a checked request to an email that may be sent: what its template says is filled in, and its author's
// domain and its topic are looked up. Writes nothing, so it can be asked for every email of a batch before any
// is stored.
import type { Caller } from '../access/keys.ts';
import { refuseFields, type Issue, type Refusal } from '../access/refusal.ts';
import { topicExists } from '../audience/topics.ts';
import type { DomainLookup, SendingDomainFacts } from '../domains/lookup.ts';
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import type { Store } from '../store/orm.ts';
import type { RenderedTemplate, TemplateRenderer, UnsubscribeLink } from '../templates/render.ts';
import type { TrackingWish } from '../tracking/tracker.ts';
import { bodyIssues, subjectIssues } from './field-rules.ts';
import { badTopic, missingField, type PlannedEmail } from './request.ts';

export interface CompletionDependencies {
  readonly store: Store;
  readonly domains: DomainLookup;
  readonly templates: TemplateRenderer;
  /**
   * The appliance's own domain, which signs where the author's domain is unknown; null
   * where an unknown domain is refused. Set only when nothing leaves the machine.
   */
  readonly standIn: { readonly tenantId: string; readonly domain: string } | null;
}

/** Who signs. */
export interface AuthorDomain {
  readonly signingTenantId: string;
  readonly signingDomainId: string;
  /** What the timeline says of it; null: nothing. */
  readonly warning: string | null;
  /** What the author's own domain has switched on; absent: nothing. */
  readonly tracking?: TrackingWish;
}

export interface CompleteEmail extends PlannedEmail {
  readonly from: Mailbox;
  readonly subject: string;
  readonly templateId: string | null;
  readonly author: AuthorDomain;
}

/** Completes the email; `link` is its template's. Throws a Refusal that says what to fix. */
export async function completeEmail(
  d: CompletionDependencies,
  caller: Caller,
  email: PlannedEmail,
  link: UnsubscribeLink,
): Promise<CompleteEmail> {
  const rendered =
    email.template === null
      ? null
      : await d.templates.render(caller.tenantId, email.template, link);
  const filled = fillIn(email, rendered);
  if (email.topicId !== null && !(await topicExists(d.store, caller.tenantId, email.topicId))) {
    throw refuseFields([badTopic()]);
  }
  const author = await findAuthorDomain(d, caller, filled.from.domain);
  return { ...filled, templateId: rendered?.templateId ?? null, author };
}

/** The request wins over its template. What the values made of the template is checked like a request. */
function fillIn(
  email: PlannedEmail,
  template: RenderedTemplate | null,
): PlannedEmail & { readonly from: Mailbox; readonly subject: string } {
  const missing: Issue[] = [];
  const issues: Issue[] = [];
  const parse = (path: string, text: string): readonly Mailbox[] => {
    const parsed = parseMailbox(text);
    if (parsed.ok) return [parsed.mailbox];
    const message = `Invalid \`${path}\` field in the template: the address ${parsed.problem}.`;
    issues.push({ path, message });
    return [];
  };
  const wanted = (path: string): void => {
    const { message } = missingField(path);
    missing.push({ path, message: `${message.slice(0, -1)}: the template has none either.` });
  };

  let { from } = email;
  if (from === null && template?.from !== null && template?.from !== undefined) {
    from = parse('from', template.from)[0] ?? null;
  } else if (from === null) wanted('from');
  const subject = email.subject ?? template?.subject ?? null;
  if (subject === null) wanted('subject');
  else issues.push(...subjectIssues(subject));
  const replyTo =
    email.replyTo.length > 0
      ? email.replyTo
      : (template?.replyTo ?? []).flatMap((text) => parse('reply_to', text));
  const html = email.html ?? template?.html ?? null;
  const text = email.text ?? template?.text ?? null;
  if (template !== null) issues.push(...bodyIssues('html', html), ...bodyIssues('text', text));
  if (html === null && text === null) wanted('html');
  if (missing.length > 0) throw refuseFields([...missing, ...issues], 'missing_required_field');
  if (issues.length > 0 || from === null || subject === null) throw refuseFields(issues);
  return { ...email, from, subject, replyTo, html, text };
}

/** Who signs for this author, or a refusal: mail from a domain that is not verified must not leave. */
export async function findAuthorDomain(
  d: Pick<CompletionDependencies, 'domains' | 'standIn'>,
  caller: Caller,
  name: string,
): Promise<AuthorDomain> {
  const domain = await d.domains.sendingDomain(caller.tenantId, name);
  const mayUse = caller.domainId === null || caller.domainId === domain?.id;
  if (!mayUse) {
    throw refuseAuthor(`This API key may only send from its own domain, not from ${name}.`);
  }
  if (domain?.canSend === true) {
    return {
      signingTenantId: caller.tenantId,
      signingDomainId: domain.id,
      warning: null,
      tracking: wishOf(domain),
    };
  }
  const standIn =
    d.standIn === null ? null : await d.domains.sendingDomain(d.standIn.tenantId, d.standIn.domain);
  if (d.standIn === null || standIn === null) {
    throw refuseAuthor(
      `The domain ${name} is not verified. Add and verify it before sending from it.`,
    );
  }
  return {
    signingTenantId: d.standIn.tenantId,
    signingDomainId: standIn.id,
    warning: `${name} is not a verified domain; outside development mode this email is refused.`,
    ...(domain === null ? {} : { tracking: wishOf(domain) }),
  };
}

const wishOf = (domain: SendingDomainFacts): TrackingWish => ({
  opens: domain.openTracking,
  clicks: domain.clickTracking,
  host: domain.trackingHost,
});

const refuseAuthor = (message: string): Refusal =>
  refuseFields([{ path: 'from', message }], 'domain_not_verified');
