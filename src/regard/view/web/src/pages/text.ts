// The words themselves. Choose one, and the others are shaded by how much it looks at them, or they
// at it; for one head, the mean of a layer, or all. With none chosen, by what each receives.

import { inkOn, largest } from "../colour";
import { current, question, words, type Context, type Page } from "../context";
import { Legend, colourPicker, headPicker, shade } from "../controls";
import { h, message, percent, strip } from "../dom";
import { keyTokens, queryTokens, type Pieces, type Place, type Recorded, type Side } from "../outline";
import { headKeys } from "./head";
import { label, quoted, visible } from "../words";

const WINDOW = 2000; // words on the page at once
type Which = "query" | "key";

export function text(context: Context): Page {
  const view = new TextView(context);
  void view.shade();
  requestAnimationFrame(() => view.reveal(context.state.side, context.state.token));
  return { element: view.element, restyle: () => void view.shade(), key: (event) => view.key(event) };
}

class TextView {
  readonly element: HTMLElement;
  private readonly blocks: Block[];
  private readonly ranking = h("ol", { class: "ranking" });
  private readonly sentence = h("p", { class: "sentence" });
  private readonly trouble = h("div", { class: "trouble" });
  private readonly legend: Legend;
  private readonly record: Recorded;
  private readonly place: Place;
  private turn = 0;

  constructor(private readonly context: Context) {
    const { record, place } = current(context);
    this.record = record;
    this.place = place;
    this.legend = new Legend(context);
    const two = place.kind === "cross" || place.queries !== place.keys;
    this.blocks = two
      ? [new Block(this, context, "key", "Source"), new Block(this, context, "query", "Target")]
      : [new Block(this, context, null, "Text")];
    const direction = strip<Which>("Direction", [["query", "Looks at"], ["key", "Is looked at by"]], context.state.side, (side) => {
      if (two) context.go({ side, token: -1 });
      else context.go({ side });
    });
    const aside = h("aside", { class: "panel" }, h("h1", { text: "Text" }), headPicker(context, true), two ? null : direction, this.sentence, this.ranking, this.legend.element, colourPicker(context));
    this.element = h("section", { class: "page text", "aria-label": "Text" }, h("div", { class: "stage" }, this.trouble, ...this.blocks.map((block) => block.element)), aside);
  }

  choose(which: Which | null, token: number): void {
    this.context.go({ token, side: which ?? this.context.state.side }, true);
    for (const block of this.blocks) block.mark();
    void this.shade();
  }

  /** Turn to a word and bring it into view. */
  reveal(which: Which, at: number): void {
    const block = this.blocks.find((one) => one.which === null || one.which === which);
    if (at >= 0) block?.reveal(at);
  }

  key(event: KeyboardEvent): boolean {
    if (event.key === "d" && this.blocks.length === 1) {
      this.context.go({ side: this.context.state.side === "query" ? "key" : "query" });
      return true;
    }
    if (event.key === "Escape" && this.context.state.token >= 0) {
      this.choose(null, -1);
      return true;
    }
    return headKeys(this.context, event);
  }

  /** Colour every word by its share, and list the largest. */
  async shade(): Promise<void> {
    const turn = (this.turn += 1);
    const { token, side } = this.context.state;
    try {
      const kind = token < 0 ? "received" : side === "query" ? "row" : "column";
      const values = await this.context.source.get(kind === "received" ? question(kind, this.context) : question(kind, this.context, token));
      if (turn !== this.turn) return;
      this.trouble.replaceChildren();
      this.paint(values, kind === "column" ? "query" : "key", kind === "received");
      const { record, place, head } = this.context.state;
      if (kind === "row" && !this.context.source.exact(record, place, head)) {
        this.trouble.replaceChildren(message("Only each word’s largest weights fit into this file; “regard view” shows all."));
      }
    } catch (problem) {
      if (turn !== this.turn) return;
      for (const block of this.blocks) block.bare();
      this.ranking.replaceChildren();
      this.sentence.replaceChildren(token < 0 ? "Choose a word to see what it looks at." : "");
      this.trouble.replaceChildren(...(token < 0 ? [] : [message(words(problem), "error")]));
    }
  }

