// Every head at once: layers × heads as small maps, in the model's order or sorted by what they do.

import { current, mapCurve, type Context, type Page } from "../context";
import { Legend, colourPicker, notes, savers, sinkPicker } from "../controls";
import type { Curve } from "../colour";
import { h, many, message, select, strip } from "../dom";
import { headTitle, isExact, placeLabel } from "../manifest";
import { role, score, spell, spellScore, strength, threshold, told } from "../roles";
import { Thumbs } from "../thumbs";
import { direction, opening, shorten } from "../words";

const DENSE = 14; // layers, from which on the maps have no captions

interface Entry {
  place: number;
  head: number;
  value: number | null;
}

export function overview(context: Context): Page {
  const { places } = current(context).record;
  const curve = mapCurve(context, places);
  const legend = new Legend(context, curve);
  const grid = h("div", { class: "heads" });
  const painter = new Thumbs(context, grid, legend, curve, context.state.own);
  const found = h("p", { class: "hint", role: "status" });
  const element = h("section", { class: "page overview", "aria-label": "Overview of all heads" }, headline(context), ...notes(context), controls(context, () => fill(), legend, curve, grid), found, grid);
  const fill = () => {
    painter.forget();
    grid.replaceChildren();
    grid.style.removeProperty("--heads");
    if (context.state.sort) fillSorted(context, grid, painter, found);
    else fillModel(context, grid, painter, found, curve === "chance" ? " Times chance: 1 is what each key would get if a query looked at all it may see alike." : "");
    rove(grid);
  };
  fill();
  return { element, close: () => painter.close(), restyle: () => painter.repaint() };
}

export function headline(context: Context): HTMLElement {
  const { record } = current(context);
  const heads = record.places.reduce((sum, place) => sum + place.n_heads, 0);
  const sizes = `${record.source_tokens ? `${record.source_tokens.length.toLocaleString("en")} → ` : ""}${many(record.tokens.length, "token")}`;
  const text = opening(record);
  return h(
    "header",
    { class: "headline" },
    h("h1", {}, h("bdi", { dir: direction([text]), text: shorten(text, 160), title: shorten(text, 400) })),
    h("p", { class: "facts" }, h("bdi", { text: shorten(record.model, 60) }), ` · ${sizes} · ${many(heads, "head")} in ${many(record.places.length, "attention layer")}`),
  );
}

function controls(context: Context, refill: () => void, legend: Legend, curve: Curve, grid: HTMLElement): HTMLElement {
  const { record } = current(context);
  const { state } = context;
  const names = Object.keys(record.scores);
  const options: [string, string][] = [["", "the model’s order"], ...names.map((name): [string, string] => [name, `${name}: ${told(context.manifest, name)}`])];
  const row = h("div", { class: "controls" }, select("Arrange by", options, state.sort, (sort) => context.go({ sort, least: 0 })));
  if (state.sort) {
    const [value, words] = threshold(record, state.sort, state.least);
    const shown = h("output", { text: spell(value) });
    const slider = h("input", {
      type: "range", min: 0, max: 100, value: Math.round(state.least * 100),
      on: {
        input: () => {
          context.go({ least: Number(slider.value) / 100 }, true);
          shown.textContent = spell(threshold(record, state.sort, context.state.least)[0]);
          refill();
        },
      },
    });
    row.append(h("label", { class: "field" }, h("span", { text: words }), slider, shown));
  }
  const own = strip("Each map’s scale", [["shared", "One scale"], ["own", "Its own"]], state.own ? "own" : "shared", (value) => context.go({ own: value === "own" }));
  row.append(h("div", { class: "field" }, own), sinkPicker(context), colourPicker(context, curve, record.places.every(isExact) && !state.bare), legend.element, savers(context, grid, `${record.model} heads`));
  return row;
}

function fillModel(context: Context, grid: HTMLElement, painter: Thumbs, found: HTMLElement, hint: string): void {
  const { record } = current(context);
  grid.className = record.places.length > DENSE ? "heads model dense" : "heads model";
  grid.style.setProperty("--layers", String(record.places.length));
  grid.style.setProperty("--heads", String(Math.max(...record.places.map((place) => place.n_heads))));
  found.textContent = `Each row is a layer, each square one head: queries from top to bottom, keys from left to right.${hint}`;
  const numbers = record.places[0]!.heads;
  if (record.places.length > DENSE && record.places.every((place) => String(place.heads) === String(numbers))) {
    grid.append(h("div", { class: "layer numbers", "aria-hidden": "true" }, h("div", { class: "corner", text: "Head" }), h("div", { class: "cells" }, ...numbers.map((number) => h("span", { text: String(number) })))));
  }
  record.places.forEach((place, at) => {
    const line = h("div", { class: "layer", role: "group", "aria-label": placeLabel(record, at) });
    line.append(h("div", { class: "name", text: placeLabel(record, at), title: place.name }));
    const cells = h("div", { class: "cells" });
    for (let head = 0; head < place.n_heads; head += 1) {
      const best = role(record, at, head);
      cells.append(card(context, painter, { place: at, head, value: null }, best ? spellScore(...best) : ""));
    }
    line.append(cells);
    grid.append(line);
  });
}

