// What the sink bears and what it refuses: sizes, counts, clients that leave, and its own end.
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { connect } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { closeAll, closeLater, dial, failure, open, send, start } from '../support/sink-session.ts';

const sink = suite('sink: limits');

sink.after.each(closeAll);

sink('takes a message of 20 MB', async () => {
  const { port, messages } = await start();
  const line = `${randomBytes(36).toString('base64')}\r\n.and a dot\r\n`;
  const raw = Buffer.from(`Subject: large\r\n\r\n${line.repeat(330_000)}`);
  assert.ok(raw.length > 20_000_000);
  await send(port, { raw });
  // Not assert.equal, which would print both.
  assert.ok(messages[0]?.raw.equals(raw));
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
  closeLater(late);
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

sink.run();
