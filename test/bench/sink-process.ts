// The sink where Postfix's smtp-sink is not installed: takes every message and throws it away, or keeps it in a
// folder; prints the counter that sink.ts reads. Run as `node sink-process.ts <port> <folder> <addresses> <replyMs>`: so many
// more loopback addresses it listens at (addresses.ts), and so long each of its replies takes.
import { writeFileSync } from 'node:fs';
import { createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { addressAt } from './addresses.ts';

const BUFFER_CHARS_MAX = 64 * 1024 * 1024;
const GREETING = '220 sink ESMTP\r\n';
const EHLO = '250-sink\r\n250-PIPELINING\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250 SIZE\r\n';
const END = '\r\n.\r\n';

const [, , port = '0', folder = '', addresses = '0', replyMs = '0'] = process.argv;
let messages = 0;

for (let index = 0; index < Number(addresses); index += 1) listen(addressAt(index));
// Last: whoever waits for this one finds all of them.
listen('127.0.0.1');
process.on('SIGTERM', () => process.exit(0));

function listen(host: string): void {
  createServer(serve).listen({ port: Number(port), host, backlog: 1024 });
}

function serve(socket: Socket): void {
  let text = '';
  let inData = false;
  socket.setNoDelay(true);
  socket.setEncoding('latin1');
  socket.on('error', () => socket.destroy());
  say(socket, GREETING);
  socket.on('data', (chunk: string) => {
    text += chunk;
    if (text.length > BUFFER_CHARS_MAX) socket.destroy();
    let replies = '';
    for (;;) {
      const end = text.indexOf(inData ? END : '\r\n');
      if (end < 0) break;
      const unit = text.slice(0, end);
      text = text.slice(end + (inData ? END : '\r\n').length);
      if (inData) take(unit);
      const verb = inData ? '.' : unit.slice(0, 4).toUpperCase();
      inData = verb === 'DATA';
      replies +=
        verb === 'EHLO' ? EHLO : verb === 'DATA' ? '354 go on\r\n' : `${code(verb)} ok\r\n`;
      if (verb === 'QUIT') {
        say(socket, replies);
        if (replyMs === '0') socket.end();
        else setTimeout(() => socket.end(), Number(replyMs));
        replies = '';
      }
    }
    // What is thrown away need not be kept until its end.
    if (inData && folder === '') text = text.slice(-END.length);
    if (replies !== '') say(socket, replies);
  });
}

/** In order: all of them take the same time. */
function say(socket: Socket, replies: string): void {
  const write = (): void => {
    if (socket.writable) socket.write(replies);
  };
  if (replyMs === '0') write();
  else setTimeout(write, Number(replyMs));
}

const code = (verb: string): number => (verb === 'QUIT' ? 221 : 250);

function take(message: string): void {
  messages += 1;
  if (folder !== '') {
    writeFileSync(join(folder, `message.${messages}`), message.replaceAll('\r\n', '\n'), 'latin1');
  }
  process.stdout.write(`mesg=${messages}\r`);
}
