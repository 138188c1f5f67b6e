// Two columns of words with a line for every weight that matters. Of cross-attention source on the left
// and target on the right; of self-attention queries on the left and keys on the right, several heads
// at once, each in its colour, where that is wanted. Chinese, Japanese and Korean are written in two
// rows, one above the other. A source without words, such as
// speech, is shown in spans of positions, a long text in parts; what a word looks at most is told
// of all keys, also those of other parts.

import { current, question, words, type Context, type Page } from "../context";
import { headPicker, notes, savers, sinkPicker } from "../controls";
import { h, message, percent, select, svg } from "../dom";
import { keepFocus } from "../focus";
import { isExact, keyTokens, queryTokens } from "../manifest";
import { TILE, cellsOf, wholeLevel } from "../source";
import { MOST_HEADS } from "../state";
import { headKeys } from "./head";
import { isCjk, label, quoted } from "../words";

const LINE = 30; // pixels a word
const SIGN = 18; // pixels a character, where words stand side by side
const MIDDLE = 260; // pixels between the columns, at most
const LINES = 3000; // drawn at most
const SPANS = 64; // of positions, at most
const REST = 80; // milliseconds that the pointer rests on a word before its weights are asked for
let least = 0.12; // weights below are not drawn; kept while the page is open
const most = { self: 3, cross: 0 }; // lines that a query has, at most; 0: all. Kept too

export function align(context: Context): Page {
  const view = new AlignView(context);
  void view.load();
  return { element: view.element, close: () => view.close(), restyle: () => view.draw(), key: (event) => view.key(event) };
}

interface Chosen {
  which: "query" | "key";
  at: number;
}

export function crossPlaces(context: Context): number[] {
  const { record } = current(context);
  const cross = record.places.flatMap((place, at) => (place.kind === "cross" ? [at] : []));
  return cross.length ? cross : record.places.map((_, at) => at);
}

class AlignView {
  readonly element: HTMLElement;
  private readonly stage = h("div", { class: "stage" });
  private readonly sentence = h("p", { class: "sentence" });
  private readonly ranking = h("ol", { class: "ranking" });
  private readonly rows: string[];
  private readonly columns: string[];
  private weights: Float32Array | null = null;
  private beside: [number, Float32Array][] = []; // other heads, and their weights
  private readonly self: boolean;
  private readonly across: boolean; // whether words stand side by side, and not one below the other
  private readonly level: number; // each row of the source is 2^level keys
  private timer = 0;
  private tile = { ti: 0, si: -1 }; // the part shown; -1: the one with most of the weight
  private buttons: Record<"query" | "key", HTMLElement[]> = { query: [], key: [] };
  private paths: { element: SVGElement; t: number; s: number; weight: number; head: number }[] = [];

  constructor(private readonly context: Context) {
    const { record, place } = current(context);
    this.self = place.kind === "self";
    this.rows = queryTokens(record, place);
    this.level = place.keys === "positions" && place.n_keys > TILE ? wholeLevel(place.n_keys, SPANS) : 0;
    this.columns = this.level ? spans(place.n_keys, 2 ** this.level) : keyTokens(record, place);
    const cross = place.kind === "cross";
    this.across = !this.level && isCjk(this.rows) && isCjk(this.columns);
    const [one, two] = this.across ? ["above", "below"] : ["on the left", "on the right"];
    const facts = cross ? `Source ${one}, target ${two}: each line is how much a target word looks at a source word.` : `Who looks ${one}, at what ${two}: each line is how much a word looks at another.`;
    const written = " A word stands where it is read: its lines are where the model looks while about to write the next.";
    const few = select("Lines", [["1", "1 a word"], ["2", "2 a word"], ["3", "3 a word"], ["5", "5 a word"], ["0", "all"]], String(most[place.kind]), (value) => { most[place.kind] = Number(value); this.draw(); });
    const shown = h("output", { text: percent(least) });
    const slider = h("input", {
      type: "range", min: 1, max: 60, value: Math.round(least * 100),
      on: { input: () => { least = Number(slider.value) / 100; shown.textContent = percent(least); this.draw(); } },
    });
    const aside = h(
      "aside", { class: "panel" },
      h("h1", { text: cross ? "Alignment" : "Lines" }),
      h("p", { class: "facts", text: facts + (cross || place.causal ? written : "") }),
      ...notes(context), headPicker(context, true, crossPlaces(context)),
      this.together(),
      h("label", { class: "field" }, h("span", { text: "At least" }), slider, shown),
      few,
      this.sentence, this.ranking, sinkPicker(context), savers(context, this.stage, `${record.model} lines`),
    );
    this.element = h("section", { class: "page align", "aria-label": cross ? "Alignment" : "Lines" }, this.stage, aside);
  }

