// The sink over real sockets: nodemailer's client where a normal client is enough, bare sockets where the
// bytes or their timing matter.
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { connect } from 'node:net';
import type { Socket } from 'node:net';
import SMTPConnection from 'nodemailer/lib/smtp-connection';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../../src/log.ts';
import { startSink } from '../../src/smtp/sink.ts';
import { dialBare, startTestSink } from '../support/sink.ts';
import type { BareClient, TestSink } from '../support/sink.ts';

const quiet = createLogger({ level: 'silent', name: 'sink' });
const sinks: TestSink[] = [];
const sockets: Socket[] = [];
const sink = suite('sink');

sink.after.each(async () => {
  for (const socket of sockets.splice(0)) socket.destroy();
  await Promise.all(sinks.splice(0).map((one) => one.stop()));
});

async function start(options: Parameters<typeof startTestSink>[0] = {}): Promise<TestSink> {
  const started = await startTestSink(options);
  sinks.push(started);
  return started;
}

/** A connection that has read the greeting, and has said EHLO unless `bare`. */
async function dial(port: number, bare = false): Promise<BareClient> {
  const client = await dialBare(port);
  sockets.push(client.socket);
  if (!bare) await client.say('EHLO client.test');
  return client;
}

/** MAIL, one RCPT, DATA; the connection is ready for the message. */
async function open(port: number, rcpt = 'ok@a.test'): Promise<BareClient> {
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  await wire.say(`RCPT TO:<${rcpt}>`);
  await wire.say('DATA');
  return wire;
}

/** One message over nodemailer's client, in a session of its own. */
async function send(
  port: number,
  message: { from?: string; to?: readonly string[]; raw?: Buffer | string; tls?: boolean } = {},
): Promise<{ response: string; rejected: readonly string[] }> {
  const client = new SMTPConnection({
    host: '127.0.0.1',
    port,
    name: 'client.test',
    ignoreTLS: message.tls !== true,
    requireTLS: message.tls === true,
    tls: { rejectUnauthorized: false },
  });
  const { promise, resolve, reject } = Promise.withResolvers<Awaited<ReturnType<typeof send>>>();
  client.on('error', reject);
  client.connect(() => {
    const envelope = {
      from: message.from ?? 'from@b.test',
      to: [...(message.to ?? ['ok@a.test'])],
    };
    client.send(envelope, message.raw ?? 'Subject: x\r\n\r\nx\r\n', (error, info) => {
      if (error) reject(error);
      else resolve({ response: info.response ?? '', rejected: info.rejected ?? [] });
    });
  });
  try {
    return await promise;
  } finally {
    client.close();
  }
}

async function failure(work: Promise<unknown>): Promise<string> {
  try {
    await work;
    return 'no failure';
  } catch (error) {
    return (error as { response?: string }).response ?? (error as Error).message;
  }
}

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

