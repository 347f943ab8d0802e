/**
 * Whether an authority could find the answer to a challenge, asked before it is: its patience with names that fail is short.
 *
 * In: a name, the DNS, a token that this appliance answers. Out: what is wrong and what to do, in one sentence, or null. A name
 * without an address is wrong, and so is one whose port 80 is answered by somebody else. A connection that fails proves nothing:
 * many networks do not reach their own public address from within. No packet goes to an address that is not public.
 */
import { request } from 'node:http';
import type { AddressGuard } from '../dns/address-guard.ts';
import { lookUpHosts } from '../dns/mx-hosts.ts';
import type { Resolver } from '../dns/resolver.ts';

export const CHALLENGE_PATH = '/.well-known/acme-challenge/';
/** RFC 8555 §8.3: always this one. */
const PORT = 80;
const ADDRESSES_MAX = 4;
const ANSWER_MAX_MS = 5_000;
const BYTES_MAX = 1_024;

export interface ReachDependencies {
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** 80 unless a test says otherwise. */
  readonly port?: number;
}

export async function findObstacle(
  d: ReachDependencies,
  name: string,
  probe: { readonly token: string; readonly answer: string },
): Promise<string | null> {
  const [found] = await lookUpHosts({ ...d, random: () => 0 }, [{ name, preference: 0 }]);
  const addresses = found?.addresses ?? [];
  if (addresses.length === 0) {
    if ((found?.refusals.length ?? 0) > 0) return null; // an authority of that network may reach it
    const failure = found?.failure ?? null;
    return failure === null
      ? `${name} has no address in the DNS; publish a record that leads to this server.`
      : `The DNS does not say which address ${name} has (${failure}).`;
  }
  const looks = addresses.slice(0, ADDRESSES_MAX).map(async ({ address }) => {
    const got = await ask({ name, address, port: d.port ?? PORT }, probe.token);
    if (got === null || got.isRedirect || got.body === probe.answer) return null;
    return `Port ${PORT} of ${name} (${address}) is answered by another program, with status ${got.status}; lead it to the HTTP port of this server, or to http_challenge_port of config/tls.json.`;
  });
  return (await Promise.all(looks)).find((obstacle) => obstacle !== null) ?? null;
}

interface Got {
  readonly status: number;
  readonly isRedirect: boolean;
  readonly body: string;
}

/** Null: nothing was heard. */
function ask(
  at: { readonly name: string; readonly address: string; readonly port: number },
  token: string,
): Promise<Got | null> {
  return new Promise((resolve) => {
    const asked = request(
      {
        host: at.address,
        port: at.port,
        path: CHALLENGE_PATH + token,
        headers: { host: at.name, 'user-agent': 'Mailstead' },
        agent: false,
      },
      (response) => {
        const { statusCode: status = 0 } = response;
        let body = '';
        response.setEncoding('latin1');
        const end = (): void =>
          done({ status, isRedirect: status >= 300 && status < 400, body: body.trim() });
        response.on('data', (piece: string) => {
          body += piece;
          if (body.length > BYTES_MAX) end();
        });
        response.on('end', end);
        response.on('error', () => done(null));
      },
    );
    const timer = setTimeout(() => done(null), ANSWER_MAX_MS);
    const done = (got: Got | null): void => {
      clearTimeout(timer);
      asked.destroy();
      resolve(got);
    };
    asked.on('error', () => done(null));
    asked.end();
  });
}
