// Looks for the records that ask senders for verified TLS and for reports of it: MTA-STS (RFC 8461 §3.1), TLSRPT (RFC 8460 §3).
import { stsIdOf } from './mta-sts.ts';
import {
  absent,
  listed,
  missing,
  unknown,
  wrong,
  type Finding,
  type RecordResolver,
} from './records.ts';

/** A record with the id that `value` has; a sender that finds two takes neither. */
export async function findSts(
  resolver: RecordResolver,
  { name, value }: { readonly name: string; readonly value: string },
): Promise<Finding> {
  const answer = await resolver.txt(name);
  if (answer.kind === 'failed') return unknown('TXT', name, answer.cause);
  if (answer.kind !== 'found') return missing(resolver, { name, type: 'TXT' });
  const found = answer.records.filter((text) => /^v=STSv1\b/.test(text));
  if (found.length === 0) return absent(`There is no MTA-STS record at ${name} yet.`);
  if (found.length > 1) {
    return wrong(`There are ${found.length} MTA-STS records at ${name}; senders then use none.`);
  }
  const id = stsIdOf(found);
  if (id === null) return wrong(`The MTA-STS record ${listed(found)} at ${name} is not valid.`);
  if (id === stsIdOf([value])) return { kind: 'right' };
  return wrong(
    `The MTA-STS record at ${name} has the id of another policy; senders fetch the one that is served now when it is ${listed([value])}.`,
  );
}

/** Where reports go is the domain's own affair. */
export async function findTlsReporting(resolver: RecordResolver, name: string): Promise<Finding> {
  const answer = await resolver.txt(name);
  if (answer.kind === 'failed') return unknown('TXT', name, answer.cause);
  if (answer.kind !== 'found') return missing(resolver, { name, type: 'TXT' });
  const found = answer.records.filter((text) => /^v=TLSRPTv1\s*;/.test(text));
  if (found.length === 0) return absent(`There is no TLSRPT record at ${name} yet.`);
  if (found.length > 1) {
    return wrong(`There are ${found.length} TLSRPT records at ${name}; nobody reports then.`);
  }
  return { kind: 'right' };
}
