// One head as a map that can be zoomed from the whole text to single weights.

import { colours, current, mapCurve, question, words, type Context, type Page } from "../context";
import { Legend, colourPicker, headPicker, measurePicker, notes, savers, scoreBars, sinkPicker, stepHead, stepLayer } from "../controls";
import { visibleTo } from "../chance";
import { exact, h, many, message } from "../dom";
import { hasLooks, tellLook, worthOf } from "../effects";
import { Heatmap, type Cell } from "../heatmap";
import { amount, measureOf } from "../measures";
import { cellStarts, headTitle, isExact, keyTokens, mapPlace, queryTokens, type Place } from "../manifest";
import { chosenPair } from "../state";
import { label, quoted } from "../words";

export function head(context: Context): Page {
  const { record, place } = current(context);
  const { state } = context;
  const coarse = !isExact(place);
  const valued = measureOf(context) === "values";
  const drawn = mapPlace(place);
  const rows = coarse ? cellStarts(drawn.n_queries, place.n_queries) : queryTokens(record, place);
  const columns = coarse ? cellStarts(drawn.n_keys, place.n_keys) : keyTokens(record, place);
  const curve = mapCurve(context, [place]);
  const legend = new Legend(context, curve);
  const trouble = h("div", { class: "trouble" });
  const readout = new Readout(context, rows, columns, place);
  const title = headTitle(record, state.place, state.head);
  const map = new Heatmap({
    place: drawn, rows, columns, small: context.manifest.small,
    label: `${title}. ${place.n_queries} queries from top to bottom, ${place.n_keys} keys from left to right. Arrow keys move, plus and minus zoom, 0 shows all.`,
    fetch: ({ lt, ls, ti, si }, signal) => context.source.get(question("map", context, lt, ls, ti, si), signal),
    ramp: () => colours(context),
    curve,
    at: state.at,
    onMove: (at) => context.go({ at }, true),
    onCell: (cell, kept) => {
      readout.show(cell, kept);
      if (kept && cell && !coarse) context.go({ token: cell.t, side: "query", mate: cell.s }, true);
    },
    onLoad: (loaded) => {
      legend.update(...loaded.scale);
      const problem = loaded.tiles.problem;
      trouble.replaceChildren(...(problem ? [message(problem, "error")] : []));
      readout.again(loaded);
    },
  });
  if (!coarse) void showChosen(context, map);
  const button = (text: string, words: string, act: () => void) =>
    h("button", { type: "button", class: "round", text, "aria-label": words, title: words, on: { click: act } });
  const zoomers = h("div", { class: "zoomers" }, button("+", "Zoom in  +", () => map.zoomBy(2)), button("−", "Zoom out  −", () => map.zoomBy(0.5)), button("⤢", "Show all  0", () => map.fit()));
  const aside = h(
    "aside",
    { class: "panel" },
    h("h1", { text: title }),
    state.head === "all" ? null : h("p", { class: "facts", title: place.name, text: place.name }),
    ...notes(context), headPicker(context, true), ...measurePicker(context),
    readout.element,
    coarse ? message(place.grid ? `This record kept a picture of ${place.grid[0]} × ${place.grid[1]} cells here, not single weights.` : "This record kept no map here.") : null,
    ...worthOf(context), scoreBars(context),
    legend.element,
    drawn.causal ? h("p", { class: "hint", text: "Hatched: keys that come later, which a query may not look at." }) : null,
    coarse ? null : sinkPicker(context),
    colourPicker(context, curve, !coarse && !state.bare && !valued),
    savers(context, map, `${record.model} ${title}`),
  );
  const element = h("section", { class: "page head", "aria-label": title }, h("div", { class: "stage" }, map.element, zoomers, trouble), aside);
  return {
    element,
    close: () => map.close(),
    restyle: () => {
      map.restyle();
      legend.update(...map.scale);
    },
    key: (event) => headKeys(context, event),
  };
}

/** The pair that was chosen, here or on another page; of a word alone, with its largest weight. */
async function showChosen(context: Context, map: Heatmap): Promise<void> {
  const { token, side } = context.state;
  if (token < 0) return;
  const pair = chosenPair(context.state);
  if (pair) return map.setCursor(pair);
  try {
    const values = await context.source.get(question(side === "query" ? "row" : "column", context, token));
    let best = -1; // one by one: a call takes no more than about a hundred thousand arguments
    for (const [at, value] of values.entries()) if (Number.isFinite(value) && (best < 0 || value > values[best]!)) best = at;
    if (context.state.token !== token || best < 0 || !map.element.isConnected) return;
    map.setCursor(side === "query" ? { t: token, s: best } : { t: best, s: token });
  } catch {
    return; // the page says itself what it does not have
  }
}

