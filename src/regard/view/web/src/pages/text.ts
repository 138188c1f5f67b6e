// The words themselves. Choose one, or point at it, and the others are shaded by how much it looks at
// them, or they at it; for one head, the mean of a layer, or all. With none chosen, by what each
// receives. Other measures than weights are where the record has them (see measures.ts), what could
// have come next and the steps of a generation too.

import { lookersAt } from "../chance";
import { onScale, differenceRamp, largest } from "../colour";
import { current, question, wordCurve, words, type Context, type Page } from "../context";
import { Legend, colourPicker, headPicker, measurePicker, notes, savers, shade, sinkPicker } from "../controls";
import { h, many, message, percent, strip } from "../dom";
import { worthOf } from "../effects";
import { amount, measureOf, type Measure } from "../measures";
import type { Place, Recorded } from "../manifest";
import { Player } from "../player";
import { headKeys } from "./head";
import { unitsOf, type Unit, type Units } from "../units";
import { WordSearch } from "../search";
import { WordFlow, type Shading, type Which } from "../wordflow";
import { label, quoted } from "../words";

const RANKED = 8;
/** What is asked of a word: what it does, and what is done to it. */
const ENDS: Record<Measure, [string, string]> = {
  weights: ["Looks at", "Is looked at by"],
  values: ["Takes from", "Gives to"],
  rollout: ["Draws on", "Is drawn on by"],
  gradient: ["Rows", "Columns"],
  probability: ["", ""],
};
const UNTIL: Record<Measure, string> = {
  weights: "Choose a word. Until then, words are shaded by what they get, on average, of the attention of those that may look at them.",
  values: "Choose a word. Until then, words are shaded by what they give, on average, to those that may look at them: the weight times the length of the value.",
  rollout: "Choose a word to see what its last state draws on by way of all layers, or which states draw on it.",
  gradient: "",
  probability: "Words are shaded by the probability that the model gave them before it read them. The least expected:",
};

export function text(context: Context): Page {
  const view = new TextView(context);
  void view.shade();
  requestAnimationFrame(() => view.reveal(context.state.side, context.state.token));
  return { element: view.element, close: () => view.close(), restyle: () => void view.shade(), key: (event) => view.key(event) };
}

interface Selection {
  token: number;
  side: Which;
}

/** Numbers to shade one side by; `whole`: of no word in particular. */
interface Measured {
  values: Float32Array;
  shaded: Which;
  whole: boolean;
}

class TextView {
  readonly element: HTMLElement;
  private readonly units: Record<Which, Units>;
  private readonly flows: WordFlow[];
  private readonly ranking = h("ol", { class: "ranking" });
  private readonly sentence = h("p", { class: "sentence" });
  private readonly trouble = h("div", { class: "trouble" });
  private readonly candidates = h("div", { class: "candidates" });
  private readonly legend: Legend;
  private readonly record: Recorded;
  private readonly place: Place;
  private readonly measure: Measure;
  private readonly player: Player | null;
  private preview: Selection | null = null; // the word under the pointer
  private turn = 0;

  constructor(private readonly context: Context) {
    const { record, place } = current(context);
    const { split, side } = context.state;
    this.record = record;
    this.place = place;
    this.measure = measureOf(context);
    this.legend = new Legend(context, wordCurve(context), this.measure === "gradient" ? differenceRamp(context.dark()) : null);
    const two = place.kind === "cross" || place.queries !== place.keys;
    const units = unitsOf(record, place, "query", split);
    this.units = { query: units, key: two ? unitsOf(record, place, "key", split) : units };
    this.flows = two ? [this.makeFlow("key", "Source"), this.makeFlow("query", "Target")] : [this.makeFlow(null, "Text")];
    this.player = this.makePlayer();
    const { measure } = this;
    const [does, done] = ENDS[measure];
    const towards = strip<Which>("Direction", [["query", does], ["key", done]], side, (to) => context.go({ side: to }));
    const turns = measure === "gradient" || (!two && measure !== "probability");
    const aside = h(
      "aside", { class: "panel" },
      h("h1", { text: "Text" }), ...notes(context), headPicker(context, true), ...worthOf(context), ...measurePicker(context), ...this.searches(two), turns ? towards : null, this.splitter(),
      this.sentence, this.ranking, this.candidates, this.legend.element, measure === "weights" || measure === "values" ? sinkPicker(context) : null, colourPicker(context, wordCurve(context), false),
    );
    const stage = h("div", { class: "stage" }, this.trouble, ...this.flows.map((flow) => flow.element));
    if (this.player) stage.prepend(this.player.element);
    aside.append(savers(context, stage, `${record.model} text`));
    this.element = h("section", { class: "page text", "aria-label": "Text" }, stage, aside);
    this.cut();
  }

  close(): void {
    this.player?.close();
    for (const flow of this.flows) flow.close();
  }

