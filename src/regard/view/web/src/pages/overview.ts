// Every head at once: layers × heads as small maps, in the model's order or sorted by what they do.

import { colours, current, type Context, type Page } from "../context";
import { ceiling, paint, table } from "../colour";
import { h, message, select } from "../dom";
import { headName, mapPlace, placeLabel } from "../outline";
import { range, role, score, spell, told } from "../roles";
import { smallTile } from "../tiles";
import { shorten } from "../words";

interface Entry {
  place: number;
  head: number;
  value: number | null;
}

export function overview(context: Context): Page {
  const painter = new Painter(context);
  const grid = h("div", { class: "heads" });
  const found = h("p", { class: "hint", role: "status" });
  const element = h("section", { class: "page overview", "aria-label": "Overview of all heads" }, headline(context), controls(context, () => fill()), found, grid);
  const fill = () => {
    painter.forget();
    grid.replaceChildren();
    if (context.state.sort) fillSorted(context, grid, painter, found);
    else fillModel(context, grid, painter, found);
    rove(grid);
  };
  fill();
  return { element, close: () => painter.forget(), restyle: () => painter.repaint() };
}

function headline(context: Context): HTMLElement {
  const { record } = current(context);
  const heads = record.places.reduce((sum, place) => sum + place.n_heads, 0);
  const opening = record.pieces
    ? record.pieces.slice(0, 60).map(([before, own]) => before + own).join("").trim()
    : record.tokens.slice(0, 60).join(" ");
  const sizes = record.source_tokens ? `${record.source_tokens.length.toLocaleString("en")} → ${record.tokens.length.toLocaleString("en")}` : record.tokens.length.toLocaleString("en");
  return h(
    "header",
    { class: "headline" },
    h("h1", {}, h("bdi", { dir: "auto", text: shorten(opening, 160) })),
    h("p", { class: "facts" }, h("bdi", { text: shorten(record.model, 60) }), ` · ${sizes} tokens · ${heads.toLocaleString("en")} heads in ${record.places.length} places`),
  );
}

function controls(context: Context, refill: () => void): HTMLElement {
  const { record } = current(context);
  const { state } = context;
  const names = Object.keys(record.scores);
  const options: [string, string][] = [["", "the model’s order"], ...names.map((name): [string, string] => [name, `${name}: ${told(name)}`])];
  const row = h("div", { class: "controls" }, select("Arrange by", options, state.sort, (sort) => context.go({ sort, least: 0 })));
  if (state.sort) {
    const [low, high] = range(record, state.sort);
    const shown = h("output", { text: spell(low + state.least * (high - low)) });
    const slider = h("input", {
      type: "range", min: 0, max: 100, value: Math.round(state.least * 100),
      on: {
        input: () => {
          context.go({ least: Number(slider.value) / 100 }, true);
          shown.textContent = spell(low + context.state.least * (high - low));
          refill();
        },
      },
    });
    row.append(h("label", { class: "field" }, h("span", { text: "At least" }), slider, shown));
  }
  return row;
}

function fillModel(context: Context, grid: HTMLElement, painter: Painter, found: HTMLElement): void {
  const { record } = current(context);
  grid.className = "heads model";
  found.textContent = "Each row is a layer, each square one head: queries from top to bottom, keys from left to right.";
  record.places.forEach((place, at) => {
    const line = h("div", { class: "layer", role: "group", "aria-label": placeLabel(record, at) });
    line.append(h("div", { class: "name", text: placeLabel(record, at), title: place.name }));
    const cells = h("div", { class: "cells" });
    for (let head = 0; head < place.n_heads; head += 1) {
      const best = role(record, at, head);
      cells.append(card(context, painter, { place: at, head, value: null }, best ? `${best[0]} ${spell(best[1])}` : ""));
    }
    line.append(cells);
    grid.append(line);
  });
}

