// Tiles of one map: asked for when they come into view, a few at a time, the nearest first; given
// up when they leave it. At every level a cell is the exact mean of 2^lt × 2^ls weights.

import { chanceOf, overChance } from "./chance";
import { ceiling, largest } from "./colour";
import type { Place } from "./manifest";
import { TILE, cellsOf, wholeLevel } from "./source";

export interface TileAt {
  lt: number;
  ls: number;
  ti: number;
  si: number;
}
export interface Tile extends TileAt {
  values: Float32Array;
  shown: Float32Array; // what the colours are of: the values, or these times chance
  width: number;
  height: number;
  canvas: HTMLCanvasElement | null;
  painted: string;
  used: number;
}
export type FetchTile = (at: TileAt, signal: AbortSignal) => Promise<Float32Array>;

const AT_ONCE = 4;
const KEPT = 160;

export function tileKey({ lt, ls, ti, si }: TileAt): string {
  return `${lt}/${ls}/${ti}/${si}`;
}

/** The one tile that shows the whole map in at most so many cells on a side. */
export function smallTile(place: Place, cells: number): TileAt {
  return { lt: wholeLevel(place.n_queries, cells), ls: wholeLevel(place.n_keys, cells), ti: 0, si: 0 };
}

export class Tiles {
  private readonly held = new Map<string, Tile>();
  private readonly asked = new Map<string, AbortController>();
  private readonly failed = new Map<string, string>();
  private readonly largestAt = new Map<string, number>();
  private readonly mostAt = new Map<string, number>();
  private wanted: TileAt[] = [];
  private clock = 0;
  private closed = false;

  constructor(
    private readonly place: Place,
    private readonly fetchTile: FetchTile,
    private readonly arrived: () => void,
    private readonly chance = false,
  ) {}

  get(at: TileAt): Tile | undefined {
    const tile = this.held.get(tileKey(at));
    if (tile) tile.used = this.clock += 1;
    return tile;
  }

  /** The end of the colour scale at a level: the largest weight seen, or almost. */
  largest(lt: number, ls: number): number {
    return this.largestAt.get(`${lt}/${ls}`) ?? 0;
  }

  /** The largest weight seen at a level, which may lie beyond the end of its scale. */
  most(lt: number, ls: number): number {
    return this.mostAt.get(`${lt}/${ls}`) ?? 0;
  }

  get waiting(): number {
    return this.wanted.filter((at) => !this.held.has(tileKey(at)) && !this.failed.has(tileKey(at))).length;
  }

  get problem(): string | undefined {
    const here = this.wanted.find((at) => this.failed.has(tileKey(at)));
    return here && this.failed.get(tileKey(here));
  }

  want(list: TileAt[]): void {
    this.wanted = list;
    const keys = new Set(list.map(tileKey));
    for (const [key, controller] of this.asked) {
      if (!keys.has(key)) {
        controller.abort();
        this.asked.delete(key);
      }
    }
    this.askMore();
  }

  close(): void {
    this.closed = true;
    for (const controller of this.asked.values()) controller.abort();
  }

  private askMore(): void {
    for (const at of this.wanted) {
      if (this.asked.size >= AT_ONCE) return;
      const key = tileKey(at);
      if (this.held.has(key) || this.asked.has(key) || this.failed.has(key)) continue;
      if (this.isHidden(at)) this.hold(at, new Float32Array(this.width(at) * this.height(at)));
      else void this.ask(at, key);
    }
  }

  private async ask(at: TileAt, key: string): Promise<void> {
    const controller = new AbortController();
    this.asked.set(key, controller);
    try {
      this.hold(at, await this.fetchTile(at, controller.signal));
    } catch (problem) {
      if (!controller.signal.aborted) {
        this.failed.set(key, problem instanceof Error ? problem.message : String(problem));
      }
    }
    if (this.asked.get(key) === controller) this.asked.delete(key);
    if (this.closed) return;
    this.askMore();
    this.arrived();
  }

  private width(at: TileAt): number {
    return Math.min(TILE, cellsOf(this.place.n_keys, at.ls) - at.si * TILE);
  }

  private height(at: TileAt): number {
    return Math.min(TILE, cellsOf(this.place.n_queries, at.lt) - at.ti * TILE);
  }

  /** A causal rule hides all of this tile: nothing needs to be asked. */
  private isHidden(at: TileAt): boolean {
    const { n_queries, n_keys, causal } = this.place;
    const lastQuery = Math.min(n_queries, (at.ti + 1) * TILE * 2 ** at.lt) - 1;
    return causal && at.si * TILE * 2 ** at.ls > lastQuery + n_keys - n_queries;
  }

  private hold(at: TileAt, values: Float32Array): void {
    const [width, height] = [this.width(at), this.height(at)];
    if (values.length !== width * height) throw new Error("a tile has the wrong size");
    const level = `${at.lt}/${at.ls}`;
    const shown = this.chance ? overChance(values, chanceOf(this.place, at, height, width)) : values;
    const top = ceiling(shown, at.lt + at.ls > 0);
    this.largestAt.set(level, Math.max(this.largestAt.get(level) ?? 0, top));
    this.mostAt.set(level, Math.max(this.mostAt.get(level) ?? 0, largest(shown)));
    this.held.set(tileKey(at), { ...at, values, shown, width, height, canvas: null, painted: "", used: (this.clock += 1) });
    if (this.held.size > KEPT) {
      const oldest = [...this.held.entries()].sort((a, b) => a[1].used - b[1].used)[0]!;
      this.held.delete(oldest[0]);
    }
  }
}
