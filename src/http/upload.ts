// A form with a file (multipart/form-data, RFC 7578), for the one route that takes one. The file goes on while it arrives
// and is never held; the texts beside it are few and short. A request that ends early, is too large or wrong leaves
// nothing behind. How long it may take is for the server to say, as with every request (408).
import { once } from 'node:events';
import { Busboy, type BusboyFileStream, type BusboyInstance } from '@fastify/busboy';
import type { Request } from 'express';
import { Refusal, refuseFields } from '../access/refusal.ts';
import { createBodyBudget, tooMuchAtOnce, type BodyBudget } from './body-budget.ts';

export const FILE_MAX_BYTES = 100 * 1024 * 1024;
/** The texts, and what a form writes around its parts. */
const BESIDE_MAX_BYTES = 1024 * 1024;
const FIELD_MAX_BYTES = 64 * 1024;
const FIELDS_MAX = 20;
const PART_HEADERS_MAX = 10;
const PART_HEADER_MAX_BYTES = 8 * 1024;
/** Of all files that are arriving. */
const UPLOADS_MAX_BYTES = 1024 * 1024 * 1024;
/** Of a request that is refused, so that a caller who sends first and listens then gets to hear why. */
const READ_PAST_MAX_BYTES = 256 * 1024 * 1024;
/** Whoever sends nothing for so long is listening. */
const READ_PAST_IDLE_MS = 1_000;
const FILE_FIELD = 'file';
const UPLOAD_PATH = /^\/contacts\/imports\/?$/;

/** Where files go. */
export interface UploadTarget<File> {
  /** Rejects when `bytes` does, and has kept nothing then. */
  receive(bytes: AsyncIterable<Uint8Array>): Promise<File>;
  discard(file: File): Promise<void>;
}

export interface Upload<File> {
  /** Null: there was none. */
  readonly file: File | null;
  /** The texts by their names. */
  readonly fields: ReadonlyMap<string, string>;
}

/** The body of this request is read by its controller. */
export const isUpload = (request: Request): boolean =>
  request.method === 'POST' &&
  UPLOAD_PATH.test(request.path) &&
  isMultipart(request.headers['content-type']);

const isMultipart = (type: string | undefined): type is string =>
  /^multipart\/form-data(?:;|$)/i.test(type?.trim() ?? '');

const uploads = createBodyBudget(UPLOADS_MAX_BYTES);

/** Reads the whole body. Throws a Refusal: 400, 413, 422 or 503. What is no form has neither file nor fields. */
export async function readUpload<File>(
  request: Request,
  tenantId: string,
  {
    target,
    budget = uploads,
  }: { readonly target: UploadTarget<File>; readonly budget?: BodyBudget },
): Promise<Upload<File>> {
  const type = request.headers['content-type'];
  if (!isMultipart(type)) return { file: null, fields: new Map() };
  let takenBytes = 0;
  const receive = (stream: BusboyFileStream): Promise<File> =>
    target.receive(
      counted(stream, (bytes) => {
        if (!budget.take(bytes, tenantId)) throw tooMuchAtOnce();
        takenBytes += bytes;
      }),
    );
  try {
    checkHead(request);
    return await readForm(request, openForm(request, type), { receive, discard: target.discard });
  } catch (error) {
    await readPast(request);
    // What still comes would be taken for the next request.
    if (!request.readableEnded) request.res?.setHeader('connection', 'close');
    throw error;
  } finally {
    budget.give(takenBytes, tenantId);
  }
}

function checkHead(request: Request): void {
  if (Number(request.headers['content-length'] ?? 0) > FILE_MAX_BYTES + BESIDE_MAX_BYTES) {
    throw tooLarge();
  }
  if ((request.headers['content-encoding'] ?? 'identity').toLowerCase() !== 'identity') {
    throw new Refusal('invalid_request', 'A form with a file must be sent without compression.');
  }
}

function openForm(request: Request, type: string): BusboyInstance {
  try {
    return new Busboy({
      headers: { ...request.headers, 'content-type': type },
      isPartAFile: (name) => name === FILE_FIELD,
      limits: {
        fileSize: FILE_MAX_BYTES,
        files: 1,
        fieldSize: FIELD_MAX_BYTES,
        fields: FIELDS_MAX,
        parts: FIELDS_MAX + 1,
        headerPairs: PART_HEADERS_MAX,
        headerSize: PART_HEADER_MAX_BYTES,
      },
    });
  } catch {
    throw new Refusal('invalid_request', 'The content type of the form names no boundary.');
  }
}