  private paint(values: Float32Array, shaded: Which, received: boolean): void {
    const max = largest(values);
    for (const block of this.blocks) {
      if (block.which === null || block.which === shaded) block.paint(values, max);
      else block.bare();
    }
    this.legend.update(max);
    const names = shaded === "key" ? keyTokens(this.record, this.place) : queryTokens(this.record, this.place);
    const best = [...values.keys()].sort((a, b) => rank(values[b]!) - rank(values[a]!)).slice(0, 8);
    this.tell(best.filter((at) => rank(values[at]!) > 0), values, names, shaded, received);
  }

  private tell(best: number[], values: Float32Array, names: string[], shaded: Which, received: boolean): void {
    const { token, side } = this.context.state;
    const own = side === "query" ? queryTokens(this.record, this.place) : keyTokens(this.record, this.place);
    const chosen = token >= 0 ? own[token]! : "";
    const max = largest(values);
    if (received) this.sentence.replaceChildren("Choose a word. Until then, words are shaded by what they receive from all others.");
    else this.sentence.replaceChildren(h("bdi", { dir: "auto", text: label(chosen) }), h("sub", { text: String(token) }), side === "query" ? " looks at" : " is looked at by");
    this.ranking.replaceChildren(
      ...best.map((at) => {
        const bar = h("span", { class: "fill" });
        bar.style.width = `${Math.min(100, (values[at]! / max) * 100)}%`;
        return h("li", {}, h("button", { type: "button", class: "name", title: "Show this word", on: { click: () => this.reveal(shaded, at) } }, h("bdi", { dir: "auto", text: label(names[at]!, 14) }), h("sub", { text: String(at) })), h("span", { class: "bar" }, bar), h("span", { class: "value", text: received ? values[at]!.toFixed(2) : percent(values[at]!) }));
      }),
    );
    if (received || token < 0) return;
    const told = best.slice(0, 3).map((at) => `${quoted(names[at]!)} ${percent(values[at]!)}`);
    this.context.announce(`${quoted(chosen)} ${side === "query" ? "looks at" : "is looked at by"} ${told.join(", ")}`);
  }
}

const rank = (value: number): number => (Number.isFinite(value) ? value : -1);

/** One run of words: the text, or one side of a cross-attention. */
class Block {
  readonly element: HTMLElement;
  private readonly flow: HTMLElement;
  private words: HTMLElement[] = [];
  private first = 0;
  private readonly count: number;
  private readonly tokens: string[];
  private readonly pieces: Pieces;
  private readonly pager: HTMLElement;
  private values: [Float32Array, number] | null = null;

  constructor(
    private readonly view: TextView,
    private readonly context: Context,
    readonly which: Which | null,
    title: string,
  ) {
    const { record, place } = current(context);
    const side: Side = which === "key" ? place.keys : place.queries;
    this.tokens = which === "key" ? keyTokens(record, place) : queryTokens(record, place);
    this.pieces = side === "target" ? record.pieces : side === "source" ? record.source_pieces : null;
    this.count = this.tokens.length;
    this.flow = h("div", { class: this.count <= 80 ? "flow short" : "flow", dir: "auto", role: "listbox", "aria-label": `${title}: words; arrow keys choose one`, on: { keydown: (event: KeyboardEvent) => this.key(event), click: (event: MouseEvent) => this.click(event) } });
    this.pager = h("div", { class: "pager" });
    this.element = h("div", { class: "block" }, which ? h("h2", { text: title }) : null, this.flow, this.pager);
    this.show(Math.floor(Math.max(0, this.chosen()) / WINDOW) * WINDOW);
  }

  private chosen(): number {
    const { token, side } = this.context.state;
    return this.which === null || this.which === side ? token : -1;
  }

