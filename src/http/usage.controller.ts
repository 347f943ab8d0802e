// How much a tenant used.
import {
  Controller,
  Example,
  Get,
  OperationId,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import type { EmailUsage } from '../access/usage.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** Emails in a period. */
export interface UsageOfEmails {
  /** `sent` and `received` together. */
  used: number;
  /** Null: there is none. */
  limit: number | null;
  /** Accepted in this period, each once however many recipients it has. */
  sent: number;
  /** Received in this period. */
  received: number;
  /** When the next period begins, in UTC. */
  resets_at: Date;
}

export interface UsageCount {
  used: number;
  /** Null: there is none. */
  limit: number | null;
}

/** What the tenant has and did. */
export interface Usage {
  object: 'usage';
  emails: { daily: UsageOfEmails; monthly: UsageOfEmails };
  contacts: UsageCount;
  segments: UsageCount;
  broadcasts: UsageCount;
  /** Always 0; for programs that ask. */
  ai_credits: { used: number; limit: number | null; next_increase_at: Date | null };
  /** Begun this month. */
  automation_runs: { used: number; limit: number | null; resets_at: Date };
  domains: UsageCount;
  /** So many API requests in each `duration`. */
  rate_limit: { limit: number; duration: string };
}

@Route('usage')
@Tags('Usage')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key, or one that can only send')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class UsageController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Retrieves how much is used. There are no quotas. Counts above 100,000 may be a minute old. */
  @Get()
  @OperationId('getUsage')
  @SuccessResponse(200, 'The counts')
  @Example<Usage>({
    object: 'usage',
    emails: {
      daily: {
        used: 130,
        limit: null,
        sent: 120,
        received: 10,
        resets_at: new Date('2026-05-07T00:00:00.000Z'),
      },
      monthly: {
        used: 2_450,
        limit: null,
        sent: 2_400,
        received: 50,
        resets_at: new Date('2026-06-01T00:00:00.000Z'),
      },
    },
    contacts: { used: 1_200, limit: null },
    segments: { used: 3, limit: null },
    broadcasts: { used: 12, limit: null },
    ai_credits: { used: 0, limit: null, next_increase_at: null },
    automation_runs: { used: 40, limit: null, resets_at: new Date('2026-06-01T00:00:00.000Z') },
    domains: { used: 2, limit: null },
    rate_limit: { limit: 1_000, duration: '1s' },
  })
  async get(@Request() request: express.Request): Promise<Usage> {
    const usage = await this.verbs.usage.read(callerOf(request).tenantId);
    const { requests, windowMs } = usage.rateLimit;
    return {
      object: 'usage',
      emails: { daily: presentEmails(usage.daily), monthly: presentEmails(usage.monthly) },
      contacts: count(usage.contacts),
      segments: count(usage.segments),
      broadcasts: count(usage.broadcasts),
      ai_credits: { used: 0, limit: null, next_increase_at: null },
      automation_runs: { ...count(usage.automationRuns), resets_at: usage.monthly.resetsAt },
      domains: count(usage.domains),
      rate_limit: { limit: requests, duration: `${windowMs / 1_000}s` },
    };
  }
}

const count = (used: number): UsageCount => ({ used, limit: null });

const presentEmails = ({ sent, received, resetsAt }: EmailUsage): UsageOfEmails => ({
  used: sent + received,
  limit: null,
  sent,
  received,
  resets_at: resetsAt,
});
