// Who may come in to the inbound listener, and how long a client may stay that brings no mail.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { patienceOf, type Patience } from '../../src/smtp/mx-conduct.ts';
import { until } from '../support/app.ts';
import {
  dialMx,
  endMxSessions,
  enterMx,
  startTestMx,
  type MxClient,
} from '../support/mx-session.ts';

const test = suite('mx: the door');
test.after.each(endMxSessions);

const proxied = (address: string): { first: string } => ({
  first: `PROXY ${address.includes(':') ? 'TCP6' : 'TCP4'} ${address} 127.0.0.1 4000 25\r\n`,
});
const impatient =
  (calm: Partial<Patience>, stressed: Partial<Patience> = calm) =>
  (isStressed: boolean): Patience => ({
    ...patienceOf(isStressed),
    ...(isStressed ? stressed : calm),
  });

test('a client has so many connections; others and those that left leave room', async () => {
  const mx = await startTestMx({ connections: { per_client: 2 } });
  const first = await enterMx(mx.port);
  await enterMx(mx.port);
  const third = dialMx(mx.port);
  assert.match(await third.reply(), /^421 4\.7\.0 /);
  assert.is(await third.reply(), '');
  await enterMx(mx.port, { from: '127.0.0.2' });
  assert.match(await first.say('QUIT'), /^221 /);
  first.socket.destroy();
  const greeting = await until(
    () => dialMx(mx.port).reply(),
    (reply) => !reply.startsWith('421'),
  );
  assert.match(greeting, /^220 mail\.example\.com ESMTP/);
});

test('who is shown out does not keep its socket', async () => {
  const mx = await startTestMx({ connections: { per_client: 1 } });
  await enterMx(mx.port);
  const second = dialMx(mx.port);
  assert.match(await second.reply(), /^421 /);
  assert.is(await second.reply(), ''); // closed by the listener: this side ends nothing
});

test('behind a proxy the real client counts: an address, an IPv6 /64', async () => {
  const mx = await startTestMx({ proxy_from: ['127.0.0.0/8'], connections: { per_client: 1 } });
  const client = await enterMx(mx.port, proxied('192.0.2.1'));
  assert.match(await client.send(), /^250 2\.0\.0 /);
  assert.is(mx.got[0]?.client.address, '192.0.2.1');
  assert.match(mx.got[0]?.raw.toString() ?? '', /from client\.test \(\[192\.0\.2\.1\]\)/);
  assert.match(await dialMx(mx.port, proxied('192.0.2.1')).reply(), /^421 4\.7\.0 /);
  assert.match(await dialMx(mx.port, proxied('192.0.2.2')).reply(), /^220 /);
  assert.match(await dialMx(mx.port, proxied('2001:db8::1')).reply(), /^220 /);
  assert.match(await dialMx(mx.port, proxied('2001:db8::2')).reply(), /^421 4\.7\.0 /);
  assert.match(await dialMx(mx.port, proxied('2001:db8:0:1::2')).reply(), /^220 /);
});

test('a client is the same however its proxy spells it', async () => {
  const mx = await startTestMx({ proxy_from: ['127.0.0.0/8'], connections: { per_client: 1 } });
  for (const address of ['2001:0db8:0:0:0:0:0:1', '2001:DB8::1', '::ffff:192.0.2.1', '192.0.2.1']) {
    for (let count = 0; count < 3; count += 1) {
      const client = dialMx(mx.port, proxied(address));
      const greeting = await client.reply();
      // Until the one before is forgotten.
      if (greeting.startsWith('421')) count -= 1;
      else assert.match(greeting, /^220 /);
      client.socket.destroy();
    }
  }
});

