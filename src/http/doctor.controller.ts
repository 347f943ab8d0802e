// The doctor for whoever runs the appliance: what it last found, and looking now. The gate (app.ts) lets only operators come
// this far; for every other key these routes do not exist.
import {
  Controller,
  Example,
  Get,
  OperationId,
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
import { Refusal, refuseFields } from '../access/refusal.ts';
import { worstOf } from '../doctor/finding.ts';
import type { KeptLook } from '../doctor/kept.ts';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** `unknown`: it could not be looked at twice in a row, or for the first time. */
export type DoctorSeverity = 'error' | 'warning' | 'unknown' | 'info' | 'ok';

/** One fact about one subject. */
export interface DoctorFinding {
  /** What was looked at, such as `reverse_dns`. */
  code: string;
  /** An address, a domain, a table, a folder. */
  subject: string;
  severity: DoctorSeverity;
  /** What is so. */
  message: string;
  /** What to do; null where there is nothing to do. */
  advice: string | null;
  /** What else was seen; its fields depend on `code`. */
  detail: Record<string, unknown>;
  /** Since when it has this severity. */
  since: Date;
  /** When it was last seen to be so. */
  seen_at: Date;
}

/** How many findings there are of each severity. */
export interface DoctorCounts {
  error: number;
  warning: number;
  unknown: number;
  info: number;
  ok: number;
}

export interface DoctorState {
  object: 'doctor';
  /** When it last looked; null: not yet. */
  looked_at: Date | null;
  /** The worst severity that was found. */
  status: DoctorSeverity;
  counts: DoctorCounts;
  /** The worst first, at most 500. */
  findings: { data: DoctorFinding[]; has_more: boolean };
}

const EXAMPLE: DoctorState = {
  object: 'doctor',
  looked_at: new Date('2026-08-01T10:00:00.000Z'),
  status: 'error',
  counts: { error: 1, warning: 0, unknown: 0, info: 1, ok: 34 },
  findings: {
    data: [
      {
        code: 'reverse_dns',
        subject: '203.0.113.7',
        severity: 'error',
        message:
          '203.0.113.7 has no PTR record; Gmail, Yahoo and others refuse mail from such an address.',
        advice:
          'Have the owner of the address (the hosting provider, in its control panel) set its PTR record to mail.example.com.',
        detail: {},
        since: new Date('2026-07-31T08:10:00.000Z'),
        seen_at: new Date('2026-08-01T10:00:00.000Z'),
      },
    ],
    has_more: false,
  },
};

@Route('doctor')
@Tags('Doctor')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(404, 'Not a full-access key of the first tenant')
@Response<ErrorEnvelope>(422, 'A query parameter is wrong')
@Response<ErrorEnvelope>(429, 'Too many requests, or the doctor has just looked')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class DoctorController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /**
   * What the doctor last found: the surroundings of the appliance (DNS, ports, certificates, clock, disk, database), its
   * domains and the appliance itself. It looks every ten minutes. For the operator: a full-access key of the first tenant.
   */
  @Get()
  @OperationId('getDoctor')
  @SuccessResponse(200, 'What was found')
  @Example<DoctorState>(EXAMPLE)
  async get(@Request() request: express.Request): Promise<DoctorState> {
    this.checkOperator(request);
    return present(await this.verbs.doctor.read());
  }

  /**
   * Looks now, which takes up to a minute, and answers what was found; once in 75 seconds at most. With `active=true` mail
   * hosts of others are dialled as well, to see whether port 25 is open.
   *
   * @param active `true` or `false`, the default.
   */
  @Post('run')
  @OperationId('runDoctor')
  @SuccessResponse(200, 'What was found')
  @Example<DoctorState>(EXAMPLE)
  async run(@Request() request: express.Request, @Query() active?: string): Promise<DoctorState> {
    this.checkOperator(request);
    if (active !== undefined && active !== 'true' && active !== 'false') {
      throw refuseFields([{ path: 'active', message: '`active` must be `true` or `false`.' }]);
    }
    return present(await this.verbs.doctor.look({ isActive: active === 'true' }));
  }

  /** The gate has looked already; a route that is reached past it stays closed. */
  private checkOperator(request: express.Request): void {
    if (!this.verbs.queue.isOperator(callerOf(request))) {
      throw new Refusal('not_found', 'There is no such thing here.');
    }
  }
}

function present({ lookedAt, counts, findings, hasMore }: KeptLook): DoctorState {
  return {
    object: 'doctor',
    looked_at: lookedAt,
    status: worstOf(findings),
    counts,
    findings: {
      data: findings.map((finding) => ({
        code: finding.code,
        subject: finding.subject,
        severity: finding.severity,
        message: finding.message,
        advice: finding.advice,
        detail: finding.detail,
        since: finding.since,
        seen_at: finding.seenAt,
      })),
      has_more: hasMore,
    },
  };
}
