// What a smarthost says of our login, without the login: some servers repeat a command that they do not know, and every tenant
// can read what was said about its mail.
import { Buffer } from 'node:buffer';
import type { Failure, Target } from './session.ts';

const HIDDEN = '[redacted]';

/** The failure as it may be stored and shown: no password in it, nor what AUTH PLAIN and LOGIN make of one. */
export function withoutLogin(failure: Failure, login: Target['login']): Failure {
  if (login === null) return failure;
  const { user, pass } = login;
  const base64 = (text: string): string => Buffer.from(text).toString('base64');
  const secrets = [`\0${user}\0${pass}`, `${user}\0${user}\0${pass}`, pass].map(base64);
  const hide = (text: string): string =>
    [...secrets, pass].reduce((rest, secret) => rest.replaceAll(secret, HIDDEN), text);
  const { reply, message } = failure;
  return { ...failure, reply: reply === null ? null : hide(reply), message: hide(message) };
}
