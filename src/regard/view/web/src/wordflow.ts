// One run of words that can be chosen and shaded: the text, or one side of a cross-attention.
//
// A word under the pointer is previewed: `hover` is told of it when the pointer rests there, and of
// its leaving.

import { inkOn } from "./colour";
import type { Context } from "./context";
import { h } from "./dom";
import { keepFocus } from "./focus";
import type { Units } from "./units";
import { direction, isSpecial, label, visible } from "./words";

const WINDOW = 2000; // words on the page at once
const REST = 60; // milliseconds that the pointer rests on a word before it is previewed
export type Which = "query" | "key";

export interface Shading {
  values: Float32Array; // one for each unit
  colour: (value: number) => string; // "": none
  describe: (value: number, first: number) => string; // a value in words, for the tooltips
  missing: string; // what is said in its stead where there is none
}

export interface FlowOptions {
  which: Which | null; // null: queries and keys are these same words
  title: string;
  units: Units;
  choose: (token: number) => void;
  hover: (token: number) => void; // -1: the pointer has left
}

export class WordFlow {
  readonly element: HTMLElement;
  private readonly flow: HTMLElement;
  private words: HTMLElement[] = [];
  private first = 0; // the number of the first unit shown
  readonly which: Which | null;
  private readonly units: Units;
  private readonly count: number;
  private readonly pager: HTMLElement;
  private shading: Shading | null = null;
  private end = Infinity; // the token from which on words are not written yet
  private timer = 0;

  constructor(private readonly context: Context, private readonly options: FlowOptions) {
    const { which, title, units } = options;
    this.which = which;
    this.units = units;
    this.count = units.list.length;
    const read = this.units.list.filter((unit) => unit.own && !isSpecial(unit.own)).map((unit) => unit.own);
    this.flow = h("div", { class: this.count <= 80 ? "flow short" : "flow", dir: direction(read), role: "listbox", "aria-label": `${title}: words; arrow keys choose one`, on: { keydown: (event: KeyboardEvent) => this.key(event), click: (event: MouseEvent) => this.click(event), pointerover: (event: PointerEvent) => this.point(event), pointerleave: () => this.rest(-1) } });
    this.pager = h("div", { class: "pager" });
    this.element = h("div", { class: "block" }, which ? h("h2", { text: title }) : null, this.flow, this.pager);
    this.show(Math.floor(Math.max(0, this.chosen()) / WINDOW) * WINDOW);
  }

  /** The number of the unit that is chosen here, or -1. */
  private chosen(): number {
    const { token, side } = this.context.state;
    return this.which === null || this.which === side ? this.units.at(token) : -1;
  }

  private show(first: number): void {
    this.first = first;
    const last = Math.min(this.count, first + WINDOW);
    this.words = [];
    const parts: Node[] = [];
    for (const unit of this.units.list.slice(first, last)) {
      const { before, own, name } = unit;
      for (const [line, gap] of before.split("\n").entries()) {
        if (line) parts.push(document.createElement("br"));
        if (gap) parts.push(document.createTextNode(gap));
      }
      const mark = own === "" || !own.trim() || unit.part;
      const word = h("span", { class: mark ? "word mark" : "word", role: "option", tabindex: -1, "data-at": unit.first, "aria-selected": "false", text: mark ? label(own || name, 12) : visible(own) });
      this.words.push(word);
      parts.push(word);
      if (mark && own.includes("\n")) parts.push(document.createElement("br"));
      // Between words without a space a line may break, as in Japanese.
      if (own && /[\u3000-\u9fff\uff00-\uffef]/u.test(own)) parts.push(document.createElement("wbr"));
    }
    this.flow.replaceChildren(...parts);
    this.page(last);
    this.mark();
    this.cut(this.end);
    if (this.shading) this.paint(this.shading);
  }

  /** Hide the words from a token on, as if they were not written yet. */
  cut(end: number): void {
    this.end = end;
    this.words.forEach((word, index) => word.classList.toggle("later", this.units.list[this.first + index]!.first >= end));
  }

  private point(event: PointerEvent): void {
    if (event.pointerType === "touch") return;
    const word = (event.target as Element).closest<HTMLElement>(".word");
    this.rest(word ? Number(word.dataset.at) : -1);
  }