interface Receiving<File> {
  receive(stream: BusboyFileStream): Promise<File>;
  discard(file: File): Promise<void>;
}

async function readForm<File>(
  request: Request,
  form: BusboyInstance,
  { receive, discard }: Receiving<File>,
): Promise<Upload<File>> {
  const fields = new Map<string, string>();
  const got: { stream: BusboyFileStream | null; file: Promise<File> | null } = {
    stream: null,
    file: null,
  };
  const failed = new AbortController();
  const fail = (error: unknown): void => failed.abort(error);
  form.on('error', () => fail(notAForm()));
  form.on('filesLimit', () => fail(refuseField(FILE_FIELD, 'is there more than once')));
  for (const event of ['fieldsLimit', 'partsLimit'] as const) {
    form.on(event, () => fail(refuseField('body', `has more than ${FIELDS_MAX} fields`)));
  }
  form.on('field', (name, value, _isNameCut, isCut) => {
    // Without a name it is nobody's, whatever the types say.
    if (typeof name !== 'string') return;
    if (isCut) fail(refuseField(name, `is longer than ${FIELD_MAX_BYTES} bytes`));
    else if (fields.has(name)) fail(refuseField(name, 'is there more than once'));
    else fields.set(name, value);
  });
  form.on('file', (_name, arriving) => {
    got.stream = arriving;
    arriving.on('error', () => undefined); // heard by whoever reads it
    arriving.on('limit', () => fail(tooLarge()));
    got.file = receive(arriving);
    got.file.catch(fail);
  });
  try {
    await feed(request, form, failed.signal);
    return { file: await got.file, fields };
  } catch (error) {
    const reason: unknown = failed.signal.aborted ? failed.signal.reason : error;
    // Whoever reads it must not wait for what does not come.
    got.stream?.destroy(new Error('the upload ended early'));
    const kept = (await got.file?.catch(() => null)) ?? null;
    if (kept !== null) await discard(kept);
    throw reason;
  } finally {
    form.destroy();
  }
}

/** Gives the form all bytes of the request, no faster than the file is stored. Rejects when the signal says so. */
async function feed(request: Request, form: BusboyInstance, signal: AbortSignal): Promise<void> {
  if (request.destroyed) throw endedEarly(); // by a caller who hung up before
  let sizeBytes = 0;
  // The form may be over before the body is; what comes behind it means nothing.
  const isOver = once(form, 'finish', { signal });
  isOver.catch(() => undefined);
  try {
    for await (const chunk of request.iterator({ destroyOnReturn: false })) {
      const bytes = chunk as Buffer;
      signal.throwIfAborted();
      sizeBytes += bytes.length;
      if (sizeBytes > FILE_MAX_BYTES + BESIDE_MAX_BYTES) throw tooLarge();
      if (!form.write(bytes)) await once(form, 'drain', { signal });
    }
  } catch (error) {
    throw error instanceof Refusal || signal.aborted ? error : endedEarly();
  }
  if (!request.complete) throw endedEarly();
  form.end();
  await isOver;
  signal.throwIfAborted();
}

async function* counted(
  stream: BusboyFileStream,
  take: (bytes: number) => void,
): AsyncGenerator<Uint8Array> {
  for await (const chunk of stream) {
    const bytes = chunk as Buffer;
    take(bytes.length);
    yield bytes;
  }
  if (stream.truncated) throw tooLarge();
}

/** Reads what is left of a body, up to a limit, and keeps nothing of it. */
async function readPast(request: Request): Promise<void> {
  if (request.readableEnded || request.destroyed) return;
  let sizeBytes = 0;
  let timer: NodeJS.Timeout | undefined;
  await new Promise<void>((resolve) => {
    timer = setTimeout(resolve, READ_PAST_IDLE_MS);
    request.once('end', resolve).once('close', resolve);
    request.on('data', (chunk: Buffer) => {
      timer?.refresh();
      sizeBytes += chunk.length;
      if (sizeBytes > READ_PAST_MAX_BYTES) resolve();
    });
    request.resume();
  });
  clearTimeout(timer);
}

const endedEarly = (): Refusal =>
  new Refusal('invalid_request', 'The request body ended early or has the wrong length.');

const notAForm = (): Refusal =>
  new Refusal('invalid_request', 'The request body is not a whole multipart/form-data form.');

const tooLarge = (): Refusal =>
  new Refusal(
    'request_too_large',
    `The file is too large; at most ${FILE_MAX_BYTES} bytes are allowed.`,
  );

/** Names are the caller's own. */
const refuseField = (name: string, words: string): Refusal =>
  refuseFields([{ path: name, message: `\`${name}\` ${words}.` }]);
