// `queue`: how the queue stands, pausing and resuming parts of it, sending given-up mail after all.
import { Argument } from 'commander';
import { Refusal } from '../access/refusal.ts';
import { readQueue, type Load, type QueueOverview } from '../queue/overview.ts';
import { listPauses, type NewPause, type Pause, type PauseKind } from '../queue/pauses.ts';
import { releaseGivenUp } from '../sending/release.ts';
import { isUuid } from '../store/id.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { operatorFor } from './domains.ts';
import { findEmailNamed } from './explain.ts';
import { withExample } from './options.ts';
import { fields, printable, table } from './output.ts';
import { findTenantNamed } from './tenants.ts';

interface PauseGiven {
  readonly kind: PauseKind;
  readonly name?: string;
  readonly reason?: string;
  readonly until?: string;
}

/** What the API does, for the same answers in both places. */
export interface QueueParts {
  /** As `GET /queue` answers. */
  readonly presentQueue: (queue: QueueOverview) => unknown;
  readonly presentPause: (pause: Pause) => unknown;
  /** Throws a Refusal that says what is wrong. */
  readonly readPause: (given: PauseGiven, now: Date) => NewPause;
  readonly openQueue: (tools: Tools) => Promise<{
    pause(wanted: NewPause): Promise<Pause>;
    resume(id: string): Promise<boolean>;
  }>;
}

export const queueCommands =
  (parts: QueueParts): AddCommands =>
  (program, run) => {
    const queue = program
      .command('queue')
      .description('What waits to be delivered; pausing it, sending given-up mail after all');

    withExample(queue, 'queue', 'queue pause destination mx:example.com').action(
      run(async (tools) => {
        const overview = await readQueue((await tools.store()).pool);
        tools.out.result(parts.presentQueue(overview), () => describe(overview));
      }),
    );

    withExample(
      queue
        .command('pause')
        .description('Claim nothing more of a lane, a destination, a tenant, or of everything')
        .addArgument(
          new Argument('<kind>', 'what is paused').choices([
            'lane',
            'destination',
            'tenant',
            'all',
          ]),
        )
        .argument('[name]', 'its name as `queue` shows it; of a tenant the id or the name')
        .option('--reason <reason>', 'one line, which senders see as well')
        .option('--until <time>', 'when it ends by itself, such as 2027-01-31T08:00:00Z'),
      'queue pause destination mx:example.com --reason "their postmaster asked"',
    ).action(
      run(
        async (
          tools,
          kind: PauseKind,
          named: string | undefined,
          options: Pick<PauseGiven, 'reason' | 'until'>,
        ) => {
          const name =
            kind === 'tenant' && named !== undefined
              ? (await findTenantNamed(tools, named)).id
              : named;
          const wanted = parts.readPause(
            { kind, ...(name === undefined ? {} : { name }), ...options },
            new Date(),
          );
          const pause = await (await parts.openQueue(tools)).pause(wanted);
          tools.out.result(
            parts.presentPause(pause),
            () => `Paused ${nameOf(pause)}${untilOf(pause)}. To go on: queue resume ${pause.id}`,
          );
        },
      ),
    );

    withExample(
      queue
        .command('resume')
        .description('End a pause: what waited goes on within seconds')
        .argument('<id>', 'id of the pause; `queue pauses` shows it'),
      'queue resume 019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    ).action(
      run(async (tools, given: string) => {
        const id = given.toLowerCase();
        if (!isUuid(id) || !(await (await parts.openQueue(tools)).resume(id))) {
          throw new CommandFailed(
            `There is no pause with the id "${given}", or it has ended. \`queue pauses\` shows those that hold.`,
          );
        }
        tools.out.result({ object: 'pause', id, deleted: true }, () => `Resumed (${id}).`);
      }),
    );

    withExample(
      queue.command('pauses').description('List what is paused now'),
      'queue pauses',
    ).action(
      run(async (tools) => {
        const pauses = await listPauses((await tools.store()).pool);
        const data = pauses.map(parts.presentPause);
        tools.out.result({ object: 'list', data, has_more: false }, () => tellPauses(pauses));
      }),
    );

    withExample(
      queue
        .command('release')
        .description('Send an email to its given-up recipients after all')
        .argument('<email>', 'id of the email, or its Message-ID')
        .option(
          '--include-unknown',
          'also to those who may have it: the answer of their host was lost',
        ),
      'queue release 019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
    ).action(
      run(async (tools, given: string, options: { readonly includeUnknown?: true }) => {
        const { tenantId, id } = await findEmailNamed(tools, given);
        const released = await release(tools, {
          tenantId,
          id,
          includeUnknown: options.includeUnknown === true,
        });
        tools.out.result(
          { object: 'email', id, released: [...released] },
          () =>
            `On its way again to ${released.map(printable).join(', ')}. To follow it: explain ${id}`,
        );
      }),
    );
  };

