// What a caller may say about a domain: the forms of the request, their rules, and the two forms of capabilities.
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { InboundDmarc, StsHosting, TlsMode } from '../store/sending-domain.ts';
import { checkDomainName, fitsBelow, toLabel } from './name.ts';
import { RETURN_PATH_DEFAULT, TRACKING_DEFAULT } from './records.ts';
import { STS_LABEL } from './sts-policy.ts';

/** What a domain can do, in the form of the `/api` paths. */
export interface DomainCapability {
  /** `sending` or `receiving`. */
  name: string;
  enabled: boolean;
}

/** What a domain can do, in the form of the root paths. */
export interface DomainCapabilities {
  sending?: 'enabled' | 'disabled';
  receiving?: 'enabled' | 'disabled';
}

export interface ClaimDomainRequest {
  /** A domain with a dot in it; international names may be given in their own script. */
  name: string;
  /** One of `us-east-1` (the default), `eu-west-1`, `sa-east-1`, `ap-northeast-1`; kept and shown, without effect. */
  region?: string | null;
  /** The label before the name where bounces come home; `send` unless given. */
  custom_return_path?: string | null;
  open_tracking?: boolean;
  click_tracking?: boolean;
  /** One DNS label before the name where tracking links lead; `links` when null. */
  tracking_subdomain?: string | null;
}

export interface CreateDomainRequest extends ClaimDomainRequest {
  /** `enforced`: mail leaves over TLS or not at all. Default `opportunistic`. */
  tls?: 'opportunistic' | 'enforced';
  /**
   * What becomes of mail to this domain that the DMARC policy of its author says to reject: refused (`reject`, the
   * default), or taken and marked (`tag`: its `authentication.verdict` is `tagged`).
   */
  inbound_dmarc?: 'reject' | 'tag';
  /**
   * The MTA-STS policy (RFC 8461) that is served at https://mta-sts.<name>/ while the domain receives: `testing` (senders report
   * what would fail), `enforce` (they deliver over verified TLS or not at all), `none` (a policy is withdrawn). Default `off`.
   */
  mta_sts?: 'off' | 'none' | 'testing' | 'enforce';
  /** An array or an object. Default: sending enabled, receiving disabled. */
  capabilities?: DomainCapability[] | DomainCapabilities | null;
}

export interface UpdateDomainRequest {
  open_tracking?: boolean;
  click_tracking?: boolean;
  /** One DNS label before the name where tracking links lead; null: the default, `links`. */
  tracking_subdomain?: string | null;
  tls?: 'opportunistic' | 'enforced';
  /** What becomes of mail to this domain that the DMARC policy of its author says to reject. */
  inbound_dmarc?: 'reject' | 'tag';
  /**
   * The MTA-STS policy that is served for the domain. `enforce` needs a certificate of this server that senders trust. Publish the
   * changed record afterwards; go to `none` for two weeks before `off`, since senders remember a policy.
   */
  mta_sts?: 'off' | 'none' | 'testing' | 'enforce';
  /** An array or an object; what is not named stays. */
  capabilities?: DomainCapability[] | DomainCapabilities | null;
}

export interface CheckedDomain {
  readonly name: string;
  readonly region: string;
  readonly returnPathLabel: string;
  readonly trackingSubdomain: string | null;
  readonly openTracking: boolean;
  readonly clickTracking: boolean;
  readonly tls: TlsMode;
  readonly inboundDmarc: InboundDmarc;
  readonly mtaSts: StsHosting;
  readonly sending: boolean;
  readonly receiving: boolean;
}

/** What may change later. */
export type DomainChange = Partial<Omit<CheckedDomain, 'name' | 'region' | 'returnPathLabel'>>;

const REGIONS = ['us-east-1', 'eu-west-1', 'sa-east-1', 'ap-northeast-1'] as const;

/** Throws a Refusal with every issue. */
export function checkCreate(request: CreateDomainRequest): CheckedDomain {
  const issues: Issue[] = [];
  const name = checkDomainName(request.name);
  if (!name.ok) issues.push(name.issue);
  const region = request.region ?? REGIONS[0];
  const isKnownRegion = REGIONS.some((known) => known === region);
  const regionIssue: Issue = {
    path: 'region',
    message: `\`region\` must be one of ${REGIONS.map((known) => `'${known}'`).join(',')}.`,
  };
  if (!isKnownRegion) issues.push(regionIssue);
  const returnPathLabel = checkLabel(request.custom_return_path, 'custom_return_path', issues);
  const trackingSubdomain = checkLabel(request.tracking_subdomain, 'tracking_subdomain', issues);
  const capabilities = checkCapabilities(request.capabilities, issues);
  const domain: CheckedDomain = {
    name: name.ok ? name.name : '',
    region,
    returnPathLabel: returnPathLabel ?? RETURN_PATH_DEFAULT,
    trackingSubdomain: trackingSubdomain ?? null,
    openTracking: request.open_tracking ?? false,
    clickTracking: request.click_tracking ?? false,
    tls: request.tls ?? 'opportunistic',
    inboundDmarc: request.inbound_dmarc ?? 'reject',
    mtaSts: request.mta_sts ?? 'off',
    sending: capabilities.sending ?? true,
    receiving: capabilities.receiving ?? false,
  };
  issues.push(...settingIssues(domain));
  if (issues.length === 0) return domain;
  throw refuseFields(
    issues,
    issues.every((one) => one === regionIssue) ? 'invalid_region' : undefined,
  );
}

