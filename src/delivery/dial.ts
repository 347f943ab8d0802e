// Opens the connection to a mail host: from the address of this machine that the mail is to leave from, and within its
// time. Whatever prevents it comes back as a value.
import { connect, type Socket } from 'node:net';
import type { Cause } from '../mail/outcome.ts';
import { attemptPhase } from '../telemetry/instruments.ts';
import type { Target } from './session.ts';

export interface NotDialled {
  readonly cause: Cause;
  readonly message: string;
}

const CONNECT_MAX_MS = 30_000;

export function dial(target: Target): Promise<Socket | NotDialled> {
  const maxMs = target.connectMs ?? CONNECT_MAX_MS;
  const took = attemptPhase.startTimer({ phase: 'connect' });
  return new Promise<Socket | NotDialled>((resolve) => {
    const socket = connect({
      host: target.address,
      port: target.port,
      noDelay: true,
      ...(target.source === null ? {} : { localAddress: target.source }),
    });
    const timer = setTimeout(() => {
      socket.destroy();
      const why = `no connection within ${maxMs / 1_000} s`;
      resolve({ cause: 'connect_timeout', message: why });
    }, maxMs);
    const onError = (error: NodeJS.ErrnoException): void => {
      clearTimeout(timer);
      resolve(whyNot(error, target));
    };
    socket.once('error', onError);
    socket.once('connect', () => {
      clearTimeout(timer);
      socket.removeListener('error', onError);
      resolve(socket);
    });
  }).finally(() => void took());
}

function whyNot(error: NodeJS.ErrnoException, { source }: Target): NotDialled {
  const code = error.code ?? error.message;
  if (source !== null && (code === 'EADDRNOTAVAIL' || code === 'EINVAL')) {
    const why = `the address ${source}, which config/delivery.json lets mail leave from, is none of this machine's`;
    return { cause: 'egress_unusable', message: why };
  }
  const cause = code === 'ECONNREFUSED' ? 'connect_refused' : 'connect_failed';
  return { cause, message: `connection failed: ${code}` };
}