export function headKeys(context: Context, event: KeyboardEvent): boolean {
  if (event.key === "[") stepHead(context, -1);
  else if (event.key === "]") stepHead(context, 1);
  else if (event.key === "{") stepLayer(context, -1);
  else if (event.key === "}") stepLayer(context, 1);
  else return false;
  return true;
}

/** The pair under pointer or cursor, and its exact weight; asked for where the zoom is too far. */
class Readout {
  readonly element: HTMLElement;
  private readonly pair: HTMLElement;
  private readonly value: HTMLElement;
  private readonly times = h("p", { class: "times" });
  private readonly note: HTMLElement;
  private readonly look: HTMLElement | null; // what the look is worth, where some were measured
  private shown: Cell | null = null;
  private kept = false;
  private timer = 0;

  constructor(private readonly context: Context, private readonly rows: string[], private readonly columns: string[], private readonly place: Place) {
    this.pair = h("p", { class: "pair" });
    this.value = h("p", { class: "weight" });
    this.note = h("p", { class: "hint" });
    this.look = hasLooks(current(context).record) ? h("p", { class: "look" }) : null;
    this.element = h("div", { class: this.look ? "readout looks" : "readout" }, this.pair, this.value, this.times, this.note, this.look);
    this.show(null, false);
  }

  again(map: Heatmap): void {
    if (this.shown && this.shown.value === undefined) this.show(map.cell(this.shown), this.kept);
  }

  show(cell: Cell | null, kept: boolean): void {
    clearTimeout(this.timer);
    this.shown = cell;
    this.kept = kept;
    this.times.textContent = "";
    if (this.look) this.look.textContent = cell && isExact(this.place) ? tellLook(this.context, cell.t, cell.s) : "";
    if (!cell) {
      this.pair.replaceChildren("Point at a cell, or use the arrow keys.");
      this.value.textContent = "";
      this.note.textContent = "";
      return;
    }
    const { t, s, rows, columns, value } = cell;
    if (!isExact(this.place)) {
      this.pair.replaceChildren(`Positions from ${this.rows[t]} look at positions from ${this.columns[s]}`);
      this.note.textContent = "The mean of this cell";
      this.value.textContent = value === undefined ? "…" : exact(value);
      return;
    }
    this.pair.replaceChildren(h("bdi", { dir: "auto", text: label(this.rows[t]!) }), h("sub", { text: String(t) }), " looks at ", h("bdi", { dir: "auto", text: label(this.columns[s]!) }), h("sub", { text: String(s) }));
    if (rows * columns === 1) {
      this.note.textContent = "";
      this.tell(value);
      return;
    }
    this.note.textContent = value === undefined ? "" : `This pixel is the mean of ${rows} × ${columns} weights: ${exact(value)}`;
    this.value.textContent = "…";
    const { record, place, head } = this.context.state;
    if (!this.context.source.exact(record, place, head)) {
      this.note.textContent = `The mean of ${rows} × ${columns} weights; single ones need “regard view”.`;
      this.value.textContent = value === undefined ? "…" : exact(value);
      return;
    }
    this.timer = window.setTimeout(() => void this.fetch(t, s), 60);
  }

  private spellOut(value: number, hidden: boolean): string {
    const { state, manifest } = this.context;
    // What is left without sinks is multiplied, and its rounding with it.
    if (manifest.bound && state.bare && !hidden) return `≈ ${Number(value.toPrecision(2))}`;
    return exact(value, hidden ? 0 : manifest.bound);
  }

  private async fetch(t: number, s: number): Promise<void> {
    try {
      const [value] = await this.context.source.get(question("weight", this.context, t, s));
      if (this.shown?.t === t && this.shown.s === s) this.tell(value);
    } catch (problem) {
      if (this.shown?.t === t && this.shown.s === s) this.value.textContent = words(problem);
    }
  }

  private tell(value: number | undefined): void {
    if (!this.shown) return;
    const { t, s } = this.shown;
    const keys = visibleTo(this.place, t);
    const hidden = this.place.causal && s > t + this.place.n_keys - this.place.n_queries;
    this.value.textContent = value === undefined ? "…" : this.spellOut(value, hidden);
    const measure = measureOf(this.context);
    if (value !== undefined && keys && !hidden && measure === "weights" && !this.context.state.bare) this.times.textContent = `${Number((value * keys).toPrecision(3))} times chance: ${quoted(this.rows[t]!)} may look at ${many(keys, "key")}`;
    if (value === undefined || !this.kept) return;
    this.context.announce(`${quoted(this.rows[t]!)} at ${t} looks at ${quoted(this.columns[s]!)} at ${s}: ${amount(measure, value)}`);
  }
}
