// The settings: what is accepted, and what is refused in which words.
import { Resolver } from 'node:dns';
import { resolve } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ConfigError, loadConfig } from '../src/config.ts';
import type { Config } from '../src/config.ts';
import { API_KEY, env, problemsOf, SECRET } from './support/settings.ts';
import type { Env } from './support/settings.ts';

const PRODUCTION: Env = {
  MAILSTEAD_MODE: 'production',
  MAILSTEAD_PUBLIC_URL: 'https://mail.example.com',
  MAILSTEAD_HOSTNAME: 'mail.example.com',
  MAILSTEAD_SECRET: SECRET,
};

/** URL and Set print as {} in a deep comparison, so they are spelt out. */
function plain(config: Config): Record<string, unknown> {
  return {
    ...config,
    roles: [...config.roles],
    smarthostUrl: config.smarthostUrl?.href ?? null,
  };
}

// ---- what is accepted ------------------------------------------------------------------------

const accepted = suite('config: accepted');

accepted('development defaults', () => {
  assert.equal(plain(loadConfig({})), {
    mode: 'development',
    dataDir: resolve('data'),
    databaseUrl: null,
    mongodbUrl: null,
    httpPort: 3000,
    httpHost: null,
    publicUrl: 'http://localhost:3000',
    hostname: 'localhost',
    mxPort: 2525,
    submissionPort: 2587,
    submissionsPort: 2465,
    metricsPort: 9464,
    tlsCert: null,
    tlsKey: null,
    apiKey: null,
    secret: null,
    delivery: 'sink',
    smarthostUrl: null,
    dnsServers: null,
    mxDestinationPort: 25,
    privateHosts: [],
    retryScheduleMs: [60e3, 300e3, 600e3, 1200e3, 2400e3, 3600e3, 7200e3, 14_400e3],
    messageLifetimeMs: 4 * 86_400e3,
    rateLimit: { requests: 600, windowMs: 1000 },
    roles: ['api', 'mx', 'submission', 'delivery', 'jobs'],
    workers: 1,
    blobStore: 'disk',
    logLevel: 'info',
  });
});

accepted('production changes exactly these', () => {
  const development = plain(loadConfig({}));
  const production = plain(loadConfig(PRODUCTION));
  const changed = Object.entries(production).filter(
    ([key, value]) => JSON.stringify(value) !== JSON.stringify(development[key]),
  );
  assert.equal(Object.fromEntries(changed), {
    mode: 'production',
    dataDir: '/data',
    publicUrl: 'https://mail.example.com',
    hostname: 'mail.example.com',
    mxPort: 25,
    submissionPort: 587,
    submissionsPort: 465,
    secret: SECRET,
    delivery: 'direct',
    rateLimit: { requests: 100, windowMs: 1000 },
  });
});

const SHARED = { DATABASE_URL: 'postgres://db.test/m', SECRET: 'x'.repeat(32) };

