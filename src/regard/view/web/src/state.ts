// What is being looked at, as one line of text: the part of the address after #, or a trait of the
// widget. Whatever that line says, a state that fits the manifest comes out.

import { CURVES, PALETTES, type Curve, type PaletteName } from "./colour";
import { MATTERS } from "./effects";
import { haveOneShape, type Manifest, type Recorded } from "./manifest";
import { MEASURES, type Measure } from "./measures";
import type { HeadChoice } from "./source";

export const PAGES = ["start", "overview", "head", "text", "align", "compare"] as const;
export const MOST_HEADS = 6; // whose lines have colours that can be told apart
export type PageName = (typeof PAGES)[number];

export interface State {
  page: PageName;
  record: number;
  place: number;
  head: HeadChoice;
  other: [number, HeadChoice]; // place and head of the second record, where it is of another model
  token: number; // the chosen word; -1: none
  side: "query" | "key"; // which side the chosen word is on
  mate: number; // the word of the other side, where a pair is chosen; -1: none
  also: number[]; // heads of the same layer whose lines are drawn beside those of the chosen one
  split: boolean; // whether characters of several tokens are shown token by token
  sort: string; // "" is the order of the model, else a score's name
  least: number; // of that score, from 0 to 1 of its range
  alike: boolean; // whether the records are of one shape, and a head is looked at in both
  at: [number, number, number] | null; // centre query, centre key, zoom of the map
  palette: PaletteName;
  curve: Curve | null; // null: times chance for long causal maps, else the root
  bare: boolean; // whether special tokens and the first are left out
  by: Measure; // what words and cells are shaded by, where it was recorded
  step: number; // of a generation, the one shown; -1: all of it
  own: boolean; // whether each map of the overview has a scale of its own
  effect: number; // of several that were measured, the one whose changes the overview shows
}

/** The head a record opens on: that of its alignment, or the first one of cross-attention, or of all. */
function firstHead(record: Recorded): [number, number] {
  return record.alignment ?? [Math.max(0, record.places.findIndex((place) => place.kind === "cross")), 0];
}

export function firstState(manifest: Manifest, record = 0): State {
  const [place, head] = firstHead(manifest.records[record]!);
  return {
    // A translation opens on its alignment.
    page: manifest.records.length === 2 ? "compare" : manifest.records[record]!.alignment ? "align" : "start",
    record,
    place,
    head,
    other: firstHead(manifest.records.at(-1)!),
    token: -1,
    side: "query",
    mate: -1,
    also: [],
    split: false,
    sort: "",
    least: 0,
    alike: manifest.records.length === 1 || haveOneShape(manifest.records[0]!, manifest.records[1]!),
    at: null,
    palette: "regard",
    curve: null,
    bare: false,
    by: "weights",
    step: -1,
    own: false,
    effect: 0,
  };
}

function whole(text: string | null, low: number, high: number, otherwise: number): number {
  return text !== null && /^-?\d{1,9}$/.test(text) ? Math.min(high, Math.max(low, Number(text))) : otherwise;
}