test('a proxy must say for whom it comes, and nobody else may', async () => {
  const mx = await startTestMx({ proxy_from: ['127.0.0.2'] });
  const silent = dialMx(mx.port, { from: '127.0.0.2', first: 'EHLO client.test\r\n' });
  assert.is(await silent.reply(), ''); // no SMTP without the header
  const bad = dialMx(mx.port, { from: '127.0.0.2', first: 'PROXY TCP4 x y 1 2\r\n' });
  assert.is(await bad.reply(), '');
  const good = dialMx(mx.port, { from: '127.0.0.2', ...proxied('192.0.2.1') });
  assert.match(await good.reply(), /^220 /);
  const liar = dialMx(mx.port);
  assert.match(await liar.reply(), /^220 /);
  assert.match(await liar.say(proxied('192.0.2.1').first.trim()), /^500 5\.5\.2 /);
  await liar.say('EHLO client.test');
  assert.match(await liar.send(), /^250 /);
  assert.is(mx.got[0]?.client.address, '127.0.0.1');
});

test('XCLIENT and XFORWARD are neither offered nor known', async () => {
  const mx = await startTestMx();
  const client = dialMx(mx.port);
  await client.reply();
  assert.not.match(await client.say('EHLO client.test'), /XCLIENT|XFORWARD|AUTH/);
  assert.match(await client.say('XCLIENT ADDR=192.0.2.1'), /^500 /);
  assert.match(await client.say('XFORWARD ADDR=192.0.2.1'), /^500 /);
  assert.match(await client.say('AUTH PLAIN AGEAYg=='), /^500 /);
});

test('a network makes so many connections a minute: a /24, an IPv6 /64', async () => {
  const mx = await startTestMx({ proxy_from: ['127.0.0.1'], connections: { new_per_minute: 2 } });
  const greet = (address: string): Promise<string> => dialMx(mx.port, proxied(address)).reply();
  assert.match(await greet('192.0.2.1'), /^220 /);
  assert.match(await greet('192.0.2.2'), /^220 /);
  assert.match(await greet('192.0.2.3'), /^421 4\.7\.0 .*minute/);
  assert.match(await greet('192.0.3.1'), /^220 /);
  for (const reply of [/^220 /, /^220 /, /^421 /]) assert.match(await greet('2001:db8::1'), reply);
  assert.match(await greet('2001:db8:0:1::1'), /^220 /);
  // Programs of this machine have no such limit.
  for (let count = 0; count < 5; count += 1) {
    assert.match(await dialMx(mx.port, { from: '127.0.0.2' }).reply(), /^220 /);
  }
});

test('who speaks before the greeting is shown out, and what it said is not run', async () => {
  const mx = await startTestMx(
    { proxy_from: ['127.0.0.1'] },
    { limits: { greetingDelayMs: 60_000 } },
  );
  const { first } = proxied('192.0.2.1');
  const eager = dialMx(mx.port, { first: `${first}EHLO bot.test\r\nMAIL FROM:<b@else.test>\r\n` });
  assert.match(await eager.reply(), /^421 4\.7\.0 .*too soon/);
  assert.is(await eager.reply(), '');
});

test('a listed client hears where it is listed', async () => {
  const asked: string[] = [];
  const mx = await startTestMx(
    { proxy_from: ['127.0.0.1'] },
    {
      findListing: (address) => {
        asked.push(address);
        return Promise.resolve(address === '192.0.2.1' ? 'list.test' : null);
      },
    },
  );
  assert.match(
    await dialMx(mx.port, proxied('192.0.2.1')).reply(),
    /^554 5\.7\.1 Mail from 192\.0\.2\.1 .*list\.test/,
  );
  assert.match(await dialMx(mx.port, proxied('192.0.2.2')).reply(), /^220 /);
  assert.equal(asked, ['192.0.2.1', '192.0.2.2']);
});

test('all places taken: one more hears so, until somebody has been idle for a while', async () => {
  const mx = await startTestMx(
    { connections: { max: 3, per_client: 10 } },
    { limits: { makeRoomIdleMs: 60_000 } },
  );
  for (let count = 0; count < 3; count += 1) await enterMx(mx.port);
  assert.match(await dialMx(mx.port, { from: '127.0.0.2' }).reply(), /^421 4\.7\.0 /);

  const kind = await startTestMx(
    { connections: { max: 3, per_client: 10 } },
    { limits: { makeRoomIdleMs: 0 } },
  );
  const busy = await enterMx(kind.port);
  assert.match(await busy.say('MAIL FROM:<b@else.test>'), /^250 /);
  const idle = await enterMx(kind.port);
  await enterMx(kind.port);
  const next = await enterMx(kind.port, { from: '127.0.0.2' });
  assert.match(await idle.reply(), /^421 4\.3\.2 /);
  assert.match(await next.send(), /^250 /);
  assert.match(await busy.say('RCPT TO:<a@here.test>'), /^250 /);
});

