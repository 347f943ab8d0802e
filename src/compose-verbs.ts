// Builds what the API can do from plain parts: part of the composition root.
import { createApiKeyVerbs } from './access/api-keys.ts';
import type { Caller } from './access/keys.ts';
import { createLogVerbs } from './access/logs.ts';
import type { RequestLogWriter } from './access/request-log.ts';
import { createSignedLinks } from './access/signed-link.ts';
import { createUsageVerbs } from './access/usage.ts';
import { createAutomationVerbs } from './audience/automations.ts';
import { createEventVerbs } from './audience/events.ts';
import { createImportVerbs } from './audience/imports.ts';
import { createContactVerbs } from './audience/contacts.ts';
import { createPropertyVerbs } from './audience/properties.ts';
import { createSegmentVerbs } from './audience/segments.ts';
import { createBroadcastVerbs } from './audience/broadcasts.ts';
import { createTopicVerbs } from './audience/topics.ts';
import type { AudienceNudges } from './compose-audience.ts';
import { composeAutomationMail, type AutomationMail } from './compose-automations.ts';
import type { Config } from './config.ts';
import { poolOf, type DeliveryPolicy } from './delivery/egress.ts';
import { laneFor } from './delivery/next-hop.ts';
import type { DomainVerbs } from './domains/domains.ts';
import { createDomainLookup, type DomainLookup } from './domains/lookup.ts';
import type { DoctorVerbs, Verbs } from './http/verbs.ts';
import type { Logger } from './log.ts';
import { createGroupCommit } from './queue/group-commit.ts';
import { SCHEDULE_LANE } from './queue/schedule.ts';
import type { Waiting } from './queue/settle.ts';
import { dryRun } from './receiving/dry-run.ts';
import { createReceivingVerbs } from './receiving/read-received.ts';
import { createReplayVerbs } from './receiving/replay.ts';
import { createRouteVerbs } from './receiving/routes.ts';
import { createRuleVerbs } from './receiving/rules.ts';
import { emptySink, listSinkMessages } from './receiving/sink-messages.ts';
import {
  acceptEmail,
  acceptMessage,
  type AcceptDependencies,
  type SubmittedMessage,
} from './sending/accept.ts';
import { acceptBatch } from './sending/batch.ts';
import { createLinkOpeners } from './compose-links.ts';
import { composeQueue } from './compose-queue.ts';
import { composePreferences } from './compose-preferences.ts';
import { composeTracking } from './compose-tracking.ts';
import { composeWebhookVerbs } from './compose-webhooks.ts';
import { findAuthorDomain } from './sending/complete.ts';
import { createFanOut, type FanOut } from './sending/fan-out.ts';
import { createAttachmentVerbs } from './sending/read-attachments.ts';
import { checkSchedule } from './sending/request.ts';
import { createFilledBudget } from './sending/filled-budget.ts';
import { readMetrics } from './sending/metrics.ts';
import { findEmail, listEmails } from './sending/read.ts';
import { releaseGivenUp } from './sending/release.ts';
import { cancelScheduled, moveScheduled } from './sending/scheduled.ts';
import { submitMessage, type Submission } from './sending/submit.ts';
import type { BlobStore } from './store/blob.ts';
import { newId } from './store/id.ts';
import type { Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';
import { createSuppressionVerbs } from './suppressions/suppressions.ts';
import { createTemplateRenderer } from './templates/render.ts';
import { createTemplateVerbs } from './templates/templates.ts';
import { readTrace } from './timeline/trace.ts';

/** The verified domain that development mode sends and receives with. */
export const HOME_DOMAIN = 'mailstead.test';

export interface VerbParts {
  readonly requestLog: Pick<RequestLogWriter, 'catchUp'>;
  readonly config: Config;
  readonly log: Logger;
  readonly store: Store;
  readonly blobs: BlobStore;
  /** Where an operator's own files lie (operator-files.ts). */
  readonly configFolder: string;
  /** What config/delivery.json says now. */
  readonly policy: () => DeliveryPolicy;
  /** The master secret; keys are derived from it (store/seal.ts). */
  readonly secret: string;
  readonly sealingKey: Buffer;
  readonly firstTenantId: string;
  /** Without a trailing slash. */
  readonly publicUrl: string;
  /** Deliveries became ready. */
  readonly nudge: () => void;
  /** A replay of received mail was asked for. */
  readonly onReplay: () => void;
  /** Deliveries now wait for a time. */
  readonly onWaiting: (waiting: readonly Waiting[]) => void;
  readonly domains: DomainVerbs;
  readonly doctor: DoctorVerbs;
  /** There is something to do for these loops. */
  readonly audience: AudienceNudges;
  readonly hasSink: boolean;
}

/** What the SMTP door can do beside the API. */
export interface SubmissionVerb {
  submitMessage(caller: Caller, submission: Submission): Promise<{ readonly id: string }>;
}

/** Opens and clicks are noted beside the requests. */
export interface VerbsStop {
  /** Stores those that wait, and looks no more at the operator's files. */
  stopVerbs(): Promise<void>;
}

/** What makes the emails of broadcasts. */
export interface FanOutVerb {
  readonly fanOut: FanOut;
}

/** How our own mail gets into the queue. */
export interface OwnMailVerb {
  /** Accepts a TLS report as an email of the first tenant; the same key within a day is the same email. */
  acceptReport(message: SubmittedMessage, idempotencyKey: string): Promise<unknown>;
  readonly automationMail: AutomationMail;
}

/** RFC 8460 §5.5: a report is tried for a day. */
const REPORT_LIFETIME_MAX_MS = 24 * 3_600_000;

export function composeVerbs(
  d: VerbParts,
): Verbs & SubmissionVerb & OwnMailVerb & VerbsStop & FanOutVerb {
  const { config, store, blobs } = d;
  const commit = createGroupCommit(store.pool);
  const now = (): Date => new Date();
  const onPlanned = (...dueAts: readonly Date[]): void =>
    d.onWaiting(dueAts.map((dueAt) => ({ lane: SCHEDULE_LANE, dueAt })));
  const preferences = composePreferences({ ...d, now });
  const tracking = composeTracking({ ...d, onTold: d.audience.webhooks });
  const webhooks = composeWebhookVerbs(config, { ...d, onDue: d.audience.webhooks });
  const lookup = createDomainLookup(store.pool, d.sealingKey);
  const accepting: AcceptDependencies = {
    store,
    commit,
    blobs,
    templates: createTemplateRenderer(store),
    filled: createFilledBudget(),
    preferenceLinks: preferences.links,
    tracker: tracking.tracker,
    domains: lookup,
    now,
    laneOf: laneFor(config.delivery, (sender) => poolOf(d.policy(), sender)),
    lifetimeMs: config.messageLifetimeMs,
    // Only where nothing leaves the machine may an unknown author send.
    standIn:
      config.mode === 'development' && config.delivery === 'sink'
        ? { tenantId: d.firstTenantId, domain: HOME_DOMAIN }
        : null,
    onStored(emails) {
      d.nudge();
      const dueAts = emails.flatMap(({ lastEvent, scheduledAt }) =>
        lastEvent === 'scheduled' && scheduledAt !== null ? [scheduledAt] : [],
      );
      if (dueAts.length > 0) onPlanned(...dueAts);
    },
  };
  const fanOut = createFanOut({ ...accepting, log: d.log, onReady: d.nudge });
  const scheduled = { store, blobs, now, onPlanned };
  const rules = createRuleVerbs({ store, now, hostname: config.hostname });
  const queue = composeQueue({ store, firstTenantId: d.firstTenantId, nudge: d.nudge });
  const releasing = { store, blobs, lifetimeMs: config.messageLifetimeMs, onReady: d.nudge };
  return {
    submitMessage: (caller, submission) => submitMessage(accepting, caller, submission),
    acceptReport: (message, idempotencyKey) =>
      acceptMessage(
        {
          ...accepting,
          standIn: null,
          lifetimeMs: Math.min(config.messageLifetimeMs, REPORT_LIFETIME_MAX_MS),
        },
        { tenantId: d.firstTenantId, keyId: '', permission: 'full_access', domainId: null },
        {
          message,
          idempotencyKey,
          origin: { via: 'tls_report', requestId: newId(), userAgent: null, address: null },
        },
      ),
    automationMail: composeAutomationMail({
      accept: (caller, send) => acceptEmail(accepting, caller, send),
      links: preferences.links,
    }),
    acceptEmail: (caller, send) => acceptEmail(accepting, caller, send),
    acceptBatch: (caller, send) => acceptBatch(accepting, caller, send),
    cancelEmail: (caller, id) => cancelScheduled(scheduled, caller, id),
    rescheduleEmail: (caller, move) => moveScheduled(scheduled, caller, move),
    releaseEmail: (caller, about) => releaseGivenUp(releasing, caller, about),
    listEmails: (caller, page, filters) => listEmails(store, caller.tenantId, page, filters),
    emailMetrics: (caller, query) => readMetrics(store, caller.tenantId, { query, now: now() }),
    findEmail: (caller, id) => findEmail(store, caller.tenantId, id),
    readTrace: (caller, id) =>
      readTrace(store, caller.tenantId, id, { isOperator: queue.isOperator(caller) }),
    queue,
    doctor: d.doctor,
    receiving: createReceivingVerbs({ store, blobs }),
    receivingRoutes: {
      ...createRouteVerbs(store, now),
      test: (tenantId, request) => dryRun({ pool: store.pool, rules }, tenantId, request),
    },
    forwardingRules: rules,
    replays: createReplayVerbs({ store, now, onReplay: d.onReplay }),
    links: createSignedLinks({
      key: deriveKey(d.secret, 'signed links'),
      publicUrl: d.publicUrl,
      now,
    }),
    openers: createLinkOpeners({ store, blobs }),
    tracking: tracking.verbs,
    preferences: preferences.verbs,
    preferencePolicy: preferences.policy,
    async stopVerbs() {
      preferences.stop();
      webhooks.close();
      await tracking.stop();
    },
    attachments: createAttachmentVerbs({ store }),
    apiKeys: createApiKeyVerbs(store),
    logs: createLogVerbs(store, d.requestLog),
    templates: createTemplateVerbs(store, now),
    suppressions: createSuppressionVerbs(store),
    topics: createTopicVerbs(store, now),
    webhooks: webhooks.verbs,
    broadcasts: createBroadcastVerbs({
      store,
      now,
      checkAuthor: (caller, domain) => findAuthorDomain(accepting, caller, domain),
      planAt: (given) => checkSchedule(given, now()),
      onQueued: d.audience.broadcasts,
      onCanceled: fanOut.withdraw,
    }),
    fanOut,
    contacts: createContactVerbs(store, now),
    segments: createSegmentVerbs(store, now),
    contactProperties: createPropertyVerbs(store, now),
    contactImports: createImportVerbs({ store, blobs, now, onImport: d.audience.imports }),
    events: createEventVerbs({ store, now, onRuns: d.audience.automations }),
    automations: createAutomationVerbs({ store, now, onRuns: d.audience.automations }),
    usage: createUsageVerbs(store, now, config.rateLimit),
    domains: seenAtOnce(d.domains, lookup),
    sink: d.hasSink
      ? { list: (page) => listSinkMessages(store, page), empty: () => emptySink(store) }
      : null,
  };
}

/** What was just changed holds for the next request to this process. */
function seenAtOnce(domains: DomainVerbs, lookup: Pick<DomainLookup, 'forget'>): DomainVerbs {
  const told = async <T>(change: Promise<T>): Promise<T> => {
    try {
      return await change;
    } finally {
      lookup.forget();
    }
  };
  return {
    ...domains,
    create: (caller, request) => told(domains.create(caller, request)),
    update: (caller, id, request) => told(domains.update(caller, id, request)),
    remove: (caller, id) => told(domains.remove(caller, id)),
    verify: (caller, id) => told(domains.verify(caller, id)),
    claims: {
      ...domains.claims,
      create: (...claim) => told(domains.claims.create(...claim)),
      verify: (...claim) => told(domains.claims.verify(...claim)),
    },
  };
}
