// What is measured: every instrument of ours, once. The rooms count where it happens; docs/metrics.md is written from here
// by npm run generate. A label's values are a closed set, and what is counted costs a few hundred nanoseconds.
import { boundedNames, section } from './instrument.ts';

/** Seconds: of what is done within a request. */
const QUICK = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10];
/** Seconds: of a peer's answers and of our calls, which may take minutes. */
const PATIENT = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300];
/** Seconds: from acceptance on, up to the lifetime of a message. */
const LONG = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 1_800, 7_200, 43_200, 345_600];

/** Of the operator's providers.json, beside `other`. */
const PROVIDERS_MAX = 50;
/** Of a release of ours, beside `other`: more would be a mistake. */
const ROUTES_MAX = 400;

/** The name of a provider, or of a lane that ends on this machine or at the smarthost; `other` for all other hosts. */
export const providerName = boundedNames(PROVIDERS_MAX);
export const routeName = boundedNames(ROUTES_MAX);

const flow = section('Flow');

export const httpRequests = flow.counter({
  name: 'http_requests_total',
  help: 'Requests that were answered, by the template of their route (`none`: it was refused before one was found) and class of status (`left`: the client did not wait).',
  labels: ['route', 'method', 'status'],
});
export const httpDuration = flow.histogram({
  name: 'http_request_duration_seconds',
  help: 'From the first byte of a request to the end of its answer.',
  labels: ['route', 'method'],
  buckets: [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10],
});
export const acceptedEmails = flow.counter({
  name: 'emails_accepted_total',
  help: 'Emails that were stored to be delivered, by the door they came through.',
  labels: ['channel'],
});
export const attempts = flow.counter({
  name: 'attempts_total',
  help: 'Attempts at one recipient, by provider and outcome.',
  labels: ['provider', 'outcome'],
});
export const attemptCauses = flow.counter({
  name: 'attempt_causes_total',
  help: 'Attempts that did not deliver, by outcome and cause.',
  labels: ['outcome', 'cause'],
});
export const fencedResults = flow.counter({
  name: 'results_fenced_total',
  help: 'Results of attempts that came after their lease was gone and did not count.',
});
export const suppressionsAdded = flow.counter({
  name: 'suppressions_added_total',
  help: 'Addresses that were put on a suppression list, by reason.',
  labels: ['origin'],
});

const latency = section('Latency');

export const firstAttemptDelay = latency.histogram({
  name: 'first_attempt_delay_seconds',
  help: 'From acceptance (or the time that the email was scheduled for) to the claim that begins the first attempt.',
  buckets: LONG,
});
export const deliveryDelay = latency.histogram({
  name: 'delivery_delay_seconds',
  help: "From acceptance (or the time that the email was scheduled for) to the peer's answer that delivered it.",
  buckets: LONG,
});
export const attemptDuration = latency.histogram({
  name: 'attempt_duration_seconds',
  help: 'One transaction with all hosts that it tried, by provider.',
  labels: ['provider'],
  buckets: PATIENT,
});
export const attemptPhase = latency.histogram({
  name: 'attempt_phase_seconds',
  help: 'How long a peer took for its answer, by what it was to answer (`connect`: the dialling; `dot`: the whole message).',
  labels: ['phase'],
  buckets: PATIENT,
});

const queue = section('Queue');

export const queueDeliveries = queue.live({
  name: 'queue_deliveries',
  help: 'Deliveries that are not over, and dead letters, by state; counted up to a limit (mailstead_queue_count_capped).',
  labels: ['state'],
  combine: 'max',
});
export const queueCapped = queue.live({
  name: 'queue_count_capped',
  help: '1: there are more deliveries in this state than were counted.',
  labels: ['state'],
  combine: 'max',
});
export const queueLanes = queue.live({
  name: 'queue_lane_deliveries',
  help: 'Deliveries that wait, by lane and state: the lanes of known providers that have the most, and `other` for everything else.',
  labels: ['lane', 'state'],
  combine: 'max',
});
export const queueAge = queue.live({
  name: 'queue_oldest_ready_age_seconds',
  help: 'For how long the oldest delivery that may be attempted now has been due; 0: none waits.',
  combine: 'max',
});
export const queuePauses = queue.live({
  name: 'queue_pauses',
  help: 'Pauses that an operator has set.',
  combine: 'max',
});
export const queueWorkers = queue.live({
  name: 'delivery_workers',
  help: 'Delivery workers that were heard of within the last minute, on all machines.',
  combine: 'max',
});

const providers = section('Providers');

export const connections = providers.live({
  name: 'connections_open',
  help: 'Connections of delivery workers to mail hosts, by provider.',
  labels: ['provider'],
  combine: 'sum',
});
export const lanesByCircuit = providers.live({
  name: 'lanes',
  help: 'Lanes by the state of their circuit, counted in each delivery worker.',
  labels: ['circuit'],
  combine: 'sum',
});
export const blockedEgresses = providers.live({
  name: 'port25_blocked',
  help: '1: no connection to port 25 of any mail host succeeds from this egress.',
  labels: ['egress'],
  combine: 'max',
});

const inbound = section('Inbound');

