// What hangs on a domain hears, in the same transaction, when mail cannot arrive there any more: by each way that ends
// it, for every holder at once, and by nothing else. The rules are rows, and what ends them is the appliance's own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Caller } from '../../src/access/keys.ts';
import { createDomainVerbs, type DomainView } from '../../src/domains/domains.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { endRules } from '../../src/receiving/rule-status.ts';
import { newId } from '../../src/store/id.ts';
import {
  HOSTNAME,
  HOUR_MS,
  TRACKING_HOST,
  openDomains,
  publish,
  type Domains,
} from '../support/domains.ts';

/** Longer than a record may be missing. */
const TOO_LONG_MS = 73 * HOUR_MS;
const test = suite('the end of receiving');
let d: Domains;
let count = 0;
test.before(async () => {
  d = await openDomains();
});
test.after(() => d.stop());

const both = { sending: 'enabled', receiving: 'enabled' } as const;

/** A domain that the tenant has verified for receiving. */
async function receiving(caller: Caller, name = `r${(count += 1)}.test`): Promise<DomainView> {
  const domain = await d.verbs.create(caller, { name, capabilities: both });
  publish(d.dns, domain);
  assert.is((await d.verbs.verify(caller, domain.id))?.status, 'verified');
  return domain;
}

/** A rule of a route of the domain; its id. */
async function addRule(domain: DomainView, status = 'active', reason: string | null = null) {
  const [routeId, ruleId] = [newId(), newId()];
  await d.store.pool.query(
    `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
       target_local_part, created_at, updated_at)
     values ($1, $2, $3, 'exact', $4, $4, $4, now(), now())`,
    [domain.tenantId, routeId, domain.id, `l${(count += 1)}`],
  );
  await d.store.pool.query(
    `insert into forwarding_rule (tenant_id, id, domain_id, domain, route_id, route_target_address,
       destinations, status, invalid_reason, created_at, updated_at)
     values ($1, $2, $3, $4, $5, 'in@x.test', '["out@far.test"]', $6, $7, $8, $8)`,
    [domain.tenantId, ruleId, domain.id, domain.name, routeId, status, reason, d.clock.now],
  );
  return ruleId;
}

async function standing(ruleId: string): Promise<string> {
  const { rows } = await d.store.pool.query<{ status: string; reason: string | null }>(
    'select status, invalid_reason as reason from forwarding_rule where id = $1',
    [ruleId],
  );
  return [rows[0]?.status, rows[0]?.reason].filter((word) => word !== null).join(': ');
}

const patch = (
  domain: DomainView,
  capabilities: Partial<Record<'sending' | 'receiving', string>>,
) => d.verbs.update(d.one, domain.id, { capabilities } as Parameters<typeof d.verbs.update>[2]);
const lostOf = ({ name }: DomainView): string =>
  `invalid: ${name} is not verified for receiving any more.`;

test('the clock that finds a record gone for too long ends the rules of this domain only', async () => {
  const [domain, other] = [await receiving(d.one), await receiving(d.one)];
  const rules = [await addRule(domain), await addRule(domain, 'disabled')];
  const old = await addRule(domain, 'invalid', 'Round and round.');
  const fine = await addRule(other);
  d.dns.zones[domain.name] = { MX: ['1 elsewhere.test'] };
  d.clock.now = new Date(d.clock.now.getTime() + 25 * HOUR_MS);
  await d.recheck();
  assert.is(await standing(rules[0]!), 'active', 'forgiven for a while');
  d.clock.now = new Date(d.clock.now.getTime() + TOO_LONG_MS);
  await d.recheck();
  for (const rule of rules) assert.is(await standing(rule), lostOf(domain));
  assert.is(await standing(old), 'invalid: Round and round.', 'the first reason stays');
  assert.is(await standing(fine), 'active');
});

test('one sweep that finds many domains gone ends the rules of them all', async () => {
  const domains: DomainView[] = [];
  for (let i = 0; i < 4; i += 1) domains.push(await receiving(i % 2 === 0 ? d.one : d.two));
  const rules = await Promise.all(domains.map((domain) => addRule(domain)));
  for (const { name } of domains) d.dns.zones[name] = { MX: ['1 elsewhere.test'] };
  for (const ms of [25 * HOUR_MS, TOO_LONG_MS]) {
    d.clock.now = new Date(d.clock.now.getTime() + ms);
    assert.ok((await d.recheck()) >= domains.length);
  }
  for (const [index, rule] of rules.entries()) {
    assert.is(await standing(rule), lostOf(domains[index]!));
  }
});