const ACCEPTED: readonly (readonly [string, Env, Readonly<Record<string, unknown>>])[] = [
  [
    'the port goes into the public URL',
    { HTTP_PORT: '8080' },
    { publicUrl: 'http://localhost:8080' },
  ],
  ['a free port', { HTTP_PORT: '0' }, { httpPort: 0, publicUrl: 'http://localhost:0' }],
  ['an IPv6 host', { HTTP_HOST: '::1' }, { httpHost: '::1' }],
  ['a host name as host', { HTTP_HOST: 'localhost' }, { httpHost: 'localhost' }],
  ['a relative data folder', { DATA_DIR: 'var/x' }, { dataDir: resolve('var/x') }],
  [
    'no slash at the end',
    { PUBLIC_URL: 'https://A.example//' },
    { publicUrl: 'https://a.example' },
  ],
  ['a path', { PUBLIC_URL: 'https://a.example/mail/' }, { publicUrl: 'https://a.example/mail' }],
  ['a host name in lower case', { HOSTNAME: 'MX.Example.COM' }, { hostname: 'mx.example.com' }],
  ['an API key', { API_KEY }, { apiKey: API_KEY }],
  [
    'Postgres and MongoDB',
    {
      DATABASE_URL: 'postgresql://u:p@db.test/m',
      MONGODB_URL: 'mongodb://u:p@a.test:1,b.test:2/m?replicaSet=r',
    },
    {
      databaseUrl: 'postgresql://u:p@db.test/m',
      mongodbUrl: 'mongodb://u:p@a.test:1,b.test:2/m?replicaSet=r',
    },
  ],
  [
    'a smarthost',
    { DELIVERY: 'smarthost', SMARTHOST_URL: 'smtp://u:p%40@relay.test:587' },
    { delivery: 'smarthost', smarthostUrl: 'smtp://u:p%40@relay.test:587' },
  ],
  [
    'a smarthost at an IPv6 address',
    { DELIVERY: 'smarthost', SMARTHOST_URL: 'smtps://[::1]' },
    { smarthostUrl: 'smtps://[::1]' },
  ],
  [
    'DNS servers',
    { DNS_SERVERS: '127.0.0.1:5353, 192.0.2.1,[::1],[::1]:53' },
    { dnsServers: ['127.0.0.1:5353', '192.0.2.1', '[::1]', '[::1]:53'] },
  ],
  [
    'private hosts',
    { PRIVATE_HOSTS: '127.0.0.0/8,::1/128' },
    { privateHosts: ['127.0.0.0/8', '::1/128'] },
  ],
  [
    'every unit of time',
    { RETRY_SCHEDULE: '100ms,90s,1m,2h,4d' },
    { retryScheduleMs: [100, 90_000, 60_000, 7_200_000, 345_600_000] },
  ],
  [
    'fifty delays',
    { RETRY_SCHEDULE: Array(50).fill('1s').join(',') },
    { retryScheduleMs: Array(50).fill(1000) },
  ],
  ['a rate', { RATE_LIMIT: '5/2m' }, { rateLimit: { requests: 5, windowMs: 120_000 } }],
  ['fewer roles', { ROLES: 'jobs,delivery, api' }, { roles: ['jobs', 'delivery', 'api'] }],
  ['roles apart', { ROLES: 'delivery', ...SHARED }, { roles: ['delivery'] }],
  [
    'a certificate',
    { TLS_CERT: 'a/cert.pem', TLS_KEY: '/key.pem' },
    { tlsCert: resolve('a/cert.pem'), tlsKey: '/key.pem' },
  ],
  ['submission alone', { ROLES: 'submission', ...SHARED }, { roles: ['submission'] }],
  ['no workers', { WORKERS: '0' }, { workers: 0 }],
  ['the disk', { BLOB_STORE: 'disk' }, { blobStore: 'disk' }],
  ...[
    's3://bucket',
    's3://bucket/of/ours?region=eu-1',
    's3://key:pass%2Fword@my.bucket?endpoint=http://127.0.0.1:9000&region=x',
  ].map((url) => [url, { BLOB_STORE: url }, { blobStore: url }] as const),
  ['empty is absent', { HTTP_PORT: '', MX_PORT: '', ROLES: '', TYPO: '' }, { httpPort: 3000 }],
  ['names of the test suite', { TEST_ANYTHING: 'x', CORPORA: '/somewhere' }, { httpPort: 3000 }],
  ['a secret of 32 characters', { SECRET: 'x'.repeat(32) }, { secret: 'x'.repeat(32) }],
];

for (const [title, variables, expected] of ACCEPTED) {
  accepted(title, () => {
    const config = plain(loadConfig(env(variables)));
    const found = Object.keys(expected).map((key) => [key, config[key]]);
    assert.equal(Object.fromEntries(found), expected);
  });
}

accepted('variables of other programs are left alone', () => {
  assert.equal(problemsOf({ PATH: '/bin', mailstead_x: 'x', XMAILSTEAD_MODE: 'x' }), []);
});

