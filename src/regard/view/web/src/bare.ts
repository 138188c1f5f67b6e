// Weights without sinks: keys that take what nobody wants, special tokens and the first one, are left
// out, and what a query gives the others is made to add up to 1 again.
//
// One source around another, so that every page has it. A row is divided by what is left of it; for
// all else all rows are needed, so a map must be small enough to be asked for weight by weight. A
// query with nothing left gives 0 to all.

import { keyTokens, type Manifest, type Place } from "./manifest";
import { Missing, OF_WEIGHTS, TILE, cellsOf, derive, headsMeant, mean, type HeadChoice, type Source } from "./source";
import { isSpecial } from "./words";

const MOST = 1 << 20; // weights of a map that are asked for one by one

/** The keys that are left out of a place. */
export function sinksOf(manifest: Manifest, record: number, place: Place): number[] {
  const special = keyTokens(manifest.records[record]!, place).flatMap((token, at) => (place.keys !== "positions" && isSpecial(token) ? [at] : []));
  return place.kind === "self" && special[0] !== 0 ? [0, ...special] : special;
}

export class BareSource implements Source {
  private readonly held = new Map<string, Promise<Float32Array>>();

  constructor(private readonly manifest: Manifest, private readonly inner: Source) {}

  exact(record: number, place: number, head: HeadChoice): boolean {
    return this.inner.exact(record, place, head);
  }

  async get(question: string, signal?: AbortSignal): Promise<Float32Array> {
    const [kind, record, place, head, ...rest] = question.split("/") as [string, string, string, string, ...string[]];
    if (!OF_WEIGHTS.includes(kind)) return this.inner.get(question, signal);
    if (head === "layer" || head === "all") {
      const pairs = headsMeant(this.manifest, Number(record), Number(place), head);
      return mean(await Promise.all(pairs.map(([p, each]) => this.get([kind, record, p, each, ...rest].join("/"), signal))));
    }
    const here = this.manifest.records[Number(record)]!.places[Number(place)]!;
    if (!this.inner.exact(Number(record), Number(place), Number(head))) {
      throw new Missing("Weights without special tokens and the first one need all weights of a head, and those of this one are not here; show all keys, or open the record with “regard view”.");
    }
    const sinks = sinksOf(this.manifest, Number(record), here);
    if (kind === "row") return strip(await this.inner.get(question, signal), sinks, here.n_keys);
    return derive(kind, await this.whole(`${record}/${place}/${head}`, here, sinks), here, rest.map(Number));
  }

  /** All weights of a head, without the sinks. */
  private whole(name: string, place: Place, sinks: number[]): Promise<Float32Array> {
    let promise = this.held.get(name);
    if (!promise) {
      promise = this.ask(name, place, sinks);
      promise.catch(() => this.held.delete(name));
      this.held.set(name, promise);
      if (this.held.size > 100) this.held.delete(this.held.keys().next().value as string);
    }
    return promise;
  }

  private async ask(name: string, place: Place, sinks: number[]): Promise<Float32Array> {
    if (!place.grid || place.grid[0] !== place.n_queries || place.n_queries * place.n_keys > MOST) {
      throw new Missing("Weights without special tokens and the first one are made of single weights, and this map has too many: choose a word on the text page, or show all keys.");
    }
    const out = new Float32Array(place.n_queries * place.n_keys);
    const tiles: Promise<void>[] = [];
    for (let ti = 0; ti < cellsOf(place.n_queries, 8); ti += 1) {
      for (let si = 0; si < cellsOf(place.n_keys, 8); si += 1) {
        tiles.push(
          this.inner.get(`map/${name}/0/0/${ti}/${si}`).then((values) => {
            const width = Math.min(TILE, place.n_keys - si * TILE);
            for (let y = 0; y * width < values.length; y += 1) out.set(values.subarray(y * width, (y + 1) * width), (ti * TILE + y) * place.n_keys + si * TILE);
          }),
        );
      }
    }
    await Promise.all(tiles);
    return strip(out, sinks, place.n_keys);
  }
}

/** Rows without these keys, each made to add up to 1. */
function strip(values: Float32Array, sinks: number[], width: number): Float32Array {
  const out = values.slice();
  for (let start = 0; start < out.length; start += width) {
    for (const key of sinks) out[start + key] = 0;
    let sum = 0;
    for (let at = start; at < start + width; at += 1) sum += out[at]!;
    for (let at = start; at < start + width; at += 1) out[at] = sum === 0 ? 0 : out[at]! / sum;
  }
  return out;
}
