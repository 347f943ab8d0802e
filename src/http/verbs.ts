// What the API can do, as functions; the composition root builds them and controllers call them. A test
// of the edge can pass its own.
import type { ApiKeyVerbs } from '../access/api-keys.ts';
import type { LinkOpeners } from '../access/linked.ts';
import type { Caller } from '../access/keys.ts';
import type { LogVerbs } from '../access/logs.ts';
import type { UsageVerbs } from '../access/usage.ts';
import type { Accepted, Sending } from '../sending/accept.ts';
import type { Spooled } from '../sending/attachments.ts';
import type { BatchSending } from '../sending/batch.ts';
import type { PageRequest } from '../access/page.ts';
import type { PreferencePolicy } from './preference-policy.ts';
import type { KeptLook } from '../doctor/kept.ts';
import type { QueueOverview } from '../queue/overview.ts';
import type { NewPause, Pause } from '../queue/pauses.ts';
import type { DomainVerbs } from '../domains/domains.ts';
import type { AutomationVerbs } from '../audience/automations.ts';
import type { EventVerbs } from '../audience/events.ts';
import type { ImportVerbs } from '../audience/imports.ts';
import type { ContactVerbs } from '../audience/contacts.ts';
import type { PropertyVerbs } from '../audience/properties.ts';
import type { SegmentVerbs } from '../audience/segments.ts';
import type { PreferenceVerbs } from '../audience/preferences.ts';
import type { BroadcastVerbs } from '../audience/broadcasts.ts';
import type { TopicVerbs } from '../audience/topics.ts';
import type { SignedLinks } from '../access/signed-link.ts';
import type { AttachmentVerbs } from '../sending/read-attachments.ts';
import type { EmailMetrics, MetricsQuery } from '../sending/metrics.ts';
import type { EmailPage, EmailRecord } from '../sending/read.ts';
import type { SendEmailRequest } from '../sending/request.ts';
import type { EmailFilters } from '../sending/search.ts';
import type { DryRun, TestRouteRequest } from '../receiving/dry-run.ts';
import type { ReceivingVerbs } from '../receiving/read-received.ts';
import type { ReplayVerbs } from '../receiving/replay.ts';
import type { RouteVerbs } from '../receiving/routes.ts';
import type { RuleVerbs } from '../receiving/rules.ts';
import type { SinkPage } from '../receiving/sink-messages.ts';
import type { SuppressionVerbs } from '../suppressions/suppressions.ts';
import type { TemplateVerbs } from '../templates/templates.ts';
import type { Trace } from '../timeline/trace.ts';
import type { WebhookVerbs } from '../webhooks/endpoints.ts';
import type { TrackingVerbs } from '../tracking/tracker.ts';

/** For operators only. */
export interface QueueVerbs {
  isOperator(caller: Caller): boolean;
  read(): Promise<QueueOverview>;
  listPauses(): Promise<readonly Pause[]>;
  /** Throws a Refusal for a tenant that does not exist. */
  pause(wanted: NewPause): Promise<Pause>;
  /** False: there is no such pause. */
  resume(id: string): Promise<boolean>;
}

/** For operators only. */
export interface DoctorVerbs {
  read(): Promise<KeptLook>;
  /** Looks now. Throws a Refusal when it has just been done. */
  look(about: { readonly isActive: boolean }): Promise<KeptLook>;
}

export interface Verbs {
  acceptEmail(
    caller: Caller,
    send: Sending & { readonly request: SendEmailRequest; readonly spooled: Spooled },
  ): Promise<Accepted>;
  acceptBatch(caller: Caller, send: BatchSending): Promise<Accepted>;
  /** Throws a Refusal when there is no such email or it is not scheduled any more. */
  cancelEmail(caller: Caller, id: string): Promise<void>;
  /** The same; `scheduledAt` as the request has it. */
  rescheduleEmail(
    caller: Caller,
    move: { readonly id: string; readonly scheduledAt: string | null | undefined },
  ): Promise<void>;
  /** Sends given-up recipients on their way again; which. Throws a Refusal when there are none. */
  releaseEmail(
    caller: Caller,
    about: { readonly id: string; readonly includeUnknown: boolean },
  ): Promise<readonly string[]>;
  listEmails(caller: Caller, page: PageRequest, filters: EmailFilters): Promise<EmailPage>;
  emailMetrics(caller: Caller, query: MetricsQuery): Promise<EmailMetrics>;
  findEmail(caller: Caller, id: string): Promise<EmailRecord | null>;
  readTrace(caller: Caller, id: string): Promise<Trace | null>;
  readonly queue: QueueVerbs;
  readonly doctor: DoctorVerbs;
  readonly receiving: ReceivingVerbs;
  readonly receivingRoutes: RouteVerbs & {
    /** What would become of a message. Throws a Refusal for what is no address. */
    test(tenantId: string, request: TestRouteRequest): Promise<DryRun>;
  };
  readonly forwardingRules: RuleVerbs;
  readonly replays: ReplayVerbs;
  /** Makes and opens links that need no API key. */
  readonly links: SignedLinks;
  /** What they open. */
  readonly openers: LinkOpeners;
  /** What readers ask for. */
  readonly tracking: TrackingVerbs;
  readonly attachments: AttachmentVerbs;
  readonly apiKeys: ApiKeyVerbs;
  readonly logs: LogVerbs;
  readonly templates: TemplateVerbs;
  readonly suppressions: SuppressionVerbs;
  readonly topics: TopicVerbs;
  readonly webhooks: WebhookVerbs;
  readonly broadcasts: BroadcastVerbs;
  /** What readers decide, by the links in their emails. */
  readonly preferences: PreferenceVerbs;
  /** What config/preferences.json says now. */
  readonly preferencePolicy: () => PreferencePolicy;
  readonly contacts: ContactVerbs;
  readonly segments: SegmentVerbs;
  readonly contactProperties: PropertyVerbs;
  readonly contactImports: ImportVerbs;
  readonly events: EventVerbs;
  readonly automations: AutomationVerbs;
  readonly usage: UsageVerbs;
  readonly domains: DomainVerbs;
  /** Null where there is no sink. */
  readonly sink: {
    list(page: PageRequest): Promise<SinkPage>;
    empty(): Promise<void>;
  } | null;
}
