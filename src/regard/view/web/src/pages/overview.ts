// Every head at once: layers × heads as small maps, in the model's order or sorted by what they do;
// and where a record has it, beside what a head looks at what it is worth (see matters.ts).

import { current, mapCurve, type Context, type Page } from "../context";
import { Legend, colourPicker, notes, savers, sinkPicker } from "../controls";
import type { Curve } from "../colour";
import { h, many, message, select, strip, type Props } from "../dom";
import { MATTERS, changeOf, chip, largestChange, shownEffect } from "../effects";
import { headTitle, isExact, placeLabel } from "../manifest";
import { Matters } from "../matters";
import { role, score, spell, spellScore, strength, threshold, told } from "../roles";
import { rove } from "../rove";
import { Thumbs } from "../thumbs";
import { direction, opening, shorten } from "../words";

const DENSE = 14; // layers, from which on the maps have no captions

interface Entry {
  place: number;
  head: number;
  value: number | null;
}

/** What heads are sorted by. */
interface Order {
  value(place: number, head: number): number | null;
  strength(value: number): number; // from 0 to 1
  threshold(least: number): [number, string]; // the value of that strength, and which side of it counts
  caption(entry: Entry): string;
  words: string; // what is said of the order
}

function orderOf(context: Context): Order {
  const { record } = current(context);
  const { sort } = context.state;
  const effect = sort === MATTERS ? shownEffect(context) : null;
  if (effect) {
    const max = largestChange(effect);
    return {
      value: (place, head) => changeOf(effect, place, head),
      strength: (value) => (max ? Math.abs(value) / max : 0),
      threshold: (least) => [least * max, "A change of at least"],
      caption: ({ place, head }) => roleOf(context, place, head),
      words: `how much each matters.`,
    };
  }
  return {
    value: (place, head) => score(record, sort, place, head),
    strength: (value) => strength(record, sort, value),
    threshold: (least) => threshold(record, sort, least),
    caption: ({ value }) => spellScore(sort, value),
    words: `how much each ${told(context.manifest, sort)}.`,
  };
}

