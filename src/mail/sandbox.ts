/**
 * Recipients for trying things out, at the domain that Resend has for it: nothing that is sent to them leaves this
 * machine, however delivery is set.
 *
 * `delivered@`, `bounced@`, `complained@` and `suppressed@`, each with or without a `+label`. Every other local part
 * there does not exist.
 */

export const SANDBOX_DOMAIN = 'resend.dev';

const FATES = ['delivered', 'bounced', 'complained', 'suppressed'] as const;
export type SandboxFate = (typeof FATES)[number];

/** What becomes of mail to this address; null: it is none of the sandbox's, or unknown there. */
export function sandboxFate(address: string): SandboxFate | null {
  const at = address.lastIndexOf('@');
  if (address.slice(at + 1).toLowerCase() !== SANDBOX_DOMAIN) return null;
  const local = address.slice(0, Math.max(at, 0)).toLowerCase().split('+', 1)[0];
  return FATES.find((fate) => fate === local) ?? null;
}