sink('takes a message of 20 MB', async () => {
  const { port, messages } = await start();
  const line = `${randomBytes(36).toString('base64')}\r\n.and a dot\r\n`;
  const raw = Buffer.from(`Subject: large\r\n\r\n${line.repeat(330_000)}`);
  assert.ok(raw.length > 20_000_000);
  await send(port, { raw });
  // Not assert.equal, which would print both.
  assert.ok(messages[0]?.raw.equals(raw));
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

sink('refuses a message above the size limit, said or unsaid', async () => {
  const { port, messages } = await start({ maxMessageBytes: 1_000 });
  const wire = await dial(port);
  assert.match(await wire.say('MAIL FROM:<from@b.test> SIZE=1001'), /^552 5\.3\.4/);
  for (const [size, reply] of [
    [1_001, /^552 5\.3\.4/],
    [1_000, /^250/],
  ] as const) {
    await wire.say('MAIL FROM:<from@b.test>');
    await wire.say('RCPT TO:<ok@a.test>');
    await wire.say('DATA');
    const raw = `a: b\r\n\r\n`.padEnd(size - 2, 'x');
    assert.match(await wire.say(Buffer.from(`${raw}\r\n.\r\n`)), reply);
  }
  assert.equal(
    messages.map((message) => message.raw.length),
    [1_000],
  );
});

sink('limits recipients, header lines and the length of a command', async () => {
  const { port, messages } = await start();
  const wire = await dial(port);
  await wire.say('MAIL FROM:<from@b.test>');
  wire.socket.write(Array.from({ length: 1_000 }, (_, i) => `RCPT TO:<${i}@a.test>\r\n`).join(''));
  for (let i = 0; i < 1_000; i += 1) assert.match(await wire.reply(), /^250/);
  assert.match(await wire.say('RCPT TO:<more@a.test>'), /^452 4\.5\.3/);
  await wire.say('DATA');
  const endless = 'a: b\r\n'.repeat(5_001);
  assert.match(await wire.say(Buffer.from(`${endless}.\r\n`)), /^552 5\.3\.4 .*header lines/);
  assert.is(messages.length, 0);
  const raw = `a: b\r\n${'\r\nline'.repeat(10_000)}\r\n`;
  await send(port, { raw });
  assert.is(messages[0]?.raw.toString(), raw);
  assert.match(await wire.say(`NOOP ${'x'.repeat(5_000)}`), /^421/);
});

sink('limits what it holds in memory, and gives back what a lost client held', async () => {
  const { port } = await start({ maxBufferedBytes: 10_000 });
  const half = Buffer.from(`a: b\r\n\r\n${'x'.repeat(6_000)}`);
  const first = await open(port);
  first.socket.write(half);
  const message = Buffer.concat([half, Buffer.from('\r\n.\r\n')]);
  assert.match(await (await open(port)).say(message), /^452 4\.3\.1 /);
  first.socket.resetAndDestroy();
  assert.match(await (await open(port)).say(message), /^250 /);
  assert.match(await (await open(port)).say(message), /^250 /);
});

sink('serves 200 connections and tells the next one to come later', async () => {
  const { port } = await start();
  const wires = await Promise.all(Array.from({ length: 200 }, () => dial(port)));
  const late = connect({ port, host: '127.0.0.1' });
  sockets.push(late);
  const [greeting] = (await once(late, 'data')) as [Buffer];
  assert.match(greeting.toString(), /^421 4\.3\.2 /);
  wires[0]?.socket.end('QUIT\r\n');
  await once(wires[0]?.socket ?? late, 'close');
  assert.match(await (await dial(port)).say('NOOP'), /^250/);
});

sink('a client that leaves in mid message leaves nothing behind', async () => {
  const { port, messages } = await start({ slowMs: 1 });
  const ended = await open(port);
  ended.socket.end('a: b\r\n\r\nhalf of it\r\n');
  assert.is(await ended.reply(), '');
  const reset = await open(port);
  reset.socket.write('a: b\r\n\r\nhalf of it\r\n');
  reset.socket.resetAndDestroy();
  const slow = await dial(port);
  await slow.say('MAIL FROM:<from@b.test>');
  slow.socket.write('RCPT TO:<slow@a.test>\r\n');
  slow.socket.resetAndDestroy();
  await send(port);
  assert.is(messages.length, 1);
});

sink('stop lets a running transaction end, and sends the idle ones away', async () => {
  const { port, messages, stop } = await start();
  const idle = await dial(port);
  const [inData, inMail, reset] = [await open(port), await dial(port), await dial(port)];
  for (const wire of [inMail, reset]) await wire.say('MAIL FROM:<from@b.test>');
  inData.socket.write('a: b\r\n\r\nfirst half\r\n');
  const stopped = stop();
  assert.match(await idle.reply(), /^421 4\.3\.2 /);
  assert.is(await idle.reply(), '');
  assert.match(await failure(send(port)), /ECONNREFUSED/);
  assert.match(await reset.say('RSET\r\nMAIL FROM:<from@b.test>'), /^250 /);
  assert.match(await reset.reply(), /^421 /);
  inData.socket.write('second half\r\n.\r\n');
  assert.match(await inData.reply(), /^250 /);
  assert.match(await inData.reply(), /^421 /);
  await inMail.say('RCPT TO:<ok@a.test>');
  await inMail.say('DATA');
  assert.match(await inMail.say(Buffer.from('c: d\r\n\r\n.\r\n')), /^250 /);
  assert.match(await inMail.reply(), /^421 /);
  await stopped;
  assert.equal(
    messages.map((message) => message.raw.toString()),
    ['a: b\r\n\r\nfirst half\r\nsecond half\r\n', 'c: d\r\n\r\n'],
  );
});

sink('stop cuts what does not end: a stuck message, a held store, a half handshake', async () => {
  const tested = await start({ tls: true });
  const { reached, release } = tested.hold();
  const held = await open(tested.port);
  held.socket.write('a: b\r\n\r\n.\r\n');
  await reached;
  const stuck = await open(tested.port);
  stuck.socket.write('a: b\r\n\r\nhalf\r\n');
  const shaking = await dial(tested.port);
  assert.match(await shaking.say('STARTTLS'), /^220/);
  shaking.socket.write(Buffer.from('1603010200', 'hex'));
  await Promise.all([tested.stop(), tested.stop()]);
  for (const wire of [held, stuck, shaking]) assert.is(await wire.reply(), '');
  release();
});

sink('a port in use is told', async () => {
  const { port } = await start();
  const second = startSink({ port, hostname: 'sink.test', log: quiet, store: async () => {} });
  assert.match(await failure(second), /EADDRINUSE/);
});

sink.run();
