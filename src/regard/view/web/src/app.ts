// The frame around the pages: names, tabs, theme, keys, and the one place where trouble is shown.

import { BareSource } from "./bare";
import { brand, clear, h, message, strip, tool } from "./dom";
import { opening, shorten } from "./words";
import { words, type Context, type Page } from "./context";
import { keepFocus } from "./focus";
import { MATTERS } from "./effects";
import { measureOf } from "./measures";
import type { Manifest } from "./manifest";
import { start } from "./pages/start";
import { overview } from "./pages/overview";
import { head } from "./pages/head";
import { text } from "./pages/text";
import { align } from "./pages/align";
import { compare } from "./pages/compare";
import type { Source } from "./source";
import { ValuedSource } from "./valued";
import { Theme } from "./theme";
import { PAGES, readState, writeState, type PageName, type State } from "./state";

/** Where the line that restores a view is kept: the address of the page, or the notebook. */
export interface Line {
  read(): string;
  write(line: string, quietly: boolean): void;
  changed(listen: () => void): () => void;
}

const MAKERS: Record<PageName, (context: Context) => Page> = { start, overview, head, text, align, compare };
const NAMES: Record<PageName, string> = { start: "Start", overview: "Overview", head: "Head", text: "Text", align: "Alignment", compare: "Compare" };
const KEYS: [string, string][] = [
  ["1 – 6", "the pages, from left to right"],
  ["[  ]", "previous and next head"],
  ["{  }", "previous and next layer"],
  ["← ↑ ↓ →", "move the cell, the word or the head that is chosen"],
  ["Shift + arrows", "move the map"],
  ["+  −  0", "zoom in, zoom out, show all"],
  ["Enter", "open a head; choose a word, or let it go"],
  ["Esc", "let the chosen word go; on the start page, the second one"],
  ["d", "on the text page: looks at, or is looked at by"],
  [",  .  p", "on the text page of a generation: previous step, next step, play"],
  ["t", "light or dark"],
  ["?", "this list"],
];

export class App implements Context {
  state: State;
  private page: Page | null = null;
  readonly theme: Theme;
  private readonly bare: Source;
  private readonly main = h("main", { class: "main", tabindex: -1 });
  private readonly live = h("div", { class: "unseen", "aria-live": "polite" });
  private readonly tabs = new Map<PageName, HTMLElement>();
  private readonly which = h("div", { class: "which" });
  private readonly help: HTMLDialogElement;
  private readonly endings: (() => void)[] = [];

  constructor(
    readonly root: HTMLElement,
    readonly manifest: Manifest,
    private readonly plain: Source,
    private readonly line: Line,
    keys: EventTarget,
  ) {
    this.bare = new BareSource(manifest, plain);
    this.state = readState(line.read(), manifest);
    this.help = this.makeHelp();
    this.theme = new Theme(root, () => this.page?.restyle?.());
    root.replaceChildren(this.bar(), this.main, this.live, this.help);
    const press = (event: Event) => this.key(event as KeyboardEvent);
    keys.addEventListener("keydown", press);
    this.endings.push(
      () => keys.removeEventListener("keydown", press),
      this.theme.follow(),
      line.changed(() => this.follow()),
    );
    this.show();
  }

  get source(): Source {
    const source = this.state.bare ? this.bare : this.plain;
    return measureOf(this) === "values" ? new ValuedSource(this.manifest, source) : source;
  }

  close(): void {
    this.page?.close?.();
    for (const end of this.endings) end();
  }

  dark(): boolean {
    return this.theme.dark();
  }

  go(change: Partial<State>, quietly = false): void {
    // A pair is of the word that it was chosen with.
    const alone = ("token" in change || "side" in change) && !("mate" in change);
    this.state = { ...this.state, ...change, ...(alone && { mate: -1 }) };
    this.line.write(writeState(this.state), quietly);
    if (!quietly) this.show();
  }

  announce(words: string): void {
    this.live.textContent = words;
  }

