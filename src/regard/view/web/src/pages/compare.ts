// Two records side by side, moved together on one scale, and where they are of one size the
// difference. Of models of one shape it is the same head in both, with a list of the heads that
// differ most; of others a head of each, for a number says nothing about which is like which.

import { differenceRamp, type Curve } from "../colour";
import { colours, mapCurve, type Context, type Page } from "../context";
import { Legend, colourPicker, headLists, headPicker, savers, sinkPicker } from "../controls";
import { exact, h, message, percent } from "../dom";
import { Heatmap, type Cell, type MapOptions } from "../heatmap";
import { cellStarts, headTitle, isExact, keyTokens, mapPlace, placeLabel, queryTokens, type Place, type Recorded } from "../manifest";
import type { HeadChoice } from "../source";
import { chosenPair } from "../state";
import type { TileAt } from "../tiles";
import { headKeys } from "./head";
import { label, opening, shorten } from "../words";

/** What is looked at in one of the two records. */
interface Side {
  which: number;
  record: Recorded;
  place: Place;
  at: number;
  head: HeadChoice;
}

function sides(context: Context): [Side, Side] {
  const { place, head, other, alike } = context.state;
  const side = (which: number, at: number, chosen: HeadChoice): Side => {
    const record = context.manifest.records[which]!;
    return { which, record, place: record.places[at]!, at, head: chosen };
  };
  return [side(0, place, head), alike ? side(1, place, head) : side(1, ...other)];
}

export function compare(context: Context): Page {
  if (context.manifest.records.length < 2) {
    return { element: h("section", { class: "page compare", "aria-label": "Compare" }, message("There is one record here. Open two to compare them: regard view one.regard two.regard")) };
  }
  const [one, two] = sides(context);
  const readout = h("p", { class: "weights" }, "Point at a cell, or use the arrow keys.");
  const curve = mapCurve(context, [one.place, two.place]);
  const names = joint(labelsOf(one), labelsOf(two));
  const maps = new Maps(context, readout, curve, names);
  const figures = [
    maps.make(one, title("A", one, two), (at, signal) => tileOf(context, one, at, signal)),
    maps.make(two, title("B", two, one), (at, signal) => tileOf(context, two, at, signal)),
  ];
  const same = String(one.place.grid) === String(two.place.grid) && one.place.kind === two.place.kind;
  if (same) {
    const less = async (at: TileAt, signal: AbortSignal) => {
      const [a, b] = await Promise.all([tileOf(context, one, at, signal), tileOf(context, two, at, signal)]);
      return b.map((value, index) => value - a[index]!);
    };
    figures.push(maps.make(one, "B − A", less, names));
  }
  const pair = chosenPair(context.state);
  if (pair && isExact(one.place)) maps.choose(pair);
  const aside = h(
    "aside", { class: "panel" },
    h("h1", { text: context.state.alike ? headTitle(one.record, one.at, one.head) : "Two models" }),
    ...pickers(context, one, two), readout, maps.legend.element, same ? maps.signed.element : null,
    same ? null : message("The two maps differ in size, so there is no map of differences."),
    ...differences(context, one.record), sinkPicker(context), colourPicker(context, curve, isExact(one.place) && isExact(two.place) && !context.state.bare),
  );
  return {
    element: h("section", { class: "page compare", "aria-label": "Compare" }, h("div", { class: `stage figures n${figures.length}` }, ...figures), aside),
    close: () => maps.each((map) => map.close()),
    restyle: () => maps.each((map) => map.restyle()),
    key: (event) => headKeys(context, event),
  };
}

/** A record by its text; of one text in two models by the model. */
function title(letter: string, { record }: Side, { record: other }: Side): string {
  const [text, beside] = [opening(record), opening(other)];
  return `${letter} · ${text === beside && record.model !== other.model ? record.model : apart(text, beside)}`;
}

/** A text from shortly before the word where it leaves another; whole where that is near its beginning. */
function apart(text: string, other: string): string {
  let same = 0;
  while (same < text.length && text[same] === other[same]) same += 1;
  if (same < 32 || same === text.length) return text;
  return `… ${text.slice(text.lastIndexOf(" ", same - 16) + 1)}`;
}

function pickers(context: Context, one: Side, two: Side): HTMLElement[] {
  if (context.state.alike) return [headPicker(context, false)];
  const list = ({ record, at, head }: Side, label: string, choose: (place: number, head: HeadChoice) => void) =>
    h("div", { class: "picker" }, ...headLists({ record, place: at, head, means: false, label, choose: (place, which) => choose(place, fit(record, place, which)) }));
  return [
    list(one, "A: ", (place, head) => context.go({ place, head, at: null })),
    list(two, "B: ", (place, head) => context.go({ other: [place, head], at: null })),
  ];
}

function fit(record: Recorded, place: number, head: HeadChoice): HeadChoice {
  return typeof head === "number" ? Math.min(head, record.places[place]!.n_heads - 1) : head;
}

/** The maps of a page, which move together; all but the difference have one scale. */
class Maps {
  readonly legend: Legend;
  readonly signed: Legend;
  private readonly all: Heatmap[] = [];

