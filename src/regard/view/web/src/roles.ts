// What heads do, in words and numbers.

import type { Recorded } from "./outline";

const TOLD: Record<string, string> = {
  previous: "looks at the word before",
  next: "looks at the word after",
  same: "looks at itself",
  induction: "looks at what followed the same word before",
  first: "rests on the first token",
  separator: "looks at separators",
  local: "stays near",
  broad: "spreads wide",
};
export const SHARES = ["previous", "next", "same", "induction", "first", "separator"];
const CLEAR = 0.3; // of the weight, before a head is said to do one thing

export function told(name: string): string {
  return TOLD[name] ?? name;
}

export function score(record: Recorded, name: string, place: number, head: number): number | null {
  return record.scores[name]?.[place]?.[head] ?? null;
}

/** The one thing a head clearly does, if any. */
export function role(record: Recorded, place: number, head: number): [string, number] | null {
  let best: [string, number] | null = null;
  for (const name of SHARES) {
    const value = score(record, name, place, head);
    if (value !== null && value >= CLEAR && (!best || value > best[1])) best = [name, value];
  }
  return best;
}

/** The smallest and largest of a score over all heads; shares of weight always run from 0 to 1. */
export function range(record: Recorded, name: string): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const row of record.scores[name] ?? []) {
    for (const value of row) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (SHARES.includes(name) || (low >= 0 && high <= 1)) return [0, 1];
  return low <= high ? [Math.min(0, low), high] : [0, 1];
}

export function spell(value: number | null): string {
  if (value === null) return "–";
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}
