// One look at what a zone holds: every question is asked once, and all of them end together, so that a zone which
// answers late, or leads from name to name, costs no more than this time.
import type { RecordResolver } from './records.ts';
import type { DnsAnswer } from './resolver.ts';

const OVER = { kind: 'failed', cause: 'timeout' } as const;

/** What `look` answers; when the time is over, everything that it still asks is `failed`, at once. */
export async function oneLook<T>(
  resolver: RecordResolver,
  timeMs: number,
  look: (resolver: RecordResolver) => Promise<T>,
): Promise<T> {
  let isOver = false;
  let timer: NodeJS.Timeout | undefined;
  const over = new Promise<typeof OVER>((resolve) => {
    timer = setTimeout(() => {
      isOver = true;
      resolve(OVER);
    }, timeMs);
  });
  const once = <R>(ask: (name: string) => Promise<DnsAnswer<R>>): typeof ask => {
    const asked = new Map<string, Promise<DnsAnswer<R>>>();
    return (name) => {
      const known = asked.get(name);
      if (known !== undefined) return known;
      const answer = isOver ? over : Promise.race([ask(name), over]);
      asked.set(name, answer);
      return answer;
    };
  };
  try {
    return await look({
      txt: once(resolver.txt),
      mx: once(resolver.mx),
      cname: once(resolver.cname),
      a: once(resolver.a),
      aaaa: once(resolver.aaaa),
    });
  } finally {
    clearTimeout(timer);
  }
}
