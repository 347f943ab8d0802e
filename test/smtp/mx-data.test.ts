// What the inbound listener does with a message: what it refuses for its bytes, when it says 250, and what becomes of a
// message that does not come to its end.
import { readdir } from 'node:fs/promises';
import { existsSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Arrival } from '../../src/receiving/arrival.ts';
import { until } from '../support/app.ts';
import {
  endMxSessions,
  enterMx,
  MESSAGE,
  receiverOf,
  startTestMx,
  type MxClient,
  type TestMx,
} from '../support/mx-session.ts';

const test = suite('mx: messages');
test.after.each(endMxSessions);

const spooled = async ({ spoolFolder }: TestMx): Promise<number> =>
  existsSync(spoolFolder) ? (await readdir(spoolFolder)).length : 0;

async function dataOf(mx: TestMx): Promise<MxClient> {
  const client = await enterMx(mx.port);
  for (const line of ['MAIL FROM:<b@else.test>', 'RCPT TO:<a@here.test>', 'DATA']) {
    assert.match(await client.say(line), /^[23]/);
  }
  return client;
}

test('the limits of a message, each with its code', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  const header = (bytes: number): string =>
    `X-A: ${'x'.repeat(990)}\r\n`.repeat(Math.ceil(bytes / 997));
  const received = (count: number): string => 'Received: from a.test by b.test\r\n'.repeat(count);
  const cases: readonly (readonly [name: string, message: string, reply: RegExp])[] = [
    ['NUL', 'Subject: x\r\n\r\na\0b', /^550 5\.6\.0 /],
    ['bare LF', 'Subject: x\r\n\r\na\nb', /^550 5\.5\.2 /],
    ['bare CR', 'Subject: x\r\n\r\na\rb', /^550 5\.5\.2 /],
    ['bare LF in the header', 'Subject: x\nTo: y\r\n\r\nb', /^550 5\.5\.2 /],
    ['line', `Subject: x\r\n\r\n${'x'.repeat(8_193)}`, /^554 5\.6\.0 .*8192/],
    ['line of the header', `Subject: ${'x'.repeat(8_192)}\r\n\r\nx`, /^554 5\.6\.0 /],
    ['header', `${header(262_145)}\r\nx`, /^552 5\.3\.4 .*header/],
    ['header without body', header(262_145), /^552 5\.3\.4 /],
    ['hops', `${received(101)}Subject: x\r\n\r\nx`, /^554 5\.4\.6 /],
    ['hops, spelt oddly', `${received(101).replaceAll(':', ' \t:')}Subject: x\r\n\r\nx`, /^554 /],
    ['longest line', `Subject: x\r\n\r\n${'x'.repeat(8_192)}`, /^250 /],
    ['largest header', `${header(261_000)}\r\nx`, /^250 /],
    ['most hops', `${received(100)}Subject: x\r\n\r\n${received(101)}`, /^250 /],
    ['8 bits', 'Subject: x\r\n\r\n\u00e4\u{1f600}', /^250 /],
    ['no header', '\r\nx', /^250 /],
    ['nothing but a line', 'x', /^250 /],
  ];
  for (const [name, message, reply] of cases) assert.match(await client.send(message), reply, name);
  assert.match(await client.send(Buffer.from('.\r\n')), /^250 /, 'nothing at all');
});

test('the operator has other limits', async () => {
  const mx = await startTestMx({ line_bytes_max: 998, received_max: 30 });
  const client = await enterMx(mx.port);
  assert.match(await client.send(`Subject: x\r\n\r\n${'x'.repeat(999)}`), /^554 5\.6\.0 .*998/);
  assert.match(await client.send(`${'Received: x\r\n'.repeat(31)}\r\nx`), /^554 5\.4\.6 /);
});

test('bare ends of lines are mended where the operator says so, and limits count what came of it', async () => {
  const mx = await startTestMx({ bare_newlines: 'normalize' });
  const client = await enterMx(mx.port);
  assert.match(await client.send('Subject: x\n\na\rb\r\nc\n\rd'), /^250 /);
  const [arrival] = mx.got;
  const { raw, traceSizeBytes } = arrival!;
  assert.is(raw.subarray(traceSizeBytes).toString(), 'Subject: x\r\n\r\na\r\nb\r\nc\r\n\r\nd\r\n');
  assert.match(await client.send(`${'Received: x\n'.repeat(101)}\nx`), /^554 5\.4\.6 /);
  const long = `Subject: x\n\n${`${'x'.repeat(8_000)}\r`.repeat(3)}`;
  assert.match(await client.send(long), /^250 /);
});