  close(): void {
    clearTimeout(this.timer);
  }

  /** The heads of this layer, each of which can be drawn beside the chosen one. */
  private together(): HTMLElement | null {
    const { place } = current(this.context);
    const { head, also } = this.context.state;
    if (!this.self || typeof head !== "number" || place.n_heads < 2) return null;
    const shown = [head, ...also];
    const buttons = place.heads.map((number, at) => {
      const turn = shown.indexOf(at);
      const next = turn < 0 ? [...also, at].slice(0, MOST_HEADS - 1) : also.filter((other) => other !== at);
      return h("button", { type: "button", text: String(number), "data-focus": `beside-${at}`, class: turn < 0 ? "" : `line${turn}`, "aria-pressed": String(turn >= 0), disabled: at === head, title: at === head ? "the chosen head" : "draw this head too", on: { click: () => this.context.go({ also: next }) } });
    });
    return h("div", { class: "beside", role: "group", "aria-label": "Heads drawn together" }, h("span", { class: "hint", text: "Heads" }), ...buttons);
  }

  async load(): Promise<void> {
    if (!isExact(current(this.context).place)) {
      this.stage.replaceChildren(message("This record kept a coarse picture here, not single weights, so there are no lines to draw."));
      return;
    }
    const chosen = this.chosen();
    if (chosen?.which === "query") this.tile.ti = Math.floor(chosen.at / TILE);
    if (chosen?.which === "key") this.tile.si = Math.floor(chosen.at / TILE);
    await this.turn();
  }

  /** Show the part that was turned to. */
  private async turn(): Promise<void> {
    try {
      this.tile.si = this.tile.si < 0 ? await this.fullest() : this.tile.si;
      const means = await this.context.source.get(question("map", this.context, 0, this.level, this.tile.ti, this.tile.si));
      const { s0, s } = this.shown();
      // A cell is the mean of its keys; what is drawn is their sum.
      const sum = (values: Float32Array) => (this.level ? values.map((mean, at) => mean * this.keysOf(s0 + (at % s))) : values);
      const { record, place, also } = this.context.state;
      const others = also.map((head) => this.context.source.get(["map", record, place, head, 0, this.level, this.tile.ti, this.tile.si].join("/")));
      this.beside = (await Promise.all(others)).map((values, at) => [also[at]!, sum(values)]);
      this.weights = sum(means);
      keepFocus(this.stage, () => this.draw());
    } catch (problem) {
      this.stage.replaceChildren(message(words(problem), "error"));
    }
  }

  key(event: KeyboardEvent): boolean {
    if (event.key === "Escape" && this.context.state.token >= 0) {
      this.choose("query", -1);
      return true;
    }
    return headKeys(this.context, event);
  }

  private keysOf(row: number): number {
    return Math.min(2 ** this.level, current(this.context).place.n_keys - row * 2 ** this.level);
  }

  /** The part of the source that gets most of the weight of the queries shown. */
  private async fullest(): Promise<number> {
    const parts = cellsOf(this.columns.length, Math.log2(TILE));
    if (parts === 1) return 0;
    const means = await this.context.source.get(question("map", this.context, 0, Math.log2(TILE), this.tile.ti, 0)).catch(() => new Float32Array(parts));
    const sums = Array.from({ length: parts }, (_, part) => {
      const keys = Math.min(TILE, this.columns.length - part * TILE);
      return means.reduce((sum, mean, at) => sum + (at % parts === part && mean > 0 ? mean * keys : 0), 0);
    });
    return sums.indexOf(Math.max(...sums));
  }

