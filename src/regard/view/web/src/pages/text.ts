// The words themselves. Choose one, and the others are shaded by how much it looks at them, or they
// at it; for one head, the mean of a layer, or all. With none chosen, by what each receives.

import { lookersAt } from "../chance";
import { inkOn, largest } from "../colour";
import { current, question, wordCurve, words, type Context, type Page } from "../context";
import { Legend, colourPicker, headPicker, notes, savers, shade, sinkPicker } from "../controls";
import { h, many, message, percent, strip } from "../dom";
import type { Place, Recorded } from "../outline";
import { headKeys } from "./head";
import { unitsOf, type Unit, type Units } from "../units";
import { WordSearch } from "../search";
import { direction, isSpecial, label, quoted, visible } from "../words";

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
  readonly units: Record<Which, Units>;
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
    const { split, side } = context.state;
    this.record = record;
    this.place = place;
    this.legend = new Legend(context, wordCurve(context));
    const two = place.kind === "cross" || place.queries !== place.keys;
    const units = unitsOf(record, place, "query", split);
    this.units = { query: units, key: two ? unitsOf(record, place, "key", split) : units };
    this.blocks = two
      ? [new Block(this, context, "key", "Source"), new Block(this, context, "query", "Target")]
      : [new Block(this, context, null, "Text")];
    const towards = strip<Which>("Direction", [["query", "Looks at"], ["key", "Is looked at by"]], side, (to) => context.go({ side: to }));
    const aside = h("aside", { class: "panel" }, h("h1", { text: "Text" }), ...notes(context), headPicker(context, true), ...this.searches(two), two ? null : towards, this.splitter(), this.sentence, this.ranking, this.legend.element, sinkPicker(context), colourPicker(context, wordCurve(context), false));
    const stage = h("div", { class: "stage" }, this.trouble, ...this.blocks.map((block) => block.element));
    aside.append(savers(context, stage, `${record.model} text`));
    this.element = h("section", { class: "page text", "aria-label": "Text" }, stage, aside);
  }

  /** Find a word and choose it, however long the text is. */
  private searches(two: boolean): HTMLElement[] {
    const make = (which: Which | null, name: string) =>
      new WordSearch(name, this.units[which ?? "query"], "a word", (at) => {
        const side = which ?? this.context.state.side;
        const { first } = this.units[side].list[at]!;
        this.choose(which, first);
        this.reveal(side, first);
      }).element;
    return two ? [make("key", "Find source"), make("query", "Find target")] : [make(null, "Find")];
  }

  /** Characters of several tokens can be shown whole, or token by token. */
  private splitter(): HTMLElement | null {
    const { record, place } = this;
    const sides = [place.queries, place.keys];
    const cut = (sides.includes("target") && record.joined.size > 0) || (sides.includes("source") && record.source_joined.size > 0);
    if (!cut) return null;
    const choose = (value: "text" | "tokens") => this.context.go({ split: value === "tokens" });
    return strip("Parts", [["text", "Characters"], ["tokens", "Tokens"]], this.context.state.split ? "tokens" : "text", choose);
  }

  choose(which: Which | null, token: number): void {
    this.context.go({ token, side: which ?? this.context.state.side }, true);
    for (const block of this.blocks) block.mark();
    void this.shade();
  }

  /** Turn to a word and bring it into view. */
  reveal(which: Which, token: number): void {
    const block = this.blocks.find((one) => one.which === null || one.which === which);
    if (token >= 0) block?.reveal(this.units[which].at(token));
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
      const values = await this.weights(kind);
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

  /** One number for each unit of the other side: of the chosen one's tokens together. */
  private async weights(kind: "received" | "row" | "column"): Promise<Float32Array> {
    const { source, state } = this.context;
    if (kind === "received") {
      const sums = await source.get(question(kind, this.context));
      return this.units.key.gather(sums.map((sum, s) => (sum === 0 ? 0 : sum / lookersAt(this.place, s))), false);
    }
    const own = this.units[state.side];
    const tokens = own.tokensOf(own.list[own.at(state.token)]!);
    const all = await Promise.all(tokens.map((token) => source.get(question(kind, this.context, token))));
    const share = kind === "row" ? all.length : 1;
    const sums = all[0]!.map((_, at) => all.reduce((sum, values) => sum + values[at]!, 0) / share);
    return kind === "row" ? this.units.key.gather(sums, false) : this.units.query.gather(sums, true);
  }

  private paint(values: Float32Array, shaded: Which, received: boolean): void {
    const max = largest(values);
    const told = (value: number, first: number) => (received ? `gets ${percent(value)} of the attention of each of the ${many(lookersAt(this.place, first), "token")} that may look at it, on average` : percent(value));
    for (const block of this.blocks) {
      if (block.which === null || block.which === shaded) block.paint(values, max, told);
      else block.bare();
    }
    this.legend.update(max);
    const best = [...values.keys()].sort((a, b) => rank(values[b]!) - rank(values[a]!)).slice(0, 8);
    this.tell(best.filter((at) => rank(values[at]!) > 0), values, shaded, received);
  }

  private tell(best: number[], values: Float32Array, shaded: Which, received: boolean): void {
    const { token, side } = this.context.state;
    const own = this.units[side];
    const chosen = own.list[own.at(token)];
    const others = this.units[shaded].list;
    const max = largest(values);
    if (received || !chosen) this.sentence.replaceChildren("Choose a word. Until then, words are shaded by what they get, on average, of the attention of those that may look at them.");
    else this.sentence.replaceChildren(h("bdi", { dir: "auto", text: label(chosen.name) }), h("sub", { text: numbers(chosen) }), side === "query" ? " looks at" : " is looked at by");
    this.ranking.replaceChildren(
      ...best.map((at) => {
        const other = others[at]!;
        const bar = h("span", { class: "fill" });
        bar.style.width = `${Math.min(100, (values[at]! / max) * 100)}%`;
        return h("li", {}, h("button", { type: "button", class: "name", title: "Show this word", on: { click: () => this.reveal(shaded, other.first) } }, h("bdi", { dir: "auto", text: label(other.name, 14) }), h("sub", { text: numbers(other) })), h("span", { class: "bar" }, bar), h("span", { class: "value", text: percent(values[at]!) }));
      }),
    );
    if (received || !chosen) return;
    const told = best.slice(0, 3).map((at) => `${quoted(others[at]!.name)} ${percent(values[at]!)}`);
    this.context.announce(`${quoted(chosen.name)} ${side === "query" ? "looks at" : "is looked at by"} ${told.join(", ")}`);
  }
}

