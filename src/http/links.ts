// GET /links/{token}: what a signed link leads to, without an API key. Files are streamed and only ever downloaded;
// a shared email is shown in a page where nothing of it can run, load or leave.
import { pipeline } from 'node:stream/promises';
import type { RequestHandler } from 'express';
import type { LinkedEmail, LinkedFile, LinkOpeners } from '../access/linked.ts';
import { Refusal } from '../access/refusal.ts';
import { LINK_PATH, type SignedLinks } from '../access/signed-link.ts';
import { sendRefusal } from './envelope.ts';

export const LINK_ROUTE = `${LINK_PATH}:token`;

export function createLinkHandler(d: {
  readonly links: SignedLinks;
  readonly openers: LinkOpeners;
}): RequestHandler {
  return async (request, response) => {
    response.setHeader('cache-control', 'private, no-store');
    response.setHeader('referrer-policy', 'no-referrer');
    response.setHeader('x-robots-tag', 'noindex, nofollow');
    const { token } = request.params;
    const target = typeof token === 'string' ? d.links.open(token) : null;
    const linked = target === null ? null : await d.openers[target.kind](target);
    if (linked === null) {
      sendRefusal(response, new Refusal('not_found', 'This link is not valid, or not any more.'));
      return;
    }
    if (linked.kind === 'email') {
      response.setHeader('content-security-policy', PAGE_POLICY);
      response.type('html').send(page(linked));
      return;
    }
    response.setHeader('content-security-policy', FILE_POLICY);
    await sendFile(request.method, response, linked);
  };
}

type Response = Parameters<RequestHandler>[1];

const FILE_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'";

async function sendFile(method: string, response: Response, file: LinkedFile): Promise<void> {
  response.attachment(nameOf(file.filename));
  response.setHeader('content-type', typeOf(file.contentType));
  response.setHeader('content-length', file.sizeBytes);
  if (method === 'HEAD') {
    file.content.destroy();
    response.end();
    return;
  }
  try {
    await pipeline(file.content, response);
  } catch (error) {
    // Who hangs up has what he wanted; a fault of ours is told by the length that is not kept.
    if ((error as NodeJS.ErrnoException).code !== 'ERR_STREAM_PREMATURE_CLOSE') throw error;
  }
}

/** As a header may carry it (RFC 6266, RFC 8187: express writes both forms), whatever a message called it. */
const nameOf = (filename: string): string =>
  // oxlint-disable-next-line no-control-regex
  filename.toWellFormed().replace(/[\u0000-\u001f\u007f/\\]/g, '_') || 'attachment';

/** What a message calls it may hold what no header can carry. */
const typeOf = (contentType: string): string =>
  /^[ -~]+$/.test(contentType) ? contentType : 'application/octet-stream';

/** The frame below inherits it: no scripts, and no picture or font from anywhere else. */
const PAGE_POLICY =
  "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none'; " +
  "form-action 'none'; frame-ancestors 'none'; sandbox";

const ENTITIES: Readonly<Record<string, string>> = {
  '&': '&amp;',
  '<': '&lt;',
  '>': '&gt;',
  '"': '&quot;',
  "'": '&#39;',
};
const escape = (text: string): string => text.replace(/[&<>"']/g, (found) => ENTITIES[found] ?? '');

function page(email: LinkedEmail): string {
  const row = (name: string, value: string): string =>
    value === '' ? '' : `<dt>${name}</dt><dd>${escape(value)}</dd>`;
  const body =
    email.html === null
      ? `<pre>${escape(email.text ?? '')}</pre>`
      : `<iframe sandbox title="Message" srcdoc="${escape(email.html)}"></iframe>`;
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escape(email.subject)}</title>
<style>
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dt { color: #666; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
iframe { width: 100%; height: 80vh; border: 1px solid #ccc; background: #fff; }
</style>
</head>
<body>
<h1>${escape(email.subject)}</h1>
<dl>${row('From', email.from)}${row('To', email.to.join(', '))}${row('Cc', email.cc.join(', '))}${row(
    'Date',
    email.createdAt.toUTCString(),
  )}</dl>
${body}
</body>
</html>
`;
}
