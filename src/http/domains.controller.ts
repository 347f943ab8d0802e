// Domains: what a tenant sends from and receives at, and the DNS records that make it possible.
import {
  Body,
  Controller,
  Delete,
  Example,
  Get,
  OperationId,
  Patch,
  Path,
  Post,
  Query,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId, checkLimitText } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { DomainView } from '../domains/domains.ts';
import type {
  CreateDomainRequest,
  DomainCapabilities,
  DomainCapability,
  UpdateDomainRequest,
} from '../domains/request.ts';
import type {
  DomainStatus,
  InboundDmarc,
  RecordStatus,
  StsHosting,
  TlsMode,
} from '../store/sending-domain.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** A DNS record to publish. */
export interface DomainRecord {
  /**
   * What it is for: `SPF` (the return path), `DKIM`, `Receiving`, `Tracking`; or `DMARC`, `MTA-STS` and `TLS-RPT`, which are advice
   * and hold nothing up.
   */
  record: string;
  /** Fully qualified, without a dot at its end. */
  name: string;
  type: 'MX' | 'TXT' | 'CNAME';
  /** Always `Auto`: any will do. */
  ttl: string;
  /** `temporary_failure`: it was verified and is missing now; for 72 hours nothing changes. */
  status: RecordStatus;
  value: string;
  /** Of an MX record. */
  priority?: number;
  /** What was found in its place and what to fix; null when it is right or was not looked at yet. */
  detail: string | null;
}

/** What a list shows of a domain. */
export interface DomainSummary {
  object: 'domain';
  id: string;
  name: string;
  status: DomainStatus;
  /** Kept and shown for compatibility; it has no effect. */
  region: string;
  /** The label before the name where bounces come home. */
  custom_return_path: string;
  /** That label with the name. */
  return_path: string;
  open_tracking: boolean;
  click_tracking: boolean;
  /** The label before the name where tracking links lead; null: the default, `links`. */
  tracking_subdomain: string | null;
  tls: TlsMode;
  /** What becomes of mail to this domain that the DMARC policy of its author says to reject. */
  inbound_dmarc: InboundDmarc;
  /** The mode of the MTA-STS policy that is served for the domain while it receives. */
  mta_sts: StsHosting;
  /** An array under `/api`, an object elsewhere; what `POST /domains` gets in an array it answers in one. */
  capabilities: DomainCapability[] | DomainCapabilities;
  created_at: Date;
}

/** A domain with what to publish for it. */
export interface Domain extends DomainSummary {
  records: DomainRecord[];
}

export interface DomainList {
  object: 'list';
  data: DomainSummary[];
  /** Whether there is more in the direction of travel. */
  has_more: boolean;
}

export interface DomainUpdated {
  object: 'domain';
  id: string;
}

export interface DomainDeleted {
  object: 'domain';
  id: string;
  deleted: boolean;
}

