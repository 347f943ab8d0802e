// What would become of a message, asked over the API without any mail.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { postNew, ROUTES_PATH, type Page } from '../support/forwarding-rules.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;

const PATH = ROUTES_PATH;

const test = suite<{ domain: string; domainId: string }>('receiving routes dry run');
let app: App;
let stranger: string;
let count = 0;
test.before(async () => {
  app = await startApp();
  ({ key: stranger } = await secondTenant(app));
});
test.before.each(async (context) => {
  context.domain = `d${(count += 1)}.test`;
  context.domainId = await receivingDomain(app, context.domain);
});
test.after(() => app.stop());

const create = (body: Fields, key = app.key): Promise<Fields> => postNew(app, PATH, { body, key });

test('a dry run tells what would become of a message', async ({ domain, domainId }) => {
  const ask = async (body: Fields, key = app.key): Promise<Fields> => {
    const answer = await app.call('POST', `${PATH}/test`, { body, key });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    assert.is(answer.body['object'], 'receiving_route_test');
    return answer.body;
  };
  const open = await ask({ recipient: `any@${domain}` });
  assert.equal([open['accepted'], open['forwarding']], [true, null]);
  assert.match(String(open['explanation']), /no routes, and takes mail for every address/);
  const route = await create({
    domain_id: domainId,
    type: 'alias',
    local_part: 'Sales',
    target_local_part: 'team',
  });
  const refused = await ask({ recipient: `any@${domain}` });
  assert.equal([refused['accepted'], refused['forwarding']], [false, null]);
  assert.match(String(refused['explanation']), /refused with 550 5\.1\.1/);
  const decision = {
    recipient: `sales+x@${domain}`,
    status: 'alias',
    route_id: route['id'],
    route_type: 'alias',
    local_part: 'Sales',
    domain_id: domainId,
    target_address: `team@${domain}`,
    forwarding_rule_id: null,
  };
  const taken = await ask({ recipient: `sales+x@${domain.toUpperCase()}` });
  assert.equal(taken, {
    object: 'receiving_route_test',
    recipient: `sales+x@${domain}`,
    accepted: true,
    decision,
    forwarding: null,
    explanation: `It would be stored: the alias route Sales takes it for team@${domain}. No forwarding rule is on it.`,
  });
  await app.call('POST', '/suppressions', { body: { email: 'gone@outside.test' } });
  const { body: rule } = await app.call('POST', '/receiving/forwarding-rules', {
    body: { route_id: route['id'], destinations: ['a@outside.test', 'gone@outside.test'] },
  });
  const forwarding = {
    forwarding_rule_id: rule['id'],
    status: 'active',
    outcome: 'queued',
    reason: null,
    destinations: ['a@outside.test', 'gone@outside.test'],
    suppressed: ['gone@outside.test'],
  };
  const forwarded = await ask({ recipient: `sales@${domain}`, from: 'someone@else.test' });
  assert.equal(forwarded['forwarding'], forwarding);
  assert.equal((forwarded['decision'] as Fields)['forwarding_rule_id'], rule['id']);
  assert.match(String(forwarded['explanation']), /forwarded to a@outside\.test: as it came/);
  const bounce = await ask({ recipient: `sales@${domain}`, from: '' });
  assert.match(String(bounce['explanation']), /null sender/);
  await app.call('PATCH', `/receiving/forwarding-rules/${String(rule['id'])}`, {
    body: { status: 'disabled' },
  });
  const skipped = await ask({ recipient: `sales@${domain}` });
  assert.equal(skipped['forwarding'], {
    ...forwarding,
    status: 'disabled',
    outcome: 'skipped',
    reason: 'rule_disabled',
  });
  const postmaster = await ask({ recipient: `postmaster@${domain}` });
  assert.equal([postmaster['accepted'], postmaster['forwarding']], [true, null]);
  const foreign = await ask({ recipient: `sales@${domain}` }, stranger);
  const nowhere = await ask({ recipient: `sales@nowhere${domain}` }, stranger);
  for (const [answer, name] of [
    [foreign, domain],
    [nowhere, `nowhere${domain}`],
  ] as const) {
    assert.equal([answer['accepted'], answer['decision']], [false, null]);
    assert.is(
      answer['explanation'],
      `It would not arrive in this account: ${name} is no domain of this account.`,
    );
  }
  await app.call('PATCH', `/domains/${domainId}`, {
    body: { capabilities: { receiving: 'disabled' } },
  });
  const off = await ask({ recipient: `sales@${domain}` });
  assert.match(String(off['explanation']), /receiving is off/);
  const bad = await app.call('POST', `${PATH}/test`, { body: { recipient: 'x', from: 'y' } });
  assertRefused(bad, { status: 422, code: 'validation_error', paths: ['recipient', 'from'] });
  const missing = await app.call('POST', `${PATH}/test`, { body: {} });
  assertRefused(missing, { status: 422, code: 'missing_required_field', paths: ['recipient'] });
  const { body: mail } = await app.call<Page>('GET', '/emails/receiving');
  assert.equal(mail.data, [], 'no mail came of it');
});

test.run();
