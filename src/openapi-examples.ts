/**
 * Puts the recorded examples (docs/examples.json) into the OpenAPI document: parameters, request and response of every
 * operation, and what to paste: a `curl`, and the call of the official SDK where it has one.
 *
 * In: docs/openapi.json as tsoa writes it, and docs/examples.json, which test/http/examples.test.ts records from a real
 * appliance and keeps true. Out: the document with the examples; run with `--write` (npm run generate does), the file.
 * Putting them in twice changes nothing.
 */
import { readFileSync, realpathSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';

/** One request to a real appliance and its answer, with what changes from run to run replaced. */
export interface RecordedExample {
  readonly request: {
    readonly method: string;
    /** As sent, from the root, with its query. */
    readonly path: string;
    /** Path parameters by name. */
    readonly parameters?: Readonly<Record<string, string>>;
    readonly query?: Readonly<Record<string, string>>;
    /** Only what an operation takes beside the credential; names in lower case. */
    readonly headers?: Readonly<Record<string, string>>;
    /** JSON; for a form, its fields as texts. */
    readonly body?: unknown;
  };
  readonly response: { readonly status: number; readonly body: unknown };
  /** The call of the official SDK that sent the request. */
  readonly sdk?: { readonly call: string; readonly arguments: readonly unknown[] };
}

/** By operation id. */
export type RecordedExamples = Readonly<Record<string, RecordedExample>>;

interface MediaType {
  example?: unknown;
  examples?: unknown;
}

export interface Operation {
  readonly operationId: string;
  readonly parameters?: { readonly in: string; readonly name: string; example?: unknown }[];
  readonly requestBody?: { readonly content: Readonly<Record<string, MediaType>> };
  readonly responses: Readonly<
    Record<string, { readonly content?: Readonly<Record<string, MediaType>> }>
  >;
  'x-codeSamples'?: unknown;
}

export interface OpenApiDocument {
  readonly paths: Readonly<Record<string, Readonly<Record<string, Operation>>>>;
}

const JSON_TYPE = 'application/json';
const FORM_TYPE = 'multipart/form-data';
/** Where the appliance of `npm start` listens; the API key comes from the environment. */
const BASE = 'http://localhost:3000';
/** What is longer is broken over lines. */
const LINE_CHARS_MAX = 72;

/** Changes the document; operations without a recorded example stay as they are. */
export function mergeExamples(document: OpenApiDocument, examples: RecordedExamples): void {
  for (const operation of Object.values(document.paths).flatMap((one) => Object.values(one))) {
    const example = examples[operation.operationId];
    if (example !== undefined) mergeExample(operation, example);
  }
}

function mergeExample(operation: Operation, { request, response, sdk }: RecordedExample): void {
  const given: Readonly<Record<string, Readonly<Record<string, string>> | undefined>> = {
    path: request.parameters,
    query: request.query,
    header: request.headers,
  };
  for (const parameter of operation.parameters ?? []) {
    const name = parameter.in === 'header' ? parameter.name.toLowerCase() : parameter.name;
    const value = given[parameter.in]?.[name];
    if (value !== undefined) parameter.example = value;
  }
  for (const media of Object.values(operation.requestBody?.content ?? {})) {
    show(media, request.body);
  }
  const answer = operation.responses[response.status]?.content?.[JSON_TYPE];
  if (answer !== undefined) show(answer, response.body);
  operation['x-codeSamples'] = [
    { lang: 'bash', label: 'curl', source: curlOf({ request, response }) },
    ...(sdk === undefined ? [] : [{ lang: 'js', label: 'SDK', source: lineOf(sdk) }]),
  ];
}

function show(media: MediaType, value: unknown): void {
  delete media.examples;
  media.example = value;
}

// ---- curl -----------------------------------------------------------------------------------------------------

/** The request for a POSIX shell; the key is read from `MAILSTEAD_API_KEY`. */
export function curlOf({ request }: Pick<RecordedExample, 'request' | 'response'>): string {
  const { method, path, headers = {}, body } = request;
  const isForm = 'content-type' in headers && headers['content-type'] === FORM_TYPE;
  const file = isForm ? (body as Readonly<Record<string, string>>)['file'] : undefined;
  const parts = [
    `curl ${method === 'GET' ? '' : `-X ${method} `}${quote(BASE + path)}`,
    `-H "Authorization: Bearer $MAILSTEAD_API_KEY"`,
    ...Object.entries(headers)
      .filter(([name]) => name !== 'content-type')
      .map(([name, value]) => `-H ${quote(`${name}: ${value}`)}`),
    ...(isForm ? formOf(body as Readonly<Record<string, string>>) : jsonOf(body)),
  ];
  const call = parts.join(' \\\n  ');
  return file === undefined ? call : `printf '%s' ${quote(file)} |\n${call}`;
}

const jsonOf = (body: unknown): readonly string[] =>
  body === undefined
    ? []
    : [`-H ${quote('Content-Type: application/json')}`, `-d ${quote(printJson(body))}`];

function formOf(fields: Readonly<Record<string, string>>): readonly string[] {
  return Object.entries(fields).map(([name, value]) =>
    name === 'file'
      ? `-F ${quote('file=@-;filename=contacts.csv;type=text/csv')}`
      : `--form-string ${quote(`${name}=${value}`)}`,
  );
}

const quote = (text: string): string => `'${text.replaceAll("'", `'\\''`)}'`;

function printJson(value: unknown): string {
  const line = JSON.stringify(value);
  return line.length <= LINE_CHARS_MAX ? line : JSON.stringify(value, null, 2);
}

// ---- the SDK --------------------------------------------------------------------------------------------------

/** One statement; `resend` is made as the README says. */
export function lineOf(sdk: NonNullable<RecordedExample['sdk']>): string {
  const given = sdk.arguments.map((value) => printValue(value, 0)).join(', ');
  return `const { data, error } = await resend.${sdk.call}(${given});`;
}

function printValue(value: unknown, depth: number): string {
  if (typeof value === 'string') return printText(value);
  if (typeof value !== 'object' || value === null) return String(value);
  const items = Array.isArray(value)
    ? value.map((item) => printValue(item, depth + 1))
    : Object.entries(value).map(
        ([key, item]) => `${printKey(key)}: ${printItem(key, item, depth)}`,
      );
  const [open, close] = Array.isArray(value) ? ['[', ']'] : ['{', '}'];
  if (items.length === 0) return open + close;
  const line = Array.isArray(value)
    ? `${open}${items.join(', ')}${close}`
    : `${open} ${items.join(', ')} ${close}`;
  if (line.length <= LINE_CHARS_MAX && !line.includes('\n')) return line;
  const indent = '  '.repeat(depth);
  return `${open}\n${items.map((item) => `${indent}  ${item},\n`).join('')}${indent}${close}`;
}

/** A file is shown as what makes one in Node and in browsers. */
const printItem = (key: string, value: unknown, depth: number): string =>
  key === 'file' && typeof value === 'string'
    ? `new Blob([${printText(value)}])`
    : printValue(value, depth + 1);

const printKey = (key: string): string => (/^[A-Za-z_]\w*$/.test(key) ? key : printText(key));

const printText = (text: string): string =>
  `'${JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("'", "\\'")}'`;

// ---- the files ------------------------------------------------------------------------------------------------

export const OPENAPI_PATH = resolve(import.meta.dirname, '../docs/openapi.json');
export const EXAMPLES_PATH = resolve(import.meta.dirname, '../docs/examples.json');

export const readExamples = (): RecordedExamples =>
  JSON.parse(readFileSync(EXAMPLES_PATH, 'utf8')) as RecordedExamples;

/** As tsoa writes it, so that nothing else changes. */
export const printDocument = (document: OpenApiDocument): string =>
  JSON.stringify(document, null, '\t');

const isProgram =
  process.argv[1] !== undefined && realpathSync(process.argv[1]) === import.meta.filename;
if (isProgram && process.argv.includes('--write')) {
  const document = JSON.parse(readFileSync(OPENAPI_PATH, 'utf8')) as OpenApiDocument;
  mergeExamples(document, readExamples());
  writeFileSync(OPENAPI_PATH, printDocument(document));
}
