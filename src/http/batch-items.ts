// A permissive batch with items whose fields are of the wrong types: tsoa refuses the whole body for them. Here they are
// noted and emptied, and the routes are asked once more, so that the right ones are accepted. Items that tsoa must not
// even see (body.ts) are emptied before.
import type { ErrorRequestHandler, Request, RequestHandler } from 'express';
import { ValidateError, type FieldErrors } from '@tsoa/runtime';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { Misshapen } from '../sending/batch.ts';
import { refuseShape } from './envelope.ts';

const BATCH_PATH = /^\/emails\/batch\/?$/;
/** `body.$3.to.$0`: which item is wrong. */
const ITEM_KEY = /^body\.\$(\d+)(\.|$)/;

const misshapen = new WeakMap<object, ReadonlyMap<number, Misshapen>>();
/** Whose items tsoa has refused once. */
const sifted = new WeakSet<object>();

/** What is wrong with items of this request's body, by their index. */
export const misshapenOf = (request: Request): ReadonlyMap<number, Misshapen> =>
  misshapen.get(request) ?? new Map<number, Misshapen>();

const isPermissiveBatch = (request: Request): boolean =>
  request.headers['x-batch-validation'] === 'permissive' && BATCH_PATH.test(request.path);

/** The body without the items about which `findIssue` has something to say: they are misshapen. */
export function emptyItems(
  request: Request,
  body: unknown,
  findIssue: (item: unknown) => Issue | null,
): unknown {
  if (!isPermissiveBatch(request) || !Array.isArray(body)) return body;
  const items: readonly unknown[] = body;
  const found = new Map<number, Misshapen>();
  for (const [index, given] of items.entries()) {
    const issue = findIssue(given);
    if (issue !== null) found.set(index, { refusal: refuseFields([issue]), given });
  }
  if (found.size > 0) misshapen.set(request, found);
  return items.map((item, index) => (found.has(index) ? {} : item));
}

/** Goes after the routes it is given. */
export function createBatchSifter(routes: RequestHandler): ErrorRequestHandler {
  return (error: unknown, request, response, next) => {
    const found = sifted.has(request) ? null : findMisshapen(error, request);
    if (found === null) {
      next(error);
      return;
    }
    sifted.add(request);
    misshapen.set(request, new Map([...misshapenOf(request), ...found]));
    request.body = (request.body as unknown[]).map((item, index) => (found.has(index) ? {} : item));
    routes(request, response, next);
  };
}

/** Null where the error is about something else, or concerns the whole batch. */
function findMisshapen(error: unknown, request: Request): ReadonlyMap<number, Misshapen> | null {
  if (!(error instanceof ValidateError) || !isPermissiveBatch(request)) return null;
  const items: unknown = request.body;
  if (!Array.isArray(items)) return null;
  const byItem = new Map<number, FieldErrors>();
  for (const [key, field] of Object.entries(error.fields)) {
    const [place, index] = ITEM_KEY.exec(key) ?? [];
    if (place === undefined) return null;
    const own = (text: string): string => text.replaceAll(`body.$${index}`, 'body');
    const fields = byItem.get(Number(index)) ?? {};
    fields[own(key)] = { ...field, message: own(field.message) };
    byItem.set(Number(index), fields);
  }
  return new Map(
    [...byItem].map(([index, fields]) => [
      index,
      { refusal: refuseShape(fields), given: items[index] as unknown },
    ]),
  );
}
