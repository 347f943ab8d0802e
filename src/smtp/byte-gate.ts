// Lets work in while what it holds in memory, all together, stays below a limit; the rest waits, in order.

/** Runs `work` when there is room for `bytes`; work that is larger than the limit runs alone. */
export type ByteGate = <T>(bytes: number, work: () => Promise<T>) => Promise<T>;

export function createByteGate(maxBytes: number): ByteGate {
  const waiting: { readonly bytes: number; readonly enter: () => void }[] = [];
  let heldBytes = 0;

  const letIn = (): void => {
    for (;;) {
      const next = waiting[0];
      if (next === undefined || (heldBytes > 0 && heldBytes + next.bytes > maxBytes)) return;
      waiting.shift();
      heldBytes += next.bytes;
      next.enter();
    }
  };

  return async (bytes, work) => {
    await new Promise<void>((enter) => {
      waiting.push({ bytes, enter });
      letIn();
    });
    try {
      return await work();
    } finally {
      heldBytes -= bytes;
      letIn();
    }
  };
}