accepted('the DNS servers are what the resolver takes', () => {
  const { dnsServers } = loadConfig(env({ DNS_SERVERS: '127.0.0.1:5353,[::1],[::1]:54' }));
  const resolver = new Resolver();
  resolver.setServers(dnsServers ?? []);
  assert.equal(resolver.getServers(), ['127.0.0.1:5353', '::1', '[::1]:54']);
});

accepted('the result is frozen, all the way down', () => {
  const config = loadConfig(env({ DNS_SERVERS: '127.0.0.1', PRIVATE_HOSTS: '10.0.0.0/8' }));
  for (const part of [
    config,
    config.dnsServers,
    config.privateHosts,
    config.retryScheduleMs,
    config.rateLimit,
    loadConfig({}).privateHosts,
  ]) {
    assert.ok(Object.isFrozen(part));
  }
  assert.throws(() => Object.assign(config, { httpPort: 1 }), TypeError);
});

accepted.run();

// ---- what is refused -------------------------------------------------------------------------

const refused = suite('config: refused');

/** Each case has exactly one problem, which names the setting, the value and what is allowed. */
const REFUSED: readonly (readonly [name: string, value: string, says: RegExp])[] = [
  ['MODE', 'prod', /is "prod", but it must be one of `development`, `production`\.$/],
  ['HTTP_PORT', '65536', /is "65536", but it must be a whole number from 0 to 65535\.$/],
  ['HTTP_PORT', '3e3', /"3e3"/],
  ['HTTP_PORT', ' 80', /" 80"/],
  ['HTTP_HOST', '[::1]', /IPv6 without brackets/],
  ['HTTP_HOST', '300.1.1.1', /"300\.1\.1\.1"/],
  ['PUBLIC_URL', 'mail.example.com', /must be an `http:\/\/` or `https:\/\/` URL/],
  ['PUBLIC_URL', 'ftp://a.example', /"ftp:/],
  ['PUBLIC_URL', 'https://a.example/?q', /without user, query and fragment/],
  ['PUBLIC_URL', 'https://a.example\n.test', /"https:\/\/a\.example\\n\.test"/],
  ['HOSTNAME', 'mail', /fully qualified/],
  ['HOSTNAME', '192.0.2.1', /"192\.0\.2\.1"/],
  ['HOSTNAME', 'a_b.example', /DNS name/],
  ['HOSTNAME', 'mail.example.', /DNS name/],
  ['HOSTNAME', `${'a'.repeat(64)}.example`, /DNS name/],
  ['HOSTNAME', 'bücher.example', /in ASCII/],
  ['DELIVERY', 'smtp', /one of `sink`, `direct`, `smarthost`/],
  ['DELIVERY', 'smarthost', /needs MAILSTEAD_SMARTHOST_URL/],
  ['DNS_SERVERS', '::1', /IPv6 in brackets/],
  ['DNS_SERVERS', 'dns.example', /`ip` or `ip:port`/],
  ['DNS_SERVERS', '192.0.2.1:0', /"192\.0\.2\.1:0"/],
  ['DNS_SERVERS', '[192.0.2.1]', /`ip:port`/],
  ['DNS_SERVERS', '192.0.2.1,', /comma list/],
  ['MX_DESTINATION_PORT', '0', /from 1 to 65535/],
  ['PRIVATE_HOSTS', '10.0.0.1', /CIDR/],
  ['PRIVATE_HOSTS', '10.0.0.0/33', /CIDR/],
  ['PRIVATE_HOSTS', 'localhost/8', /CIDR/],
  ['RETRY_SCHEDULE', '1m,5', /a duration from `100ms` to `30d`/],
  ['RETRY_SCHEDULE', '99ms', /"99ms"/],
  ['RETRY_SCHEDULE', Array(51).fill('1s').join(','), /comma list of 1 to 50/],
  ['MESSAGE_LIFETIME', '4 days', /"4 days"/],
  ['MESSAGE_LIFETIME', '31d', /to `30d`/],
  ['RATE_LIMIT', '600', /`600\/1s`/],
  ['RATE_LIMIT', '0/1s', /"0\/1s"/],
  ['RATE_LIMIT', '1/1s/1s', /"1\/1s\/1s"/],
  ['ROLES', 'api,smtp', /comma list of `api`, `mx`/],
  ['WORKERS', '-1', /from 0 to 256/],
  ['WORKERS', '257', /from 0 to 256/],
  ['LOG_LEVEL', 'verbose', /`fatal`, .*`silent`/],
  ['MX_PORT', '65536', /from 0 to 65535/],
  ['SUBMISSION_PORT', 'smtp', /from 0 to 65535/],
  ['SUBMISSIONS_PORT', '-1', /from 0 to 65535/],
  ['METRICS_PORT', '65536', /from 0 to 65535/],
  ['TLS_CERT', '/cert.pem', /needs MAILSTEAD_TLS_KEY/],
  ['TLS_KEY', '/key.pem', /needs MAILSTEAD_TLS_CERT/],
  ['SECERT', SECRET, /is not a setting; did you mean MAILSTEAD_SECRET\?$/],
  ['HTTP_PROT_FILE', '/x', /did you mean MAILSTEAD_HTTP_PORT_FILE\?$/],
  ['QUITE_ELSE', 'x', /is not a setting; leave it out\.$/],
];

for (const [name, value, says] of REFUSED) {
  refused(`${name}=${value.slice(0, 40)}`, () => {
    const problems = problemsOf(env({ [name]: value }));
    assert.is(problems.length, 1, problems.join('\n'));
    assert.match(problems[0] ?? '', says);
    assert.ok(problems[0]?.startsWith(`MAILSTEAD_${name} `));
    assert.not.match(problems[0] ?? '', /\n/);
  });
}

const BAD_SECRETS: readonly (readonly [name: string, value: string])[] = [
  ['API_KEY', 're_hunter2_x'],
  ['API_KEY', 're_hunter2-_0123456789abcdefghijklmn'],
  ['SECRET', 'hunter2'],
  ['SECRET', `hunter2${'x'.repeat(40)}\n${'x'.repeat(40)}`],
  ['DATABASE_URL', 'mysql://u:hunter2@db.test/m'],
  ['DATABASE_URL', 'postgres://u:hunter2@:not a port/m'],
  ['MONGODB_URL', 'http://u:hunter2@db.test'],
  ['SMARTHOST_URL', 'smtp://u:hunter2@'],
  ['SMARTHOST_URL', 'smtp://u:hunter2@relay.test/path'],
  ['SMARTHOST_URL', 'smtp://u:hunter2@relay.test:0'],
  ['SMARTHOST_URL', 'smtp://hunter2@relay.test'],
  ['SMARTHOST_URL', 'smtp://u:hunter2%@relay.test'],
  ['SMARTHOST_URL', 'smtp://u:hunter2@relay.test'],
  ['BLOB_STORE', 'tape:hunter2'],
  ['BLOB_STORE', 's3://hunter2@bucket'],
  ['BLOB_STORE', 's3://u:hunter2%@bucket'],
  ['BLOB_STORE', 's3://u:hunter2@b'],
  ['BLOB_STORE', 's3://u:hunter2@bucket?endpiont=http://x'],
  ['BLOB_STORE', 's3://u:hunter2@bucket?endpoint=ftp://x'],
  ['BLOB_STORE', 's3://u:hunter2@bucket?region='],
];

for (const [name, value] of BAD_SECRETS) {
  refused(`secret not shown: ${name}=${JSON.stringify(value)}`, () => {
    const problems = problemsOf(env({ [name]: value }));
    assert.is(problems.length, 1, problems.join('\n'));
    assert.ok(problems[0]?.startsWith(`MAILSTEAD_${name} `));
    assert.not.match(problems[0] ?? '', /hunter2/);
  });
}

refused('a password in a setting that is no secret is not shown either', () => {
  const [problem = ''] = problemsOf(env({ PUBLIC_URL: 'https://u:hunter2@a.test' }));
  assert.match(problem, /"https:\/\/\.\.\.@a\.test"/);
});

refused('a long value is cut', () => {
  const [problem = ''] = problemsOf(env({ HTTP_PORT: '9'.repeat(10_000) }));
  assert.ok(problem.length < 250);
});

refused('production needs three settings', () => {
  const problems = problemsOf(env({ MODE: 'production' }));
  assert.equal(
    problems.map((problem) => problem.split(' must be')[0]),
    ['PUBLIC_URL', 'HOSTNAME', 'SECRET'].map(
      (name) => `MAILSTEAD_${name} is required in production: it`,
    ),
  );
});

refused('a part of an appliance shares its database and secret with the others', () => {
  for (const [roles, absent] of [
    ['delivery', '`api`, `jobs`'],
    ['mx,submission', '`api`, `delivery`, `jobs`'],
    ['api,mx,submission,jobs', '`delivery`'],
  ]) {
    assert.equal(
      problemsOf(env({ ROLES: roles! })),
      ['DATABASE_URL', 'SECRET'].map(
        (name) =>
          `MAILSTEAD_${name} is needed where MAILSTEAD_ROLES leaves out ${absent}: processes of one appliance share it.`,
      ),
    );
    assert.equal(problemsOf(env({ ROLES: roles!, ...SHARED })), []);
  }
});

refused('a smarthost URL where mail goes to the sink', () => {
  const problems = problemsOf(env({ DELIVERY: 'sink', SMARTHOST_URL: 'smtp://relay.test' }));
  assert.equal(problems, [
    'MAILSTEAD_SMARTHOST_URL is set, but MAILSTEAD_DELIVERY is "sink"; it is allowed only with "smarthost" and "direct".',
  ]);
});

refused('a smarthost URL beside direct delivery is fine: mail may be spilled to it', () => {
  const settings = { ...PRODUCTION, MAILSTEAD_SMARTHOST_URL: 'smtp://relay.test' };
  assert.equal(problemsOf(settings), []);
  assert.is(loadConfig(settings).delivery, 'direct');
});

refused('all problems at once, in the order of the table, unknown names last', () => {
  const variables = env({
    ZZZ_UNKNOWN: 'x',
    AAA_UNKNOWN: 'x',
    LOG_LEVEL: 'loud',
    HTTP_PORT: 'x',
    MODE: 'production',
    HOSTNAME: 'mail.example.com',
    SECRET: 'short',
    DELIVERY: 'smarthost',
    MX_PORT: 'x',
    API_KEY,
    API_KEY_FILE: '/key',
  });
  const names = problemsOf(variables).map((problem) => problem.split(' ')[0]);
  assert.equal(
    names,
    [
      'HTTP_PORT',
      'PUBLIC_URL',
      'MX_PORT',
      'API_KEY',
      'SECRET',
      'LOG_LEVEL',
      'DELIVERY',
      'AAA_UNKNOWN',
      'ZZZ_UNKNOWN',
    ].map((name) => `MAILSTEAD_${name}`),
  );
  assert.throws(
    () => loadConfig(variables),
    (error: unknown) =>
      error instanceof ConfigError &&
      error.problems.every((problem) => error.message.includes(`\n- ${problem}`)),
  );
});

refused('a bad mode is one problem, not four', () => {
  assert.is(problemsOf(env({ MODE: 'Production' })).length, 1);
});

refused('a bad delivery does not blame the smarthost URL', () => {
  const problems = problemsOf(env({ DELIVERY: 'relay', SMARTHOST_URL: 'smtp://relay.test' }));
  assert.is(problems.length, 1);
  assert.match(problems[0] ?? '', /MAILSTEAD_DELIVERY/);
});

refused.run();
