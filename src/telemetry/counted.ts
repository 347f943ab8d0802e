// What is counted the same way in several places.
import { acceptedEmails, jobDuration, jobLastSuccess, jobRuns } from './instruments.ts';
import { beginSpan, isTracing, placeOfEmail, traced, type Span } from './trace.ts';

/** Doors by what the timeline calls them (`via`), where that is another word. */
const CHANNELS: Readonly<Record<string, string>> = {
  http: 'api',
  tls_report: 'report',
  dsn: 'report',
  returned: 'forward',
};

interface AcceptedEmail {
  readonly id: string;
  readonly tenantId: string;
  readonly accepted: Readonly<Record<string, unknown>>;
}

/** They are stored: call it after the commit, once. `within`: the span of their acceptance. */
export function noteAccepted(emails: readonly AcceptedEmail[], within: Span | null = null): void {
  for (const { id, tenantId, accepted } of emails) {
    const via = String(accepted['via']);
    acceptedEmails.inc({ channel: CHANNELS[via] ?? via });
    if (!isTracing()) continue;
    beginSpan('email', {
      as: placeOfEmail(id),
      links: within === null ? [] : [within.place],
      attributes: {
        'mailstead.email_id': id,
        'mailstead.tenant_id': tenantId,
        'mailstead.channel': CHANNELS[via] ?? via,
      },
    })?.end();
  }
}

/** Runs a job by the clock and says how it went; rejects as the job does. */
export async function runJob(task: string, work: () => Promise<void>): Promise<void> {
  const begunAt = performance.now();
  let result = 'failed';
  try {
    await traced('job', { attributes: { 'mailstead.task': task }, parent: null }, work);
    result = 'done';
    jobLastSuccess.set({ task }, Date.now() / 1_000);
  } finally {
    jobRuns.inc({ task, result });
    jobDuration.observe({ task }, (performance.now() - begunAt) / 1_000);
  }
}