test('what is no header does not become a part of ours', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  const whole = 'Received: from a.test by b.test\r\nFrom: a@b.test\r\n\r\nx';
  const cases = [
    [' for <forged@here.test>; yesterday\r\nSubject: x\r\n\r\nx', true],
    ['\tfrom trusted.test\r\n\r\nx', true],
    [' \r\nFrom: a@b.test\r\n\r\nx', true],
    ['hello, world\r\nFrom: a@b.test', true],
    ['\u00a0From: a@b.test\r\n\r\nx', true],
    [': a@b.test\r\n\r\nx', true],
    [whole, false],
    ['Subject\r\n : folded\r\n\r\nx', false],
    ['From a@b.test Sat Nov 21 20:00:00 2026\r\nFrom: a@b.test\r\n\r\nx', false],
    ['\r\nx', false],
  ] as const;
  for (const [message, isText] of cases) {
    assert.match(await client.send(message), /^250 /, message);
    const { raw, traceSizeBytes } = mx.got.at(-1)!;
    const stored = `${isText ? '\r\n' : ''}${message}\r\n`;
    assert.is(raw.toString('utf8', traceSizeBytes), stored);
    assert.match(raw.toString('latin1', 0, traceSizeBytes), /\+0000\r\n$/);
  }
});

test('a From field that only some readers take for one is refused', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  const odd = ['From\u00a0', 'From\v', '\fFrom', 'Fr om', '\ufeffFrom', 'From\r\n\v', 'F\x7from'];
  for (const name of odd) {
    const message = `Subject: x\r\n${name}: a@b.test\r\n\r\nx`;
    assert.match(await client.send(message), /^550 5\.6\.0 .*From/, JSON.stringify(name));
  }
  for (const name of [
    'From',
    'FROM',
    'From \t',
    'From\r\n ',
    '>From',
    'X-From',
    'From-X',
    'Fromm',
  ]) {
    const message = `Subject: x\r\n${name}: a@b.test\r\n\r\nFrom\v: y`;
    assert.match(await client.send(message), /^250 /, JSON.stringify(name));
  }
});

test('a recipient that was asked to come again does not get the message', async () => {
  let answer = (): void => undefined;
  const mx = await startTestMx(
    {},
    {
      resolve: async (recipient) => {
        if (recipient.startsWith('late')) await new Promise<void>((resolve) => (answer = resolve));
        return { kind: 'taken', receiver: receiverOf(recipient) };
      },
      limits: { answerMaxMs: 50 },
    },
  );
  const client = await enterMx(mx.port);
  await client.say('MAIL FROM:<b@else.test>');
  assert.match(await client.say('RCPT TO:<late@here.test>'), /^451 /);
  assert.match(await client.say('RCPT TO:<A@here.test>'), /^250 /);
  answer();
  await client.say('DATA');
  assert.match(await client.say(`${MESSAGE}\r\n.`), /^250 /);
  assert.equal(
    mx.got[0]?.receivers.map(({ recipient }) => recipient),
    ['A@here.test'],
  );
});

test('bytes are stored as they came', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  const body = Buffer.concat([
    Buffer.from('Subject: x\r\n\r\n'),
    Buffer.from(Array.from({ length: 255 }, (_, at) => at + 1)).filter((o) => o !== 13 && o !== 10),
    Buffer.from('\r\n'),
    Buffer.from(`${'0123456789'.repeat(7)}\r\n`.repeat(3_000)), // more than is kept in memory
  ]);
  assert.match(await client.send(Buffer.concat([body, Buffer.from('.\r\n')])), /^250 /);
  const { raw, traceSizeBytes } = mx.got[0]!;
  assert.ok(raw.subarray(traceSizeBytes).equals(body));
  await until(
    () => spooled(mx),
    (count) => count === 0,
  );
});

test('the 250 comes after the commit, with the ids', async () => {
  const { promise: committed, resolve: commit } = Promise.withResolvers<readonly string[]>();
  const stored: Arrival[] = [];
  const mx = await startTestMx(
    {},
    {
      receive(arrival) {
        stored.push(arrival);
        return committed;
      },
    },
  );
  const client = await enterMx(mx.port);
  const answered = client.send();
  await until(
    () => Promise.resolve(stored.length),
    (count) => count === 1,
  );
  let said = '';
  void answered.then((reply) => (said = reply));
  await new Promise((resolve) => setTimeout(resolve, 50));
  assert.is(said, '');
  commit(['one', 'two']);
  assert.is(await answered, '250 2.0.0 Ok: stored as one two');
});

