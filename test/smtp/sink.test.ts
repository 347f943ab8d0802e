// The sink over real sockets: nodemailer's client where a normal client is enough, bare sockets where the
// bytes or their timing matter.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../../src/log.ts';
import { startSink } from '../../src/smtp/sink.ts';
import { closeAll, dial, failure, open, send, start } from '../support/sink-session.ts';

const quiet = createLogger({ level: 'silent', name: 'sink' });
const sink = suite('sink');

sink.after.each(closeAll);

sink('offers what it can and greets with its name', async () => {
  const { port } = await start();
  const wire = await dial(port, true);
  assert.is(
    await wire.say('EHLO client.test'),
    '250-sink.test greets [127.0.0.1]|250-PIPELINING|250-8BITMIME|250-SMTPUTF8' +
      '|250-ENHANCEDSTATUSCODES|250 SIZE 52428800',
  );
  assert.match(await wire.say('STARTTLS'), /^500 /);
  assert.match(await wire.say('AUTH PLAIN AAAA'), /^500 /);
  assert.match(await wire.say('QUIT'), /^221 /);
});

sink('stores a message and its envelope as they came', async () => {
  const { port, messages } = await start();
  const raw = 'From: a@b.test\r\nSubject: =?utf-8?q?h?=\r\n\r\n.dot\r\n..\r\n.\r\nend\r\n';
  const sent = await send(port, { from: '', to: ['ok@a.test', 'Any.One+x@C.test'], raw });
  assert.is(sent.response, '250 2.6.0 Message stored');
  const [message] = messages;
  assert.is(messages.length, 1);
  assert.is(message?.mailFrom, '');
  assert.equal(message?.rcptTo, ['ok@a.test', 'Any.One+x@C.test']);
  assert.is(message?.raw.toString('latin1'), raw);
  assert.is(message?.tls, false);
  assert.instance(message?.receivedAt, Date);
});

sink('keeps every byte, however the bytes are cut', async () => {
  const { port, messages } = await start();
  const lines = '|.|..|.a|a.|\xff\x80\x00\x01|caf\xe9 \xf0\x9f\x93\xa7|...|'.split('|');
  const raw = Buffer.from(`.first: x\r\n${lines.join('\r\n')}\r\n`, 'latin1');
  const stuffed = raw.toString('latin1').replace(/(^|\r\n)\./g, '$1..');
  const wire = Buffer.from(`${stuffed}.\r\n`, 'latin1');
  for (const size of [1, 2, 3, 5, 7, 64]) {
    const client = await open(port);
    for (let at = 0; at < wire.length; at += size) {
      client.socket.write(wire.subarray(at, at + size));
      // A turn of the event loop, so that the pieces leave as pieces.
      await new Promise((resolve) => setImmediate(resolve));
    }
    assert.match(await client.reply(), /^250 /);
    client.socket.destroy();
  }
  assert.equal(
    messages.map((message) => message.raw.toString('latin1')),
    Array.from({ length: 6 }, () => raw.toString('latin1')),
  );
});

sink('ends a message at CRLF.CRLF and nowhere else', async () => {
  const { port, messages } = await start();
  const wire = await open(port);
  const raw = 'a: b\r\n\r\nx\n.\nMAIL FROM:<x@y.test>\r.\r\nz\n.\r\nRSET\r\n';
  assert.match(await wire.say(Buffer.from(`${raw}.\r\n`)), /^250 /);
  assert.is(messages[0]?.raw.toString(), raw);
  assert.is(wire.waiting(), 0);
});

sink('the local part chooses the reply, with a label and in capitals too', async () => {
  const { port } = await start();
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  const expected: readonly (readonly [string, RegExp])[] = [
    ['ok', /^250 2\.1\.5 /],
    ['anything.else', /^250 2\.1\.5 /],
    ['rejected', /^250 /],
    ['tempfail-x', /^250 /],
    ['tempfail-0', /^250 /],
    ['tempfail', /^451 4\.3\.0 /],
    ['tempfail-3', /^451 4\.3\.0 /],
    ['reject', /^550 5\.1\.1 /],
    ['full', /^452 4\.2\.2 /],
    ['blocked', /^554 5\.7\.1 .*listed/],
    ['drop-after-dot', /^250 /],
  ];
  for (const [local, reply] of expected) {
    for (const form of [local, `${local}+x`, `${local}+x+reject`, local.toUpperCase()]) {
      assert.match(await wire.say(`RCPT TO:<${form}@a.test>`), reply, form);
    }
  }
});

