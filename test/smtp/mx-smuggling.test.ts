// SMTP smuggling: whatever another server may take for the end of a message does not end it here, so one message stays one
// message, and what stands behind it is never run as a command. Each variant is sent whole, and byte by byte.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { endMxSessions, enterMx, startTestMx, type TestMx } from '../support/mx-session.ts';

const test = suite('mx: smuggling');
test.after.each(endMxSessions);

/** None of them is CRLF, dot, CRLF. */
const ENDS = [
  '\n.\n',
  '\n.\r\n',
  '\r\n.\n',
  '\n.\r',
  '\r.\n',
  '\r.\r',
  '\r.\r\n',
  '\r\n.\r',
  '\r\n.\rx\n',
  '\r\n\n.\n',
  '\r\n\0.\r\n',
  '\r\n.\0\r\n',
  '\r\0\n.\r\n',
  '\r\n.\r\0\n',
  '\0\n.\n',
  '\n\n.\n\n',
  '\r\r\n.\n',
  '\n\r.\r\n',
  '\r\n..\r\n',
  '\n..\n',
  '\n..\r\n',
  '\r\n.. \r\n',
  '\r\n. \r\n',
  '\r\n .\r\n',
  '\r\n.\t\r\n',
  '\r\n.\r\r\n',
  '\x0b.\x0b',
  '\x0c.\x0c',
  '\u0085.\u0085',
  '\u2028.\u2028',
  '\r\n.\u2028',
  '\r\n。\r\n',
] as const;
const SMUGGLED =
  'MAIL FROM:<evil@else.test>\r\nRCPT TO:<victim@here.test>\r\nDATA\r\nSubject: smuggled\r\n\r\nx';

interface Told {
  readonly reply: string;
  /** To the NOOP behind the message. */
  readonly next: string;
}

async function smuggle(mx: TestMx, end: string, isDripped: boolean): Promise<Told> {
  const client = await enterMx(mx.port);
  for (const line of ['MAIL FROM:<b@else.test>', 'RCPT TO:<a@here.test>', 'DATA']) {
    assert.match(await client.say(line), /^[23]/);
  }
  const bytes = Buffer.from(`Subject: outer\r\n\r\nhello${end}${SMUGGLED}\r\n.\r\n`);
  client.socket.setNoDelay(true);
  if (isDripped) {
    const cut = bytes.indexOf('hello') + 'hello'.length;
    client.socket.write(bytes.subarray(0, cut));
    for (let at = cut; at < cut + Buffer.byteLength(end) + 6; at += 1) {
      client.socket.write(bytes.subarray(at, at + 1));
      await new Promise((resolve) => setImmediate(resolve));
    }
    client.socket.write(bytes.subarray(cut + Buffer.byteLength(end) + 6));
  } else client.socket.write(bytes);
  const reply = await client.reply();
  // Were anything behind the message run as a command, this would hear its replies.
  const next = await client.say('NOOP');
  client.socket.destroy();
  return { reply, next };
}

const isBare = (end: string): boolean => /\r(?!\n)|(?<!\r)\n/.test(end);

for (const mode of ['reject', 'normalize'] as const) {
  for (const isDripped of [false, true]) {
    test(`${mode}, ${isDripped ? 'byte by byte' : 'whole'}: one message stays one message`, async () => {
      const mx = await startTestMx({ bare_newlines: mode });
      for (const end of ENDS) {
        const name = JSON.stringify(end);
        const before = mx.got.length;
        const { reply, next } = await smuggle(mx, end, isDripped);
        const stored = mx.got.slice(before);
        assert.match(next, /^250 2\.0\.0 OK$/, `${name}: ${reply} and then ${next}`);
        if (end.includes('\0')) assert.match(reply, /^550 5\.6\.0 /, name);
        else if (isBare(end) && mode === 'reject') assert.match(reply, /^550 5\.5\.2 /, name);
        else {
          assert.match(reply, /^250 /, name);
          assert.is(stored.length, 1, name);
          const raw = stored[0]!.raw.toString();
          assert.ok(raw.includes('RCPT TO:<victim@here.test>'), `${name}: it was cut`);
          assert.not.match(raw, /\r(?!\n)|(?<!\r)\n/, `${name}: a bare end of line was stored`);
          assert.equal(
            stored[0]!.receivers.map(({ recipient }) => recipient),
            ['a@here.test'],
          );
          continue;
        }
        assert.is(stored.length, 0, name);
      }
    });
  }
}

test('a real end is one, wherever the bytes are cut; what is pipelined behind it is the next message', async () => {
  const mx = await startTestMx();
  const one = (subject: string): string =>
    `MAIL FROM:<b@else.test>\r\nRCPT TO:<a@here.test>\r\nDATA\r\nSubject: ${subject}\r\n\r\nhello\r\n.\r\n`;
  const bytes = Buffer.from(one('first') + one('second'));
  for (let cut = 1; cut < bytes.length; cut += 7) {
    const client = await enterMx(mx.port);
    client.socket.setNoDelay(true);
    client.socket.write(bytes.subarray(0, cut));
    await new Promise((resolve) => setImmediate(resolve));
    client.socket.write(bytes.subarray(cut));
    for (const code of ['250', '250', '354', '250', '250', '250', '354', '250']) {
      assert.is((await client.reply()).slice(0, 3), code);
    }
    client.socket.destroy();
    const subjects = mx.got
      .splice(0)
      .map(({ raw }) => /^Subject: (.*)\r$/m.exec(raw.toString())?.[1]);
    assert.equal(subjects, ['first', 'second']);
  }
});

test('dots that were doubled are single again, at the start of a line only', async () => {
  const mx = await startTestMx();
  const client = await enterMx(mx.port);
  const body = '..\r\n...\r\na..b\r\n..c';
  assert.match(await client.send(`Subject: x\r\n\r\n${body}`), /^250 /);
  assert.ok(mx.got[0]?.raw.toString().endsWith('\r\n\r\n.\r\n..\r\na..b\r\n.c\r\n'));
});

test.run();
