// A weight against chance: how many times what it would be if a query looked at all it may see alike.
//
// By chance a query gives 1 / (keys it may look at) to each of these. Of a cell that covers several
// pairs it is the mean weight over the mean of what chance gives them, pairs that a causal rule hides
// among them with 0; so a cell of pairs that all get their chance is 1.

import type { Place } from "./manifest";
import type { TileAt } from "./tiles";
import { TILE } from "./source";

/** How many keys a query may look at. */
export function visibleTo(place: Place, t: number): number {
  if (place.visible) return place.visible[t]!;
  return place.causal ? Math.max(0, Math.min(place.n_keys, t + place.n_keys - place.n_queries + 1)) : place.n_keys;
}

/** How many queries may look at a key. */
export function lookersAt(place: Place, s: number): number {
  if (place.seen_by) return place.seen_by[s]!;
  return place.causal ? Math.max(0, Math.min(place.n_queries, place.n_keys - s)) : place.n_queries;
}

/** What chance gives each cell of a tile, on average over its pairs. */
export function chanceOf(place: Place, at: TileAt, height: number, width: number): Float32Array {
  const [tall, wide] = [2 ** at.lt, 2 ** at.ls];
  const out = new Float32Array(height * width);
  for (let y = 0; y < height; y += 1) {
    const t0 = (at.ti * TILE + y) * tall;
    const t1 = Math.min(place.n_queries, t0 + tall);
    for (let x = 0; x < width; x += 1) {
      const s0 = (at.si * TILE + x) * wide;
      const s1 = Math.min(place.n_keys, s0 + wide);
      let sum = 0;
      for (let t = t0; t < t1; t += 1) {
        const keys = visibleTo(place, t);
        // Keys after the query are hidden; which of the others a window hides is not known here.
        const last = place.causal ? t + place.n_keys - place.n_queries + 1 : place.n_keys;
        if (keys) sum += Math.max(0, Math.min(s1, last) - s0) / keys;
      }
      out[y * width + x] = sum / ((t1 - t0) * (s1 - s0));
    }
  }
  return out;
}

export function overChance(values: Float32Array, chance: Float32Array): Float32Array {
  return values.map((value, at) => (value === 0 ? 0 : value / chance[at]!));
}
