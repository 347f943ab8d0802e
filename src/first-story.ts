// What `npm start` tells: sends one email through the whole pipeline over the public API, as any program
// would, prints what became of it, and ends with what to paste next.
import type { Appliance } from './appliance.ts';
import { HOME_DOMAIN } from './compose-verbs.ts';

/** More than any healthy machine needs; a sick one should say so rather than wait. */
const DELIVERY_WAIT_MS = 30_000;
const POLL_MS = 100;

interface Timeline {
  readonly events: readonly {
    readonly at: string;
    readonly type: string;
    readonly recipient: string | null;
    readonly detail: Readonly<Record<string, unknown>>;
  }[];
  readonly waiting: { readonly reason: string } | null;
}

/** Never rejects: a story that cannot be told is no reason to end the program. */
export async function tellFirstStory(
  appliance: Told,
  print: (line: string) => void,
): Promise<void> {
  try {
    await tell(appliance, print);
  } catch (error) {
    print(`  The first email could not be followed: ${(error as Error).message}`);
  }
}

type Told = Pick<
  Appliance,
  'publicUrl' | 'firstKey' | 'mxPort' | 'submissionPort' | 'submissionsPort'
> & { readonly localUrl: string };

async function tell(appliance: Told, print: (line: string) => void): Promise<void> {
  const { publicUrl, firstKey, localUrl: base } = appliance;
  print('');
  print(`  Mailstead is up at ${publicUrl}`);
  if (firstKey === null) {
    print('  The API key was shown at the first start and is not stored.');
    print('');
    return;
  }
  const key = firstKey.token;
  await sendAndFollow({ base, key, print });
  print('');
  print(`  API key    ${key}`);
  print(`  Reference  ${publicUrl}/docs`);
  print(
    `  Sink       ${publicUrl}/sink/messages   (what was delivered; nothing leaves this machine)`,
  );
  const { mxPort, submissionPort, submissionsPort } = appliance;
  if (submissionPort !== null) {
    print(
      `  SMTP       ports ${submissionPort} (STARTTLS) and ${submissionsPort} (TLS), user resend, password: the API key`,
    );
  }
  if (mxPort !== null) print(`  Inbound    port ${mxPort}, for anything@${HOME_DOMAIN}`);
  print(`  Health     ${publicUrl}/health/ready`);
  print('');
  print('  Send one yourself:');
  print('');
  print(
    `curl -sS ${publicUrl}/emails -H 'Authorization: Bearer ${key}' -H 'Content-Type: application/json' -d '{"from":"Me <me@${HOME_DOMAIN}>","to":"you@example.com","subject":"Hello","text":"It works."}'`,
  );
  print('');
  print('  Stop with Ctrl-C.');
  print('');
}

async function sendAndFollow(d: {
  readonly base: string;
  readonly key: string;
  readonly print: (line: string) => void;
}): Promise<void> {
  const headers = { authorization: `Bearer ${d.key}`, 'content-type': 'application/json' };
  const sent = await fetch(`${d.base}/emails`, {
    method: 'POST',
    headers,
    body: JSON.stringify({
      from: `Mailstead <hello@${HOME_DOMAIN}>`,
      to: ['first@example.com'],
      subject: 'The first email',
      text: 'API, Postgres, queue, DKIM, SMTP, sink: it went all the way.',
    }),
  });
  const answer = (await sent.json()) as { id?: string; message?: string };
  if (!sent.ok || answer.id === undefined) {
    d.print(`  The first email was refused: ${answer.message ?? sent.statusText}`);
    return;
  }
  d.print('');
  d.print(`  Sent a first email, ${answer.id}:`);
  const deadline = Date.now() + DELIVERY_WAIT_MS;
  let timeline: Timeline;
  do {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    const response = await fetch(`${d.base}/emails/${answer.id}/timeline`, { headers });
    if (!response.ok) {
      d.print(`  Its timeline cannot be read: ${response.status} ${response.statusText}`);
      return;
    }
    timeline = (await response.json()) as Timeline;
  } while (timeline.waiting !== null && Date.now() < deadline);
  for (const { at, type, recipient, detail } of timeline.events) {
    const reply = typeof detail['reply'] === 'string' ? detail['reply'] : '';
    const line = `    ${at.slice(11, 23)}  ${type.padEnd(16)} ${(recipient ?? '').padEnd(20)} ${reply}`;
    d.print(line.trimEnd());
  }
  if (timeline.waiting !== null) d.print(`    still waiting: ${timeline.waiting.reason}`);
}
