/**
 * What an operator decides about certificates (config/tls.json): which ACME authority, if any, and which ports for HTTPS.
 *
 * In: the parsed file. Out: values. Refuses, with the key and what to fix, whatever it does not know. As shipped everything is
 * off, and nothing asks anybody.
 */
import { isAbsolute } from 'node:path';
import { fields, wrong } from '../mail/rule-file.ts';

export interface AcmeSettings {
  /** The URL of the authority's directory (RFC 8555 §7.1.1). */
  readonly directory: string;
  /** Where the authority writes to; null: nowhere. */
  readonly email: string | null;
  /** Of an account elsewhere that ours is bound to (RFC 8555 §7.3.4); the key in base64url. */
  readonly eab: { readonly kid: string; readonly hmacKey: string } | null;
  /** PEM: authorities that are trusted beside the public ones. */
  readonly caFile: string | null;
}

export interface TlsSettings {
  /** Null: off. */
  readonly acme: AcmeSettings | null;
  readonly httpsPort: number | null;
  /** Answers challenges, and leads everybody else to HTTPS. */
  readonly challengePort: number | null;
}

const URL_MAX_CHARS = 2_000;
const TEXT_MAX_CHARS = 1_000;

/** Throws an Error that names the key and says what is wrong with it. */
export function readTlsSettings(file: unknown): TlsSettings {
  const root = fields(file, 'the file', { acme: {}, https_port: null, http_challenge_port: null });
  return {
    acme: readAcme(root.acme),
    httpsPort: readPort(root.https_port, 'https_port'),
    challengePort: readPort(root.http_challenge_port, 'http_challenge_port'),
  };
}

function readAcme(value: unknown): AcmeSettings | null {
  const acme = fields(value, 'acme', {
    directory: null,
    email: null,
    agree_to_terms: false,
    eab: null,
    ca_file: null,
  });
  const directory = acme.directory === null ? null : readDirectory(acme.directory);
  const email = readText(acme.email, 'acme.email');
  if (email !== null && !/^[^\s@,;<>?]+@[^\s@,;<>?]+$/.test(email)) {
    throw wrong('acme.email', 'one address, as in postmaster@example.com, or null');
  }
  const caFile = readText(acme.ca_file, 'acme.ca_file');
  if (caFile !== null && !isAbsolute(caFile)) {
    throw wrong('acme.ca_file', 'the absolute path of a PEM file, or null');
  }
  const eab = acme.eab === null ? null : readBinding(acme.eab);
  if (typeof acme.agree_to_terms !== 'boolean') throw wrong('acme.agree_to_terms', 'true or false');
  if (directory === null) return null;
  if (!acme.agree_to_terms) {
    throw new Error(
      'acme.agree_to_terms: must be true where a directory is named; read the terms of that authority first',
    );
  }
  return { directory, email, eab, caFile };
}

function readDirectory(value: unknown): string {
  const url = typeof value === 'string' && value.length <= URL_MAX_CHARS ? URL.parse(value) : null;
  if (url === null || url.protocol !== 'https:' || url.username !== '' || url.password !== '') {
    throw wrong(
      'acme.directory',
      'an https:// URL, as in https://acme-v02.api.letsencrypt.org/directory, or null',
    );
  }
  return url.href;
}

function readBinding(value: unknown): { readonly kid: string; readonly hmacKey: string } {
  const eab = fields(value, 'acme.eab', { kid: null, hmac_key: null });
  const kid = readText(eab.kid, 'acme.eab.kid');
  const hmacKey = readText(eab.hmac_key, 'acme.eab.hmac_key');
  if (kid === null) throw wrong('acme.eab.kid', 'the name of the key');
  if (hmacKey === null || !/^[A-Za-z0-9_-]+=*$/.test(hmacKey)) {
    throw wrong('acme.eab.hmac_key', 'a key in base64url');
  }
  return { kid, hmacKey };
}

function readText(value: unknown, at: string): string | null {
  if (value === null) return null;
  if (typeof value === 'string' && value.trim() !== '' && value.length <= TEXT_MAX_CHARS) {
    return value.trim();
  }
  throw wrong(at, `a text of at most ${TEXT_MAX_CHARS} characters, or null`);
}

function readPort(value: unknown, at: string): number | null {
  if (value === null) return null;
  if (Number.isInteger(value) && Number(value) >= 0 && Number(value) <= 65_535) {
    return Number(value);
  }
  throw wrong(at, 'a port, a number from 0 to 65535 (0: any free one), or null');
}
