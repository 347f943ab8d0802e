// Receiving routes at work: made over HTTP, decided over SMTP, and read back with the mail that came.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { closeAll, dial } from '../support/sink-session.ts';

type Fields = Record<string, unknown>;
interface Decision {
  recipient: string;
  status: string;
  route_id: string | null;
  route_type: string | null;
  local_part: string | null;
  domain_id: string | null;
  target_address: string | null;
  forwarding_rule_id: string | null;
}
interface Received {
  id: string;
  received_for: string[];
  subject: string;
  route_decisions: Decision[];
}
interface Page {
  data: Received[];
}

const test = suite('routes over SMTP');
let app: App;
let other: string;
let domainId: string;
const routes: Record<string, string> = {};

test.before(async () => {
  app = await startApp();
  ({ key: other } = await secondTenant(app));
  domainId = await receivingDomain(app, 'routed.test');
  await receivingDomain(app, 'open.test');
  const strangeId = await receivingDomain(app, 'strange.test', other);
  const make = async (name: string, fields: Fields, key = app.key): Promise<void> => {
    const body = { domain_id: key === other ? strangeId : domainId, ...fields };
    const answer = await app.call('POST', '/receiving/routes', { body, key });
    assert.is(answer.status, 201, JSON.stringify(answer.body));
    routes[name] = String(answer.body['id']);
  };
  await make('exact', { type: 'exact', local_part: 'Ada' });
  await make('hidden', { type: 'alias', local_part: 'ada', target_local_part: 'never' });
  await make('tagged', { type: 'exact', local_part: 'ada+bank', target_local_part: 'vault' });
  await make('alias', { type: 'alias', local_part: 'sales', target_local_part: 'team' });
  await make('strange', { type: 'exact', local_part: 'ada' }, other);
});
test.after.each(closeAll);
test.after(() => app.stop());

/** One transaction; the reply to each RCPT and to the final dot, null when nobody was left to send it to. */
async function hand(
  recipients: readonly string[],
  subject: string,
): Promise<{ readonly rcpt: readonly string[]; readonly dot: string | null }> {
  const wire = await dial(app.appliance.mxPort!);
  await wire.say('MAIL FROM:<ada@outside.test>');
  const rcpt: string[] = [];
  for (const recipient of recipients) rcpt.push(await wire.say(`RCPT TO:<${recipient}>`));
  if (!rcpt.some((reply) => reply.startsWith('250'))) return { rcpt, dot: null };
  assert.match(await wire.say('DATA'), /^354 /);
  const header = `From: ada@outside.test\r\nSubject: ${subject}\r\nMessage-ID: <${subject}@outside.test>`;
  return { rcpt, dot: await wire.say(`${header}\r\n\r\nWords\r\n.`) };
}

async function find(subject: string, key = app.key): Promise<Received | undefined> {
  const { body } = await app.call<Page>('GET', '/emails/receiving?limit=100', { key });
  const found = body.data.find((email) => email.subject === subject);
  if (found === undefined) return undefined;
  return (await app.call<Received>('GET', `/emails/receiving/${found.id}`, { key })).body;
}

/** What is recorded of each recipient, a line each. */
async function decisions(subject: string, key = app.key): Promise<readonly string[]> {
  const email = await until(
    () => find(subject, key),
    (found) => found !== undefined,
  );
  const names = new Map(Object.entries(routes).map(([name, id]) => [id, name]));
  return email!.route_decisions.map(
    (one) =>
      `${one.recipient} ${one.status} ${names.get(one.route_id ?? '') ?? one.route_id} ${one.local_part} ${one.target_address}`,
  );
}

test('exact, alias, subaddress, unrouteable: each is decided at RCPT and recorded', async () => {
  const recipients = [
    'ADA@Routed.Test',
    'ada+bank@routed.test',
    'ada+shop@routed.test',
    'Sales@routed.test',
    'sales+eu+x@routed.test',
    'nobody@routed.test',
    'postmaster@routed.test',
  ];
  const { rcpt, dot } = await hand(recipients, 'precedence');
  assert.equal(
    rcpt.map((reply) => reply.slice(0, 9)),
    recipients.map((one) => (one.startsWith('nobody') ? '550 5.1.1' : '250 2.1.5')),
    JSON.stringify(rcpt),
  );
  assert.match(dot!, /^250 2\.0\.0 /);
  assert.equal(await decisions('precedence'), [
    'ADA@Routed.Test exact exact Ada Ada@routed.test',
    'ada+bank@routed.test exact tagged ada+bank vault@routed.test',
    'ada+shop@routed.test exact exact Ada Ada@routed.test',
    'Sales@routed.test alias alias sales team@routed.test',
    'sales+eu+x@routed.test alias alias sales team@routed.test',
    'postmaster@routed.test unrouteable null null null',
    'nobody@routed.test unrouteable null null null',
  ]);
  const email = await find('precedence');
  assert.equal(
    email!.received_for,
    recipients.filter((one) => !one.startsWith('nobody')),
  );
  assert.equal(email!.route_decisions[0], {
    recipient: 'ADA@Routed.Test',
    status: 'exact',
    route_id: routes['exact'],
    route_type: 'exact',
    local_part: 'Ada',
    domain_id: domainId,
    target_address: 'Ada@routed.test',
    forwarding_rule_id: null,
  });
  assert.equal(email!.route_decisions.at(-1), {
    recipient: 'nobody@routed.test',
    status: 'unrouteable',
    route_id: null,
    route_type: null,
    local_part: null,
    domain_id: domainId,
    target_address: null,
    forwarding_rule_id: null,
  });
});

