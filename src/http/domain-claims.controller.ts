// Claims of domains that another account has verified.
import {
  Body,
  Controller,
  Example,
  Get,
  OperationId,
  Path,
  Post,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { checkId } from '../access/page.ts';
import { Refusal } from '../access/refusal.ts';
import type { ClaimView } from '../domains/claims.ts';
import type { ClaimDomainRequest } from '../domains/request.ts';
import type { BlockedReason, ClaimStatus } from '../store/domain-claim.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

export interface DomainClaimRecord {
  type: 'TXT';
  /** Fully qualified, without a dot at its end. */
  name: string;
  value: string;
  /** Always `Auto`: any will do. */
  ttl: string;
}

/** A claim of a name. */
export interface DomainClaim {
  object: 'domain_claim';
  id: string;
  name: string;
  /** `completed`: the name is yours; verify its domain next. */
  status: ClaimStatus;
  /** The domain that was made for the claim; removing it cancels the claim. */
  domain_id: string;
  region: string;
  /** What to publish, and to keep until the claim is completed. */
  record: DomainClaimRecord;
  /** Why a proven claim still waits, 72 hours at most; null unless `blocked`. */
  blocked_reason: BlockedReason | null;
  failure_reason: string | null;
  created_at: Date;
  expires_at: Date;
}

@Route('domains')
@Tags('Domains')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class DomainClaimsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * Claims a name that another account has verified, and makes a domain for it. The answer has a TXT record; publish
   * it, then ask for `POST /domains/{id}/claim/verify`. The same claim again answers 200 with the open one.
   */
  @Post('claim')
  @OperationId('claimDomain')
  @SuccessResponse(201, 'The claim; 200 when it was open already')
  @Response<ErrorEnvelope>(400, 'The body is not JSON')
  @Response<ErrorEnvelope>(
    422,
    'A field is missing or wrong, or you have the domain already (`domain_exists`)',
  )
  @Example<DomainClaim>({
    object: 'domain_claim',
    id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    name: 'example.com',
    status: 'pending',
    domain_id: '019e6f0a-5a1c-7001-8f3e-2b6a4c1d9e70',
    region: 'us-east-1',
    record: {
      type: 'TXT',
      name: '_mailstead-claim.example.com',
      value: 'mailstead-claim=…',
      ttl: 'Auto',
    },
    blocked_reason: null,
    failure_reason: null,
    created_at: new Date('2026-05-06T12:00:00.000Z'),
    expires_at: new Date('2026-05-13T12:00:00.000Z'),
  })
  async create(
    @Request() request: express.Request,
    @Body() body: ClaimDomainRequest,
  ): Promise<DomainClaim> {
    const { claim, isNew } = await this.verbs.domains.claims.create(callerOf(request), body);
    this.setStatus(isNew ? 201 : 200);
    return present(claim);
  }

  /** Retrieves the latest claim of a domain. */
  @Get('{id}/claim')
  @OperationId('getDomainClaim')
  @SuccessResponse(200, 'The claim')
  @Response<ErrorEnvelope>(404, 'No such domain, or it was never claimed')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async get(@Request() request: express.Request, @Path() id: string): Promise<DomainClaim> {
    const claim = await this.verbs.domains.claims.find(callerOf(request), checkId(id));
    if (claim === null) throw notFound();
    return present(claim);
  }

  /**
   * Looks for the record of the claim now. When it is there, the other account loses the name; where that account
   * still sends from it or has emails scheduled, the claim is `blocked` for up to 72 hours first.
   */
  @Post('{id}/claim/verify')
  @OperationId('verifyDomainClaim')
  @SuccessResponse(200, 'The claim as it is now')
  @Response<ErrorEnvelope>(404, 'No such domain, or it was never claimed')
  @Response<ErrorEnvelope>(422, 'The id is not a UUID')
  async verify(@Request() request: express.Request, @Path() id: string): Promise<DomainClaim> {
    const claim = await this.verbs.domains.claims.verify(callerOf(request), checkId(id));
    if (claim === null) throw notFound();
    return present(claim);
  }
}

const notFound = (): Refusal => new Refusal('not_found', 'Domain claim not found');

const present = (claim: ClaimView): DomainClaim => ({
  object: 'domain_claim',
  id: claim.id,
  name: claim.name,
  status: claim.status,
  domain_id: claim.domainId,
  region: claim.region,
  record: { type: 'TXT', ...claim.record, ttl: 'Auto' },
  blocked_reason: claim.blockedReason,
  failure_reason: claim.failureReason,
  created_at: claim.createdAt,
  expires_at: claim.expiresAt,
});