async function release(
  tools: Tools,
  about: { readonly tenantId: string; readonly id: string; readonly includeUnknown: boolean },
): Promise<readonly string[]> {
  const parts = {
    store: await tools.store(),
    blobs: await tools.blobs(),
    lifetimeMs: tools.config.messageLifetimeMs,
    // Workers look by themselves every second.
    onReady: () => undefined,
  };
  try {
    return await releaseGivenUp(parts, operatorFor(about.tenantId), about);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    throw new CommandFailed(
      error.message.replace('`"include_unknown": true`', '`--include-unknown`'),
    );
  }
}

const nameOf = ({ kind, name }: Pause): string =>
  kind === 'all' ? 'everything' : `the ${kind} ${printable(name)}`;
const untilOf = ({ until }: Pause): string =>
  until === null ? '' : ` until ${until.toISOString()}`;

function tellPauses(pauses: readonly Pause[]): string {
  const rows = pauses.map((one) => [
    one.id,
    one.kind,
    one.name,
    one.reason,
    one.pausedAt,
    one.until,
  ]);
  return table(['id', 'kind', 'name', 'reason', 'since', 'until'], rows, 'Nothing is paused.');
}

const counted = (count: number, isCapped: boolean): string => `${count}${isCapped ? '+' : ''}`;
const loadCells = (load: Load): readonly (string | Date | null)[] => [
  counted(load.ready, load.isReadyCapped),
  counted(load.deferred, load.isDeferredCapped),
  load.oldestDueAt,
];

function describe(queue: QueueOverview): string {
  const { totals } = queue;
  const states = [
    'ready',
    'in_flight',
    'deferred',
    'unknown',
    'scheduled',
    'preparing',
    'dead_lettered',
  ] as const;
  const lanes = queue.lanes.map((lane) => [
    lane.name,
    ...loadCells(lane),
    lane.inFlight,
    `${lane.connections}/${lane.connectionsMax}`,
    lane.isPaused ? 'paused' : (lane.limitedBy ?? 'open'),
    lane.reason,
  ]);
  const tenants = queue.tenants.map((tenant) => [
    tenant.id,
    tenant.name,
    ...loadCells(tenant),
    tenant.isPaused,
  ]);
  const strays = queue.unassigned;
  const parts = [
    fields([
      ...states.map(
        (state) => [state, counted(totals[state], totals.capped.includes(state))] as const,
      ),
      ['workers', queue.workers],
      ['oldest due', queue.oldestDueAt],
      [
        'port 25',
        queue.blocked.length === 0
          ? 'not known to be blocked'
          : queue.blocked
              .map(
                ({ name, since, reason }) =>
                  `${name}: blocked since ${since.toISOString()}, ${reason}`,
              )
              .join('; '),
      ],
    ]),
    ...(queue.workers === 0
      ? ['No delivery worker has been heard of for a minute: nothing is sent.']
      : []),
    table(
      ['lane', 'ready', 'deferred', 'oldest due', 'in flight', 'connections', 'state', 'reason'],
      lanes,
      'No lane has been used yet.',
    ) + (queue.hasMoreLanes ? '\n(and more lanes)' : ''),
    ...(strays.ready + strays.deferred > 0
      ? [
          `For ${strays.destinations} destinations without a lane yet: ${counted(strays.ready, strays.isReadyCapped)} ready, ` +
            `${counted(strays.deferred, strays.isDeferredCapped)} deferred.`,
        ]
      : []),
    table(
      ['tenant', 'name', 'ready', 'deferred', 'oldest due', 'paused'],
      tenants,
      'No tenant has mail waiting.',
    ) + (queue.hasMoreTenants ? '\n(and more tenants)' : ''),
    tellPauses(queue.pauses),
  ];
  return parts.join('\n\n');
}
