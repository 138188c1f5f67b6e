// The second heat of the overview: beside what each head looks at, what it is worth. A cell is as
// deep in colour as its change is large; in it stands the number, or where it is small the sign.

import { differenceRamp, inkOn } from "./colour";
import { current, wordCurve, type Context } from "./context";
import { Legend } from "./controls";
import { h, select, type Props } from "./dom";
import { changeColour, changeOf, explain, largestChange, shownEffect, signed, spellChange } from "./effects";
import { headTitle, type Effect } from "./manifest";
import { shorten } from "./words";

const FAINT = 0.05; // of the largest change, below which a sign is not worth its ink

type Link = (place: number, head: number) => Props;

export class Matters {
  readonly controls: HTMLElement[];
  readonly hint: HTMLElement;
  readonly readout = h("p", { class: "hint said-change", role: "status" });
  private readonly cells: { cell: HTMLElement; value: number }[] = [];
  private legend: Legend;
  private readonly max: number;

  constructor(private readonly context: Context, readonly effect: Effect, private readonly link: Link) {
    this.max = largestChange(effect);
    this.legend = this.makeLegend();
    const { effects } = current(context).record;
    const options = effects.map((one, at): [string, string] => [String(at), `${shorten(one.edit, 60)}: ${shorten(one.token.trim(), 24)}`]);
    const choice = effects.length > 1 ? select("Matters", options, String(context.state.effect), (at) => context.go({ effect: Number(at) })) : null;
    this.hint = h("p", { class: "hint", text: explain(effect) });
    this.controls = [...(choice ? [choice] : []), h("div", {}, this.legend.element)];
    this.say(null);
  }

  static of(context: Context, link: Link): Matters | null {
    const effect = shownEffect(context);
    return effect && new Matters(context, effect, link);
  }

  private makeLegend(): Legend {
    const legend = new Legend(this.context, wordCurve(this.context), differenceRamp(this.context.dark()));
    legend.update(this.max);
    legend.element.classList.add("changes");
    return legend;
  }

  /** "; matters −1.345", for those who do not see the heat. */
  words(place: number, head: number): string {
    return `matters ${signed(changeOf(this.effect, place, head))}`;
  }

  /** The cells of a layer. */
  row(place: number): HTMLElement {
    const { record } = current(this.context);
    const cells = record.places[place]!.heads.map((_, head) => {
      const value = changeOf(this.effect, place, head);
      const name = headTitle(record, place, head);
      const at = { "data-place": place, "data-head": head };
      if (value === null) return h("span", { class: "change-cell missing", title: `${name}: not measured`, ...at });
      const said = `${name}: ${spellChange(this.effect, value)}`;
      const sign = Math.abs(value) < FAINT * this.max ? "" : value < 0 ? "−" : "+";
      const cell = h("a", { class: "change-cell", ...this.link(place, head), "aria-label": said, title: said, ...at }, h("span", { class: "number", text: signed(value, 2) }), h("span", { class: "sign", "aria-hidden": "true", text: sign }));
      this.colour(cell, value);
      this.cells.push({ cell, value });
      return cell;
    });
    return h("div", { class: "changes", role: "group", "aria-label": "Matters" }, ...cells);
  }

  private colour(cell: HTMLElement, value: number): void {
    const ground = changeColour(this.context, this.effect, value, this.max);
    cell.style.backgroundColor = ground;
    cell.style.color = inkOn(ground);
  }

  restyle(): void {
    for (const { cell, value } of this.cells) this.colour(cell, value);
    const legend = this.makeLegend();
    this.legend.element.replaceWith(legend.element);
    this.legend = legend;
  }

  forget(): void {
    this.cells.length = 0;
  }

  /** Say what a head is worth, and mark its map and its cell; null: none is pointed at. */
  private say(at: { place: number; head: number } | null): void {
    if (!at) this.readout.textContent = "Point at a head to read what it is worth.";
    else this.readout.textContent = `${headTitle(current(this.context).record, at.place, at.head)}: ${spellChange(this.effect, changeOf(this.effect, at.place, at.head))}`;
  }

  /** Follow pointer and focus: the map and the cell of one head are marked together. */
  follow(grid: HTMLElement): void {
    let marked: Element[] = [];
    const point = (target: EventTarget | null) => {
      const { place, head } = (target as Element | null)?.closest<HTMLElement>("[data-head]")?.dataset ?? {};
      for (const one of marked) one.classList.remove("pointed");
      marked = head === undefined ? [] : [...grid.querySelectorAll(`[data-place="${Number(place)}"][data-head="${Number(head)}"]`)];
      for (const one of marked) one.classList.add("pointed");
      this.say(head === undefined ? null : { place: Number(place), head: Number(head) });
    };
    grid.addEventListener("pointerover", (event) => point(event.target));
    grid.addEventListener("pointerleave", () => point(null));
    grid.addEventListener("focusin", (event) => point(event.target));
  }
}
