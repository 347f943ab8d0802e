// What comes through the other doors: DNS texts and packets, bodies, uploads, files of contacts, texts of callers, operators' files,
// backups. Seeded rounds of support/fuzz.ts: what is taken apart goes together again, and reading fails only as it says.
import { Buffer } from 'node:buffer';
import { createSocket } from 'node:dgram';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, request as httpRequest } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import dnsPacket, { type Packet } from 'dns-packet';
import type { Request } from 'express';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { describeBody } from '../../src/access/redact.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { parseDuration } from '../../src/audience/automation-duration.ts';
import { readHeader, readRows, UnusableFile } from '../../src/audience/import-file.ts';
import { BackupFailed, createBackupFile } from '../../src/backup/container.ts';
import { manifestOf, verifyFile } from '../../src/backup/manifest.ts';
import { readTlsSettings } from '../../src/certificates/settings.ts';
import { readDeliveryPolicy } from '../../src/delivery/egress.ts';
import { readProviders } from '../../src/delivery/providers.ts';
import { createSecureResolver } from '../../src/dns/dnssec.ts';
import { isHostOf, parseStsPolicy, stsIdOf } from '../../src/dns/mta-sts.ts';
import type { RecordResolver } from '../../src/dns/records.ts';
import { findSpf } from '../../src/dns/spf-record.ts';
import { parseSpfTerm } from '../../src/dns/spf-term.ts';
import { readUrl } from '../../src/dns/url-guard.ts';
import { readDoctorPolicy } from '../../src/doctor/policy.ts';
import { createJsonScanner } from '../../src/http/json-scanner.ts';
import { readShippedPreferences } from '../../src/http/preference-policy.ts';
import { readUpload } from '../../src/http/upload.ts';
import { formatMailbox } from '../../src/mail/address.ts';
import { readBounceRules } from '../../src/mail/bounce-rules.ts';
import { readReceivingPolicy } from '../../src/receiving/policy.ts';
import { readRetentionPolicy } from '../../src/retention/policy.ts';
import { parseSchedule } from '../../src/sending/schedule-grammar.ts';
import { readTlsReportRecord } from '../../src/sending/tls-report-record.ts';
import { readTelemetryPolicy } from '../../src/telemetry/policy.ts';
import { readTraceparent } from '../../src/telemetry/trace.ts';
import { readReaders } from '../../src/tracking/readers.ts';
import { clean, fuzz, grow, mutate, pieces, staysLinear, type Dice } from '../support/fuzz.ts';

const now = new Date('2026-11-21T12:00:00Z');
const DNS_PIECES = pieces(
  'v=spf1¦ ¦include:¦b.test¦a:¦mx¦ip4:¦10.0.0.0¦/8¦//64¦ip6:::1¦-all¦redirect=¦exists:',
  '%{i}¦~¦+¦?¦v=STSv1;¦ id=¦20240101¦;¦=¦\t¦ü¦v=TLSRPTv1;¦rua=¦mailto:a@b.test',
  'https://b.test/¦,¦!10m¦%40¦?subject=x¦version: STSv1\n¦mode: enforce\n',
  'mx: *.b.test\n¦max_age: 1\n¦\r\n¦: ¦mx: -.-',
);

test('records of others are read or refused in words, with few questions', async () => {
  await fuzz('records', 800, async (d, say) => {
    const text = d.oneIn(2)
      ? grow(d, DNS_PIECES)
      : mutate(d, 'v=spf1 include:b.test a:mx.a.test/24//64 ip4:10.0.0.0/8 -all', DNS_PIECES);
    const texts = [text, d.pick([text, 'v=spf1 mx -all'])].slice(0, 1 + d.below(2));
    say(texts);
    let questions = 0;
    const found = <T>(records: readonly T[]) => {
      questions += 1;
      return Promise.resolve({ kind: 'found' as const, records });
    };
    const resolver: RecordResolver = {
      txt: () => found(texts),
      mx: () => found([{ preference: 1, exchange: text }]),
      a: () => found(['10.0.0.1']),
      aaaa: () => found(['fd00::1']),
      cname: () => Promise.resolve({ kind: 'no_data' as const }),
    };
    const finding = await findSpf(resolver, { name: 'a.test', host: 'mx.a.test' });
    if (finding.kind !== 'right') clean(finding.detail);
    assert.ok(questions <= 150, `${questions} questions`);
    assert.match(stsIdOf(texts) ?? 'none', /^[a-z0-9]{1,32}$/i);
    const policy = parseStsPolicy(text);
    if (typeof policy !== 'string') {
      assert.ok(policy.mx.every((mx) => !isHostOf(policy, `x.${mx}`) || mx.startsWith('*.')));
      assert.ok(policy.maxAgeSeconds <= 31_557_600);
    }
    const reporting = readTlsReportRecord(texts);
    for (const target of reporting.ok ? reporting.targets : []) {
      if (target.kind === 'mail') clean(formatMailbox(target.to));
      clean(target.uri);
    }
  });
  await staysLinear('records', 25, {
    pieces: DNS_PIECES,
    read: (text) => [
      parseSpfTerm(text),
      stsIdOf([`v=STSv1;${text}`]),
      parseStsPolicy(text),
      readTlsReportRecord([`v=TLSRPTv1;${text}`]),
    ],
  });
});

