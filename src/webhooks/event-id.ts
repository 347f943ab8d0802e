// Ids of webhook events as others see them: `msg_` and the 32 digits of the UUID. They are the `webhook-id` of every call.

const PREFIX = 'msg_';
const SHOWN = /^msg_[0-9a-f]{32}$/i;

export const showEventId = (id: string): string => PREFIX + id.replaceAll('-', '');

/** The UUID; null for what is no id of an event. */
export function readEventId(shown: string): string | null {
  if (!SHOWN.test(shown)) return null;
  const digits = shown.slice(PREFIX.length).toLowerCase();
  return [
    digits.slice(0, 8),
    digits.slice(8, 12),
    digits.slice(12, 16),
    digits.slice(16, 20),
    digits.slice(20),
  ].join('-');
}