test('when nobody is routed, nothing is taken', async () => {
  const { rcpt, dot } = await hand(['no@routed.test', 'sal@routed.test', 'x@nowhere.test'], 'none');
  assert.equal(
    rcpt.map((reply) => reply.slice(0, 9)),
    ['550 5.1.1', '550 5.1.1', '550 5.7.1'],
  );
  assert.is(dot, null);
  assert.is(await find('none'), undefined);
});

test('a domain without routes takes everything, as unrouteable', async () => {
  const { rcpt } = await hand(['any.one+x@open.test'], 'open');
  assert.match(rcpt[0]!, /^250 /);
  assert.equal(await decisions('open'), ['any.one+x@open.test unrouteable null null null']);
});

test('each tenant of a transaction sees its own recipients only', async () => {
  const recipients = ['ada@routed.test', 'ada@strange.test', 'no@routed.test', 'no@strange.test'];
  const { dot } = await hand(recipients, 'shared');
  assert.match(dot!, /^250 /);
  assert.equal(await decisions('shared'), [
    'ada@routed.test exact exact Ada Ada@routed.test',
    'no@routed.test unrouteable null null null',
  ]);
  assert.equal(await decisions('shared', other), [
    'ada@strange.test exact strange ada ada@strange.test',
    'no@strange.test unrouteable null null null',
  ]);
});

test('a catch-all takes what is left, and a change of routes holds from the next RCPT on', async () => {
  const call = async (method: string, path: string, body?: Fields): Promise<Fields> => {
    const answer = await app.call(method, path, body === undefined ? {} : { body });
    assert.ok(answer.status < 300, JSON.stringify(answer.body));
    return answer.body;
  };
  const id = (
    await call('POST', '/receiving/routes', {
      domain_id: domainId,
      type: 'catch_all',
      target_local_part: 'rest',
    })
  )['id'] as string;
  routes['rest'] = id;
  await hand(['nobody+x@routed.test', 'sales@routed.test'], 'rest');
  assert.equal(await decisions('rest'), [
    'nobody+x@routed.test catch_all rest null rest@routed.test',
    'sales@routed.test alias alias sales team@routed.test',
  ]);
  const rule = await call('POST', '/receiving/forwarding-rules', {
    route_id: id,
    destinations: ['a@recipient.test'],
    status: 'disabled',
  });
  await hand(['nobody@routed.test'], 'ruled');
  await decisions('ruled');
  const ruled = await find('ruled');
  assert.is(ruled!.route_decisions[0]!.forwarding_rule_id, rule['id']);
  const rulePath = `/receiving/forwarding-rules/${String(rule['id'])}`;
  const { body: withAttempt } = await until(
    () => app.call<{ last_attempt: Fields | null }>('GET', rulePath),
    ({ body }) => body.last_attempt !== null,
  );
  const { id: _id, created_at: _at, explanation: _why, ...attempt } = withAttempt.last_attempt!;
  assert.equal(attempt, {
    rule_id: rule['id'],
    recipient: 'nobody@routed.test',
    destinations: ['a@recipient.test'],
    status: 'skipped',
    reason: 'rule_disabled',
    method: null,
    received_email_id: ruled!.id,
    email_id: null,
  });
  await call('DELETE', `/receiving/routes/${id}`);
  const { rcpt } = await hand(['nobody@routed.test'], 'gone');
  assert.match(rcpt[0]!, /^550 5\.1\.1 /);
});

test('while a domain waits to be verified senders are told to come again', async () => {
  const id = await receivingDomain(app, 'back.test');
  const reply = async (): Promise<string> => (await hand(['a@back.test'], 'back')).rcpt[0]!;
  const receiving = (is: 'enabled' | 'disabled') =>
    app.call('PATCH', `/domains/${id}`, { body: { capabilities: { receiving: is } } });
  await receiving('disabled');
  assert.match(await reply(), /^550 5\.7\.1 /);
  await receiving('enabled');
  assert.match(await reply(), /^450 4\.2\.1 /);
  await app.call('POST', `/domains/${id}/verify`);
  assert.match(await reply(), /^250 /);
});

test.run();
