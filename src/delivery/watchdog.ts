// Bites where nothing has refreshed it for too long.
export function createWatchdog(bite: () => void): { refresh(ms: number): void; end(): void } {
  let timer: NodeJS.Timeout | undefined;
  return {
    refresh(ms) {
      clearTimeout(timer);
      timer = setTimeout(bite, ms);
    },
    end: () => clearTimeout(timer),
  };
}
