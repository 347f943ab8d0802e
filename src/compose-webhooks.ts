// Builds webhooks: what the API does with them, and the loops that tell endpoints what happens. Part of the composition
// root.
import type { Config } from './config.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createResolver } from './dns/resolver.ts';
import { startTurns, type Turns } from './jobs/turns.ts';
import type { Logger } from './log.ts';
import { ownAddresses } from './own-addresses.ts';
import type { Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';
import { startCalls } from './webhooks/calls.ts';
import type { EndpointRules } from './webhooks/endpoint.ts';
import { createWebhookVerbs, type WebhookVerbs } from './webhooks/endpoints.ts';
import { createFanOut } from './webhooks/fan-out.ts';

/** Between two looks at the outbox, which others write. */
const OUTBOX_MS = 500;
/** People develop their receivers on their own machine. */
const LOOPBACK = ['127.0.0.0/8', '::1/128'];

interface Parts {
  readonly store: Store;
  /** The master secret. */
  readonly secret: string;
}

/** `close` ends what it asks the DNS. */
export function composeWebhookVerbs(
  config: Config,
  d: Parts & { readonly onDue: () => void },
): { readonly verbs: WebhookVerbs; readonly close: () => void } {
  const { rules, close } = openRules(config);
  const verbs = createWebhookVerbs({
    ...rules,
    store: d.store,
    key: keyOf(d.secret),
    now: () => new Date(),
    onDue: d.onDue,
  });
  return { verbs, close };
}

export function startWebhooks(config: Config, d: Parts & { readonly log: Logger }): Turns {
  const { rules, close } = openRules(config);
  const now = (): Date => new Date();
  const calls = startCalls({
    ...rules,
    store: d.store,
    log: d.log,
    key: keyOf(d.secret),
    now,
    random: Math.random,
  });
  const fanOut = createFanOut({ store: d.store, log: d.log, now });
  const turns = startTurns({
    name: 'webhooks',
    log: d.log,
    async turn() {
      const { hasMore, endpoints } = await fanOut.turn();
      calls.tell(endpoints);
      return hasMore ? 0 : OUTBOX_MS;
    },
  });
  return {
    nudge() {
      turns.nudge();
      calls.nudge();
    },
    async stop() {
      await turns.stop();
      await calls.stop();
      close();
    },
  };
}

const keyOf = (secret: string): Buffer => deriveKey(secret, 'webhook secrets at rest');

function openRules(config: Config): { readonly rules: EndpointRules; readonly close: () => void } {
  const isDevelopment = config.mode === 'development';
  const resolver = createResolver({ servers: config.dnsServers });
  const guard = createAddressGuard({
    allow: [...config.privateHosts, ...(isDevelopment ? LOOPBACK : [])],
    ownAddresses,
  });
  return {
    rules: { web: { resolver, guard, what: 'the endpoint' }, isDevelopment },
    close: () => resolver.close(),
  };
}