  private shown(): { t: number; s: number; t0: number; s0: number } {
    const [t0, s0] = [this.tile.ti * TILE, this.tile.si * TILE];
    return { t: Math.min(TILE, this.rows.length - t0), s: Math.min(TILE, this.columns.length - s0), t0, s0 };
  }

  draw(): void {
    if (!this.weights) return;
    const { t, s, t0, s0 } = this.shown();
    const { across } = this;
    const wide = across ? MIDDLE : Math.max(70, Math.min(MIDDLE, this.stage.clientWidth - 300));
    const sizes = [this.rows.slice(t0, t0 + t), this.columns.slice(s0, s0 + s)].map((names) => names.map((name) => this.sizeOf(name)));
    const length = Math.max(...sizes.map(total));
    // Both columns run from end to end, so that a word is near what stands as far into the other.
    const [queryAxis, keyAxis] = sizes.map((own) => spread(own, length)) as [Spread, Spread];
    this.paths = [];
    for (const [head, weights] of [this.weights, ...this.beside.map(([, values]) => values)].entries()) {
      for (let y = 0; y < t; y += 1) {
        const row = [...weights.subarray(y * s, (y + 1) * s).entries()].filter(([, weight]) => weight >= least);
        const { kind } = current(this.context).place;
        if (most[kind]) row.sort((a, b) => b[1] - a[1]).splice(most[kind]);
        for (const [x, weight] of row) {
          const ends: [number, number] = [keyAxis.centres[x]!, queryAxis.centres[y]!];
          if (this.self) ends.reverse();
          this.paths.push({ t: t0 + y, s: s0 + x, weight, head, element: svg("path", { d: curve(...ends, wide, across) }) });
        }
      }
    }
    this.paths.sort((a, b) => b.weight - a.weight);
    this.paths.length = Math.min(LINES, this.paths.length);
    const [width, height] = across ? [length, wide] : [wide, length];
    const lines = svg("svg", { class: "lines", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${this.paths.length} lines of at least ${percent(least)}` });
    lines.append(...this.paths.map((path) => path.element).reverse());
    const [keys, queries] = [this.column("key", s0, s), this.column("query", t0, t)];
    keys.style.gap = `${keyAxis.gap}px`;
    queries.style.gap = `${queryAxis.gap}px`;
    const [left, right] = this.self ? [queries, keys] : [keys, queries];
    left.classList.add("left");
    const none = this.paths.length ? null : message(`No weight here reaches ${percent(least)}; move “At least” to the left.`);
    this.stage.replaceChildren(...(none ? [none] : []), h("div", { class: across ? "pair-columns across" : "pair-columns" }, left, lines, right), ...this.turner());
    this.mark();
  }

  /** Pixels that a word takes along its column or row. */
  private sizeOf(name: string): number {
    return this.across ? Math.max(LINE, SIGN * [...label(name, 22)].length + 8) : LINE;
  }

  private column(which: "query" | "key", first: number, count: number): HTMLElement {
    const names = which === "query" ? this.rows : this.columns;
    this.buttons[which] = Array.from({ length: count }, (_, index) => {
      const at = first + index;
      const show = () => this.mark({ which, at });
      const word = h(
        "button",
        { type: "button", class: "word", "data-at": at, title: which === "query" ? this.nextOf(at) : null, "aria-pressed": "false", on: { click: () => this.choose(which, at), pointerenter: show, pointerleave: () => this.mark(), focus: show, blur: () => this.mark() } },
        h("bdi", { dir: "auto", text: label(names[at]!, 22) }),
        h("span", { class: "share" }),
      );
      if (this.across) word.style.width = `${this.sizeOf(names[at]!)}px`;
      return word;
    });
    const side = h("div", { class: `words ${which}`, role: "group", "aria-label": which === "query" ? "Target words" : "Source words" }, ...this.buttons[which]);
    side.addEventListener("keydown", (event) => {
      const [down, up, left, right] = this.across ? ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"] : ["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"];
      const step = { [down!]: 1, [up!]: -1 }[event.key];
      const at = this.buttons[which].indexOf(event.target as HTMLElement);
      const over = event.key === left || event.key === right ? (which === "query" ? "key" : "query") : null;
      const next = step ? this.buttons[which][at + step] : over ? this.buttons[over][Math.min(at, this.buttons[over].length - 1)] : null;
      if (!next || at < 0) return;
      event.preventDefault();
      event.stopPropagation();
      next.focus();
    });
    return side;
  }

  /** What is written after a word was read, where that is known. */
  private nextOf(at: number): string | null {
    const { place } = current(this.context);
    const next = this.rows[at + 1];
    return (place.kind === "cross" || place.causal) && next !== undefined && place.queries !== "positions" ? `about to write ${quoted(next)}` : null;
  }

  private turner(): HTMLElement[] {
    if (this.rows.length <= TILE && this.columns.length <= TILE) return [];
    const turn = (words: string, change: { ti?: number; si?: number }, open: boolean) =>
      h("button", { type: "button", text: words, "data-focus": words, disabled: !open, on: { click: () => { this.tile = { ...this.tile, ...change }; this.context.go({ token: -1 }, true); void this.turn(); } } });
    const { ti, si } = this.tile;
    const pager = h(
      "div", { class: "pager" },
      turn("‹ keys", { si: si - 1 }, si > 0), turn("keys ›", { si: si + 1 }, (si + 1) * TILE < this.columns.length),
      h("span", { text: `keys from ${si * TILE}, queries from ${ti * TILE}` }),
      turn("‹ queries", { ti: ti - 1 }, ti > 0), turn("queries ›", { ti: ti + 1 }, (ti + 1) * TILE < this.rows.length),
    );
    return [pager];
  }

  /** The row that is chosen; of a span of positions, the address has the first. */
  private chosen(): Chosen | null {
    const { token, side } = this.context.state;
    if (token < 0) return null;
    return { which: side, at: side === "key" ? token >> this.level : token };
  }

  private choose(which: "query" | "key", at: number): void {
    const chosen = this.chosen();
    const again = chosen?.at === at && chosen.which === which;
    const token = which === "key" && at >= 0 ? at << this.level : at;
    this.context.go({ token: again ? -1 : token, side: which }, true);
    this.mark();
  }

  /** Lines of the chosen word stand out; the words at their other ends show the share. */
  private mark(hover?: Chosen): void {
    const kept = this.chosen();
    const { mate } = this.context.state;
    const chosen = hover ?? kept;
    const { t0, s0, s } = this.shown();
    for (const path of this.paths) {
      const own = !chosen || (chosen.which === "query" ? path.t : path.s) === chosen.at;
      const colour = this.beside.length ? ` line${path.head}` : "";
      path.element.setAttribute("class", (chosen ? (own ? "own" : "other") : "") + colour);
      path.element.style.strokeWidth = String(0.75 + path.weight * 5);
      path.element.style.strokeOpacity = String(own ? Math.min(1, 0.2 + path.weight) : 0.05);
    }
    for (const which of ["query", "key"] as const) {
      this.buttons[which].forEach((button, index) => {
        const at = index + (which === "query" ? t0 : s0);
        const own = chosen?.which === which && chosen.at === at;
        button.classList.toggle("chosen", own);
        button.classList.toggle("mate", kept !== null && kept.which !== which && at === (which === "key" ? mate >> this.level : mate) && mate >= 0);
        button.setAttribute("aria-pressed", String(kept?.at === at && kept.which === which));
        let value = NaN;
        if (chosen && chosen.which !== which) value = which === "key" ? this.at(chosen.at - t0, index, s) : this.at(index, chosen.at - s0, s);
        button.classList.toggle("lit", value >= least);
        (button.lastChild as HTMLElement).textContent = value >= least ? (this.across ? `${Math.round(value * 100)}%` : percent(value)) : "";
      });
    }
    this.tell(chosen);
  }

  private at(y: number, x: number, width: number): number {
    return this.weights![y * width + x] ?? NaN;
  }

  private tell(chosen: Chosen | null): void {
    clearTimeout(this.timer);
    if (!chosen) {
      this.sentence.replaceChildren("Point at a word, or choose one, to see its lines alone.");
      this.ranking.replaceChildren();
      return;
    }
    const { t, s, t0, s0 } = this.shown();
    const query = chosen.which === "query";
    const list = Array.from({ length: query ? s : t }, (_, index): [number, number] =>
      query ? [s0 + index, this.at(chosen.at - t0, index, s)] : [t0 + index, this.at(index, chosen.at - s0, s)],
    );
    const whole = query ? s === this.columns.length : t === this.rows.length;
    this.list(chosen, list, whole);
    if (!whole && !this.level) this.timer = window.setTimeout(() => void this.askAll(chosen), REST);
  }

  /** The weights of a word on all of the other side, not only on the part that is shown. */
  private async askAll(chosen: Chosen): Promise<void> {
    const timer = this.timer;
    try {
      const values = await this.context.source.get(question(chosen.which === "query" ? "row" : "column", this.context, chosen.at));
      if (timer === this.timer) this.list(chosen, [...values.entries()], true);
    } catch {
      return; // the list says that it is of the part shown
    }
  }

  private list(chosen: Chosen, weights: [number, number][], whole: boolean): void {
    const [own, other] = chosen.which === "query" ? [this.rows, this.columns] : [this.columns, this.rows];
    const best = weights.filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]).slice(0, 6);
    const { place } = current(this.context);
    const where = this.beside.length ? `, in head ${place.heads[Number(this.context.state.head)]}` : "";
    const verb = `${chosen.which === "query" ? " looks at" : " is looked at by"}${whole ? "" : ", within the part shown"}${where}`;
    // The number of a span says nothing beside its positions.
    const number = (names: string[], at: number) => (this.level && names === this.columns ? null : h("sub", { text: String(at) }));
    this.sentence.replaceChildren(h("bdi", { dir: "auto", text: label(own[chosen.at]!) }), number(own, chosen.at) ?? "", verb);
    this.ranking.replaceChildren(
      ...best.map(([at, value]) => {
        const bar = h("span", { class: "fill" });
        bar.style.width = `${Math.min(100, value * 100)}%`;
        return h("li", {}, h("span", { class: "name" }, h("bdi", { dir: "auto", text: label(other[at]!, 14) }), number(other, at)), h("span", { class: "bar" }, bar), h("span", { class: "value", text: percent(value) }));
      }),
    );
    this.context.announce(`${quoted(own[chosen.at]!)}${verb} ${best.slice(0, 3).map(([at, value]) => `${quoted(other[at]!)} ${percent(value)}`).join(", ")}`);
  }
}

/** "0–31", "32–63" and so on: positions, so many to a row. */
function spans(count: number, width: number): string[] {
  return Array.from({ length: Math.ceil(count / width) }, (_, row) => `${row * width}–${Math.min(count, (row + 1) * width) - 1}`);
}

interface Spread {
  gap: number;
  centres: number[];
}

const total = (sizes: number[]): number => sizes.reduce((sum, size) => sum + size, 0);

/** Words of these sizes with equal gaps, from one end of a length to the other. */
function spread(sizes: number[], length: number): Spread {
  const gap = sizes.length > 1 ? (length - total(sizes)) / (sizes.length - 1) : 0;
  let done = 0;
  const centres = sizes.map((size) => {
    done += size + gap;
    return done - gap - size / 2;
  });
  return { gap, centres };
}

/** From one column to the other, or from one row to the other. */
function curve(from: number, to: number, wide: number, across: boolean): string {
  const points = [[0, from], [wide * 0.45, from], [wide * 0.55, to], [wide, to]].map(([x, y]) => (across ? `${y} ${x}` : `${x} ${y}`));
  return `M${points[0]}C${points.slice(1).join(" ")}`;
}