@Route('domains')
@Tags('Domains')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class DomainsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Adds a domain and makes its DKIM keys. Publish the records of the answer, then ask for verification with
   * `POST /domains/{id}/verify`.
   */
  @Post()
  @OperationId('createDomain')
  @SuccessResponse(201, 'The domain with the records to publish')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(
    422,
    'A field is missing or wrong; or you have the domain already (`domain_exists`), or another account has verified it (`domain_taken`)',
  )
  @Example<Domain>({
    object: 'domain',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'example.com',
    status: 'not_started',
    region: 'us-east-1',
    custom_return_path: 'send',
    return_path: 'send.example.com',
    open_tracking: false,
    click_tracking: false,
    tracking_subdomain: null,
    tls: 'opportunistic',
    inbound_dmarc: 'reject',
    mta_sts: 'off',
    capabilities: { sending: 'enabled', receiving: 'disabled' },
    created_at: new Date('2026-05-06T12:00:00.000Z'),
    records: [
      {
        record: 'SPF',
        name: 'send.example.com',
        type: 'MX',
        ttl: 'Auto',
        status: 'not_started',
        value: 'mail.example.net',
        priority: 10,
        detail: null,
      },
    ],
  })
  async create(
    @Request() request: express.Request,
    @Body() body: CreateDomainRequest,
  ): Promise<Domain> {
    const domain = await this.verbs.domains.create(callerOf(request), body);
    const asArray = isUnderApi(request) || Array.isArray(body.capabilities);
    this.setStatus(201);
    return present(domain, asArray);
  }

  /**
   * Lists domains, newest first, without their records.
   * @param limit 1 to 100, default 20.
   * @param after The id of the last item of the page before.
   * @param before The id of the first item of the page after.
   */
  @Get()
  @OperationId('listDomains')
  @SuccessResponse(200, 'A page')
  @Response<ErrorEnvelope>(422, 'A bad limit or cursor')
  async list(
    @Request() request: express.Request,
    @Query() limit?: number,
    @Query() after?: string,
    @Query() before?: string,
  ): Promise<DomainList> {
    checkLimitText(request.query['limit']);
    const page = await this.verbs.domains.list(callerOf(request), { limit, after, before });
    const asArray = isUnderApi(request);
    return {
      object: 'list',
      data: page.items.map((domain) => presentSummary(domain, asArray)),
      has_more: page.hasMore,
    };
  }

  /** Retrieves one domain with its records and what is known of each. */
  @Get('{id}')
  @OperationId('getDomain')
  @SuccessResponse(200, 'The domain')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async get(@Request() request: express.Request, @Path() id: string): Promise<Domain> {
    const domain = await this.verbs.domains.find(callerOf(request), checkId(id));
    if (domain === null) throw notFound();
    return present(domain, isUnderApi(request));
  }

  /** Changes settings. What is not given stays; records that become necessary have 72 hours to appear. */
  @Patch('{id}')
  @OperationId('updateDomain')
  @SuccessResponse(200, 'Changed')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(422, 'A field is wrong, or the id is not a UUID')
  @Example<DomainUpdated>({ object: 'domain', id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70' })
  async update(
    @Request() request: express.Request,
    @Path() id: string,
    @Body() body: UpdateDomainRequest,
  ): Promise<DomainUpdated> {
    const domainId = checkId(id);
    if (!(await this.verbs.domains.update(callerOf(request), domainId, body))) throw notFound();
    return { object: 'domain', id: domainId };
  }

  /**
   * Removes a domain. Its emails and their timelines stay; API keys that were bound to it are revoked; what it
   * still had scheduled fails when its time comes.
   */
  @Delete('{id}')
  @OperationId('deleteDomain')
  @SuccessResponse(200, 'Removed')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  @Example<DomainDeleted>({
    object: 'domain',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    deleted: true,
  })
  async remove(@Request() request: express.Request, @Path() id: string): Promise<DomainDeleted> {
    const domainId = checkId(id);
    if (!(await this.verbs.domains.remove(callerOf(request), domainId))) throw notFound();
    return { object: 'domain', id: domainId, deleted: true };
  }

  /**
   * Asks the DNS now and answers the domain as it is then. What is missing is asked for again by itself, for 72 hours
   * with growing pauses; a verified domain is checked every day.
   */
  @Post('{id}/verify')
  @OperationId('verifyDomain')
  @SuccessResponse(200, 'The domain with what was found')
  @Response<ErrorEnvelope>(404, 'No such domain')
  @Response<ErrorEnvelope>(
    422,
    'The id is not a UUID, or another account has verified the name (`domain_taken`)',
  )
  async verify(@Request() request: express.Request, @Path() id: string): Promise<Domain> {
    const domain = await this.verbs.domains.verify(callerOf(request), checkId(id));
    if (domain === null) throw notFound();
    return present(domain, isUnderApi(request));
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Domain not found');

/** Whether the request came by the `/api` mount. */
const isUnderApi = (request: express.Request): boolean => request.baseUrl === '/api';

function presentSummary(domain: DomainView, asArray: boolean): DomainSummary {
  const { sending, receiving } = domain;
  const word = (enabled: boolean) => (enabled ? 'enabled' : 'disabled');
  return {
    object: 'domain',
    id: domain.id,
    name: domain.name,
    status: domain.status,
    region: domain.region,
    custom_return_path: domain.returnPathLabel,
    return_path: `${domain.returnPathLabel}.${domain.name}`,
    open_tracking: domain.openTracking,
    click_tracking: domain.clickTracking,
    tracking_subdomain: domain.trackingSubdomain,
    tls: domain.tls,
    inbound_dmarc: domain.inboundDmarc,
    mta_sts: domain.mtaSts,
    capabilities: asArray
      ? [
          { name: 'sending', enabled: sending },
          { name: 'receiving', enabled: receiving },
        ]
      : { sending: word(sending), receiving: word(receiving) },
    created_at: domain.createdAt,
  };
}

function present(domain: DomainView, asArray: boolean): Domain {
  return {
    ...presentSummary(domain, asArray),
    records: domain.records.map(({ priority, ...record }) => ({
      ...record,
      ttl: 'Auto',
      ...(priority === null ? {} : { priority }),
    })),
  };
}