/** The fields that are given. Throws a Refusal. */
export function checkUpdate(request: UpdateDomainRequest): DomainChange {
  const issues: Issue[] = [];
  const trackingSubdomain = checkLabel(request.tracking_subdomain, 'tracking_subdomain', issues);
  const capabilities = checkCapabilities(request.capabilities, issues);
  if (issues.length > 0) throw refuseFields(issues);
  return {
    ...(trackingSubdomain === undefined ? {} : { trackingSubdomain }),
    ...(request.open_tracking === undefined ? {} : { openTracking: request.open_tracking }),
    ...(request.click_tracking === undefined ? {} : { clickTracking: request.click_tracking }),
    ...(request.tls === undefined ? {} : { tls: request.tls }),
    ...(request.inbound_dmarc === undefined ? {} : { inboundDmarc: request.inbound_dmarc }),
    ...(request.mta_sts === undefined ? {} : { mtaSts: request.mta_sts }),
    ...capabilities,
  };
}

/** What is wrong with settings that are right one by one. */
export function settingIssues(
  domain: Pick<
    CheckedDomain,
    'name' | 'returnPathLabel' | 'trackingSubdomain' | 'sending' | 'receiving' | 'mtaSts'
  >,
): readonly Issue[] {
  const { name, returnPathLabel } = domain;
  const issues: Issue[] = [];
  const tracking = domain.trackingSubdomain ?? TRACKING_DEFAULT;
  if (!domain.sending && !domain.receiving) {
    const message = '`capabilities` must leave sending or receiving enabled.';
    issues.push({ path: 'capabilities', message });
  }
  if (tracking === returnPathLabel) {
    // RFC 1034 §3.6.2: beside a CNAME there is nothing else.
    const path = domain.trackingSubdomain === null ? 'custom_return_path' : 'tracking_subdomain';
    const message = `\`${path}\` must not be ${tracking}: return path and tracking links need different labels.`;
    issues.push({ path, message });
  }
  for (const [path, label] of [
    ['custom_return_path', returnPathLabel],
    ['tracking_subdomain', tracking],
  ] as const) {
    if (domain.mtaSts !== 'off' && label === STS_LABEL) {
      const message = `\`${path}\` must not be ${STS_LABEL}: the policy of \`mta_sts\` is there.`;
      issues.push({ path, message });
    }
    if (fitsBelow(label, name)) continue;
    issues.push({ path, message: `\`${path}\` is too long in front of this name.` });
  }
  return issues;
}

/** Undefined: not given. Null: the default. */
function checkLabel(
  given: string | null | undefined,
  path: string,
  issues: Issue[],
): string | null | undefined {
  if (given === undefined || given === null) return given;
  const label = toLabel(given);
  if (label === null) {
    const message = `\`${path}\` must be one DNS label: 1 to 63 letters, digits and hyphens, with no hyphen at either end.`;
    issues.push({ path, message });
  }
  return label;
}

function checkCapabilities(
  given: DomainCapability[] | DomainCapabilities | null | undefined,
  issues: Issue[],
): { sending?: boolean; receiving?: boolean } {
  if (given === undefined || given === null) return {};
  const entries = Array.isArray(given)
    ? given.map(({ name, enabled }) => [name, enabled] as const)
    : Object.entries(given).map(([name, state]) => [name, state === 'enabled'] as const);
  const capabilities: { sending?: boolean; receiving?: boolean } = {};
  for (const [index, [name, enabled]] of entries.entries()) {
    const path = Array.isArray(given) ? `capabilities.${index}.name` : `capabilities.${name}`;
    if (name !== 'sending' && name !== 'receiving') {
      issues.push({ path, message: `\`${path}\` must be one of 'sending','receiving'.` });
    } else if (capabilities[name] !== undefined) {
      issues.push({ path, message: `\`${path}\` names ${name} twice.` });
    } else capabilities[name] = enabled;
  }
  return capabilities;
}
