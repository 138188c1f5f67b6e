// Where a record opens: what stands out, in words; and for a word, or two, which heads link them.
//
// A word's weight on another is the mean over its tokens of the sum over the other's, as in
// lens/word_links.py. Each head is asked for the rows (or columns) of the chosen word alone, and
// shown as soon as it has answered. Pointing at a word previews the answer that choosing it gives.

import { inkOn } from "../colour";
import { current, wordCurve, type Context, type Page } from "../context";
import { Legend, notes, savers, shade, sinkPicker } from "../controls";
import { h, hundredth, many, message, select } from "../dom";
import { signed } from "../effects";
import { keepFocus } from "../focus";
import { allLayers, headTitle, isExact, placeLabel, type Finding, type Recorded } from "../manifest";
import { headline } from "./overview";
import { rove } from "../rove";
import { WordSearch } from "../search";
import { wordUnits, type Units } from "../units";
import { direction, isSpecial, label } from "../words";

const AT_ONCE = 6; // heads asked at a time
const RANKED = 8;
const NEWS = 250; // milliseconds between two looks at what has come
const LONGEST = 40; // characters of a word
const CHIPS = 400; // words on the page at once
const REST = 80; // milliseconds that the pointer rests on a word before it is previewed
type Which = "query" | "key";
type Given = Map<string, Float32Array | null>; // by head, over units; null: not in this file

export function start(context: Context): Page {
  const view = new StartView(context);
  void view.load();
  return { element: view.element, close: () => view.close(), restyle: () => view.paint(), key: (event) => view.key(event) };
}

interface Found {
  place: number;
  head: number;
  value: number;
  other: number; // the unit at the other end
}

/** What is asked: a word, the side it is on, and the one at the other end; units, -1: any. */
interface Asked {
  side: Which;
  chosen: number;
  mate: number;
}

class StartView {
  readonly element: HTMLElement;
  private readonly record: Recorded;
  private readonly places: number[]; // those whose queries and keys are the words that are shown
  private readonly units: Record<Which, Units>;
  private readonly one: boolean; // whether queries and keys are the same words
  private readonly legend: Legend;
  private readonly answer = h("p", { class: "answer", role: "status" });
  private readonly ranking = h("ol", { class: "ranking heads-ranking" });
  private readonly matrix = h("div", { class: "matrix" });
  private readonly chips = h("div", { class: "chips" });
  private readonly trouble = h("div");
  private readonly rule = h("p", { class: "hint" });
  private readonly kept: Asked; // what was chosen
  private readonly keptGiven: Given = new Map();
  private asked: Asked; // what is shown: the same, or what the pointer rests on
  private given = this.keptGiven;
  private closed = false;
  private timer = 0;
  private resting = 0;
  private took = 0; // milliseconds of the last look: of very many heads a look takes longer than news come

  constructor(private readonly context: Context) {
    const { record, place } = current(context);
    const { state } = context;
    this.record = record;
    this.places = record.places.flatMap((other, at) => (other.kind === place.kind && other.queries === place.queries && other.keys === place.keys && other.n_queries === place.n_queries && other.n_keys === place.n_keys ? [at] : []));
    this.one = place.kind === "self" && place.queries === place.keys;
    const queries = wordUnits(record, place, "query");
    this.units = { query: queries, key: this.one ? queries : wordUnits(record, place, "key") };
    const asked = state.token < 0 && record.asked !== null && place.queries === "target" ? record.asked : state.token;
    const side = state.token < 0 ? "query" : state.side;
    this.asked = { side, chosen: this.units[side].at(asked), mate: this.units[side === "query" ? "key" : "query"].at(state.mate) };
    this.kept = this.asked;
    this.chips.addEventListener("pointerover", (event) => this.point(event));
    this.chips.addEventListener("pointerleave", () => this.rest(this.kept));
    this.legend = new Legend(context, wordCurve(context));
    this.element = h("section", { class: "page start", "aria-label": "Start" }, headline(context), ...notes(context), this.finder(), this.findings());
  }

  private get side(): Which {
    return this.asked.side;
  }

  private get chosen(): number {
    return this.asked.chosen;
  }

  private get mate(): number {
    return this.asked.mate;
  }

  private get other(): Which {
    return this.side === "query" ? "key" : "query";
  }

