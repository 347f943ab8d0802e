// /unsubscribe/{token}: the page of preferences, its form, and one-click unsubscribing by mail programs (RFC 8058). The
// token is the credential: no cookie, no login, no script. GET and HEAD change nothing, since scanners follow every link
// of an email; and a one-click POST is answered at once, never led elsewhere.
import { Busboy, type BusboyInstance } from '@fastify/busboy';
import type { Request, RequestHandler, Response, Router } from 'express';
import type { RateLimiter } from '../access/rate-limit.ts';
import { Refusal, refuseUnavailable } from '../access/refusal.ts';
import { PREFERENCE_PATH } from '../audience/preference-links.ts';
import {
  PREFERENCE_TOPICS_MAX,
  type PreferenceChoice,
  type PreferenceVerbs,
  type Reader,
} from '../audience/preferences.ts';
import { sendRefusal } from './envelope.ts';
import {
  FORM,
  messagePage,
  preferencePage,
  savedPage,
  type Page,
  type PageLook,
} from './preference-page.ts';
import { pickLanguage, type PreferencePolicy } from './preference-policy.ts';

export const PREFERENCE_ROUTE = `${PREFERENCE_PATH}:token`;

export interface PreferenceDependencies {
  readonly preferences: PreferenceVerbs;
  readonly policy: () => PreferencePolicy;
  readonly limiter: Pick<RateLimiter, 'takeStranger'>;
}

const METHODS = 'GET, HEAD, POST';
/** Two fields of each topic shown, and what multipart writes around them is for one-click only. */
const BODY_MAX_BYTES = 100 * 1024;
const FIELDS_MAX = 2 * PREFERENCE_TOPICS_MAX + 10;
const FIELD_MAX_BYTES = 200;
/** RFC 8058 §3.2, in lower case. */
const ONE_CLICK = { name: 'list-unsubscribe', value: 'one-click' } as const;

/** Adds the route, with its own 405. */
export function addPreferences(router: Router, d: PreferenceDependencies): void {
  router.use(PREFERENCE_ROUTE, createLimit(d));
  router.get(PREFERENCE_ROUTE, answering(d, show));
  router.post(PREFERENCE_ROUTE, answering(d, change));
  router.all(PREFERENCE_ROUTE, (_request, response) => {
    response.setHeader('allow', METHODS);
    sendRefusal(response, new Refusal('method_not_allowed', 'Use GET or POST here.'));
  });
}

/**
 * Requests with a token of ours are counted by its contact, all others by address: the programs of a large mail provider
 * unsubscribe many people from few addresses, and none of them may be turned away for it.
 */
function createLimit({ preferences, limiter }: PreferenceDependencies): RequestHandler {
  return async (request, response, next) => {
    const name = preferences.nameOf(tokenOf(request));
    const rate = await limiter.takeStranger(
      name === null ? (request.socket.remoteAddress ?? '') : `preferences ${name}`,
    );
    for (const [header, value] of Object.entries(rate.headers)) response.setHeader(header, value);
    if (rate.refusal === null) next();
    else sendRefusal(response, rate.refusal);
  };
}

const tokenOf = (request: Request): string => {
  const { token } = request.params;
  return typeof token === 'string' ? token : '';
};

type Answer = (d: PreferenceDependencies, about: About) => Promise<void>;

interface About {
  readonly request: Request;
  readonly response: Response;
  readonly token: string;
  readonly look: PageLook;
}

function answering(d: PreferenceDependencies, answer: Answer): RequestHandler {
  return async (request, response) => {
    response.setHeader('referrer-policy', 'no-referrer');
    response.setHeader('x-robots-tag', 'noindex, nofollow');
    response.vary('Accept-Language');
    const policy = d.policy();
    const look = { policy, language: pickLanguage(request.headers['accept-language'], policy) };
    const about = { request, response, token: tokenOf(request), look };
    try {
      await answer(d, about);
    } catch (error) {
      const unavailable = refuseUnavailable(error);
      if (unavailable === null || !isBrowser(request)) throw error;
      response.setHeader('retry-after', String(unavailable.retryAfterSeconds ?? 1));
      sendPage(response.status(unavailable.status), messagePage(look, 'unavailable'), look);
    }
  };
}

const show: Answer = async ({ preferences }, about) => {
  const found = await preferences.read(about.token);
  if (found === null) refuseToken(about);
  else sendPage(about.response, preferencePage(about.look, found), about.look);
};

