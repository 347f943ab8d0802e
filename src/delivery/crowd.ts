// How much a worker may still claim, by what it has in hand. Hosts that answer nothing cost it connections and memory for
// minutes, and anybody can have very many of them: where nothing has gone well yet, mail takes a part of the places only,
// so that mail for hosts that are known to take it always finds some.
import type { Lane } from './lane.ts';

export interface Crowd {
  /** How much may be claimed; 0 rather than a few, so that claims stay worth their cost. */
  readonly room: number;
  /** Whether mail may also go where nothing has gone well yet. */
  readonly mayTry: boolean;
  /** Whether mail may also go where it takes long. */
  readonly mayLinger: boolean;
}

/** Claimed at a time; a batch is worked off in a fraction of a second. */
const CLAIM_MAX = 200;
/** Claimed and not begun: no more is claimed above this, in numbers and in bytes of messages. */
const QUEUED_MAX = 1_000;
const QUEUED_BYTES_MAX = 32 * 1024 * 1024;
/** Begun at a time, in all lanes that move. */
const ACTIVE_MAX = 600;
/** Claimed and begun, in lanes where nothing has gone well yet. */
const UNPROVEN_MAX = 400;
/** In lanes that are slow, which would take all other places: claimed and not begun, and begun. */
const SLOW_QUEUED_MAX = 1_000;
const SLOW_MAX = 800;
/** Begun, in lanes that hang; and of everything that was begun, in bytes of messages. */
const HANGING_MAX = 1_400;
const OPEN_BYTES_MAX = 64 * 1024 * 1024;

export function lookAtCrowd(
  lanes: Iterable<Pick<Lane, 'queued' | 'active' | 'isHanging' | 'isSlow' | 'isProven'>>,
  /** `waiting`: deliveries whose lane is not known yet; bytes of what was not begun, and of what was. */
  about: { readonly waiting: number; readonly queuedBytes: number; readonly openBytes: number },
): Crowd {
  let queued = about.waiting;
  let moving = 0;
  let slowQueued = 0;
  let slow = 0;
  let hanging = 0;
  let unproven = about.waiting;
  for (const lane of lanes) {
    const isHanging = lane.isHanging();
    if (lane.isSlow()) slowQueued += lane.queued();
    else queued += lane.queued();
    if (isHanging) hanging += lane.active();
    else if (lane.isSlow()) slow += lane.active();
    else moving += lane.active();
    if (!lane.isProven()) unproven += lane.queued() + (isHanging ? 0 : lane.active());
  }
  const isFull = about.queuedBytes > QUEUED_BYTES_MAX;
  const room = isFull ? 0 : Math.min(CLAIM_MAX, QUEUED_MAX - queued, ACTIVE_MAX - moving);
  return {
    room: room < CLAIM_MAX / 4 ? 0 : room,
    mayTry: unproven < UNPROVEN_MAX && hanging < HANGING_MAX && about.openBytes < OPEN_BYTES_MAX,
    mayLinger: slowQueued < SLOW_QUEUED_MAX && slow < SLOW_MAX && about.openBytes < OPEN_BYTES_MAX,
  };
}
