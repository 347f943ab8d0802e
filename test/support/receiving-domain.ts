// A receiving domain that a tenant of an appliance has verified.
import * as assert from 'uvu/assert';
import { until, type App } from './app.ts';
import type { DnsServer } from './dns.ts';
import { zonesOf } from './domains.ts';

/** The id. Development mode takes the records of reserved names as published. */
export async function receivingDomain(
  app: App,
  name: string,
  key: string = app.key,
): Promise<string> {
  const body = { name, capabilities: { sending: 'enabled', receiving: 'enabled' } };
  const made = await app.call<{ id: string }>('POST', '/domains', { body, key });
  assert.is(made.status, 201, JSON.stringify(made.body));
  const { id } = made.body;
  const verified = await app.call('POST', `/domains/${id}/verify`, { key });
  assert.is(verified.body['status'], 'verified', JSON.stringify(verified.body));
  return id;
}

/** The id. Its records are published, and seen, as its owner would do it. */
export async function publishedDomain(
  app: App,
  dns: DnsServer,
  about: { readonly name: string; readonly key?: string; readonly sending?: 'enabled' },
): Promise<string> {
  const { name, key = app.key, sending } = about;
  const capabilities = { receiving: 'enabled', ...(sending === undefined ? {} : { sending }) };
  const made = await app.call<{ id: string; records: Parameters<typeof zonesOf>[0]['records'] }>(
    'POST',
    '/domains',
    { key, body: { name, capabilities } },
  );
  assert.is(made.status, 201, JSON.stringify(made.body));
  Object.assign(dns.zones, zonesOf(made.body));
  const path = `/domains/${made.body.id}`;
  await app.call('POST', `${path}/verify`, { key });
  await until(
    () => app.call('GET', path, { key }),
    ({ body }) => body['status'] === 'verified',
  );
  return made.body.id;
}