export function readState(line: string, manifest: Manifest): State {
  const [page, query = ""] = line.replace(/^#/, "").slice(0, 500).split("?");
  const said = new URLSearchParams(query);
  const state = firstState(manifest, whole(said.get("record"), 0, manifest.records.length - 1, 0));
  if ((PAGES as readonly string[]).includes(page ?? "")) state.page = page as PageName;
  const places = manifest.records[state.record]!.places;
  const first = said.has("place") ? 0 : Number(state.head);
  state.place = whole(said.get("place"), 0, places.length - 1, state.place);
  const head = said.get("head");
  state.head = head === "layer" || head === "all" ? head : whole(head, 0, places[state.place]!.n_heads - 1, first);
  state.other = readOther(said.get("other"), manifest.records.at(-1)!) ?? state.other;
  state.side = said.get("side") === "key" ? "key" : "query";
  state.token = whole(said.get("token"), -1, tokenCount(manifest, state) - 1, -1);
  const others = tokenCount(manifest, { ...state, side: state.side === "query" ? "key" : "query" });
  state.mate = state.token < 0 ? -1 : whole(said.get("mate"), -1, others - 1, -1);
  const also = (said.get("also") ?? "").split(",").map((each) => whole(each, 0, places[state.place]!.n_heads - 1, -1));
  state.also = [...new Set(also)].filter((each) => each >= 0 && each !== state.head).slice(0, MOST_HEADS - 1);
  state.split = said.get("tokens") === "1";
  const sort = said.get("sort") ?? "";
  const { scores, effects } = manifest.records[state.record]!;
  state.sort = Object.hasOwn(scores, sort) || (sort === MATTERS && effects.length) ? sort : "";
  state.effect = whole(said.get("effect"), 0, Math.max(0, effects.length - 1), 0);
  state.least = whole(said.get("least"), 0, 100, 0) / 100;
  const at = (said.get("at") ?? "").split(",").map(Number);
  if (at.length === 3 && at.every((n) => Number.isFinite(n) && n >= 0)) state.at = at as [number, number, number];
  state.palette = PALETTES.find((name) => name === said.get("colours")) ?? "regard";
  state.curve = CURVES.find((name) => name === said.get("scale")) ?? null;
  state.bare = said.get("without") === "sinks";
  state.by = MEASURES.find((name) => name === said.get("by")) ?? "weights";
  const steps = manifest.records[state.record]!.steps ?? [];
  state.step = whole(said.get("step"), -1, steps.length - 1, -1);
  if (state.step >= 0 && !said.has("token")) state.token = Math.min(steps[state.step]!, tokenCount(manifest, state) - 1);
  state.own = said.get("own") === "1";
  return state;
}

function readOther(text: string | null, { places }: Recorded): [number, HeadChoice] | null {
  const [at, head] = /^(\d{1,6})\.(\d{1,6}|layer|all)$/.exec(text ?? "")?.slice(1) ?? [];
  const place = places[Number(at)];
  if (!place || head === undefined) return null;
  return [Number(at), head === "layer" || head === "all" ? head : Math.min(Number(head), place.n_heads - 1)];
}

export function tokenCount(manifest: Manifest, state: State): number {
  const place = manifest.records[state.record]!.places[state.place]!;
  return state.side === "query" ? place.n_queries : place.n_keys;
}

/** The chosen pair of query and key, where both are chosen. */
export function chosenPair({ token, side, mate }: State): { t: number; s: number } | null {
  if (token < 0 || mate < 0) return null;
  return side === "query" ? { t: token, s: mate } : { t: mate, s: token };
}

export function writeState(state: State): string {
  const said = new URLSearchParams();
  if (state.record) said.set("record", String(state.record));
  if (!["start", "overview"].includes(state.page) || state.token >= 0 || (state.page === "start" && state.place > 0)) {
    said.set("place", String(state.place));
    said.set("head", String(state.head));
  }
  if (state.page === "compare" && !state.alike) said.set("other", state.other.join("."));
  if (state.token >= 0) {
    said.set("token", String(state.token));
    if (state.side === "key") said.set("side", "key");
    if (state.mate >= 0) said.set("mate", String(state.mate));
  }
  if (state.also.length && state.page === "align") said.set("also", state.also.join(","));
  if (state.split && state.page === "text") said.set("tokens", "1");
  if (state.page === "overview" && state.sort) {
    said.set("sort", state.sort);
    if (state.least) said.set("least", String(Math.round(state.least * 100)));
  }
  if (state.at && (state.page === "head" || state.page === "compare")) {
    said.set("at", state.at.map((n) => String(Number(n.toPrecision(6)))).join(","));
  }
  if (state.palette !== "regard") said.set("colours", state.palette);
  if (state.curve) said.set("scale", state.curve);
  if (state.bare) said.set("without", "sinks");
  if (state.by !== "weights" && ["head", "text"].includes(state.page)) said.set("by", state.by);
  if (state.step >= 0 && state.page === "text") said.set("step", String(state.step));
  if (state.own && state.page === "overview") said.set("own", "1");
  if (state.effect && state.page === "overview") said.set("effect", String(state.effect));
  const query = said.toString().replaceAll("%2C", ",");
  return query ? `${state.page}?${query}` : state.page;
}
