// What every page is handed: the manifest, the source of weights, the state, and ways to change it.

import { ramp, type Curve, type Ramp } from "./colour";
import { isExact, type Manifest, type Place, type Recorded } from "./manifest";
import type { Source } from "./source";
import type { State } from "./state";

export interface Context {
  manifest: Manifest;
  source: Source;
  state: State;
  /** Change what is looked at. `quietly`: the address follows, the page is not built anew. */
  go(change: Partial<State>, quietly?: boolean): void;
  announce(words: string): void;
  dark(): boolean;
}

export interface Page {
  element: HTMLElement;
  close?(): void;
  restyle?(): void;
  /** A key that no control on the page has taken; true when this page has. */
  key?(event: KeyboardEvent): boolean;
}

export function current(context: Context): { record: Recorded; place: Place } {
  const record = context.manifest.records[context.state.record]!;
  return { record, place: record.places[context.state.place]! };
}

export function colours(context: Context): Ramp {
  return ramp(context.state.palette, context.dark());
}

const LONG = 256; // queries, from which on the first rows of a causal map outshine the rest

/** The scale of maps: as chosen; else times chance where maps are causal and long. */
export function mapCurve(context: Context, places: Place[]): Curve {
  const { curve, bare, by, page } = context.state;
  if (bare || (by === "values" && page === "head") || !places.every(isExact)) return curve === "chance" || !curve ? "root" : curve;
  return curve ?? (places.every((place) => place.causal && place.n_queries >= LONG) ? "chance" : "root");
}

/** The scale of words: they stand for one row, in which chance is the same for all. */
export function wordCurve(context: Context): Curve {
  const { curve } = context.state;
  return !curve || curve === "chance" ? "root" : curve;
}

export function question(kind: string, context: Context, ...numbers: number[]): string {
  const { record, place, head } = context.state;
  return [kind, record, place, head, ...numbers].join("/");
}

export function words(problem: unknown): string {
  return problem instanceof Error ? problem.message : String(problem);
}