export const inboundConnections = inbound.counter({
  name: 'inbound_connections_total',
  help: 'Clients at the inbound port, by whether they were let in.',
  labels: ['result'],
});
export const inboundOpen = inbound.live({
  name: 'inbound_connections_open',
  help: 'Clients that are connected to the inbound port.',
  combine: 'sum',
});
export const inboundRecipients = inbound.counter({
  name: 'inbound_recipients_total',
  help: 'Recipients that clients named, by the class of the reply.',
  labels: ['code'],
});
export const inboundMessages = inbound.counter({
  name: 'inbound_messages_total',
  help: 'Messages up to their final dot, by what became of them (`lost`: the client left before it) and the class of the reply.',
  labels: ['result', 'code'],
});
export const inboundVerdicts = inbound.counter({
  name: 'inbound_dmarc_total',
  help: 'Messages whose author was checked, by the result of DMARC.',
  labels: ['result'],
});
export const inboundBytes = inbound.counter({
  name: 'inbound_bytes_total',
  help: 'Bytes of messages that arrived whole.',
});
export const inboundDuration = inbound.histogram({
  name: 'inbound_dot_seconds',
  help: 'From the final dot of an incoming message to our reply.',
  buckets: QUICK,
});
export const forwards = inbound.counter({
  name: 'forwards_total',
  help: 'Received messages for a forwarding rule, by what became of them.',
  labels: ['status', 'reason'],
});

const beside = section('Webhooks and jobs');

export const webhookCalls = beside.counter({
  name: 'webhook_calls_total',
  help: 'Calls of webhook endpoints, by outcome.',
  labels: ['outcome'],
});
export const webhookDuration = beside.histogram({
  name: 'webhook_call_duration_seconds',
  help: 'One call of a webhook endpoint.',
  buckets: PATIENT,
});
export const webhookLag = beside.live({
  name: 'webhook_lag_seconds',
  help: 'For how long the oldest webhook event that is due has been so, endpoints that fail included; 0: none is due.',
  combine: 'max',
});
export const outboxRows = beside.live({
  name: 'outbox_events',
  help: 'What happened and is not yet made into events for endpoints; counted up to 10,000.',
  combine: 'max',
});
export const jobDuration = beside.histogram({
  name: 'job_duration_seconds',
  help: 'Runs of a job by the clock.',
  labels: ['task'],
  buckets: [0.01, 0.1, 1, 5, 15, 60, 600],
});
export const jobRuns = beside.counter({
  name: 'job_runs_total',
  help: 'Runs of jobs by the clock and turns of loops, by result.',
  labels: ['task', 'result'],
});
export const jobLastSuccess = beside.gauge({
  name: 'job_last_success_timestamp_seconds',
  help: 'When a job of this process last ended well; absent before that.',
  labels: ['task'],
  combine: 'max',
});
export const jobInterval = beside.gauge({
  name: 'job_interval_seconds',
  help: 'How often a job is to run.',
  labels: ['task'],
  combine: 'max',
});
export const alarmLag = beside.histogram({
  name: 'alarm_lag_seconds',
  help: 'How much later than asked for the clock woke a lane.',
  buckets: [0.5, 1, 2.5, 5, 10, 30, 120],
});

const database = section('Database');

export const databaseConnections = database.live({
  name: 'database_connections',
  help: 'Connections to Postgres, by whether they are in use; all pools of the appliance.',
  labels: ['state'],
  combine: 'sum',
});
export const databaseWaiting = database.live({
  name: 'database_waiting',
  help: 'Statements and transactions that wait for a connection.',
  combine: 'sum',
});
export const databaseDuration = database.histogram({
  name: 'database_statement_seconds',
  help: 'From giving a statement to a connection to its answer.',
  buckets: [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 15],
});
export const databaseErrors = database.counter({
  name: 'database_errors_total',
  help: 'Statements that failed, by the class of their SQLSTATE, or `timeout`, or `connection`.',
  labels: ['class'],
});
export const blobOperations = database.counter({
  name: 'blob_operations_total',
  help: 'Operations on the blob store, by result.',
  labels: ['operation', 'result'],
});
export const blobDuration = database.histogram({
  name: 'blob_operation_seconds',
  help: 'Operations on the blob store; of `read`, until the first bytes may be read.',
  labels: ['operation'],
  buckets: QUICK,
});
export const diskBytes = database.live({
  name: 'data_dir_bytes',
  help: 'The file system that the data folder lies on: its size, and what is free of it.',
  labels: ['kind'],
  combine: 'max',
});

const appliance = section('Appliance');

export const ready = appliance.live({
  name: 'ready',
  help: '1: everything that this process is to do works, as `GET /health/ready` says.',
  combine: 'max',
});
export const buildInfo = appliance.live({
  name: 'build_info',
  help: 'Always 1; which release runs, on which Node, with which roles.',
  labels: ['version', 'node', 'roles'],
  combine: 'max',
});
export const certificateExpiry = appliance.live({
  name: 'certificate_expiry_timestamp_seconds',
  help: 'When the certificate that our SMTP listeners show ends.',
  combine: 'max',
});
