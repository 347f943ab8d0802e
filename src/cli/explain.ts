// `explain`: everything that is known about one email, from the request to the last reply, and why it waits.
import { isUuid } from '../store/id.ts';
import { findTenant } from '../queue/late.ts';
import { findAnswered } from '../receiving/replies.ts';
import { findEmail } from '../sending/read.ts';
import { listTenants } from '../access/tenants.ts';
import { readTrace, type Trace, type TraceEvent } from '../timeline/trace.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { withExample } from './options.ts';
import { cellText, fields, printable, table } from './output.ts';
import { findTenantNamed } from './tenants.ts';

/** For a Message-ID of a client's own each tenant is asked. */
const TENANTS_MAX = 10_000;
const TENANTS_PER_PAGE = 100;
const MESSAGE_ID = /^<?([^<>\s@]+@[^<>\s@]+)>?$/;

interface Found {
  readonly tenantId: string;
  readonly id: string;
}

export const addExplainCommand: AddCommands = (program, run) => {
  withExample(
    program
      .command('explain')
      .description('Tell the whole story of an email: every attempt, every reply, why it waits')
      .argument('<email>', 'id of the email, or its Message-ID')
      .option('--tenant <tenant>', 'whose it is, if you know: id or name'),
    'explain 019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    "explain '<order-4711@shop.example>'",
  ).action(
    run(async (tools, given: string, options: { readonly tenant?: string }) => {
      const tenantId =
        options.tenant === undefined ? null : (await findTenantNamed(tools, options.tenant)).id;
      const found = await findEmailNamed(tools, given, tenantId);
      const store = await tools.store();
      const email = await findEmail(store, found.tenantId, found.id);
      const trace = await readTrace(store, found.tenantId, found.id, { isOperator: true });
      if (email === null || trace === null) throw notFound(given);
      const head = {
        object: 'timeline',
        email_id: email.id,
        tenant_id: email.tenantId,
        message_id: email.messageId,
        from: email.fromGiven,
        subject: email.subject,
        last_event: email.lastEvent,
        scheduled_at: email.scheduledAt ?? null,
        created_at: email.createdAt,
      };
      tools.out.result({ ...head, ...trace }, () =>
        [
          fields([
            ['email', email.id],
            ['tenant', email.tenantId],
            ['message-id', email.messageId],
            ['from', email.fromGiven],
            ['subject', email.subject],
            ['accepted', email.createdAt],
            ['last event', email.lastEvent],
          ]),
          tellRecipients(trace),
          `Timeline\n${trace.events.map(tellEvent).join('\n')}`,
          tellWaiting(trace, email.id),
        ].join('\n\n'),
      );
    }),
  );
};

const notFound = (given: string): CommandFailed =>
  new CommandFailed(
    `No sent email has the id or Message-ID "${given}". The id is in the answer to the request that sent it, in GET /emails, and ` +
      'in front of the @ of a Message-ID of ours.',
  );

/** The email of that id or Message-ID, in any tenant where none is given. Throws CommandFailed. */
export async function findEmailNamed(
  tools: Tools,
  given: string,
  tenantId: string | null = null,
): Promise<Found> {
  const store = await tools.store();
  const messageId = MESSAGE_ID.exec(given.trim())?.[1];
  // A Message-ID of ours begins with the id.
  const id = (messageId === undefined ? given.trim() : messageId.replace(/@.*$/, '')).toLowerCase();
  if (isUuid(id)) {
    const owner = await findTenant(store, id);
    if (owner !== null && (tenantId === null || owner === tenantId)) return { tenantId: owner, id };
  } else if (messageId === undefined) {
    throw new CommandFailed(
      `"${given}" is neither the id of an email (a UUID) nor a Message-ID (with an @ in it).`,
    );
  }
  if (messageId !== undefined) {
    for await (const owner of tenantId === null ? allTenants(tools) : [tenantId]) {
      const named = await findAnswered(store.pool, owner, [`<${messageId}>`]);
      if (named !== null) return { tenantId: owner, id: named };
    }
  }
  throw notFound(given);
}

