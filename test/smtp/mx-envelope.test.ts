// What the inbound listener says from EHLO to RCPT: what it offers, which addresses it takes, and how guessing ends.
import { TLSSocket } from 'node:tls';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { patienceOf } from '../../src/smtp/mx-conduct.ts';
import {
  dialMx,
  endMxSessions,
  enterMx,
  MESSAGE,
  receiverOf,
  startTestMx,
} from '../support/mx-session.ts';
import { issue } from '../support/certificates.ts';

const test = suite('mx: the envelope');
test.after.each(endMxSessions);

const FROM = 'MAIL FROM:<b@else.test>';
const tls = issue({ names: ['mail.example.com'] });

test('what is offered, and what is not', async () => {
  const mx = await startTestMx({}, { tls });
  const client = dialMx(mx.port);
  assert.is(await client.reply(), '220 mail.example.com ESMTP Mailstead');
  const offered = (await client.say('EHLO client.test')).split('\n').map((line) => line.slice(4));
  assert.equal(offered, [
    'mail.example.com greets [127.0.0.1]',
    'PIPELINING',
    '8BITMIME',
    'SMTPUTF8',
    'ENHANCEDSTATUSCODES',
    'STARTTLS',
    'SIZE 52428800',
  ]);
  assert.match(await client.say('MAIL FROM:<b@else.test> SIZE=52428801'), /^552 5\.3\.4 /);
  assert.match(await client.say('MAIL FROM:<b@else.test> SIZE=52428800 BODY=8BITMIME'), /^250 /);
});

test('no name is too silly, and what stands in Received is harmless', async () => {
  const mx = await startTestMx();
  for (const name of [
    'localhost',
    '[300.1.2.3]',
    'my big pc',
    'ä.test',
    '(evil)',
    'x'.repeat(2_000),
  ]) {
    const client = dialMx(mx.port);
    await client.reply();
    assert.match(await client.say(`EHLO ${name}`), /^250/, name.slice(0, 20));
    assert.match(await client.send(), /^250 /);
  }
  const traces = mx.got.map(({ raw }) => /^Received: from (\S+) \(/m.exec(raw.toString())?.[1]);
  assert.equal(traces.slice(0, 5), ['localhost', '[300.1.2.3]', 'my?big?pc', '?.test', '?evil?']);
  assert.is(traces[5]?.length, 255);
});

test('STARTTLS forgets what was said before, also what was sent behind it', async () => {
  const mx = await startTestMx({}, { tls });
  const client = await enterMx(mx.port);
  await client.say(FROM);
  client.socket.write('RCPT TO:<a@here.test>\r\n');
  assert.match(await client.reply(), /^250 2\.1\.5 /);
  await client.startTls();
  assert.match(await client.say(FROM), /^503 /);
  assert.match(await client.say('EHLO client.test'), /^250/);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^503 /);
  assert.match(await client.send(), /^250 /);
  const [arrival] = mx.got;
  assert.is(arrival?.client.isTls, true);
  assert.match(arrival?.raw.toString() ?? '', /with ESMTPS id /);

  const injecting = dialMx(mx.port);
  await injecting.reply();
  await injecting.say('EHLO client.test');
  injecting.socket.write(`STARTTLS\r\n${FROM}\r\nRCPT TO:<a@here.test>\r\n`);
  assert.match(await injecting.reply(), /^220 /);
  injecting.socket.write('not a handshake\r\n\r\n');
  assert.not.match(await injecting.reply(), /^250/);
  assert.is(mx.got.length, 1);
});

test('a handshake that does not go on ends like any other silence', async () => {
  const patience = { ...patienceOf(false), idleMaxMs: 200 };
  const mx = await startTestMx({}, { tls, limits: { patienceOf: () => patience } });
  for (const beginning of [[], [0x16], [0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3]]) {
    const client = await enterMx(mx.port);
    assert.match(await client.say('STARTTLS'), /^220 /);
    client.socket.write(Buffer.from(beginning));
    assert.is(await client.reply(), ''); // nothing can be said
  }
  const next = await enterMx(mx.port);
  assert.match(await next.send(), /^250 /);
});

test('a certificate that was exchanged is shown to the next client', async () => {
  const mx = await startTestMx({}, { tls });
  const shown = async (): Promise<string> => {
    const client = await enterMx(mx.port);
    await client.startTls();
    assert.instance(client.socket, TLSSocket);
    return String((client.socket as TLSSocket).getPeerCertificate().subject.CN);
  };
  assert.is(await shown(), 'mail.example.com');
  mx.updateCertificate(issue({ names: ['new.example.com'] }));
  assert.is(await shown(), 'new.example.com');
});

