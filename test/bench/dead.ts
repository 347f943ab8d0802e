// What dead mail hosts cost the others: 1,000 destinations, each with a mail host at a loopback address of its own, by
// way of a DNS server of ours. Ten of them are dead: half refuse, half take the connection and never say a word.
import { createServer, type Server, type Socket } from 'node:net';
import { once } from 'node:events';
import { startDns, type DnsZones } from '../support/dns.ts';
import { addressAt } from './addresses.ts';
import { renderPeaks, renderRatio, startSide, type CasePlan } from './side.ts';

const DESTINATIONS = 1_000;
/** Every so many is dead. */
const DEAD_EVERY = 100;
/** The dead cost the others less than a tenth. */
const RATE_MIN = 0.9;

const isDead = (index: number): boolean => index % DEAD_EVERY === DEAD_EVERY / 2;
const isSilent = (index: number): boolean => isDead(index) && index % (2 * DEAD_EVERY) < DEAD_EVERY;

export async function benchDead(plan: CasePlan): Promise<string> {
  const all = Array.from({ length: DESTINATIONS }, (_, index) => index);
  const living = all.filter((index) => !isDead(index));
  const zones: DnsZones = {};
  for (const index of all) {
    // The sink listens at the first addresses, one for each that lives; the dead have the others.
    const place = isDead(index)
      ? DESTINATIONS + all.filter((one) => one < index && isDead(one)).length
      : living.indexOf(index);
    zones[`d${index}.test`] = { MX: [`10 mx.d${index}.test`] };
    zones[`mx.d${index}.test`] = { A: [addressAt(place)] };
  }
  const addressOf = (index: number): string => {
    const found = zones[`mx.d${index}.test`];
    return typeof found === 'object' && Array.isArray(found.A) ? String(found.A[0]) : '';
  };
  const dns = await startDns(zones);
  const { stop: stopDns } = plan.cleanup.add(dns.stop);
  const recipientOf = (index: number): string => `one@d${index}.test`;
  const silent: Server[] = [];
  const held = new Set<Socket>();
  const { stop: stopSilent } = plan.cleanup.add(async () => {
    for (const socket of held) socket.destroy();
    for (const server of silent) server.close();
    return Promise.resolve();
  });

  let port = 0;
  const side = await startSide(plan, {
    name: 'dead',
    recipients: living.map(recipientOf),
    addresses: living.length,
    settings: (sinkPort) => {
      port = sinkPort;
      return {
        MAILSTEAD_DELIVERY: 'direct',
        MAILSTEAD_SMARTHOST_URL: null,
        MAILSTEAD_DNS_SERVERS: dns.server,
        MAILSTEAD_MX_DESTINATION_PORT: String(sinkPort),
        MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
      };
    },
  });
  for (const index of all.filter(isSilent)) {
    const server = createServer((socket) => {
      held.add(socket);
      socket.on('error', () => socket.destroy()).on('close', () => held.delete(socket));
    });
    silent.push(server);
    server.listen({ port, host: addressOf(index) });
    await once(server, 'listening');
  }
  const without = await side.rate({ recipients: living.map(recipientOf) });
  plan.say(`${Math.round(without)}/s to ${living.length} destinations that answer`);
  const recipients = all.map(recipientOf);
  const arriving = Array.from({ length: plan.emails }, (_, turn) => turn % DESTINATIONS).filter(
    (index) => !isDead(index),
  ).length;
  const beside = await side.rate({ recipients, arriving });
  const peaks = side.product.memory();
  await side.stop();
  await stopDns();
  await stopSilent();
  const silentCount = all.filter(isSilent).length;
  const dead = all.filter(isDead).length;
  return [
    `Direct delivery to ${DESTINATIONS} destinations (${plan.emails} emails a round, medians of ${plan.rounds}):`,
    `  ${renderRatio(`${dead} of them dead (${silentCount} silent, ${dead - silentCount} refuse), the others`, { without, beside, min: RATE_MIN })}`,
    renderPeaks(peaks),
  ].join('\n');
}