  close(): void {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.resting);
  }

  key(event: KeyboardEvent): boolean {
    const { side, chosen, mate } = this.kept;
    if (event.key !== "Escape" || mate < 0) return false;
    this.choose(side, chosen, -1);
    return true;
  }

  private finder(): HTMLElement {
    const { context } = this;
    const name = (which: Which) => {
      const at = which === this.side ? this.chosen : this.mate;
      return at < 0 ? "anything" : label(this.units[which].list[at]!.name);
    };
    const search = (which: Which, words: string) =>
      new WordSearch(words, this.units[which], name(which), (at) => (which === this.side ? this.choose(which, at, this.mate) : this.choose(this.side, this.chosen, at))).element;
    const towards = (from: Which, words: string) =>
      h("button", { type: "button", class: "plain", text: words, "data-focus": `any-${from}`, on: { click: () => (from === this.side ? this.choose(this.other, this.mate, -1) : this.choose(this.side, this.chosen, -1)) } });
    const kinds = this.record.places.flatMap((place, at) => (this.record.places.findIndex((other) => allLayers(other) === allLayers(place)) === at ? [at] : []));
    const kind = kinds.find((at) => allLayers(this.record.places[at]!) === allLayers(current(context).place)) ?? 0;
    const layers = kinds.length < 2 ? null : select("In", kinds.map((at) => [String(at), allLayers(this.record.places[at]!)] as const), String(kind), (at) => context.go({ place: Number(at), head: 0, token: -1, at: null }));
    // With nothing at either end there is nothing to ask.
    const free = (which: Which) => (which === this.side ? this.mate >= 0 : true) && name(which) !== "anything";
    const answers = h("div", { class: "answers" }, h("div", { class: "told" }, this.answer, this.ranking, this.rule), h("div", { class: "grid" }, this.matrix, this.legend.element));
    return h(
      "section", { class: "finder", "aria-label": "Which head links two words" },
      h("h2", { text: "Which head looks from a word to a word?" }),
      h("div", { class: "ends-chosen" }, layers, h("div", { class: "end" }, search("query", "From"), free("query") ? towards("query", "from anything") : null), h("div", { class: "end" }, search("key", "To"), free("key") ? towards("key", "to anything") : null)),
      this.chips,
      sinkPicker(context),
      this.trouble,
      answers,
      savers(context, answers, `${this.record.model} links`),
    );
  }

  private choose(side: Which, at: number, mate: number): void {
    if (at < 0) return;
    const first = (which: Which, unit: number) => this.units[which].list[unit]?.first ?? -1;
    this.context.go({ side, token: first(side, at), mate: first(side === "query" ? "key" : "query", mate) });
  }

  /** Ask every head for the chosen word, a few at a time. */
  async load(): Promise<void> {
    this.paint();
    await new Promise(requestAnimationFrame); // when it is on the page, the chosen word is scrolled to
    keepFocus(this.element, () => {
      this.chips.replaceChildren();
      this.paint();
    });
    await this.askAll();
    if (this.closed) return;
    this.element.dataset.ready = "yes";
    this.context.announce(this.answer.textContent ?? "");
  }

  private async askAll(): Promise<void> {
    const { given, asked } = this;
    if (asked.chosen < 0) return;
    const heads = this.places.flatMap((place) => Array.from({ length: this.record.places[place]!.n_heads }, (_, head) => [place, head] as const));
    const next = async (): Promise<void> => {
      const wanted = () => !this.closed && (given === this.keptGiven || given === this.given);
      for (let one = heads.shift(); one && wanted(); one = heads.shift()) {
        const kept = isExact(this.record.places[one[0]]!);
        given.set(one.join("."), kept ? await this.ask(asked, ...one).catch(() => null) : null);
        this.timer ||= window.setTimeout(() => this.paint(), Math.max(NEWS, 8 * this.took));
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, next));
    if (!this.closed) this.paint();
  }

  private async ask({ side, chosen }: Asked, place: number, head: number): Promise<Float32Array> {
    const { source, state } = this.context;
    const own = this.units[side];
    const tokens = own.tokensOf(own.list[chosen]!);
    const kind = side === "query" ? "row" : "column";
    const all = await Promise.all(tokens.map((token) => source.get([kind, state.record, place, head, token].join("/"))));
    const share = kind === "row" ? all.length : 1;
    const sums = all[0]!.map((_, at) => all.reduce((sum, values) => sum + values[at]!, 0) / share);
    return this.units[side === "query" ? "key" : "query"].gather(sums, kind === "column");
  }

  private point(event: PointerEvent): void {
    const word = (event.target as Element).closest<HTMLElement>(".word");
    if (event.pointerType === "touch") return;
    const which: Which = word?.dataset.which === "key" ? "key" : "query";
    // Choosing what is chosen again turns the question round: not what a look at it is for.
    const other = word && word.ariaPressed === "false";
    this.rest(other ? this.outcome(which, this.units[which].at(Number(word.dataset.at))) : this.kept);
  }

  private rest(asked: Asked): void {
    clearTimeout(this.resting);
    this.resting = window.setTimeout(() => this.preview(asked), REST);
  }

  /** Show another answer while the pointer rests; the words stay as they are. */
  private preview(asked: Asked): void {
    const { side, chosen, mate } = this.asked;
    if (asked.chosen < 0 || (asked.side === side && asked.chosen === chosen && asked.mate === mate)) return;
    this.asked = asked;
    const known = asked.side === this.kept.side && asked.chosen === this.kept.chosen;
    this.given = known ? this.keptGiven : new Map();
    if (known) this.paint();
    else void this.askAll();
  }

  /** Whether "anything" may be this word: not the word itself, nor what takes what nobody wants. */
  private counts(at: number): boolean {
    const { name } = this.units[this.other].list[at]!;
    return !(this.one && (at === this.chosen || at === 0)) && !isSpecial(name) && /[\p{L}\p{N}]/u.test(name);
  }

  /** Of a head its weight from the one word to the other; of "anything" the largest. */
  private find(place: number, head: number): Found | null {
    const values = this.given.get(`${place}.${head}`);
    if (!values) return null;
    if (this.mate >= 0) return { place, head, value: values[this.mate]!, other: this.mate };
    let other = -1;
    for (let at = 0; at < values.length; at += 1) if (this.counts(at) && (other < 0 || values[at]! > values[other]!)) other = at;
    return other < 0 ? null : { place, head, value: values[other]!, other };
  }

  paint(): void {
    const began = performance.now();
    clearTimeout(this.timer);
    this.timer = 0;
    const all = new Map<string, Found>();
    for (const key of this.given.keys()) {
      const [place, head] = key.split(".").map(Number) as [number, number];
      const found = this.find(place, head);
      if (found) all.set(key, found);
    }
    const ranked = [...all.values()].filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
    const max = ranked[0]?.value ?? 0;
    this.legend.update(max);
    keepFocus(this.element, () => {
      this.tell(ranked.slice(0, RANKED), max);
      this.fill(all, max);
      if (this.asked === this.kept) this.spread();
    });
    this.explain();
    this.took = performance.now() - began;
  }

  private headName(place: number, head: number): string {
    const { label: layer, heads } = this.record.places[place]!;
    return `${layer}.${heads[head]}`;
  }

  private link({ place, head, other }: Found): { href: string; on: Record<string, (event: MouseEvent) => void> } {
    const ends = { query: this.units.query.list[this.side === "query" ? this.chosen : other]!, key: this.units.key.list[this.side === "key" ? this.chosen : other]! };
    return toHead(this.context, place, head, ends.query.first, ends.key.first);
  }

  private tell(ranked: Found[], max: number): void {
    const word = (which: Which, at: number) => h("bdi", { dir: "auto", text: at < 0 ? "anything" : label(this.units[which].list[at]!.name) });
    const [from, to] = this.side === "query" ? [this.chosen, this.mate] : [this.mate, this.chosen];
    if (this.chosen < 0) this.answer.replaceChildren("Choose a word of the text.");
    else this.answer.replaceChildren(word("query", from), " → ", word("key", to), ranked.length ? ": " : !this.given.size ? " …" : [...this.given.values()].some(Boolean) ? ": no head does." : ": not known here.", ranked.slice(0, 3).map(({ place, head, value }) => `${this.headName(place, head)} ${hundredth(value)}`).join(", "), ranked.length > 3 ? ", …" : "");
    const left = this.one ? "the word itself, the first one, signs and special tokens" : "signs and special tokens";
    this.rule.textContent = this.chosen >= 0 && this.mate < 0 ? `Of each head the one word with most; ${left} are left out.` : "";
    this.ranking.replaceChildren(
      ...ranked.map((found) => {
        const bar = h("span", { class: "fill" });
        bar.style.width = `${(found.value / max) * 100}%`;
        const other = this.mate >= 0 ? null : h("bdi", { dir: "auto", text: label(this.units[this.other].list[found.other]!.name, 14) });
        return h("li", {}, h("a", { class: "name", ...this.link(found), "data-focus": `rank-${found.place}.${found.head}`, title: headTitle(this.record, found.place, found.head) }, h("b", { text: this.headName(found.place, found.head) }), other), h("span", { class: "bar" }, bar), h("span", { class: "value", text: hundredth(found.value) }));
      }),
    );
  }

  /** Layer × head: each head a cell, as dark as its weight is large. */
  private fill(all: Map<string, Found>, max: number): void {
    const most = Math.max(...this.places.map((place) => this.record.places[place]!.n_heads));
    this.matrix.style.setProperty("--heads", String(most));
    const rows = this.places.map((place) => {
      const here = this.record.places[place]!;
      const cells = here.heads.map((_, head) => {
        const found = all.get(`${place}.${head}`);
        const name = `${this.headName(place, head)}`;
        if (!found) return h("span", { class: this.given.get(`${place}.${head}`) === null ? "cell missing" : "cell", title: name, "data-head": name });
        const cell = h("a", { class: "cell", ...this.link(found), "data-head": name, "data-focus": `cell-${name}`, "aria-label": `${name} ${found.value.toFixed(3)}`, title: `${name} ${found.value.toFixed(3)}${this.mate >= 0 ? "" : ` ${label(this.units[this.other].list[found.other]!.name, 14)}`}` });
        cell.style.backgroundColor = shade(this.context, found.value, max);
        return cell;
      });
      return h("div", { class: "line" }, h("span", { class: "name", text: here.label, title: placeLabel(this.record, place) }), ...cells);
    });
    const last = this.places.at(-1)!;
    const head = this.record.places[last]!.n_heads - 1;
    const named = `${this.headName(last, head)} is ${headTitle(this.record, last, head)}`;
    this.matrix.replaceChildren(h("p", { class: "hint", text: `Rows are layers, columns heads: ${named}.` }), ...rows);
    rove(this.matrix, ["a.cell"]);
  }

  /** The words themselves, each shaded by the largest weight that a head has on it. */
  private spread(): void {
    const best = new Float32Array(this.units[this.other].list.length);
    for (const values of this.given.values()) values?.forEach((value, at) => (best[at] = Math.max(best[at]!, value)));
    const scrolled = [...this.chips.querySelectorAll(".flow")].map((flow) => flow.scrollTop);
    if (this.one) this.chips.replaceChildren(...this.flow("query", best));
    else this.chips.replaceChildren(h("p", { class: "hint", text: "Who looks" }), ...this.flow("query", best), h("p", { class: "hint", text: "At what" }), ...this.flow("key", best));
    this.chips.querySelectorAll<HTMLElement>(".flow").forEach((flow, at) => {
      rove(flow, [".word"]);
      const chosen = flow.querySelector<HTMLElement>(".own, .mate");
      flow.scrollTop = scrolled[at] ?? Math.max(0, (chosen?.offsetTop ?? 0) - flow.clientHeight / 2);
    });
  }

  private flow(which: Which, best: Float32Array): HTMLElement[] {
    const list = this.units[which].list;
    const shaded = this.one || which === this.other;
    const centre = Math.max(0, which === this.side ? this.chosen : this.mate >= 0 ? this.mate : this.one ? this.chosen : 0);
    const first = list.length <= CHIPS ? 0 : Math.max(0, Math.min(list.length - CHIPS, centre - CHIPS / 2));
    const shown = list.slice(first, first + CHIPS);
    const parts = shown.flatMap((unit, index) => {
      const at = first + index;
      const own = (this.one || which === this.side) && at === this.chosen;
      const mate = (this.one || which === this.other) && at === this.mate;
      const colour = shaded && !own && this.counts(at) && best[at]! > 0.01 ? shade(this.context, best[at]!, 1) : "";
      const title = own ? "chosen" : shaded ? `at most ${hundredth(best[at]!)} in one head` : null;
      const word = h("button", { type: "button", class: `word${own ? " own" : ""}${mate ? " mate" : ""}`, "data-at": unit.first, "data-which": which, "data-focus": `${which}-${at}`, "aria-pressed": String(own || mate), title, on: { click: () => this.click(which, at) } }, h("bdi", { dir: "auto", text: unit.own.trim() ? label(unit.own, LONGEST) : label(unit.name, 12) }));
      word.style.backgroundColor = colour;
      word.style.color = colour && inkOn(colour);
      return [document.createTextNode(unit.before ? " " : ""), word];
    });
    const more = list.length > CHIPS ? [h("p", { class: "hint", text: `${many(shown.length, "word")} of ${list.length.toLocaleString("en")}, around the chosen one; search for others.` })] : [];
    return [h("div", { class: "flow", dir: direction(shown.map((unit) => unit.own)), role: "group", "aria-label": "The text; choose a word, then another" }, ...parts), ...more];
  }

  /** With one word chosen, another is the other end; the chosen one again turns the question round. */
  private outcome(which: Which, at: number): Asked {
    const { side, chosen, mate } = this.kept;
    if (!this.one) return which === side ? { side, chosen: at, mate } : { side, chosen, mate: at === mate ? -1 : at };
    if (at === chosen) return { side: side === "query" ? "key" : "query", chosen: at, mate: -1 };
    if (mate < 0) return chosen < 0 ? { side, chosen: at, mate } : { side, chosen, mate: at };
    if (at === mate) return { side, chosen, mate: -1 };
    return { side: "query", chosen: at, mate: -1 };
  }

  private click(which: Which, at: number): void {
    const { side, chosen, mate } = this.outcome(which, at);
    this.choose(side, chosen, mate);
  }

  private explain(): void {
    const coarse = this.places.filter((place) => !isExact(this.record.places[place]!));
    const heads = coarse.reduce((sum, place) => sum + this.record.places[place]!.n_heads, 0);
    const missing = [...this.given.values()].filter((values) => values === null).length - (this.given.size ? heads : 0);
    const { source, state } = this.context;
    const cut = this.side === "query" && this.places.some((place) => [...Array(this.record.places[place]!.n_heads).keys()].some((head) => this.given.get(`${place}.${head}`) && !source.exact(state.record, place, head)));
    const words = [
      heads ? `Of ${many(heads, "head")} this record kept statistics and a coarse picture, not single weights. Record with watch(model, keep="qk") to ask for them.` : "",
      missing > 0 ? `The weights of ${many(missing, "head")} are not here; “regard view” shows all.` : "",
      cut ? "Of some heads only each word’s largest weights fit into this file: where a weight is not among them it counts as 0." : "",
    ].filter(Boolean).join(" ");
    this.trouble.replaceChildren(...(words ? [message(words)] : []));
  }

  /** The digest of the terminal, with links. */
  private findings(): HTMLElement {
    const sections = this.record.findings.map(({ title, signed: changes, lines }) =>
      h("section", { class: "finding" }, h("h3", {}, h("bdi", { dir: "auto", text: title })), h("ul", {}, ...lines.map((line) => this.line(line, changes ? signed : hundredth)))),
    );
    return h("section", { class: "findings", "aria-label": "What stands out" }, h("h2", { text: "What stands out" }), h("div", { class: "columns" }, ...sections));
  }

  private line({ text, heads, query, key, note }: Finding, spellOut: (value: number) => string): HTMLElement {
    const links = heads.map(([place, head, value]) =>
      h("a", { ...toHead(this.context, place, head, query ?? -1, key ?? -1), title: headTitle(this.record, place, head) }, this.headName(place, head), " ", h("span", { class: "value", text: value === null ? "–" : spellOut(value) })),
    );
    return h("li", {}, h("bdi", { dir: "auto", text: label(text, 60) }), h("span", { class: "links" }, ...links, note ? h("span", { class: "hint", text: note }) : null));
  }
}

/** What opens a head on a pair of tokens. */
function toHead(context: Context, place: number, head: number, query: number, key: number): { href: string; on: Record<string, (event: MouseEvent) => void> } {
  const pair = query < 0 ? {} : { token: query, side: "query" as const, mate: key };
  const said = query < 0 ? "" : `&token=${query}&mate=${key}`;
  return {
    href: `#head?${context.state.record ? `record=${context.state.record}&` : ""}place=${place}&head=${head}${said}`,
    on: {
      click: (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        context.go({ page: "head", place, head, at: null, token: -1, ...pair });
      },
    },
  };
}
