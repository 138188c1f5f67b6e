// Two records side by side: the same head in both, moved together, and where they are of one size
// the difference; with a list of the heads whose habits differ most.

import { differenceRamp } from "../colour";
import { colours, type Context, type Page } from "../context";
import { Legend, colourPicker, headPicker } from "../controls";
import { exact, h, message } from "../dom";
import { Heatmap, type Cell, type MapOptions } from "../heatmap";
import { cellStarts, headName, isExact, keyTokens, mapPlace, placeLabel, queryTokens, type Place, type Recorded } from "../outline";
import { SHARES, spell } from "../roles";
import type { TileAt } from "../tiles";
import { headKeys } from "./head";
import { label, shorten } from "../words";

export function compare(context: Context): Page {
  const { outline, state } = context;
  const [one, two] = outline.records;
  if (!one || !two) {
    return { element: h("section", { class: "page compare", "aria-label": "Compare" }, message("There is one record here. Open two to compare them: regard view one.regard two.regard")) };
  }
  const [here, there] = [one.places[state.place], two.places[state.place]];
  const list = differences(context, one, two);
  if (!here || !there) {
    return { element: h("section", { class: "page compare", "aria-label": "Compare" }, message("The second record has no such place."), h("aside", { class: "panel" }, headPicker(context, false), list)) };
  }
  const readout = h("p", { class: "weights" }, "Point at a cell, or use the arrow keys.");
  const same = String(here.grid) === String(there.grid) && headOf(context, there) === state.head;
  const maps: Heatmap[] = [];
  const legend = new Legend(context);
  const signed = same ? new Legend(context, differenceRamp(context.dark())) : null;
  const make = (record: Recorded, place: Place, title: string, fetch: MapOptions["fetch"], difference = false) => {
    const map: Heatmap = new Heatmap({
      place: mapPlace(place), fetch, difference, label: title,
      rows: labelsOf(record, place)[0],
      columns: labelsOf(record, place)[1],
      ramp: () => (difference ? differenceRamp(context.dark()) : colours(context)),
      curve: () => context.state.curve,
      at: state.at,
      onMove: (at) => {
        for (const other of maps) if (other !== map) other.setAt(at);
        context.go({ at }, true);
      },
      onCell: (cell) => tell(readout, maps, cell, record, place),
      onLoad: (loaded) => {
        (difference ? signed : legend)?.update(...loaded.scale);
      },
    });
    maps.push(map);
    return h("figure", {}, h("figcaption", {}, h("bdi", { dir: "auto", text: shorten(title, 48) })), map.element);
  };
  const ask = (which: number) => (at: TileAt, signal: AbortSignal) => tileOf(context, which, at, signal);
  const figures = [make(one, here, `A · ${one.model}`, ask(0)), make(two, there, `B · ${two.model}`, ask(1))];
  if (same) {
    figures.push(
      make(one, here, "B − A", async (at, signal) => {
        const [a, b] = await Promise.all([tileOf(context, 0, at, signal), tileOf(context, 1, at, signal)]);
        return b.map((value, index) => value - a[index]!);
      }, true),
    );
  }
  const aside = h(
    "aside", { class: "panel" },
    h("h1", { text: `${placeLabel(one, state.place)}, ${headName(here, state.head)}` }),
    headPicker(context, false), readout, legend.element, signed?.element,
    same ? null : message("The two maps differ in size, so there is no map of differences."),
    h("h2", { text: "Heads that differ most" }), list, colourPicker(context),
  );
  return {
    element: h("section", { class: "page compare", "aria-label": "Compare" }, h("div", { class: `stage figures n${figures.length}` }, ...figures), aside),
    close: () => maps.forEach((map) => map.close()),
    restyle: () => maps.forEach((map) => map.restyle()),
    key: (event) => headKeys(context, event),
  };
}

function headOf(context: Context, place: Place): number | string {
  const { head } = context.state;
  return typeof head === "number" ? Math.min(head, place.n_heads - 1) : head;
}

function tileOf(context: Context, which: number, { lt, ls, ti, si }: TileAt, signal: AbortSignal): Promise<Float32Array> {
  const place = context.outline.records[which]!.places[context.state.place]!;
  return context.source.get(["map", which, context.state.place, headOf(context, place), lt, ls, ti, si].join("/"), signal);
}

function labelsOf(record: Recorded, place: Place): [string[], string[]] {
  if (isExact(place)) return [queryTokens(record, place), keyTokens(record, place)];
  const drawn = mapPlace(place);
  return [cellStarts(drawn.n_queries, place.n_queries), cellStarts(drawn.n_keys, place.n_keys)];
}

function tell(readout: HTMLElement, maps: Heatmap[], cell: Cell | null, record: Recorded, place: Place): void {
  if (!cell) {
    readout.textContent = "Point at a cell, or use the arrow keys.";
    return;
  }
  const values = maps.map((map) => {
    const { n_queries, n_keys } = map.options.place;
    return cell.t < n_queries && cell.s < n_keys ? map.cell(cell).value : undefined;
  });
  const spellOut = (value: number | undefined) => (value === undefined ? "–" : exact(value));
  readout.replaceChildren(
    h("bdi", { dir: "auto", text: label(labelsOf(record, place)[0][cell.t]!) }), " → ", h("bdi", { dir: "auto", text: label(labelsOf(record, place)[1][cell.s]!) }),
    h("br"), `A ${spellOut(values[0])}`, h("br"), `B ${spellOut(values[1])}`,
  );
}

/** The heads whose scores lie furthest apart; both records must have the same places. */
function differences(context: Context, one: Recorded, two: Recorded): HTMLElement {
  const found: { place: number; head: number; name: string; by: number }[] = [];
  one.places.forEach((place, at) => {
    const heads = Math.min(place.n_heads, two.places[at]?.n_heads ?? 0);
    for (let head = 0; head < heads; head += 1) {
      let [name, by] = ["", 0];
      for (const score of SHARES) {
        const [a, b] = [one.scores[score]?.[at]?.[head], two.scores[score]?.[at]?.[head]];
        const far = typeof a === "number" && typeof b === "number" ? b - a : 0;
        if (Math.abs(far) > Math.abs(by)) [name, by] = [score, far];
      }
      if (name) found.push({ place: at, head, name, by });
    }
  });
  found.sort((a, b) => Math.abs(b.by) - Math.abs(a.by));
  if (!found.length) return h("p", { class: "hint", text: "No head’s habits differ." });
  const { place: here, head: chosen } = context.state;
  return h(
    "ol", { class: "differing" },
    ...found.slice(0, 12).map(({ place, head, name, by }) =>
      h("li", {}, h("button", { type: "button", "aria-current": place === here && head === chosen ? "true" : null, on: { click: () => context.go({ place, head }) } },
        h("span", { text: `${placeLabel(one, place)} · ${one.places[place]!.heads[head]}` }), h("span", { text: `${name} ${by > 0 ? "+" : "−"}${spell(Math.abs(by))}` }))),
    ),
  );
}
