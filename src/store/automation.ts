// Custom events, and what is done by itself when one comes: an automation is a graph of steps, a run is one way of one
// contact through it.
import { defineEntity, p } from '@mikro-orm/core';

export const fieldTypes = ['string', 'number', 'boolean', 'date'] as const;
export type FieldType = (typeof fieldTypes)[number];

export const EventDefinition = defineEntity({
  name: 'EventDefinition',
  tableName: 'event_definition',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** Unique in the tenant. */
    name: p.text(),
    /** What its payload must hold; null: anything. */
    schema: p.json<Readonly<Record<string, FieldType>>>().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const stepTypes = [
  'trigger',
  'delay',
  'send_email',
  'wait_for_event',
  'condition',
  'contact_update',
  'contact_delete',
  'add_to_segment',
] as const;
export type StepType = (typeof stepTypes)[number];

export const connectionTypes = [
  'default',
  'condition_met',
  'condition_not_met',
  'timeout',
  'event_received',
] as const;

export interface AutomationStep {
  readonly key: string;
  readonly type: StepType;
  readonly config: Readonly<Record<string, unknown>>;
}

export interface AutomationConnection {
  readonly from: string;
  readonly to: string;
  readonly type: (typeof connectionTypes)[number];
}

export const Automation = defineEntity({
  name: 'Automation',
  tableName: 'automation',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    status: p.enum(['enabled', 'disabled']),
    /** The name of the event that starts it. */
    triggerEvent: p.text(),
    steps: p.json<readonly AutomationStep[]>(),
    connections: p.json<readonly AutomationConnection[]>(),
    /** Runs that began until then end as cancelled; null when all have. */
    stoppedAt: p.datetime().nullable(),
    /** Nobody sees it any more; the row goes when its runs are gone. */
    removedAt: p.datetime().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const runStatuses = ['running', 'completed', 'failed', 'cancelled'] as const;
export const runStepStatuses = [
  'pending',
  'running',
  'completed',
  'failed',
  'skipped',
  'waiting',
] as const;

export const AutomationRun = defineEntity({
  name: 'AutomationRun',
  tableName: 'automation_run',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    automationId: p.uuid(),
    /** It may be gone. */
    contactId: p.uuid(),
    /** Normalized. */
    address: p.text(),
    /** The event that started it: name and payload. */
    event: p.json<{
      readonly name: string;
      readonly payload: Readonly<Record<string, unknown>> | null;
    }>(),
    /** As they were when it began. */
    steps: p.json<readonly AutomationStep[]>(),
    connections: p.json<readonly AutomationConnection[]>(),
    status: p.enum(runStatuses),
    /** Where it stands. */
    stepKey: p.text().nullable(),
    /** The name of the event it waits for. */
    waitsFor: p.text().nullable(),
    /** When the step it stands at goes on; null once it has ended. */
    dueAt: p.datetime().nullable(),
    tries: p.smallint(),
    startedAt: p.datetime().nullable(),
    completedAt: p.datetime().nullable(),
    createdAt: p.datetime(),
  },
});

export const AutomationRunStep = defineEntity({
  name: 'AutomationRunStep',
  tableName: 'automation_run_step',
  properties: {
    tenantId: p.uuid().primary(),
    runId: p.uuid().primary(),
    key: p.text().primary(),
    type: p.text(),
    status: p.enum(runStepStatuses),
    /** What a step that sends an email asks for, fixed when it begins, so that every try asks for the same. */
    request: p.json<Readonly<Record<string, unknown>>>().nullable(),
    output: p.json<Readonly<Record<string, unknown>>>().nullable(),
    error: p.json<Readonly<Record<string, unknown>>>().nullable(),
    createdAt: p.datetime(),
    startedAt: p.datetime().nullable(),
    completedAt: p.datetime().nullable(),
  },
});
