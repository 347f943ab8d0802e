// Receiving routes and forwarding rules of an appliance, by its API.
import * as assert from 'uvu/assert';
import { assertHeaders } from '../http/envelope.ts';
import type { App } from './app.ts';
import { receivingDomain } from './receiving-domain.ts';
import { secondTenant } from './second-tenant.ts';

type Fields = Record<string, unknown>;

export const RULES_PATH = '/receiving/forwarding-rules';
export const ROUTES_PATH = '/receiving/routes';

export interface Rules {
  /** An alias of `Team`; its id. */
  addRoute(domainId: string, local?: string, key?: string): Promise<string>;
  create(body: Fields, key?: string): Promise<Fields>;
  /** What a change answers, which is what is read afterwards. */
  change(id: unknown, body: Fields): Promise<Fields>;
  read(id: unknown): Promise<Fields>;
  /** An exact route that forwards; the id of its rule. */
  forward(domainId: string, local: string, destinations: readonly string[]): Promise<string>;
  /** Its status and why. */
  standing(id: unknown): Promise<readonly unknown[]>;
}

export function rulesOf(app: App): Rules {
  const read: Rules['read'] = async (id) => {
    const answer = await app.call('GET', `${RULES_PATH}/${String(id)}`);
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    return answer.body;
  };
  const post = (path: string, body: Fields, key: string): Promise<Fields> =>
    postNew(app, path, { body, key });
  return {
    read,
    async addRoute(domainId, local = 'in', key = app.key) {
      const fields = { domain_id: domainId, type: 'alias' };
      const locals = { local_part: local, target_local_part: 'Team' };
      return String((await post(ROUTES_PATH, { ...fields, ...locals }, key))['id']);
    },
    create: (body, key = app.key) => post(RULES_PATH, body, key),
    async forward(domainId, local, destinations) {
      const fields = { domain_id: domainId, type: 'exact', local_part: local };
      const { id } = await post(ROUTES_PATH, fields, app.key);
      const rule = { route_id: id, destinations, status: 'active' };
      return String((await post(RULES_PATH, rule, app.key))['id']);
    },
    async change(id, body) {
      const answer = await app.call('PATCH', `${RULES_PATH}/${String(id)}`, { body });
      assert.is(answer.status, 200, JSON.stringify(answer.body));
      assertHeaders(answer);
      assert.equal(await read(id), answer.body);
      return answer.body;
    },
    async standing(id) {
      const { status, invalid_reason: why } = await read(id);
      return [status, why];
    },
  };
}

/** What a request answers that makes something. */
export async function postNew(
  app: App,
  path: string,
  { body, key = app.key }: { readonly body: Fields; readonly key?: string },
): Promise<Fields> {
  const answer = await app.call('POST', path, { body, key });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  assertHeaders(answer);
  return answer.body;
}

export interface Page {
  readonly object: string;
  readonly data: Fields[];
  readonly has_more: boolean;
}

export interface Listed {
  /** Of the tenant whose they are. */
  readonly key: string;
  readonly domains: readonly [string, string];
  /** Newest first. */
  readonly items: readonly Fields[];
}

/** A new tenant's list, made in turn for two domains: its first page, the rest, a page back, and the part of one domain. */
export async function assertPages(
  app: App,
  path: string,
  make: (domainId: string, n: number, key: string) => Promise<Fields>,
): Promise<Listed> {
  const { key, tenantId } = await secondTenant(app);
  const domains = [
    await receivingDomain(app, `one-${tenantId}.test`, key),
    await receivingDomain(app, `two-${tenantId}.test`, key),
  ] as const;
  const items: Fields[] = [];
  for (let n = 0; n < 23; n += 1) items.unshift(await make(domains[n % 2]!, n, key));
  const read = async (query: string): Promise<Page> => {
    const answer = await app.call<Page>('GET', `/api${path}?${query}`, { key });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    return answer.body;
  };
  assert.equal(await read(''), { object: 'list', data: items.slice(0, 20), has_more: true });
  const rest = await read(`after=${String(items[19]!['id'])}`);
  assert.equal(rest, { object: 'list', data: items.slice(20), has_more: false });
  const before = await read(`limit=2&before=${String(items[5]!['id'])}`);
  assert.equal(before, { object: 'list', data: items.slice(3, 5), has_more: true });
  const [first] = domains;
  const ofOne = items.filter((item) => item['domain_id'] === first);
  assert.is(ofOne.length, 12);
  for (const id of [first, first.toUpperCase()]) {
    const one = await read(`domain_id=${id}&limit=100`);
    assert.equal(one, { object: 'list', data: ofOne, has_more: false });
  }
  return { key, domains, items };
}
