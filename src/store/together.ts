// Questions to the database that arrive in the same turn of the event loop, asked in one statement.

/**
 * A function that answers one question each. `ask` gets at most `max` of them and gives their answers in the same
 * order; when it throws, everybody who asked with them is told.
 */
export function askTogether<Question, Answer>(
  max: number,
  ask: (questions: readonly Question[]) => Promise<readonly Answer[]>,
): (question: Question) => Promise<Answer> {
  interface Waiting {
    readonly question: Question;
    readonly resolve: (answer: Answer) => void;
    readonly reject: (error: unknown) => void;
  }
  const waiting: Waiting[] = [];

  const askBatch = async (batch: readonly Waiting[]): Promise<void> => {
    try {
      const answers = await ask(batch.map(({ question }) => question));
      for (const [index, { resolve }] of batch.entries()) resolve(answers[index]!);
    } catch (error) {
      for (const { reject } of batch) reject(error);
    }
  };
  const flush = (): void => {
    while (waiting.length > 0) void askBatch(waiting.splice(0, max));
  };

  return (question) =>
    new Promise((resolve, reject) => {
      waiting.push({ question, resolve, reject });
      if (waiting.length === 1) setImmediate(flush);
    });
}