test('a packet that is not the answer is passed over, and the answer is still heard', async () => {
  const socket = createSocket('udp4');
  let faulty: (bytes: Buffer) => Buffer = (bytes) => bytes;
  socket.on('message', (bytes, from) => {
    const query = dnsPacket.decode(bytes);
    const reply = dnsPacket.encode({
      type: 'response',
      id: query.id,
      questions: query.questions,
      flags: 0x81a0,
      answers: [
        { name: 'a.test', type: 'CNAME', ttl: 60, data: 'b.test' },
        { name: 'b.test', type: 'MX', ttl: 60, data: { preference: 1, exchange: 'mx.b.test' } },
      ],
    } as unknown as Packet);
    socket.send(faulty(reply), from.port, from.address);
    socket.send(reply, from.port, from.address);
  });
  socket.bind(0, '127.0.0.1');
  await once(socket, 'listening');
  try {
    await fuzz('packets', 150, async (d, say) => {
      let sent = '';
      faulty = (reply) => {
        sent = mutate(d, reply.toString('latin1'), [
          '\xc0\x0c',
          '\xc0\x00',
          '\xff\xff',
          '\0\0',
          '\x3f',
        ]);
        say(sent);
        return Buffer.from(sent.slice(0, 4_000), 'latin1');
      };
      const server = `127.0.0.1:${socket.address().port}`;
      const answer = await createSecureResolver({ server, timeoutMs: 20_000 }).mx('a.test');
      if (answer.kind === 'failed') clean(answer.cause);
      else for (const one of answer.cnames) assert.match(one, /^[a-z0-9._-]+$/);
    });
  } finally {
    socket.close();
  }
});

test('a JSON text is the same however it is cut, and with its long strings handed out', async () => {
  const PIECES = pieces('{¦}¦[¦]¦:¦,¦"¦\\¦\\"¦"a"¦1¦null¦{"content":¦ ');
  const scan = async (d: Dice, text: string, isHanding: boolean): Promise<[string, string[]]> => {
    const taken: string[] = [];
    const take = () => {
      let held = '';
      const write = (piece: Buffer): Promise<void> => {
        held += piece.toString('latin1');
        return Promise.resolve();
      };
      return Promise.resolve({
        write,
        end: () => Promise.resolve(`#${taken.push(held) - 1}#`),
      });
    };
    const isWanted = (path: readonly (string | null)[]) => path.at(-1) === 'content';
    const scanner = createJsonScanner(isHanding ? { isWanted, take } : null);
    const bytes = Buffer.from(text);
    for (let at = 0; at < bytes.length;) {
      const to = at + 1 + d.below(bytes.length > 1_000 ? 40_000 : 5);
      await scanner.write(bytes.subarray(at, to));
      at = to;
    }
    return [scanner.end().toString(), taken];
  };
  await fuzz('json', 600, async (d, say) => {
    const long = d.oneIn(10) ? `{"content":"${'x\\"'.repeat(30_000)}","b":1}` : '';
    const text =
      long ||
      (d.oneIn(2) ? grow(d, PIECES, 40) : mutate(d, '{"content":["a",{"b":"c\\n"}]}', PIECES));
    say(text);
    assert.is((await scan(d, text, false))[0], Buffer.from(text).toString());
    const [kept, taken] = await scan(d, text, true);
    const whole = kept.replace(/#(\d+)#/g, (sign, at) =>
      taken[Number(at)] === undefined ? sign : Buffer.from(taken[Number(at)]!, 'latin1').toString(),
    );
    // Who checks the fields and who stores the long strings must see one text.
    assert.is(isJson(kept), isJson(text));
    if (isJson(text)) assert.is(whole, Buffer.from(text).toString());
    if (long !== '') assert.is(taken.length, 1);
    const shown = describeBody(text);
    if (shown !== null) assert.type(JSON.parse(shown), 'string');
  });
  await staysLinear('json', 20, {
    pieces: PIECES,
    read: (text) => scan(diceBelow, text, true).catch(onlyRefusal),
  });
});

