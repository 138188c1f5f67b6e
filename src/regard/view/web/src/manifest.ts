// What the page knows before it asks for any weight; read from JSON and checked, every field of it.

export interface Place {
  name: string;
  label: string; // its number, with its stack where there are several: what a terminal's digest calls it
  layer: number;
  kind: "self" | "cross";
  n_heads: number;
  n_queries: number;
  n_keys: number;
  causal: boolean;
  stack: string; // "encoder" or "decoder", where its name tells
  heads: number[]; // their numbers in the model
  grid: [number, number] | null; // how finely the map is known
  queries: Side;
  keys: Side;
  values: boolean; // whether the norms of its values were recorded
  gradient: boolean; // whether the sums of attention × gradient were
  visible: number[] | null; // how many keys each query may look at, and queries at each key, where
  seen_by: number[] | null; // it is not all of them, or in a causal place those before
}
export type Side = "target" | "source" | "positions";
export type Pieces = [string, string][] | null;
export interface Recorded {
  model: string;
  findings: Section[]; // what stands out, as in a terminal
  groups: number[] | null; // how many tokens each word has
  asked: number | null; // the first token of the word that the findings are about
  notes: string[]; // what must be known of all that is shown, in sentences
  created: string;
  tokens: string[];
  pieces: Pieces;
  joined: Set<number>; // tokens that are more bytes of the character before
  source_tokens: string[] | null;
  source_pieces: Pieces;
  source_joined: Set<number>;
  places: Place[];
  scores: Record<string, (number | null)[][]>;
  effects: Effect[]; // what heads are worth to what the model says
  rollout: number[]; // the places that attention rollout goes through
  next: Next | null; // what the model said would come next
  steps: number[] | null; // of a generation: the last token of each call of the model
  alignment: [number, number] | null; // the place and head that align target and source best
}
export interface Effect {
  edit: string; // what was done to a head
  token: string; // what is said
  log_prob: number;
  whole: number; // the change with all heads edited
  query: number[] | null; // of a look that was forbidden: the tokens that look, and those looked at
  key: number[] | null;
  layers: (number | null)[]; // the change with all heads of a place
  heads: (number | null)[][];
}
export interface Next {
  k: number; // candidates after each token
  vocabulary: Record<number, string>; // their names by id
}
export interface Finding {
  text: string;
  heads: [number, number, number | null][]; // place, head, weight
  query: number | null; // the first tokens of the words that are linked
  key: number | null;
  note: string;
}
export interface Section {
  title: string;
  signed: boolean; // whether its numbers are changes
  lines: Finding[];
}
export interface ScoreWords {
  what: string; // what is looked at, or measured
  does: string; // what a head with much of it does
}
export interface Manifest {
  host: string;
  words: Record<string, ScoreWords>; // what heads do, the same words as in a terminal
  records: Recorded[];
  parts: Record<string, string>;
  differences: [number, number, number][] | null; // place, head, distance between two records' maps
  small: number; // cells on a side of the overview's maps, at most
  budget: number;
  bound: number; // by how much a weight of this file can be off; 0 where none is rounded
}

export class BadManifest extends Error {}

