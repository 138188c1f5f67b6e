// What the text page shows as one: a token, or a character whose bytes are several tokens.
//
// A unit's weight on another is the mean over its tokens of the sum over the other's: what its
// tokens give, on average, to all of the other. lens/word_links.py does the same with words.

import type { Pieces, Place, Recorded } from "./manifest";
import { keyTokens, queryTokens } from "./manifest";
import { label } from "./words";

export interface Unit {
  first: number; // its first token
  count: number; // of its tokens
  before: string; // what stands between it and the one before
  own: string; // its text, "" where it stands for none
  name: string; // how a list calls it
  part: boolean; // whether it is one of several tokens of a character
}

export class Units {
  readonly list: Unit[] = [];
  private readonly unitOf: Int32Array;

  constructor(tokens: string[], pieces: Pieces, joined: Set<number>, split: boolean) {
    this.unitOf = new Int32Array(tokens.length);
    tokens.forEach((token, at) => {
      const last = this.list.at(-1);
      if (last && joined.has(at) && !split) {
        last.count += 1;
        last.own += (pieces?.[at] ?? []).join("");
        if (last.own.trim()) last.name = last.own;
      } else {
        const part = split && (joined.has(at) || joined.has(at + 1));
        const [before, text] = pieces?.[at] ?? [at ? " " : "", label(token, 40)];
        const own = part ? label(token, 40) : text;
        this.list.push({ first: at, count: 1, before, own, name: own.trim() ? own : token, part });
      }
      this.unitOf[at] = this.list.length - 1;
    });
  }

  /** The number of the unit that a token is of; -1 for no token. */
  at(token: number): number {
    return this.unitOf[token] ?? -1;
  }

  tokensOf({ first, count }: Unit): number[] {
    return Array.from({ length: count }, (_, more) => first + more);
  }

  /** The probability of each unit: the product of its tokens'. */
  join(values: Float32Array): Float32Array {
    return Float32Array.from(this.list, (unit) => this.tokensOf(unit).reduce((product, at) => product * (values[at] ?? NaN), 1));
  }

  /** Of each unit what its tokens have together, or on average. */
  gather(values: Float32Array, mean: boolean): Float32Array {
    return Float32Array.from(this.list, ({ first, count }) => {
      let sum = 0;
      for (let at = first; at < first + count; at += 1) sum += values[at] ?? NaN;
      return mean ? sum / count : sum;
    });
  }
}

/** The words of one side: tokens that together are a word, as a terminal's digest has them. */
export function wordUnits(record: Recorded, place: Place, which: "query" | "key"): Units {
  const side = which === "key" ? place.keys : place.queries;
  if (side !== "target" || !record.groups) return unitsOf(record, place, which, false);
  const inner = new Set<number>();
  let at = 0;
  for (const size of record.groups) {
    for (let more = 1; more < size; more += 1) inner.add(at + more);
    at += size;
  }
  return new Units(record.tokens, record.pieces, inner, false);
}

export function unitsOf(record: Recorded, place: Place, which: "query" | "key", split: boolean): Units {
  const side = which === "key" ? place.keys : place.queries;
  const tokens = which === "key" ? keyTokens(record, place) : queryTokens(record, place);
  if (side === "positions") return new Units(tokens, null, new Set(), split);
  const [pieces, joined] = side === "target" ? [record.pieces, record.joined] : [record.source_pieces, record.source_joined];
  return new Units(tokens, pieces, joined, split);
}
