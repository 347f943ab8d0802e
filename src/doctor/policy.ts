// What an operator decides about the doctor (config/doctor.json), and reading the operator's files: the doctor reads them
// anew with every look, since it also runs where no appliance does. Refuses what it does not know.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { readTlsSettings, type TlsSettings } from '../certificates/settings.ts';
import { readDeliveryPolicy, type DeliveryPolicy } from '../delivery/egress.ts';
import { isHostName, toALabels } from '../dns/host-name.ts';
import { fields, list, parseFile, wrong } from '../mail/rule-file.ts';

export interface DoctorPolicy {
  /** Block lists that our addresses are looked up in. */
  readonly dnsblZones: readonly string[];
  /** Domains whose mail hosts are dialled when somebody asks for it. */
  readonly port25Domains: readonly string[];
  /** A name that is signed, to see whether the DANE resolver validates; null: not looked at. */
  readonly signedName: string | null;
}

const ZONES_MAX = 16;
const DOMAINS_MAX = 8;
const BYTES_MAX = 4 * 1024 * 1024;
const SHIPPED = new URL('../../config/', import.meta.url);

/** Throws an Error that names the key and says what is wrong with it. */
export function readDoctorPolicy(file: unknown): DoctorPolicy {
  const root = fields(file, 'the file', {
    dnsbl_zones: [],
    port25_domains: [],
    signed_name: null,
  });
  return {
    dnsblZones: names(root.dnsbl_zones, 'dnsbl_zones', ZONES_MAX),
    port25Domains: names(root.port25_domains, 'port25_domains', DOMAINS_MAX),
    signedName: root.signed_name === null ? null : nameAt(root.signed_name, 'signed_name'),
  };
}

const names = (value: unknown, at: string, max: number): readonly string[] =>
  list(value, at, max).map((one, index) => nameAt(one, `${at}[${index}]`));

function nameAt(value: unknown, at: string): string {
  const name = typeof value === 'string' ? toALabels(value) : '';
  if (name.includes('.') && isHostName(name)) return name;
  throw wrong(at, 'a full domain name');
}

export interface OperatorFiles {
  readonly doctor: DoctorPolicy;
  readonly delivery: DeliveryPolicy;
  readonly tls: TlsSettings;
  /** Files of the operator's that cannot be used, and why; the shipped ones stand in for them. */
  readonly problems: readonly { readonly path: string; readonly why: string }[];
}

/** The operator's own files in `folder`, or those that ship. */
export async function readOperatorFiles(folder: string): Promise<OperatorFiles> {
  const problems: { path: string; why: string }[] = [];
  const read = async <T>(name: string, parse: (file: unknown) => T): Promise<T> => {
    const own = join(folder, `${name}.json`);
    try {
      return parse(parseFile(await readText(own)));
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      if (code !== 'ENOENT') problems.push({ path: own, why: message });
    }
    return parse(JSON.parse(await readText(new URL(`${name}.json`, SHIPPED))));
  };
  const doctor = await read('doctor', readDoctorPolicy);
  const delivery = await read('delivery', readDeliveryPolicy);
  const tls = await read('tls', readTlsSettings);
  return { doctor, delivery, tls, problems };
}

/** PEM of acme.ca_file; none where it cannot be read, which ordering says (certificates/ordering.ts). */
export async function readAuthorities({ acme }: TlsSettings): Promise<readonly string[]> {
  const path = acme?.caFile ?? null;
  return path === null ? [] : [await readText(path).catch(() => '')];
}

async function readText(path: string | URL): Promise<string> {
  const text = await readFile(path, 'utf8');
  if (text.length > BYTES_MAX) throw new Error(`it is larger than ${BYTES_MAX} bytes`);
  return text;
}