function fillSorted(context: Context, grid: HTMLElement, painter: Thumbs, found: HTMLElement): void {
  const { record } = current(context);
  const { sort, least } = context.state;
  const entries: Entry[] = record.places.flatMap((place, at) =>
    Array.from({ length: place.n_heads }, (_, head) => ({ place: at, head, value: score(record, sort, at, head) })),
  );
  const rank = (entry: Entry) => (entry.value === null ? -1 : strength(record, sort, entry.value));
  const kept = entries.filter((entry) => !least || rank(entry) >= least - 1e-9);
  kept.sort((a, b) => rank(b) - rank(a) || a.place - b.place || a.head - b.head);
  grid.className = "heads sorted";
  found.textContent = `${kept.length.toLocaleString("en")} of ${entries.length.toLocaleString("en")} heads, by how much each ${told(context.manifest, sort)}.`;
  for (const entry of kept) grid.append(card(context, painter, entry, spellScore(sort, entry.value)));
  if (!kept.length) grid.append(message("No head reaches that. Move the slider to the left."));
}

function card(context: Context, painter: Thumbs, entry: Entry, caption: string): HTMLElement {
  const { record } = current(context);
  const { place, head } = entry;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const here = record.places[place]!;
  const name = headTitle(record, place, head);
  const link = h(
    "a",
    {
      class: "card",
      href: `#head?${context.state.record ? `record=${context.state.record}&` : ""}place=${place}&head=${head}`,
      "aria-label": caption ? `${name}: ${caption}` : name,
      title: `${name}${caption ? ` · ${caption}` : ""}`,
      "data-place": place,
      "data-head": head,
      on: {
        click: (event: MouseEvent) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          const before = record.places[context.state.place]!;
          const same = before.n_queries === here.n_queries && before.n_keys === here.n_keys;
          context.go({ page: "head", place, head, at: null, ...(!same && { token: -1 }) });
        },
      },
    },
    h("span", { class: "thumb" }, canvas),
    h("span", { class: "caption" }, h("span", { class: "id", text: context.state.sort ? `${placeLabel(record, place)} · ${here.heads[head]}` : String(here.heads[head]) }), h("span", { class: "does", text: caption })),
  );
  painter.watch(link, canvas, place, head);
  return link;
}

/** One stop for the tab key; arrows move between the heads. */
function rove(grid: HTMLElement): void {
  const cards = [...grid.querySelectorAll<HTMLElement>(".card")];
  cards.forEach((card, at) => card.setAttribute("tabindex", at ? "-1" : "0"));
  grid.onkeydown = (event) => {
    const at = cards.indexOf(document.activeElement?.closest(".card") as HTMLElement);
    const root = grid.getRootNode() as Document | ShadowRoot;
    const here = at >= 0 ? at : cards.indexOf(root.activeElement as HTMLElement);
    if (here < 0) return;
    const next = neighbour(cards, here, event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    cards[here]!.setAttribute("tabindex", "-1");
    cards[next]!.setAttribute("tabindex", "0");
    cards[next]!.focus();
  };
}

function neighbour(cards: HTMLElement[], at: number, key: string): number | null {
  if (key === "ArrowRight") return Math.min(cards.length - 1, at + 1);
  if (key === "ArrowLeft") return Math.max(0, at - 1);
  if (key === "Home") return 0;
  if (key === "End") return cards.length - 1;
  if (key !== "ArrowDown" && key !== "ArrowUp") return null;
  const from = cards[at]!.getBoundingClientRect();
  const down = key === "ArrowDown";
  let [best, distance] = [at, Infinity];
  cards.forEach((card, index) => {
    const to = card.getBoundingClientRect();
    const along = down ? to.top - from.top : from.top - to.top;
    if (along < from.height / 2) return;
    const far = along * 4 + Math.abs(to.left - from.left);
    if (far < distance) [best, distance] = [index, far];
  });
  return best;
}