export function overview(context: Context): Page {
  const { places } = current(context).record;
  const curve = mapCurve(context, places);
  const legend = new Legend(context, curve);
  const grid = h("div", { class: "heads" });
  const painter = new Thumbs(context, grid, legend, curve, context.state.own);
  const matters = Matters.of(context, (place, head) => toHead(context, place, head));
  const found = h("p", { class: "hint", role: "status" });
  const beside = matters && !context.state.sort;
  const worth = matters ? [h("div", { class: "matters-controls" }, ...matters.controls, h("div", { class: "sayings" }, matters.hint, beside ? matters.readout : null))] : [];
  const element = h("section", { class: "page overview", "aria-label": "Overview of all heads" }, headline(context), ...notes(context), controls(context, () => fill(), legend, curve, grid, painter), found, ...worth, grid);
  const fill = () => {
    painter.forget();
    matters?.forget();
    grid.replaceChildren();
    grid.style.removeProperty("--heads");
    if (context.state.sort) fillSorted(context, grid, painter, found, matters);
    else fillModel(context, grid, painter, found, matters, curve === "chance" ? " Times chance: 1 is what each key would get if a query looked at all it may see alike." : "");
    rove(grid, [".card", "a.change-cell"]);
  };
  fill();
  if (beside) matters.follow(grid);
  const restyle = () => {
    painter.repaint();
    matters?.restyle();
    for (const one of grid.querySelectorAll<HTMLElement>(".card")) repaintChip(context, one);
  };
  return { element, close: () => painter.close(), restyle };
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

function controls(context: Context, refill: () => void, legend: Legend, curve: Curve, grid: HTMLElement, painter: Thumbs): HTMLElement {
  const { record } = current(context);
  const { state } = context;
  const names = Object.keys(record.scores);
  const options: [string, string][] = [["", "the model’s order"], ...names.map((name): [string, string] => [name, `${name}: ${told(context.manifest, name)}`])];
  if (record.effects.length) options.splice(1, 0, [MATTERS, `${MATTERS}: changes what is said`]);
  const row = h("div", { class: "controls" }, select("Arrange by", options, state.sort, (sort) => context.go({ sort, least: 0 })));
  if (state.sort) {
    const order = orderOf(context);
    const [value, words] = order.threshold(state.least);
    const shown = h("output", { text: spell(value) });
    const slider = h("input", {
      type: "range", min: 0, max: 100, value: Math.round(state.least * 100),
      on: {
        input: () => {
          context.go({ least: Number(slider.value) / 100 }, true);
          shown.textContent = spell(order.threshold(context.state.least)[0]);
          refill();
        },
      },
    });
    row.append(h("label", { class: "field" }, h("span", { text: words }), slider, shown));
  }
  const own = strip("Each map’s scale", [["shared", "One scale"], ["own", "Its own"]], state.own ? "own" : "shared", (value) => context.go({ own: value === "own" }));
  row.append(h("div", { class: "field" }, own), sinkPicker(context), colourPicker(context, curve, record.places.every(isExact) && !state.bare), legend.element, savers(context, grid, `${record.model} heads`, () => painter.all()));
  return row;
}

function fillModel(context: Context, grid: HTMLElement, painter: Thumbs, found: HTMLElement, matters: Matters | null, hint: string): void {
  const { record } = current(context);
  grid.className = `heads model${record.places.length > DENSE ? " dense" : ""}${matters ? " two" : ""}`;
  grid.style.setProperty("--layers", String(record.places.length));
  grid.style.setProperty("--heads", String(Math.max(...record.places.map((place) => place.n_heads))));
  found.textContent = `Each row is a layer, each square one head: queries from top to bottom, keys from left to right.${hint}`;
  if (matters) grid.append(h("div", { class: "layer titles" }, h("div", { class: "corner" }), h("h2", { class: "of-maps", text: "Looks at" }), h("h2", { class: "of-changes", text: "Matters" })));
  const numbers = record.places[0]!.heads;
  if (record.places.length > DENSE && record.places.every((place) => String(place.heads) === String(numbers))) {
    const row = (name: string) => h("div", { class: name }, ...numbers.map((number) => h("span", { text: String(number) })));
    grid.append(h("div", { class: "layer numbers", "aria-hidden": "true" }, h("div", { class: "corner", text: "Head" }), row("cells"), matters && row("changes")));
  }
  record.places.forEach((place, at) => {
    const line = h("div", { class: "layer", role: "group", "aria-label": placeLabel(record, at) });
    line.append(h("div", { class: "name", text: placeLabel(record, at), title: place.name }));
    const cells = h("div", { class: "cells" });
    for (let head = 0; head < place.n_heads; head += 1) {
      cells.append(card(context, painter, { place: at, head, value: null }, roleOf(context, at, head), matters));
    }
    line.append(cells);
    if (matters) line.append(matters.row(at));
    grid.append(line);
  });
}

function fillSorted(context: Context, grid: HTMLElement, painter: Thumbs, found: HTMLElement, matters: Matters | null): void {
  const { record } = current(context);
  const { least } = context.state;
  const order = orderOf(context);
  const entries: Entry[] = record.places.flatMap((place, at) =>
    Array.from({ length: place.n_heads }, (_, head) => ({ place: at, head, value: order.value(at, head) })),
  );
  const rank = (entry: Entry) => (entry.value === null ? -1 : order.strength(entry.value));
  const kept = entries.filter((entry) => !least || rank(entry) >= least - 1e-9);
  kept.sort((a, b) => rank(b) - rank(a) || a.place - b.place || a.head - b.head);
  grid.className = "heads sorted";
  found.textContent = `${kept.length.toLocaleString("en")} of ${entries.length.toLocaleString("en")} heads, by ${order.words}`;
  for (const entry of kept) grid.append(card(context, painter, entry, order.caption(entry), matters));
  if (!kept.length) grid.append(message("No head reaches that. Move the slider to the left."));
}

/** What opens a head's own page. */
function toHead(context: Context, place: number, head: number): Props {
  const { record } = current(context);
  const here = record.places[place]!;
  return {
    href: `#head?${context.state.record ? `record=${context.state.record}&` : ""}place=${place}&head=${head}`,
    on: {
      click: (event: MouseEvent) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        const before = record.places[context.state.place]!;
        const same = before.n_queries === here.n_queries && before.n_keys === here.n_keys;
        context.go({ page: "head", place, head, at: null, ...(!same && { token: -1 }) });
      },
    },
  };
}

/** The one thing that a head clearly does, in words. */
function roleOf(context: Context, place: number, head: number): string {
  const best = role(current(context).record, place, head);
  return best ? spellScore(...best) : "";
}

function card(context: Context, painter: Thumbs, entry: Entry, caption: string, matters: Matters | null): HTMLElement {
  const { record } = current(context);
  const { place, head } = entry;
  const picture = painter.picture();
  const here = record.places[place]!;
  const name = headTitle(record, place, head);
  const said = [caption, matters?.words(place, head)].filter(Boolean);
  const link = h(
    "a",
    { class: "card", ...toHead(context, place, head), "aria-label": said.length ? `${name}: ${said.join(", ")}` : name, title: [name, ...said].join(" · "), "data-place": place, "data-head": head },
    h("span", { class: "thumb" }, picture),
    h("span", { class: "caption" }, h("span", { class: "id", text: context.state.sort ? `${placeLabel(record, place)} · ${here.heads[head]}` : String(here.heads[head]) }), h("span", { class: "does", text: caption })),
  );
  if (context.state.sort) repaintChip(context, link);
  painter.watch(link, picture, place, head);
  return link;
}

/** What a head is worth, on its card, where heads are sorted: the number on its colour. */
function repaintChip(context: Context, card: HTMLElement): void {
  const effect = shownEffect(context);
  if (!effect || !context.state.sort) return;
  card.querySelector(".chip")?.remove();
  card.querySelector(".caption")!.append(chip(context, effect, changeOf(effect, Number(card.dataset.place), Number(card.dataset.head))));
}
