// Traces of a whole appliance with a worker process, as a receiver of OTLP on this machine gets them.
import { once } from 'node:events';
import { createServer, type IncomingHttpHeaders } from 'node:http';
import type { AddressInfo } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { closeAll, send } from '../support/sink-session.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';

const test = suite('traces');

interface ReceivedSpan {
  readonly name: string;
  readonly traceId: string;
  readonly spanId: string;
  readonly parentSpanId?: string;
  readonly kind: number;
  readonly status?: { readonly code?: number };
  readonly links?: readonly { readonly traceId: string; readonly spanId: string }[];
  readonly attributes: readonly {
    readonly key: string;
    readonly value: Readonly<Record<string, unknown>>;
  }[];
  readonly instance: string;
}

interface Posted {
  readonly resourceSpans: readonly {
    readonly resource: { readonly attributes: ReceivedSpan['attributes'] };
    readonly scopeSpans: readonly { readonly spans: readonly ReceivedSpan[] }[];
  }[];
}

const spans: ReceivedSpan[] = [];
const bodies: string[] = [];
const headers: IncomingHttpHeaders[] = [];
const collector = createServer((request, response) => {
  const parts: Buffer[] = [];
  request.on('data', (part: Buffer) => parts.push(part));
  request.on('end', () => {
    const body = Buffer.concat(parts).toString();
    bodies.push(body);
    headers.push(request.headers);
    for (const { resource, scopeSpans } of (JSON.parse(body) as Posted).resourceSpans) {
      const instance = String(attributesOf(resource)['service.instance.id']);
      for (const scope of scopeSpans) {
        spans.push(...scope.spans.map((span) => ({ ...span, instance })));
      }
    }
    response.writeHead(200, { 'content-type': 'application/json' }).end('{}');
  });
});

const attributesOf = ({
  attributes,
}: Pick<ReceivedSpan, 'attributes'>): Readonly<Record<string, unknown>> =>
  Object.fromEntries(attributes.map(({ key, value }) => [key, Object.values(value)[0]]));

let app: App;
let endpoint: Receiver;
test.before(async () => {
  collector.listen(0, '127.0.0.1');
  await once(collector, 'listening');
  endpoint = await startReceiver();
  const { port } = collector.address() as AddressInfo;
  const otlp = { url: `http://127.0.0.1:${port}/v1/traces`, headers: { 'x-token': 'hunter2' } };
  // Of another program's receiver; ours must not learn it.
  process.env['OTEL_EXPORTER_OTLP_HEADERS'] = 'x-other=hunter3';
  app = await startApp(
    { MAILSTEAD_WORKERS: '1', MAILSTEAD_LOG_LEVEL: 'warn' },
    { telemetry: { otlp } },
  );
});
test.after(async () => {
  await closeAll();
  await app.stop();
  await endpoint.stop();
  collector.closeAllConnections();
  collector.close();
});

const TRACE = '4bf92f3577b34da6a3ce929d0e0e4736';
const CALLER = '00f067aa0ba902b7';

const named = (name: string, wanted: Readonly<Record<string, unknown>>): ReceivedSpan | undefined =>
  spans.find((span) => {
    const attributes = attributesOf(span);
    return (
      span.name === name &&
      Object.entries(wanted).every(([key, value]) => attributes[key] === value)
    );
  });

const untilNamed = async (
  name: string,
  wanted: Readonly<Record<string, unknown>>,
): Promise<ReceivedSpan> =>
  (await until(
    () => Promise.resolve(named(name, wanted)),
    (span) => span !== undefined,
  ))!;

test('from the request of a caller who traces to the settlement in another process', async () => {
  await app.call('POST', '/webhooks', {
    body: { endpoint: endpoint.url, events: ['email.delivered', 'email.received'] },
  });
  const id = await app.send(
    { subject: 'A secret matter', text: 'hidden words' },
    { traceparent: `00-${TRACE}-${CALLER}-01`, 'x-request-id': 'my-request' },
  );
  await app.untilEvent(id, 'delivered');
  const request = await untilNamed('POST', { 'mailstead.request_id': 'my-request' });
  assert.is(request.traceId, TRACE);
  assert.is(request.parentSpanId, CALLER);
  assert.is(attributesOf(request)['http.route'], '/emails');
  const emailTrace = id.replaceAll('-', '');
  const email = await untilNamed('email', { 'mailstead.email_id': id });
  assert.is(email.traceId, emailTrace, 'the trace of an email is found by its id');
  assert.is(email.parentSpanId ?? '', '');
  const [link] = email.links ?? [];
  const accept = spans.find(({ spanId }) => spanId === link?.spanId)!;
  assert.is(accept.name, 'accept');
  assert.is(accept.traceId, TRACE);
  assert.is(accept.parentSpanId, request.spanId);
  for (const name of ['attempt', 'settle']) {
    const span = await untilNamed(name, { 'mailstead.email_id': id });
    assert.is(span.traceId, emailTrace, name);
    assert.is(span.parentSpanId, email.spanId, name);
    assert.is(attributesOf(span)['mailstead.outcome'], 'delivered');
    assert.is.not(span.instance, request.instance, 'it is of the worker');
  }
});

test('what fails says so with a code, and a webhook call is a span', async () => {
  const id = await app.send({ to: 'reject@recipient.test' });
  await app.untilEvent(id, 'bounced');
  const attempt = await untilNamed('attempt', { 'mailstead.email_id': id });
  assert.is(attempt.status?.code, 2);
  assert.is(Number(attributesOf(attempt)['mailstead.smtp_code']), 550);
  const call = await untilNamed('webhook call', { 'mailstead.outcome': 'acknowledged' });
  assert.is(Number(attributesOf(call)['http.response.status_code']), 200);
});

test('mail that comes in is a span, with its storing inside', async () => {
  await send(app.appliance.mxPort!, {
    from: 'a@sender.test',
    to: ['team@mailstead.test'],
    raw: 'From: a@sender.test\r\nTo: team@mailstead.test\r\nSubject: In\r\n\r\nHello\r\n',
  });
  const message = await untilNamed('inbound message', { 'mailstead.smtp_code': 250 });
  const receive = await until(
    () => Promise.resolve(spans.find(({ name }) => name === 'receive')),
    (span) => span !== undefined,
  );
  assert.is(receive!.parentSpanId, message.spanId);
  assert.is(receive!.traceId, message.traceId);
});

test('a caller who does not want traces gets none', async () => {
  const none = TRACE.replace('4', '5');
  await app.send({}, { traceparent: `00-${none}-${CALLER}-00`, 'x-request-id': 'untraced' });
  await app.send({}, { 'x-request-id': 'traced' });
  await untilNamed('POST', { 'mailstead.request_id': 'traced' });
  assert.is(named('POST', { 'mailstead.request_id': 'untraced' }), undefined);
});

test('no address, no text and no key is in them, and the headers go along', () => {
  assert.ok(bodies.length > 0);
  for (const body of bodies) {
    assert.not.match(body, /@|secret matter|hidden|recipient\.test|sender\.test|hunter2|re_/i);
  }
  for (const { 'x-token': token, 'x-other': other } of headers) {
    assert.equal([token, other], ['hunter2', undefined]);
  }
  assert.equal(app.complaints, []);
});

test.run();
