// Loopback addresses by number, one for each mail host of a benchmark with many: Linux answers at all of 127.0.0.0/8.

/** `index`: from 0, below 62,500. */
export const addressAt = (index: number): string =>
  `127.1.${1 + Math.floor(index / 250)}.${1 + (index % 250)}`;
