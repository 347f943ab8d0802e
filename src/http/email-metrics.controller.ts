// What became of emails, counted.
import {
  Controller,
  Example,
  Get,
  OperationId,
  Queries,
  Request,
  Response,
  Route,
  Security,
  SuccessResponse,
  Tags,
} from '@tsoa/runtime';
import type express from 'express';
import { callerOf } from './authenticate.ts';
import type { ErrorEnvelope } from './envelope.ts';
import type { Verbs } from './verbs.ts';

/** Lists may be repeated or have commas. */
export interface EmailMetricsQuery {
  /** Emails created then or later: a date (UTC) or an ISO 8601 time; by default 6 days before `end_date`. */
  start_date?: string;
  /** Emails created before that, at most 400 days after `start_date`; by default, and at most, now. */
  end_date?: string;
  /** A name of the IANA database; where periods begin. By default UTC. */
  timezone?: string;
  /** `hourly`, `daily` (the default), `weekly` or `monthly`; at most 10,000 periods. */
  granularity?: string;
  /** By default all. */
  metrics?: string[];
  /** `period`, `domain`, `email`, `broadcast`; by default none, and then there is no `data`. */
  dimensions?: string[];
  /** Only emails from these sending domains; at most 100. */
  domain_id?: string[];
  /** Only these emails; at most 100. */
  email_id?: string[];
  /** Only emails of these broadcasts; at most 100. */
  broadcast_id?: string[];
}

/**
 * Counts of emails, each in the period of its creation and by what it shows now; rates are percentages. Opens, clicks and
 * unsubscribes count in the period of their email; those of machines do not count.
 */
export interface EmailMetrics {
  object: 'metrics';
  start_date: Date;
  end_date: Date;
  metrics: string[];
  dimensions: string[];
  granularity: string;
  totals: { [metric: string]: number };
  /**
   * For each combination of the dimensions `period` (its first day, or the hour), `domain_id` and `domain_name`,
   * `email_id`, `broadcast_id` and `broadcast_name` (mail of broadcasts only), and the metrics.
   */
  data?: { [name: string]: string | number | null }[];
}

@Route('emails/metrics')
@Tags('Emails')
@Security('api_key')
@Response<ErrorEnvelope>(401, 'Missing or invalid API key')
@Response<ErrorEnvelope>(429, 'Too many requests')
@Response<ErrorEnvelope>(500, 'A fault on our side')
@Response<ErrorEnvelope>(503, 'The database is away')
export class EmailMetricsController extends Controller {
  private readonly verbs: Verbs;

  constructor(verbs: Verbs) {
    super();
    this.verbs = verbs;
  }

  /** Counts emails by what became of them, and received ones (`received`). */
  @Get()
  @OperationId('getEmailMetrics')
  @SuccessResponse(200, 'The counts')
  @Response<ErrorEnvelope>(422, 'A parameter is wrong')
  @Example<EmailMetrics>({
    object: 'metrics',
    start_date: new Date('2026-05-01T00:00:00.000Z'),
    end_date: new Date('2026-05-02T00:00:00.000Z'),
    metrics: ['sent', 'delivery_rate'],
    dimensions: ['period'],
    granularity: 'daily',
    totals: { sent: 1204, delivery_rate: 98.8 },
    data: [{ period: '2026-05-01', sent: 1204, delivery_rate: 98.8 }],
  })
  async metrics(
    @Request() request: express.Request,
    @Queries() query: EmailMetricsQuery,
  ): Promise<EmailMetrics> {
    const found = await this.verbs.emailMetrics(callerOf(request), {
      startDate: query.start_date,
      endDate: query.end_date,
      timezone: query.timezone,
      granularity: query.granularity,
      metrics: query.metrics,
      dimensions: query.dimensions,
      domainIds: query.domain_id,
      emailIds: query.email_id,
      broadcastIds: query.broadcast_id,
    });
    return {
      object: 'metrics',
      start_date: found.startDate,
      end_date: found.endDate,
      metrics: [...found.metrics],
      dimensions: [...found.dimensions],
      granularity: found.granularity,
      totals: { ...found.totals },
      ...(found.data === null ? {} : { data: found.data.map((row) => ({ ...row })) }),
    };
  }
}
