// Automations for tests: under a clock of the test, with emails that are really accepted.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { CreateAutomationRequest } from '../../src/audience/automations.ts';
import { createEventVerbs } from '../../src/audience/events.ts';
import { createPreferenceLinks } from '../../src/audience/preference-links.ts';
import { composeAutomationMail } from '../../src/compose-automations.ts';
import { createDomainLookup } from '../../src/domains/lookup.ts';
import { createGroupCommit } from '../../src/queue/group-commit.ts';
import { acceptEmail } from '../../src/sending/accept.ts';
import { createFilledBudget } from '../../src/sending/filled-budget.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { createTemplateRenderer } from '../../src/templates/render.ts';
import { createTemplateVerbs } from '../../src/templates/templates.ts';
import { createTrackingTokens } from '../../src/tracking/tokens.ts';
import { createHtmlTracker } from '../../src/tracking/tracker.ts';
import { createAutomationRunner } from '../../src/audience/automation-runner.ts';
import type { AutomationRunner } from '../../src/audience/automation-runner.ts';
import { createAutomationVerbs } from '../../src/audience/automations.ts';
import { findRun, listRuns } from '../../src/audience/automation-runs.ts';
import { createContactVerbs } from '../../src/audience/contacts.ts';
import { openQueue, silent } from './queue.ts';

export type Steps = CreateAutomationRequest['steps'];
export type Connections = CreateAutomationRequest['connections'];
export interface Fields {
  [field: string]: unknown;
}

export const MINUTE_MS = 60_000;
export const HOUR_MS = 60 * MINUTE_MS;
export const DAY_MS = 24 * HOUR_MS;

export const trigger = (event: string): Steps[number] => ({
  key: 'start',
  type: 'trigger',
  config: { event_name: event },
});

/** One after the other. */
export const chain = (...steps: Steps): { steps: Steps; connections: Connections } => ({
  steps,
  connections: steps.slice(1).map(({ key }, index) => ({ from: steps[index]!.key, to: key })),
});
export async function openAutomations() {
  const bench = await openQueue();
  const { store, tenantId } = bench;
  let nudges = 0;
  let clock = new Date('2026-05-06T12:00:00.000Z');
  const now = (): Date => clock;
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-automations-'));
  await store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, sending_verified)
     values ($1, $2, 'sender.test', 'verified', true)`,
    [tenantId, newId()],
  );
  const links = createPreferenceLinks({ key: Buffer.alloc(32), publicUrl: 'https://m.test' });
  const accepting = {
    store,
    blobs: openDiskBlobs(folder),
    commit: createGroupCommit(store.pool),
    domains: createDomainLookup(store.pool, Buffer.alloc(32)),
    templates: createTemplateRenderer(store),
    filled: createFilledBudget(),
    preferenceLinks: links,
    tracker: createHtmlTracker({
      tokens: createTrackingTokens(Buffer.alloc(32)),
      publicUrl: 'https://m.test',
    }),
    now: () => new Date(),
    laneOf: (domain: string) => `mx:${domain}`,
    lifetimeMs: MINUTE_MS,
    standIn: null,
    onStored: () => undefined,
  };
  const mail = composeAutomationMail({
    accept: (caller, send) => acceptEmail(accepting, caller, send),
    links,
  });
  const verbs = createAutomationVerbs({ store, now, onRuns: () => (nudges += 1) });
  const events = createEventVerbs({ store, now, onRuns: () => (nudges += 1) });
  const contacts = createContactVerbs(store, now);
  const runner = createAutomationRunner({ store, log: silent, now, ...mail });
  const templates = createTemplateVerbs(store, now);
  const templateId = await templates.create(tenantId, {
    name: 'Welcome',
    alias: 'welcome',
    from: 'Ada <ada@sender.test>',
    subject: 'Welcome',
    html: '<p>{{{NAME}}} {{{PLAN}}} {{{RESEND_UNSUBSCRIBE_URL}}}</p>',
    variables: [
      { key: 'NAME', type: 'string', fallback_value: 'you' },
      { key: 'PLAN', type: 'string', fallback_value: 'none' },
    ],
  });
  await templates.publish(tenantId, templateId);
  const plainId = await templates.create(tenantId, {
    name: 'Plain',
    from: 'Ada <ada@sender.test>',
    subject: 'Plain',
    html: '<p>Hello</p>',
  });
  await templates.publish(tenantId, plainId);
  /** Turns until there is nothing more to do now. */
  async function settle(by: AutomationRunner = runner): Promise<void> {
    for (let turn = 0; (await by.turn()) === 0; turn += 1) {
      if (turn > 500) throw new Error('it goes on for ever');
    }
  }

  const mailStep = (key: string, config: Fields = {}): Steps[number] => ({
    key,
    type: 'send_email',
    config: { template: { id: templateId }, ...config },
  });
  let count = 0;
  /** An enabled automation with an event of its own. */
  async function automation(
    make: (event: string) => { steps: Steps; connections: Connections },
  ): Promise<{ id: string; event: string }> {
    const event = `event.${(count += 1)}`;
    const request = { name: event, status: 'enabled' as const, ...make(event) };
    return { id: await verbs.create(tenantId, request), event };
  }
  async function contact(fields: Fields = {}): Promise<{ id: string; email: string }> {
    const email = `c${(count += 1)}@recipient.test`;
    const { id } = await contacts.create(tenantId, { email, ...fields });
    return { id, email };
  }
  async function states(
    automationId: string,
  ): Promise<{ status: string; steps: Fields; all: Fields }[]> {
    const page = { limit: 100, after: undefined, before: undefined };
    const statuses = ['running', 'completed', 'failed', 'cancelled'] as const;
    const { items } = await listRuns(store, { tenantId, automationId, statuses }, page);
    return Promise.all(
      items.map(async ({ id }) => {
        const run = await findRun(store, { tenantId, automationId, runId: id });
        return {
          status: run!.status,
          steps: Object.fromEntries(run!.steps.map(({ key, status }) => [key, status])),
          all: Object.fromEntries(run!.steps.map((step) => [step.key, step])),
        };
      }),
    );
  }
  async function onlyState(
    automationId: string,
  ): Promise<Awaited<ReturnType<typeof states>>[number]> {
    const all = await states(automationId);
    if (all.length !== 1) throw new Error(`there are ${all.length} runs`);
    return all[0]!;
  }
  async function emailsTo(address: string): Promise<{ id: string; html: string }[]> {
    const { rows } = await store.pool.query<{ id: string; html: string }>(
      `select e.id, c.html from email e join email_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
     where e.tenant_id = $1 and e.to_given ->> 0 = $2 order by e.id`,
      [tenantId, address],
    );
    return rows;
  }

  return {
    store,
    tenantId,
    now,
    mail,
    verbs,
    events,
    contacts,
    runner,
    templateId,
    plainId,
    settle,
    mailStep,
    automation,
    contact,
    states,
    onlyState,
    emailsTo,
    /** How often the runner was called. */
    nudges: () => nudges,
    pass(ms: number): void {
      clock = new Date(clock.getTime() + ms);
    },
    async stop(): Promise<void> {
      await bench.stop();
      await rm(folder, { recursive: true, force: true });
    },
  };
}