test('a failure of ours is a 4xx with the right code', async () => {
  let error: unknown = null;
  const mx = await startTestMx({}, { receive: () => Promise.reject(error) });
  const client = await enterMx(mx.port);
  const cases = [
    [new Error('away'), /^451 4\.3\.0 /],
    [Object.assign(new Error('full'), { code: 'ENOSPC' }), /^452 4\.3\.1 /],
    [Object.assign(new Error('full'), { code: '53100' }), /^452 4\.3\.1 /],
  ] as const;
  for (const [fault, reply] of cases) {
    error = fault;
    assert.match(await client.send(), reply);
  }
  assert.not.match(await client.send(), /full|away/);
});

test('work that takes too long is a 451, and the next message goes through', async () => {
  let isStuck = true;
  const mx = await startTestMx(
    {},
    {
      receive: () => (isStuck ? new Promise(() => undefined) : Promise.resolve(['id'])),
      limits: { answerMaxMs: 100 },
    },
  );
  const client = await enterMx(mx.port);
  assert.match(await client.send(), /^451 4\.3\.0 /);
  isStuck = false;
  assert.match(await client.send(), /^250 /);
});

test('no room for what arrives: 452, and room again when it is gone', async () => {
  const mx = await startTestMx({}, { limits: { spoolBytesMax: 300_000 } });
  const first = await dataOf(mx);
  first.socket.write(`Subject: x\r\n\r\n${`${'x'.repeat(70)}\r\n`.repeat(3_000)}`);
  await until(
    () => spooled(mx),
    (count) => count === 1,
  );
  const second = await enterMx(mx.port);
  const large = `Subject: x\r\n\r\n${`${'x'.repeat(70)}\r\n`.repeat(3_000)}`;
  // What the first one sent is counted as it arrives.
  await until(
    () => second.send(large),
    (reply) => reply.startsWith('452 4.3.1 '),
  );
  assert.match(await second.send(MESSAGE), /^250 /);
  first.socket.destroy();
  await until(
    () => second.send(large),
    (reply) => reply.startsWith('250'),
  );
});

test('above the size: 552 after the dot, nothing is kept; far above it at once', async () => {
  const mx = await startTestMx({}, { limits: { messageBytesMax: 1_000_000 } });
  const client = await dataOf(mx);
  const line = `${'x'.repeat(998)}\r\n`.repeat(100);
  for (let sent = 0; sent < 11; sent += 1) client.socket.write(line);
  assert.match(await client.say('.'), /^552 5\.3\.4 /);
  assert.match(await client.send(), /^250 /);
  assert.is(mx.got.length, 1);
  await until(
    () => spooled(mx),
    (count) => count === 0,
  );

  const endless = await dataOf(mx);
  for (let sent = 0; sent < 60; sent += 1) endless.socket.write(line);
  assert.match(await endless.reply(), /^552 5\.3\.4 .*far larger/);
  assert.is(await endless.reply(), '');
  assert.is(mx.got.length, 1);
  await until(
    () => spooled(mx),
    (count) => count === 0,
  );
});

test('a client that leaves in the middle leaves nothing', async () => {
  const mx = await startTestMx();
  for (const size of [0, 10, 100_000]) {
    const client = await dataOf(mx);
    client.socket.write(`Subject: x\r\n\r\n${'x'.repeat(size)}`);
    if (size > 64 * 1024)
      await until(
        () => spooled(mx),
        (count) => count === 1,
      );
    if (size === 10) client.socket.end();
    else client.socket.resetAndDestroy();
  }
  await until(
    () => spooled(mx),
    (count) => count === 0,
  );
  const next = await enterMx(mx.port);
  assert.match(await next.send(), /^250 /);
  assert.is(mx.got.length, 1);
});

test('what the checks showed stands between Return-Path and Received; a refusal is the reply', async () => {
  const authentication: NonNullable<Arrival['authentication']> = {
    spf: { result: 'pass', domain: 'else.test', reason: null },
    dkim: [],
    dmarc: {
      result: 'none',
      domain: null,
      policy: null,
      aligned: { spf: false, dkim: false },
      reason: null,
    },
    arc: { result: 'none', sealer: null, instances: 0 },
    verdict: 'accepted',
  };
  let refused: { code: number; text: string } | null = null;
  const mx = await startTestMx(
    {},
    {
      verify: ({ raw, client, mailFrom, receivers }) => {
        assert.is(client.helo, 'client.test');
        assert.is(mailFrom, 'b@else.test');
        assert.is(receivers.length, 1);
        const field = 'Authentication-Results: mail.example.com; spf=pass\r\n';
        return Promise.resolve({ authentication, field, raw: raw.subarray(19), refused });
      },
    },
  );
  const client = await enterMx(mx.port);
  assert.match(await client.send(), /^250 /);
  const [arrival] = mx.got;
  assert.equal(arrival?.authentication, authentication);
  assert.match(
    arrival?.raw.toString() ?? '',
    /^Return-Path: <b@else\.test>\r\nAuthentication-Results: .*\r\nReceived: from [^]*\+0000\r\nTo: a@here/,
  );
  refused = { code: 550, text: '5.7.26 The policy of else.test rejects this message' };
  assert.is(await client.send(), '550 5.7.26 The policy of else.test rejects this message');
  assert.is(mx.got.length, 1);
});