async function* allTenants(tools: Tools): AsyncGenerator<string> {
  const store = await tools.store();
  let after: string | undefined;
  for (let seen = 0; seen < TENANTS_MAX; seen += TENANTS_PER_PAGE) {
    tools.signal.throwIfAborted();
    const page = await listTenants(store, { limit: TENANTS_PER_PAGE, after, before: undefined });
    for (const { id } of page.items) yield id;
    if (!page.hasMore) return;
    after = page.items.at(-1)?.id;
  }
}

function tellRecipients({ recipients }: Trace): string {
  const rows = recipients.map((one) => [
    one.recipient,
    one.state,
    one.attempts,
    one.next_attempt_at,
    one.last_reply ?? one.last_code,
  ]);
  return table(
    ['recipient', 'state', 'attempts', 'next try', 'last answer'],
    rows,
    'No recipient.',
  );
}

/** What is told of an attempt in an order of its own. */
const TRANSPORT = ['host', 'address', 'port', 'tls', 'tls_policy', 'source', 'stage'] as const;
const REPLY = ['code', 'enhanced', 'reply', 'cause', 'class'] as const;

function tellEvent({ at, type, recipient, detail }: TraceEvent): string {
  const line = `${at.toISOString()}  ${printable(type)}${recipient === null ? '' : `  ${printable(recipient)}`}`;
  return [line, ...tellDetail(detail).map((text) => `    ${text}`)].join('\n');
}

function tellDetail(detail: Readonly<Record<string, unknown>>): readonly string[] {
  const lines: string[] = [];
  const { host, address, port, stage, source, reply } = detail;
  if (host !== undefined || address !== undefined) {
    const where = address === undefined ? '' : ` [${plain(address)}]`;
    lines.push(
      `to      ${plain(host ?? address)}${where}${port === undefined ? '' : ` port ${plain(port)}`}`,
    );
    if (source !== undefined) lines.push(`from    ${plain(source)}`);
    const policy = detail['tls_policy'];
    const tls = detail['tls'] === undefined ? 'none' : plain(detail['tls']);
    lines.push(`TLS     ${tls}${policy === undefined ? '' : ` (policy: ${plain(policy)})`}`);
  }
  if (stage !== undefined) lines.push(`stage   ${plain(stage)}`);
  if (reply !== undefined) lines.push(`reply   ${plain(reply)}`);
  const known: readonly string[] = [...TRANSPORT, 'reply'];
  const isReply = (name: string): boolean => (REPLY as readonly string[]).includes(name);
  const rest = Object.entries(detail).filter(
    ([name, value]) => !known.includes(name) && value !== null && value !== undefined,
  );
  const told = rest
    .toSorted(([a], [b]) => Number(isReply(b)) - Number(isReply(a)))
    .map(([name, value]) => `${name}=${plain(value)}`);
  if (told.length > 0) lines.push(told.join(' '));
  return lines;
}

const plain = (value: unknown): string =>
  typeof value === 'string' ? cellText(value) : printable(JSON.stringify(value) ?? '-');

const GIVEN_UP: ReadonlySet<string> = new Set(['failed', 'unknown']);

function tellWaiting({ waiting, recipients }: Trace, id: string): string {
  if (waiting === null) {
    const isGivenUp = recipients.some(
      ({ state, last_code: code }) => GIVEN_UP.has(state) || code === 'expired',
    );
    const more = isGivenUp ? ` To send it after all: queue release ${id}` : '';
    return `Nothing is left to wait for.${more}`;
  }
  return [
    `Why it waits (${waiting.code})`,
    `  ${printable(waiting.reason)}`,
    `  ${printable(waiting.remedy)}`,
    ...(waiting.next_attempt_at === null
      ? []
      : [`  Next try: ${waiting.next_attempt_at.toISOString()}`]),
    `  Waiting: ${waiting.recipients.map(printable).join(', ')}`,
  ].join('\n');
}
