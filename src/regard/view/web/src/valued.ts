// Weights times the norms of what is taken from each key: ‖weight · f(x)‖.
//
// One source around another, so that maps, rows and columns have it alike. A norm belongs to a key,
// so a cell of many queries can be multiplied as it is; one of many keys is made of cells of one.

import type { Manifest, Place } from "./manifest";
import { Missing, OF_WEIGHTS, TILE, cellsOf, headsMeant, mean, type HeadChoice, type Source } from "./source";

const MOST_TILES = 32; // that one tile is made of

export class ValuedSource implements Source {
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
    const name = `${record}/${place}/${head}`;
    const norms = await this.inner.get(`norms/${name}`, signal);
    const [first = 0, second = 0] = rest.map(Number);
    if (kind === "map") {
      const here = this.manifest.records[Number(record)]!.places[Number(place)]!;
      return this.tile(name, here, norms, rest.map(Number), signal);
    }
    const values = await this.inner.get(question, signal);
    if (kind === "column") return values.map((value) => value * norms[first]!);
    return values.map((value, at) => value * norms[kind === "weight" ? second : at]!);
  }

  private async tile(name: string, place: Place, norms: Float32Array, at: number[], signal?: AbortSignal): Promise<Float32Array> {
    const [lt, ls, ti, si] = at as [number, number, number, number];
    const keys = 2 ** ls;
    const tiles = Math.min(keys, cellsOf(place.n_keys, 8) - si * keys);
    if (tiles > MOST_TILES) throw new Missing("A cell here stands for too many keys to be weighted one by one; zoom in, or show the weights alone.");
    const all = await Promise.all(Array.from({ length: tiles }, (_, n) => this.inner.get(`map/${name}/${lt}/0/${ti}/${si * keys + n}`, signal)));
    const start = si * TILE * keys;
    const width = Math.min(TILE, cellsOf(place.n_keys, ls) - si * TILE);
    const height = all[0]!.length / Math.min(TILE, place.n_keys - start);
    const out = new Float64Array(height * width);
    for (const [n, values] of all.entries()) {
      const wide = values.length / height;
      values.forEach((value, index) => {
        const key = n * TILE + (index % wide);
        out[Math.floor(index / wide) * width + Math.floor(key / keys)]! += value * norms[start + key]!;
      });
    }
    return Float32Array.from(out, (sum, index) => sum / Math.min(keys, place.n_keys - start - (index % width) * keys));
  }
}