  constructor(private readonly context: Context, private readonly readout: HTMLElement, private readonly curve: Curve, private readonly names: Labels) {
    this.legend = new Legend(context, curve, null, "A and B");
    this.signed = new Legend(context, curve, differenceRamp(context.dark()), "B − A");
  }

  choose(pair: { t: number; s: number }): void {
    this.all[0]!.setCursor(pair);
  }

  each(act: (map: Heatmap) => void): void {
    this.all.forEach(act);
  }

  /** `names`: of a difference, the words of both. */
  make(side: Side, title: string, fetch: MapOptions["fetch"], names: Labels | null = null): HTMLElement {
    const { context, all } = this;
    const { place } = side;
    const [rows, columns] = names ?? labelsOf(side);
    const difference = names !== null;
    const map: Heatmap = new Heatmap({
      place: mapPlace(place), fetch, difference, label: title, rows, columns, small: context.manifest.small,
      ramp: () => (difference ? differenceRamp(context.dark()) : colours(context)),
      curve: this.curve,
      at: context.state.at,
      peers: () => all.filter((other) => !other.options.difference === !difference),
      onMove: (at) => {
        for (const other of all) if (other !== map) other.setAt(at);
        context.go({ at }, true);
      },
      onCell: (cell, kept) => {
        tell(this.readout, all, cell, this.names, this.context.manifest.bound);
        for (const other of all) if (other !== map) other.follow(kept ? null : cell);
        if (kept && cell && isExact(place)) context.go({ token: cell.t, side: "query", mate: cell.s }, true);
      },
      onLoad: () => {
        if (map.cursor) tell(this.readout, all, map.cell(map.cursor), this.names, this.context.manifest.bound);
        (difference ? this.signed : this.legend).update(...map.scale);
        for (const other of all) other.redraw();
      },
    });
    all.push(map);
    return h("figure", {}, h("figcaption", {}, h("bdi", { dir: "auto", text: shorten(title, 48) })), savers(context, map, title), map.element);
  }
}

function tileOf(context: Context, { which, at, head }: Side, { lt, ls, ti, si }: TileAt, signal: AbortSignal): Promise<Float32Array> {
  return context.source.get(["map", which, at, head, lt, ls, ti, si].join("/"), signal);
}

type Labels = [string[], string[]]; // of queries and keys

function labelsOf({ record, place }: Side): Labels {
  if (isExact(place)) return [queryTokens(record, place), keyTokens(record, place)];
  const drawn = mapPlace(place);
  return [cellStarts(drawn.n_queries, place.n_queries), cellStarts(drawn.n_keys, place.n_keys)];
}

/** The words of two records that are set against each other: where they differ, both. */
function joint(one: Labels, two: Labels): Labels {
  const pair = (a: string, b: string) => (label(a) === label(b) ? a : `${label(a, 10)} | ${label(b, 10)}`);
  const zip = (a: string[], b: string[]) => (a.length < b.length ? b : a).map((word, at) => pair(a[at] ?? word, b[at] ?? word));
  return [zip(one[0], two[0]), zip(one[1], two[1])];
}

function tell(readout: HTMLElement, maps: Heatmap[], cell: Cell | null, [rows, columns]: Labels, bound: number): void {
  if (!cell) {
    readout.textContent = "Point at a cell, or use the arrow keys.";
    return;
  }
  const values = maps.map((map) => {
    const { n_queries, n_keys } = map.options.place;
    return cell.t < n_queries && cell.s < n_keys ? map.cell(cell).value : undefined;
  });
  const spellOut = (value: number | undefined) => (value === undefined ? "–" : exact(value, bound));
  readout.replaceChildren(
    h("bdi", { dir: "auto", text: label(rows[cell.t]!) }), " → ", h("bdi", { dir: "auto", text: label(columns[cell.s]!) }),
    h("br"), `A ${spellOut(values[0])}`, h("br"), `B ${spellOut(values[1])}`,
    ...(values[0] === undefined || values[1] === undefined ? [] : [h("br"), `B − A ${exact(values[1] - values[0], 2 * bound)}`]),
  );
}

/** The heads whose queries look elsewhere in the second record, by how much of their weight does. */
function differences(context: Context, one: Recorded): HTMLElement[] {
  const found = context.manifest.differences;
  const { place: here, head: chosen, alike } = context.state;
  if (!alike) return [message("These models differ in shape: a head of one has no like in the other, so none are paired.")];
  if (!found) return [message("The two texts differ in length, or in how finely their maps were kept, so heads are not compared weight by weight.")];
  const list = h(
    "ol", { class: "differing" },
    ...found.slice(0, 12).map(([place, head, distance]) =>
      h("li", {}, h("button", { type: "button", "data-focus": `differs-${place}.${head}`, "aria-current": place === here && head === chosen ? "true" : null, on: { click: () => context.go({ place, head }) } },
        h("span", { text: `${placeLabel(one, place)} · ${one.places[place]!.heads[head]}` }), h("span", { text: percent(distance) }))),
    ),
  );
  return [h("h2", { text: "Heads that differ most" }), h("p", { class: "hint", text: "How much of a query’s weight, on average, lies on other keys in B than in A." }), list];
}