const change: Answer = async ({ preferences }, about) => {
  const { request, response, token, look } = about;
  const fields = await readFields(request);
  const reader: Reader = {
    address: request.socket.remoteAddress ?? null,
    userAgent: request.headers['user-agent'] ?? null,
  };
  if (fields.some(isOneClick)) {
    const saved = await preferences.unsubscribe(token, reader);
    if (saved === null) refuseToken(about);
    else response.type('text/plain').send('Unsubscribed.\n');
    return;
  }
  // Anything else would say by its silence that the reader wants all mail again.
  if (!fields.some(({ name }) => name === FORM.form)) throw notAForm();
  const saved = await preferences.save(token, choiceOf(fields), reader);
  if (saved === null) refuseToken(about);
  else sendPage(response, savedPage(look, saved), look);
};

/** However a mail program spells it: what means to unsubscribe has to. */
const isOneClick = ({ name, value }: Field): boolean =>
  name.trim().toLowerCase() === ONE_CLICK.name && value.trim().toLowerCase() === ONE_CLICK.value;

function choiceOf(fields: readonly Field[]): PreferenceChoice {
  const of = (wanted: string): readonly string[] =>
    fields.flatMap(({ name, value }) => (name === wanted ? [value] : []));
  const ticked = new Set(of(FORM.topic));
  return {
    isUnsubscribed: fields.some(({ name }) => name === FORM.all),
    topics: [...new Set(of(FORM.shown))].map((id) => ({ id, isWanted: ticked.has(id) })),
  };
}

/** Whoever shows pages gets one, programs get the envelope. */
function refuseToken({ request, response, look }: About): void {
  if (isBrowser(request)) sendPage(response.status(404), messagePage(look, 'not_found'), look);
  else sendRefusal(response, new Refusal('not_found', 'This link is not valid.'));
}

const isBrowser = (request: Request): boolean =>
  request.accepts(['application/json', 'text/html']) === 'text/html';

function sendPage(response: Response, page: Page, { language }: PageLook): void {
  response.setHeader('content-security-policy', page.contentSecurityPolicy);
  response.setHeader('content-language', language);
  response.vary('Accept');
  response.type('html').send(page.html);
}

interface Field {
  readonly name: string;
  readonly value: string;
}

/** What is sent without a type as well. */
const FORM_TYPE = 'application/x-www-form-urlencoded';

/** The fields of a form, of either kind that browsers and mail programs send. Throws a Refusal. */
async function readFields(request: Request): Promise<readonly Field[]> {
  const [type = ''] = (request.headers['content-type'] ?? FORM_TYPE).toLowerCase().split(/[;\s]/);
  const isMultipart = type === 'multipart/form-data';
  if (!isMultipart && type !== FORM_TYPE) throw notAForm();
  if ((request.headers['content-encoding'] ?? 'identity').toLowerCase() !== 'identity') {
    throw notAForm();
  }
  const body = await readBody(request);
  const fields = isMultipart
    ? await readMultipart(request.headers['content-type'] ?? '', body)
    : [...new URLSearchParams(body.toString())].map(([name, value]) => ({ name, value }));
  if (fields.length > FIELDS_MAX) throw tooLarge();
  return fields;
}

async function readBody(request: Request): Promise<Buffer> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  try {
    for await (const chunk of request.iterator({ destroyOnReturn: false })) {
      bytes += (chunk as Buffer).length;
      if (bytes > BODY_MAX_BYTES) throw tooLarge();
      chunks.push(chunk as Buffer);
    }
  } catch (error) {
    if (error instanceof Refusal) throw error;
    throw new Refusal('invalid_request', 'The request body ended early or has the wrong length.');
  }
  return Buffer.concat(chunks);
}

/** Texts only; files are passed over. */
function readMultipart(type: string, body: Buffer): Promise<readonly Field[]> {
  return new Promise((resolve, reject) => {
    const fields: Field[] = [];
    const fail = (): void => reject(notAForm());
    let form: BusboyInstance;
    try {
      form = new Busboy({
        headers: { 'content-type': type },
        limits: { files: 0, fields: FIELDS_MAX, fieldSize: FIELD_MAX_BYTES, headerPairs: 20 },
      });
    } catch {
      fail(); // no boundary
      return;
    }
    form.on('field', (name: string, value: string) => fields.push({ name, value }));
    form.on('error', fail);
    form.on('finish', () => resolve(fields));
    form.end(body);
  });
}

const notAForm = (): Refusal =>
  new Refusal(
    'invalid_request',
    'Send the form of this page, or `List-Unsubscribe=One-Click` as a form (RFC 8058).',
  );

const tooLarge = (): Refusal =>
  new Refusal('request_too_large', `The form is larger than ${BODY_MAX_BYTES} bytes.`);
