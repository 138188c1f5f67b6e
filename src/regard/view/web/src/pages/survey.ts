// What every head does over many texts: layers × heads as a heat of one score, and all scores as a
// table that is sorted by it, each number a mean with its standard deviation over texts.

import type { Line } from "../app";
import { inkOn, onScale, ramp, type Ramp } from "../colour";
import { brand, h, many, select, tool } from "../dom";
import type { Head, HeadTable } from "../headtable";
import { spell } from "../roles";
import { rove } from "../rove";
import { Theme } from "../theme";
import { shorten } from "../words";

const ROWS = 300; // of the table, before all are asked for
const LESS_FIRST = ["local"]; // a distance: those that stay nearest come first

export class SurveyPage {
  private readonly theme: Theme;
  private readonly main = h("main", { class: "main" });
  private sort: number; // of the scores
  private down: boolean; // the largest first
  private all = false; // whether every row is shown
  private readonly heat = h("div", { class: "matrix" });
  private readonly readout = h("p", { class: "hint said-change", role: "status" });
  private readonly rows = h("div", { class: "table-frame", tabindex: 0, role: "region", "aria-label": "All scores of all heads" });

  constructor(root: HTMLElement, private readonly table: HeadTable, private readonly line: Line) {
    this.theme = new Theme(root, () => this.show());
    this.theme.follow();
    [this.sort, this.down] = this.read();
    const turn = () => this.theme.toggle();
    root.replaceChildren(h("header", { class: "top" }, brand(), h("div", { class: "tools" }, tool("◐", "Light or dark  t", turn))), this.main);
    root.ownerDocument.addEventListener("keydown", (event) => {
      const { tagName } = event.target as HTMLElement;
      if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey && tagName !== "SELECT") turn();
    });
    line.changed(() => {
      [this.sort, this.down] = this.read();
      this.show();
    });
    this.show();
  }

  /** The score and the direction that the address says; else the first, the most first. */
  private read(): [number, boolean] {
    const [, sign = "", name = ""] = /^#?(-?)(\w+)$/.exec(this.line.read()) ?? [];
    const at = Math.max(0, this.table.scores.indexOf(name));
    return [at, LESS_FIRST.includes(this.table.scores[at]!) === (sign === "-")];
  }

  private order(sort: number, down: boolean): void {
    [this.sort, this.down] = [sort, down];
    const usual = !LESS_FIRST.includes(this.table.scores[sort]!);
    this.line.write(`${usual === down ? "" : "-"}${this.table.scores[sort]!}`, false);
    this.show();
  }

  private what(score: number): string {
    const name = this.table.scores[score]!;
    return this.table.words[name]?.what ?? name;
  }

  private get colours(): Ramp {
    return ramp("regard", this.theme.dark());
  }

  private most(score: number): number {
    return Math.max(0, ...this.table.heads.map(({ mean }) => mean[score] ?? 0));
  }

  private show(): void {
    const { table } = this;
    const layers = new Set(table.heads.map(({ layer }) => layer)).size;
    const more = [table.truncated ? `${table.truncated.toLocaleString("en")} truncated` : "", table.empty ? `${table.empty.toLocaleString("en")} empty ones left out` : ""].filter(Boolean);
    const facts = [many(table.heads.length, "head"), `${many(layers, "attention layer")}`, many(table.texts, "text"), ...more].join(" · ");
    const options = table.scores.map((name, at): [string, string] => [String(at), `${name}: ${this.what(at)}`]);
    const focus = (document.activeElement as HTMLElement | null)?.dataset.focus;
    this.main.replaceChildren(
      h(
        "section", { class: "page survey", "aria-label": "What heads do over many texts" },
        h("header", { class: "headline" }, h("h1", { text: "What heads do over many texts" }), h("p", { class: "facts" }, h("bdi", { text: shorten(table.model, 60) }), ` · ${facts}`)),
        h(
          "div", { class: "survey-body" },
          h("div", { class: "heat" }, select("Score", options, String(this.sort), (at) => this.order(Number(at), !LESS_FIRST.includes(table.scores[Number(at)]!))), this.heat, this.legend(), this.readout),
          this.rows,
        ),
      ),
    );
    this.fillHeat();
    this.fillTable();
    if (focus) this.main.querySelector<HTMLElement>(`[data-focus="${focus}"]`)?.focus();
  }

  private legend(): HTMLElement {
    const scale = h("div", { class: "scale", "aria-hidden": "true" });
    const stops = Array.from({ length: 9 }, (_, at) => this.colours(onScale(at / 8, 1, "linear")));
    scale.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    return h("div", { class: "legend" }, scale, h("div", { class: "ends" }, h("span", { text: "0" }), h("span", { text: spell(this.most(this.sort)) })));
  }

  private tell(head: Head, score: number): string {
    const [mean, std, texts] = [head.mean[score]!, head.std[score]!, head.texts[score]!];
    if (mean === null) return `no text had it`;
    return `${mean.toFixed(3)}${std === null ? "" : ` ± ${std.toFixed(3)}`}, in ${many(texts, "text")}`;
  }

  private paint(cell: HTMLElement, value: number | null, max: number): void {
    cell.classList.toggle("missing", value === null);
    if (value === null) return;
    const ground = this.colours(onScale(Math.max(0, value), max, "linear"));
    cell.style.backgroundColor = ground;
    cell.style.color = inkOn(ground);
  }

  /** Layer × head; pointing at a cell says its number, choosing it shows its row. */
  private fillHeat(): void {
    const max = this.most(this.sort);
    const lines = new Map<string, HTMLElement>();
    for (const [at, head] of this.table.heads.entries()) {
      const line = lines.get(head.layer) ?? h("div", { class: "line" }, h("span", { class: "name", text: head.layer }));
      lines.set(head.layer, line);
      const said = `${head.layer}.${head.head} ${this.what(this.sort)}: ${this.tell(head, this.sort)}`;
      const say = () => (this.readout.textContent = said);
      const cell = h("button", { type: "button", class: "cell", title: said, "aria-label": said, "data-at": at, on: { pointerenter: say, focus: say, click: () => this.reveal(at) } });
      this.paint(cell, head.mean[this.sort]!, max);
      line.append(cell);
    }
    this.heat.style.setProperty("--heads", String(Math.max(...[...lines.values()].map((line) => line.children.length - 1))));
    this.heat.replaceChildren(h("p", { class: "hint", text: "Rows are layers, columns heads." }), ...lines.values());
    this.readout.textContent = "Point at a head to read its mean ± standard deviation over texts.";
    rove(this.heat, [".cell"]);
  }

  private sorted(): number[] {
    const rank = (at: number) => this.table.heads[at]!.mean[this.sort] ?? null;
    return [...this.table.heads.keys()].sort((a, b) => {
      const [one, two] = [rank(a), rank(b)];
      if (one === null || two === null) return Number(one === null) - Number(two === null) || a - b;
      return (this.down ? two - one : one - two) || a - b;
    });
  }

  private fillTable(): void {
    const { heads, scores } = this.table;
    const order = this.sorted();
    const title = (name: string, at: number) => {
      const chosen = at === this.sort;
      const first = !LESS_FIRST.includes(name);
      return h(
        "th", { scope: "col", "aria-sort": chosen ? (this.down ? "descending" : "ascending") : "none" },
        h("button", { type: "button", title: `Sort by ${this.what(at)}`, "data-focus": `sort-${name}`, on: { click: () => this.order(at, chosen ? !this.down : first) } }, name, h("span", { "aria-hidden": "true", text: chosen ? (this.down ? " ↓" : " ↑") : "" })),
      );
    };
    const tops = scores.map((_, at) => this.most(at));
    const shown = this.all ? order : order.slice(0, ROWS);
    const body = shown.map((at) => {
      const head = heads[at]!;
      const cells = scores.map((_, score) => {
        const [mean, std] = [head.mean[score]!, head.std[score]!];
        const cell = h("td", { title: `${this.what(score)}: ${this.tell(head, score)}` }, h("span", { text: spell(mean) }), std === null ? null : h("span", { class: "spread", text: ` ±${spell(std)}` }));
        this.paint(cell, mean, tops[score]!);
        return cell;
      });
      return h("tr", { "data-at": at, tabindex: -1 }, h("th", { scope: "row", text: `${head.layer}.${head.head}` }), ...cells);
    });
    const caption = h("caption", { class: "unseen", text: "Each head by layer and number; each score as its mean and standard deviation over texts" });
    const list = h("table", {}, caption, h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Head" }), ...scores.map(title))), h("tbody", {}, ...body));
    const rest = order.length - shown.length;
    const button = rest > 0 ? h("button", { type: "button", class: "plain", text: `Show ${many(rest, "more head")}`, on: { click: () => { this.all = true; this.fillTable(); this.rows.querySelector<HTMLElement>(`tr[data-at="${order[ROWS]}"]`)?.focus({ preventScroll: true }); } } }) : null;
    this.rows.replaceChildren(list, ...(button ? [button] : []));
  }

  /** Show the row of a head. */
  private reveal(at: number): void {
    const find = () => this.rows.querySelector<HTMLElement>(`tr[data-at="${at}"]`);
    if (!find()) {
      this.all = true;
      this.fillTable();
    }
    this.rows.querySelector(".pointed")?.classList.remove("pointed");
    const row = find();
    row?.classList.add("pointed");
    row?.scrollIntoView({ block: "nearest" });
  }
}