const rank = (value: number): number => (Number.isFinite(value) ? value : -1);

/** "4", or "4–6" of a character in three tokens. */
const numbers = ({ first, count }: Unit): string => (count === 1 ? String(first) : `${first}–${first + count - 1}`);

/** One run of words: the text, or one side of a cross-attention. */
class Block {
  readonly element: HTMLElement;
  private readonly flow: HTMLElement;
  private words: HTMLElement[] = [];
  private first = 0; // the number of the first unit shown
  private readonly units: Units;
  private readonly count: number;
  private readonly pager: HTMLElement;
  private values: [Float32Array, number, (value: number, first: number) => string] | null = null;

  constructor(
    private readonly view: TextView,
    private readonly context: Context,
    readonly which: Which | null,
    title: string,
  ) {
    this.units = view.units[which ?? "query"];
    this.count = this.units.list.length;
    const read = this.units.list.filter((unit) => unit.own && !isSpecial(unit.own)).map((unit) => unit.own);
    this.flow = h("div", { class: this.count <= 80 ? "flow short" : "flow", dir: direction(read), role: "listbox", "aria-label": `${title}: words; arrow keys choose one`, on: { keydown: (event: KeyboardEvent) => this.key(event), click: (event: MouseEvent) => this.click(event) } });
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
    this.values = null;
    for (const word of this.words) {
      word.style.backgroundColor = "";
      word.style.color = "";
      word.removeAttribute("title");
    }
  }

  /** `told`: a weight in words, for the tooltips. */
  paint(values: Float32Array, max: number, told: (value: number, first: number) => string): void {
    this.values = [values, max, told];
    this.words.forEach((word, index) => {
      const value = values[this.first + index] ?? NaN;
      const { count, first } = this.units.list[this.first + index]!;
      const colour = value > max * 1e-4 ? shade(this.context, value, max) : "";
      word.style.backgroundColor = colour;
      word.style.color = colour && inkOn(colour);
      word.title = Number.isFinite(value) ? `${told(value, first)}${count > 1 ? `, ${count} tokens together` : ""}` : "not a number";
    });
  }

  private click(event: MouseEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    if (word) this.choose(this.words.indexOf(word) + this.first);
  }

  private choose(at: number): void {
    const again = this.chosen() === at;
    this.view.choose(this.which, again ? -1 : this.units.list[at]!.first);
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
    const to = Math.min(this.count - 1, Math.max(0, from + step));
    if (step === 0 || to === from) {
      this.choose(to);
      return;
    }
    if (to < this.first || to >= this.first + this.words.length) this.show(Math.floor(to / WINDOW) * WINDOW);
    this.view.choose(this.which, this.units.list[to]!.first);
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