  private rest(token: number): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.options.hover(token), REST);
  }

  close(): void {
    clearTimeout(this.timer);
  }

  reveal(at: number): void {
    if (at < this.first || at >= this.first + this.words.length) this.show(Math.floor(at / WINDOW) * WINDOW);
    this.words[at - this.first]?.scrollIntoView({ block: "nearest" });
  }

  private page(last: number): void {
    if (this.count <= WINDOW) return;
    const turn = (words: string, to: number, open: boolean) =>
      h("button", { type: "button", text: words, "data-focus": words, disabled: !open, on: { click: () => keepFocus(this.pager, () => this.show(to)) } });
    this.pager.replaceChildren(
      turn("‹ Earlier", this.first - WINDOW, this.first > 0),
      h("span", { text: `words ${this.first.toLocaleString("en")}–${(last - 1).toLocaleString("en")} of ${this.count.toLocaleString("en")}` }),
      turn("Later ›", last, last < this.count),
    );
  }

  mark(): void {
    const chosen = this.chosen();
    const { side, mate } = this.context.state;
    const other = this.which === side ? -1 : this.units.at(mate);
    this.words.forEach((word, index) => {
      const here = this.first + index === chosen;
      word.setAttribute("aria-selected", String(here));
      word.classList.toggle("mate", this.first + index === other);
      word.tabIndex = here || (index === 0 && (chosen < this.first || chosen >= this.first + this.words.length)) ? 0 : -1;
    });
  }

  bare(): void {
    this.shading = null;
    for (const word of this.words) {
      word.style.backgroundColor = "";
      word.style.color = "";
      word.removeAttribute("title");
    }
  }

  paint(shading: Shading): void {
    this.shading = shading;
    this.words.forEach((word, index) => {
      const value = shading.values[this.first + index] ?? NaN;
      const { count, first } = this.units.list[this.first + index]!;
      const colour = shading.colour(value);
      word.style.backgroundColor = colour;
      word.style.color = colour && inkOn(colour);
      word.title = Number.isFinite(value) ? `${shading.describe(value, first)}${count > 1 ? `, ${count} tokens together` : ""}` : shading.missing;
    });
  }

  private click(event: MouseEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    clearTimeout(this.timer);
    if (word) this.choose(this.words.indexOf(word) + this.first);
  }

  private choose(at: number): void {
    const again = this.chosen() === at;
    this.options.choose(again ? -1 : this.units.list[at]!.first);
    this.words[at - this.first]?.focus();
  }

  private key(event: KeyboardEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    if (!word || event.ctrlKey || event.metaKey || event.altKey) return;
    const from = this.words.indexOf(word) + this.first;
    const flip = getComputedStyle(this.flow).direction === "rtl" ? -1 : 1;
    const steps: Record<string, number> = { ArrowRight: flip, ArrowLeft: -flip, ArrowDown: this.line(from, 1), ArrowUp: this.line(from, -1), Home: this.first - from, End: this.first + this.words.length - 1 - from, Enter: 0, " ": 0 };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const written = this.units.at(this.end) < 0 ? this.count : this.units.at(this.end);
    const to = Math.min(written - 1, Math.max(0, from + step));
    if (step === 0 || to === from) {
      this.choose(to);
      return;
    }
    if (to < this.first || to >= this.first + this.words.length) this.show(Math.floor(to / WINDOW) * WINDOW);
    this.options.choose(this.units.list[to]!.first);
    this.words[to - this.first]?.focus();
  }

  /** How many words to the one above or below. */
  private line(from: number, way: 1 | -1): number {
    const here = this.words[from - this.first]!.getBoundingClientRect();
    let [best, distance] = [0, Infinity];
    for (let index = from - this.first + way; index >= 0 && index < this.words.length; index += way) {
      const box = this.words[index]!.getBoundingClientRect();
      const along = (box.top - here.top) * way;
      if (along < here.height / 2) continue;
      if (along > here.height * 2.6) break;
      const far = Math.abs(box.left - here.left);
      if (far < distance) [best, distance] = [index - (from - this.first), far];
    }
    return best;
  }
}