test('strangers are asked to come again, at the dot; whoever proves something is not', async () => {
  const asked: unknown[] = [];
  let isKnown = false;
  const options = {
    isKnown: (question: unknown) => {
      asked.push(question);
      return Promise.resolve(isKnown);
    },
    now: () => new Date(0),
  };
  const off = await startTestMx({}, options);
  assert.match(await (await enterMx(off.port)).send(), /^250 /);
  assert.equal(asked, []);
  const mx = await startTestMx({ greylisting: { enabled: true } }, options);
  const client = await enterMx(mx.port);
  assert.match(await client.send(), /^451 4\.7\.1 /);
  assert.equal(asked, [
    {
      address: '127.0.0.1',
      mailFrom: 'b@else.test',
      recipients: ['a@here.test'],
      now: new Date(0),
    },
  ]);
  assert.is(mx.got.length, 0);
  isKnown = true;
  assert.match(await client.send(), /^250 /);
});

test('a report to a return path is read and not stored; one for later is a 451', async () => {
  let isNow = false;
  const read: string[] = [];
  const mx = await startTestMx(
    {},
    {
      readReturnPath: (address) =>
        address.startsWith('b+') ? { tenantId: 't', emailId: 'e', position: 0 } : null,
      takeReport: ({ raw, subjects }) => {
        read.push(`${subjects.length} ${raw.toString().slice(0, 16)}`);
        return Promise.resolve(isNow);
      },
    },
  );
  const client = await enterMx(mx.port);
  assert.match(await client.send(MESSAGE, 'b+x@send.here.test', ''), /^451 4\.2\.1 /);
  isNow = true;
  assert.is(await client.send(MESSAGE, 'b+x@send.here.test', ''), '250 2.0.0 Ok: read');
  assert.equal(read, ['1 Return-Path: <>\r', '1 Return-Path: <>\r']);
  assert.is(mx.got.length, 0);
});

test('what comes back of forwarded mail goes on to its author', async () => {
  const taken: unknown[] = [];
  const mx = await startTestMx(
    {},
    {
      readForwardReturn: (address) =>
        Promise.resolve(
          address.startsWith('srs0=') ? { kind: 'open', sender: 'author@else.test' } : null,
        ),
      takeForwardReturn: ({ address, sender, raw, traceSizeBytes }) => {
        taken.push([address, sender, raw.subarray(traceSizeBytes).toString().slice(0, 5)]);
        return Promise.resolve(
          taken.length === 1
            ? { kind: 'taken' }
            : { kind: 'refused', code: 554, text: '5.4.6 It goes round in a circle' },
        );
      },
    },
  );
  const client = await enterMx(mx.port);
  assert.is(await client.send(MESSAGE, 'srs0=x@here.test', ''), '250 2.0.0 Ok: read');
  assert.match(await client.send(MESSAGE, 'srs0=x@here.test', ''), /^554 5\.4\.6 /);
  assert.match(await client.send(MESSAGE, 'srs0=x@here.test', 'b@else.test'), /^550 5\.7\.1 /);
  const of = ['srs0=x@here.test', 'author@else.test', 'From:'];
  assert.equal(taken, [of, of]);
  assert.is(mx.got.length, 0);
});

test('while it stops, a message that is under way is taken, and nobody begins another', async () => {
  const mx = await startTestMx(
    {},
    { resolve: (address) => Promise.resolve({ kind: 'taken', receiver: receiverOf(address) }) },
  );
  const client = await dataOf(mx);
  const idle = await enterMx(mx.port);
  const stopped = mx.stop();
  assert.match(await idle.reply(), /^421 4\.3\.2 /);
  assert.match(await client.say('Subject: x\r\n\r\nx\r\n.'), /^250 /);
  assert.match(await client.reply(), /^421 4\.3\.2 /);
  await stopped;
  assert.is(mx.got.length, 1);
});

test.run();
