// What a received email looks like, for the reference. Written out twice: its generator reads no spread.
import type {
  ReceivedEmailFound,
  ReceivedEmailSummary,
  ReceivedRouteDecision,
} from './email-receiving.controller.ts';

const decisions: ReceivedRouteDecision[] = [
  {
    recipient: 'Support+urgent@example.com',
    status: 'exact',
    route_id: '019e6f0a-0b7d-7000-a1d4-5c9e27f0b331',
    route_type: 'exact',
    local_part: 'support',
    domain_id: '019e6f09-e2c4-7000-9c55-13d8a06be417',
    target_address: 'support@example.com',
    forwarding_rule_id: '019e6f0a-1f90-7000-b6a2-9e04d1c87f25',
  },
];

export const receivedExample: ReceivedEmailSummary = {
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  from: 'Ada Lovelace <ada@outside.example>',
  to: ['support@example.com'],
  cc: null,
  bcc: null,
  reply_to: null,
  received_for: ['Support+urgent@example.com'],
  subject: 'Re: Your invoice',
  message_id: '<CAF1x@outside.example>',
  attachments: [],
  route_decisions: decisions,
  answers_email_id: '019e6ef0-77aa-7000-8123-8f6e2d90c4b1',
  parsing: 'complete',
  created_at: new Date('2026-05-06T07:08:09.000Z'),
};

export const receivedFoundExample: ReceivedEmailFound = {
  object: 'email',
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  from: 'Ada Lovelace <ada@outside.example>',
  to: ['support@example.com'],
  cc: null,
  bcc: null,
  reply_to: null,
  received_for: ['Support+urgent@example.com'],
  subject: 'Re: Your invoice',
  message_id: '<CAF1x@outside.example>',
  attachments: [],
  route_decisions: decisions,
  answers_email_id: '019e6ef0-77aa-7000-8123-8f6e2d90c4b1',
  parsing: 'complete',
  created_at: new Date('2026-05-06T07:08:09.000Z'),
  html: '<p>Paid today.</p>',
  html_format: 'data_uri',
  text: 'Paid today.',
  headers: { from: 'Ada Lovelace <ada@outside.example>', subject: 'Re: Your invoice' },
  raw: {
    download_url: 'https://mail.example.com/links/cmVjZWl2ZWRfcmF3.c2lnbmF0dXJl',
    expires_at: new Date('2026-05-06T08:08:09.000Z'),
  },
  authentication: {
    spf: { result: 'pass', domain: 'outside.example', reason: null },
    dkim: [
      {
        result: 'pass',
        domain: 'outside.example',
        selector: 's1',
        aligned: true,
        reason: null,
      },
    ],
    dmarc: {
      result: 'pass',
      domain: 'outside.example',
      policy: 'reject',
      aligned: { spf: true, dkim: true },
      reason: null,
    },
    arc: { result: 'none', sealer: null, instances: 0 },
    verdict: 'accepted',
  },
  forwarding_attempts: [
    {
      id: '019e6f0a-5a1c-7001-9b0e-70d2c6f1a834',
      rule_id: '019e6f0a-1f90-7000-b6a2-9e04d1c87f25',
      recipient: 'Support+urgent@example.com',
      destinations: ['team@elsewhere.example'],
      status: 'queued',
      reason: null,
      explanation: 'Relayed as it came: the signature of outside.example is still valid there.',
      method: 'relayed',
      email_id: '019e6f0a-5f02-7000-8c1d-3e9b7a45d610',
      created_at: new Date('2026-05-06T07:08:09.500Z'),
    },
  ],
  mail_from: 'ada@outside.example',
  remote_address: '192.0.2.25',
  helo: 'mx.outside.example',
  content_removed_at: null,
};
