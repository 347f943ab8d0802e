// What tests of broadcasts ask of the SDK and of the sink.
import * as assert from 'uvu/assert';
import { until, type App } from './app.ts';
import { read } from './composed.ts';

/** What the SDK gave when it must have worked. */
export function dataOf<T>(result: { data: T | null; error: unknown }): T {
  assert.is(result.error, null, JSON.stringify(result.error));
  assert.ok(result.data);
  return result.data;
}

/** The envelope, as the SDK hands it through. */
export function errorOf(result: { data: unknown; error: unknown }): Record<string, unknown> {
  assert.is(result.data, null);
  assert.ok(result.error);
  return result.error as Record<string, unknown>;
}

/** The messages of the sink by recipient. */
export async function arrived(
  app: App,
  addresses: readonly string[],
): Promise<ReadonlyMap<string, { raw: Buffer; parsed: Awaited<ReturnType<typeof read>> }>> {
  const { body } = await until(
    () =>
      app.call<{ data: { rcpt_to: string[]; raw: string }[] }>('GET', '/sink/messages?limit=100'),
    (answer) =>
      addresses.every((one) => answer.body.data.some(({ rcpt_to: to }) => to.includes(one))),
  );
  const found = new Map<string, { raw: Buffer; parsed: Awaited<ReturnType<typeof read>> }>();
  for (const { rcpt_to: to, raw } of body.data) {
    const bytes = Buffer.from(raw);
    found.set(String(to[0]), { raw: bytes, parsed: await read(bytes) });
  }
  return found;
}

export type Person = { email: string } & Record<string, unknown>;

/** A segment with these contacts; their ids. */
export async function newSegment(
  app: App,
  people: readonly Person[],
): Promise<{ segmentId: string; ids: readonly string[] }> {
  const { body: segment } = await app.call<{ id: string }>('POST', '/segments', {
    body: { name: 'a segment' },
  });
  const segmentId = segment.id;
  const ids: string[] = [];
  for (const person of people) {
    const { status, body } = await app.call<{ id: string }>('POST', '/contacts', {
      body: { ...person, segments: [segmentId] },
    });
    assert.is(status, 201, JSON.stringify(body));
    ids.push(body.id);
  }
  return { segmentId, ids };
}
