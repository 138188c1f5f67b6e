// Where weights come from. One question, one array of float32, whichever host the page came through:
// parts inlined in the page, the local server, or the notebook's kernel. See queries.py for the
// questions. What an inlined page does not hold it computes from whole matrices, or it says so.

import { isExact, isMeantWith, mapPlace, type Manifest, type Place } from "./manifest";

export const TILE = 256;
export const OF_WEIGHTS = ["map", "row", "column", "weight", "received"]; // the questions about weights
export type HeadChoice = number | "layer" | "all";

/** Something this page does not hold; the message says what to do. */
export class Missing extends Error {}

export interface Source {
  get(question: string, signal?: AbortSignal): Promise<Float32Array>;
  /** Whether single weights of this head can be had. */
  exact(record: number, place: number, head: HeadChoice): boolean;
}

export function cellsOf(length: number, level: number): number {
  return Math.ceil(length / 2 ** level);
}

export function wholeLevel(length: number, cells: number): number {
  let level = 0;
  while (cellsOf(length, level) > cells) level += 1;
  return level;
}

function floats(bytes: ArrayBuffer | Uint8Array, length: number): Float32Array {
  const view = bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes);
  if (view.byteLength !== length * 4) {
    throw new Error(`expected ${length * 4} bytes of weights, ${view.byteLength} came`);
  }
  const copy = view.slice().buffer;
  return new Float32Array(copy);
}

/** How many numbers the answer to a question must have. */
export function expectedLength(manifest: Manifest, question: string): number {
  const [kind, record, place, , ...rest] = question.split("/");
  const { tokens, next } = manifest.records[Number(record)]!;
  if (kind === "next") return tokens.length * (2 * next!.k + 1);
  if (kind === "given" || kind === "rollout" || kind === "drawn") return tokens.length;
  const here = manifest.records[Number(record)]?.places[Number(place)];
  if (!here) throw new Error(`no place for ${question}`);
  if (kind === "row" || kind === "received" || kind === "norms" || kind === "gradient_columns") return here.n_keys;
  if (kind === "column" || kind === "gradient_rows") return here.n_queries;
  if (kind === "weight") return 1;
  const [lt, , ti] = rest.map(Number) as [number, number, number];
  const height = Math.min(TILE, cellsOf(mapPlace(here).n_queries, lt) - ti * TILE);
  return height * tileWidth(manifest, question)!;
}

/** How many columns a tile has; nothing for what is no tile. */
function tileWidth(manifest: Manifest, question: string): number | undefined {
  const [kind, record, place, , , ls, , si] = question.split("/");
  if (kind !== "map") return undefined;
  const { n_keys } = mapPlace(manifest.records[Number(record)]!.places[Number(place)]!);
  return Math.min(TILE, cellsOf(n_keys, Number(ls)) - Number(si) * TILE);
}

/** A part as numbers; what was rounded lies column by column, upper bytes first (page.py, pack). */
async function unpack(text: string, length: number, columns: number): Promise<Float32Array> {
  const colon = text.indexOf(":");
  if (colon < 0) return floats(await inflate(text, length * 4), length);
  const levels = Number(text.slice(0, colon));
  const codes = await inflate(text.slice(colon + 1), length * 2);
  if (codes.length !== length * 2 || !(levels >= 0)) throw new Error("a part of this page has the wrong length");
  const rows = length / columns;
  return Float32Array.from({ length }, (_, at) => {
    const from = (at % columns) * rows + Math.floor(at / columns);
    const code = codes[from]! * 256 + codes[length + from]!;
    return levels ? code / levels : half(code);
  });
}

/** A float16 of weights: neither negative nor infinite. */
function half(bits: number): number {
  const exponent = bits >> 10;
  return exponent ? 2 ** (exponent - 25) * (1024 + (bits & 1023)) : 2 ** -24 * bits;
}

