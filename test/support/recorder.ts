// Records what a real appliance is asked and answers, one example an operation, for docs/examples.json. What changes from run
// to run (ids, times, keys, ports) is replaced by stand-ins that are the same wherever the value is (stand-ins.ts).
import { Resend } from 'resend';
import type { OpenApiDocument, RecordedExample } from '../../src/openapi-examples.ts';
import { until, type Answer, type App } from './app.ts';
import { createStandIns } from './stand-ins.ts';

export interface Recorder {
  /** By operation id: the first request of each. */
  readonly examples: Record<string, RecordedExample>;
  /** Asks over plain HTTP; fails when it is refused. */
  call<T = { id: string }>(method: string, path: string, body?: unknown): Promise<T>;
  /** Reads until the answer is as wanted, and records that one. */
  settled<T>(path: string, isWanted: (body: T) => boolean): Promise<T>;
  /** Asks as the official SDK does: `contacts.create`. Fails when it is refused, unless the call is said to be. */
  sdk<T = { id: string }>(call: string, ...args: readonly unknown[]): Promise<T>;
  /** As sdk, where a refusal is the example. */
  refused(call: string, ...args: readonly unknown[]): Promise<void>;
}

interface Template {
  readonly method: string;
  readonly id: string;
  readonly pattern: RegExp;
  readonly names: readonly string[];
}

/** What operations take in headers. */
const HEADERS = ['idempotency-key', 'x-batch-validation'];

/** `aliases`: texts of this run and what to write instead. */
export function createRecorder(
  app: App,
  document: OpenApiDocument,
  aliases: Readonly<Record<string, string>>,
): Recorder {
  const templates = templatesOf(document);
  const examples: Record<string, RecordedExample> = {};
  const standIns = createStandIns({ [app.base]: 'http://localhost:3000', ...aliases });
  const resend = new Resend(app.key, { baseUrl: app.base });

  function operationOf(method: string, pathname: string): readonly [Template, RegExpExecArray] {
    for (const template of templates) {
      const match = template.method === method ? template.pattern.exec(pathname) : null;
      if (match !== null) return [template, match];
    }
    throw new Error(`no operation for ${method} ${pathname}`);
  }

  async function record(
    request: { method: string; url: string; headers: Headers; body: unknown },
    response: RecordedExample['response'],
    sdk: RecordedExample['sdk'],
  ): Promise<void> {
    const url = new URL(request.url);
    const [operation, match] = operationOf(request.method, decodeURIComponent(url.pathname));
    if (examples[operation.id] !== undefined) return;
    const isForm = request.body instanceof FormData;
    const headers = Object.fromEntries([
      ...(isForm ? [['content-type', 'multipart/form-data']] : []),
      ...HEADERS.flatMap((name) => {
        const value = request.headers.get(name);
        return value === null ? [] : [[name, value]];
      }),
    ]) as Record<string, string>;
    const parameters = Object.fromEntries(operation.names.map((name, i) => [name, match[i + 1]!]));
    const query = Object.fromEntries(url.searchParams);
    const body = await bodyOf(request.body);
    examples[operation.id] = standIns.replaceIn(operation.id, {
      request: {
        method: request.method,
        path: url.pathname + url.search,
        ...ifAny('parameters', parameters),
        ...ifAny('query', query),
        ...ifAny('headers', headers),
        ...(body === undefined ? {} : { body }),
      },
      response,
      ...(sdk === undefined ? {} : { sdk }),
    });
  }

  async function recordPlain<T>(
    method: string,
    path: string,
    answer: Answer<T>,
    body?: unknown,
  ): Promise<T> {
    if (answer.status >= 300) {
      throw new Error(`${method} ${path}: ${answer.status} ${JSON.stringify(answer.body)}`);
    }
    await record(
      { method, url: app.base + path, headers: new Headers(), body },
      { status: answer.status, body: answer.body },
      undefined,
    );
    return answer.body;
  }

  /** The answer of the SDK, and what went over the wire meanwhile. */
  async function ask(
    call: string,
    args: readonly unknown[],
  ): Promise<{ data: unknown; error: unknown }> {
    const shown = { call, arguments: await Promise.all(args.map(showFiles)) };
    const native = globalThis.fetch;
    const work: Promise<void>[] = [];
    globalThis.fetch = async (target, init = {}) => {
      const response = await native(target, init);
      const body: Promise<unknown> = response.clone().json();
      const request = {
        method: init.method ?? 'GET',
        url: target instanceof Request ? target.url : String(target),
        headers: new Headers(init.headers),
        body: init.body,
      };
      work.push(
        body.then((value) => record(request, { status: response.status, body: value }, shown)),
      );
      return response;
    };
    try {
      return await methodOf(resend, call)(...args);
    } finally {
      globalThis.fetch = native;
      await Promise.all(work);
    }
  }

  return {
    examples,
    // oxlint-disable-next-line typescript/no-unnecessary-type-parameters -- the caller knows the form
    async call<T>(method: string, path: string, body?: unknown) {
      return recordPlain(method, path, await app.call<T>(method, path, { body }), body);
    },
    async settled<T>(path: string, isWanted: (body: T) => boolean) {
      const answer = await until(
        () => app.call<T>('GET', path),
        (one) => isWanted(one.body),
      );
      return recordPlain('GET', path, answer);
    },
    // oxlint-disable-next-line typescript/no-unnecessary-type-parameters -- the caller knows the form
    async sdk<T>(call: string, ...args: readonly unknown[]) {
      const { data, error } = await ask(call, args);
      if (error !== null) throw new Error(`${call}: ${JSON.stringify(error)}`);
      return data as T;
    },
    async refused(call, ...args) {
      const { data, error } = await ask(call, args);
      if (error === null) throw new Error(`${call} was not refused: ${JSON.stringify(data)}`);
    },
  };
}