test('addresses outside ASCII need SMTPUTF8, at MAIL and at RCPT', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  assert.match(await client.say('MAIL FROM:<ä@else.test>'), /^553 5\.6\.7 .*SMTPUTF8/);
  assert.match(await client.say(FROM), /^250 /);
  assert.match(await client.say('RCPT TO:<ä@here.test>'), /^553 5\.6\.7 /);
  await client.say('RSET');
  assert.match(await client.say('MAIL FROM:<ä@else.test> SMTPUTF8 REQUIRETLS'), /^5\d\d /);
  assert.match(await client.say(FROM), /^250 /);
  assert.match(await client.say('RCPT TO:<ä@here.test>'), /^553 5\.6\.7 /); // the refused MAIL said it
  await client.say('RSET');
  assert.match(await client.say('MAIL FROM:<ä@else.test> SMTPUTF8'), /^250 /);
  assert.match(await client.say('RCPT TO:<ä@here.test>'), /^250 /);
  await client.say('DATA');
  assert.match(await client.say('Subject: x\r\n\r\n.'), /^250 /);
  assert.match(mx.got[0]?.raw.toString() ?? '', /with UTF8SMTP id \S+\r\n\tfor <ä@here\.test>;/);
});

test('old senders are taken as they are, overlong addresses are not', async () => {
  const mx = await startTestMx();
  const old = ['a..b@else.test', 'a.@else.test', '.a@else.test', 'a@host_1.else.test'];
  for (const sender of old) {
    const client = await enterMx(mx.port);
    assert.match(await client.send(MESSAGE, 'a@here.test', sender), /^250 /, sender);
    assert.is(mx.got.at(-1)?.mailFrom, sender);
  }
  const client = await enterMx(mx.port);
  for (const sender of ['a@b@else.test', 'a@.else.test', 'a@else..test', 'a@else test', 'a']) {
    assert.match(await client.say(`MAIL FROM:<${sender}>`), /^501 5\.1\.7 /, sender);
  }
  const long = `"${'a'.repeat(300)}"@here.test`;
  assert.match(await client.say(`MAIL FROM:<${long}>`), /^501 5\.1\.7 /);
  await client.say(FROM);
  assert.match(await client.say(`RCPT TO:<${long}>`), /^501 5\.1\.3 /);
  assert.match(await client.say('RCPT TO:<a..b@here.test>'), /^501 5\.1\.3 /);
});

test('what relays try is for nobody else', async () => {
  const mx = await startTestMx();
  const foreign = [
    '@here.test:a@else.test',
    '@here.test,@b.test:a@else.test',
    'a@[127.0.0.1]',
    'a@[IPv6:::1]',
    'a@here.test@else.test',
    'a@else.test@here.test',
    'a@here.test.',
    'a@here.test.else.test',
    'a@here%2etest',
    'a@xn--here-.test',
    'a@here.test\0.else.test',
    '"a@here.test"@else.test',
    'a@here.test>,<a@else.test',
  ];
  for (const path of foreign) {
    const client = await enterMx(mx.port);
    await client.say(FROM);
    assert.match(await client.say(`RCPT TO:<${path}>`), /^5\d\d 5\.(7\.1|1\.3) /, path);
    client.socket.destroy();
  }
  const client = await enterMx(mx.port);
  // Here these are names of mailboxes like any other.
  for (const local of ['a%else.test', 'else.test!a', '"a@else.test"']) {
    assert.match(await client.send(MESSAGE, `${local}@here.test`), /^250 /, local);
    const to = mx.got.at(-1)?.receivers.map(({ recipient }) => recipient);
    assert.equal(to, [`${local}@here.test`]);
  }
});

test('who is not here is refused with the reason', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  await client.say(FROM);
  assert.match(await client.say('RCPT TO:<a@elsewhere.test>'), /^550 5\.7\.1 .*relay/);
  assert.match(await client.say('RCPT TO:<nobody@here.test>'), /^550 5\.1\.1 /);
  assert.match(await client.say('RCPT TO:<postmaster>'), /^550 5\.1\.1 /);
  assert.match(await client.say('DATA'), /^503 /);
  assert.match(await client.say('RCPT TO:<@relay.test:a@here.test>'), /^250 /);
  await client.say('DATA');
  assert.match(await client.say('Subject: x\r\n\r\n.'), /^250 /);
  const [arrival] = mx.got;
  assert.equal(
    arrival?.receivers.map(({ recipient }) => recipient),
    ['a@here.test'],
  );
  assert.equal(
    arrival?.unrouteable.map(({ recipient }) => recipient),
    ['nobody@here.test'],
  );
});