  private show(first: number): void {
    this.first = first;
    const last = Math.min(this.count, first + WINDOW);
    this.words = [];
    const parts: Node[] = [];
    for (let at = first; at < last; at += 1) {
      const [before, own] = this.pieces?.[at] ?? [at > first ? " " : "", label(this.tokens[at]!, 40)];
      for (const [line, gap] of before.split("\n").entries()) {
        if (line) parts.push(document.createElement("br"));
        if (gap) parts.push(document.createTextNode(gap));
      }
      const mark = own === "" || !own.trim();
      const word = h("span", { class: mark ? "word mark" : "word", role: "option", tabindex: -1, "data-at": at, "aria-selected": "false", text: mark ? label(own || this.tokens[at]!, 12) : visible(own) });
      this.words.push(word);
      parts.push(word);
      if (mark && own.includes("\n")) parts.push(document.createElement("br"));
      // Between words without a space a line may break, as in Japanese.
      if (own && /[\u3000-\u9fff\uff00-\uffef]/u.test(own)) parts.push(document.createElement("wbr"));
    }
    this.flow.replaceChildren(...parts);
    this.page(last);
    this.mark();
    if (this.values) this.paint(...this.values);
  }

  reveal(at: number): void {
    if (at < this.first || at >= this.first + this.words.length) this.show(Math.floor(at / WINDOW) * WINDOW);
    this.words[at - this.first]?.scrollIntoView({ block: "nearest" });
  }

  private page(last: number): void {
    if (this.count <= WINDOW) return;
    const turn = (words: string, to: number, open: boolean) =>
      h("button", { type: "button", text: words, disabled: !open, on: { click: () => this.show(to) } });
    this.pager.replaceChildren(
      turn("‹ Earlier", this.first - WINDOW, this.first > 0),
      h("span", { text: `words ${this.first.toLocaleString("en")}–${(last - 1).toLocaleString("en")} of ${this.count.toLocaleString("en")}` }),
      turn("Later ›", last, last < this.count),
    );
  }

  mark(): void {
    const chosen = this.chosen();
    this.words.forEach((word, index) => {
      const here = this.first + index === chosen;
      word.setAttribute("aria-selected", String(here));
      word.tabIndex = here || (index === 0 && (chosen < this.first || chosen >= this.first + this.words.length)) ? 0 : -1;
    });
  }

  bare(): void {
    this.values = null;
    for (const word of this.words) {
      word.style.backgroundColor = "";
      word.style.color = "";
      word.removeAttribute("title");
    }
  }

  paint(values: Float32Array, max: number): void {
    this.values = [values, max];
    this.words.forEach((word, index) => {
      const value = values[this.first + index] ?? NaN;
      const colour = value > max * 1e-4 ? shade(this.context, value, max) : "";
      word.style.backgroundColor = colour;
      word.style.color = colour && inkOn(colour);
      word.title = Number.isFinite(value) ? percent(value) : "not a number";
    });
  }

  private click(event: MouseEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    if (word) this.choose(Number(word.dataset.at));
  }

  private choose(at: number): void {
    const again = this.chosen() === at;
    this.view.choose(this.which, again ? -1 : at);
    this.words[at - this.first]?.focus();
  }

  private key(event: KeyboardEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    if (!word || event.ctrlKey || event.metaKey || event.altKey) return;
    const from = Number(word.dataset.at);
    const flip = getComputedStyle(this.flow).direction === "rtl" ? -1 : 1;
    const steps: Record<string, number> = { ArrowRight: flip, ArrowLeft: -flip, ArrowDown: this.line(from, 1), ArrowUp: this.line(from, -1), Home: this.first - from, End: this.first + this.words.length - 1 - from, Enter: 0, " ": 0 };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const to = Math.min(this.count - 1, Math.max(0, from + step));
    if (step === 0 || to === from) {
      this.choose(to);
      return;
    }
    if (to < this.first || to >= this.first + this.words.length) this.show(Math.floor(to / WINDOW) * WINDOW);
    this.view.choose(this.which, to);
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