test('under stress an idle client goes soon, one that sends stays', async () => {
  const mx = await startTestMx(
    { connections: { max: 5, per_client: 10 } },
    {
      limits: {
        patienceOf: impatient({ idleMaxMs: 60_000 }, { idleMaxMs: 300, messageGraceMs: 60_000 }),
      },
    },
  );
  const sending = await enterMx(mx.port);
  await sending.say('MAIL FROM:<b@else.test>');
  await sending.say('RCPT TO:<a@here.test>');
  assert.match(await sending.say('DATA'), /^354 /);
  const others: MxClient[] = [];
  for (let count = 0; count < 4; count += 1) others.push(await enterMx(mx.port));
  assert.match(await others[0]!.reply(), /^421 4\.4\.2 Idle/);
  assert.match(await sending.say('Subject: x\r\n\r\nhello\r\n.'), /^250 /);
});

test('commands that bring no mail: a hundred, under stress one', async () => {
  const mx = await startTestMx({ connections: { max: 5, per_client: 10 } });
  const calm = await enterMx(mx.port);
  for (let count = 0; count < 100; count += 1) {
    assert.match(await calm.say(['NOOP', 'RSET', 'VRFY x'][count % 3]!), /^25/);
  }
  assert.match(await calm.say('NOOP'), /^421 4\.7\.0 .*no mail/);
  const held: MxClient[] = [];
  for (let count = 0; count < 5; count += 1) held.push(await enterMx(mx.port));
  const stressed = held[4]!;
  assert.match(await stressed.say('EHLO again.test'), /^250/); // as after STARTTLS
  assert.match(await stressed.say('NOOP'), /^250 /);
  assert.match(await stressed.send(), /^250 /); // and all is forgiven
  assert.match(await stressed.say('RSET'), /^250 /);
  assert.match(await stressed.say('RSET'), /^421 4\.7\.0 /);
});

test('errors are counted, too', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  for (let count = 0; count < 20; count += 1) {
    assert.match(await client.say('MAIL FROM:garbage'), /^501 /);
  }
  assert.match(await client.say('MAIL FROM:<b@else.test>'), /^421 4\.7\.0 Too many errors/);
});

test('a client that types a command byte by byte is idle', async () => {
  const mx = await startTestMx({}, { limits: { patienceOf: impatient({ idleMaxMs: 300 }) } });
  const client = await enterMx(mx.port);
  const typing = setInterval(() => client.socket.write('x'), 20);
  assert.match(await client.reply(), /^421 4\.4\.2 Idle/);
  clearInterval(typing);
});

test('a message that drips is cut off, one that flows is not', async () => {
  const patience = impatient({ messageGraceMs: 300, messageBytesPerSecond: 100 });
  const mx = await startTestMx({}, { limits: { patienceOf: patience } });
  const open = async (): Promise<MxClient> => {
    const client = await enterMx(mx.port);
    await client.say('MAIL FROM:<b@else.test>');
    await client.say('RCPT TO:<a@here.test>');
    assert.match(await client.say('DATA'), /^354 /);
    return client;
  };
  const slow = await open();
  const flowing = await open();
  flowing.socket.write(`Subject: x\r\n\r\n${'x'.repeat(500)}\r\n`.repeat(10));
  const dripping = setInterval(() => slow.socket.write('x'), 50);
  assert.match(await slow.reply(), /^421 4\.4\.2 .*slowly/);
  clearInterval(dripping);
  assert.match(await flowing.say('.'), /^250 /);
  assert.is(mx.got.length, 1);
});

test('the operator changes the limits while it runs', async () => {
  const mx = await startTestMx({ connections: { per_client: 1 } });
  await enterMx(mx.port);
  assert.match(await dialMx(mx.port).reply(), /^421 /);
  mx.file = { connections: { per_client: 2 } };
  assert.match(await dialMx(mx.port).reply(), /^220 /);
});

test.run();