test('a recipient that is said twice is one; what was refused for one message is not told of the next', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  await client.say(FROM);
  await client.say('RCPT TO:<nobody@here.test>');
  await client.say('RSET');
  await client.say(FROM);
  for (const address of ['a@here.test', 'A@HERE.test', 'c@here.test']) {
    assert.match(await client.say(`RCPT TO:<${address}>`), /^250 /);
  }
  await client.say('DATA');
  await client.say('Subject: x\r\n\r\n.');
  assert.equal(
    mx.got[0]?.receivers.map(({ recipient }) => recipient),
    ['a@here.test', 'c@here.test'],
  );
  assert.equal(mx.got[0]?.unrouteable, []);
  assert.not.match(mx.got[0]?.raw.toString() ?? '', /for </);
});

test('the null sender has one recipient', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  assert.match(await client.say('MAIL FROM:<>'), /^250 /);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^250 /);
  assert.match(await client.say('RCPT TO:<c@here.test>'), /^452 4\.5\.3 /);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^250 /);
  await client.say('DATA');
  assert.match(await client.say('Subject: x\r\n\r\n.'), /^250 /);
  assert.is(mx.got[0]?.mailFrom, '');
  assert.match(mx.got[0]?.raw.toString() ?? '', /^Return-Path: <>\r\n/);
});

test('domains that want different things of DMARC come in two transactions', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  await client.say(FROM);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^250 /);
  assert.match(await client.say('RCPT TO:<a@tag.test>'), /^452 4\.5\.3 /);
  assert.match(await client.say('RCPT TO:<c@here.test>'), /^250 /);
});

test('a hundred recipients, and who goes on for ever is shown out', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  await client.say(FROM);
  for (let count = 0; count < 100; count += 1) {
    assert.match(await client.say(`RCPT TO:<a${count}@here.test>`), /^250 /);
  }
  assert.match(await client.say('RCPT TO:<one@here.test>'), /^452 4\.5\.3 /);
  assert.match(await client.say('RCPT TO:<a7@here.test>'), /^250 /);
  for (let count = 1; count < 1_000; count += 1)
    client.socket.write(`RCPT TO:<b${count}@here.test>\r\n`);
  for (let count = 1; count < 1_000; count += 1) assert.match(await client.reply(), /^452 /);
  assert.match(await client.say('RCPT TO:<last@here.test>'), /^421 /);
});

test('guesses wait from the sixth on, and the twentieth ends the connection', async () => {
  const mx = await startTestMx({}, { limits: { tarpitMs: 40 } });
  const client = await enterMx(mx.port);
  await client.say(FROM);
  const beganAt = performance.now();
  for (let count = 1; count <= 5; count += 1) {
    assert.match(await client.say('RCPT TO:<nobody@here.test>'), /^550 /);
  }
  for (let count = 6; count <= 19; count += 1) {
    assert.match(await client.say('RCPT TO:<nobody@here.test>'), /^550 /);
  }
  assert.ok(performance.now() - beganAt >= 14 * 39, 'they did not wait');
  assert.match(await client.say('RCPT TO:<nobody@here.test>'), /^421 4\.7\.0 /);
  assert.is(await client.reply(), '');
});

test('a database that is away, or says nothing, is a 451', async () => {
  let answer: () => Promise<never> = () => Promise.reject(new Error('away'));
  const mx = await startTestMx({}, { resolve: () => answer(), limits: { answerMaxMs: 50 } });
  const client = await enterMx(mx.port);
  await client.say(FROM);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^451 4\.3\.0 /);
  answer = () => new Promise(() => undefined);
  assert.match(await client.say('RCPT TO:<a@here.test>'), /^451 4\.3\.0 /);
});

test('one message for several tenants', async () => {
  const mx = await startTestMx(
    {},
    {
      resolve: (address) =>
        Promise.resolve({
          kind: 'taken',
          receiver: receiverOf(address, { tenantId: address.split('@')[1]! }),
        }),
    },
  );
  const client = await enterMx(mx.port);
  await client.say(FROM);
  await client.say('RCPT TO:<a@one.test>');
  await client.say('RCPT TO:<a@two.test>');
  await client.say('DATA');
  assert.match(await client.say('Subject: x\r\n\r\n.'), /^250 /);
  assert.equal(
    mx.got[0]?.receivers.map(({ tenantId }) => tenantId),
    ['one.test', 'two.test'],
  );
});

test('HELO works, and Received says so', async () => {
  const mx = await startTestMx();
  const client = dialMx(mx.port);
  await client.reply();
  assert.match(await client.say('HELO old.test'), /^250 /);
  assert.match(await client.send(), /^250 /);
  const [top] = (mx.got[0]?.raw.toString() ?? '').split('From:');
  assert.match(
    top ?? '',
    /^Return-Path: <b@else\.test>\r\nReceived: from old\.test \(\[127\.0\.0\.1\]\)\r\n\tby mail\.example\.com with SMTP id \S+\r\n\tfor <a@here\.test>;\r\n\t\w{3}, .* \+0000\r\n$/,
  );
  assert.is(mx.got[0]?.traceSizeBytes, top?.length);
});

test.run();