/** Fixed paths first: `/emails/metrics` is no email. */
function templatesOf(document: OpenApiDocument): readonly Template[] {
  return Object.entries(document.paths)
    .toSorted(([a], [b]) => a.split('{').length - b.split('{').length)
    .flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, { operationId }]) => ({
        method: method.toUpperCase(),
        id: operationId,
        pattern: new RegExp(`^${path.replace(/\{\w+\}/g, '([^/]+)')}$`),
        names: [...path.matchAll(/\{(\w+)\}/g)].map(([, name = '']) => name),
      })),
    );
}

type Method = (...args: readonly unknown[]) => Promise<{ data: unknown; error: unknown }>;

/** `contacts.segments.add`, with its object. */
function methodOf(resend: Resend, call: string): Method {
  let owner: unknown = undefined;
  let value: unknown = resend;
  for (const name of call.split('.')) {
    owner = value;
    value = (value as Record<string, unknown>)[name];
  }
  if (typeof value !== 'function') throw new Error(`the SDK has no ${call}`);
  return (value as Method).bind(owner);
}

const ifAny = (name: string, values: object): object =>
  Object.keys(values).length === 0 ? {} : { [name]: values };

/** What JSON makes of it; the fields of a form as texts. */
async function bodyOf(body: unknown): Promise<unknown> {
  if (body instanceof FormData) {
    const fields = await Promise.all(
      [...body].map(async ([name, value]) => [
        name,
        typeof value === 'string' ? value : await value.text(),
      ]),
    );
    return Object.fromEntries(fields) as unknown;
  }
  if (typeof body === 'string') return JSON.parse(body) as unknown;
  return body ?? undefined;
}

async function showFiles(value: unknown): Promise<unknown> {
  if (value instanceof Blob) return value.text();
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return value;
  const entries = Object.entries(value).map(async ([key, item]) => [key, await showFiles(item)]);
  return Object.fromEntries(await Promise.all(entries)) as unknown;
}