  /** The address was changed from outside: by hand, by a link, by going back. */
  private follow(): void {
    const line = this.line.read();
    if (line.replace(/^#/, "") === writeState(this.state)) return;
    this.state = readState(line, this.manifest);
    this.show();
  }

  private show(): void {
    keepFocus(this.root, () => this.build(), this.main, {});
  }

  private build(): void {
    this.page?.close?.();
    this.page = null;
    clear(this.main);
    this.which.replaceChildren(...this.records());
    for (const [name, tab] of this.tabs) {
      if (name === this.state.page) {
        tab.setAttribute("aria-current", "page");
        const nav = tab.parentElement!;
        nav.scrollLeft = Math.max(0, tab.offsetLeft + tab.offsetWidth - nav.offsetLeft - nav.clientWidth);
      } else tab.removeAttribute("aria-current");
    }
    try {
      this.page = MAKERS[this.state.page](this);
      this.main.append(this.page.element);
    } catch (problem) {
      this.main.append(message(`This page could not be drawn: ${words(problem)}`, "error"));
    }
  }

  private bar(): HTMLElement {
    const nav = h("nav", { "aria-label": "Pages" });
    for (const [index, name] of PAGES.entries()) {
      if (name === "compare" && this.manifest.records.length < 2) continue;
      const crossed = this.manifest.records.some(({ places }) => places.some((place) => place.kind === "cross"));
      const called = name === "align" && !crossed ? "Lines" : NAMES[name];
      const tab = h("a", { href: `#${name}`, text: called, title: `${called}  ${index + 1}`, on: { click: (event: MouseEvent) => { event.preventDefault(); this.open(name); } } });
      this.tabs.set(name, tab);
      nav.append(tab);
    }
    return h(
      "header", { class: "top" },
      brand(),
      nav,
      this.which,
      h("div", { class: "tools" }, tool("◐", "Light or dark  t", () => this.theme.toggle()), tool("?", "Keys  ?", () => this.help.showModal())),
    );
  }

  /** Of two records, which one a page shows; the page that compares them shows both. */
  private records(): HTMLElement[] {
    const { records } = this.manifest;
    if (records.length < 2 || this.state.page === "compare") return [];
    const choice = strip("Record", [["0", "A"], ["1", "B"]], String(this.state.record), (value) => this.showRecord(Number(value)));
    choice.querySelectorAll("button").forEach((button, at) => (button.title = `${shorten(opening(records[at]!), 60)} · ${shorten(records[at]!.model, 40)}`));
    return [choice];
  }

  /** The same layer, head and words in the other record, as far as it has them. */
  private showRecord(record: number): void {
    const { state } = this;
    const { places } = this.manifest.records[record]!;
    const place = Math.min(state.place, places.length - 1);
    const [from, to] = [this.manifest.records[state.record]!.places[state.place]!, places[place]!];
    const head = typeof state.head === "number" ? Math.min(state.head, to.n_heads - 1) : state.head;
    const same = from.n_queries === to.n_queries && from.n_keys === to.n_keys;
    const sort = state.sort === MATTERS && !this.manifest.records[record]!.effects.length ? "" : state.sort;
    this.go({ record, place, head, sort, effect: 0, ...(!same && { token: -1, at: null }) });
  }

  private open(page: PageName): void {
    if (page === "align" && this.state.page !== "align") this.goAlign();
    else this.go({ page });
  }

  /** The alignment opens on cross-attention, where there is any: on what was chosen, or its best head. */
  private goAlign(): void {
    const { places, alignment } = this.manifest.records[this.state.record]!;
    if (places[this.state.place]!.kind === "cross") return this.go({ page: "align" });
    const cross = places.findIndex((place) => place.kind === "cross");
    const [place, head] = alignment ?? [cross, "layer" as const];
    this.go(place < 0 ? { page: "align" } : { page: "align", place, head, token: -1, at: null });
  }

  private key(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target as HTMLElement;
    if (this.help.open || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.isContentEditable) return;
    const page = /^[1-6]$/.test(event.key) ? PAGES[Number(event.key) - 1] : undefined;
    if (this.page?.key?.(event)) event.preventDefault();
    else if (page && this.tabs.has(page)) this.open(page);
    else if (event.key === "t") this.theme.toggle();
    else if (event.key === "?") this.help.showModal();
    else return;
    event.preventDefault();
  }

  private makeHelp(): HTMLDialogElement {
    const list = h("dl", {});
    for (const [key, words] of KEYS) list.append(h("dt", {}, h("kbd", { text: key })), h("dd", { text: words }));
    const shut = h("button", { type: "button", text: "Close", on: { click: () => this.help.close() } });
    return h("dialog", { class: "help", "aria-label": "Keys" }, h("h2", { text: "Keys" }), list, shut);
  }
}