function fillSorted(context: Context, grid: HTMLElement, painter: Painter, found: HTMLElement): void {
  const { record } = current(context);
  const { sort, least } = context.state;
  const [low, high] = range(record, sort);
  const entries: Entry[] = record.places.flatMap((place, at) =>
    Array.from({ length: place.n_heads }, (_, head) => ({ place: at, head, value: score(record, sort, at, head) })),
  );
  const floor = low + least * (high - low) - 1e-9;
  const kept = entries.filter((entry) => (least ? entry.value !== null && entry.value >= floor : true));
  kept.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity) || a.place - b.place || a.head - b.head);
  grid.className = "heads sorted";
  found.textContent = `${kept.length.toLocaleString("en")} of ${entries.length.toLocaleString("en")} heads, by how much each ${told(sort)}.`;
  for (const entry of kept) grid.append(card(context, painter, entry, `${sort} ${spell(entry.value)}`));
  if (!kept.length) grid.append(message("No head reaches that. Move the slider to the left."));
}

function card(context: Context, painter: Painter, entry: Entry, caption: string): HTMLElement {
  const { record } = current(context);
  const { place, head } = entry;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const here = record.places[place]!;
  const name = `${placeLabel(record, place)}, ${headName(here, head)}`;
  const link = h(
    "a",
    {
      class: "card",
      href: `#head?place=${place}&head=${head}`,
      "aria-label": caption ? `${name}: ${caption}` : name,
      title: `${name}${caption ? ` · ${caption}` : ""}`,
      "data-place": place,
      "data-head": head,
      on: {
        click: (event: MouseEvent) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          context.go({ page: "head", place, head, at: null, token: -1 });
        },
      },
    },
    h("span", { class: "thumb" }, canvas),
    h("span", { class: "caption" }, h("span", { class: "id", text: context.state.sort ? `${here.layer}·${here.heads[head]}` : String(here.heads[head]) }), h("span", { class: "does", text: caption })),
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

/** Small maps are asked for when they come into view. */
class Painter {
  private readonly jobs = new Map<Element, () => Promise<void>>();
  private painted: (() => void)[] = [];
  private readonly watcher: IntersectionObserver;

  constructor(private readonly context: Context) {
    this.watcher = new IntersectionObserver((seen) => {
      for (const one of seen) {
        if (!one.isIntersecting) continue;
        this.watcher.unobserve(one.target);
        void this.jobs.get(one.target)?.();
        this.jobs.delete(one.target);
      }
    }, { rootMargin: "200px" });
  }

  watch(card: HTMLElement, canvas: HTMLCanvasElement, place: number, head: number): void {
    this.jobs.set(card, () => this.load(card, canvas, place, head));
    this.watcher.observe(card);
  }

  forget(): void {
    this.watcher.disconnect();
    this.jobs.clear();
    this.painted = [];
  }

  repaint(): void {
    for (const again of this.painted) again();
  }

  private async load(card: HTMLElement, canvas: HTMLCanvasElement, place: number, head: number): Promise<void> {
    const { record } = this.context.state;
    const here = mapPlace(this.context.outline.records[record]!.places[place]!);
    const { lt, ls } = smallTile(here);
    try {
      const values = await this.small(record, place, head, lt, ls);
      const width = Math.ceil(here.n_keys / 2 ** ls);
      canvas.width = width;
      canvas.height = values.length / width;
      const again = () => {
        const colour = table(colours(this.context));
        canvas.getContext("2d")!.putImageData(paint(values, width, ceiling(values, lt + ls > 0), this.context.state.curve, colour), 0, 0);
      };
      again();
      this.painted.push(again);
      card.dataset.ready = "yes";
    } catch (problem) {
      card.dataset.ready = "failed";
      card.title = problem instanceof Error ? problem.message : String(problem);
      card.classList.add("missing");
    }
  }

  private small(record: number, place: number, head: number, lt: number, ls: number): Promise<Float32Array> {
    return this.context.source.get(`map/${record}/${place}/${head}/${lt}/${ls}/0/0`);
  }
}
