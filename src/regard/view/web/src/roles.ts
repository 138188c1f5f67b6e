// What heads do, in words and numbers.

import type { Manifest, Recorded } from "./manifest";

const LESS_IS_MORE = ["local"]; // a distance: the smaller it is, the more of the habit
export const SHARES = ["previous", "next", "same", "induction", "first", "separator"];
const CLEAR = 0.3; // of the weight, before a head is said to do one thing

/** What a head with much of a score does: "looks at the token before". */
export function told(manifest: Manifest, name: string): string {
  return manifest.words[name]?.does ?? name;
}

/** What a score is about: "the token before", "distance in tokens". */
export function about(manifest: Manifest, name: string): string {
  return manifest.words[name]?.what ?? name;
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

/** How much of a habit a value is, from 0 to 1: what order, bars and filters go by. */
export function strength(record: Recorded, name: string, value: number | null): number {
  const [low, high] = range(record, name);
  if (value === null || high === low) return 0;
  const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
  return LESS_IS_MORE.includes(name) ? 1 - share : share;
}

/** The value that has this strength, and whether others must lie above or below it to have more. */
export function threshold(record: Recorded, name: string, least: number): [number, "At least" | "At most"] {
  const [low, high] = range(record, name);
  if (LESS_IS_MORE.includes(name)) return [high - least * (high - low), "At most"];
  return [low + least * (high - low), "At least"];
}

/** A score in words: "previous 0.55", "1.50 tokens away". */
export function spellScore(name: string, value: number | null): string {
  return name === "local" && value !== null ? `${spell(value)} tokens away` : `${name} ${spell(value)}`;
}

export function spell(value: number | null): string {
  if (value === null) return "–";
  if (value > 0 && value < 0.005) return "<0.01";
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}
