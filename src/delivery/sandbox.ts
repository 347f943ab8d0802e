// What the hosts of the sandbox's recipients would say (mail/sandbox.ts): made up here, without a connection, and
// recorded with `sandbox` as the host, so that no timeline claims more than was.
import { sandboxFate } from '../mail/sandbox.ts';
import { NO_EVIDENCE } from '../queue/settle.ts';
import type { Decided } from './attempt.ts';

/** The complaint of `complained@` follows when the delivery is settled (queue/settle.ts). */
export function answerInSandbox(recipient: string): Decided {
  const fate = sandboxFate(recipient);
  const said = { ...NO_EVIDENCE, host: 'sandbox' };
  if (fate === 'delivered' || fate === 'complained') {
    const reply = '250 2.0.0 Ok: taken by the sandbox, nothing was sent';
    const evidence = { ...said, stage: 'dot', code: 250, enhanced: '2.0.0', reply };
    return { verdict: 'delivered', evidence };
  }
  const reply =
    fate === null
      ? '550 5.1.1 No such mailbox: the sandbox has delivered@, bounced@, complained@ and suppressed@'
      : '550 5.1.1 No such mailbox: the sandbox refuses this address';
  const about = { stage: 'rcpt', cause: 'no_mailbox', code: 550, enhanced: '5.1.1', reply };
  return { verdict: 'bounced', evidence: { ...said, ...about } };
}
