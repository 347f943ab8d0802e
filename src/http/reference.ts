// The human reference at /docs and the machine's at /openapi.json. Everything the page needs comes from
// this appliance: no font, script or request of a third party.
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import type { Router } from 'express';

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));
/** Copied beside the built code; in a checkout it is still in its package. */
const SCRIPT_PLACES = [
  here('./assets/rapidoc-min.js'),
  here('../../node_modules/rapidoc/dist/rapidoc-min.js'),
];
const DOCUMENT = here('../../docs/openapi.json');
const DAY_SECONDS = 86_400;

const PAGE = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Mailstead API reference</title>
<script type="module" src="/docs/rapidoc-min.js"></script>
</head>
<body>
<rapi-doc spec-url="/openapi.json" render-style="read" theme="light" load-fonts="false"
  show-header="false" allow-spec-url-load="false" allow-spec-file-load="false"
  schema-description-expanded="true" regular-font="system-ui, sans-serif" mono-font="monospace">
</rapi-doc>
</body>
</html>
`;

/** rapidoc styles itself with inline style elements; scripts stay our own. */
const PAGE_POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; " +
  "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

export function readOpenApi(): { paths: Record<string, Record<string, unknown>> } {
  return JSON.parse(readFileSync(DOCUMENT, 'utf8')) as ReturnType<typeof readOpenApi>;
}

export const REFERENCE_PATHS = ['/openapi.json', '/docs', '/docs/rapidoc-min.js'] as const;

/** Serves the reference; its "try it" calls go to wherever the page came from. */
export function addReference(router: Router): void {
  const document = JSON.stringify({ ...readOpenApi(), servers: [{ url: '/' }] });
  const place = SCRIPT_PLACES.find((path) => existsSync(path));
  if (place === undefined) throw new Error('the reference page lacks its script; build again');
  const script = readFileSync(place);
  router.get('/openapi.json', (_request, response) => {
    response.type('application/json').send(document);
  });
  router.get('/docs', (_request, response) => {
    response.setHeader('content-security-policy', PAGE_POLICY);
    response.type('html').send(PAGE);
  });
  router.get('/docs/rapidoc-min.js', (_request, response) => {
    response.setHeader('cache-control', `public, max-age=${DAY_SECONDS}`);
    response.type('text/javascript').send(script);
  });
}
