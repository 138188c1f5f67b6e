// Source × target: two columns of words with a line for every weight that matters, and the same as
// a table of shades. Meant for cross-attention; shows self-attention too where there is none.

import { current, question, words, type Context, type Page } from "../context";
import { headPicker } from "../controls";
import { h, message, percent, svg } from "../dom";
import { isExact, keyTokens, queryTokens } from "../outline";
import { TILE } from "../source";
import { headKeys } from "./head";
import { label, quoted } from "../words";

const LINE = 30; // pixels a word
const MIDDLE = 260; // pixels between the columns
const LINES = 3000; // drawn at most
let least = 0.12; // weights below are not drawn; kept while the page is open

export function align(context: Context): Page {
  const view = new AlignView(context);
  void view.load();
  return { element: view.element, restyle: () => view.draw(), key: (event) => view.key(event) };
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
  private tile = { ti: 0, si: 0 };
  private buttons: Record<"query" | "key", HTMLElement[]> = { query: [], key: [] };
  private paths: { element: SVGElement; t: number; s: number; weight: number }[] = [];

  constructor(private readonly context: Context) {
    const { record, place } = current(context);
    this.rows = queryTokens(record, place);
    this.columns = keyTokens(record, place);
    const cross = place.kind === "cross";
    const shown = h("output", { text: percent(least) });
    const slider = h("input", {
      type: "range", min: 1, max: 60, value: Math.round(least * 100),
      on: { input: () => { least = Number(slider.value) / 100; shown.textContent = percent(least); this.draw(); } },
    });
    const aside = h(
      "aside", { class: "panel" },
      h("h1", { text: "Alignment" }),
      h("p", { class: "facts", text: cross ? "Source on the left, target on the right: each line is how much a target word looks at a source word." : "This record has no cross-attention; these are the lines of one self-attention, keys on the left, queries on the right." }),
      headPicker(context, true, crossPlaces(context)),
      h("label", { class: "field" }, h("span", { text: "At least" }), slider, shown),
      this.sentence, this.ranking,
    );
    this.element = h("section", { class: "page align", "aria-label": "Alignment" }, this.stage, aside);
  }

  async load(): Promise<void> {
    const { state } = this.context;
    if (!isExact(current(this.context).place)) {
      this.stage.replaceChildren(message("This record kept a coarse picture here, not single weights, so there are no lines to draw."));
      return;
    }
    if (state.token >= 0) {
      const at = Math.floor(state.token / TILE);
      if (state.side === "query") this.tile.ti = at;
      else this.tile.si = at;
    }
    try {
      this.weights = await this.context.source.get(question("map", this.context, 0, 0, this.tile.ti, this.tile.si));
      this.draw();
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

  private shown(): { t: number; s: number; t0: number; s0: number } {
    const [t0, s0] = [this.tile.ti * TILE, this.tile.si * TILE];
    return { t: Math.min(TILE, this.rows.length - t0), s: Math.min(TILE, this.columns.length - s0), t0, s0 };
  }

  draw(): void {
    if (!this.weights) return;
    const { t, s, t0, s0 } = this.shown();
    const height = Math.max(t, s) * LINE;
    const [padT, padS] = [((Math.max(t, s) - t) * LINE) / 2, ((Math.max(t, s) - s) * LINE) / 2];
    this.paths = [];
    for (let y = 0; y < t; y += 1) {
      for (let x = 0; x < s; x += 1) {
        const weight = this.weights[y * s + x]!;
        if (weight >= least) this.paths.push({ t: t0 + y, s: s0 + x, weight, element: svg("path", { d: curve(padS + (x + 0.5) * LINE, padT + (y + 0.5) * LINE) }) });
      }
    }
    this.paths.sort((a, b) => b.weight - a.weight);
    this.paths.length = Math.min(LINES, this.paths.length);
    const lines = svg("svg", { class: "lines", width: MIDDLE, height, viewBox: `0 0 ${MIDDLE} ${height}`, role: "img", "aria-label": `${this.paths.length} lines of at least ${percent(least)}` });
    lines.append(...this.paths.map((path) => path.element).reverse());
    const [left, right] = [this.column("key", s0, s), this.column("query", t0, t)];
    left.style.paddingTop = `${padS}px`;
    right.style.paddingTop = `${padT}px`;
    this.stage.replaceChildren(h("div", { class: "pair-columns" }, left, lines, right), ...this.turner());
    this.mark();
  }

  private column(which: "query" | "key", first: number, count: number): HTMLElement {
    const names = which === "query" ? this.rows : this.columns;
    this.buttons[which] = Array.from({ length: count }, (_, index) => {
      const at = first + index;
      const show = () => this.mark({ which, at });
      return h(
        "button",
        { type: "button", class: "word", "data-at": at, "aria-pressed": "false", on: { click: () => this.choose(which, at), pointerenter: show, pointerleave: () => this.mark(), focus: show, blur: () => this.mark() } },
        h("bdi", { dir: "auto", text: label(names[at]!, 22) }),
        h("span", { class: "share" }),
      );
    });
    const side = h("div", { class: `words ${which}`, role: "group", "aria-label": which === "query" ? "Target words" : "Source words" }, ...this.buttons[which]);
    side.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const at = this.buttons[which].indexOf(event.target as HTMLElement);
      const over = event.key === "ArrowLeft" || event.key === "ArrowRight" ? (which === "query" ? "key" : "query") : null;
      const next = step ? this.buttons[which][at + step] : over ? this.buttons[over][Math.min(at, this.buttons[over].length - 1)] : null;
      if (!next || at < 0) return;
      event.preventDefault();
      event.stopPropagation();
      next.focus();
    });
    return side;
  }

  private turner(): HTMLElement[] {
    if (this.rows.length <= TILE && this.columns.length <= TILE) return [];
    const turn = (words: string, change: { ti?: number; si?: number }, open: boolean) =>
      h("button", { type: "button", text: words, disabled: !open, on: { click: () => { this.tile = { ...this.tile, ...change }; this.context.go({ token: -1 }, true); void this.load(); } } });
    const { ti, si } = this.tile;
    const pager = h(
      "div", { class: "pager" },
      turn("‹ keys", { si: si - 1 }, si > 0), turn("keys ›", { si: si + 1 }, (si + 1) * TILE < this.columns.length),
      h("span", { text: `keys from ${si * TILE}, queries from ${ti * TILE}` }),
      turn("‹ queries", { ti: ti - 1 }, ti > 0), turn("queries ›", { ti: ti + 1 }, (ti + 1) * TILE < this.rows.length),
    );
    return [pager];
  }

  private choose(which: "query" | "key", at: number): void {
    const { token, side } = this.context.state;
    const again = token === at && side === which;
    this.context.go({ token: again ? -1 : at, side: which }, true);
    this.mark();
  }

  /** Lines of the chosen word stand out; the words at their other ends show the share. */
  private mark(hover?: { which: "query" | "key"; at: number }): void {
    const { token, side } = this.context.state;
    const chosen = hover ?? (token >= 0 ? { which: side, at: token } : null);
    const { t0, s0, s } = this.shown();
    for (const path of this.paths) {
      const own = !chosen || (chosen.which === "query" ? path.t : path.s) === chosen.at;
      path.element.setAttribute("class", chosen ? (own ? "own" : "other") : "");
      path.element.style.strokeWidth = String(0.75 + path.weight * 5);
      path.element.style.strokeOpacity = String(own ? Math.min(1, 0.2 + path.weight) : 0.05);
    }
    for (const which of ["query", "key"] as const) {
      this.buttons[which].forEach((button, index) => {
        const at = index + (which === "query" ? t0 : s0);
        const own = chosen?.which === which && chosen.at === at;
        button.classList.toggle("chosen", own);
        button.setAttribute("aria-pressed", String(token === at && side === which));
        let value = NaN;
        if (chosen && chosen.which !== which) value = which === "key" ? this.at(chosen.at - t0, index, s) : this.at(index, chosen.at - s0, s);
        button.classList.toggle("lit", value >= least);
        (button.lastChild as HTMLElement).textContent = value >= least ? percent(value) : "";
      });
    }
    this.tell(chosen);
  }

  private at(y: number, x: number, width: number): number {
    return this.weights![y * width + x] ?? NaN;
  }

  private tell(chosen: { which: "query" | "key"; at: number } | null): void {
    if (!chosen) {
      this.sentence.replaceChildren("Point at a word, or choose one, to see its lines alone.");
      this.ranking.replaceChildren();
      return;
    }
    const [own, other] = chosen.which === "query" ? [this.rows, this.columns] : [this.columns, this.rows];
    const { t, s, t0, s0 } = this.shown();
    const list = Array.from({ length: chosen.which === "query" ? s : t }, (_, index): [number, number] =>
      chosen.which === "query" ? [s0 + index, this.at(chosen.at - t0, index, s)] : [t0 + index, this.at(index, chosen.at - s0, s)],
    ).filter(([, value]) => value > 0);
    const best = list.sort((a, b) => b[1] - a[1]).slice(0, 6);
    const verb = chosen.which === "query" ? " looks at" : " is looked at by";
    this.sentence.replaceChildren(h("bdi", { dir: "auto", text: label(own[chosen.at]!) }), h("sub", { text: String(chosen.at) }), verb);
    this.ranking.replaceChildren(
      ...best.map(([at, value]) => {
        const bar = h("span", { class: "fill" });
        bar.style.width = `${Math.min(100, value * 100)}%`;
        return h("li", {}, h("span", { class: "name" }, h("bdi", { dir: "auto", text: label(other[at]!, 14) }), h("sub", { text: String(at) })), h("span", { class: "bar" }, bar), h("span", { class: "value", text: percent(value) }));
      }),
    );
    this.context.announce(`${quoted(own[chosen.at]!)}${verb} ${best.slice(0, 3).map(([at, value]) => `${quoted(other[at]!)} ${percent(value)}`).join(", ")}`);
  }
}

function curve(from: number, to: number): string {
  return `M0 ${from}C${MIDDLE * 0.45} ${from} ${MIDDLE * 0.55} ${to} ${MIDDLE} ${to}`;
}
