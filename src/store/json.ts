// A json or jsonb column as a value.

/** The pool gives it as text or parsed, as whoever set its types wanted. */
export const fromJson = <T>(value: T | string): T =>
  typeof value === 'string' ? (JSON.parse(value) as T) : value;