export function need(fine: boolean, words: string): asserts fine {
  if (!fine) throw new BadManifest(words);
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function count(value: unknown, what: string, low: number, high: number): number {
  need(
    typeof value === "number" && Number.isInteger(value) && value >= low && value <= high,
    `${what} should be a whole number from ${low} to ${high}`,
  );
  return value;
}

export function text(value: unknown, what: string): string {
  need(typeof value === "string", `${what} should be text`);
  return value.slice(0, 400);
}

function labels(value: unknown, what: string): string[] {
  need(Array.isArray(value) && value.length > 0, `${what} should be a list of words`);
  return value.map((word) => text(word, `each of the ${what}`));
}

function pieces(value: unknown, length: number): Pieces {
  if (!Array.isArray(value) || value.length !== length) return null;
  return value.map((pair) => {
    need(Array.isArray(pair) && pair.length === 2, "pieces should be pairs of texts");
    return [text(pair[0], "a piece"), text(pair[1], "a piece")];
  });
}

function joined(value: unknown, length: number): Set<number> {
  return new Set((Array.isArray(value) ? value : []).map((at) => count(at, "a joined token", 1, length - 1)));
}

function side(value: unknown): Side {
  need(value === "target" || value === "source" || value === "positions", "unknown kind of labels");
  return value;
}

function numbers(value: unknown, length: number): number[] {
  const good = Array.isArray(value) && value.length === length;
  return Array.from({ length }, (_, at) => (good ? count(value[at], "a head's number", 0, 1 << 20) : at));
}

function grid(value: unknown, at: number): [number, number] | null {
  if (!Array.isArray(value)) return null;
  return [count(value[0], `place ${at}: grid`, 1, 4e6), count(value[1], `place ${at}: grid`, 1, 4e6)];
}

function counts(value: unknown, length: number, most: number): number[] | null {
  if (!Array.isArray(value)) return null;
  need(value.length === length, "counts of what is visible have the wrong length");
  return value.map((one) => count(one, "a count of what is visible", 0, most));
}

function place(value: unknown, at: number): Place {
  need(isObject(value), `place ${at} should be an object`);
  need(value.kind === "self" || value.kind === "cross", `place ${at} has an unknown kind`);
  return {
    name: text(value.name, "a place's name"),
    label: text(value.label, "a place's label"),
    layer: count(value.layer, `place ${at}: layer`, 0, 1e6),
    kind: value.kind,
    n_heads: count(value.n_heads, `place ${at}: n_heads`, 1, 4096),
    n_queries: count(value.n_queries, `place ${at}: n_queries`, 1, 4e6),
    n_keys: count(value.n_keys, `place ${at}: n_keys`, 1, 4e6),
    causal: value.causal === true,
    stack: value.stack === "encoder" || value.stack === "decoder" ? value.stack : "",
    heads: numbers(value.heads, count(value.n_heads, "n_heads", 1, 4096)),
    grid: grid(value.grid, at),
    queries: side(value.queries),
    keys: side(value.keys),
    values: value.values === true,
    gradient: value.gradient === true,
    visible: counts(value.visible, Number(value.n_queries), Number(value.n_keys)),
    seen_by: counts(value.seen_by, Number(value.n_keys), Number(value.n_queries)),
  };
}

export function finite(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** A number, or none, for each head of each place. */
function ofHeads(rows: unknown, places: Place[], what: string): (number | null)[][] {
  need(Array.isArray(rows) && rows.length === places.length, `${what} has the wrong shape`);
  return rows.map((row, at) => {
    need(Array.isArray(row) && row.length === places[at]!.n_heads, `${what} has the wrong shape`);
    return row.map(finite);
  });
}

function scores(value: unknown, places: Place[]): Recorded["scores"] {
  need(isObject(value), "scores should be an object");
  const out: Recorded["scores"] = Object.create(null);
  for (const [name, rows] of Object.entries(value)) out[name.slice(0, 40)] = ofHeads(rows, places, `score ${name.slice(0, 40)}`);
  return out;
}

function effect(value: unknown, places: Place[], tokens: number): Effect {
  need(isObject(value) && Array.isArray(value.layers) && value.layers.length === places.length, "an effect has the wrong shape");
  const side = (all: unknown) => (Array.isArray(all) ? all.map((at) => count(at, "a token of a look", 0, tokens - 1)) : null);
  return {
    edit: text(value.edit, "what was done"),
    token: text(value.token, "what is said"),
    log_prob: finite(value.log_prob) ?? 0,
    whole: finite(value.whole) ?? 0,
    query: side(value.query),
    key: side(value.key),
    layers: value.layers.map(finite),
    heads: ofHeads(value.heads, places, "an effect"),
  };
}

export function scoreWords(value: unknown): Manifest["words"] {
  need(isObject(value), "the words for scores should be an object");
  const out: Manifest["words"] = Object.create(null);
  for (const [name, said] of Object.entries(value)) {
    need(isObject(said), "a score has no words");
    out[name.slice(0, 40)] = { what: text(said.what, "a score's words"), does: text(said.does, "a score's words") };
  }
  return out;
}

function findings(value: unknown, places: Place[]): Section[] {
  const token = (at: unknown) => (at === null ? null : count(at, "a token that is linked", 0, 4e6));
  return (Array.isArray(value) ? value : []).map((section) => {
    need(isObject(section) && Array.isArray(section.lines), "what stands out should have lines");
    const lines = section.lines.map((line): Finding => {
      need(isObject(line) && Array.isArray(line.heads), "a line should name heads");
      const heads = line.heads.map((head): Finding["heads"][number] => {
        need(Array.isArray(head) && head.length === 3, "a head should be a place, a number and a weight");
        const at = count(head[0], "a place", 0, places.length - 1);
        return [at, count(head[1], "a head", 0, places[at]!.n_heads - 1), typeof head[2] === "number" ? head[2] : null];
      });
      return { text: text(line.text, "a line"), heads, query: token(line.query), key: token(line.key), note: text(line.note, "a note") };
    });
    return { title: text(section.title, "a title"), signed: section.signed === true, lines };
  });
}

function groups(value: unknown, tokens: number): number[] | null {
  if (!Array.isArray(value)) return null;
  const sizes = value.map((size) => count(size, "a word's tokens", 1, tokens));
  need(sizes.reduce((sum, size) => sum + size, 0) === tokens, "words and tokens differ in number");
  return sizes;
}

function alignment(value: unknown, places: Place[]): [number, number] | null {
  if (!Array.isArray(value)) return null;
  const at = count(value[0], "the alignment's place", 0, places.length - 1);
  return [at, count(value[1], "the alignment's head", 0, places[at]!.n_heads - 1)];
}

function next(value: unknown): Next | null {
  if (!isObject(value)) return null;
  need(isObject(value.vocabulary), "the names of candidates should be an object");
  const vocabulary: Next["vocabulary"] = Object.create(null);
  for (const [id, name] of Object.entries(value.vocabulary)) vocabulary[Number(id)] = text(name, "a candidate");
  return { k: count(value.k, "candidates", 1, 64), vocabulary };
}

/** Numbers in order, such as of places or tokens. */
function rising(value: unknown, what: string, most: number): number[] {
  const all = (Array.isArray(value) ? value : []).map((one) => count(one, what, 0, most));
  need(all.every((one, at) => at === 0 || one > all[at - 1]!), `${what} should rise`);
  return all;
}

function record(value: unknown): Recorded {
  need(isObject(value), "a record should be an object");
  const tokens = labels(value.tokens, "tokens");
  const source = value.source_tokens ? labels(value.source_tokens, "source tokens") : null;
  need(Array.isArray(value.places) && value.places.length > 0 && value.places.length <= 4096, "a record should have places");
  const places = value.places.map(place);
  const lengths: Record<Side, number> = { target: tokens.length, source: source?.length ?? -1, positions: NaN };
  for (const one of places) {
    need(one.queries === "positions" || lengths[one.queries] === one.n_queries, "queries and their labels differ in number");
    need(one.keys === "positions" || lengths[one.keys] === one.n_keys, "keys and their labels differ in number");
  }
  return {
    model: text(value.model, "model"),
    findings: findings(value.findings, places),
    groups: groups(value.groups, tokens.length),
    asked: typeof value.asked === "number" ? count(value.asked, "the word asked about", 0, tokens.length - 1) : null,
    notes: Array.isArray(value.notes) ? value.notes.map((note) => text(note, "a note")) : [],
    created: text(value.created, "created"),
    tokens,
    pieces: pieces(value.pieces, tokens.length),
    joined: joined(value.joined, tokens.length),
    source_tokens: source,
    source_pieces: source && pieces(value.source_pieces, source.length),
    source_joined: joined(value.source_joined, source?.length ?? 0),
    places,
    scores: scores(value.scores, places),
    effects: (Array.isArray(value.effects) ? value.effects : []).map((one) => effect(one, places, tokens.length)),
    rollout: rising(value.rollout, "places of the rollout", places.length - 1),
    next: next(value.next),
    steps: Array.isArray(value.steps) && value.steps.length ? rising(value.steps, "steps", tokens.length - 1) : null,
    alignment: alignment(value.alignment, places),
  };
}

function differences(value: unknown, one: Recorded): Manifest["differences"] {
  if (!Array.isArray(value)) return null;
  return value.map((row) => {
    need(Array.isArray(row) && typeof row[2] === "number", "differences should be lists of three numbers");
    const at = count(row[0], "a place that differs", 0, one.places.length - 1);
    return [at, count(row[1], "a head that differs", 0, one.places[at]!.n_heads - 1), row[2]];
  });
}

/** Whether two records are of models of one shape, so that a head of one has its like in the other. */
export function haveOneShape(one: Recorded, two: Recorded): boolean {
  const shape = ({ places }: Recorded) => JSON.stringify(places.map(({ name, kind, heads }) => [name, kind, heads]));
  return shape(one) === shape(two);
}

export function readManifest(value: unknown): Manifest {
  need(isObject(value), "there is no manifest");
  need(value.format === 1, `this page reads format 1, the data says ${JSON.stringify(value.format)?.slice(0, 20)}`);
  need(Array.isArray(value.records) && (value.records.length === 1 || value.records.length === 2), "one or two records were expected");
  const parts: Record<string, string> = Object.create(null);
  for (const [name, packed] of Object.entries(isObject(value.parts) ? value.parts : {})) {
    need(typeof packed === "string", "a part should be text");
    parts[name] = packed;
  }
  const records = value.records.map(record);
  return {
    host: text(value.host, "host"),
    words: scoreWords(value.words),
    records,
    parts,
    differences: differences(value.differences, records[0]!),
    small: count(value.small, "small", 1, 256),
    budget: typeof value.budget === "number" ? value.budget : 0,
    bound: typeof value.bound === "number" ? value.bound : 0,
  };
}

export function sideTokens(from: Recorded, which: Side, length: number): string[] {
  if (which === "target") return from.tokens;
  if (which === "source" && from.source_tokens) return from.source_tokens;
  return Array.from({ length }, (_, at) => String(at));
}

export function queryTokens(from: Recorded, at: Place): string[] {
  return sideTokens(from, at.queries, at.n_queries);
}

export function keyTokens(from: Recorded, at: Place): string[] {
  return sideTokens(from, at.keys, at.n_keys);
}

export function hasWords(at: Place): boolean {
  return at.queries !== "positions" && at.keys !== "positions";
}

function stackOf({ label }: Place): string {
  return /^(encoder|decoder|cross) \d+$/.exec(label)?.[1] ?? "";
}

/** "Layer 3", or "Encoder 3", "Decoder 3" or "Cross 3" where there are two stacks. */
export function placeLabel(from: Recorded, at: number): string {
  const here = from.places[at]!;
  if (/^\d+$/.test(here.label)) return `Layer ${here.label}`;
  return stackOf(here) ? here.label[0]!.toUpperCase() + here.label.slice(1) : here.label;
}

/** Whether the mean of all layers of one place is that of another, too. */
export function isMeantWith(one: Place, other: Place): boolean {
  return one.kind === other.kind && one.n_queries === other.n_queries && one.n_keys === other.n_keys && one.stack === other.stack;
}

/** "all layers", and of two stacks which ones. */
export function allLayers(at: Place): string {
  const stack = stackOf(at);
  return stack === "cross" ? "all cross-attention layers" : stack ? `all ${stack} layers` : "all layers";
}

/** Whether single weights can be had, not only a picture of the whole. */
export function isExact(at: Place): boolean {
  return at.grid !== null && at.grid[0] === at.n_queries && at.grid[1] === at.n_keys;
}

/** The place as its map has it: where only a picture was kept, its cells stand for the tokens. */
export function mapPlace(at: Place): Place {
  if (isExact(at) || !at.grid) return at;
  return { ...at, n_queries: at.grid[0], n_keys: at.grid[1], queries: "positions", keys: "positions", causal: false, visible: null, seen_by: null };
}

/** The position of the first token in each cell of a picture. */
export function cellStarts(cells: number, tokens: number): string[] {
  return Array.from({ length: cells }, (_, cell) => String(Math.floor((cell * tokens) / cells)));
}

/** "Layer 3, head 2"; a mean over layers names no single one. */
export function headTitle(from: Recorded, at: number, head: number | "layer" | "all"): string {
  const here = from.places[at]!;
  if (head === "all") return `Mean of ${allLayers(here)}`;
  return `${placeLabel(from, at)}, ${head === "layer" ? "mean of its heads" : `head ${here.heads[head]}`}`;
}