/** Bytes out of a part; never more than `most`, whatever the part says. */
async function inflate(text: string, most: number): Promise<Uint8Array> {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = binary.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const reader = stream.getReader();
  const pieces: Uint8Array[] = [];
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    length += value.length;
    if (length > most) {
      await reader.cancel();
      throw new Error("a part of this page is longer than it says");
    }
    pieces.push(value);
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

const MOST_TOP = 64; // largest weights a query may have in a page

/** As many numbers for each query as there are; how many, the part itself tells. */
async function unpackRows(text: string, queries: number): Promise<Float32Array> {
  const values = await inflate(text, queries * 2 * MOST_TOP * 4);
  if (values.length % (queries * 8)) throw new Error("a part of this page has the wrong length");
  return floats(values, values.length / 4);
}

/** A row of which only the largest weights are known; the rest is left 0. */
function sparseRow(top: Float32Array, place: Place, query: number): Float32Array {
  const row = new Float32Array(place.n_keys);
  const k = top.length / place.n_queries / 2;
  for (let at = 0; at < k; at += 1) {
    const key = top[query * 2 * k + k + at]!;
    const weight = top[query * 2 * k + at]!;
    if (weight > 0 && key >= 0 && key < place.n_keys) row[key] = weight;
  }
  return row;
}

/** Means over cells of a tile, from the whole matrix. */
function pool(whole: Float32Array, place: Place, tile: number[]): Float32Array {
  const [lt, ls, ti, si] = tile as [number, number, number, number];
  const [ct, cs] = [2 ** lt, 2 ** ls];
  const height = Math.min(TILE, cellsOf(place.n_queries, lt) - ti * TILE);
  const width = Math.min(TILE, cellsOf(place.n_keys, ls) - si * TILE);
  const out = new Float32Array(height * width);
  for (let y = 0; y < height; y += 1) {
    const t0 = (ti * TILE + y) * ct;
    const t1 = Math.min(place.n_queries, t0 + ct);
    for (let x = 0; x < width; x += 1) {
      const s0 = (si * TILE + x) * cs;
      const s1 = Math.min(place.n_keys, s0 + cs);
      let sum = 0;
      for (let t = t0; t < t1; t += 1) {
        for (let s = s0; s < s1; s += 1) sum += whole[t * place.n_keys + s]!;
      }
      out[y * width + x] = sum / ((t1 - t0) * (s1 - s0));
    }
  }
  return out;
}

export function headsMeant(manifest: Manifest, record: number, place: number, head: HeadChoice): [number, number][] {
  const places = manifest.records[record]!.places;
  const here = places[place]!;
  const range = (at: number): [number, number][] =>
    Array.from({ length: places[at]!.n_heads }, (_, each) => [at, each]);
  if (head === "layer") return range(place);
  if (head !== "all") return [[place, head]];
  return places.flatMap((other, at) => (isMeantWith(other, here) ? range(at) : []));
}

export class InlineSource implements Source {
  private readonly held = new Map<string, Promise<Float32Array>>();

  constructor(private readonly manifest: Manifest) {}

  exact(record: number, place: number, head: HeadChoice): boolean {
    const here = this.manifest.records[record]!.places[place]!;
    return isExact(here) && headsMeant(this.manifest, record, place, head).every(
      ([p, each]) => `whole/${record}/${p}/${each}` in this.manifest.parts,
    );
  }

  get(question: string): Promise<Float32Array> {
    let promise = this.held.get(question);
    if (!promise) {
      promise = this.find(question);
      this.held.set(question, promise);
      // Answers can be computed again; only the newest few hundred are kept.
      if (this.held.size > 400) this.held.delete(this.held.keys().next().value as string);
    }
    return promise;
  }

  private async find(question: string): Promise<Float32Array> {
    const parts = this.manifest.parts;
    if (question in parts) {
      const length = expectedLength(this.manifest, question);
      return unpack(parts[question]!, length, tileWidth(this.manifest, question) ?? length);
    }
    const [kind, record, place, head, ...rest] = question.split("/") as [string, string, string, string, ...string[]];
    if (kind === "rollout" || kind === "drawn") return this.roll(kind, record, Number(place));
    if (head === "layer" || head === "all") {
      const pairs = headsMeant(this.manifest, Number(record), Number(place), head);
      const all = await Promise.all(
        pairs.map(([p, each]) => this.get([kind, record, p, each, ...rest].join("/"))),
      );
      return mean(all);
    }
    if (!OF_WEIGHTS.includes(kind)) throw new Missing("This did not fit into this file. Save the record and open it with “regard view” to see it.");
    const name = `whole/${record}/${place}/${head}`;
    const here = this.manifest.records[Number(record)]!.places[Number(place)]!;
    if (kind !== "map" && !isExact(here)) {
      throw new Missing("This record kept statistics and a coarse picture here, not single weights. Record with watch(model, keep=\"qk\") to see them.");
    }
    if (kind === "row" && !(name in parts)) {
      const top = parts[`top/${record}/${place}/${head}`];
      if (top) return sparseRow(await unpackRows(top, here.n_queries), here, Number(rest[0]));
    }
    if (!(name in parts)) {
      throw new Missing(
        "These weights did not fit into this file. Save the record and open it with “regard view” to see every weight.",
      );
    }
    const drawn = mapPlace(here);
    return derive(kind, await this.whole(name, drawn), drawn, rest.map(Number));
  }

  /** A row or a column of the rollout, which is one matrix in the page. */
  private async roll(kind: string, record: string, token: number): Promise<Float32Array> {
    const name = `whole_rollout/${record}`;
    if (!(name in this.manifest.parts)) throw new Missing("The rollout did not fit into this file. Save the record and open it with “regard view” to see it.");
    const { places, rollout } = this.manifest.records[Number(record)]!;
    const here = places[rollout[0]!]!;
    return derive(kind === "rollout" ? "row" : "column", await this.whole(name, here), here, [token]);
  }

  private whole(name: string, place: Place): Promise<Float32Array> {
    let promise = this.held.get(name);
    if (!promise) {
      promise = unpack(this.manifest.parts[name]!, place.n_queries * place.n_keys, place.n_keys);
      this.held.set(name, promise);
    }
    return promise;
  }
}

export function derive(kind: string, whole: Float32Array, place: Place, numbers: number[]): Float32Array {
  const [first = 0, second = 0] = numbers;
  if (kind === "map") return pool(whole, place, numbers);
  if (kind === "row") return whole.slice(first * place.n_keys, (first + 1) * place.n_keys);
  if (kind === "weight") return whole.slice(first * place.n_keys + second, first * place.n_keys + second + 1);
  if (kind === "column") {
    return Float32Array.from({ length: place.n_queries }, (_, t) => whole[t * place.n_keys + first]!);
  }
  const sums = new Float64Array(place.n_keys);
  whole.forEach((value, at) => (sums[at % place.n_keys]! += value));
  return Float32Array.from(sums);
}

export function mean(all: Float32Array[]): Float32Array {
  const out = new Float64Array(all[0]!.length);
  for (const one of all) one.forEach((value, at) => (out[at]! += value));
  return Float32Array.from(out, (value) => value / all.length);
}

/** Questions answered elsewhere: the local server, or the kernel behind a notebook. */
export class RemoteSource implements Source {
  constructor(
    private readonly manifest: Manifest,
    private readonly ask: (question: string, signal?: AbortSignal) => Promise<ArrayBuffer | Uint8Array>,
  ) {}

  exact(record: number, place: number): boolean {
    return isExact(this.manifest.records[record]!.places[place]!);
  }

  async get(question: string, signal?: AbortSignal): Promise<Float32Array> {
    return floats(await this.ask(question, signal), expectedLength(this.manifest, question));
  }
}

/** First what the page holds, then the kernel: a saved notebook shows the former without the latter. */
export class LayeredSource implements Source {
  constructor(
    private readonly near: Source,
    private readonly far: Source,
  ) {}

  exact(record: number, place: number, head: HeadChoice): boolean {
    return this.near.exact(record, place, head) || this.far.exact(record, place, head);
  }

  async get(question: string, signal?: AbortSignal): Promise<Float32Array> {
    try {
      return await this.near.get(question, signal);
    } catch (problem) {
      if (!(problem instanceof Missing)) throw problem;
      return this.far.get(question, signal);
    }
  }
}

export async function askServer(question: string, signal?: AbortSignal): Promise<ArrayBuffer> {
  const reply = await fetch(`data/${question}`, { signal: signal ?? null, credentials: "omit" }).catch((problem: unknown) => {
    if (signal?.aborted) throw problem;
    throw new Error("The server does not answer: it was stopped, or its terminal was closed. Run the command again and open the address that it prints.");
  });
  if (!reply.ok) {
    const words = (await reply.text()).slice(0, 300);
    throw new Error(words || `the server answered ${reply.status}`);
  }
  return reply.arrayBuffer();
}
