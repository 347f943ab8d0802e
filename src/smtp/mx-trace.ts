// What we write on top of an arriving message: where it came from, as the connection shows it.
import { isIPv6 } from 'node:net';
import type { SMTPServerSession } from 'smtp-server';
import type { ArrivalClient } from '../receiving/arrival.ts';

/** A transaction, kept apart: the session is used for the next one before this one is answered. */
export interface Transaction {
  readonly id: string;
  /** Empty for the null sender. */
  readonly mailFrom: string;
  /** As the client wrote them. */
  readonly recipients: readonly string[];
  readonly client: ArrivalClient;
  /** RFC 3848, RFC 6531 §4.3. */
  readonly protocol: string;
}

const NAME_CHARS_MAX = 255;

export function transactionOf(session: SMTPServerSession): Transaction {
  const { envelope, secure } = session;
  const protocol = envelope.smtpUtf8 === true ? 'UTF8SMTP' : 'ESMTP';
  return {
    id: `${session.id}.${session.transaction}`,
    mailFrom: senderOf(session),
    recipients: envelope.rcptTo.map(({ address }) => address),
    client: {
      address: session.remoteAddress,
      helo: session.hostNameAppearsAs || 'unknown',
      isTls: secure,
    },
    protocol: session.openingCommand === 'HELO' ? 'SMTP' : `${protocol}${secure ? 'S' : ''}`,
  };
}

/** Empty for the null sender. */
export const senderOf = ({ envelope: { mailFrom } }: SMTPServerSession): string =>
  mailFrom === false ? '' : mailFrom.address;

/**
 * Return-Path, what the checks of the message came to (`results`: fields with their CRLF), and Received (RFC 5321 §4.4).
 * A single recipient is named there; of several none, since each would learn of the others.
 */
export function traceFields(
  { id, mailFrom, recipients, client, protocol }: Transaction,
  about: { readonly hostname: string; readonly at: Date; readonly results: string },
): string {
  const helo = client.helo.replace(/[^\x21-\x7e]|[()<>\\;]/g, '?').slice(0, NAME_CHARS_MAX);
  const address = isIPv6(client.address) ? `IPv6:${client.address}` : client.address;
  const [recipient] = recipients;
  const names = recipients.length === 1 && recipient !== undefined && recipient.includes('@');
  return [
    `Return-Path: <${mailFrom}>`,
    `${about.results}Received: from ${helo} ([${address}])`,
    `\tby ${about.hostname} with ${protocol} id ${id}${names ? '' : ';'}`,
    ...(names ? [`\tfor <${recipient}>;`] : []),
    `\t${about.at.toUTCString().replace('GMT', '+0000')}`,
    '',
  ].join('\r\n');
}