sink('tempfail-N refuses N times, each address by itself', async () => {
  const { port, messages } = await start();
  const ask = async (address: string): Promise<string> => {
    const wire = await dial(port);
    await wire.say('MAIL FROM:<from@b.test>');
    return (await wire.say(`RCPT TO:<${address}>`)).slice(0, 9);
  };
  const asked = '2@a 2+x@a 2@A 2@a 2+x@a 2+x@a 2@b 2@a'.split(' ');
  const replies: string[] = [];
  for (const address of asked) replies.push(await ask(`tempfail-${address}.test`));
  const [no, yes] = ['451 4.3.0', '250 2.1.5'];
  assert.equal(replies, [no, no, no, yes, no, yes, no, yes]);
  await send(port, { to: ['tempfail-2@a.test'] });
  assert.is(messages.length, 1);
});

sink('remembers the 10,000 tempfail addresses that were asked for last', async () => {
  const { port } = await start();
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  const rcpt = (label: number): string => `RCPT TO:<tempfail-1+${label}@a.test>`;
  const all = Array.from({ length: 10_000 }, (_, label) => `${rcpt(label)}\r\n`);
  wire.socket.write(all.join(''));
  for (let i = 0; i < all.length; i += 1) assert.match(await wire.reply(), /^451/);
  assert.match(await wire.say(rcpt(0)), /^250/);
  assert.match(await wire.say(rcpt(10_000)), /^451/);
  assert.match(await wire.say(rcpt(0)), /^250/);
  assert.match(await wire.say(rcpt(1)), /^451/);
});

sink('a slow recipient is answered late, and what is pipelined behind it later', async () => {
  const { port } = await start({ slowMs: 20 });
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  assert.match(await wire.say('RCPT TO:<slow+x@a.test>\r\nRCPT TO:<full@a.test>'), /^250 2\.1\.5/);
  assert.match(await wire.reply(), /^452/);

  const never = await start({ slowMs: 600_000 });
  const waiting = await dial(never.port);
  await waiting.say('MAIL FROM:<from@b.test>');
  waiting.socket.write('RCPT TO:<slow@a.test>\r\n');
  await send(never.port);
  assert.is(waiting.waiting(), 0);
});

sink('recipients that disagree: a reply each, stored with those that were taken', async () => {
  const { port, messages } = await start();
  const to = ['reject@a.test', 'ok@a.test', 'full@a.test', 'OK@a.test', 'two@a.test'];
  const sent = await send(port, { to });
  assert.equal(sent.rejected, ['reject@a.test', 'full@a.test']);
  assert.equal(messages[0]?.rcptTo, ['OK@a.test', 'two@a.test']);

  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  await wire.say('RCPT TO:<reject@a.test>');
  assert.match(await wire.say('DATA'), /^503 /);
  assert.is(messages.length, 1);
});

sink('drop-after-dot closes without a reply and stores nothing', async () => {
  const { port, messages } = await start();
  for (const rcpt of ['drop-after-dot@a.test', 'drop-after-dot+x@a.test']) {
    const wire = await open(port, rcpt);
    assert.is(await wire.say(Buffer.from('a: b\r\n\r\nx\r\n.\r\n')), '');
    assert.ok(wire.socket.destroyed);
  }
  const both = send(port, { to: ['ok@a.test', 'drop-after-dot@a.test'] });
  assert.match(await failure(both), /closed|ECONN/i);
  assert.is(messages.length, 0);
  await send(port);
  assert.is(messages.length, 1);
});

sink('says 250 only when the message is stored', async () => {
  const tested = await start();
  const { reached, release } = tested.hold();
  const wire = await open(tested.port);
  wire.socket.write('a: b\r\n\r\nx\r\n.\r\n');
  await reached;
  // Another client gets its answers meanwhile, so an early 250 would have been here before them.
  await dial(tested.port);
  assert.is(wire.waiting(), 0);
  assert.is(tested.messages.length, 0);
  release();
  assert.match(await wire.reply(), /^250 2\.6\.0/);
  assert.is(tested.messages.length, 1);
});

