// Asks this container for GET /health/live, which a process with any roles answers; exit 0 when it answers 200 in
// time, else 1. The image has no curl.

import { readFileSync } from 'node:fs';
import http from 'node:http';

const TIMEOUT_MS = 4_000;

/** As the appliance reads it: empty counts as absent, NAME_FILE names a file with the value. */
function setting(name, fallback) {
  const file = process.env[`${name}_FILE`];
  return (file ? readFileSync(file, 'utf8').trim() : process.env[name]) || fallback;
}

function end(problem) {
  if (problem !== null) console.error(problem);
  process.exit(problem === null ? 0 : 1);
}

const bound = setting('MAILSTEAD_HTTP_HOST', '0.0.0.0');
const host = bound === '0.0.0.0' ? '127.0.0.1' : bound === '::' ? '::1' : bound;
const port = setting('MAILSTEAD_HTTP_PORT', '3000');

setTimeout(() => end(`no answer within ${TIMEOUT_MS} ms`), TIMEOUT_MS);
http
  .get({ host, port, path: '/health/live', agent: false }, (response) => {
    end(response.statusCode === 200 ? null : `GET /health/live answered ${response.statusCode}`);
  })
  .on('error', (error) => end(error.message));
