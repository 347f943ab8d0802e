// Builds what runs automations and how they send: part of the composition root.
import type { Caller } from './access/keys.ts';
import { createAutomationRunner, type RunnerDependencies } from './audience/automation-runner.ts';
import type { PreferenceLinks } from './audience/preference-links.ts';
import { startTurns, type Turns } from './jobs/turns.ts';
import type { Logger } from './log.ts';
import type { Accepted, Sending } from './sending/accept.ts';
import type { Spooled } from './sending/attachments.ts';
import type { SendEmailRequest } from './sending/request.ts';
import { newId } from './store/id.ts';
import type { Store } from './store/orm.ts';

/** How automations send. */
export type AutomationMail = Pick<RunnerDependencies, 'sendEmail' | 'unsubscribeUrl'>;

export function composeAutomationMail(d: {
  readonly accept: (
    caller: Caller,
    send: Sending & { readonly request: SendEmailRequest; readonly spooled: Spooled },
  ) => Promise<Accepted>;
  readonly links: PreferenceLinks;
}): AutomationMail {
  return {
    async sendEmail(tenantId, request, idempotencyKey) {
      const { body } = await d.accept(
        { tenantId, keyId: '', permission: 'full_access', domainId: null },
        {
          request,
          spooled: new Map(),
          idempotencyKey,
          origin: { via: 'automation', requestId: newId(), userAgent: null, address: null },
        },
      );
      return (body as { readonly id: string }).id;
    },
    unsubscribeUrl: (of) => d.links.url({ ...of, broadcastId: null, emailId: null }),
  };
}

export function startAutomations(d: {
  readonly store: Store;
  readonly log: Logger;
  readonly mail: AutomationMail;
}): Turns {
  const { store, log, mail } = d;
  const runner = createAutomationRunner({ store, log, now: () => new Date(), ...mail });
  return startTurns({ name: 'automations', log, turn: () => runner.turn() });
}
