// Finding a word in a text of any length: type, and the words that hold it are listed with their
// neighbours; Enter goes to the next.

import { h, many } from "./dom";
import { keepFocus } from "./focus";
import type { Units } from "./units";
import { label } from "./words";

const LISTED = 8;
const AROUND = 3; // words on either side

export class WordSearch {
  readonly element: HTMLElement;
  private readonly input: HTMLInputElement;
  private readonly list = h("ol", { class: "found" });
  private readonly count = h("span", { class: "hint count", "aria-live": "polite" });
  private matches: number[] = [];
  private turn = -1;

  /** `chosen` stands in the empty field; `choose` is called with a unit's number. */
  constructor(name: string, private readonly units: Units, chosen: string, private readonly choose: (at: number) => void) {
    this.input = h("input", {
      type: "search", placeholder: chosen, autocomplete: "off", spellcheck: "false", "data-focus": `search-${name.replace(/\W/g, "")}`,
      on: { input: () => this.find(), keydown: (event: KeyboardEvent) => this.key(event) },
    });
    this.element = h("div", { class: "search" }, h("label", { class: "field" }, h("span", { text: name }), this.input), this.count, this.list);
  }

  private find(): void {
    const wanted = this.input.value.trim().toLowerCase();
    this.turn = -1;
    this.matches = wanted ? this.units.list.flatMap((unit, at) => (unit.name.toLowerCase().includes(wanted) ? [at] : [])) : [];
    // Whole words first, then in the order of the text.
    const whole = (at: number) => Number(this.units.list[at]!.name.trim().toLowerCase() !== wanted);
    this.matches.sort((a, b) => whole(a) - whole(b) || a - b);
    this.show();
  }

  private show(): void {
    this.count.textContent = this.input.value.trim() ? `${this.turn >= 0 ? `${this.turn + 1} of ` : ""}${many(this.matches.length, "place")}` : "";
    const from = Math.max(0, this.turn);
    this.list.replaceChildren(
      ...this.matches.slice(from, from + LISTED).map((at, index) => {
        const said = (first: number, last: number) => this.units.list.slice(Math.max(0, first), last).map((unit) => label(unit.name, 14)).join(" ");
        return h("li", {}, h("button", { type: "button", "data-at": at, "data-focus": `found-${at}`, on: { click: () => this.go(from + index) } },
          h("span", { class: "hint", text: said(at - AROUND, at) }), " ", h("bdi", { dir: "auto", text: label(this.units.list[at]!.name) }), h("sub", { text: String(this.units.list[at]!.first) }), " ", h("span", { class: "hint", text: said(at + 1, at + 1 + AROUND) })));
      }),
    );
  }

  private go(turn: number): void {
    const at = this.matches[turn];
    if (at === undefined) return;
    this.turn = turn;
    keepFocus(this.element, () => this.show());
    this.choose(at);
  }

  private key(event: KeyboardEvent): void {
    if (event.key === "Enter" && this.matches.length) this.go((this.turn + 1) % this.matches.length);
    else if (event.key === "Escape" && this.input.value) {
      this.input.value = "";
      this.find();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
