// What the API can do, as functions; the composition root builds them and controllers call them. A test
// of the edge can pass its own.
import type { Caller } from '../access/keys.ts';
import type { Accepted, Origin } from '../sending/accept.ts';
import type { PageRequest } from '../access/page.ts';
import type { EmailPage, EmailRecord } from '../sending/read.ts';
import type { SendEmailRequest } from '../sending/request.ts';
import type { SinkPage } from '../receiving/sink-messages.ts';
import type { Trace } from '../timeline/trace.ts';

export interface Verbs {
  acceptEmail(
    caller: Caller,
    send: {
      readonly request: SendEmailRequest;
      readonly idempotencyKey: string | null;
      readonly origin: Origin;
    },
  ): Promise<Accepted>;
  listEmails(caller: Caller, page: PageRequest): Promise<EmailPage>;
  findEmail(caller: Caller, id: string): Promise<EmailRecord | null>;
  readTrace(caller: Caller, id: string): Promise<Trace | null>;
  /** Null where there is no sink. */
  readonly sink: {
    list(page: PageRequest): Promise<SinkPage>;
    empty(): Promise<void>;
  } | null;
}