sink('a store that fails is a 451, and the next message is taken', async () => {
  const tested = await start();
  tested.failWith(new Error('disk full'));
  const wire = await open(tested.port);
  const reply = await wire.say(Buffer.from('a: b\r\n\r\nx\r\n.\r\n'));
  assert.is(reply, '451 4.3.0 The message could not be stored');
  assert.match(tested.complaints.join(''), /disk full/);
  tested.failWith(null);
  await wire.say('MAIL FROM:<from@b.test>');
  await wire.say('RCPT TO:<ok@a.test>');
  await wire.say('DATA');
  assert.match(await wire.say(Buffer.from('second: b\r\n\r\nx\r\n.\r\n')), /^250/);
  assert.equal(
    tested.messages.map((message) => message.raw.toString()),
    ['second: b\r\n\r\nx\r\n'],
  );
});

sink('a store that throws at once is a 451 as well', async () => {
  const started = await startSink({
    port: 0,
    hostname: 'sink.test',
    log: quiet,
    store: () => {
      throw new Error('bug');
    },
  });
  try {
    assert.match(await failure(send(started.port)), /^451 4\.3\.0 /);
  } finally {
    await started.stop();
  }
});

sink('STARTTLS when there is a certificate', async () => {
  const { port, messages } = await start({ tls: true });
  const wire = await dial(port, true);
  assert.match(await wire.say('EHLO client.test'), /\|250-STARTTLS\|/);
  const raw = 'a: b\r\n\r\nover TLS\r\n';
  await send(port, { tls: true, raw });
  await send(port, { tls: false, raw });
  assert.equal(
    messages.map((message) => [message.tls, message.raw.toString()]),
    [
      [true, raw],
      [false, raw],
    ],
  );
  const drop = send(port, { tls: true, to: ['drop-after-dot@a.test'] });
  assert.match(await failure(drop), /closed|ECONN/i);
});

sink('answers a whole session sent in one write, in order', async () => {
  const { port, messages } = await start();
  const wire = await dial(port, true);
  const transaction = (n: number): string =>
    `MAIL FROM:<${n}@b.test>\r\nRCPT TO:<reject@a.test>\r\nRCPT TO:<ok@a.test>\r\nDATA\r\nn: ${n}\r\n\r\n.\r\n`;
  wire.socket.write(`EHLO client.test\r\n${transaction(1)}${transaction(2)}NOOP\r\nQUIT\r\n`);
  const codes: string[] = [];
  for (let reply = await wire.reply(); reply !== ''; reply = await wire.reply()) {
    codes.push(reply.slice(0, 3));
  }
  const one = ['250', '550', '250', '354', '250'];
  assert.equal(codes, ['250', ...one, ...one, '250', '221']);
  assert.equal(
    messages.map((message) => [message.mailFrom, message.raw.toString()]),
    [
      ['1@b.test', 'n: 1\r\n\r\n'],
      ['2@b.test', 'n: 2\r\n\r\n'],
    ],
  );
});

sink('keeps addresses as they were written', async () => {
  const { port, messages } = await start();
  const addresses = [
    'ok@xn--bcher-kva.test',
    'jos\u00e9@b\u00fccher.test',
    '"john doe"@a.test',
    '"a@b<c>\\"d"@a.test',
    'a..b@a.test',
    'ok@[192.0.2.1]',
    'postmaster',
  ];
  const wire = await dial(port);
  assert.match(await wire.say('MAIL FROM:<"from me"@xn--bcher-kva.test> SMTPUTF8 SIZE=9'), /^250/);
  for (const address of addresses) assert.match(await wire.say(`RCPT TO:<${address}>`), /^250/);
  assert.match(await wire.say('RCPT TO:<@hop.test:route@a.test>'), /^250/);
  for (const bad of ['<>', '<a@b@c.test>', 'a@b.test', '<"a\x01"@b.test>', '<a b@c.test>']) {
    assert.match(await wire.say(`RCPT TO:${bad}`), /^501 5\.1\.3 /, bad);
  }
  await wire.say('DATA');
  assert.match(await wire.say(Buffer.from('a: b\r\n\r\n.\r\n')), /^250/);
  assert.is(messages[0]?.mailFrom, '"from me"@xn--bcher-kva.test');
  assert.equal(messages[0]?.rcptTo, [...addresses, 'route@a.test']);
});

sink('a port in use is told', async () => {
  const { port } = await start();
  const second = startSink({ port, hostname: 'sink.test', log: quiet, store: async () => {} });
  assert.match(await failure(second), /EADDRINUSE/);
});

sink.run();
