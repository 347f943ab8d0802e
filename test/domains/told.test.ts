// What webhooks are told of domains: when one is made, changes for its tenant, goes; in the same transaction, and not
// with every look at the DNS.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Caller } from '../../src/access/keys.ts';
import { HOUR_MS, openDomains, publish, type Domains } from '../support/domains.ts';
import { listen, told as toldBy, type Told } from '../support/outbox.ts';

const test = suite('domains told');
let d: Domains;
test.before(async () => {
  d = await openDomains();
  await listen(d.store, d.one.tenantId, ['domain.created', 'domain.updated', 'domain.deleted']);
});
test.before.each(async () => void (await d.store.pool.query('truncate outbox')));
test.after(() => d.stop());

interface Detail extends Readonly<Record<string, unknown>> {
  readonly status: string;
  readonly records: readonly { readonly record: string }[];
}
const told = async (): Promise<readonly (Told & { readonly detail: Detail })[]> =>
  (await toldBy(d.store)) as readonly (Told & { readonly detail: Detail })[];
const seen = async (): Promise<readonly string[]> =>
  (await told()).map(({ type, detail }) => `${type} ${detail.status}`);
const add = (caller: Caller, name: string) =>
  d.verbs.create(caller, {
    name,
    capabilities: { sending: 'enabled', receiving: 'enabled' },
  });

test('made, verified, changed, gone', async () => {
  const domain = await add(d.one, 'told.test');
  const { id } = domain;
  const [created] = await told();
  assert.is(created?.subject_id, id);
  const { records, ...rest } = created!.detail;
  assert.equal(rest, {
    id,
    name: 'told.test',
    status: 'not_started',
    created_at: domain.createdAt.toISOString(),
    region: 'us-east-1',
    capabilities: { sending: 'enabled', receiving: 'enabled' },
    custom_return_path: 'send',
    open_tracking: false,
    click_tracking: false,
    tracking_subdomain: null,
    tls: 'opportunistic',
    inbound_dmarc: 'reject',
    mta_sts: 'off',
  });
  assert.equal(
    records.map(({ record }) => record),
    domain.records.map(({ record }) => record),
  );
  publish(d.dns, domain);
  await d.verbs.verify(d.one, id);
  await d.verbs.verify(d.one, id);
  d.clock.now = new Date(d.clock.now.getTime() + 25 * HOUR_MS);
  assert.ok((await d.recheck()) > 0);
  assert.equal(await seen(), ['domain.created not_started', 'domain.updated verified']);

  await d.verbs.update(d.one, id, { open_tracking: true, inbound_dmarc: 'tag' });
  await d.verbs.update(d.one, id, { open_tracking: true, inbound_dmarc: 'tag' });
  const updated = (await told()).slice(2);
  assert.is(updated.length, 1, 'one change, and then none');
  assert.equal(
    [updated[0]!.detail['open_tracking'], updated[0]!.detail['inbound_dmarc']],
    [true, 'tag'],
  );
  await d.verbs.remove(d.one, id);
  await d.verbs.remove(d.one, id);
  const [gone, ...more] = (await told()).slice(3);
  assert.equal(
    [gone?.type, gone?.subject_id, gone?.detail['name']],
    ['domain.deleted', id, 'told.test'],
  );
  assert.equal(more, []);
});

test('a name that is lost to another tenant', async () => {
  const domain = await add(d.one, 'lost.test');
  const { claim } = await d.verbs.claims.create(d.two, { name: 'lost.test' });
  publish(d.dns, domain);
  await d.verbs.verify(d.one, domain.id);
  d.dns.zones[claim.record.name] = { TXT: [claim.record.value] };
  assert.is((await d.verbs.claims.verify(d.two, claim.domainId))?.status, 'completed');
  assert.equal(await seen(), [
    'domain.created not_started',
    'domain.updated verified',
    'domain.updated failed',
  ]);
});

test('a change that fails is not told, nor is what nobody listens to', async () => {
  const domain = await add(d.one, 'fails.test');
  await d.store.pool.query('truncate outbox');
  await d.verbs
    .update(d.one, domain.id, { capabilities: { sending: 'disabled', receiving: 'disabled' } })
    .then(
      () => assert.unreachable(),
      () => undefined,
    );
  const other = await add(d.two, 'quiet.test');
  await d.verbs.update(d.two, other.id, { tls: 'enforced' });
  await d.verbs.remove(d.two, other.id);
  assert.equal(await told(), []);
});

test.run();
