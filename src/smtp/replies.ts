// What every listener of ours says in the same words.
import type { Reply } from './listener.ts';

export const STOPPING: Reply = {
  code: 421,
  text: '4.3.2 The service is shutting down, try again later',
};
export const TOO_MANY: Reply = { code: 421, text: '4.7.0 Too many connections, try again later' };
export const NEEDS_SMTPUTF8: Reply = {
  code: 553,
  text: '5.6.7 This address has characters outside ASCII: announce SMTPUTF8 at MAIL FROM',
};
/** RFC 8689 §4: better refused than forgotten on the way. */
export const NO_REQUIRETLS: Reply = {
  code: 555,
  text: '5.5.4 REQUIRETLS is not offered here: send without it',
};
