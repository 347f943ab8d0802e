// What both doors share: a message that was complete when it came is asked the same questions as a request; what was
// refused leaves no blob, what was stored is announced once.
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Caller } from '../../src/access/keys.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { createDomainLookup } from '../../src/domains/lookup.ts';
import { parseMailbox, type Mailbox } from '../../src/mail/address.ts';
import type { NewEmail } from '../../src/queue/enqueue.ts';
import { createGroupCommit } from '../../src/queue/group-commit.ts';
import {
  acceptEmail,
  acceptMessage,
  type AcceptDependencies,
  type Accepted,
  type SubmittedMessage,
} from '../../src/sending/accept.ts';
import { acceptBatch, type Misshapen } from '../../src/sending/batch.ts';
import { createPreferenceLinks } from '../../src/audience/preference-links.ts';
import { createFilledBudget } from '../../src/sending/filled-budget.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { createTemplateRenderer } from '../../src/templates/render.ts';
import { createTemplateVerbs } from '../../src/templates/templates.ts';
import { createTrackingTokens } from '../../src/tracking/tokens.ts';
import { createHtmlTracker } from '../../src/tracking/tracker.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite('accept');
let bench: Bench;
let folder: string;
let caller: Caller;
let d: AcceptDependencies;
let stored: NewEmail[] = [];
test.before(async () => {
  bench = await openQueue();
  folder = await mkdtemp(join(tmpdir(), 'mailstead-accept-'));
  caller = { tenantId: bench.tenantId, keyId: newId(), permission: 'full_access', domainId: null };
  await bench.store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, sending_verified)
      values ($1, $2, 'sender.test', 'verified', true)`,
    [bench.tenantId, newId()],
  );
  d = {
    store: bench.store,
    blobs: openDiskBlobs(folder),
    commit: createGroupCommit(bench.store.pool),
    domains: createDomainLookup(bench.store.pool, Buffer.alloc(32)),
    templates: createTemplateRenderer(bench.store),
    filled: createFilledBudget(),
    preferenceLinks: createPreferenceLinks({ key: Buffer.alloc(32), publicUrl: 'https://m.test' }),
    tracker: createHtmlTracker({
      tokens: createTrackingTokens(Buffer.alloc(32)),
      publicUrl: 'https://m.test',
    }),
    now: () => new Date(),
    laneOf: (domain) => `mx:${domain}`,
    lifetimeMs: 60_000,
    standIn: null,
    onStored: (emails) => stored.push(...emails),
  };
});
test.after(async () => {
  await bench.stop();
  await rm(folder, { recursive: true, force: true });
});
test.before.each(() => {
  stored = [];
});

function mailbox(text: string): Mailbox {
  const parsed = parseMailbox(text);
  if (!parsed.ok) throw new Error(parsed.problem);
  return parsed.mailbox;
}
const origin = { via: 'smtp', requestId: 'r', userAgent: null, address: '192.0.2.1' } as const;
const messageOf = (change: Partial<SubmittedMessage> = {}): SubmittedMessage => ({
  from: mailbox('Ada <ada@sender.test>'),
  to: ['B <b@recipient.test>', 'undisclosed'],
  cc: ['c@recipient.test'],
  replyTo: [],
  recipients: [
    'b@recipient.test',
    'C@recipient.test',
    'b@RECIPIENT.test',
    'hidden@recipient.test',
  ].map(mailbox),
  subject: 'Submitted',
  html: null,
  text: 'Plain words.',
  raw: Buffer.from('From: ada@sender.test\r\n\r\nPlain words.\r\n'),
  messageId: '<m@sender.test>',
  headers: { 'X-A': 'a' },
  attachments: [],
  fingerprint: 'the same',
  ...change,
});
const accept = (
  message: SubmittedMessage,
  idempotencyKey: string | null = null,
  by: Caller = caller,
): Promise<Accepted> => acceptMessage(d, by, { message, idempotencyKey, origin });
const idOf = ({ body }: Accepted): string => (body as { id: string }).id;
const rowOf = async (id: string): Promise<Record<string, unknown>> => {
  const { rows } = await bench.store.pool.query<Record<string, unknown>>(
    `select e.message_id, e.to_given, e.cc_given, e.bcc_given, e.reply_to_given, e.last_event, c.raw, c.blob_key,
       c.raw_size_bytes, c.needs_smtp_utf8, t.detail
     from email e join email_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
     join timeline t on t.tenant_id = e.tenant_id and t.email_id = e.id and t.kind = 'accepted'
     where e.tenant_id = $1 and e.id = $2`,
    [bench.tenantId, id],
  );
  return rows[0] ?? {};
};
const blobs = async (): Promise<readonly string[]> =>
  (await readdir(folder, { recursive: true })).filter((name) => name.includes('/'));
async function refusalOf(work: Promise<unknown>): Promise<Refusal> {
  const error: unknown = await work.then(
    () => new Error('accepted'),
    (reason: unknown) => reason,
  );
  assert.instance(error, Refusal);
  return error as Refusal;
}

test('a message is stored as it is, with who is named in it and who is not', async () => {
  const id = idOf(await accept(messageOf()));
  const row = await rowOf(id);
  assert.is(row['message_id'], '<m@sender.test>');
  assert.equal(row['raw'], Buffer.from('From: ada@sender.test\r\n\r\nPlain words.\r\n'));
  assert.is(row['raw_size_bytes'], 39);
  assert.equal(row['to_given'], ['B <b@recipient.test>', 'undisclosed']);
  assert.equal(row['cc_given'], ['c@recipient.test']);
  assert.equal(row['bcc_given'], ['hidden@recipient.test']);
  assert.is(row['reply_to_given'], null);
  assert.is((row['detail'] as { via: string }).via, 'smtp');
  const { rows } = await bench.store.pool.query<{ recipient: string }>(
    'select recipient from delivery where email_id = $1 order by position',
    [id],
  );
  assert.equal(
    rows.map(({ recipient }) => recipient),
    ['b@recipient.test', 'C@recipient.test', 'hidden@recipient.test'],
  );
  assert.equal(
    stored.map((email) => email.id),
    [id],
  );
});

test('a large message lies apart, also one that was put there already', async () => {
  const raw = Buffer.alloc(200_000, 'Subject: x\r\n');
  const large = await rowOf(idOf(await accept(messageOf({ raw }))));
  assert.is(large['raw'], null);
  assert.equal(await d.blobs.get(String(large['blob_key'])), raw);
  const blobKey = newId();
  await d.blobs.put(blobKey, raw);
  const put = await rowOf(
    idOf(await accept(messageOf({ raw: { blobKey, sizeBytes: raw.length } }))),
  );
  assert.is(put['blob_key'], blobKey);
  assert.is(put['raw_size_bytes'], raw.length);
});

test('what is refused leaves no blob', async () => {
  const before = await blobs();
  const blobKey = newId();
  await d.blobs.put(blobKey, Buffer.from('x'));
  const from = mailbox('eve@elsewhere.test');
  const refusal = await refusalOf(accept(messageOf({ from, raw: { blobKey, sizeBytes: 1 } })));
  assert.is(refusal.code, 'domain_not_verified');
  const bound = { ...caller, domainId: newId() };
  assert.is((await refusalOf(accept(messageOf(), null, bound))).code, 'domain_not_verified');
  assert.equal(await blobs(), before);
  assert.equal(stored, []);
});

test('the same key and fingerprint are one email, whatever the bytes; another envelope is another', async () => {
  const first = await accept(messageOf(), 'smtp');
  const blobKey = newId();
  await d.blobs.put(blobKey, Buffer.from('x'));
  const again = await accept(messageOf({ raw: { blobKey, sizeBytes: 1 } }), 'smtp');
  assert.is(idOf(again), idOf(first));
  assert.is(again.replayed, true);
  assert.is(await d.blobs.get(blobKey), null);
  assert.is(stored.length, 1);
  for (const change of [
    { fingerprint: 'another' },
    { recipients: [mailbox('b@recipient.test')] },
  ]) {
    const refusal = await refusalOf(accept(messageOf(change), 'smtp'));
    assert.is(refusal.code, 'invalid_idempotent_request');
  }
  const raced = await Promise.all(
    Array.from({ length: 10 }, () => accept(messageOf({ raw: Buffer.alloc(200_000) }), 'race')),
  );
  assert.is(new Set(raced.map(idOf)).size, 1);
  assert.is(raced.filter(({ replayed }) => !replayed).length, 1);
});

test('both doors share their keys', async () => {
  const request = { from: 'a@sender.test', to: 'b@recipient.test', subject: 's', text: 't' };
  const http = { request, spooled: new Map(), origin, idempotencyKey: 'both' };
  await acceptEmail(d, caller, http);
  assert.is((await refusalOf(accept(messageOf(), 'both'))).code, 'invalid_idempotent_request');
});

test('whom the tenant does not send to is left out', async () => {
  await bench.store.pool.query(
    `insert into suppression (tenant_id, id, address, origin)
      values ($1, $2, 'c@recipient.test', 'manual')`,
    [bench.tenantId, newId()],
  );
  const id = idOf(await accept(messageOf()));
  const { rows } = await bench.store.pool.query<{ state: string }>(
    'select state from delivery where email_id = $1 order by position',
    [id],
  );
  assert.equal(
    rows.map(({ state }) => state),
    ['ready', 'suppressed', 'ready'],
  );
  const all = await accept(messageOf({ recipients: [mailbox('c@recipient.test')] }));
  assert.is((await rowOf(idOf(all)))['last_event'], 'suppressed');
});

test('an address that needs SMTPUTF8 is told, wherever it stands', async () => {
  for (const change of [
    { from: mailbox('ädä@sender.test') },
    { to: ['ü@recipient.test'] },
    { replyTo: ['Ü <ü@recipient.test>'] },
  ]) {
    const row = await rowOf(idOf(await accept(messageOf(change))));
    assert.is(row['needs_smtp_utf8'], true);
  }
  assert.is((await rowOf(idOf(await accept(messageOf()))))['needs_smtp_utf8'], false);
});

test('a batch that fails half-way leaves no blob, one that is stored is announced once', async () => {
  const before = await blobs();
  const content = Buffer.alloc(200_000, 'abc').toString('base64');
  const request = {
    from: 'a@sender.test',
    to: 'b@recipient.test',
    subject: 's',
    text: 't',
    attachments: [{ filename: 'a.bin', content }],
  };
  const send = {
    requests: [request, request],
    misshapen: new Map<number, Misshapen>(),
    isPermissive: false,
    spooled: new Map(),
    idempotencyKey: null,
    origin: { ...origin, via: 'http' as const },
  };
  let written = 0;
  const full: AcceptDependencies = {
    ...d,
    blobs: {
      ...d.blobs,
      write: async (key, chunks) => {
        written += 1;
        if (written === 2) throw new Error('no space left on device');
        await d.blobs.write(key, chunks);
      },
    },
  };
  const error: unknown = await acceptBatch(full, caller, send).catch((reason: unknown) => reason);
  assert.match(String(error), /no space left/);
  assert.equal(await blobs(), before);
  assert.equal(stored, []);
  const { body } = await acceptBatch(d, caller, send);
  assert.equal(
    stored.map(({ id }) => id),
    (body as { data: { id: string }[] }).data.map(({ id }) => id),
  );
  assert.is((await blobs()).length, before.length + 2);
});

test('what templates make of all requests together has a limit, and is free again afterwards', async () => {
  const templates = createTemplateVerbs(bench.store, () => new Date());
  const id = await templates.create(caller.tenantId, { name: 'T', html: 'x'.repeat(1_000) });
  await templates.publish(caller.tenantId, id);
  const request = { from: 'a@sender.test', to: 'b@recipient.test', subject: 's' };
  const send = {
    misshapen: new Map<number, Misshapen>(),
    isPermissive: true,
    spooled: new Map(),
    idempotencyKey: null,
    origin: { ...origin, via: 'http' as const },
  };
  const narrow: AcceptDependencies = { ...d, filled: createFilledBudget(2_500) };
  const filled = { ...request, template: { id } };
  const plain = { ...request, html: 'y'.repeat(5_000) };
  for (const count of [2, 2]) {
    const requests = [...Array.from({ length: count }, () => filled), plain];
    await acceptBatch(narrow, caller, { ...send, requests });
  }
  const requests = [filled, filled, filled];
  const error: unknown = await acceptBatch(narrow, caller, { ...send, requests }).catch(
    (reason: unknown) => reason,
  );
  assert.ok(error instanceof Refusal);
  assert.is(error.status, 503);
  const alone = { ...send, request: filled };
  let meanwhile: unknown;
  const other = { html: 'x'.repeat(2_000), text: null, template: { id, variables: {} } };
  await narrow.filled.share(async (hold) => {
    hold(other);
    meanwhile = await acceptEmail(narrow, caller, alone).catch((reason: unknown) => reason);
  });
  assert.ok(meanwhile instanceof Refusal);
  assert.is(meanwhile.status, 503);
  await acceptEmail(narrow, caller, alone);
  assert.is(stored.length, 6 + 1);
});

test.run();
