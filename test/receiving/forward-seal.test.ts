// Seals of relayed mail: valid for another verifier, the second on top of the first, and none where none is wanted.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { authenticate } from 'mailauth';
import { createSealer } from '../../src/receiving/forward-seal.ts';
import {
  AUTHENTICATED,
  openForwarding,
  TRACE,
  type Forwarding,
  type RouteOf,
} from '../support/forwarding.ts';
import type { Authentication } from '../../src/store/received-email.ts';

const test = suite('forward seal');
let f: Forwarding;
let route: RouteOf;

test.before(async () => {
  f = await openForwarding();
  route = await f.route('acme.test');
});
test.after(() => f.stop());

const MESSAGE = `${TRACE}From: ada@author.test\r\nSubject: x\r\n\r\nWörter\r\n`;
const RESULTS = 'mail.host.test; spf=pass smtp.mailfrom=author.test';

async function seal(
  message: string,
  about: {
    arc?: Authentication['arc'];
    isWanted?: boolean;
    results?: string | null;
    domainId?: string;
  } = {},
): Promise<string | null> {
  const sealer = createSealer({ domains: f.domains, isWanted: () => about.isWanted ?? true });
  const fields = await sealer({
    tenantId: f.tenantId,
    domainId: about.domainId ?? route.domainId,
    authentication: { ...AUTHENTICATED, ...(about.arc === undefined ? {} : { arc: about.arc }) },
    results: about.results === undefined ? RESULTS : about.results,
    pieces: (async function* () {
      yield Buffer.from(message).subarray(0, 50);
      yield Buffer.from(message).subarray(50);
    })(),
  });
  return fields === null ? null : fields.toString() + message;
}

async function verify(message: string): Promise<{ result: unknown; instances: number }> {
  const record = f.keys.find(({ algorithm }) => algorithm === 'rsa-sha256')!.record;
  const { arc } = await authenticate(Buffer.from(message), {
    ip: '192.0.2.1',
    helo: 'x',
    sender: '',
    mta: 'far.test',
    resolver: async (name) => {
      if (name === 'mailstead._domainkey.acme.test') return [[record]];
      throw Object.assign(new Error(name), { code: 'ENOTFOUND' });
    },
  });
  return {
    result: arc && arc.status.result,
    instances: message.match(/^ARC-Seal:/gm)?.length ?? 0,
  };
}

test('a seal is valid, says what the checks showed, and breaks with the message', async () => {
  const sealed = await seal(MESSAGE);
  assert.match(
    sealed ?? '',
    /^ARC-Seal: [^]*cv=none[^]*ARC-Authentication-Results: i=1;[^]*spf=pass/,
  );
  assert.ok(sealed?.endsWith(MESSAGE));
  assert.equal(await verify(sealed ?? ''), { result: 'pass', instances: 1 });
  assert.is((await verify((sealed ?? '').replace('Wörter', 'Worte'))).result, 'fail');
});

test('the next one stands on it', async () => {
  const first = (await seal(MESSAGE)) ?? '';
  const second = await seal(first, { arc: { result: 'pass', sealer: 'acme.test', instances: 1 } });
  assert.match(second ?? '', /^ARC-Seal: i=2;[^]*cv=pass/);
  assert.equal(await verify(second ?? ''), { result: 'pass', instances: 2 });
});

test('none where none is wanted, nothing is known, nothing may be added, or nobody has a key', async () => {
  for (const about of [
    { isWanted: false },
    { results: null },
    { arc: { result: 'fail', sealer: 'x.test', instances: 1 } },
    { arc: { result: 'pass', sealer: 'x.test', instances: 50 } },
    { domainId: '019b0c1e-8f00-7abc-9def-0123456789ab' },
  ] as const) {
    assert.is(await seal(MESSAGE, about), null, JSON.stringify(about));
  }
});

test.run();