  private makeFlow(which: Which | null, title: string): WordFlow {
    const sideOf = () => which ?? this.context.state.side;
    return new WordFlow(this.context, {
      which, title, units: this.units[which ?? "query"],
      choose: (token) => this.choose(which, token),
      hover: (token) => this.hover(token < 0 ? null : { token, side: sideOf() }),
    });
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

  private makePlayer(): Player | null {
    const { steps, tokens } = this.record;
    if (!steps || this.place.queries !== "target") return null;
    return new Player(steps.length, this.context.state.step, (step) => quoted(tokens[steps[step]!]!), (step) => {
      this.context.go({ step, token: step < 0 ? -1 : steps[step]!, side: "query" }, true);
      this.cut();
      this.changed();
    });
  }

  /** At a step of a generation, what came later is not there yet. */
  private cut(): void {
    const { step } = this.context.state;
    const end = this.player && step >= 0 ? this.record.steps![step]! + 1 : Infinity;
    for (const flow of this.flows) if (flow.which !== "key") flow.cut(end);
  }

  private choose(which: Which | null, token: number): void {
    this.context.go({ token, side: which ?? this.context.state.side }, true);
    this.changed();
  }

  private changed(): void {
    this.preview = null;
    for (const flow of this.flows) flow.mark();
    void this.shade();
  }

  private hover(preview: Selection | null): void {
    if (preview?.token === this.preview?.token && preview?.side === this.preview?.side) return;
    this.preview = preview;
    void this.shade();
  }

  /** The word that is shown: the one under the pointer, else the one that was chosen. */
  private get selection(): Selection {
    const { token, side } = this.context.state;
    return this.preview ?? { token, side };
  }

  /** Turn to a word and bring it into view. */
  reveal(which: Which, token: number): void {
    const flow = this.flows.find((one) => one.which === null || one.which === which);
    if (token >= 0) flow?.reveal(this.units[which].at(token));
  }

  key(event: KeyboardEvent): boolean {
    if (event.key === "d" && this.flows.length === 1) {
      this.context.go({ side: this.context.state.side === "query" ? "key" : "query" });
      return true;
    }
    if (event.key === "Escape" && this.context.state.token >= 0) {
      this.choose(null, -1);
      return true;
    }
    return this.player?.key(event) || headKeys(this.context, event);
  }

  /** Colour every word by its share, and list the largest. */
  async shade(): Promise<void> {
    const turn = (this.turn += 1);
    const { token, side } = this.selection;
    void this.suggest(turn);
    try {
      const measured = await this.measured();
      if (turn !== this.turn) return;
      this.trouble.replaceChildren();
      this.paint(measured);
      const { record, place, head } = this.context.state;
      const rows = token >= 0 && side === "query" && (this.measure === "weights" || this.measure === "values");
      if (rows && !this.context.source.exact(record, place, head)) {
        this.trouble.replaceChildren(message("Only each word’s largest weights fit into this file; “regard view” shows all."));
      }
    } catch (problem) {
      if (turn !== this.turn) return;
      for (const flow of this.flows) flow.bare();
      this.ranking.replaceChildren();
      this.sentence.replaceChildren(token < 0 ? "Choose a word to see what it looks at." : "");
      this.trouble.replaceChildren(...(token < 0 ? [] : [message(words(problem), "error")]));
    }
  }

  private async measured(): Promise<Measured> {
    const { token, side } = this.selection;
    const { source, state } = this.context;
    const other: Which = side === "query" ? "key" : "query";
    if (this.measure === "gradient") {
      const sums = await source.get(question(side === "query" ? "gradient_rows" : "gradient_columns", this.context));
      return { values: this.units[side].gather(sums, false), shaded: side, whole: true };
    }
    if (this.measure === "probability") {
      const given = await source.get(`given/${state.record}`);
      return { values: this.units.query.join(given), shaded: "query", whole: true };
    }
    if (token < 0 && this.measure === "rollout") return { values: new Float32Array(this.units.key.list.length), shaded: "key", whole: true };
    if (token < 0) {
      const sums = await source.get(question("received", this.context));
      const shares = sums.map((sum, s) => (sum === 0 ? 0 : sum / lookersAt(this.place, s)));
      return { values: this.units.key.gather(shares, false), shaded: "key", whole: true };
    }
    const own = this.units[side];
    const all = await Promise.all(own.tokensOf(own.list[own.at(token)]!).map((each) => source.get(this.ask(side, each))));
    const share = side === "query" ? all.length : 1;
    const sums = all[0]!.map((_, at) => all.reduce((sum, values) => sum + values[at]!, 0) / share);
    return { values: this.units[other].gather(sums, side === "key"), shaded: other, whole: false };
  }

  private ask(side: Which, token: number): string {
    if (this.measure === "rollout") return `${side === "query" ? "rollout" : "drawn"}/${this.context.state.record}/${token}`;
    return question(side === "query" ? "row" : "column", this.context, token);
  }

  private paint({ values, shaded, whole }: Measured): void {
    const { context, measure } = this;
    const max = measure === "probability" ? 1 : largest(values);
    const signed = differenceRamp(context.dark());
    const shading: Shading = {
      values,
      colour: (value) => {
        const size = onScale(Math.abs(value), max, wordCurve(context)) / 2;
        if (measure === "gradient") return Math.abs(value) > max * 1e-4 ? signed(0.5 + (value < 0 ? -size : size)) : "";
        return value > max * 1e-4 ? shade(context, value, max) : "";
      },
      describe: (value, first) => this.describe(value, first, whole),
      missing: measure === "probability" ? "no probability is known" : "not a number",
    };
    for (const flow of this.flows) {
      if (flow.which === null || flow.which === shaded) flow.paint(shading);
      else flow.bare();
    }
    this.legend.update(max);
    const rank = (value: number) => (!Number.isFinite(value) ? -1 : measure === "probability" ? 1 - value : Math.abs(value));
    const best = [...values.keys()].sort((a, b) => rank(values[b]!) - rank(values[a]!)).slice(0, RANKED);
    this.tell(best.filter((at) => rank(values[at]!) > 0), { values, shaded, whole });
  }

  /** A number in words, for the tooltip of its word. */
  private describe(value: number, first: number, whole: boolean): string {
    const said = amount(this.measure, value);
    if (this.measure === "probability") return `was given ${said} before it was read`;
    if (!whole || this.measure === "gradient") return said;
    const lookers = `each of the ${many(lookersAt(this.place, first), "token")} that may look at it, on average`;
    return this.measure === "values" ? `gives ${said} to ${lookers}` : `gets ${said} of the attention of ${lookers}`;
  }

  private tell(best: number[], { values, shaded, whole }: Measured): void {
    const { token, side } = this.selection;
    const own = this.units[side];
    const chosen = own.list[own.at(token)];
    const others = this.units[shaded].list;
    const max = largest(values);
    const end = ENDS[this.measure][side === "query" ? 0 : 1].toLowerCase();
    const does = ` ${end}${this.measure === "rollout" ? ", by way of all layers" : ""}`;
    if (this.measure === "gradient") this.sentence.textContent = side === "query" ? "Rows: what a word’s looks add up to, each weight times the gradient that it had. Above 0, more of them would raise what was differentiated." : "Columns: what the looks at a word add up to, each weight times the gradient that it had. Above 0, more of them would raise what was differentiated.";
    else if (whole || !chosen) this.sentence.textContent = UNTIL[this.measure];
    else this.sentence.replaceChildren(h("bdi", { dir: "auto", text: label(chosen.name) }), h("sub", { text: numbers(chosen) }), does);
    this.ranking.replaceChildren(
      ...best.map((at) => {
        const other = others[at]!;
        const show = () => this.reveal(shaded, other.first);
        return bar(h("button", { type: "button", class: "name", title: "Show this word", on: { click: show } }, h("bdi", { dir: "auto", text: label(other.name, 14) }), h("sub", { text: numbers(other) })), Math.abs(values[at]! / max), amount(this.measure, values[at]!));
      }),
    );
    if (whole || !chosen || this.preview) return;
    const named = best.slice(0, 3).map((at) => `${quoted(others[at]!.name)} ${amount(this.measure, values[at]!)}`);
    this.context.announce(`${quoted(chosen.name)}${does} ${named.join(", ")}`);
  }

  /** What could have come after the word that is shown, and what did. */
  private async suggest(turn: number): Promise<void> {
    const { next, tokens } = this.record;
    const { token, side } = this.selection;
    if (!next || token < 0 || side !== "query" || this.place.queries !== "target") {
      this.candidates.replaceChildren();
      return;
    }
    const { source, state } = this.context;
    const own = this.units.query;
    const last = own.tokensOf(own.list[own.at(token)]!).at(-1)!;
    const [all, given] = await Promise.all([source.get(`next/${state.record}`), source.get(`given/${state.record}`)]);
    if (turn !== this.turn) return;
    // Of each token: so many probabilities, as many ids, and the id of what came.
    const { k } = next;
    const row = all.subarray(last * (2 * k + 1), (last + 1) * (2 * k + 1));
    const came = row[2 * k]!;
    const ids = [...row.subarray(k, 2 * k)].filter((id) => id >= 0);
    const rows = ids.map((id, n) => candidate(next.vocabulary[id] ?? String(id), row[n]!, id === came));
    if (ids.length && came >= 0 && !ids.includes(came)) rows.push(candidate(tokens[last + 1]!, given[last + 1]!, true));
    this.candidates.replaceChildren(...(rows.length ? [h("h2", { text: "Next token" }), h("ol", { class: "ranking" }, ...rows)] : []));
  }
}

/** A token that could come next; the one that came is marked. */
function candidate(name: string, value: number, came: boolean): HTMLElement {
  const row = bar(h("span", { class: "name", title: came ? "what came" : "" }, h("bdi", { dir: "auto", text: label(name, 14) })), value, percent(value));
  row.classList.toggle("came", came);
  return row;
}

/** A row of a list: a name, a bar of a share of its width, and a number. */
function bar(name: HTMLElement, share: number, value: string): HTMLElement {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${Math.min(100, share * 100)}%`;
  return h("li", {}, name, h("span", { class: "bar" }, fill), h("span", { class: "value", text: value }));
}

/** "4", or "4–6" of a character in three tokens. */
const numbers = ({ first, count }: Unit): string => (count === 1 ? String(first) : `${first}–${first + count - 1}`);
