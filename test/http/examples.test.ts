// docs/examples.json, the examples of the API reference: every operation of docs/openapi.json has one, recorded from this
// tour through a real appliance, with the official SDK wherever it has the call; requests are these, answers have this form.
//
// With `--record` (npm run generate -- examples) the file is written anew instead.
import { execFile, spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { promisify } from 'node:util';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  curlOf,
  EXAMPLES_PATH,
  mergeExamples,
  OPENAPI_PATH,
  printDocument,
  readExamples,
  type OpenApiDocument,
  type RecordedExamples,
} from '../../src/openapi-examples.ts';
import { startApp, until, type App } from '../support/app.ts';
import { createRecorder } from '../support/recorder.ts';
import { tourAudience } from '../support/reference-audience.ts';
import { tourMail } from '../support/reference-mail.ts';
import { startReceiver } from '../support/webhooks.ts';

const AGAIN = 'npm run generate -- examples';
const DOCUMENT_BYTES_MAX = 2_000_000;

const isRecording = process.argv.includes('--record');
const test = suite('examples');
const text = readFileSync(OPENAPI_PATH, 'utf8');
const document = JSON.parse(text) as OpenApiDocument;
/** What they answer is of the machine that is asked; their example is written in their controller. */
const OF_THE_MACHINE: readonly string[] = ['getDoctor', 'runDoctor'];
const all = Object.values(document.paths).flatMap((methods) => Object.values(methods));
const operations = all.filter(({ operationId }) => !OF_THE_MACHINE.includes(operationId));
const committed: RecordedExamples = isRecording ? {} : readExamples();
let app: App;
let recorded: RecordedExamples;

test.before(async () => {
  app = await startApp({ MAILSTEAD_RATE_LIMIT: '500/1s' });
});
test.after(() => app.stop());

test('the tour goes through', async () => {
  const endpoint = await startReceiver();
  const recorder = createRecorder(app, document, {
    [endpoint.url]: 'https://hooks.example.com/mailstead',
  });
  recorded = recorder.examples;
  try {
    const audience = await tourAudience(app, recorder);
    await tourMail(app, recorder, { ...audience, endpoint: endpoint.url });
    await audience.finish();
  } finally {
    await endpoint.stop();
  }
});

test('every operation has an example', () => {
  assert.ok(operations.length > 100);
  const missing = operations
    .map(({ operationId }) => operationId)
    .filter((id) => recorded[id] === undefined);
  assert.equal(missing, [], 'the tour of test/support/reference-*.ts does not come by');
  const written = all.filter(({ responses }) => {
    const { example, examples } = responses['200']?.content?.['application/json'] ?? {};
    return example !== undefined || examples !== undefined;
  });
  for (const id of OF_THE_MACHINE) {
    assert.ok(
      written.some(({ operationId }) => operationId === id),
      id,
    );
  }
});

if (isRecording) {
  test('the examples are written', async () => {
    const inOrder = operations.flatMap(({ operationId: id }) =>
      recorded[id] === undefined ? [] : [[id, recorded[id]] as const],
    );
    const json = JSON.stringify(Object.fromEntries(inOrder));
    const { format } = await import('prettier');
    writeFileSync(EXAMPLES_PATH, await format(json, { parser: 'json', printWidth: 100 }));
  });
} else {
  test('the examples are those of the operations there are', () => {
    assert.equal(
      Object.keys(committed),
      operations.map(({ operationId }) => operationId),
      AGAIN,
    );
  });

  for (const { operationId } of operations) {
    test(`${operationId} is asked and answered as its example says`, () => {
      const known = committed[operationId];
      const seen = recorded[operationId];
      assert.ok(known !== undefined && seen !== undefined, AGAIN);
      assert.equal([seen.request, seen.sdk], [known.request, known.sdk], AGAIN);
      assert.is(seen.response.status, known.response.status, AGAIN);
      assert.equal(formOf(seen.response.body), formOf(known.response.body), AGAIN);
    });
  }

  test('the OpenAPI document has them', () => {
    const merged = JSON.parse(text) as OpenApiDocument;
    mergeExamples(merged, committed);
    assert.ok(printDocument(merged) === text, 'npm run generate');
    assert.ok(Buffer.byteLength(text) < DOCUMENT_BYTES_MAX);
    for (const operation of operations) {
      const { status, body } = committed[operation.operationId]!.response;
      const answer = operation.responses[status]?.content?.['application/json'];
      assert.equal(answer?.example, body, operation.operationId);
    }
  });
}

/** Every place of a value with the types that are there; the items of a list together. */
function formOf(value: unknown): readonly string[] {
  const lines = new Set<string>();
  const visit = (at: string, one: unknown): void => {
    if (Array.isArray(one)) {
      lines.add(`${at}: list${one.length === 0 ? ', empty' : ''}`);
      for (const item of one) visit(`${at}[]`, item);
    } else if (typeof one === 'object' && one !== null) {
      lines.add(`${at}: object`);
      for (const [key, item] of Object.entries(one)) visit(`${at}.${key}`, item);
    } else lines.add(`${at}: ${one === null ? 'null' : typeof one}`);
  };
  visit('', value);
  return [...lines].toSorted();
}

// ---- what there is to paste --------------------------------------------------------------------

/** Runs what the reference shows, against this appliance. */
async function paste(source: string): Promise<Record<string, unknown>> {
  const script = source
    .replaceAll('http://localhost:3000', app.base)
    .replaceAll('curl ', 'curl -sS --noproxy "*" ');
  const { stdout } = await promisify(execFile)('sh', ['-c', script], {
    env: { ...process.env, MAILSTEAD_API_KEY: app.key },
  });
  return JSON.parse(stdout) as Record<string, unknown>;
}

// Machines without curl have nothing to paste it into.
const hasCurl = spawnSync('curl', ['--version']).status === 0;
if (!hasCurl) console.log('skipped: curl examples: there is no curl here');
const pasteTest = hasCurl && !isRecording ? test : test.skip;

for (const id of ['createTopic', 'sendEmail', 'addSuppression', 'listEmails', 'getTemplate']) {
  pasteTest(`the curl of ${id} works as it is`, async () => {
    const answer = await paste(curlOf(recorded[id]!));
    assert.is(answer['code'], undefined, JSON.stringify(answer));
    assert.ok('id' in answer || answer['object'] === 'list', JSON.stringify(answer));
  });
}

pasteTest('the curl of an import brings its file, quotes and all', async () => {
  const example = recorded['createContactImport']!;
  const body = {
    ...(example.request.body as Record<string, string>),
    file: `email,first_name\n"paste'd@recipient.test","O'Hara, $HOME"\n`,
    column_map: '{"email":"email","first_name":"first_name"}',
    segments: '[]',
  };
  const { id } = await paste(curlOf({ ...example, request: { ...example.request, body } }));
  const done = await until(
    () => app.call('GET', `/contacts/imports/${String(id)}`),
    ({ body: state }) => state['status'] !== 'queued' && state['status'] !== 'in_progress',
  );
  assert.equal(done.body['errors'], []);
  const { body: contact } = await app.call('GET', `/contacts/paste'd@recipient.test`);
  assert.is(contact['first_name'], "O'Hara, $HOME");
});

test.run();
