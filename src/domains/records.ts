// The DNS records that a domain should publish, with the real values: made from its settings, its public
// keys and the name of this appliance. Pure. docs/domains.md says why each is as it is.
import type { RecordKind, StsHosting } from '../store/sending-domain.ts';
import { STS_LABEL, stsPolicyId, stsPolicyText } from './sts-policy.ts';

export interface WantedRecord {
  readonly kind: RecordKind;
  /** What it is for, in Resend's words. */
  readonly record: 'SPF' | 'DKIM' | 'Receiving' | 'Tracking' | 'DMARC' | 'MTA-STS' | 'TLS-RPT';
  /** Fully qualified, without a dot at its end. */
  readonly name: string;
  readonly type: 'MX' | 'TXT' | 'CNAME';
  readonly value: string;
  /** Of an MX. */
  readonly priority: number | null;
}

/** What the records follow from. */
export interface DomainSettings {
  readonly name: string;
  readonly returnPathLabel: string;
  readonly trackingSubdomain: string | null;
  readonly openTracking: boolean;
  readonly clickTracking: boolean;
  readonly sending: boolean;
  readonly receiving: boolean;
  readonly mtaSts: StsHosting;
}

export interface PublicKey {
  readonly selector: string;
  readonly algorithm: 'rsa-sha256' | 'ed25519-sha256';
  /** The TXT record. */
  readonly record: string;
}

/** The appliance as the DNS sees it. */
export interface Place {
  /** MAILSTEAD_HOSTNAME. */
  readonly hostname: string;
  /** The host of MAILSTEAD_PUBLIC_URL: where HTTP is answered. */
  readonly trackingHost: string;
}

export const RETURN_PATH_DEFAULT = 'send';
export const TRACKING_DEFAULT = 'links';
const MX_PREFERENCE = 10;

export const tracks = (domain: Pick<DomainSettings, 'openTracking' | 'clickTracking'>): boolean =>
  domain.openTracking || domain.clickTracking;

/** In the order in which they are shown. DKIM is there even without sending: it proves whose the name is. */
export function wantedRecords(
  domain: DomainSettings,
  keys: readonly PublicKey[],
  place: Place,
): readonly WantedRecord[] {
  const { name } = domain;
  const returnPath = `${domain.returnPathLabel}.${name}`;
  const mx = { type: 'MX', value: place.hostname, priority: MX_PREFERENCE } as const;
  const txt = { type: 'TXT', priority: null } as const;
  const sending: readonly WantedRecord[] = [
    { kind: 'return_path_mx', record: 'SPF', name: returnPath, ...mx },
    {
      kind: 'return_path_spf',
      record: 'SPF',
      name: returnPath,
      ...txt,
      value: `v=spf1 a:${place.hostname} ~all`,
    },
  ];
  const dkim = keys.map(({ selector, algorithm, record }): WantedRecord => ({
    kind: algorithm === 'rsa-sha256' ? 'dkim_rsa' : 'dkim_ed25519',
    record: 'DKIM',
    name: `${selector}._domainkey.${name}`,
    ...txt,
    value: record,
  }));
  const receiving: WantedRecord = { kind: 'receiving_mx', record: 'Receiving', name, ...mx };
  const tracking: WantedRecord = {
    kind: 'tracking_cname',
    record: 'Tracking',
    name: `${domain.trackingSubdomain ?? TRACKING_DEFAULT}.${name}`,
    type: 'CNAME',
    value: place.trackingHost,
    priority: null,
  };
  const dmarc: WantedRecord = {
    kind: 'dmarc',
    record: 'DMARC',
    name: `_dmarc.${name}`,
    ...txt,
    value: 'v=DMARC1; p=none;',
  };
  return [
    ...(domain.sending ? sending : []),
    ...dkim,
    ...(domain.receiving ? [receiving] : []),
    ...(tracks(domain) ? [tracking] : []),
    ...(domain.sending ? [dmarc] : []),
    ...(domain.receiving ? stsRecords(domain, place) : []),
  ];
}

/** Advice, like DMARC: mail arrives without them. Reports go to a mailbox that every address of the domain can be routed to. */
function stsRecords(
  { name, mtaSts }: Pick<DomainSettings, 'name' | 'mtaSts'>,
  place: Place,
): readonly WantedRecord[] {
  const policy = stsPolicyText(mtaSts, place.hostname);
  if (policy === null) return [];
  const txt = { type: 'TXT', priority: null } as const;
  return [
    {
      kind: 'mta_sts_host',
      record: 'MTA-STS',
      name: `${STS_LABEL}.${name}`,
      type: 'CNAME',
      value: place.trackingHost,
      priority: null,
    },
    {
      kind: 'mta_sts_txt',
      record: 'MTA-STS',
      name: `_mta-sts.${name}`,
      ...txt,
      value: `v=STSv1; id=${stsPolicyId(policy)};`,
    },
    {
      kind: 'tls_rpt',
      record: 'TLS-RPT',
      name: `_smtp._tls.${name}`,
      ...txt,
      value: `v=TLSRPTv1; rua=mailto:tls-reports@${name}`,
    },
  ];
}