const isJson = (text: string): boolean => {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
};
const diceBelow = { below: (end: number) => end - 1 } as Dice;
const onlyRefusal = (error: unknown): void => assert.instance(error, Refusal);

test('an upload is a form or is refused, and leaves nothing behind', async () => {
  let [stored, left] = [0, 0];
  const target = {
    async receive(bytes: AsyncIterable<Uint8Array>) {
      for await (const piece of bytes) stored += piece.length;
      left += 1;
      return 'file';
    },
    discard: () => Promise.resolve(void (left -= 1)),
  };
  const server = createServer((request, response) => {
    readUpload(request as Request, 't', { target })
      .then(
        ({ file }) => {
          if (file !== null) left -= 1;
          response.end('read');
        },
        (error: unknown) => {
          response.statusCode = error instanceof Refusal ? 400 : 500;
          response.end(String(error));
        },
      )
      .catch(() => response.destroy());
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const form =
    '--b\r\nContent-Disposition: form-data; name="segment"\r\n\r\nx\r\n--b\r\nContent-Disposition: form-data; ' +
    'name="file"; filename="a.csv"\r\nContent-Type: text/csv\r\n\r\nemail\na@b.test\n\r\n--b--\r\n';
  const PIECES = pieces('--b¦--b--¦\r\n¦\r\n\r\n¦name="file"¦filename*=¦utf-8\'\'%¦;¦Content-');
  try {
    await fuzz('uploads', 120, async (d, say) => {
      const body = d.oneIn(4) ? grow(d, PIECES, 60) : mutate(d, form, PIECES);
      const type = d.oneIn(4)
        ? mutate(d, 'multipart/form-data; boundary=b').replace(/[^ -~]/g, '')
        : 'multipart/form-data; boundary=b';
      say([type, body]);
      const { port } = server.address() as AddressInfo;
      const asking = httpRequest({ port, method: 'POST', headers: { 'content-type': type } });
      asking.end(Buffer.from(body, 'latin1'));
      const [response] = (await once(asking, 'response')) as [
        AsyncIterable<Buffer> & { statusCode: number },
      ];
      let said = '';
      for await (const piece of response) said += String(piece);
      assert.ok(response.statusCode < 500, said);
      assert.is(left, 0);
    });
    assert.ok(stored > 0, 'no file arrived at all');
  } finally {
    server.close();
    server.closeAllConnections();
  }
});

test('a file of contacts is read to its end or refused in words', async () => {
  const PIECES = pieces('email¦,¦;¦\t¦"¦""¦\r\n¦\n¦\r¦a@b.test¦\0¦\xff¦PK\x03\x04¦\xef\xbb\xbf');
  const read = async (bytes: Buffer): Promise<number> => {
    const { delimiter, endBytes } = readHeader(bytes.subarray(0, 64 * 1024));
    assert.ok(endBytes <= bytes.length);
    let last = 0;
    for await (const row of readRows(Readable.from([bytes.subarray(endBytes)]), delimiter)) {
      assert.ok(row.endBytes > last || row.cells.length > 0);
      last = row.endBytes;
    }
    assert.ok(endBytes + last <= bytes.length);
    return last;
  };
  const onlyUnusable = (error: unknown): void => {
    assert.instance(error, UnusableFile);
    assert.not.match((error as Error).message, /[\0\r\n]/);
  };
  await fuzz('contacts', 250, async (d, say) => {
    const text = d.oneIn(2)
      ? grow(d, PIECES, 60)
      : mutate(d, 'email,name\r\na@b.test,"A, B"\r\n', PIECES);
    say(text);
    await read(Buffer.from(text, 'latin1')).catch(onlyUnusable);
  });
  await staysLinear('contacts', 10, {
    pieces: PIECES,
    read: (text) => read(Buffer.from(`email,b\n${text}`, 'latin1')).catch(onlyUnusable),
  });
});

test('texts of callers: times, durations, URLs, trace headers', async () => {
  const PIECES = [
    ...pieces(
      'in ¦1¦30 min¦tomorrow at ¦9am¦2026-01-01T00:00:00Z¦and¦, ¦monday¦http://¦127.0.0.1',
      '[::1]¦0x7f.1¦@¦localhost¦b.test¦:80¦/¦%¦00-¦-01¦ⓛocalhost¦2130706433¦１２７.0.0.1',
      '::ffff:7f00:1¦\\¦.¦#¦?',
    ),
    'f'.repeat(32),
  ];
  await fuzz('texts', 2_000, (d, say) => {
    const text = d.oneIn(2) ? grow(d, PIECES, 8) : mutate(d, 'http://b.test:8080/a?b#c', PIECES);
    say(text);
    const schedule = parseSchedule(text);
    if (!schedule.ok) assert.type(schedule.problem, 'string');
    parseDuration(text);
    const place = readTraceparent(text);
    if (place !== null) assert.match(place.traceId + place.spanId, /^[0-9a-f]{48}$/);
    const url = readUrl(text);
    if (!url.ok) return clean(url.problem);
    const { host, url: parsed } = url.target;
    assert.not.match(host, /(^|\.)localhost\.?$/);
    assert.is(parsed.username + parsed.password, '');
    // What a browser and what a reader see is the same host.
    assert.ok(text.toLowerCase().normalize('NFC').includes(parsed.hostname) || /xn--/.test(host));
  });
  await staysLinear('texts', 15, {
    pieces: PIECES,
    read: (text) => [
      parseSchedule(text),
      parseDuration(text),
      readTraceparent(text),
      readUrl(text),
    ],
  });
});

const configOf = (name: string): unknown =>
  JSON.parse(readFileSync(new URL(`../../config/${name}.json`, import.meta.url), 'utf8'));
const OPERATORS: readonly (readonly [string, (file: unknown) => unknown])[] = [
  ['bounces', readBounceRules],
  ['delivery', readDeliveryPolicy],
  ['doctor', readDoctorPolicy],
  ['preferences', readShippedPreferences],
  ['providers', readProviders],
  ['receiving', readReceivingPolicy],
  ['retention', (file) => readRetentionPolicy(file, { messageLifetimeMs: 86_400_000 })],
  ['telemetry', readTelemetryPolicy],
  ['tls', readTlsSettings],
  ['tracking', readReaders],
];

/** The value with one place in it changed. */
function wrong(d: Dice, value: unknown): unknown {
  const odd = [
    null,
    0,
    -1,
    1e9,
    '',
    'x',
    [],
    {},
    true,
    ['x'],
    { x: 1 },
    '10.0.0.0/33',
    '__proto__',
    [[]],
  ];
  if (typeof value !== 'object' || value === null || d.oneIn(6)) return d.pick(odd);
  const keys = Object.keys(value);
  if (keys.length === 0) return d.pick(odd);
  const name = d.pick(keys);
  const copy = Array.isArray(value) ? ([...value] as unknown[]) : { ...value };
  const place = copy as Record<string, unknown>;
  if (d.oneIn(12) && !Array.isArray(value))
    place[d.pick(['extra', 'constructor', 'toString'])] = d.pick(odd);
  else if (d.oneIn(8)) delete place[name];
  else place[name] = wrong(d, place[name]);
  return copy;
}

test("an operator's file is taken or refused by the name of what is wrong", async () => {
  const right = OPERATORS.map(([name, read]) => ({ name, read, file: configOf(name) }));
  await fuzz('operator files', 1_500, (d, say) => {
    const { name, read, file } = d.pick(right);
    const given = wrong(d, file);
    say([name, given]);
    try {
      read(given);
    } catch (error) {
      // A TypeError would be our own mistake.
      assert.is((error as Error).constructor, Error, (error as Error).stack);
      assert.ok((error as Error).message.length > 5);
    }
  });
});

test('a backup is whole or damaged, and says so', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'mailstead-fuzz-'));
  try {
    const path = join(folder, 'whole.mailstead');
    const writer = await createBackupFile(path);
    const about = { takenAt: now.toISOString(), schema: ['0001'], tables: [], secretCheck: 'x' };
    const manifest = manifestOf({ kind: 'appliance', tenant: null, ...about });
    await writer.add({ name: 'manifest.json', bytes: Buffer.from(JSON.stringify(manifest)) });
    await writer.add({ name: 'files/secret', bytes: Buffer.alloc(3_000, 7) });
    await writer.finish({ tables: {}, blobs: { count: 0, bytes: 0 } });
    const whole = readFileSync(path);
    assert.is((await verifyFile(path, 'appliance')).files.size, 1);
    const file = join(folder, 'faulty.mailstead');
    await fuzz('backups', 120, async (d, say) => {
      const faulty = Buffer.from(mutate(d, whole.toString('latin1')).slice(0, 100_000), 'latin1');
      if (faulty.equals(whole)) return;
      say(faulty.toString('base64'));
      writeFileSync(file, faulty);
      const failure: unknown = await verifyFile(file, 'appliance').then(
        () => null,
        (error: unknown) => error,
      );
      assert.instance(failure, BackupFailed, String((failure as Error | null)?.stack));
      assert.not.match((failure as Error).message, /[\0\r\n]/);
    });
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test.run();