test('what was not received before ends nothing: a rule that waits, disabled, stays so', async () => {
  const domain = await receiving(d.one);
  await patch(domain, { receiving: 'disabled' });
  const rule = await addRule(domain, 'disabled');
  await d.verbs.verify(d.one, domain.id);
  await patch(domain, { receiving: 'enabled' });
  delete d.dns.zones[domain.name];
  await d.verbs.verify(d.one, domain.id);
  assert.is(await standing(rule), 'disabled');
});

test('settings: switched off ends the rules, any other change does not', async () => {
  const domain = await receiving(d.one);
  const rule = await addRule(domain);
  await patch(domain, { sending: 'disabled' });
  await d.verbs.update(d.one, domain.id, { inbound_dmarc: 'tag', tls: 'enforced' });
  await d.verbs.verify(d.one, domain.id);
  assert.is(await standing(rule), 'active');
  await patch(domain, { sending: 'enabled', receiving: 'disabled' });
  assert.is(await standing(rule), `invalid: Receiving was switched off for ${domain.name}.`);
});

test('deleted: the rules stay and say so, the routes go', async () => {
  const domain = await receiving(d.one);
  const rules = [await addRule(domain), await addRule(domain, 'disabled')];
  assert.not(await d.verbs.remove(d.two, domain.id));
  assert.is(await standing(rules[0]!), 'active', "a stranger's wish");
  assert.ok(await d.verbs.remove(d.one, domain.id));
  for (const rule of rules) {
    assert.is(await standing(rule), `invalid: The domain ${domain.name} was deleted.`);
  }
  const { rowCount } = await d.store.pool.query(
    'select 1 from receiving_route where domain_id = $1',
    [domain.id],
  );
  assert.is(rowCount, 0);
});

test('a claim that takes a name takes it from every holder, and ends the rules of each', async () => {
  const held = await receiving(d.one);
  const rule = await addRule(held);
  const thirdId = newId();
  await d.store.pool.query('insert into tenant (id, name) values ($1, $2)', [thirdId, 'third']);
  // Nothing keeps a name from two holders but our own decisions: one that went wrong must heal wholly.
  const { claim } = await d.verbs.claims.create(d.two, { name: held.name });
  const { claim: theirs } = await d.verbs.claims.create(
    { ...d.two, tenantId: thirdId },
    { name: held.name },
  );
  await d.store.pool.query(
    `update sending_domain set status = 'verified', receiving = true, receiving_verified = true
     where id = $1`,
    [theirs.domainId],
  );
  const second = (await d.verbs.find({ ...d.two, tenantId: thirdId }, theirs.domainId))!;
  const other = await addRule(second);
  d.dns.zones[claim.record.name] = { TXT: [claim.record.value] };
  const done = await d.verbs.claims.verify(d.two, claim.domainId);
  assert.is(done?.status, 'completed');
  assert.is(await standing(rule), lostOf(held));
  assert.is(await standing(other), lostOf(second));
});

test('a holder who looks and finds that the name is taken loses it, with the rules', async () => {
  const held = await receiving(d.one);
  const rule = await addRule(held);
  const { id } = await d.verbs.create(d.two, { name: `t${(count += 1)}.test` });
  await d.store.pool.query(
    `update sending_domain set name = $2, status = 'verified' where id = $1`,
    [id, held.name],
  );
  d.clock.now = new Date(d.clock.now.getTime() + 25 * HOUR_MS);
  await d.recheck();
  const after = await d.verbs.find(d.one, held.id);
  assert.match(after?.records[0]?.detail ?? '', 'has proven that the name is theirs');
  assert.is(await standing(rule), lostOf(held));
});

test('where the rules cannot be told, the domain is as it was', async () => {
  const domain = await receiving(d.one);
  const rule = await addRule(domain);
  const resolver = createResolver({ servers: [d.dns.server], keepsAnswers: false });
  const failing = createDomainVerbs({
    store: d.store,
    resolver,
    sealingKey: Buffer.alloc(32, 7),
    place: { hostname: HOSTNAME, trackingHost: TRACKING_HOST },
    now: () => d.clock.now,
    isAssumed: () => false,
    async onReceivingEnd(client, end) {
      await endRules(client, end);
      throw new Error('power cut');
    },
  });
  const works = [
    () => failing.update(d.one, domain.id, { capabilities: { receiving: 'disabled' } }),
    () => failing.remove(d.one, domain.id),
  ];
  for (const work of works) assert.match(String(await work().catch(String)), 'power cut');
  resolver.close();
  const after = await d.verbs.find(d.one, domain.id);
  assert.equal([after?.receiving, after?.status], [true, 'verified']);
  assert.is(await standing(rule), 'active');
});

test.run();
